"""Sections "times" and "agreement": what an answer costs, and how early it can be read."""

from collections.abc import Iterator

from layerleap.act.exits.cost import measure_cost
from layerleap.act.exits.timing import measure_timing
from layerleap.lens.intervals import SHARE, Documents
from layerleap.study.engine import Section
from layerleap.study.figures import LENSES as LINES, Axis, Figure, Mark
from layerleap.study.picks import pick, points
from layerleap.study.result import Row, StudyResult, Tables
from layerleap.study.suitability.reasons import agreement, how_timed
from layerleap.study.suitability.suitability_context import LENSES, SuitabilityContext
from layerleap.study.tables import Column, Table, estimate


def _times(context: SuitabilityContext) -> Tables:
    """Measured seconds and counted FLOPs of one answer."""
    model, s, bank = context.model, context.settings, context.bank
    context.progress("timing", 0, s.repeats, "passes")
    timing = measure_timing(model, tokens=s.context, bank=bank, repeats=s.repeats)
    costs = {
        name: measure_cost(model, tokens=s.context, bank=maps)
        for name, maps in (("logit", None), ("linear", bank))
    }
    if timing.mode == "whole":
        costs = {name: cost.per_text() for name, cost in costs.items()}
    return {
        "timing": [timing.to_dict()],
        "costs": [{"map": name, **cost.to_dict()} for name, cost in costs.items()],
    }


def _parts(result: StudyResult) -> Iterator[Row]:
    """The parts of an answer, in seconds and FLOPs."""
    (timing,), cost = result.rows("timing"), result.rows("costs", map="linear")[0]
    yield {"part": "all blocks", "seconds": sum(timing["blocks"]), "flops": sum(cost["blocks"])}
    yield {"part": "the head", "seconds": timing["head"], "flops": cost["head"]}
    yield {"part": "all maps", "seconds": sum(timing["maps"]), "flops": sum(cost["maps"])}
    yield {"part": "looking at what the head gives", "seconds": timing["check"], "flops": None}


TIMES = Section(
    key="times",
    title="What does an answer cost here?",
    run=_times,
    required=True,
    short="Times",
    lead="Every part of an answer is timed on this machine, and its products are counted. A check "
    "applies the map of its layer, runs the head, and looks at what it gives.",
    findings=lambda result: [how_timed(result)],
    shows=(
        Table(
            "times-table",
            "The parts of one answer",
            _parts,
            (
                Column("part"),
                Column("seconds", "time (ms)", "{:.3g}", 1000),
                Column("flops", "FLOPs (millions)", "{:,.3g}", 1e-6),
            ),
        ),
    ),
)


def _agreement(context: SuitabilityContext) -> Tables:
    """By map and layer, the share of held-out rows that are read as the model answers."""
    scores = context.readings
    documents = Documents(scores.documents)
    rows = [
        {"map": name, "layer": layer, **share.to_dict()}
        for name, lens in LENSES.items()
        for layer, share in enumerate(documents.means((scores.rank[lens] == 0).double(), SHARE))
    ]
    return {"agreement": rows, "splits": context.rows.counts()}


AGREEMENT = Section(
    key="agreement",
    title="How early can the answer be read?",
    run=_agreement,
    required=True,
    short="Agreement",
    lead="Every layer of held-out texts is read, and its top answer compared with the full "
    "model's. This alone does not say when a layer can be trusted: rules have to find out.",
    findings=agreement,
    shows=(
        Figure(
            "agreement",
            "Agreement with the full model by layer",
            "The share of answers that can be read at each layer, and what the tolerance asks for.",
            points("agreement", line="{map}"),
            y=Axis("agreement with the full model", "share"),
            lines=LINES,
            marks=lambda result: [Mark("y", 1 - result.settings["tolerance"], "the tolerance")],
            size=(7.2, 3.8),
        ),
        Table(
            "agreement-table",
            "Agreement with the full model by layer (%)",
            pick("agreement"),
            (Column("layer"),),
            across="map",
            cells=(estimate("value", "", "{:.1f}", 100),),
            terminal=True,
        ),
    ),
)
