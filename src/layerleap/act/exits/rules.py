"""Exit rules: when to stop computing a row and read it; families of rules, and exit plans.

In: `Evidence` of all layers (replay) or of the layers run so far (live decoding).
Out: True at every (row, layer) where the rule would stop; the first one counts.

A rule is a small frozen value, and it is causal: its decision at a layer depends only on that layer
and the ones before it. So one object serves both replay and live decoding. No rule exits at layer
0. A row that never stops runs through all layers.

Most rules exit where a score exceeds a bar: score > slope * knob + offset. In this form all
thresholds of a rule can be swept at once, exactly: see `replay.sweep`. A family holds the rules
that differ in this one number, the knob.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from layerleap.act.exits.evidence import Evidence
from layerleap.act.spelling import KNOBS, Knob, is_number, read_plan
from layerleap.errors import BadSettings, NotFinite
from layerleap.files import write_json
from layerleap.lens.probes.task import TaskProbe

# The paper's values of lam: 13 for linear maps, and 9 more for the logit lens, whose gaps are
# close to 1.
LAMBDAS = (-1.112, *(tenth / 10 for tenth in range(11)), 1.112)
MORE_LAMBDAS = tuple(round(1 + 0.0112 * step, 4) for step in range(1, 10))
FINEST = -4.0  # log10 of the smallest distance from the safest threshold, relative to the width
MOST_NATS = 20.0  # above ln of any vocabulary
PLAN_FORMAT = 1
Needs = Literal["nothing", "state", "reading"]  # what one check costs


class Rule(ABC):
    """Decides at which layer a row stops. It is saved as its name and the fields of its dataclass.

    A rule of your own inherits from this class, is a frozen dataclass, and defines `stops`.
    """

    name: ClassVar[str]
    needs: ClassVar[Needs] = "nothing"
    sentence: ClassVar[str]  # the rule in words, with its fields in braces

    @abstractmethod
    def stops(self, evidence: Evidence) -> Tensor:
        """(row, layer): True where it would stop; column l depends on columns up to l only."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, for `rule_from_dict`."""
        assert is_dataclass(self)
        return {"name": self.name} | {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> "Rule":
        """The rule with these fields: `to_dict` without the name."""
        return cls(**values)

    def __str__(self) -> str:
        return self.sentence.format_map(vars(self))


class ThresholdRule(Rule):
    """Base of rules that exit where score > slope * knob + offset, compared in float64."""

    knob: ClassVar[str] = "threshold"  # the field that is swept
    slope: ClassVar[float] = 1.0  # if negative, a larger knob means earlier exits
    least: ClassVar[float] = -math.inf  # smallest and largest value of the knob
    most: ClassVar[float] = math.inf
    is_integer: ClassVar[bool] = False  # the knob is an integer
    expected: ClassVar[str]  # what the knob should be, in words

    def __post_init__(self) -> None:
        knob = Knob(self.knob, self.expected, self.least, self.most, self.is_integer)
        knob.check(self.name, getattr(self, self.knob))

    @abstractmethod
    def _score(self, evidence: Evidence) -> Tensor:
        """(row, layer): the higher, the sooner the row exits."""

    def offset(self, evidence: Evidence) -> Tensor:
        """(row,): the part of the bar besides slope * knob."""
        return torch.zeros(len(evidence), dtype=torch.float64, device=evidence.top.device)

    def scores(self, evidence: Evidence) -> Tensor:
        """The score where a row may exit and -inf elsewhere; missing evidence is an error."""
        score = self._score(evidence).double()
        unknown = (score.isnan() & evidence.may_exit).any(0)
        if unknown.any():
            layer = evidence.layers[int(unknown.nonzero()[0, 0])]
            raise NotFinite(
                f"rule {self.name!r} needs a {self.needs} at layer {layer}, but the evidence has "
                "none there, or NaN; compute it, or leave that layer out"
            )
        return torch.where(evidence.may_exit, score, -torch.inf)

    def stops(self, evidence: Evidence) -> Tensor:
        """(row, layer): True where the score exceeds the bar."""
        bar = self.slope * getattr(self, self.knob) + self.offset(evidence)
        return self.scores(evidence) > bar[:, None]


@dataclass(frozen=True)
class Fixed(ThresholdRule):
    """Exit at `layer`, or at the first checked layer after it."""

    layer: int
    name = "fixed"
    knob, expected, least, most, is_integer, _ = KNOBS[name]
    sentence = "exit at layer {layer}"

    def _score(self, evidence: Evidence) -> Tensor:
        layers = torch.tensor(evidence.layers, dtype=torch.float64, device=evidence.top.device)
        return (layers + 1).expand(len(evidence), -1)  # plus one: > then means 'at least'


@dataclass(frozen=True)
class Gap(ThresholdRule):
    """The paper's rule: exit if p1 - p2 > 0.9 lam + 0.1 exp(-temperature i / length).

    i is the position. From "Jump to Conclusions" (arXiv 2303.09435), after CALM. The comparison is
    strict and not clipped: lam = 1.112 never exits, lam = -1.112 always does. `length` is the mean
    number of tokens up to and including the one that is read, i.e. 1 + mean position.
    """

    lam: float
    length: float
    temperature: float = 4.0
    name = "gap"
    needs = "reading"
    slope = 0.9
    knob, expected, least, most, is_integer, _ = KNOBS[name]
    sentence = "exit if p1 - p2 > 0.9 * {lam:g} + 0.1 exp(-{temperature:g} i / {length:g})"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (is_number(self.length) and self.length > 0):
            raise BadSettings(f"length {self.length!r} is not a mean text length; expected above 0")
        if not (is_number(self.temperature) and self.temperature >= 0):
            raise BadSettings(
                f"temperature {self.temperature!r} is not a number from 0 on; expected >= 0"
            )

    def _score(self, evidence: Evidence) -> Tensor:
        return evidence.gap

    def offset(self, evidence: Evidence) -> Tensor:
        """Early positions need a larger gap."""
        return 0.1 * torch.exp(-self.temperature * evidence.position.double() / self.length)


@dataclass(frozen=True)
class TopProbability(ThresholdRule):
    """Exit if the top token's probability is above `threshold`."""

    threshold: float
    name = "top-probability"
    needs = "reading"
    knob, expected, least, most, is_integer, _ = KNOBS[name]
    sentence = "exit if p1 > {threshold:g}"

    def _score(self, evidence: Evidence) -> Tensor:
        # Clipped: rounding must not lift it above a threshold of 1, which never exits.
        return evidence.top_prob.double().clamp_max(1)


@dataclass(frozen=True)
class Entropy(ThresholdRule):
    """Exit if the reading's entropy is below `threshold` nats."""

    threshold: float
    name = "entropy"
    needs = "reading"
    slope = -1.0
    knob, expected, least, most, is_integer, _ = KNOBS[name]
    sentence = "exit if the entropy < {threshold:g} nats"

    def _score(self, evidence: Evidence) -> Tensor:
        # Clipped: rounding must not pass a threshold of 0 nats.
        return -evidence.entropy.double().clamp_min(0)


@dataclass(frozen=True)
class Similarity(ThresholdRule):
    """Exit if the last block hardly turned the state: cos(h[l], h[l-1]) > `threshold`."""

    threshold: float
    name = "similarity"
    needs = "state"
    knob, expected, least, most, is_integer, _ = KNOBS[name]
    sentence = "exit if cos(h[l], h[l-1]) > {threshold:g}"

    def _score(self, evidence: Evidence) -> Tensor:
        return evidence.cosine.double().clamp_max(1)  # against rounding


@dataclass(frozen=True)
class Task(ThresholdRule):
    """Exit where a probe of the state predicts that rank 2 or later is being decided.

    From "Looking Beyond the Top-1" (arXiv 2410.20210), extended to any task after the first and to
    a threshold on the probability. The probe is a `TaskProbe`. Its probability at every row and
    layer is the extra evidence `task`, 0 at layers it was not trained on. A check costs a few
    products with the state, of which `Cost` counts one.

    Live decoding needs `probe` to compute this evidence on the way; replay does not.
    """

    threshold: float
    probe: TaskProbe | None = field(default=None, compare=False, repr=False)  # saved separately
    name = "task"
    needs = "state"
    knob, expected, least, most, is_integer, _ = KNOBS[name]
    sentence = "exit if P(rank 2 or later is being decided) > {threshold:g}"

    def _score(self, evidence: Evidence) -> Tensor:
        if self.name not in evidence.extra:
            raise BadSettings(
                "rule 'task' needs the extra evidence 'task', the probabilities of a task probe; "
                "add it with Evidence.with_probe, or for live decoding give the rule its probe"
            )
        return evidence.extra[self.name].double().clamp_max(1)  # against rounding

    @property
    def live_extra(self) -> dict[str, Callable[[Tensor, int], Tensor]]:
        """Extra evidence for live decoding, by name: (h[layer], layer) -> one number per row."""
        return {} if self.probe is None else {self.name: self.probe.later}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; the probe is saved separately."""
        return {"name": self.name, self.knob: self.threshold}


@dataclass(frozen=True)
class Patience(ThresholdRule):
    """Exit once `k` layers in a row, from layer 1 on, have the same top token."""

    k: int
    name = "patience"
    needs = "reading"
    knob, expected, least, most, is_integer, _ = KNOBS[name]
    sentence = "exit after {k} layers with the same top token"

    def _score(self, evidence: Evidence) -> Tensor:
        # The streak plus one, so that > means 'at least'; NaN without readings.
        return torch.where(evidence.top >= 0, evidence.streak + 1.0, torch.nan)


@dataclass(frozen=True)
class Oracle(Rule):
    """Exit at the first layer whose top token is the model's own: the upper bound for all rules.

    It has to know the answer, so it works in replay only. Its checks count as free.
    """

    name = "oracle"
    sentence = "exit at the first layer that agrees (it knows the answer)"

    def stops(self, evidence: Evidence) -> Tensor:
        """(row, layer): True where the reading agrees with the model."""
        return evidence.agrees & evidence.may_exit


@dataclass(frozen=True)
class Never(Rule):
    """Run every row through all layers."""

    name = "never"
    sentence = "never exit"

    def stops(self, evidence: Evidence) -> Tensor:
        """(row, layer): always False."""
        return torch.zeros_like(evidence.top, dtype=torch.bool)


RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (Fixed, Gap, TopProbability, Entropy, Similarity, Task, Patience, Oracle, Never)
}


def rule_from_dict(data: Mapping[str, Any]) -> Rule:
    """The rule that `to_dict` described."""
    from layerleap.act.exits.learned import Learned  # it imports this file

    kinds: dict[str, type[Rule]] = {**RULES, Learned.name: Learned}
    values = {key: value for key, value in data.items() if key != "name"}
    name = data.get("name")
    if name not in kinds:
        raise BadSettings(f"unknown rule {name!r}; expected one of: {', '.join(kinds)}")
    try:
        return kinds[name].from_fields(values)
    except (TypeError, ValueError, KeyError) as error:
        raise BadSettings(f"wrong fields for rule {name!r}: {error}") from error


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
        is_whole = isinstance(knob, float) and knob.is_integer()
        value = int(knob) if self.kind.is_integer and is_whole else knob
        return self.kind(**dict(self.fixed), **{self.kind.knob: value})

    def parts(self, evidence: Evidence) -> tuple[Tensor, Tensor]:
        """(row, layer) scores and (row,) offsets, which are the same for all knobs."""
        any_member = self.at(1)  # 1 is valid for every knob
        assert isinstance(any_member, ThresholdRule)
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
    """N distances up to `width`: half log-spaced to a tenth of it, the rest evenly spaced."""
    fine = torch.logspace(FINEST, -1, n // 2, dtype=torch.float64) * width
    even = torch.linspace(0.1 * width, width, n - n // 2 + 1, dtype=torch.float64)[1:]
    return torch.cat([fine, even])


def family(kind: type[ThresholdRule], **fixed: Any) -> Family:
    """The family of a kind of rule, with values of its other fields: `family(Gap, length=12.5)`."""
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


@dataclass(frozen=True)
class ExitPlan:
    """A rule, the layers at which it is checked, and the bank that it was calibrated with.

    The study `suitability` writes one; `ll.generate(plan=...)` and `ll.decoder` accept it.
    """

    rule: Rule | None  # None: never exit
    layers: tuple[int, ...]
    bank: str | None  # folder or hub name; None is the logit lens

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        rule = None if self.rule is None else self.rule.to_dict()
        return {"format": PLAN_FORMAT, "rule": rule, "layers": list(self.layers), "bank": self.bank}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ExitPlan":
        """The plan that `to_dict` described."""
        rule = None if data["rule"] is None else rule_from_dict(data["rule"])
        return cls(rule, tuple(data["layers"]), data["bank"])

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        write_json(Path(path), self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> "ExitPlan":
        """Read a plan that `save` wrote."""
        return cls.from_dict(read_plan(path))
