"""The model with and without edits, compared row by row; and how comparisons are written.

In: batches of text, and edits. Out: for every kept row how far the edited model's output is from
its own, and how much worse it predicts the text. Nothing V-sized is kept: the exact last states
are, and logits live for one chunk of rows.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerleap import StudyResult, Transformer
from layerleap.errors import BadText
from layerleap.lens import ANY, POSITIVE, SHARE, Bounds, Reference, chunks, mean_interval
from layerleap.models import Edit
from layerleap.stream import Batch
from layerleap.study import Axis, Figure, Row, below, in_words

# Measures as panels of figures.
PANELS = {
    "kl": "KL to the whole model, nats",
    "agreement": "agreement with the whole model",
    "loss": "growth of the loss, nats",
}
POSSIBLE = (POSITIVE, SHARE, ANY)  # values of each
SAME_LOSS = 0.02  # nats: a loss that grows by less counts as nearly the same
SAME_TOP = 0.95  # agreement above which outputs count as nearly the same
EIGHTH = 1 / 8
NO_LOSS = "the right outputs of this text are not known, so there is no loss"


class Measured(NamedTuple):
    """What edits change, one value per row."""

    kl: Tensor  # KL(model || edited model), nats
    agreement: Tensor  # 1 where the top output is the model's own
    loss: Tensor  # how much -log p of the right output grows, nats; NaN where it is not known

    def columns(self) -> Tensor:
        """(row, measure)."""
        return torch.stack(self, dim=1).double()


@dataclass(frozen=True, eq=False)
class Rows:
    """Kept rows of some texts, and the model's own last states there."""

    model: Transformer
    batches: tuple[Batch, ...]
    states: tuple[Tensor, ...]  # by batch: (row, d_model), or (row, pos, d_model)
    documents: Tensor  # (row,)
    gold: Tensor  # (row,): the right output, -1 unknown
    visible: Tensor  # (row,): how many positions self-attention sees, windows not counted

    @classmethod
    def of(
        cls, model: Transformer, batches: Iterable[Batch], on_step: Callable[[int], None]
    ) -> "Rows":
        """Run the model once over the batches."""
        read, states, n = [], [], 0
        for batch in batches:
            on_step(n)
            n += batch.n_texts
            read.append(batch)
            states.append(last_states(model, batch))
        if not read:
            raise BadText("there is no text to read")
        gold = [torch.full_like(b.documents, -1) if b.gold is None else b.gold for b in read]
        if model.kind == "next-token":
            visible = [batch.positions + 1 for batch in read]
        else:
            visible = [batch.mask.sum(1).cpu()[batch.text_of_row] for batch in read]
        documents = torch.cat([batch.documents for batch in read])
        return cls(
            model, tuple(read), tuple(states), documents, torch.cat(gold), torch.cat(visible)
        )

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def longest(self) -> int:
        """How many positions the longest text has."""
        return max(int(batch.mask.sum(1).max()) for batch in self.batches)

    def measure(self, *edits: Edit) -> Measured:
        """The model with these edits, against the model without them."""
        with self.model.edit(*edits):
            states = [last_states(self.model, batch) for batch in self.batches]
        return self.compared(states)

    @torch.no_grad()
    def compared(self, states: Sequence[Tensor]) -> Measured:
        """Other last states, by batch, against the model's own."""
        parts, start = [], 0
        for before, after in zip(self.states, states, strict=True):
            gold = self.gold[start : start + len(before)]
            start += len(before)
            for part in chunks(len(before), self.model.d_vocab):
                parts.append(self._compare(before[part], after[part], gold[part]))
        return Measured(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _compare(self, before: Tensor, after: Tensor, gold: Tensor) -> Measured:
        reference = Reference(self.model.logits(before))
        logits = self.model.logits(after).float()
        change = reference.compare(logits)
        place = gold.clamp_min(0)[:, None].to(logits.device)
        log_p = reference.logits.gather(1, place)[:, 0] - reference.log_norm
        edited_log_p = logits.gather(1, place)[:, 0] - logits.logsumexp(-1)
        loss = (log_p - edited_log_p).cpu().masked_fill(gold < 0, torch.nan)
        return Measured(change.kl.cpu(), (change.rank == 0).float().cpu(), loss)

    def estimates(self, columns: Tensor, *bounds: Bounds) -> list[Row]:
        """Means of (row, column) with intervals over documents; NaN rows are left out.

        Bounds are the possible values of each column, or of all.
        """
        rows = []
        possible = bounds if len(bounds) > 1 else (bounds or (ANY,)) * columns.shape[1]
        for column, limits in zip(columns.T, possible, strict=True):
            known = ~column.isnan()
            if known.any():
                mean = mean_interval(column[known][:, None], self.documents[known], limits)[0]
                rows.append(mean.to_dict())
            else:
                rows.append({"value": None, "low": None, "high": None, "rows": 0, "documents": 0})
        return rows

    def table(self, columns: Tensor, about: Row, bounds: Sequence[Bounds] = POSSIBLE) -> list[Row]:
        """One row per measure that is known, with its interval."""
        rows = zip(PANELS, self.estimates(columns, *bounds), strict=True)
        return [{**about, "measure": name, **row} for name, row in rows if row["value"] is not None]


@torch.no_grad()
def last_states(model: Transformer, batch: Batch) -> Tensor:
    """h[n_layers] at the kept rows of a batch, with the edits in force."""
    last = model.n_layers
    return model.capture(batch.inputs, layers=[last], keep=batch.keep).states[last]


def kept_share(visible: Tensor, k: float) -> float:
    """The share of its visible keys that a row keeps, as a mean over rows that see so many."""
    return float((visible.double().clamp_max(k) / visible).mean())


def nats(row: Mapping[str, Any] | None) -> str:
    """An estimate in nats with its interval."""
    return in_words(row, ".3f", "nats")


def shares(row: Mapping[str, Any] | None) -> str:
    """A share with its interval, in percent."""
    return in_words(row, "%")


def nearest(result: StudyResult, table: str, key: str, target: float, **where: Any) -> float | None:
    """The value of `key` in a table that is nearest to `target`; the lower of two.

    None if all are more than twice, or less than half as much.
    """
    known = sorted({row[key] for row in result.rows(table, **where)})
    known = [value for value in known if target / 2 <= value <= 2 * target]
    return min(known, key=lambda value: abs(value - target), default=None)


def cheapest(rows: Iterable[Row], key: str, kl: float) -> Row | None:
    """Of rows whose KL is clearly below `kl`, the one with the smallest `key`."""
    enough = [row for row in rows if below(row, kl) == "yes"]
    return min(enough, key=lambda row: row[key], default=None)


def curves(key: str, title: str, how: str, x: str, **more: Any) -> Figure:
    """Curves over what is kept, with a panel for each measure."""
    usual = {"share_y": False, "unit": "rows", "size": (3.7, 3.3)}
    return Figure(key, title, how, x=Axis(x, "log"), **{**usual, **more})
