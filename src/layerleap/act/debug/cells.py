"""Cells: what a lens reads at one layer and position, as the debugger's grid shows it.

In: rows of states of a prompt, recorded and edited. Out: `Cell`s: a few numbers each. Logits live
for one chunk of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from layerleap.lens.lens import Lens
from layerleap.lens.metrics import Reference
from layerleap.lens.top import top_k


@dataclass(frozen=True)
class Cell:
    """One reading; probabilities come with ranks, 0 = top."""

    layer: int
    position: int
    top: tuple[tuple[int, float], ...]  # ids and probabilities, best first
    final: tuple[float, int]  # of the token that the unedited model predicts here
    watch: tuple[float, int] | None  # of the watched token
    agrees: bool  # the top token is the final one of this run, edited or not
    kl: float  # KL(final answer of this run || reading), nats
    entropy: float  # of the reading, nats
    follow: dict[int, tuple[float, int]] = field(default_factory=dict)  # of further tokens
    change: float | None = None  # with edits: KL(reading before || reading after), nats

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**vars(self), "changed": self.change is not None}


class CellReader:
    """Reads cells through one lens, with `top` tokens each and one watched token."""

    def __init__(self, lens: Lens, top: int, watch: int | None, follow: Sequence[int] = ()) -> None:
        self.lens, self.top, self.watch = lens, min(top, lens.transformer.d_vocab), watch
        self.follow = follow

    @torch.no_grad()
    def logits(self, rows: Sequence[tuple[int, Tensor]]) -> Tensor:
        """Logits of rows of several layers, each mapped by its own map, in one pass of the tail."""
        mapped = [self.lens.map(layer)(h) for layer, h in rows]
        device = mapped[-1].device
        return self.lens.transformer.logits(torch.cat([h.to(device) for h in mapped])).float()

    def cells(
        self,
        places: Sequence[tuple[int, int]],
        logits: Tensor,
        answer: Reference,
        finals: Tensor,
        before: Tensor | None = None,
    ) -> list[Cell]:
        """The cells of one layer at several positions, or of several layers at one position.

        Args:
            places: layer and position of each row.
            answer: the final answer of the same run, per position.
            finals: the token that the unedited model predicts, per position.
            before: logits of the recorded run at these rows, if `logits` are of an edited one.
        """
        finals = finals.expand(len(places))
        compared = answer.compare(logits.to(answer.p.device))
        agrees = (compared.top == answer.top).tolist()
        kl, entropy = compared.kl.tolist(), compared.entropy.tolist()
        values, best = top_k(logits, self.top)
        log_norm = logits.logsumexp(-1)
        ids, probs = best.tolist(), (values - log_norm[:, None]).exp().tolist()
        final = self._followed(logits, log_norm, finals)
        followed = {
            index: self._followed(logits, log_norm, torch.full_like(finals, index))
            for index in {*self.follow, *(() if self.watch is None else (self.watch,))}
        }
        change = [None] * len(places) if before is None else _kl(before, logits).tolist()
        return [
            Cell(
                *place,
                tuple(zip(ids[row], probs[row], strict=True)),
                final[row],
                None if self.watch is None else followed[self.watch][row],
                agrees[row],
                kl[row],
                entropy[row],
                {index: followed[index][row] for index in self.follow},
                change[row],
            )
            for row, place in enumerate(places)
        ]

    @staticmethod
    def _followed(logits: Tensor, log_norm: Tensor, ids: Tensor) -> list[tuple[float, int]]:
        """Probability and rank of one token per row; equal logits are ordered by id."""
        ids = ids.to(logits.device)[:, None]
        chosen = logits.gather(-1, ids)
        lower = torch.arange(logits.shape[-1], device=logits.device) < ids
        ranks = ((logits > chosen) | ((logits == chosen) & lower)).sum(-1)
        return list(zip((chosen[:, 0] - log_norm).exp().tolist(), ranks.tolist(), strict=True))


def _kl(before: Tensor, after: Tensor) -> Tensor:
    """KL(before || after) of logits, per row, nats."""
    p, q = before.log_softmax(-1), after.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp_min(0)
