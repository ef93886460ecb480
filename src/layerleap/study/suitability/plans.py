"""Section "plans": calibrated rules, the best layers to check, and the verdict."""

from collections.abc import Iterator

from layerleap.study.engine import Section
from layerleap.study.exits import RULE_LINES
from layerleap.study.figures import Axis, Figure, Line, Mark
from layerleap.study.picks import pick
from layerleap.study.result import Finding, Row, StudyResult, Tables
from layerleap.study.suitability import candidates
from layerleap.study.suitability.chosen_plan import answer_of
from layerleap.study.suitability.reasons import ceilings, reasons
from layerleap.study.suitability.suitability_context import SuitabilityContext
from layerleap.study.tables import Column, Table, estimate


def run(context: SuitabilityContext) -> Tables:
    """Choose the fastest plan on some rows; calibrate it and every rule on others; verify them."""
    s, rows, prices = context.settings, context.rows, context.prices
    plans = candidates.all_candidates(context.model.n_layers)
    runs = candidates.dry_run(plans, rows, prices, s.tolerance, context.progress)
    best = candidates.fastest(plans, runs)
    tested = candidates.checked_everywhere(plans)
    tested += [] if best is None or best in tested else [best]
    rules = [
        {**candidates.outcome(plan, rows, prices, s.tolerance, s.delta), "chosen": plan == best}
        for plan in tested
    ]
    chosen = next((row for row in rules if row["chosen"]), None)
    return {
        "verdict": [{"answer": answer_of(chosen), "bank": s.bank_name}],
        "rules": rules,
        "plans": runs,
        "ceilings": candidates.ceilings(context.evidence, prices.timing),
    }


def findings(result: StudyResult) -> Iterator[Finding]:
    """The answer with its reasons; then what an oracle reaches."""
    yield Finding(f"Early exit here: {result.rows('verdict')[0]['answer']}.", headline=True)
    headlines = reasons(result)
    yield from (Finding(text, headline=True) for text in headlines)
    yield from (Finding(text, under="time") for text in ceilings(result) if text not in headlines)


def _times(result: StudyResult) -> Iterator[Row]:
    """Every rule that was tested, and what an oracle reaches."""
    for row in result.rows("rules"):
        title = "the fastest plan: " if row["chosen"] else ""
        name = f"{title}{row['map']}, {row['rule']}\nat {row['where']}"
        yield {**_dot(row, name, row["rule"]), **({} if row["exits"] else {"note": "never exits"})}
    for row in result.rows("ceilings"):
        yield _dot(row, f"{row['map']}, oracle\nwith free checks", "oracle")


def _dot(row: Row, name: str, line: str) -> Row:
    ends = {"x": row["time"], "low": row["time_low"], "high": row["time_high"]}
    return {**row, **ends, "y": name, "line": line, "note": f"{row['saved']:.1f} layers saved"}


def _where(result: StudyResult) -> Iterator[Row]:
    sample = result.row("splits", part="choose") or {}
    for row in result.rows("plans"):
        if len(row["layers"]) == 1:
            line = f"{row['map']}, {row['rule']}"
            yield {**sample, "line": line, "x": row["layers"][0], "y": row["time"]}


FULL = "the full model"
FIGURES = (
    Figure(
        "time",
        "What calibrated rules take",
        "The time of an answer as a fraction of the full model's: left of the dashed line, time is "
        "saved. The fastest plan was chosen on other rows. An oracle knows when a layer is right, "
        "and pays for no check: no rule can do better through the same map.",
        _times,
        "dots",
        x=Axis("time of an answer, relative to the full model", "times"),
        y=Axis("", "category"),
        lines=RULE_LINES,
        marks=lambda _: [Mark("x", 1.0, FULL)],
        size=(9.5, 4.4),
        sample="bars: 95 % intervals over documents; how much the times vary is said above",
    ),
    Figure(
        "where",
        "Where to check",
        "The expected time of an answer if a rule is checked at one layer only. Where no threshold "
        "is safe enough, the full model runs. Plans with several checks are in plans.csv.",
        _where,
        x=Axis("layer that is checked", "layer"),
        y=Axis("time, relative to the full model"),
        lines={
            "logit, gap": Line("logit, gap rule", "orange", "s", "dashed"),
            "linear, gap": Line("linear, gap rule", "blue"),
            "linear, entropy": Line("linear, entropy rule", "olive", "^"),
            "linear, learned": Line("linear, learned rule", "purple", "P"),
        },
        marks=lambda _: [Mark("y", 1.0, FULL)],
        size=(7.2, 3.8),
        sample="no interval: these rows only choose the plan",
    ),
)


RULES = Table(
    "rules-table",
    "Calibrated rules on fresh rows; FLOPs and time as fractions of the full model's",
    pick("rules", words={"chosen": {True: "fastest plan", False: ""}}),
    (
        Column("map", note="rule"),
        Column("where", "checked at", note="chosen"),
        Column("threshold", form="{:.3g}", words={None: "never exits"}),
        Column("saved", "layers saved", "{:.1f}"),
        estimate("disagreement", "differ (%)", "{:.1f}", 100),
        Column("flops", "FLOPs", "{:.2f}"),
        Column("time", form="{:.2f}", low="time_low", high="time_high"),
    ),
    terminal=True,
)

SECTION = Section(
    key="plans",
    title="Is there a rule that pays off?",
    run=run,
    required=True,
    needs=("times", "agreement"),
    short="Rules",
    lead="A plan is a rule, read through a map, checked at some layers. All are compared on some "
    "held-out rows, and the fastest is calibrated on others, beside each rule checked at every "
    "layer. Then both are measured on rows that none of this has seen.",
    findings=findings,
    shows=(*FIGURES, RULES),
)
