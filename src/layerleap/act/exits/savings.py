"""Layers saved at a target agreement, with intervals over documents.

In: a family of rules and `Evidence` of a finished pass.
Out: per target the largest mean saving of any knob whose agreement reaches it, either over all
knobs that make a difference ("exact") or, as in the paper, by linear interpolation between the
knobs of a grid ("curve").

The exact method sorts all (row, layer) at which some knob makes a row exit. Going from strict to
loose, each one moves one row to an earlier exit and changes the sums of layers and agreements by a
known amount. Cumulative sums then cover every knob at once, for any weights of the documents.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from layerleap.act.exits.evidence import Evidence
from layerleap.act.exits.replay import require_finished, sweep
from layerleap.act.exits.rules import Family
from layerleap.errors import BadSettings, check_choice
from layerleap.lens.intervals import finite, resample_in_parts, resampled

TARGETS = (0.9, 0.95, 0.98, 0.99)
CHUNK = 2**20  # (resample, event) entries held at a time, a few copies of 8 MB in float64


@dataclass(frozen=True)
class Saving:
    """The layers saved at a target agreement."""

    target: float
    saved: float  # mean layers saved
    low: float | None  # 95 % interval over documents; None with a single document
    high: float | None
    agreement: float  # agreement at that knob; at an interpolated point, the target
    knob: float | None  # None: no knob that exits reaches the target, or it was interpolated
    method: str
    rows: int
    documents: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {key: finite(v) if isinstance(v, float) else v for key, v in vars(self).items()}


def saved_at(
    family: Family,
    evidence: Evidence,
    targets: Sequence[float] = TARGETS,
    *,
    method: Literal["exact", "curve"] = "exact",
    knobs: Sequence[float] | None = None,
    resamples: int = 200,
    seed: int = 0,
) -> list[Saving]:
    """The largest mean saving whose agreement reaches each target.

    Args:
        family: the rules to choose from.
        evidence: the rows.
        targets: agreements from 0 to 1.
        method: "exact" considers all knobs, "curve" interpolates between those of a grid.
        knobs: that grid; None takes the family's own.
        resamples: bootstrap resamples of documents for the interval.
        seed: seed of the bootstrap.
    """
    check_choice(method, ("exact", "curve"), "method")
    if method == "exact" and knobs is not None:
        raise BadSettings("knobs are for method 'curve'; 'exact' already considers all of them")
    for target in targets:
        if not 0 <= target <= 1:
            raise BadSettings(f"target {target} is not an agreement; expected 0 to 1")
    require_finished(evidence)
    names, group = evidence.document.unique(return_inverse=True)
    whole = torch.ones(1, len(names), dtype=torch.float64)
    weights = chain([whole], resample_in_parts(len(names), resamples, seed))
    if method == "exact":
        saved, agreement, knob = _exact(family, evidence, group, weights, targets)
    else:
        saved = _on_curve(family, evidence, group, weights, targets, knobs)
        agreement, knob = list(targets), [None] * len(targets)
    low, high = resampled(saved[0], saved[1:])
    ends = zip(low.tolist(), high.tolist(), strict=True)
    intervals = ends if len(names) > 1 else [(None, None)] * len(targets)
    columns = zip(targets, saved[0].tolist(), intervals, agreement, knob, strict=True)
    return [
        Saving(target, layers, *ends, share, value, method, len(evidence), len(names))
        for target, layers, ends, share, value in columns
    ]


@dataclass(frozen=True, eq=False)
class _Events:
    """Every (row, layer) that some knob turns into an exit, strict to loose; tensors (event,)."""

    strictness: Tensor  # knob at which it happens, with the sign that makes larger = stricter
    group: Tensor  # document of the row
    saved: Tensor  # change in layers saved
    agrees: Tensor  # change in agreement

    @classmethod
    def of(cls, family: Family, evidence: Evidence, group: Tensor) -> "_Events":
        scores, offset = family.parts(evidence)
        at = (scores - offset[:, None]) / abs(family.kind.slope)
        at = torch.where(at > _loosest(family), at, -torch.inf)  # out of reach of any knob
        running = at.cummax(1).values
        record = running > torch.nn.functional.pad(running[:, :-1], (1, 0), value=-torch.inf)
        record[:, -1] = False  # rows exit there anyway
        rows, columns = record.nonzero(as_tuple=True)
        # Where the row would exit at a stricter knob: its next record, or the last layer.
        index = torch.where(record, torch.arange(record.shape[1]), record.shape[1] - 1)
        later = index.flip(1).cummin(1).values.flip(1)  # first record at or after each column
        before = later[rows, (columns + 1)]
        order = at[rows, columns].argsort(descending=True, stable=True)
        rows, columns, before = rows[order], columns[order], before[order]
        layers, agrees = torch.tensor(evidence.layers).double(), evidence.agrees.double()
        return cls(
            at[rows, columns],
            group[rows],
            layers[before] - layers[columns],
            agrees[rows, columns] - agrees[rows, before],
        )

    @property
    def ends(self) -> Tensor:
        """The last event of each strictness: a knob lies below all events of one, or none."""
        is_last = torch.ones(len(self.strictness), dtype=torch.bool)
        is_last[:-1] = self.strictness[1:] != self.strictness[:-1]
        return is_last.nonzero()[:, 0]


def _loosest(family: Family) -> float:
    return family.kind.least if family.kind.slope > 0 else -family.kind.most


def _exact(
    family: Family,
    evidence: Evidence,
    group: Tensor,
    weights: Iterable[Tensor],
    targets: Sequence[float],
) -> tuple[Tensor, list[float], list[float | None]]:
    """Savings under weights of documents that come in parts; the first row is the whole text."""
    events = _Events.of(family, evidence, group)
    sizes, ends = torch.bincount(group).double(), events.ends
    best: list[Tensor] = []
    agreement: list[float] = [1.0] * len(targets)
    knob: list[float | None] = [None] * len(targets)
    if not len(ends):
        n = sum(map(len, weights))
        return torch.zeros(n, len(targets), dtype=torch.float64), agreement, knob
    step = max(1, CHUNK // len(events.group))
    for part in (part for some in weights for part in some.split(step)):
        total, of_event = (part @ sizes)[:, None], part[:, events.group]
        saved = (of_event * events.saved).cumsum(1)[:, ends] / total
        agreed = (total + (of_event * events.agrees).cumsum(1)[:, ends]) / total
        tops = [torch.where(agreed >= target, saved, -1.0).max(1) for target in targets]
        for n, top in enumerate(tops if not best else ()):
            if top.values[0] > 0:
                place = int(top.indices[0])
                agreement[n] = agreed[0, place].item()
                knob[n] = _knob(family, events.strictness[ends], place)
        best.append(torch.stack([top.values.clamp_min(0) for top in tops], 1))
    return torch.cat(best), agreement, knob


def _knob(family: Family, levels: Tensor, place: int) -> float:
    """A knob below levels[place] and not below the next level; halfway between real levels."""
    high = levels[place].item()
    after = levels[place + 1].item() if place + 1 < len(levels) else high - 1
    low = max(after, _loosest(family))
    if family.kind.is_integer:
        return high - 1
    return (low + high) / 2 * (1 if family.kind.slope > 0 else -1)


def _on_curve(
    family: Family,
    evidence: Evidence,
    group: Tensor,
    weights: Iterable[Tensor],
    targets: Sequence[float],
    knobs: Sequence[float] | None,
) -> Tensor:
    safest_first = sorted(
        family.grid(50, evidence.layers[-1]) if knobs is None else knobs,
        reverse=family.direction == "later",
    )
    swept = sweep(family, evidence, safest_first)
    columns = torch.cat([swept.n_layers - swept.layer, swept.agrees], 1).double()
    sizes = torch.bincount(group).double()
    sums = torch.zeros(len(sizes), columns.shape[1], dtype=torch.float64)
    sums.index_add_(0, group, columns)
    means = torch.cat([(part @ sums) / (part @ sizes)[:, None] for part in weights])
    saved, agreed = means.chunk(2, 1)
    return torch.stack([interpolated(saved, agreed, target) for target in targets], 1)


def interpolated(saved: Tensor, agreement: Tensor, target: float) -> Tensor:
    """The saving at the last point where each curve crosses `target`.

    Curves are (curve, knob), safest knob first. The curve is linear between the most aggressive
    knob that reaches the target and the next knob. It starts at no saving and full agreement.
    """
    start = torch.zeros(len(saved), 1, dtype=torch.float64)
    saved = torch.cat([start, saved.double()], 1)
    agreement = torch.cat([start + 1, agreement.double()], 1)
    index = torch.arange(saved.shape[1]).expand_as(saved)
    left = torch.where(agreement >= target, index, 0).amax(1, keepdim=True)
    right = (left + 1).clamp_max(saved.shape[1] - 1)
    s, a = saved.gather(1, left), agreement.gather(1, left)
    fall = a - agreement.gather(1, right)
    weight = torch.where(fall > 0, (a - target) / fall.clamp_min(1e-300), 0.0)
    return (s + weight * (saved.gather(1, right) - s))[:, 0]
