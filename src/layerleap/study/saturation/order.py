"""Do the ranks of a prediction saturate in order? The paper's statistics, with nulls that hold.

In: saturation layers of many rows through one lens, and of random walks beside some of them.
Out: one plain dictionary: mean saturation ranks, steps between ranks, histograms of layers and
strict tau with both nulls, each with its rows and documents; and what they say, in words.

Statistics follow "Looking Beyond the Top-1" (arXiv 2410.20210), section 4. All are given without
the paper's filter, s_1 <= floor(0.85 n_layers), and with it; and tau for ranks 2 to k alone, which
do not profit from the top token's being the one with a single neighbour.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from layerleap.errors import BadSettings, BadText
from layerleap.read.metrics import mean_interval
from layerleap.read.random_walks import RandomWalk
from layerleap.read.saturation import Saturation
from layerleap.study.saturation.tau import FEWEST_RANKS, Cell, against_walk, exchangeable, taus

Row = dict[str, Any]
FEWEST_DOCUMENTS = 5  # with fewer no p-value of whole documents swapped can reach 0.05


@dataclass(frozen=True)
class OrderSettings:
    """How order is tested; layers are this house's, where 0 is what enters the first block."""

    filter_depth: float = 0.85  # the paper's filter keeps rows with s_1 up to this share of depth
    draws: int = 999  # per null; p-values are at least 1 / (draws + 1)
    level: float = 0.05  # a null is beaten if its p-value is at most this
    needed_rows: int = 30  # with a tau, for a test to be made
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.filter_depth < 1:
            raise BadSettings(f"filter_depth {self.filter_depth} is not between 0 and 1")
        if self.draws < 1 or self.needed_rows < 1:
            raise BadSettings(
                f"{self.draws} draws and {self.needed_rows} needed rows; 1 or more were wanted"
            )
        if (self.draws + 1) * self.level < 1:
            raise BadSettings(
                f"{self.draws} draws cannot give a p-value of {self.level:g}; "
                f"{math.ceil(1 / self.level) - 1} or more were wanted"
            )


def order(
    saturation: Saturation, walk: RandomWalk | None = None, settings: OrderSettings | None = None
) -> dict[str, Any]:
    """All statistics of order through one lens, and the verdict in words.

    Args:
        saturation: of many rows; 3 ranks or more.
        walk: doubles of some of the same rows, in the count of that pass; without them nothing
            is said about random walks.
        settings: how order is tested.
    """
    settings = settings or OrderSettings()
    limit = math.floor(settings.filter_depth * saturation.n_layers)
    _require_rows(saturation, settings)
    layers = saturation.layer
    filtered = layers[:, 0] <= limit
    wholes = [(False, saturation), *([(True, saturation.rows(filtered))] if filtered.any() else [])]
    found: dict[str, Any] = {
        "lens": saturation.lens, "k": saturation.k, "n_layers": saturation.n_layers,
        "rows": len(saturation), "documents": len(saturation.documents.unique()),
        "filter": {"limit": limit, "rows": int(filtered.sum()), "share": _share(filtered)},
        "settings": asdict(settings),
        "places": [row for is_kept, part in wholes for row in _places(part, is_kept)],
        "walk_places": [] if walk is None else _places(walk.saturation, False),
        "steps": [row for is_kept, part in wholes for row in _steps(part, is_kept)],
        "histogram": _histogram(saturation),
        "tau": [
            _tau(saturation, walk, settings, Cell(first, limit if is_kept else None))
            for first in ((0, 1) if saturation.k > FEWEST_RANKS else (0,))
            for is_kept in (False, True)
        ],
    }  # fmt: skip
    return {**found, "in_order": _in_order(found["tau"][0]), "verdict": _verdict(found),
            "others": _others_words(found)}  # fmt: skip


def _share(chosen: Tensor) -> float:
    return float(chosen.double().mean())


