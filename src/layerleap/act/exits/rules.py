"""Exit rules: when a row has been carried far enough.

In: `Evidence`, of all layers (replay) or of those run so far (live decoding).
Out: True at every (row, layer) at which the rule would stop; the first one counts.

A rule is a small frozen value, and causal: what it says of a layer rests on that layer and those
before. One object therefore serves replay and live decoding. No rule exits at layer 0. A row that
never stops runs to the end.

Most rules exit where a score passes a bar, score > slope * knob + offset. Written like that, all
thresholds of a rule can be swept at once and exactly: see `replay.sweep`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from layerleap.act.exits.evidence import Evidence
from layerleap.errors import BadSettings, NotFinite

Needs = Literal["nothing", "state", "reading"]  # what one check costs


@runtime_checkable
class Rule(Protocol):
    """When to stop."""

    @property
    def name(self) -> str:
        """The word it is saved under."""

    @property
    def needs(self) -> Needs:
        """What has to be computed for a check: a reading, something of the state, or nothing."""

    def stops(self, evidence: Evidence) -> Tensor:
        """(row, layer): True where it would stop; column l rests on columns up to l."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, for `from_dict`."""


class StoredRule:
    """A rule that is saved as its name and fields."""

    name: ClassVar[str]
    needs: ClassVar[Needs]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        assert is_dataclass(self)
        return {"name": self.name} | {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> "StoredRule":
        """What `to_dict` gave, without the name."""
        return cls(**values)


class ThresholdRule(StoredRule):
    """A rule that exits where score > slope * knob + offset, the comparison in float64."""

    knob: ClassVar[str]  # the field that is swept
    slope: ClassVar[float] = 1.0  # below 0, a larger knob means earlier exits
    least: ClassVar[float] = -math.inf  # smallest and largest value that the knob may have
    most: ClassVar[float] = math.inf
    whole: ClassVar[bool] = False  # the knob is a whole number

    def score(self, evidence: Evidence) -> Tensor:
        """(row, layer), larger = readier to exit."""
        raise NotImplementedError

    def offset(self, evidence: Evidence) -> Tensor:
        """(row,), what the bar is besides slope * knob."""
        return torch.zeros(len(evidence), dtype=torch.float64, device=evidence.top.device)

    def scores(self, evidence: Evidence) -> Tensor:
        """The score where an exit is possible and -inf elsewhere; unknown evidence is an error."""
        score = self.score(evidence).double()
        unknown = (score.isnan() & evidence.may_exit).any(0)
        if unknown.any():
            layer = evidence.layers[int(unknown.nonzero()[0, 0])]
            raise NotFinite(
                f"rule {self.name!r} needs a {self.needs} at layer {layer}, and the evidence has "
                "none, or NaN; compute it there, or leave the layer out"
            )
        return torch.where(evidence.may_exit, score, -torch.inf)

    def stops(self, evidence: Evidence) -> Tensor:
        """(row, layer): True where the score passes the bar."""
        bar = self.slope * getattr(self, self.knob) + self.offset(evidence)
        return self.scores(evidence) > bar[:, None]


@dataclass(frozen=True)
class Fixed(ThresholdRule):
    """Exit at `layer`, or at the first one after it that is looked at."""

    layer: int
    name: ClassVar[str] = "fixed"
    needs: ClassVar[Needs] = "nothing"
    knob: ClassVar[str] = "layer"
    least: ClassVar[float] = 1
    whole: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self, "a layer from 1 on: at layer 0 nothing has been computed")

    def score(self, evidence: Evidence) -> Tensor:
        """The layer itself, one more so that > means 'at least'."""
        return _row(evidence, [layer + 1.0 for layer in evidence.layers])

    def __str__(self) -> str:
        return f"exit at layer {self.layer}"


