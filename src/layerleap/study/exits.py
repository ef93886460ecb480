"""Early exit, replayed: every rule through every lens, and rules calibrated to keep a promise.

In: the scores of one pass over each text, by lens; costs; a tolerance.
Out: plain tables: curves of agreement against layers and FLOPs, layers saved at given agreements,
and calibrated rules tested on rows that neither the maps nor the rules have seen. The promise is
made for other rows of the same documents; other texts are read too, without a promise.

Rows are split once. A third of the documents trains the learned rule. The rows of all other
documents are split at random into those that thresholds are calibrated on and those that the
promise is tested on. Split row by row they are exchangeable, which the promise requires.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from layerleap.act.decode.generate import generate
from layerleap.act.exits.calibration import Calibrated, Method, calibrate, verify
from layerleap.act.exits.cost import Cost
from layerleap.act.exits.evidence import Evidence, split
from layerleap.act.exits.learned import Learned
from layerleap.act.exits.replay import curve, replay
from layerleap.act.exits.rules import (
    LAMBDAS,
    MORE_LAMBDAS,
    Entropy,
    Family,
    Fixed,
    Gap,
    Never,
    Oracle,
    Patience,
    Rule,
    Similarity,
    TopProbability,
    family,
)
from layerleap.act.exits.savings import TARGETS, saved_at
from layerleap.errors import BadSettings
from layerleap.lens.intervals import mean_interval
from layerleap.lens.scores import Scores
from layerleap.maps.bank import ShortcutBank
from layerleap.models.transformer import Transformer
from layerleap.stream.batches import modality
from layerleap.study.figures import Axis, Figure, Line, Mark
from layerleap.study.result import Row, StudyResult
from layerleap.study.tables import Column, Table, estimate

METHODS: dict[Method, str] = {"ltt": "learn-then-test", "crc": "conformal risk control"}
KNOBS = 40  # thresholds of each curve; the paper's rule has its own grid


@dataclass(frozen=True)
class Lensed:
    """The readings of one lens as evidence for rules, split, and what using it costs."""

    main: Evidence
    cost: Cost
    train: Evidence | None  # rows that the learned rule is trained on
    rest: Evidence  # all other rows
    families: Mapping[str, Family]  # every kind of rule that has a threshold
    others: Mapping[str, Evidence] = field(default_factory=dict)  # by text
    seed: int = 0

    @cached_property
    def halves(self) -> list[Evidence]:
        """Rows that thresholds are calibrated on, and rows that the promise is tested on."""
        return split(self.rest, (0.5, 0.5), seed=self.seed, by="row")


def lensed(
    scores: Mapping[str, Scores], text: str, label: str, cost: Cost, *, seed: int = 0
) -> Lensed:
    """The rows of one lens, split in the same way for every lens.

    Args:
        scores: by text.
        text: the main one.
        label: the name of the lens in the scores.
        cost: of blocks, head and the maps of this lens.
        seed: of the split.
    """
    main = Evidence.from_scores(scores[text], label)
    families = {
        "gap": gap_family(main),
        "top probability": family(TopProbability),
        "entropy": family(Entropy),
        "similarity": family(Similarity),
        "patience": family(Patience),
    }
    try:
        train, rest = split(main, (1 / 3, 2 / 3), seed=seed)
    except BadSettings:  # too few documents
        train, rest = None, main
    if train is not None:
        families["learned"] = Learned.train(train)
    others = {
        name: Evidence.from_scores(other, label)
        for name, other in scores.items()
        if name != text and label in other.top
    }
    return Lensed(main, cost, train, rest, families, others, seed)


def gap_family(rows: Evidence) -> Family:
    """The paper's rule for texts as long as those read."""
    return family(Gap, length=1 + rows.position.double().mean().item())


def exit_tables(lenses: Mapping[str, Lensed]) -> dict[str, Any]:
    """Costs, and curves and savings of every rule through every lens, by name."""
    curves: list[Row] = []
    saved: list[Row] = []
    for name, rows in lenses.items():
        for rule, kind in rows.families.items():
            # A rule is never evaluated on rows that it was trained on.
            evidence = rows.rest if rule == "learned" else rows.main
            members = [kind.at(knob) for knob in _knobs(kind, evidence)]
            curves += _curve(name, rule, members, evidence, rows.cost)
            saved += _saved(name, rule, kind, evidence, rows.cost)
        layers = range(1, rows.cost.n_layers)
        curves += _curve(name, "fixed", [Fixed(layer) for layer in layers], rows.main, rows.cost)
        curves += _curve(name, "oracle", [Oracle()], rows.main, rows.cost)
    return {"cost": _cost(lenses), "curves": curves, "saved": saved}