def saturation_places(layers: Tensor, n_layers: int) -> Tensor:
    """Which rank of a row saturated first, second, ...: (row, k) -> (row, k), from 1.

    Equal layers share the lowest place; NaN for a rank that did not saturate.
    """
    earlier = (layers[:, None, :] < layers[:, :, None]).sum(-1)  # (row, k)
    return (earlier + 1.0).where(layers != n_layers, torch.nan)


def _require_rows(saturation: Saturation, settings: OrderSettings) -> None:
    if saturation.k < FEWEST_RANKS:
        raise BadSettings(f"order among {saturation.k} ranks; {FEWEST_RANKS} or more were wanted")
    n = int((~taus(saturation.layer, saturation.n_layers, Cell()).isnan()).sum())
    if n < settings.needed_rows:
        more = settings.needed_rows * len(saturation) / n if n else math.inf
        hint = f"about {math.ceil(more)} positions would do" if n else "read more text"
        raise BadText(
            f"{n} of {len(saturation)} positions have rank {FEWEST_RANKS} or a later one settled "
            f"before the last layer; a test of order needs {settings.needed_rows}: {hint}"
        )


def _places(saturation: Saturation, is_filtered: bool) -> list[Row]:
    """Mean place of every rank, over the rows in which it saturates."""
    places = saturation_places(saturation.layer, saturation.n_layers)
    return [
        {"filtered": is_filtered, "rank": rank + 1, **_mean(places[:, rank], saturation.documents)}
        for rank in range(saturation.k)
    ]


def _steps(saturation: Saturation, is_filtered: bool) -> list[Row]:
    """By how many places a rank comes after the one before, where both saturate."""
    places = saturation_places(saturation.layer, saturation.n_layers)
    return [
        {
            "filtered": is_filtered, "ranks": [rank + 1, rank + 2],
            **_mean(places[:, rank + 1] - places[:, rank], saturation.documents),
        }
        for rank in range(saturation.k - 1)
    ]  # fmt: skip


def _mean(values: Tensor, documents: Tensor) -> Row:
    """Over the rows that have a value, with an interval over their documents."""
    known = ~values.isnan()
    if not known.any():
        return {"value": None, "low": None, "high": None, "rows": 0, "documents": 0}
    return asdict(mean_interval(values[known, None], documents[known])[0])


def _histogram(saturation: Saturation) -> list[Row]:
    """How many rows saturate at each layer, by rank; the last count is of those that never do."""
    counts = [
        torch.bincount(column.long(), minlength=saturation.n_layers + 1).tolist()
        for column in saturation.layer.T
    ]
    return [
        {
            "rank": rank + 1, "counts": row, "never": row[-1] / len(saturation),
            "mean_layer": _mean_layer(row),
        }
        for rank, row in enumerate(counts)
    ]  # fmt: skip


def _mean_layer(counts: list[int]) -> float | None:
    """Of the rows that settle before the last block, if any do."""
    settled = sum(counts[:-1])
    return sum(n * layer for layer, n in enumerate(counts[:-1])) / settled if settled else None


def _tau(
    saturation: Saturation, walk: RandomWalk | None, settings: OrderSettings, cell: Cell
) -> Row:
    """One cell: tau, and against both nulls; with too few rows just how many there are."""
    tau, last = taus(saturation.layer, saturation.n_layers, cell), saturation.n_layers
    found: Row = {
        "filtered": cell.limit is not None, "ranks": [cell.first + 1, saturation.k],
        **_mean(tau, saturation.documents), "needed": settings.needed_rows,
        "exchangeable": None, "walk": None, "beats_exchangeable": None, "beats_walk": None,
    }  # fmt: skip
    if found["rows"] < settings.needed_rows:
        return found | {"value": None, "low": None, "high": None}
    draws = {"draws": settings.draws, "seed": settings.seed}
    null = exchangeable(saturation.layer, last, cell, **draws)
    found["exchangeable"] = null
    if found["documents"] >= FEWEST_DOCUMENTS:
        found["beats_exchangeable"] = null["p"] <= settings.level and found["low"] > null["mean"]
    if walk is not None:
        real = saturation.rows(walk.rows)
        found["walk"] = other = against_walk(
            real.layer, walk.saturation.layer, real.documents, last, cell, **draws
        )
        enough = min(other["rows"], other["doubles"]) >= settings.needed_rows
        if enough and other["documents"] >= FEWEST_DOCUMENTS:
            found["beats_walk"] = other["p"] <= settings.level and other["low"] > 0
    return found


