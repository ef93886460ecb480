"""What a rule gets to see of one position while it is on its way.

In: states of a layer, as a pass gets there. Out: `Evidence` of the layers checked so far, the same
numbers that a finished pass would give for them; and the logits, if they had to be made.

Only what the rule needs is computed: a reading costs the head, a cosine next to nothing.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from layerleap.act.decode.shortlist import Shortlist
from layerleap.act.exits.evidence import COLUMNS, Evidence, LiveEvidence
from layerleap.act.exits.rules import Rule
from layerleap.read.lens import Lens
from layerleap.read.metrics import Distribution

Extra = Callable[[Tensor, int], Tensor]  # h[layer] and the layer: one number per row


# What a rule of the state alone does not look at, one row and one layer of it.
_NOTHING, _NO_TOKEN = torch.full((1, 1), torch.nan), torch.full((1, 1), -1)
_FIRST = torch.zeros(1, dtype=torch.long)


class LiveChecks:
    """Evidence of one position, a column for every layer that was checked."""

    def __init__(
        self,
        lens: Lens,
        rule: Rule,
        position: int,
        *,
        shortlist: Shortlist | None = None,
        extra: Mapping[str, Extra] | None = None,
    ) -> None:
        self.lens, self.rule, self.position, self.shortlist = lens, rule, position, shortlist
        self.extra = extra or {}
        self.layers: list[int] = []
        # Of the last layer checked, if they had to be made: of all tokens, or of the shortlist's.
        self.logits: Tensor | None = None
        self.few: Tensor | None = None
        self._columns: dict[str, list[Tensor]] = {name: [] for name in COLUMNS}
        self._extra: dict[str, list[Tensor]] = {name: [] for name in (*self.extra, "size")}

    def __call__(self, layer: int, before: Tensor, h: Tensor) -> bool:
        """Look at h[layer] of one row; True if the rule stops there."""
        if self.rule.needs == "state":
            return self._glance(layer, before, h)
        self.layers.append(layer)
        self.logits = self.few = None
        nothing = torch.full((1,), torch.nan)
        found = dict.fromkeys(COLUMNS, nothing) | {"top": torch.full((1,), -1)}
        sizes = nothing
        if self.rule.needs == "reading":
            found["cosine"] = torch.cosine_similarity(before.float(), h.float()).cpu()
            state = self.lens.map(layer)(h)
            sizes = state.float().norm(dim=-1).clamp_min(1e-30).log().cpu()
            found |= self._read(state)
        for name in COLUMNS:
            self._columns[name].append(found[name])
        self._extra["size"].append(sizes)
        for name, make in self.extra.items():
            self._extra[name].append(make(h, layer).cpu())  # as precise as a replay has it
        return bool(self.rule.stops(self.evidence())[0, -1])

    def _glance(self, layer: int, before: Tensor, h: Tensor) -> bool:
        """The same for a rule of the state alone, which needs no other layer: as little as can be.

        At a small model a check of a tenth of a millisecond eats what leaving a layer early saves.
        """
        extra = {name: make(h, layer).cpu()[:, None] for name, make in self.extra.items()}
        cosine = _NOTHING
        if not extra:
            cosine = torch.cosine_similarity(before.float(), h.float()).cpu()[:, None]
        evidence = LiveEvidence(
            _NO_TOKEN, _NOTHING, _NOTHING, _NOTHING, cosine, _FIRST, _FIRST, (layer,), extra=extra
        )
        return bool(self.rule.stops(evidence)[0, 0])

    def _read(self, state: Tensor) -> dict[str, Tensor]:
        if self.shortlist is None:
            self.logits = self.lens.transformer.logits(state)
            seen = Distribution(self.logits)
            top = seen.top
        else:
            self.few = self.shortlist.logits(state)
            seen = Distribution(self.few)
            top = self.shortlist.ids[seen.top.cpu().long()]
        return {
            "top": top.cpu(), "p1": seen.p1.cpu(), 
            "entropy": seen.entropy.cpu(),
            "p2": seen.second().cpu(),
        }  # fmt: skip

    def evidence(self) -> Evidence:
        """All columns so far."""
        columns = {name: torch.stack(values, 1) for name, values in self._columns.items()}
        extra = {name: torch.stack(values, 1) for name, values in self._extra.items()}
        place = torch.tensor([self.position])
        return LiveEvidence(
            **columns, position=place, document=torch.zeros(1, dtype=torch.long),
            layers=tuple(self.layers), extra=extra,
        )  # fmt: skip
