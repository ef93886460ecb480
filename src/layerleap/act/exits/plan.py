"""Exit plan: a calibrated rule, where to check it, and the bank it reads through, in one JSON file.

In: what the study `suitability` chose. Out: a file that `ll.generate(plan=...)` and `ll.decoder`
accept.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerleap.act.exits.rules import Rule, rule_from_dict
from layerleap.act.spelling import read_plan
from layerleap.files import write_json

FORMAT = 1


@dataclass(frozen=True)
class ExitPlan:
    """A rule, the layers at which it is checked, and the bank that it was calibrated with."""

    rule: Rule | None  # None: never exit
    layers: tuple[int, ...]
    bank: str | None  # folder or hub name; None is the logit lens

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        rule = None if self.rule is None else self.rule.to_dict()
        return {"format": FORMAT, "rule": rule, "layers": list(self.layers), "bank": self.bank}

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
