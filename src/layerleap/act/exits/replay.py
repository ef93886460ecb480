"""Replay: where every row would have exited, exactly, without running the model again.

In: a rule (or a family of them) and `Evidence` of a finished pass.
Out: exit layers and agreement per row; curves with intervals over documents; sweeps.

A row exits at the first layer that stops. One that never stops exits at the last layer, where it
agrees by definition: the reading there is the model's own answer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerleap.act.exits.evidence import Evidence
from layerleap.act.exits.families import Family
from layerleap.act.exits.rules import Rule
from layerleap.errors import BadSettings
from layerleap.read.metrics import Bootstrap, finite

if TYPE_CHECKING:
    from layerleap.act.exits.cost import Cost


@dataclass(frozen=True, eq=False)
class Exits:
    """Where rows left, and whether they left with the model's own top token."""

    layer: Tensor  # (row,)
    agrees: Tensor  # (row,) bool
    n_layers: int

    @property
    def layers(self) -> float:
        """Mean number of blocks run."""
        return self.layer.double().mean().item()

    @property
    def saved(self) -> float:
        """Mean number of blocks not run."""
        return self.n_layers - self.layers

    @property
    def agreement(self) -> float:
        """Share of rows that left with the model's own top token."""
        return self.agrees.double().mean().item()


@dataclass(frozen=True, eq=False)
class Sweep:
    """The exits of many knobs of one family: (row, knob)."""

    family: Family
    knobs: tuple[float, ...]
    layer: Tensor
    agrees: Tensor
    n_layers: int

    def exits(self, index: int) -> Exits:
        """The exits of one knob."""
        return Exits(self.layer[:, index], self.agrees[:, index], self.n_layers)


def require_finished(evidence: Evidence) -> None:
    """Refuse evidence that cannot be replayed: its last column must be the model's own answer."""
    if len(evidence) == 0:
        raise BadSettings("the evidence has no rows; at least one was wanted")
    wrong = ~evidence.agrees[:, -1]
    if wrong.any():
        raise BadSettings(
            f"the last column (layer {evidence.layers[-1]}) is not the model's own answer in "
            f"{int(wrong.sum())} of {len(evidence)} rows; replay needs evidence up to the last "
            "layer"
        )


def replay(rule: Rule, evidence: Evidence) -> Exits:
    """Where every row leaves under `rule`."""
    require_finished(evidence)
    stops = rule.stops(evidence).clone()
    stops[:, -1] = True  # who never stopped before leaves here
    column = stops.int().argmax(1)  # the first of equal ones, as torch promises
    return _exits(evidence, column)


def _exits(evidence: Evidence, column: Tensor) -> Exits:
    layers = torch.tensor(evidence.layers)
    agrees = evidence.agrees.gather(1, column.reshape(len(evidence), -1)).reshape(column.shape)
    return Exits(layers[column], agrees, evidence.layers[-1])


def sweep(
    family: Family, evidence: Evidence, knobs: Sequence[float] | None = None, *, n: int = 50
) -> Sweep:
    """The exits of many knobs at once, each as `replay` gives them.

    A row exits at the first layer whose score is above the bar, so where the running maximum of
    its scores passes it: one binary search per row and knob.

    Args:
        family: which rules.
        evidence: which rows.
        knobs: which values; the family's own grid of `n` when None.
        n: how many values that grid has.
    """
    require_finished(evidence)
    chosen = family.grid(n, evidence.layers[-1]) if knobs is None else list(knobs)
    for knob in chosen:
        family.at(knob)  # refuses a knob without meaning
    scores, offset = family.parts(evidence)
    values = torch.tensor(chosen, dtype=torch.float64)
    bars = family.kind.slope * values + offset[:, None]  # (row, knob)
    running = scores[:, :-1].cummax(1).values.contiguous()
    column = torch.searchsorted(running, bars.contiguous(), right=True)
    exits = _exits(evidence, column)
    return Sweep(family, tuple(chosen), exits.layer, exits.agrees, exits.n_layers)


def curve(
    rules: Iterable[Rule],
    evidence: Evidence,
    cost: "Cost | None" = None,
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """One row per rule: layers run and saved, FLOPs, agreement, with 95 % intervals.

    `low` and `high` are of the agreement, `saved_low` and `saved_high` of the layers saved.
    `flops` is the mean per token, checks included, or None without a cost.
    """
    rules = list(rules)
    if not rules:
        raise BadSettings("no rule to replay; at least one was wanted")
    exits = [replay(rule, evidence) for rule in rules]
    bootstrap = Bootstrap(evidence.document, resamples=resamples, seed=seed)
    agreement = bootstrap.estimates(torch.stack([e.agrees for e in exits], 1))
    saved = bootstrap.estimates(torch.stack([e.n_layers - e.layer for e in exits], 1))
    return [
        {
            "rule": rule.name,
            "knob": getattr(rule, getattr(rule, "knob", ""), None),
            "layers": left.layers,
            "saved": left.saved,
            "saved_low": finite(s.low),
            "saved_high": finite(s.high),
            "flops": None if cost is None else cost.of(left, rule, evidence.layers),
            "agreement": a.value,
            "low": finite(a.low),
            "high": finite(a.high),
            "rows": a.rows,
            "documents": a.documents,
        }
        for rule, left, a, s in zip(rules, exits, agreement, saved, strict=True)
    ]
