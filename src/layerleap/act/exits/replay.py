"""Replay: where every row would exit, exactly, without running the model again.

In: a rule (or a family of rules) and `Evidence` of a finished pass.
Out: exit layers and agreement per row; curves with intervals over documents; sweeps.

A row exits at the first layer where the rule stops. A row that never stops exits at the last layer,
where it agrees by definition: the reading there is the model's own answer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerleap.act.exits.evidence import Evidence
from layerleap.act.exits.rules import Family, Never, Oracle, Rule
from layerleap.errors import BadSettings
from layerleap.lens.intervals import SHARE, Documents, Estimate, finite

if TYPE_CHECKING:
    from layerleap.act.exits.cost import Cost


@dataclass(frozen=True, eq=False)
class Exits:
    """Where rows exit, and whether they exit with the model's own top token."""

    layer: Tensor  # (row,) exit layers
    agrees: Tensor  # (row,) bool
    n_layers: int

    def __repr__(self) -> str:
        return (
            f"Exits({len(self.layer)} rows: {self.saved:.1f} of {self.n_layers} layers saved, "
            f"{self.agreement:.1%} agreement)"
        )

    @property
    def mean_layer(self) -> float:
        """Mean number of blocks run."""
        return self.layer.double().mean().item()

    @property
    def saved(self) -> float:
        """Mean number of blocks not run."""
        return self.n_layers - self.mean_layer

    @property
    def agreement(self) -> float:
        """Fraction of rows that exit with the model's own top token."""
        return self.agrees.double().mean().item()


@dataclass(frozen=True, eq=False)
class Sweep:
    """The exits of one family at many knobs; tensors are (row, knob)."""

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
        raise BadSettings("the evidence has no rows; expected at least one")
    wrong = ~evidence.agrees[:, -1]
    if wrong.any():
        raise BadSettings(
            f"the last column (layer {evidence.layers[-1]}) is not the model's own answer in "
            f"{int(wrong.sum())} of {len(evidence)} rows; replay needs evidence up to the last "
            "layer"
        )


def replay(rule: Rule, evidence: Evidence) -> Exits:
    """Where every row exits under `rule`."""
    require_finished(evidence)
    stops = rule.stops(evidence).clone()
    stops[:, -1] = True  # rows that did not stop before
    column = stops.int().argmax(1)  # argmax returns the first maximum
    return _exits(evidence, column)


def _exits(evidence: Evidence, column: Tensor) -> Exits:
    layers = torch.tensor(evidence.layers)
    agrees = evidence.agrees.gather(1, column.reshape(len(evidence), -1)).reshape(column.shape)
    return Exits(layers[column], agrees, evidence.layers[-1])


def sweep(
    family: Family, evidence: Evidence, knobs: Sequence[float] | None = None, *, n: int = 50
) -> Sweep:
    """The exits at many knobs at once, the same as `replay` gives for each.

    A row exits at the first layer whose score exceeds the bar, which is where the running maximum
    of its scores exceeds it: one binary search per row and knob.

    Args:
        family: the rules.
        evidence: the rows.
        knobs: values of the knob; None takes the family's grid of `n` values.
        n: size of that grid.
    """
    require_finished(evidence)
    chosen = family.grid(n, evidence.layers[-1]) if knobs is None else list(knobs)
    for knob in chosen:
        family.at(knob)  # refuses an invalid knob
    scores, offset = family.parts(evidence)
    values = torch.tensor(chosen, dtype=torch.float64)
    bars = family.kind.slope * values + offset[:, None]  # (row, knob)
    running = scores[:, :-1].cummax(1).values.contiguous()
    column = torch.searchsorted(running, bars.contiguous(), right=True)
    exits = _exits(evidence, column)
    return Sweep(family, tuple(chosen), exits.layer, exits.agrees, exits.n_layers)


def curve(
    rules: Iterable[Rule], evidence: Evidence, cost: "Cost | None" = None
) -> list[dict[str, Any]]:
    """One row per rule: layers run and saved, FLOPs, agreement, with 95 % intervals.

    `low` and `high` bound the agreement, `saved_low` and `saved_high` the layers saved. `flops` is
    the mean per token including checks, or None without a cost.
    """
    rules = list(rules)
    if not rules:
        raise BadSettings("no rule to replay; expected at least one")
    all_exits = [replay(rule, evidence) for rule in rules]
    documents = Documents(evidence.document)
    agreed = documents.means(torch.stack([e.agrees for e in all_exits], 1), SHARE)
    possible = (0.0, float(evidence.layers[-1]))
    layers = documents.means(torch.stack([e.n_layers - e.layer for e in all_exits], 1), possible)
    agreement, saved = _certain(agreed, rules, Never | Oracle), _certain(layers, rules, Never)
    return [
        {
            "rule": rule.name,
            "knob": getattr(rule, getattr(rule, "knob", ""), None),
            "layers": exits.mean_layer,
            "saved": exits.saved,
            "saved_low": finite(s.low),
            "saved_high": finite(s.high),
            "flops": None if cost is None else cost.of(exits, rule, evidence.layers),
            "agreement": a.value,
            "low": finite(a.low),
            "high": finite(a.high),
            "rows": a.rows,
            "documents": a.documents,
        }
        for rule, exits, a, s in zip(rules, all_exits, agreement, saved, strict=True)
    ]


def _certain(estimates: list[Estimate], rules: list[Rule], kind: Any) -> list[Estimate]:
    """The estimates; those that rules of this kind promise by definition are certain."""
    return [
        replace(estimate, low=estimate.value, high=estimate.value)
        if isinstance(rule, kind) and estimate.low is not None
        else estimate
        for estimate, rule in zip(estimates, rules, strict=True)
    ]
