"""What the report of a study of saturation says: sections, captions, tables and data files.

In: the plain-data result of the study. Out: values that the template only lays out, and CSV files.
"""

from typing import Any

from layerleap.show.figures.saturation_figures import (
    histogram_figure,
    intervention_figure,
    place_figure,
    tau_cells,
    tau_figure,
)
from layerleap.show.figures.select import Row, Study
from layerleap.show.figures.task_figures import (
    auc_figure,
    confusion_figure,
    task_exit_figure,
    task_flops_figure,
)
from layerleap.show.report import page
from layerleap.show.report.data_files import calibrated_rows, csv_text
from layerleap.show.report.page import Cell, Figure, Table, number_cell, said, value_cell
from layerleap.show.report.section_tables import calibrated_table, saved_table
from layerleap.show.report.sections import Section, TableOf, texts_of

VALUE = ("value", "low", "high", "rows", "documents")
COLUMNS = {
    "places": ("lens", "filtered", "rank", *VALUE),
    "steps": ("lens", "filtered", "ranks", *VALUE),
    "histogram": ("lens", "rank", "layer", "rows"),
    "tau": ("lens", "ranks", "filtered", *VALUE),
    "guesses": ("lens", "rank", "early", "late", "difference", "low", "high", "z", "p"),
    "probe": ("lens", "measure", "task", "value", "low", "high", "chance", "null", "p", "control"),
    "intervention": ("model", "kind", "offset", "pairs", "share", "low", "high"),
    "contrasts": ("model", "offset", "pairs", "donor", "control", "difference", "low", "high", "p"),
    "exits": ("map", "rule", "knob", "layers", "flops", "agreement", "low", "high", "accuracy"),
    "exits_saved": ("map", "rule", "target", "saved", "low", "high", "share", "flops"),
    "calibrated": ("map", "rule", "method", "knob", "disagreement", "low", "high", "layers"),
    "live": ("map", "rule", "speed", "low", "high", "tokens_per_second", "layers", "agreement"),
    "claims": ("claim", "agrees", "seen", "why"),
}


def csv_files(study: Study) -> dict[str, str]:
    """The text of every CSV file of the study, by file name; tables without rows make none."""
    found = _tables(study)
    return {
        f"{name}.csv": csv_text(found[name], columns)
        for name, columns in COLUMNS.items()
        if found[name]
    }


def _tables(study: Study) -> dict[str, list[Row]]:
    orders, exits = study["order"].items(), study["exits"] or {}
    runs = {"this model": study["intervention"]}
    runs["untrained twin"] = (study["twin"] or {}).get("intervention")
    known = {name: one for name, one in runs.items() if one}
    return {
        **{
            key: [{"lens": name, **_flat(row)} for name, one in orders for row in one[key]]
            for key in ("places", "steps", "tau")
        },
        "histogram": [
            {"lens": name, "rank": row["rank"], "layer": layer, "rows": count}
            for name, one in orders
            for row in one["histogram"]
            for layer, count in enumerate(row["counts"])
        ],
        "guesses": [
            {"lens": name, **_flat(row)}
            for name, one in study["guesses"].items()
            for row in one["tests"]
        ],
        "probe": [{"lens": name, **r} for name, one in study["probe"].items() for r in one["rows"]],
        "intervention": [{"model": name, **r} for name, one in known.items() for r in one["rows"]],
        "contrasts": [{"model": n, **r} for n, one in known.items() for r in one["contrasts"]],
        "exits": exits.get("curves") or [],
        "exits_saved": exits.get("saved") or [],
        "calibrated": calibrated_rows(exits),
        "live": exits.get("live") or [],
        "claims": study["claims"],
    }


NULLS = ("exchangeable", "walk")  # of a tau, if there were rows enough


def _flat(row: Row) -> Row:
    """Rows inside a row get names of their own; lists become words."""
    found: Row = {}
    for key, value in row.items():
        if value is None and key in NULLS:
            continue  # other rows have its parts
        if isinstance(value, dict):
            found |= {f"{key}_{inner}": item for inner, item in value.items()}
        else:
            found[key] = " to ".join(map(str, value)) if isinstance(value, list) else value
    return found


def values(study: Study) -> dict[str, Any]:
    """What the template `saturation.html.j2` needs."""
    found = sections(study)
    shown = {"headline", "calibrated", "live", *(["twin"] if study["order"] else [])}
    shown |= {topic for section in found for topic in section.topics}
    return {
        "sections": found,
        "also": page.unshown(study, shown),
        "claims": page.claim_table(study),
        "files": list(csv_files(study)),
        "data": page.data_table(study),
    }


