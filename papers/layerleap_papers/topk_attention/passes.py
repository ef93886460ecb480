"""The model with and without edits, compared row by row.

In: batches of text, and edits. Out: for every kept row how far the edited model's output is from
its own, and how much worse it predicts the text. Nothing V-sized is kept: the exact last states
are, and logits live for one chunk of rows.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerleap import Transformer
from layerleap.errors import BadText
from layerleap.lens import ANY, POSITIVE, SHARE, Bounds, Reference, chunks, mean_interval
from layerleap.models import Edit
from layerleap.stream import Batch
from layerleap.study import Row

MEASURES = ("kl", "agreement", "loss")
POSSIBLE = (POSITIVE, SHARE, ANY)  # values of each


@dataclass(frozen=True, eq=False)
class Measured:
    """What edits change, one value per row."""

    kl: Tensor  # KL(model || edited model), nats
    agreement: Tensor  # 1 where the top output is the model's own
    loss: Tensor  # how much -log p of the right output grows, nats; NaN where it is not known

    def columns(self) -> Tensor:
        """(row, measure)."""
        return torch.stack([getattr(self, name) for name in MEASURES], dim=1).double()


@dataclass(frozen=True, eq=False)
class Rows:
    """Kept rows of some texts, and the model's own last states there."""

    model: Transformer
    batches: tuple[Batch, ...]
    states: tuple[Tensor, ...]  # by batch: (row, d_model), or (row, pos, d_model)
    documents: Tensor  # (row,)
    gold: Tensor  # (row,): the right output, -1 unknown
    visible: Tensor  # (row,): how many positions self-attention sees from there

    @classmethod
    def of(
        cls, model: Transformer, batches: Iterable[Batch], tell: Callable[[int], None]
    ) -> "Rows":
        """Run the model once over the batches."""
        kept, states, n = [], [], 0
        for batch in batches:
            tell(n)
            n += batch.n_texts
            kept.append(batch)
            states.append(last_states(model, batch))
        if not kept:
            raise BadText("there is no text to read")
        gold = [torch.full_like(b.documents, -1) if b.gold is None else b.gold for b in kept]
        return cls(
            model,
            tuple(kept),
            tuple(states),
            torch.cat([batch.documents for batch in kept]),
            torch.cat(gold),
            torch.cat([_visible(model, batch) for batch in kept]),
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
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        start = 0
        for own, others in zip(self.states, states, strict=True):
            gold = self.gold[start : start + len(own)]
            start += len(own)
            for part in chunks(len(own), self.model.d_vocab):
                parts.append(self._compare(own[part], others[part], gold[part]))
        return Measured(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _compare(self, own: Tensor, others: Tensor, gold: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        reference = Reference(self.model.logits(own))
        logits = self.model.logits(others).float()
        found = reference.compare(logits)
        place = gold.clamp_min(0)[:, None].to(logits.device)
        log_p = [
            z.gather(1, place)[:, 0] - norm
            for z, norm in ((reference.logits, reference.log_norm), (logits, logits.logsumexp(-1)))
        ]
        loss = (log_p[0] - log_p[1]).cpu().masked_fill(gold < 0, torch.nan)
        return found.kl.cpu(), (found.rank == 0).float().cpu(), loss

    def estimates(self, columns: Tensor, bounds: Sequence[Bounds] = (ANY,)) -> list[Row]:
        """Means of (row, column) with intervals over documents; NaN rows are left out.

        Args:
            columns: (row, column).
            bounds: possible values of each column, or of all.
        """
        rows = []
        known = ~columns.isnan()
        each = bounds if len(bounds) > 1 else tuple(bounds) * columns.shape[1]
        for column, is_known, possible in zip(columns.T, known.T, each, strict=True):
            if not is_known.any():
                rows.append({"value": None, "low": None, "high": None, "rows": 0, "documents": 0})
                continue
            found = mean_interval(column[is_known][:, None], self.documents[is_known], possible)
            rows.append(found[0].to_dict())
        return rows

    def table(self, measured: Measured, **about: object) -> list[Row]:
        """One row per measure, with its interval."""
        found = self.estimates(measured.columns(), POSSIBLE)
        return [
            {**about, "measure": name, **row}
            for name, row in zip(MEASURES, found, strict=True)
            if row["value"] is not None
        ]


@torch.no_grad()
def last_states(model: Transformer, batch: Batch) -> Tensor:
    """h[n_layers] at the kept rows of a batch, with the edits in force."""
    last = model.n_layers
    return model.capture(batch.inputs, layers=[last], keep=batch.keep).states[last]


def _visible(model: Transformer, batch: Batch) -> Tensor:
    """How many positions each row's self-attention sees, windows not counted."""
    if model.kind == "next-token":
        return batch.positions + 1
    return batch.mask.sum(1).cpu()[batch.text_of_row]
