"""`Suitability`: the answer to "does early exit pay off?", its reasons, and the numbers behind."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from layerleap.act.exits.cost import Cost
from layerleap.act.exits.plan import ExitPlan
from layerleap.act.exits.timing import Timing
from layerleap.errors import BadSettings, check_choice
from layerleap.lens.intervals import Estimate
from layerleap.lens.metrics import lasting
from layerleap.maps.bank import ShortcutBank
from layerleap.study.suitability.candidates import Ceiling, DryRun, Outcome
from layerleap.study.tables import percent

Answer = Literal["worth it", "not worth it", "cannot tell"]
Table = Literal["rules", "plans", "agreement"]
FORMAT = 1
_percent = partial(percent, digits=1)


@dataclass(frozen=True, eq=False)
class Suitability:
    """Whether early exit saves time for a model, on a text, on this machine."""

    model: dict[str, Any]  # identity, kind and sizes
    settings: dict[str, Any]
    data: list[dict[str, Any]]  # the texts that were fitted on and read
    made_by: dict[str, str]  # version and date
    notes: list[str]
    splits: dict[str, dict[str, int]]  # rows and documents by use
    agreement: dict[str, list[Estimate]]  # by map, then by layer
    ceilings: list[Ceiling]  # by map: the upper bound for all rules
    timing: Timing
    costs: dict[str, Cost]  # FLOPs by map
    rules: list[Outcome]  # every rule, checked at all layers
    plans: list[DryRun]  # every candidate, on the rows that chose the fastest
    chosen: Outcome | None  # the fastest; None if no candidate lets any row exit
    bank: ShortcutBank | None = field(default=None, repr=False)  # the maps, passed in or fitted
    bank_name: str | None = None  # folder or hub name of the bank, if it was passed by name

    @property
    def n_layers(self) -> int:
        """Number of layers of the model."""
        return self.timing.n_layers

    @property
    def answer(self) -> Answer:
        """`worth it`, `not worth it` or `cannot tell`."""
        return answer_of(self.chosen)

    @property
    def reasons(self) -> list[str]:
        """Why, the most important reason first."""
        if self.chosen is None or not self.chosen.exits:
            reasons = [*_never(self), *_ceilings(self), _head(self)]
        else:
            reasons = [
                _time(self.chosen),
                *_broken(self.chosen),
                _layers(self.chosen, self),
                _head(self),
                *_break_even(self.chosen, self),
                *_ceilings(self),
            ]
        return [*reasons, *_caveats(self)]

    @property
    def findings(self) -> list[str]:
        """Agreement by layer, and every rule checked at all layers, in sentences."""
        return [*_agreement(self), *(_rule(row, self.n_layers) for row in self.rules)]

    @property
    def outcomes(self) -> list[Outcome]:
        """Every rule checked at all layers, then the fastest plan, if there is one."""
        return self.rules if self.chosen is None else [*self.rules, self.chosen]

    def __repr__(self) -> str:
        return f"Suitability({self.model['name']}: early exit is {self.answer!r})"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "format": FORMAT,
            "kind": "suitability",
            **self.made_by,
            "answer": self.answer,
            "reasons": self.reasons,
            "findings": self.findings,
            "model": self.model,
            "settings": self.settings,
            "data": self.data,
            "notes": self.notes,
            "splits": self.splits,
            "agreement": self._agreement_rows(),
            "ceilings": [asdict(ceiling) for ceiling in self.ceilings],
            "timing": self.timing.to_dict(),
            "costs": {name: cost.to_dict() for name, cost in self.costs.items()},
            "rules": [row.to_dict() for row in self.rules],
            "plans": [run.to_dict() for run in self.plans],
            "chosen": None if self.chosen is None else self.chosen.to_dict(),
        }

    def _agreement_rows(self) -> list[dict[str, Any]]:
        return [
            {"map": name, "layer": layer, **asdict(estimate)}
            for name, estimates in self.agreement.items()
            for layer, estimate in enumerate(estimates)
        ]

    def to_pandas(self, table: Table = "rules") -> Any:
        """A data frame of one table.

        Args:
            table: "rules" (every rule checked at all layers, then the fastest plan), "plans" (all
                candidates, on the rows that chose between them) or "agreement" (by map and layer).
        """
        import pandas

        check_choice(table, Table, "table")
        tables = {
            "rules": [{**one.flat(), "chosen": one is self.chosen} for one in self.outcomes],
            "plans": [run.to_dict() for run in self.plans],
            "agreement": self._agreement_rows(),
        }
        return pandas.DataFrame(tables[table])

    def _repr_html_(self) -> str:
        from layerleap.show.html.suitability import suitability_html

        return suitability_html(self)

    def plan(self, *, bank: str | Path | None = None) -> ExitPlan:
        """The fastest calibrated rule, to decode with: `ll.generate(model, prompt, plan=...)`.

        Args:
            bank: folder or hub name of the bank; by default the name that `suitability` was given.
        """
        chosen = self.chosen
        if chosen is None or not chosen.exits:
            return ExitPlan(None, (), None)
        name = bank if bank is not None else self.bank_name
        if chosen.candidate.map == "id":
            name = None
        elif name is None:
            raise BadSettings(
                "the plan needs the bank it was calibrated with, and this one has no name; save it "
                "with .bank.save_pretrained(folder) and pass bank=folder"
            )
        rule, layers = chosen.calibrated.rule, chosen.candidate.layers
        return ExitPlan(rule, layers, None if name is None else str(name))

    def save_plan(self, path: str | Path, *, bank: str | Path | None = None) -> None:
        """Write `plan` to a JSON file, for `ll.generate(plan=path)` and `generate --exit path`."""
        self.plan(bank=bank).save(path)


def answer_of(chosen: Outcome | None) -> Answer:
    """Worth it only if the whole interval of the fastest plan's time is below the full model's."""
    if chosen is None or not chosen.exits:
        return "not worth it"
    time, verified = chosen.time, chosen.verified
    if time.low is None or time.high is None or verified.low > verified.tolerance:
        return "cannot tell"
    if time.high < 1:
        return "worth it"
    return "not worth it" if time.low >= 1 else "cannot tell"


def _never(s: Suitability) -> Iterator[str]:
    tolerance, delta = s.settings["tolerance"], s.settings["delta"]
    limit = f"disagreement with the full model at {_percent(tolerance)} or less"
    if s.chosen is None:
        yield (
            f"None of {len(s.plans)} plans lets any row exit and is expected to keep {limit} "
            f"({_sample(**s.splits['choose'])} to choose with): never exit."
        )
    else:
        yield (
            f"The fastest plan, {s.chosen.candidate}, could not be shown to keep {limit} with "
            f"confidence {1 - delta:g} ({_sample(**s.splits['calibrate'])} to calibrate on): "
            "never exit."
        )
    yield "More held-out text or a larger tolerance may let a rule pass."


def _time(chosen: Outcome) -> str:
    time = chosen.time
    if time.low is None or time.high is None:
        return (
            f"With {chosen.candidate}, an answer takes an estimated {time.value:.2f} of the full "
            f"model's time; {_size(time)} are too few for an interval."
        )
    if time.high < 1:
        meaning = "the whole interval is below 1, so time is saved"
    elif time.low >= 1:
        meaning = "none of the interval is below 1, so no time is saved"
    else:
        meaning = "the interval includes 1, so this is not settled"
    return (
        f"With the fastest plan, {chosen.candidate}, an answer takes an estimated "
        f"{time.value:.2f} of the full model's time (95 % interval {time.low:.2f} to "
        f"{time.high:.2f}, {_size(time)}); {meaning}."
    )


def _broken(chosen: Outcome) -> Iterator[str]:
    verified = chosen.verified
    if verified.low > verified.tolerance:
        yield (
            f"Its guarantee did not hold: {_percent(verified.disagreement)} of "
            f"{verified.rows:,} fresh rows disagree, at least {_percent(verified.low)} with 95 % "
            f"confidence, and {_percent(verified.tolerance)} were allowed."
        )


def _layers(chosen: Outcome, s: Suitability) -> str:
    verified = chosen.verified
    return (
        f"It saves {verified.saved:.1f} of {s.n_layers} layers and disagrees with the full model "
        f"in {_percent(verified.disagreement)} of rows (95 % interval {_percent(verified.low)} to "
        f"{_percent(verified.high)}; {_percent(verified.tolerance)} allowed; {_size(verified)})."
    )


def _head(s: Suitability) -> str:
    timing = s.timing
    return (
        f"Reading the head once takes as long as {_blocks(timing.head_in_blocks)} blocks "
        f"({_ms(timing.head)}; a block takes {_ms(timing.block)}) and as many FLOPs as "
        f"{_blocks(s.costs['mat'].head_in_blocks)} blocks, and every check reads it."
    )


def _break_even(chosen: Outcome, s: Suitability) -> Iterator[str]:
    even = chosen.break_even
    if even is None:
        return
    if even.head_in_blocks is None:
        head = "the cost of the head does not matter"
    elif even.head_in_blocks <= 0:
        head = "no head is cheap enough: maps and checks alone cost more than it saves"
    else:
        head = (
            f"it breaks even with a head of {_blocks(even.head_in_blocks)} blocks (this one: "
            f"{_blocks(s.timing.head_in_blocks)})"
        )
    yield (
        f"It reads the head {even.heads:.2f} times per answer, where the full model reads it once; "
        f"with these exits {head}. With this head it breaks even by saving the time of "
        f"{even.saved_needed:.1f} blocks per answer (it saves {even.saved:.1f})."
    )


def _ceilings(s: Suitability) -> Iterator[str]:
    for row in s.ceilings:
        yield (
            f"No rule through {row.map} can save more than {row.saved.value:.1f} of {s.n_layers} "
            f"layers{_interval(row.saved, 1)} without disagreeing, or take less than "
            f"{row.time.value:.2f} of the time{_interval(row.time, 2)}: that is what an oracle "
            f"with free checks reaches ({_size(row.saved)})."
        )


def _caveats(s: Suitability) -> Iterator[str]:
    timing = s.timing
    one = (
        f"one new token after {timing.context - 1} cached ones"
        if timing.mode == "cached"
        else f"one answer from a text of {timing.context} tokens without a cache"
    )
    yield (
        f"Times are medians of {timing.repeats} passes at batch size 1, {one}, on {timing.device} "
        f"with {_many(timing.threads, 'thread')} in {timing.dtype}; the middle half of them "
        f"spreads over {_percent(timing.spread)} of the median, which the interval leaves out."
    )
    if timing.mode == "cached" and s.answer != "not worth it":
        yield (
            "Not counted: later tokens need keys and values from the skipped layers, and computing "
            "them costs a part of what is saved."
        )


def _agreement(s: Suitability) -> Iterator[str]:
    target = 1 - s.settings["tolerance"]
    for name, estimates in s.agreement.items():
        layer = s.n_layers // 2
        middle, first = estimates[layer], lasting([each.value for each in estimates], target)
        is_early = first is not None and first < s.n_layers
        where = f"from layer {first} on" if is_early else "only at the last layer"
        yield (
            f"Through {name}, {_percent(middle.value)} of answers can be read at layer {layer} of "
            f"{s.n_layers}{_interval(middle, 2)}; at least {_percent(target)} {where} "
            f"({_size(middle)})."
        )


def _rule(row: Outcome, n_layers: int) -> str:
    name = str(row.candidate)
    name = name[0].upper() + name[1:]
    if not row.exits:
        return f"{name}: no threshold keeps the guarantee; never exit."
    return (
        f"{name}: saves {row.verified.saved:.1f} of {n_layers} layers at "
        f"{_percent(row.verified.disagreement)} disagreement, and takes {row.time.value:.2f} of "
        f"the time{_interval(row.time, 2)} and {row.flops:.2f} of the FLOPs "
        f"({_size(row.verified)})."
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _interval(estimate: Estimate, digits: int) -> str:
    low, high = estimate.low, estimate.high
    return "" if low is None or high is None else f" ({low:.{digits}f} to {high:.{digits}f})"


def _size(measured: Any) -> str:
    """The sample size of something measured."""
    return _sample(measured.rows, measured.documents)


def _sample(rows: int, documents: int) -> str:
    return f"n = {_many(rows, 'row')} of {_many(documents, 'document')}"


def _many(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _blocks(n: float) -> str:
    return f"{n:.1f}" if n >= 0.1 else f"{n:.2g}"