def _knobs(kind: Family, evidence: Evidence) -> list[float]:
    if kind.name == Gap.name:
        return sorted({*LAMBDAS, *MORE_LAMBDAS})
    return kind.grid(KNOBS, evidence.layers[-1])


def _curve(lens: str, rule: str, members: list[Rule], evidence: Evidence, cost: Cost) -> list[Row]:
    """Rows of one curve; FLOPs as a share of the full model's."""
    rows = curve(members, evidence, cost)
    return [{"map": lens, **row, "rule": rule, "flops": row["flops"] / cost.full} for row in rows]


def _saved(lens: str, rule: str, kind: Family, evidence: Evidence, cost: Cost) -> Iterator[Row]:
    knobs = _knobs(kind, evidence)
    interpolated = saved_at(kind, evidence, TARGETS, method="curve", knobs=knobs)
    for exact, on_curve in zip(saved_at(kind, evidence, TARGETS), interpolated, strict=True):
        member = Never() if exact.knob is None else kind.at(exact.knob)
        yield {
            "map": lens,
            "rule": rule,
            **exact.to_dict(),
            "share": exact.saved / cost.n_layers,
            "flops": 1 - _flops(member, evidence, cost),
            "interpolated": on_curve.saved,
        }


def _flops(rule: Rule, evidence: Evidence, cost: Cost) -> float:
    """Of a rule, as a share of the full model's."""
    return cost.of(replay(rule, evidence), rule, evidence.layers) / cost.full


def _cost(lenses: Mapping[str, Lensed]) -> Row:
    """What a block, a map and the head cost; of several lenses, the one with the costliest map."""
    cost = max((rows.cost for rows in lenses.values()), key=lambda cost: sum(cost.maps))
    return {
        "block": sum(cost.blocks) / cost.n_layers,
        "head": cost.head,
        "map": sum(cost.maps) / cost.n_layers,
        "n_layers": cost.n_layers,
        "tokens": cost.context,
        "head_in_blocks": cost.head_in_blocks,
        "full": cost.full,
    }


def calibrated_rows(
    lenses: Mapping[str, Lensed],
    text: str,
    tolerance: float,
    delta: float,
    promised: Sequence[str] = ("gap", "entropy", "learned"),
) -> list[Row]:
    """Calibrated rules on fresh rows, one row per rule and text; `BadSettings` with too few rows.

    Args:
        lenses: by name.
        text: the main one, for whose rows the promise is made.
        tolerance: largest share of rows that may disagree with the model.
        delta: how often learn-then-test may break its promise.
        promised: rules to calibrate.
    """
    rows: list[Row] = []
    for name, lens in lenses.items():
        for rule, kind in lens.families.items():
            for method in METHODS if rule in promised else ():
                chosen = calibrate(kind, lens.halves[0], tolerance, delta=delta, method=method)
                about = {"map": name, "rule": rule, "delta": delta}
                rows += ({**about, **row} for row in _promise(chosen, lens, text))
    return rows


def _promise(chosen: Calibrated, lens: Lensed, text: str) -> Iterator[Row]:
    member = chosen.rule
    for read, evidence in {text: lens.halves[1], **lens.others}.items():
        outcome = verify(chosen, evidence)
        yield {
            "method": METHODS[chosen.method],
            "knob": None if member is None else getattr(member, member.knob),  # type: ignore[attr-defined]
            "calibrated_on": chosen.n,
            "observed": chosen.observed,
            "bound": chosen.bound,
            **outcome.to_dict(),
            "text": read,
            "promised": read == text,
            # Slightly above the tolerance may be chance; refuted is what cannot be.
            "holds": outcome.low <= chosen.tolerance,
            "flops": _flops(member or Never(), evidence, lens.cost),
            "note": chosen.note,
            "trained_on": 0 if lens.train is None else len(lens.train),
        }


