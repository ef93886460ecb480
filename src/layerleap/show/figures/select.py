"""Picks what a figure or a table shows out of a study; nothing is estimated here.

In: the plain-data result of a study ("study.json"). Out: curves over layers, R2 cells, samples.
Values that are missing or not finite are left out, so no drawing ever meets a NaN.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Study = dict[str, Any]

# What stands in the place of a text for maps that have one fit only, whatever text is read.
UNFITTED = {"id": "-", "tuned": "tuned"}
PRECISIONS = ("precision@1", "precision@5", "precision@10")


def finite(value: Any) -> float | None:
    """The value as a float, or None when it is missing, NaN or infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def without_nan(value: Any) -> Any:
    """The same plain data with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@dataclass(frozen=True)
class Point:
    """One value of a curve; the interval is None when the study gave none."""

    layer: int
    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Curve:
    """One measure of one map over the layers, in the order of the layers."""

    map: str
    fit: str
    read: str
    metric: str
    points: tuple[Point, ...]

    def at(self, layer: int) -> Point | None:
        """The point at `layer`, if it was measured."""
        return next((point for point in self.points if point.layer == layer), None)


def home(study: Study) -> tuple[str, str]:
    """The text the maps were fitted on and the text they are read on, in the main figures."""
    pairs = [(row["fit"], row["read"]) for row in study["scores"] if row["map"] not in UNFITTED]
    own = next((pair for pair in pairs if pair[0] == pair[1]), None)
    if own or pairs:
        return own or pairs[0]
    read = next((row["read"] for row in study["scores"]), "-")
    return ("-", read)


def map_names(study: Study) -> list[str]:
    """The maps that were scored: mat first, id last, others between as they come."""
    found = dict.fromkeys(row["map"] for row in study["scores"])
    return sorted(found, key=map_rank)


def map_rank(name: str) -> int:
    """For sorting: what the study is about first, the baseline last."""
    return {"mat": 0, "id": 2}.get(name, 1)


def curve(study: Study, name: str, metric: str, fit: str, read: str) -> Curve:
    """The curve of one map, fitted on `fit` (id on nothing, tuned once) and read on `read`."""
    fitted_on = UNFITTED.get(name, fit)
    wanted = (name, metric, fitted_on, read)
    points = [
        Point(int(row["layer"]), value, finite(row.get("low")), finite(row.get("high")))
        for row in study["scores"]
        if (row["map"], row["metric"], row["fit"], row["read"]) == wanted
        and (value := finite(row["value"])) is not None
    ]
    points.sort(key=lambda point: point.layer)
    return Curve(name, fitted_on, read, metric, tuple(points))


def home_curves(study: Study, metric: str) -> list[Curve]:
    """One curve per map on the home text; maps without values are left out."""
    fit, read = home(study)
    curves = [curve(study, name, metric, fit, read) for name in map_names(study)]
    return [each for each in curves if each.points]


def transfers(study: Study, metric: str = "precision@1") -> dict[str, list[Curve]]:
    """Per read text, mat fitted on each text and id; empty when no map was read elsewhere."""
    pairs = dict.fromkeys(
        (row["fit"], row["read"]) for row in study["scores"] if row["map"] != "tuned"
    )
    fits = [fit for fit in dict.fromkeys(fit for fit, _ in pairs) if fit != "-"]
    reads = list(dict.fromkeys(read for _, read in pairs))
    if not any(fit not in ("-", read) for fit, read in pairs):
        return {}
    found: dict[str, list[Curve]] = {}
    for read in reads:
        # The text's own fit comes first: it is what the others are compared with.
        ordered = sorted(fits, key=lambda fit: fit != read)
        curves = [curve(study, "mat", metric, fit, read) for fit in ordered]
        curves.append(curve(study, "id", metric, "-", read))
        found[read] = [each for each in curves if each.points]
    return {read: curves for read, curves in found.items() if curves}


def r2_cells(study: Study, name: str) -> dict[tuple[int, int], float]:
    """R2 of the map `name` per pair (src, dst)."""
    return {
        (int(row["src"]), int(row["dst"])): value
        for row in study["r2"]
        if row["map"] == name and (value := finite(row["r2"])) is not None
    }


def final_fits(study: Study) -> list[Row]:
    """The fits that end at the last layer, in the order of their source."""
    last = study["model"]["n_layers"]
    return sorted((row for row in study["fits"] if row["dst"] == last), key=lambda row: row["src"])


def home_rows(study: Study) -> list[Row]:
    """The score rows behind the main figures."""
    fit, read = home(study)
    return [
        row
        for row in study["scores"]
        if row["read"] == read and row["fit"] == UNFITTED.get(row["map"], fit)
    ]


def span(values: Iterable[Any]) -> str:
    """A count, or the range of counts: "3,000" or "1,000 to 3,000"; "?" when unknown."""
    known = sorted({int(value) for value in values if finite(value) is not None})
    if not known:
        return "?"
    return f"{known[0]:,}" if len(known) == 1 else f"{known[0]:,} to {known[-1]:,}"


def sample(rows: list[Row]) -> str:
    """How much was measured: "n = 3,000 states from 26 documents"."""
    documents = span(row.get("documents") for row in rows)
    noun = "document" if documents == "1" else "documents"
    return f"n = {span(row.get('rows') for row in rows)} states from {documents} {noun}"


def has_interval(rows: list[Row]) -> bool:
    """Whether any of the rows carries an interval."""
    return any(finite(row.get("low")) is not None for row in rows)