def sections(study: Study) -> list[Section]:
    """The sections that the study has data for, in reading order."""
    made = [_order(study), _guesses(study), _probe(study), _intervention(study), _exits(study)]
    return [section for section in made if section is not None]


def _figure(study: Study, key: str, title: str, svg: str | None, how: str, n: str) -> list[Figure]:
    return [] if svg is None else [Figure(key, title, svg, said(study, key), how, n)]


def _rows(found: dict[str, Row]) -> str:
    """How much each lens was judged by."""
    one = next(iter(found.values()))  # all lenses read the same
    n = f"{one['rows']:,} positions of {one['documents']:,} documents"
    return f"n = {n}; 95 % intervals, bootstrap over documents."


def _order(study: Study) -> Section | None:
    found = study["order"]
    if not found:
        return None
    n = _rows(found)
    lead = (
        "If the ranks of a prediction are settled one after the other, rank 1 should settle first, "
        "then rank 2, and so on. Two things make ranks look ordered without that: selecting "
        "positions by their first rank, and gaps between logits that shrink from rank to rank. "
        "So order has to beat two nulls: ranks exchanged before anything is selected, and random "
        "walks of logits with the model's own steps.",
    )
    figures = [
        *_figure(study, "places", "Mean saturation rank", place_figure(study),
                 "The place of each rank among all ranks of its position, over positions in which "
                 "it settles. 'Settled early' is the paper's filter.", n),
        *_figure(study, "histogram", "Where ranks settle", histogram_figure(study),
                 "Share of positions that settle at each layer; those of the last layer, in grey "
                 "and cut where they are too many, never do.", n),
        *_figure(study, "tau", "Order against two nulls", tau_figure(study),
                 "The mean over positions of the share of pairs of ranks in order, less the share "
                 "not in order; ties count as not in order, so chance lies below 0.", n),
    ]  # fmt: skip
    twin = said(study, "twin")
    level = next(iter(study["order"].values()))["settings"]["level"]
    caption = (
        "Strict tau and its two nulls, by selection. A null is beaten if p is at most "
        f"{level:g} and the interval over documents is clear of it"
    )
    table = TableOf("tau-table", caption, _taus(study), "dense")
    title = "Do ranks settle in order?"
    return Section("order", title, "Order", lead, twin, tuple(figures), (table,))


def _taus(study: Study) -> Table:
    """Every selection of ranks and positions, with both nulls and whether they are beaten."""
    head = ["selection", "tau", "exchangeable", "p", "beaten?", "same rows", "random walks", "p"]
    head += ["beaten?", "positions"]
    rows = []
    for label, tau in tau_cells(study):
        null, walk = tau["exchangeable"] or {}, tau["walk"] or {}
        rows.append([
            Cell(label), value_cell(tau["value"], tau["low"], tau["high"], "{:.3f}"),
            value_cell(null.get("mean"), null.get("low"), null.get("high"), "{:.3f}"),
            number_cell(null.get("p"), "{:.3g}"), _beaten(tau["beats_exchangeable"]),
            number_cell(walk.get("value"), "{:.3f}"), number_cell(walk.get("mean"), "{:.3f}"),
            number_cell(walk.get("p"), "{:.3g}"), _beaten(tau["beats_walk"]),
            number_cell(tau["rows"], "{:,.0f}"),
        ])  # fmt: skip
    return head, rows


def _beaten(answer: bool | None) -> Cell:
    """None: too few documents or walks to tell."""
    if answer is None:
        return Cell("cannot tell", verdict="open")
    return Cell("yes", verdict="holds") if answer else Cell("no", verdict="fails")


def _guesses(study: Study) -> Section | None:
    if not study["guesses"]:
        return None
    head = ["through", "rank", "right if early (%)", "right if late (%)"]
    head += ["difference (points)", "p"]
    rows = []
    for name, found in study["guesses"].items():
        for row in found["tests"]:
            shares = [
                value_cell(row[k]["value"], row[k]["low"], row[k]["high"], "{:.1f}", 100)
                for k in ("early", "late")
            ]
            ends = (row["difference"], row["low"], row["high"])
            more = [value_cell(*ends, "{:+.1f}", 100), number_cell(row["p"], "{:.2g}")]
            rows.append([Cell(name), number_cell(row["rank"], "{:.0f}"), *shares, *more])
    lead = (
        "Among positions whose top token is wrong: is the token at rank 2, 3 or 4 right more often "
        "if it settled early than if only the last block put it there?",
    )
    caption = "Right answers among runners-up; a dash: too few of them to test"
    table = TableOf("guesses-table", caption, (head, rows))
    return Section(
        "guesses", "Better guesses", "Guesses", lead, said(study, "guesses"), (), (table,)
    )


