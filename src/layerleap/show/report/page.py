"""What the report says, worked out before any HTML: captions, tiles and table rows.

In: the plain-data result of a study. Out: strings and rows that the template only lays out.
"""

from dataclasses import dataclass
from typing import Any

from layerleap.show.figures import curves as figures
from layerleap.show.figures.select import (
    PRECISIONS,
    Row,
    Study,
    curve,
    final_fits,
    finite,
    has_interval,
    home,
    home_curves,
    home_rows,
    map_names,
    r2_cells,
    sample,
    span,
    transfers,
)

DASH, MINUS = "\u2013", "\u2212"


@dataclass(frozen=True)
class Figure:
    """One figure of the page; the caption has what is seen, the sample has its n."""

    key: str
    title: str
    svg: str
    seen: tuple[str, ...]
    how: str
    sample: str
    narrow: bool = False


@dataclass(frozen=True)
class Cell:
    """One cell of a table: what is read, the small print, and what it is sorted by.

    A `verdict` is the class of a coloured word: "holds", "fails", "partly" or "open".
    """

    text: str
    small: str = ""
    sort: float | None = None
    verdict: str = ""


Table = tuple[list[str], list[list[Cell]]]


@dataclass(frozen=True)
class Tile:
    """One number of the head of the page: mat beside id; shares (0 to 1) become bars."""

    title: str
    mat: str
    id: str
    mat_share: float
    id_share: float


def said(study: Study, topic: str) -> tuple[str, ...]:
    """The study's findings on a topic."""
    return tuple(row["text"] for row in study["findings"] if row["topic"] == topic)


def figures_of(study: Study) -> list[Figure]:
    """The figures that the study has data for, in reading order."""
    token = "masked" if study["model"]["kind"] == "masked-token" else "next"
    scored = sampled(home_rows(study))
    drawn = [
        ("precision", "Agreement", figures.precision_curves(study), scored, False,
         f"How often the reading's top token is the model's own {token} token (Precision@1), or "
         "among its five or ten best. Higher is better."),
        ("r2", "Fit between layers", figures.r2_heatmaps(study), _r2_sample(study), False,
         "R\u00b2 on held-out documents for every pair of layers, averaged over coordinates: 1 is "
         "a perfect prediction, 0 no better than the mean. Values below 0 are shown as 0."),
        ("surprisal", "Surprisal", figures.surprisal_curves(study), scored, True,
         "How unlikely the full model finds the reading's top token, in nats. The dotted floor is "
         "the model's surprisal at its own top token; it is not 0."),
        ("kl", "KL divergence", figures.kl_curves(study), scored, True,
         "How far the whole distribution of the reading is from the model's, in nats. "
         "Lower is better; 0 is the same distribution."),
        ("transfer", "Other texts", figures.transfer_curves(study), _transfer_sample(study), False,
         "Agreement on each text, with maps fitted on that text and on the other ones; where one "
         "text is much larger, also with maps fitted on as little of it. "
         "Curves that lie together mean that the maps are about the model, not the text."),
        ("fit", "Condition", figures.condition_plot(study), _fit_sample(study), False,
         "Condition number per source layer: how unevenly the source states fill their directions. "
         "The higher it is, the less the weakest directions of a map can be trusted."),
    ]  # fmt: skip
    return [
        Figure(key, title, svg, said(study, key), how, n, narrow)
        for key, title, svg, n, narrow, how in drawn
        if svg is not None
    ]


def sampled(rows: list[Row]) -> str:
    """How much was measured, and what the bands of a figure are."""
    if not has_interval(rows):
        return f"{sample(rows)}; no interval, which needs two documents or more."
    return f"{sample(rows)}; bands and intervals: 95 %, bootstrap over documents."


def _r2_sample(study: Study) -> str:
    if not has_interval(study["r2"]):
        return f"{sample(study['r2'])}; no interval, which needs two documents or more."
    return f"{sample(study['r2'])}; 95 % intervals, bootstrap over documents, are in r2.csv."


def _transfer_sample(study: Study) -> str:
    rows = [row for row in study["scores"] if row["map"] != "tuned"]
    parts = [
        f"{read}: {sample([row for row in rows if row['read'] == read])}"
        for read in transfers(study)
    ]
    band = (
        "95 % bands, bootstrap over documents" if has_interval(study["scores"]) else "no interval"
    )
    return "; ".join([*parts, band]) + "."


def _fit_sample(study: Study) -> str:
    rows = span(row.get("rows") for row in final_fits(study))
    return f"n = {rows} states per fit; a property of the fit, so it has no interval."


VERDICTS = {"yes": "holds", "no": "fails", "partly": "partly"}


def claim_table(study: Study) -> Table:
    """What the paper says beside what was seen here, with a word for how they go together."""
    head = ["the paper says", "agrees?", "seen here", "why"]
    rows = [
        [
            Cell(row["claim"]),
            Cell(row["agrees"], verdict=VERDICTS.get(row["agrees"], "open")),
            Cell(row["seen"]),
            Cell(row.get("why") or DASH),
        ]
        for row in study.get("claims") or []
    ]
    return head, rows


def unshown(study: Study, shown: set[str]) -> list[str]:
    """Findings on topics that have no place on the page: nothing the study says is lost."""
    return [row["text"] for row in study["findings"] if row["topic"] not in shown]