@dataclass(frozen=True)
class Gap(ThresholdRule):
    """The paper's rule: p1 - p2 > 0.9 lam + 0.1 exp(-temperature i / length), i the position.

    From "Jump to Conclusions" (arXiv 2303.09435), after CALM. Strict and not clipped: lam = 1.112
    never exits, lam = -1.112 always does. `length` is the mean number of tokens up to and
    including the one that is read, 1 + mean position.
    """

    lam: float
    length: float
    temperature: float = 4.0
    name: ClassVar[str] = "gap"
    needs: ClassVar[Needs] = "reading"
    knob: ClassVar[str] = "lam"
    slope: ClassVar[float] = 0.9

    def __post_init__(self) -> None:
        require(self, "any finite number")
        if not 0 < self.length < math.inf:
            raise BadSettings(f"length {self.length} is no mean text length: it must be above 0")
        if not 0 <= self.temperature < math.inf:
            raise BadSettings(f"temperature {self.temperature} is not a number of at least 0")

    def score(self, evidence: Evidence) -> Tensor:
        """The gap between the two best probabilities."""
        return evidence.gap

    def offset(self, evidence: Evidence) -> Tensor:
        """Early positions have to be surer."""
        return 0.1 * torch.exp(-self.temperature * evidence.position.double() / self.length)

    def __str__(self) -> str:
        return (
            f"exit if p1 - p2 > 0.9 * {self.lam:g} + 0.1 exp(-{self.temperature:g} i / "
            f"{self.length:g})"
        )


@dataclass(frozen=True)
class TopProbability(ThresholdRule):
    """Exit if the top token's probability is above `threshold`."""

    threshold: float
    name: ClassVar[str] = "top-probability"
    needs: ClassVar[Needs] = "reading"
    knob: ClassVar[str] = "threshold"
    least: ClassVar[float] = 0
    most: ClassVar[float] = 1

    def __post_init__(self) -> None:
        require(self, "a probability from 0 to 1")

    def score(self, evidence: Evidence) -> Tensor:
        """p1; rounding must not lift it above 1, at which nothing exits."""
        return evidence.p1.double().clamp_max(1)

    def __str__(self) -> str:
        return f"exit if p1 > {self.threshold:g}"


@dataclass(frozen=True)
class Entropy(ThresholdRule):
    """Exit if the reading's entropy is below `threshold` nats."""

    threshold: float
    name: ClassVar[str] = "entropy"
    needs: ClassVar[Needs] = "reading"
    knob: ClassVar[str] = "threshold"
    slope: ClassVar[float] = -1.0
    least: ClassVar[float] = 0

    def __post_init__(self) -> None:
        require(self, "an entropy in nats, of at least 0")

    def score(self, evidence: Evidence) -> Tensor:
        """Minus the entropy; rounding must not make it negative, or 0 nats would let rows go."""
        return -evidence.entropy.double().clamp_min(0)

    def __str__(self) -> str:
        return f"exit if the entropy < {self.threshold:g} nats"


@dataclass(frozen=True)
class Similarity(ThresholdRule):
    """Exit if a block hardly turned the state: the cosine with the one before > `threshold`."""

    threshold: float
    name: ClassVar[str] = "similarity"
    needs: ClassVar[Needs] = "state"
    knob: ClassVar[str] = "threshold"
    least: ClassVar[float] = -1
    most: ClassVar[float] = 1

    def __post_init__(self) -> None:
        require(self, "a cosine from -1 to 1")

    def score(self, evidence: Evidence) -> Tensor:
        """The cosine, kept from passing 1 by rounding."""
        return evidence.cosine.double().clamp_max(1)

    def __str__(self) -> str:
        return f"exit if cos(h[l], h[l-1]) > {self.threshold:g}"


class StateProbe(Protocol):
    """Looks at states of a live run: `read.probes.task.TaskProbe`."""

    def later(self, h: Tensor, layer: int) -> Tensor:
        """How likely rank 2 or later is being decided: (row, d_model) -> (row,)."""


