"""The evidence of one position while its token is on its way through the layers.

In: states of a layer, as a pass gets there. Out: `Evidence` of the layers checked so far, the same
numbers that a finished pass gives for them; and the logits, if they had to be computed.

Only what the rule needs is computed: a reading costs a head, a cosine next to nothing.
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


# Columns that a rule of the state alone does not use, for one row and one layer.
_UNKNOWN, _NO_TOKEN = torch.full((1, 1), torch.nan), torch.full((1, 1), -1)
_FIRST = torch.zeros(1, dtype=torch.long)


class LiveChecks:
    """Evidence of one position, with a column for every layer that was checked."""

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
        # At the last layer checked, if computed: logits of all tokens, or of the shortlist.
        self.logits: Tensor | None = None
        self.shortlist_logits: Tensor | None = None
        self._columns: dict[str, list[Tensor]] = {name: [] for name in COLUMNS}
        self._extra: dict[str, list[Tensor]] = {name: [] for name in (*self.extra, "size")}

    def __call__(self, layer: int, before: Tensor, h: Tensor) -> bool:
        """Check h[layer] of one row; True if the rule stops there."""
        if self.rule.needs == "state":
            return self._check_state(layer, before, h)
        self.layers.append(layer)
        self.logits = self.shortlist_logits = None
        unknown = torch.full((1,), torch.nan)
        values = dict.fromkeys(COLUMNS, unknown) | {"top": torch.full((1,), -1)}
        size = unknown
        if self.rule.needs == "reading":
            values["cosine"] = torch.cosine_similarity(before.float(), h.float()).cpu()
            state = self.lens.map(layer)(h)
            size = state.float().norm(dim=-1).clamp_min(1e-30).log().cpu()
            values |= self._read(state)
        for name in COLUMNS:
            self._columns[name].append(values[name])
        self._extra["size"].append(size)
        for name, compute in self.extra.items():
            self._extra[name].append(compute(h, layer).cpu())  # as precise as in a replay
        return bool(self.rule.stops(self.evidence())[0, -1])

    def _check_state(self, layer: int, before: Tensor, h: Tensor) -> bool:
        """The same for a rule of the state alone, which needs no other layer.

        It does as little as possible: in a small model a check of a tenth of a millisecond costs
        what one skipped layer saves.
        """
        extra = {name: compute(h, layer).cpu()[:, None] for name, compute in self.extra.items()}
        cosine = _UNKNOWN
        if not extra:
            cosine = torch.cosine_similarity(before.float(), h.float()).cpu()[:, None]
        evidence = LiveEvidence(
            _NO_TOKEN, _UNKNOWN, _UNKNOWN, _UNKNOWN, cosine, _FIRST, _FIRST, (layer,), extra=extra
        )
        return bool(self.rule.stops(evidence)[0, 0])

    def _read(self, state: Tensor) -> dict[str, Tensor]:
        if self.shortlist is None:
            self.logits = self.lens.transformer.logits(state)
            reading = Distribution(self.logits)
            top = reading.top
        else:
            self.shortlist_logits = self.shortlist.logits(state)
            reading = Distribution(self.shortlist_logits)
            top = self.shortlist.ids[reading.top.cpu().long()]
        return {
            "top": top.cpu(), "p1": reading.p1.cpu(), "p2": reading.second().cpu(),
            "entropy": reading.entropy.cpu(),
        }  # fmt: skip

    def evidence(self) -> Evidence:
        """All columns so far."""
        columns = {name: torch.stack(values, 1) for name, values in self._columns.items()}
        extra = {name: torch.stack(values, 1) for name, values in self._extra.items()}
        return LiveEvidence(
            **columns, position=torch.tensor([self.position]), document=_FIRST,
            layers=tuple(self.layers), extra=extra,
        )  # fmt: skip
