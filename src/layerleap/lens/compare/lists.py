"""Lists in a few words: what could not be compared and why, and ranges of blocks."""

from collections.abc import Mapping, Sequence

FEW = 3


def listed(missing: Mapping[str, str]) -> list[str]:
    """The first few of them, one a line, and how many more there are."""
    lines = [f"{name}: {reason}" for name, reason in missing.items()]
    more = len(lines) - FEW
    return lines if more <= 0 else [*lines[:FEW], f"and {more} more that could not be compared"]


def ranges(numbers: Sequence[int]) -> str:
    """Whole numbers in order, neighbours as a range: "1-27, 30"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
