"""Prompt lookup: what followed the last few tokens when they occurred earlier in the text.

In: tokens as they come. Out: a continuation, and how many tokens before it matched.
"""

LONGEST = 4  # longest context to match; longer matches add little
SHORTEST = 2  # a single token is what the draft table is for


class Lookup:
    """For every short run of tokens, where it was last followed by something."""

    def __init__(self, *, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        self.longest, self.shortest = longest, shortest
        self.ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # from a run to the position after its end

    def add(self, token: int) -> None:
        """Append a token; it follows the runs that end before it."""
        end = len(self.ids)
        for size in range(self.shortest, min(self.longest, end) + 1):
            self._after[tuple(self.ids[end - size : end])] = end
        self.ids.append(token)

    def extend(self, tokens: list[int]) -> None:
        """Append several tokens."""
        for token in tokens:
            self.add(token)

    def find(self, most: int) -> tuple[list[int], int]:
        """Up to `most` tokens that followed the longest matching run, and its size (0: none)."""
        for size in range(min(self.longest, len(self.ids)), self.shortest - 1, -1):
            place = self._after.get(tuple(self.ids[-size:]))
            if place is not None:
                return self.ids[place : place + most], size
        return [], 0