def _probe(study: Study) -> Section | None:
    found = study["probe"]
    if not found:
        return None
    seen = "; ".join(
        f"{name} {one['cells']:,} (position, layer) of {one['documents']:,} documents"
        for name, one in found.items()
    )
    n = (
        f"n = {seen}, balanced in each layer; folds by document; 95 % intervals, bootstrap over "
        "documents."
    )
    lead = (
        "A layer between the saturation layers of two ranks is said to work on the next rank. A "
        "logistic regression is asked for that task, given one state and not told the layer.",
    )
    figures = [
        *_figure(study, "probe", "What the probe says", confusion_figure(study),
                 "Each row sums to 100 %; the diagonal is right.", n),
        *_figure(study, "auc", "Each task against the rest", auc_figure(study),
                 "0.5 is chance. Labels are exchanged between positions within each layer; states "
                 "that know nothing are random walks with the model's step sizes.", n),
    ]  # fmt: skip
    title = "Can the task be read off a state?"
    return Section("probe", title, "Tasks", lead, (), tuple(figures), ())


def _intervention(study: Study) -> Section | None:
    found = study["intervention"]
    if found is None:
        return None
    n = f"n = {found['pairs']} pairs of {found['documents']} documents; 95 % intervals (Wilson)."
    figures = _figure(
        study, "intervention", "A settled state in another text", intervention_figure(study),
        "The state of a donor that ends with the same token is put into the stream of a recipient. "
        "At offset -1, shaded, a donor cannot succeed.", n,
    )  # fmt: skip
    return Section(
        "intervention", "Does a settled state stay settled elsewhere?", "Intervention",
        ("Success: the recipient ends with its own top token and settles at the injection.",),
        (), tuple(figures), (),
    )  # fmt: skip


def _exits(study: Study) -> Section | None:
    found = study["exits"]
    if found is None:
        return None
    one = found["saved"][0]
    n = (
        f"n = {one['rows']:,} positions of {one['documents']:,} documents that neither probe nor "
        "learned rule have seen; 95 % bands, bootstrap over documents. Settings for a wanted "
        "agreement are chosen on these positions."
    )
    lead = (
        "If the probe says that rank 2 or later is being decided, the top token is settled and one "
        "may stop. All rules are replayed on the same positions; blocks, heads, maps and checks "
        "are counted. The oracle knows the answer.",
    )
    figures = [
        *_figure(study, "exits", "Exits against layers", task_exit_figure(study),
                 "Agreement with the full model, and right answers where they are known; the "
                 "dotted line is the full model's.", n),
        *_figure(study, "flops", "Exits against FLOPs", task_flops_figure(study),
                 "Right of 1 exiting costs more than it saves: a rule that reads pays the head at "
                 "every layer, one that looks at states pays it once.", n),
    ]  # fmt: skip
    tables = [TableOf("saved-table", "Layers saved at a wanted agreement", _saved(study), "dense")]
    if found["calibrated"] is not None:
        table = calibrated_table({"calibrated": found["calibrated"]})
        caption = "Calibrated thresholds on fresh rows"
        tables.append(TableOf("calibrated-table", caption, table, "dense"))
    if found["live"]:
        caption = (
            "The same rules live, against the clock (one text at a time, on this machine; 95 % t "
            "intervals over texts)"
        )
        tables.append(TableOf("live-table", caption, _live(found)))
    seen = said(study, "calibrated") + said(study, "live")
    title = "Exiting by task"
    return Section(
        "exits", title, "Exits", lead, seen, tuple(figures), tuple(tables), texts_of(found)
    )


def _live(exits: Row) -> Table:
    """Live texts have no right answers; those are of the same rule, replayed."""
    head = [
        "map, rule",
        "speed (never exiting = 1)",
        "tokens a second",
        "read at layer",
        "agreement (%)",
    ]
    head += ["right, replayed (%)", "tokens"]
    right = {"never": exits["full"]["accuracy"], **exits["right"]}
    rows = [
        (row["rule"] if row["map"] == "-" else f"{row['map']}, {row['rule']}", row)
        for row in exits["live"]
    ]
    cells = [
        [
            Cell(name),
            value_cell(row["speed"], row["low"], row["high"], "{:.2f}"),
            number_cell(row["tokens_per_second"], "{:.1f}"), number_cell(row["layers"], "{:.1f}"),
            value_cell(row["agreement"], None, None, "{:.1f}", 100),
            value_cell(right[name], None, None, "{:.1f}", 100),
            number_cell(row["tokens"], "{:.0f}"),
        ]
        for name, row in rows
    ]  # fmt: skip
    return head, cells


def _saved(study: Study) -> Table:
    return saved_table({"exits": study["exits"]})
