"""The plan that a suitability study chose, and whether it is worth it.

In: a finished study. Out: an answer, and an `ExitPlan` to decode with.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from layerleap.act.exits.rules import ExitPlan, rule_from_dict
from layerleap.errors import BadSettings
from layerleap.study.result import Row, StudyResult

Answer = Literal["worth it", "not worth it", "cannot tell"]


def plan_of(result: StudyResult, *, bank: str | Path | None = None) -> ExitPlan:
    """The fastest calibrated rule, to decode with: `ll.generate(model, prompt, plan=...)`.

    The report of the study has it as `plan.json`, beside the bank that it needs.

    Args:
        result: of the study `suitability`.
        bank: folder or hub name of the bank; by default the name that the study was given.
    """
    if (verdict := result.row("verdict")) is None:
        raise BadSettings(f"a study of {result.study} has no plan; expected one of suitability")
    return _plan(result.row("rules", chosen=True), bank or verdict["bank"])


def answer_of(chosen: Row | None) -> Answer:
    """Worth it only if the whole interval of the fastest plan's time is below the full model's."""
    if chosen is None or not chosen["exits"]:
        return "not worth it"
    low, high = chosen["time_low"], chosen["time_high"]
    if low is None or high is None or chosen["low"] > chosen["tolerance"]:
        return "cannot tell"
    if high < 1:
        return "worth it"
    return "not worth it" if low >= 1 else "cannot tell"


@dataclass(frozen=True)
class PlanFile:
    """The plan of a study, saved with its report."""

    chosen: Row | None
    bank: str | None  # folder or hub name of the bank; None if the report has it beside the plan

    def save_pretrained(self, path: Path) -> None:
        """Write the plan as JSON; it names the bank by its full path."""
        beside = (path.parent / "bank").resolve()
        _plan(self.chosen, beside if self.bank is None else self.bank).save(path)


def _plan(chosen: Row | None, bank: str | Path | None) -> ExitPlan:
    if chosen is None or not chosen["exits"]:
        return ExitPlan(None, (), None)
    rule, layers = rule_from_dict(chosen["calibrated"]["rule"]), tuple(chosen["layers"])
    if chosen["map"] == "logit":
        return ExitPlan(rule, layers, None)
    if bank is None:
        raise BadSettings(
            "the plan needs the bank it was calibrated with, and this one has no name; write the "
            "report, which has both, or save result.artifacts['bank'] and pass bank=folder"
        )
    return ExitPlan(rule, layers, str(bank))