def same_rows(lenses: Mapping[str, Lensed], target: float = 0.95) -> list[Row]:
    """Layers saved by three rules on the same rows, which none of them was trained on."""
    rows = []
    for name, lens in lenses.items():
        for rule, kind in lens.families.items():
            if rule in ("gap", "entropy", "learned"):
                (saving,) = saved_at(kind, lens.rest, (target,))
                rows.append({"map": name, "rule": rule, **saving.to_dict()})
    return rows


def leads_over_fixed(lenses: Mapping[str, Lensed], rule: str = "gap") -> list[Row]:
    """Agreement of a rule minus that of fixed exits at the same mean number of layers, paired.

    Fixed exits are interpolated between layers. The mean number of layers varies between
    resamples too, so its first-order effect is part of each row's value.
    """
    rows = []
    for name, lens in lenses.items():
        evidence, last = lens.main, lens.cost.n_layers
        agrees, kind = evidence.agrees.double(), lens.families[rule]
        level, about, columns = agrees.mean(0), [], []
        for knob in _knobs(kind, evidence):
            exits = replay(kind.at(knob), evidence)
            mean = exits.mean_layer
            if not 1 < mean < last:
                continue  # all exit at once, or never: both are fixed exits
            a = min(int(mean), last - 1)
            mixed = (a + 1 - mean) * agrees[:, a] + (mean - a) * agrees[:, a + 1]
            slope = (level[a + 1] - level[a]).item()
            columns.append(exits.agrees.double() - mixed - slope * (exits.layer.double() - mean))
            about.append({"map": name, "rule": rule, "knob": knob, "layers": mean})
        if columns:
            leads = mean_interval(torch.stack(columns, 1), evidence.document)
            rows += [{**a, **lead.to_dict()} for a, lead in zip(about, leads, strict=True)]
    return rows


def generates_text(transformer: Transformer) -> bool:
    """Whether the model continues a text token by token."""
    return transformer.kind == "next-token" and modality(transformer) == "text"


def early_texts(
    transformer: Transformer,
    banks: Mapping[str, ShortcutBank | None],
    rules: Mapping[tuple[str, str], Rule],
    beginning: Sequence[int],
    *,
    tokens: int = 48,
) -> list[Row]:
    """A text per rule with the exit layer of every token, all continuing the same prompt.

    None if the model does not generate text. Banks are by lens, rules by lens and name.
    """
    tokenizer: Any = transformer.tokenizer
    if not generates_text(transformer) or tokenizer is None or not beginning:
        return []
    prompt = tokenizer.decode(beginning, skip_special_tokens=True)
    texts = []
    for (lens, name), rule in rules.items():
        text = generate(transformer, prompt, bank=banks[lens], rule=rule, max_new_tokens=tokens)
        text.stats.prompt_seconds = text.stats.seconds = 0.0  # results must be reproducible
        text.stats.preparation = None
        texts.append({"map": lens, "rule": name, **text.to_dict()})
    return texts


# What the exits of any study look like, given tables "exits", "exits_saved" and "calibrated".

RULE_LINES = {
    "task": Line("task", "purple", "X", width=2.4, band=0.08),
    "gap": Line("gap (the paper's)", "blue", "o", width=1.7, band=0.08),
    "top probability": Line("top probability", "sky", "v", width=1.5, band=0.08),
    "entropy": Line("entropy", "olive", "^", width=1.5, band=0.08),
    "similarity": Line("similarity", "pink", "s", width=1.5, band=0.08),
    "patience": Line("patience", "green", "D", width=1.5, band=0.08),
    "learned": Line("learned", "orange", "P", width=1.5, band=0.08),
    "fixed": Line("fixed layer", "soft", "", "dashed", band=0, width=1.1),
    "oracle": Line("oracle (knows the answer)", "yellow", "*", "star", band=0),
}
CLOSE_UP = (0.85, 1.0)  # the range of agreement that matters in use
CLOSE_UP_PANEL = "above 85 %"


