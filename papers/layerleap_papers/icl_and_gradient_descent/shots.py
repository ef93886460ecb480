"""Similarity by number of demonstrations: k shown, and the first k trained on.

In: the measurements of all tasks and seeds. Out: SimAOU and SimAM delta, mean over layers, after
each number of demonstrations.
"""

from collections.abc import Iterator

from layerleap import StudyResult, study
from layerleap.lens import nested_means
from layerleap.study import estimate, pick, points
from layerleap_papers.icl_and_gradient_descent.claims import MEASURES
from layerleap_papers.icl_and_gradient_descent.conditions import CURVE_QUERIES
from layerleap_papers.icl_and_gradient_descent.icl_accuracy import PANELS, names, panel
from layerleap_papers.icl_and_gradient_descent.icl_context import IclContext, layer_mean, merged
from layerleap_papers.icl_and_gradient_descent.rates import LINES, NAMES
from layerleap_papers.icl_and_gradient_descent.similarity import SAMPLE


def tables(context: IclContext) -> study.Tables:
    """Every stop of every training."""
    rows: list[study.Row] = []
    stops = context.settings.stops
    for task, cells in context.cells():
        for way in context.settings.ways:
            for stop in stops:
                for measure in ("aou", "amd"):
                    last = [
                        layer_mean(one)[:CURVE_QUERIES]
                        for one in merged(cells, f"{measure}/{way}/")
                    ]
                    own = merged(cells, f"shots/{stop}/{way}/{measure}")
                    if groups := last if stop == stops[-1] else own:
                        place = {"task": task, "way": way, "shots": stop, "measure": measure}
                        rows.append({**place, **nested_means(groups, bounds=(-1, 1))[0].to_dict()})
    return {"shots": rows}


def findings(result: StudyResult) -> Iterator[study.Said]:
    """Whether similarity grows with demonstrations."""
    for task in names(result):
        rows = [r for r in result.rows("shots", task=task, measure="aou") if r["value"] is not None]
        words = []
        for way in NAMES:
            own = [row for row in rows if row["way"] == way]
            if len(own) > 1:
                words.append(f"{own[0]['value']:.3f} to {own[-1]['value']:.3f} ({NAMES[way]})")
        if words:
            first, last = rows[0]["shots"], max(row["shots"] for row in rows)
            yield (
                f"{panel(result, task)}: from {first} to {last} demonstrations, SimAOU goes from "
                f"{', '.join(words)}."
            )


FIGURES = tuple(
    study.Figure(
        f"shots-{measure}",
        f"{MEASURES[measure]} by number of demonstrations",
        f"Mean over layers, on the first {CURVE_QUERIES} queries of every seed. The learning rate "
        "is the one chosen for all demonstrations.",
        points("shots", x="shots", line="{way}", panel="{task}", words=PANELS, measure=measure),
        x=study.Axis("demonstrations"),
        y=study.Axis(MEASURES[measure]),
        lines=LINES,
        unit="queries",
        sample=SAMPLE,
    )
    for measure in ("aou", "amd")
)

TABLES = (
    study.Table(
        "shots-table",
        "Similarity by number of demonstrations, mean over layers",
        pick("shots", words={"measure": MEASURES, "way": NAMES}),
        (study.Column("task"), study.Column("shots", "demonstrations")),
        across="{measure}, {way}",
        cells=(estimate("value", "", "{:.3f}"),),
    ),
)

SECTION = study.Section(
    key="shots",
    title="Does it grow with demonstrations?",
    run=tables,
    needs=("learns",),
    short="Demonstrations",
    help="similarity by number of demonstrations",
    lead="Training makes one pass over the demonstrations, so what it has learned after the first "
    "few can be compared with showing the same few.",
    findings=findings,
    shows=(*FIGURES, *TABLES),
)