def _in_order(tau: Row) -> bool | None:
    """True if both nulls are beaten, False if one is not, None if that cannot be told."""
    beaten = (tau["beats_exchangeable"], tau["beats_walk"])
    if False in beaten:
        return False
    return None if None in beaten else True


def _verdict(found: Row) -> list[str]:
    """One sentence for every cell of tau, one on how far up the ranks order goes."""
    return [*(_tau_words(row, found) for row in found["tau"]), _steps_words(found["steps"])]


def _others_words(found: Row) -> str:
    """What the selections after the first say, without their numbers."""
    answers = (
        f"{_what(tau, found)}: {'too few positions' if tau['value'] is None else _answer(tau)}"
        for tau in found["tau"][1:]
    )
    return f"Other selections. {'. '.join(answers)}."


def _what(tau: Row, found: Row) -> str:
    what = f"Ranks {tau['ranks'][0]} to {tau['ranks'][1]}"
    if tau["filtered"]:
        what += f" where the top token settled by layer {found['filter']['limit']}"
    return what


def _tau_words(tau: Row, found: Row) -> str:
    what = _what(tau, found)
    if tau["value"] is None:
        return (
            f"{what}: {tau['rows']} positions can be compared, {tau['needed']} are needed; "
            "not tested."
        )
    sample = f"{tau['rows']:,} positions of {tau['documents']:,} documents"
    value = f"strict tau {tau['value']:+.3f}{_interval(tau)}, {sample}"
    null, walk = tau["exchangeable"], tau["walk"]
    against = [f"exchangeable ranks give {null['mean']:+.3f} (p = {null['p']:.3g})"]
    if walk is None:
        against.append("random walks were not made")
    elif walk["mean"] is None or walk["difference"] is None:
        against.append("too few random walks can be compared")
    else:
        against.append(
            f"random walks with the model's own steps give {walk['mean']:+.3f} where it has "
            f"{walk['value']:+.3f} ({walk['rows']:,} positions, {walk['doubles']:,} walks, "
            f"p = {walk['p']:.3g})"
        )
    return f"{what}: {value}; {' and '.join(against)}: {_answer(tau)}."


def _answer(tau: Row) -> str:
    if tau["documents"] < FEWEST_DOCUMENTS:
        return f"{tau['documents']} documents cannot tell, {FEWEST_DOCUMENTS} or more are needed"
    exchangeable, walk = tau["beats_exchangeable"], tau["beats_walk"]
    if not exchangeable:
        return "no more order than chance gives"
    if walk is None:
        few = (
            "" if tau["walk"] is None else f" ({tau['walk']['doubles']} walks settle enough ranks)"
        )
        return (
            "more order than exchangeable ranks have; whether a random walk has as much is open"
            + few
        )
    if walk:
        return "the order beats both nulls"
    return "no more order than structureless steps of that size give"


def _steps_words(steps: Sequence[Row]) -> str:
    """How far up the ranks each one saturates clearly later than the one before."""
    clear = 1
    for step in (row for row in steps if not row["filtered"]):
        if step["low"] is None or step["low"] <= 0:
            break
        clear = step["ranks"][1]
    if clear == 1:
        return "Rank 2 does not clearly saturate after rank 1."
    return (
        f"Ranks up to {clear} saturate each later on average than the one before, intervals clear "
        "of 0; a random walk may do the same."
    )


def _interval(row: Row) -> str:
    return "" if row["low"] is None else f" ({row['low']:+.3f} to {row['high']:+.3f})"