@dataclass(frozen=True)
class Task(ThresholdRule):
    """Exit where a probe of the state says that rank 2 or later is being decided.

    From "Looking Beyond the Top-1" (arXiv 2410.20210), but for any task after the first and with a
    threshold on the probability. The probe is a `TaskProbe`; what it says of every row
    and layer is extra evidence `task`, 0 at layers that it was not trained on. A check costs a few
    products with the state, of which `Cost` counts one.

    A live run has no finished evidence, and asks `probe` on its way; a replay does not need it.
    """

    threshold: float
    probe: "StateProbe | None" = field(default=None, compare=False, repr=False)  # saved on its own
    name: ClassVar[str] = "task"
    needs: ClassVar[Needs] = "state"
    knob: ClassVar[str] = "threshold"
    least: ClassVar[float] = 0
    most: ClassVar[float] = 1

    def __post_init__(self) -> None:
        require(self, "a probability from 0 to 1")

    def score(self, evidence: Evidence) -> Tensor:
        """The probability that the first rank is settled, kept from passing 1 by rounding."""
        if self.name not in evidence.extra:
            raise BadSettings(
                "rule 'task' needs extra evidence 'task', the probabilities of a task probe; "
                "add it with Evidence.with_probe, or for a live run give the rule its probe"
            )
        return evidence.extra[self.name].double().clamp_max(1)

    @property
    def watches(self) -> dict[str, Callable[[Tensor, int], Tensor]]:
        """What a live run has to look at on its way: (h[layer], layer) -> one number per row."""
        return {} if self.probe is None else {self.name: self.probe.later}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; the probe is saved on its own."""
        return {"name": self.name, self.knob: self.threshold}

    def __str__(self) -> str:
        return f"exit if P(rank 2 or later is being decided) > {self.threshold:g}"


@dataclass(frozen=True)
class Patience(ThresholdRule):
    """Exit once `k` layers in a row, from layer 1 on, have the same top token."""

    k: int
    name: ClassVar[str] = "patience"
    needs: ClassVar[Needs] = "reading"
    knob: ClassVar[str] = "k"
    least: ClassVar[float] = 1
    whole: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self, "a number of layers from 1 on")

    def score(self, evidence: Evidence) -> Tensor:
        """The streak, one more so that > means 'at least'; unknown without readings."""
        return torch.where(evidence.top >= 0, evidence.streak + 1.0, torch.nan)

    def __str__(self) -> str:
        return f"exit after {self.k} layers with the same top token"


@dataclass(frozen=True)
class Oracle(StoredRule):
    """Exit at the first layer whose top token is the model's own: what no rule can beat.

    It knows the answer, so it is for replay only, and its checks count as free.
    """

    name: ClassVar[str] = "oracle"
    needs: ClassVar[Needs] = "nothing"

    def stops(self, evidence: Evidence) -> Tensor:
        """(row, layer): True where the reading agrees."""
        return evidence.agrees & evidence.may_exit

    def __str__(self) -> str:
        return "exit at the first layer that agrees (it knows the answer)"


@dataclass(frozen=True)
class Never(StoredRule):
    """Run every row to the end."""

    name: ClassVar[str] = "never"
    needs: ClassVar[Needs] = "nothing"

    def stops(self, evidence: Evidence) -> Tensor:
        """(row, layer): False."""
        return torch.zeros_like(evidence.top, dtype=torch.bool)

    def __str__(self) -> str:
        return "never exit"


RULES: dict[str, type[StoredRule]] = {
    rule.name: rule
    for rule in (Fixed, Gap, TopProbability, Entropy, Similarity, Task, Patience, Oracle, Never)
}


def from_dict(data: Mapping[str, Any]) -> Rule:
    """The rule that `to_dict` described."""
    from layerleap.act.exits.learned import Learned  # it is a rule itself, and imports this file

    kinds: dict[str, type[StoredRule]] = {**RULES, Learned.name: Learned}
    values = {key: value for key, value in data.items() if key != "name"}
    name = data.get("name")
    if name not in kinds:
        raise BadSettings(f"no rule is called {name!r}; there are: {', '.join(kinds)}")
    try:
        found = kinds[name].from_fields(values)
    except (TypeError, ValueError, KeyError) as error:
        raise BadSettings(f"these are not the fields of rule {name!r}: {error}") from error
    assert isinstance(found, Rule)
    return found


def require(rule: ThresholdRule, meaning: str) -> None:
    """Refuse a knob outside its meaning."""
    value = getattr(rule, rule.knob)
    is_number = isinstance(value, int if rule.whole else int | float) and not isinstance(
        value, bool
    )
    if not (is_number and math.isfinite(value) and rule.least <= value <= rule.most):
        raise BadSettings(f"{rule.knob} {value!r} of rule {rule.name!r} is not {meaning}")


def _row(evidence: Evidence, values: list[float]) -> Tensor:
    """The same values for every row."""
    row = torch.tensor(values, dtype=torch.float64, device=evidence.top.device)
    return row.expand(len(evidence), -1)