def tiles(study: Study) -> list[Tile]:
    """Numbers of the head of the page; only those for which mat and id were both measured."""
    n_layers = study["model"]["n_layers"]
    middle, found = n_layers // 2, []
    curves = {each.map: each for each in home_curves(study, "precision@1")}
    if "mat" in curves and "id" in curves:
        mat, own = curves["mat"].at(middle), curves["id"].at(middle)
        if mat and own:
            text = f"Agreement after {middle} of {n_layers} layers"
            shown = percent(mat.value), percent(own.value)
            found.append(Tile(text, *shown, mat.value, own.value))
        found += _half_tile(study["summary"]["half"], n_layers)
    mat_r2, own_r2 = (r2_cells(study, name).get((middle, n_layers)) for name in ("mat", "id"))
    if mat_r2 is not None and own_r2 is not None:
        title = f"R\u00b2 from layer {middle} to layer {n_layers}"
        bars = [min(max(value, 0.0), 1.0) for value in (mat_r2, own_r2)]
        found.append(Tile(title, _signed(mat_r2), _signed(own_r2), *bars))
    return found


def _half_tile(half: dict[str, int | None], n_layers: int) -> list[Tile]:
    mat, own = half["mat"], half["id"]
    if mat is None or own is None:
        return []
    title = "Half of the answers are known from"
    return [Tile(title, f"layer {mat}", f"layer {own}", mat / n_layers, own / n_layers)]


def _signed(value: float) -> str:
    return f"{value:.2f}".replace("-", MINUS)


def percent(share: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * share:.1f} %"


def score_table(study: Study) -> Table:
    """Head and rows of the table of scores on the home text, one row per layer."""
    fit, read = home(study)
    metrics = [*PRECISIONS, "surprisal", "kl"]
    curves = [
        each
        for metric in metrics
        for name in map_names(study)
        if (each := curve(study, name, metric, fit, read)).points
    ]
    last = study["model"]["n_layers"]
    r2 = {name: r2_cells(study, name) for name in ("mat", "id")}
    fitted = [name for name in r2 if r2[name]]
    head = ["layer", *(f"{_short_metric(each.metric)} {each.map}" for each in curves)]
    head += [f"R\u00b2 {name}" for name in fitted]
    rows = []
    for layer in range(last + 1):
        cells = [_score_cell(each.at(layer), each.metric) for each in curves]
        cells += [number_cell(r2[name].get((layer, last)), "{:.2f}") for name in fitted]
        rows.append([Cell(str(layer), sort=layer), *cells])
    return head, rows


def transfer_table(study: Study) -> Table:
    """Head and rows of agreement per layer for every pair of fit and read text."""
    curves = [each for group in transfers(study).values() for each in group]
    head = ["layer"]
    head += [f"{each.map}{_fitted_on(each.fit)}, read on {each.read}" for each in curves]
    rows = []
    for layer in range(study["model"]["n_layers"] + 1):
        cells = [_score_cell(each.at(layer), each.metric) for each in curves]
        rows.append([Cell(str(layer), sort=layer), *cells])
    return (head, rows) if curves else (head, [])


def fit_table(study: Study) -> Table:
    """Head and rows of the fits to the last layer."""
    head = ["from", "to", "rows", "rank", "width", "condition", "ridge"]
    head += ["train R\u00b2 mat", "train R\u00b2 id"]
    forms = {"src": "{:.0f}", "dst": "{:.0f}", "rows": "{:,.0f}", "rank": "{:.0f}"}
    forms |= {"width": "{:.0f}", "condition": "{:.1e}", "ridge": "{:g}"}
    forms |= {"train_r2": "{:.3f}", "train_r2_id": "{:.3f}"}
    rows = [
        [number_cell(row.get(key), form) for key, form in forms.items()]
        for row in final_fits(study)
    ]
    return head, rows


def data_table(study: Study) -> Table:
    """Head and rows of the texts that were used."""
    head = ["text", "used to", "documents", "texts", "rows", "tokens", "seconds", "fingerprint"]
    rows = []
    for row in study["data"]:
        counts = [number_cell(row.get(key), "{:,.0f}") for key in head[2:6]]
        seconds = number_cell(row.get("seconds"), "{:,.1f}")
        marks = Cell(str(row.get("fingerprint") or DASH))
        rows.append([Cell(str(row["text"])), Cell(str(row["role"])), *counts, seconds, marks])
    return head, rows


def _fitted_on(fit: str) -> str:
    return "" if fit == "-" else f" fitted on {fit}"


def _short_metric(metric: str) -> str:
    return {"kl": "KL"}.get(metric, metric.replace("precision@", "P@"))


def _score_cell(point: Any, metric: str) -> Cell:
    if point is None:
        return Cell(DASH)
    scale, form = (100, "{:.1f}") if metric.startswith("precision") else (1, "{:.2f}")
    return value_cell(point.value, point.low, point.high, form, scale)


def value_cell(value: Any, low: Any, high: Any, form: str, scale: float = 1.0) -> Cell:
    """A value over its interval; a dash when there is no value."""
    number = finite(value)
    if number is None:
        return Cell(DASH)
    ends = [end for end in (finite(low), finite(high)) if end is not None]
    shown = [form.format(scale * end).replace("-", MINUS) for end in (number, *ends)]
    return Cell(shown[0], DASH.join(shown[1:]) if len(ends) == 2 else "", number)


def number_cell(value: Any, form: str) -> Cell:
    """A number in its form, or a dash when there is none."""
    number = finite(value)
    return (
        Cell(DASH) if number is None else Cell(form.format(number).replace("-", MINUS), sort=number)
    )
