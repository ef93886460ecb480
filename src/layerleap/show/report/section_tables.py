"""The tables of the optional parts of a study, as cells for the page.

In: the plain-data result of a study. Out: heads and rows; a part without rows has no rows here.
"""

from layerleap.show.figures.part_figures import part_curves
from layerleap.show.figures.select import PRECISIONS, Row, Study, finite, map_rank
from layerleap.show.report.data_files import calibrated_rows, optional_rows
from layerleap.show.report.page import DASH, Cell, Table, number_cell, value_cell

PERCENT = "{:.1f}"


def part_table(study: Study) -> Table:
    """Precision@1 and surprisal per start layer, a column per replaced part."""
    curves = [
        (each, bias)
        for metric in ("precision@1", "surprisal")
        for bias in (False, True)
        for each in part_curves(study, metric, bias)
    ]
    names = {"precision@1": "P@1", "surprisal": "nats"}
    head = ["from layer"]
    head += [f"{names[each.metric]} {each.map}{' +b' if bias else ''}" for each, bias in curves]
    layers = sorted({point.layer for each, _ in curves for point in each.points})
    rows = []
    for layer in layers:
        cells = [Cell(str(layer), sort=layer)]
        for each, _ in curves:
            point = each.at(layer)
            form, scale = (PERCENT, 100) if each.metric in PRECISIONS else ("{:.2f}", 1)
            if point is None:
                cells.append(Cell(DASH))
            else:
                cells.append(value_cell(point.value, point.low, point.high, form, scale))
        rows.append(cells)
    return head, rows


def schedule_table(study: Study) -> Table:
    """One row per schedule, a column per measure."""
    found = study.get("schedules") or []
    metrics = list(dict.fromkeys(row["metric"] for row in found))
    by = {(row["kind"], row["schedule"], row["metric"]): row for row in found}
    firsts = {(row["kind"], row["schedule"]): row for row in reversed(found)}
    rows = []
    for kind, schedule in dict.fromkeys((row["kind"], row["schedule"]) for row in found):
        blocks = firsts[kind, schedule]["blocks"]
        cells = [Cell(schedule), Cell(kind), number_cell(blocks, "{:.0f}")]
        for metric in metrics:
            row = by.get((kind, schedule, metric), {})
            form, scale = (PERCENT, 100) if metric in PRECISIONS else ("{:.2f}", 1)
            ends = (row.get("value"), row.get("low"), row.get("high"))
            cells.append(value_cell(*ends, form, scale))
        rows.append(cells)
    named = [f"{metric} (%)" if metric in PRECISIONS else metric for metric in metrics]
    return ["schedule", "kind", "blocks run", *named], rows


def saved_table(study: Study) -> Table:
    """Layers saved per map and rule at each target; beside them the FLOPs saved."""
    found = optional_rows(study)["exits_saved"]
    targets = sorted({row["target"] for row in found})
    by = {(row["map"], row["rule"], row["target"]): row for row in found}
    rows = []
    pairs = dict.fromkeys((row["map"], row["rule"]) for row in found)
    for name, rule in sorted(pairs, key=lambda pair: map_rank(pair[0])):
        cells = [Cell(f"{name}, {rule}")]
        for target in targets:
            cells += _saved_cells(by.get((name, rule, target), {}))
        rows.append(cells)
    head = ["map, rule"]
    for target in targets:
        head += [f"layers saved at {100 * target:g}\u00a0%", "FLOPs saved"]
    return head, rows


def _saved_cells(row: Row) -> list[Cell]:
    """Layers with interval and share of all layers; FLOPs as a share, negative where lost."""
    layers = value_cell(row.get("saved"), row.get("low"), row.get("high"), "{:.1f}")
    share = finite(row.get("share"))
    if layers.sort is not None and share is not None:
        layers = Cell(f"{layers.text} ({100 * share:.0f} %)", layers.small, layers.sort)
    flops = finite(row.get("flops"))
    return [layers, number_cell(None if flops is None else 100 * flops, "{:.0f} %")]


def calibrated_table(study: Study) -> Table:
    """One row per calibrated rule and fresh text, with whether the tolerance was kept."""
    head = ["map, rule", "setting", "read on", "promised?", "kept?", "disagreement (%)"]
    head += ["layers saved", "FLOPs / full model's", "states"]
    rows = []
    for row in calibrated_rows(study):
        ends = (row.get("disagreement"), row.get("low"), row.get("high"))
        rows.append([
            Cell(f"{row['map']}, {row['rule']}", row["method"]), _setting(row),
            Cell(row.get("text") or DASH), Cell("yes" if row.get("promised") else "no"),
            _kept(row, study["calibrated"]["tolerance"]),
            value_cell(*ends, "{:.2f}", 100), number_cell(row.get("saved"), "{:.1f}"),
            number_cell(row.get("flops"), "{:.2f}"), number_cell(row.get("rows"), "{:,.0f}"),
        ])  # fmt: skip
    return head, rows


def _setting(row: Row) -> Cell:
    knob, note = finite(row.get("knob")), row.get("note") or ""
    return Cell("exits nowhere", note) if knob is None else Cell(f"{knob:.3g}", note)


def _kept(row: Row, tolerance: float) -> Cell:
    """A promise broken is a failure; too much disagreement where none was made is not."""
    if row.get("holds") is None:
        return Cell(DASH)
    if row["holds"]:
        is_within = row["disagreement"] <= tolerance
        return Cell("within" if is_within else "not refuted", verdict="holds")
    return Cell("BROKEN", verdict="fails") if row["promised"] else Cell("above", verdict="partly")


def tuned_table(study: Study) -> Table:
    """What training needed to get ahead of the closed form, per layer and start."""
    forms = {"layer": "{:.0f}", "rows_needed": "{:,.0f}", "seconds_needed": "{:,.1f}"}
    forms |= {"kl_closed": "{:.2f}", "kl_tuned": "{:.2f}"}
    head = ["layer", "started from", "rows until ahead", "seconds", "KL closed", "KL tuned"]
    head += ["P@1 closed (%)", "P@1 tuned (%)"]
    rows = []
    for row in optional_rows(study)["tuned"]:
        cells = [number_cell(row.get(key), form) for key, form in forms.items()]
        if row["rows_needed"] is None:
            cells[1] = Cell("never")
        for key in ("agreement_closed", "agreement_tuned"):
            cells.append(value_cell(row.get(key), None, None, PERCENT, 100))
        rows.append([cells[0], Cell(row["start"]), *cells[1:]])
    return head, rows


def size_table(study: Study) -> Table:
    """Precision@1 of each model a quarter, a half and three quarters of the way down."""
    found = [row for row in study.get("sizes") or [] if row["metric"] == "precision@1"]
    by = {(row["model"], row["map"], row["layer"]): row for row in found}
    rows = []
    for model in dict.fromkeys(row["model"] for row in found):
        first = next(row for row in found if row["model"] == model)
        n_layers = first["n_layers"]
        counts = [first["parameters"], n_layers, first["d_model"]]
        cells = [Cell(model), *(number_cell(count, "{:,.0f}") for count in counts)]
        for name in ("mat", "id"):
            for quarter in (1, 2, 3):
                row = by.get((model, name, round(n_layers * quarter / 4)), {})
                ends = (row.get("value"), row.get("low"), row.get("high"))
                cells.append(value_cell(*ends, PERCENT, 100))
        rows.append(cells)
    head = ["model", "parameters", "layers", "width"]
    head += [f"P@1 {name} at {quarter / 4:.0%}" for name in ("mat", "id") for quarter in (1, 2, 3)]
    return head, rows
