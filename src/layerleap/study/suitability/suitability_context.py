"""What the sections of the suitability study share: maps, readings split by use, and prices.

In: a model and settings. Out: a context whose parts are made when first used. There is one pass
over the fitting side of the text, unless there is a bank, and one over its held-out side.
"""

from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property
from typing import Any, TypeVar
from uuid import uuid4

from layerleap.act.exits.cost import Cost
from layerleap.act.exits.evidence import Evidence
from layerleap.act.exits.timing import Timing
from layerleap.lens.scores import Scores
from layerleap.maps.bank import ShortcutBank
from layerleap.study.fits import FitContext
from layerleap.study.result import Row
from layerleap.study.suitability.candidates import Prices, SplitRows, divide, require_enough
from layerleap.study.suitability.chosen_plan import PlanFile
from layerleap.study.suitability.suitability_settings import SuitabilitySettings

LENSES = {"logit": "-", "linear": "linear"}  # by map, the name of the lens in the scores
P = TypeVar("P", Cost, Timing)


class SuitabilityContext(FitContext[SuitabilitySettings]):
    """The bank, evidence by map, and what an answer costs."""

    @cached_property
    def named_bank(self) -> ShortcutBank | None:
        """The bank of the settings, if there is one."""
        bank = self.settings.bank
        if bank is None:
            return None
        if not isinstance(bank, ShortcutBank):
            bank = ShortcutBank.from_pretrained(bank)
        bank.check_model(self.model)
        self.note(*_may_have_seen(bank, self.settings))
        return bank

    @cached_property
    def bank(self) -> ShortcutBank:
        """The bank that was given, or else one fitted on the text."""
        return self.fit(self.text).bank if self.named_bank is None else self.named_bank

    def fingerprint(self) -> list[str]:
        """Digests of the bank and the text; refuses too little text before any pass is run."""
        s, bank = self.settings, self.named_bank
        if self.text == "-":
            return [uuid4().hex]  # it can be read only once, so there is nothing to continue
        held_out = self.text_counts()
        require_enough(held_out.rows, held_out.documents, s.tolerance, s.delta)
        fitted = self.fingerprint_of("fit", self.text) if bank is None else bank.digest()
        return [held_out.to_dict()["fingerprint"], fitted]

    @cached_property
    def readings(self) -> Scores:
        """The held-out side, read through the logit lens and the bank."""
        return self.scores(self.text, {"linear": self.bank})

    @cached_property
    def evidence(self) -> dict[str, Evidence]:
        """What rules look at, by map."""
        return {name: Evidence.from_scores(self.readings, lens) for name, lens in LENSES.items()}

    @cached_property
    def rows(self) -> SplitRows:
        """The held-out rows by use."""
        s = self.settings
        return divide(self.evidence, s.tolerance, s.delta, seed=s.seed)

    @property
    def prices(self) -> Prices:
        """What an answer costs, as its section measured it, in this run or in an earlier one."""
        (timing,), costs = self.tables["timing"], self.tables["costs"]
        return Prices(_made(Timing, timing), {row["map"]: _made(Cost, row) for row in costs})

    def artifacts(self) -> Mapping[str, Any]:
        """The plan, and the maps it needs unless they have a name of their own."""
        name = self.settings.bank_name
        chosen = next((row for row in self.tables["rules"] if row["chosen"]), None)
        bank = {} if name is not None else {"bank": self.bank}
        return {**bank, "plan.json": PlanFile(chosen, name)}


def _made(kind: type[P], row: Row) -> P:
    """What `to_dict` described, after JSON has made lists of its tuples."""
    values: dict[str, Any] = {field.name: row[field.name] for field in fields(kind)}
    values |= {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    return kind(**values)


def _may_have_seen(bank: ShortcutBank, s: SuitabilitySettings) -> list[str]:
    """A warning if the bank may have been fitted on documents that are read here."""
    held_out = bank.settings.get("held_out"), bank.settings.get("seed")
    if bank.data.get("text") != s.text or held_out == (s.held_out, s.seed):
        return []
    return [
        f"The bank was fitted on {s.text} with different documents held out: it may have been "
        "fitted on some that are read here, which makes it look better than it is."
    ]
