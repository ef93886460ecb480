"""Families: rules that differ in one number, the knob, so that sweeps work for any kind of rule.

In: a kind of rule and its other fields. Out: the rule for any value of the knob, the direction in
which the knob works, and grids of values from the safest to the most aggressive.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from layerleap.act.exits.evidence import Evidence
from layerleap.act.exits.rules import Entropy, Gap, Rule, Similarity, ThresholdRule
from layerleap.errors import BadSettings

# The paper's values of lam: 13 for linear maps, and 9 more for the logit lens, whose gaps are
# close to 1.
LAMBDAS = (-1.112, *(tenth / 10 for tenth in range(11)), 1.112)
MORE_LAMBDAS = tuple(round(1 + 0.0112 * step, 4) for step in range(1, 10))
FINEST = -4.0  # log10 of the smallest distance from the safest threshold, relative to the width
MOST_NATS = 20.0  # above ln of any vocabulary


@dataclass(frozen=True)
class Family:
    """The rules of one kind, by their knob. Created by `family` or by `Learned.train`."""

    kind: type[ThresholdRule]
    fixed: tuple[tuple[str, Any], ...] = ()  # the fields besides the knob

    @property
    def name(self) -> str:
        """The name of its rules."""
        return self.kind.name

    @property
    def direction(self) -> Literal["later", "earlier"]:
        """Whether a larger knob makes rows exit later or earlier."""
        return "later" if self.kind.slope > 0 else "earlier"

    def at(self, knob: float) -> Rule:
        """The rule with this knob."""
        return self._member(knob)

    def _member(self, knob: float) -> ThresholdRule:
        is_whole = isinstance(knob, float) and knob.is_integer()
        value = int(knob) if self.kind.is_integer and is_whole else knob
        return self.kind(**dict(self.fixed), **{self.kind.knob: value})

    def parts(self, evidence: Evidence) -> tuple[Tensor, Tensor]:
        """(row, layer) scores and (row,) offsets, which are the same for all knobs."""
        any_member = self._member(1)  # 1 is valid for every knob
        return any_member.scores(evidence), any_member.offset(evidence)

    def grid(self, n: int, n_layers: int) -> list[float]:
        """About n knobs fixed in advance, from one that never exits to one that always does.

        They are denser near the safe end, where agreement is decided. They do not depend on data,
        as calibration requires.
        """
        if n < 2:
            raise BadSettings(f"a grid of {n} knobs is too small; expected at least 2")
        if self.kind.is_integer:  # layers; every row exits at the last one anyway
            steps = torch.linspace(n_layers, 1, min(n, n_layers)).round().int().tolist()
            return [float(step) for step in dict.fromkeys(steps)]
        if self.kind is Entropy:
            return [0.0, *_distances(n - 1, MOST_NATS).tolist()]
        if self.kind is Gap:  # the bar 0.9 lam from 1 to 0, between the paper's two ends
            bars = 1 - _distances(n - 2, 1.0)
            return [LAMBDAS[-1], *(bars / self.kind.slope).tolist(), LAMBDAS[0]]
        width = 2.0 if self.kind is Similarity else 1.0
        return [1.0, *(1 - _distances(n - 1, width)).clamp_min(self.kind.least).tolist()]


def _distances(n: int, width: float) -> Tensor:
    """N distances from the safest threshold, up to `width`.

    Half of them are log-spaced up to a tenth of the width, the rest are evenly spaced.
    """
    fine = torch.logspace(FINEST, -1, n // 2, dtype=torch.float64) * width
    even = torch.linspace(0.1 * width, width, n - n // 2 + 1, dtype=torch.float64)[1:]
    return torch.cat([fine, even])


def family(kind: type[ThresholdRule], **fixed: Any) -> Family:
    """The family of a kind of rule: `family(Gap, length=12.5)`.

    Args:
        kind: a class of rules with a knob.
        fixed: values of its other fields.
    """
    knob = getattr(kind, "knob", None)
    if knob is None:
        raise BadSettings(
            f"rule {kind.name!r} has no knob, so it has no family; replay it directly"
        )
    if knob in fixed:
        raise BadSettings(f"{knob} is the knob of rule {kind.name!r}; leave it out")
    rules = Family(kind, tuple(sorted(fixed.items())))
    try:
        rules.at(1)
    except TypeError as error:
        raise BadSettings(f"wrong fields for rule {kind.name!r}: {error}") from error
    return rules
