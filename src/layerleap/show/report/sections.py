"""The optional sections of the report: parts, alternation, exits, promises, training, sizes.

In: the plain-data result of a study. Out: sections with figures, tables and fixed words; a part
that the study does not have (absent or None) has no section.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from layerleap.show.figures.calibrated_figure import calibrated_figure
from layerleap.show.figures.exit_figures import exit_figure, exit_flops_figure, exit_rule_figure
from layerleap.show.figures.lens_figures import size_figure, tuned_figure
from layerleap.show.figures.part_figures import alternation_figure, part_figure
from layerleap.show.figures.select import Study, has_interval, sample, span
from layerleap.show.html.generation import generation_html
from layerleap.show.report.data_files import calibrated_rows
from layerleap.show.report.page import Figure, Table, said, sampled
from layerleap.show.report.section_tables import (
    calibrated_table,
    part_table,
    saved_table,
    schedule_table,
    size_table,
    tuned_table,
)


@dataclass(frozen=True)
class TableOf:
    """A table with its place on the page."""

    id: str
    caption: str
    table: Table
    kind: str = ""


@dataclass(frozen=True)
class Text:
    """A text whose tokens left early, coloured."""

    title: str
    html: str


def texts_of(exits: Study) -> tuple[Text, ...]:
    """What rules wrote, if anything."""
    return tuple(
        Text(f"{row['map']}, {row['rule']}", generation_html(row))
        for row in exits.get("texts") or ()
    )


@dataclass(frozen=True)
class Section:
    """One optional section; `seen` are findings on the section as a whole."""

    key: str
    title: str
    short: str
    lead: tuple[str, ...]
    seen: tuple[str, ...]
    figures: tuple[Figure, ...]
    tables: tuple[TableOf, ...]
    texts: tuple[Text, ...] = ()

    @property
    def topics(self) -> set[str]:
        """The topics whose findings are shown here."""
        return {self.key, *(figure.key for figure in self.figures)}


def sections(study: Study) -> list[Section]:
    """The sections that the study has data for, in reading order."""
    makers: dict[str, Callable[[Study], Section]] = {
        "parts": _parts,
        "schedules": _schedules,
        "exits": _exits,
        "calibrated": _calibrated,
        "tuned": _tuned,
        "sizes": _sizes,
    }
    return [make(study) for key, make in makers.items() if study.get(key)]


def _section(
    study: Study,
    key: str,
    title: str,
    short: str,
    lead: tuple[str, ...],
    figures: list[Figure | None],
    tables: list[TableOf],
) -> Section:
    """A section without the figures and tables that there is no data for."""
    drawn = tuple(figure for figure in figures if figure is not None)
    seen = () if any(figure.key == key for figure in drawn) else said(study, key)
    filled = tuple(table for table in tables if table.table[1])
    return Section(key, title, short, lead, seen, drawn, filled)


def _figure(study: Study, key: str, title: str, svg: str | None, how: str, n: str) -> Figure | None:
    return None if svg is None else Figure(key, title, svg, said(study, key), how, n)


def _parts(study: Study) -> Section:
    found = study["parts"]
    lead = (
        "A block has parts: attention, a feed-forward network and norms. Here one kind of part is "
        "replaced by a matrix in every block after the start layer, and all else runs as it is.",
        *([f"Not done for this model: {found['reason']}"] if found.get("reason") else []),
    )
    how = (
        "Further right, fewer blocks are changed. Replaced parts still run the rest of their "
        "block; mat and id skip all blocks. Thick lines are maps without an intercept, as in the "
        "paper."
    )
    if any(row["bias"] for row in found.get("scores") or []):
        how += " Thin dashed lines are the same maps fitted with an intercept."
    caption = (
        "Parts replaced, per start layer: Precision@1 in %, and surprisal in nats; +b: fitted with "
        "an intercept"
    )
    svg = part_figure(study)
    n = sampled(found.get("scores") or [])
    table = TableOf("parts-table", caption, part_table(study), "dense")
    title = "Which part of a block can be linear?"
    figure = _figure(study, "parts", "Parts of a block replaced", svg, how, n)
    return _section(study, "parts", title, "Parts", lead, [figure], [table])


def _schedules(study: Study) -> Section:
    lead = (
        "Instead of one jump at the end, jumps and blocks can take turns. A schedule is written as "
        "it runs: 0-3~6-9 runs the blocks from layer 0 to layer 3, jumps to layer 6, and runs on "
        "to layer 9.",
    )
    how = (
        "Each dot is one schedule; those at the same place on the lower axis run as many blocks. "
        "Dots above the line of single jumps mean that taking turns is worth it."
    )
    svg, n = alternation_figure(study), sampled(study["schedules"])
    figure = _figure(study, "alternation", "Blocks and jumps in turn", svg, how, n)
    table = TableOf("schedules-table", "Schedules", schedule_table(study))
    return _section(
        study, "schedules", "Jumps between blocks", "Alternation", lead, [figure], [table]
    )


def _exits(study: Study) -> Section:
    found = study["exits"]
    n = sampled(found.get("curves") or [])
    figures = [
        _figure(study, "exit", "Agreement kept against layers run", exit_figure(study),
                "The gap rule stops where the best token is far enough ahead of the second. Each "
                "dot is one threshold; higher and further left is better. Dashed: every token "
                "leaves at the same layer. Star: an oracle that leaves at the first layer "
                "whose reading is the model's answer; no rule can know this.", n),
        _figure(study, "exit_rules", "All rules", exit_rule_figure(study),
                "The same axes, one line per rule. A rule is worth its trouble only above the "
                "dashed line of fixed exits.", n),
        _figure(study, "exit_flops", "Agreement kept against compute", exit_flops_figure(study),
                "The lower axis counts all that is computed, readings included, and doubles with "
                "each step. Right of the line, exiting early costs more than running the whole "
                "model.", n),
    ]  # fmt: skip
    caption = (
        "Layers and FLOPs saved at a given agreement with the full model, by map and rule; small "
        "numbers are 95 % intervals; a dash: not reached; FLOPs below 0: exiting costs more than "
        "it saves"
    )
    table = TableOf("saved-table", caption, saved_table(study), "dense")
    lead = ("A token that is sure early can leave early.", _costs(study))
    made = _section(study, "exits", "Early exit", "Early exit", lead, figures, [table])
    return replace(made, texts=texts_of(found))


def _costs(study: Study) -> str:
    cost = study["exits"]["cost"]
    return (
        "To be sure, a rule has to look, and looking costs: with a context of "
        f"{cost['tokens']:,.0f} tokens one block takes {cost['block'] / 1e6:,.1f} million FLOPs, "
        f"one map {cost['map'] / 1e6:,.1f} million, and the head, which turns a state into "
        f"probabilities, {cost['head'] / 1e6:,.1f} million: as much as "
        f"{cost['head_in_blocks']:.1f} blocks. Layers saved are therefore not compute saved, and "
        "both are shown."
    )


def _calibrated(study: Study) -> Section:
    found, rows = study["calibrated"], calibrated_rows(study)
    splits = found["splits"]
    lead = (
        f"A threshold chosen on some rows can come with a promise for other rows like them: "
        f"disagreement of at most {100 * found['tolerance']:g} %. Learn-then-test keeps it with a "
        f"probability of {100 * (1 - found['delta']):g} %, conformal risk control on average. "
        f"States used: {splits['train']:,}, of documents apart, to train the learned rule, "
        f"{splits['calibrate']:,} to choose the threshold, {splits['verify']:,} other ones of the "
        "same documents to see whether the promise was kept.",
    )
    how = (
        "Left of the dashed line the tolerance is kept. Filled marks are texts for which it was "
        "promised; hollow marks are texts of another kind, for which nothing was."
    )
    band = "no interval, which needs two documents or more"
    if has_interval(rows):
        band = "bars: 95 % intervals, the wider of bootstrap over documents and exact binomial"
    figure = _figure(
        study, "calibrated", "Promised and kept", calibrated_figure(study), how,
        f"{sample(rows)}; {band}; calibrated on {span(r['calibrated_on'] for r in rows)} states.",
    )  # fmt: skip
    cells = calibrated_table(study)
    table = TableOf("calibrated-table", "Calibrated exits on fresh text", cells)
    return _section(
        study, "calibrated", "Exits with a promise", "Promises", lead, [figure], [table]
    )


def _tuned(study: Study) -> Section:
    found = study["tuned"]
    lead = (
        "A shortcut is fitted in one step, to states. A tuned lens is trained in many steps, to "
        "answers. The question is what training adds, and how much text it takes to get ahead.",
    )
    how = (
        "Left: lower is better; middle: higher is better; right: rows of training until KL was "
        "below that of the closed form, on a log scale."
    )
    seen = span(row["rows_seen"] for row in found.get("progress") or [])
    n = (
        f"Looked at after {seen} rows of training; these are single runs without an interval. "
        "With intervals, tuned is in the figures of agreement, surprisal and KL."
    )
    n = f"{_tuned_sample(study)}{n}"
    figure = _figure(study, "tuned", "Closed form against training", tuned_figure(study), how, n)
    table = TableOf("tuned-table", "Training against the closed form", tuned_table(study))
    return _section(study, "tuned", "Fitted or trained?", "Training", lead, [figure], [table])


def _tuned_sample(study: Study) -> str:
    judged = study["tuned"].get("judged")
    if not judged:
        return ""
    return (
        f"n = {judged['rows']:,} states of {judged['documents']:,} documents that were not trained "
        "on; they also chose where training stopped, which flatters it a little. "
    )


def _sizes(study: Study) -> Section:
    lead = ("The same study on several models, laid over each other by relative depth.",)
    how = "One colour per model; solid is the linear shortcut, dashed the logit lens."
    svg, n = size_figure(study), sampled(study["sizes"])
    figure = _figure(study, "sizes", "Agreement by relative depth", svg, how, n)
    table = TableOf("sizes-table", "Agreement (%) by relative depth", size_table(study))
    return _section(study, "sizes", "Models of several sizes", "Sizes", lead, [figure], [table])
