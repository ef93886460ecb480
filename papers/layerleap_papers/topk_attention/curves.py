"""How curves over k are written, drawn and judged: for attention, for FFNs and for budgets.

In: tables with one row per k and measure. Out: words, points of figures, and the row that a claim
is about.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from layerleap import StudyResult
from layerleap.study import in_words

# Names of the measures as panels of figures.
PANELS = {
    "kl": "KL to the whole model, nats",
    "agreement": "agreement with the whole model",
    "loss": "growth of the loss, nats",
}
SAME_LOSS = 0.02  # nats: a loss that grows by less counts as nearly the same
SAME_TOP = 0.95  # agreement above which outputs count as nearly the same
EIGHTH = 1 / 8


def kept_share(seen: Tensor, k: int) -> float:
    """The share of its visible keys that a row keeps, as a mean over rows that see so many."""
    return float((seen.double().clamp_max(k) / seen).mean())


def nats(row: Mapping[str, Any] | None) -> str:
    """An estimate in nats with its interval."""
    return in_words(row, ".3f", "nats")


def shares(row: Mapping[str, Any] | None) -> str:
    """A share with its interval, in percent."""
    return in_words(row, "%")


def nearest(result: StudyResult, table: str, key: str, wanted: float, **where: Any) -> float | None:
    """The value of `key` in a table that is nearest to `wanted`; the lower of two.

    None if all are more than twice, or less than half as much.
    """
    known = sorted({row[key] for row in result.rows(table, **where)})
    known = [value for value in known if wanted / 2 <= value <= 2 * wanted]
    return min(known, key=lambda value: abs(value - wanted), default=None)
