"""What followed the last few tokens when they stood in the text before.

In: tokens as they come. Out: a continuation, and how many tokens before it were the same.
"""

LONGEST = 4  # tokens of context looked for at most; longer matches say little more
SHORTEST = 2  # one token alone is what the draft table is for


class Lookup:
    """Where every short run of tokens was last followed by something."""

    def __init__(self, *, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        self.longest, self.shortest = longest, shortest
        self.ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # a run, and the place after its last end

    def add(self, token: int) -> None:
        """One more token; the runs that end before it are now followed by it."""
        end = len(self.ids)
        for size in range(self.shortest, min(self.longest, end) + 1):
            self._after[tuple(self.ids[end - size : end])] = end
        self.ids.append(token)

    def extend(self, tokens: list[int]) -> None:
        """Several more tokens."""
        for token in tokens:
            self.add(token)

    def find(self, most: int) -> tuple[list[int], int]:
        """At most `most` tokens that followed the longest run known, and its size (0: none)."""
        for size in range(min(self.longest, len(self.ids)), self.shortest - 1, -1):
            place = self._after.get(tuple(self.ids[-size:]))
            if place is not None:
                return self.ids[place : place + most], size
        return [], 0
