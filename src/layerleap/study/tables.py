"""Tables of a study, described as data: which rows to show, and how each column is written.

In: a finished study. Out: columns that the report and the terminal lay out, whatever study it is.
"""

from layerleap.results.columns import (
    GOOD_OR_BAD as GOOD_OR_BAD,
    Column as Column,
    Row as Row,
    Table as Table,
    estimate as estimate,
)

SMALLEST_P = 1e-300  # the smallest p-value that is told apart: floats end soon after


def percent(share: float, digits: int | None = None) -> str:
    """A share as it is written in sentences: 0.381 is "38 %", 0.0042 is "0.4 %"."""
    if digits is None:
        digits = 1 if 0 < abs(share) < 0.01 else 0
    return f"{100 * share:.{digits}f} %"


def bounded(p: float) -> float:
    """A p-value that never underflows to 0: what is below `SMALLEST_P` becomes that bound."""
    return max(p, SMALLEST_P)


def p_words(p: float) -> str:
    """A p-value as it is written in sentences."""
    return f"p < {SMALLEST_P:g}" if p <= SMALLEST_P else f"p = {p:.2g}"


P_VALUE = Column("p", form="{:.2g}", words={SMALLEST_P: f"< {SMALLEST_P:g}"})