def exit_rows(
    result: StudyResult,
    x: str,
    *,
    maps: Sequence[str],
    measures: Mapping[str, str] | None = None,
    close_up: bool = False,
) -> Iterator[Row]:
    """Rows of a figure of exits: a line per rule, a panel per map (and measure, and close-up).

    Args:
        result: with a table "exits".
        x: "layers" or "flops".
        maps: read through these, in order.
        measures: title by column; agreement alone when None.
        close_up: every panel is followed by one that shows high agreement only.
    """
    for name in maps:
        for measure, title in (measures or {"agreement": ""}).items():
            before = "" if measure == "agreement" else f"{measure}_"
            panel = f"Through {name}" + (f": {title}" if title else "")
            for row in result.rows("exits", map=name):
                ends = {end: row.get(f"{before}{end}") for end in ("low", "high")}
                point = {"line": row["rule"], "x": row[x], "y": row.get(measure), **ends}
                point |= {key: row[key] for key in ("rows", "documents")}
                yield {**point, "panel": panel}
                if close_up:
                    yield {**point, "panel": f"{panel}, {CLOSE_UP_PANEL}"}


FLOPS_MARKS = (Mark("x", 1.0, "costs more than\n not exiting", to=64.0), Mark("x", 1.0))


def saved_table(key: str = "exits-saved-table") -> Table:
    """Layers and FLOPs saved by each rule at each wanted agreement."""
    return Table(
        key,
        "Layers saved at a given agreement with the full model, and FLOPs saved (below 0: exiting "
        "costs more than it saves)",
        lambda r: [{**row, "at": f"{100 * row['target']:g}"} for row in r.rows("exits_saved")],
        (Column("map", "read through"), Column("rule")),
        across="at {at} %",
        dense=True,
        terminal=True,
        cells=(estimate("saved", "layers", "{:.1f}"), Column("flops", "FLOPs", "{:.0f} %", 100)),
    )


def calibrated_figure() -> Figure:
    """Disagreement on fresh text per calibrated rule, against the tolerance."""

    def rows(result: StudyResult) -> Iterator[Row]:
        for row in result.rows("calibrated"):
            outcome = "" if row["holds"] else (", BROKEN" if row["promised"] else ", not promised")
            note = "never exits" if row["knob"] is None else f"{row['saved']:.1f} layers saved"
            yield {
                **{key: row[key] for key in ("low", "high", "rows", "documents")},
                "line": f"read on {row['text']}",
                "x": row["disagreement"],
                "y": f"{row['map']}, {row['rule']}\n{row['method']}",
                "hollow": not row["promised"],
                "note": note + outcome,
                "colour": "good" if row["holds"] else "bad",
            }

    def marks(result: StudyResult) -> Iterator[Mark]:
        for row in result.rows("calibrated")[:1]:
            yield Mark("x", row["tolerance"], f"tolerance {100 * row['tolerance']:g} %")

    return Figure(
        "calibrated",
        "Promised and kept",
        "Left of the dashed line the tolerance is kept. Filled marks: texts for which the promise "
        "was made; hollow marks: other texts, for which it was not. Red: refuted.",
        rows,
        "dots",
        x=Axis("disagreement with the full model on fresh text", "share", 0, None),
        y=Axis("", "category"),
        marks=marks,
        dodge=True,
        size=(9.5, 4.0),
        sample="bars: 95 % intervals, the wider of that over documents and the exact binomial one",
    )


def calibrated_table() -> Table:
    """One row per calibrated rule and fresh text."""

    def rows(result: StudyResult) -> Iterator[Row]:
        for row in result.rows("calibrated"):
            is_within = row["disagreement"] <= row["tolerance"]
            outcome = "within" if is_within else "above, maybe by chance"
            if not row["holds"]:
                outcome = "BROKEN" if row["promised"] else "above, not promised"
            yield {**row, "outcome": outcome}

    colours = {"within": "good", "above, maybe by chance": "good"}
    colours |= {"BROKEN": "bad", "above, not promised": "partly"}
    return Table(
        "calibrated-table",
        "Calibrated exits on fresh text",
        rows,
        (
            Column("map", "read through"),
            Column("rule", note="method"),
            Column("knob", "threshold", "{:.3g}", note="note", words={None: "never exits"}),
            Column("text", "read on"),
            Column("promised", "promised?", words={True: "yes", False: "no"}),
            Column("outcome", "tolerance", colours=colours),
            estimate("disagreement", "disagreement (%)", "{:.2f}", 100),
            Column("saved", "layers saved", "{:.1f}"),
            Column("flops", "FLOPs / full", "{:.2f}"),
            Column("rows", "states", "{:,.0f}"),
        ),
        dense=True,
    )
