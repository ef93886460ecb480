"""Do the ranks of a prediction saturate in order? The paper's statistics, with nulls that hold.

In: saturation layers of many rows through one lens, and of random walks made for some of them.
Out: tables of mean saturation ranks, steps between ranks, layers, and strict tau against two nulls;
and the section of the study that shows them.

Statistics follow "Looking Beyond the Top-1" (arXiv 2410.20210), section 4. All are given with and
without the paper's filter, s_1 <= floor(0.85 n_layers); tau also for ranks 2 to k alone, which do
not benefit from the top token having a single neighbour.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layerleap import StudyResult, study
from layerleap.errors import BadSettings, BadText
from layerleap.lens import RandomWalk, Saturation, mean_interval
from layerleap.study import Page, above, all_of, confirmed, opposite, points, untested
from layerleap_papers.beyond_the_top1.rows import SaturationData
from layerleap_papers.beyond_the_top1.saturation_context import SaturationContext
from layerleap_papers.beyond_the_top1.tau import (
    FEWEST_RANKS,
    Cell,
    against_walk,
    exchangeable,
    taus,
)

PAGE = Page(__file__)
FEWEST_DOCUMENTS = 5  # with fewer, swapping whole documents cannot give p <= 0.05
FILTER_DEPTH = 0.85  # the paper's filter keeps rows with s_1 up to this share of the depth
NEEDED = 30  # rows with a tau, for a test to be made
LENSES = {"logit": "the logit lens", "linear": "the linear shortcuts"}


def described(saturation: Saturation, walk: RandomWalk | None = None) -> study.Tables:
    """Where ranks saturate and in which place; any number of rows will do."""
    limit = math.floor(FILTER_DEPTH * saturation.n_layers)
    filtered = saturation.layer[:, 0] <= limit
    parts = [(False, saturation), *([(True, saturation.rows(filtered))] if filtered.any() else [])]
    about = {
        "k": saturation.k,
        "rows": len(saturation),
        "documents": len(saturation.documents.unique()),
        "filter_limit": limit,
        "filter_rows": int(filtered.sum()),
        "filter_share": float(filtered.double().mean()),
    }
    tables = {
        "order": [about],
        "places": [{"filtered": f, **row} for f, part in parts for row in _places(part)],
        "walk_places": [] if walk is None else _places(walk.saturation),
        "steps": [{"filtered": f, **row} for f, part in parts for row in _steps(part)],
        "ranks": _ranks(saturation),
        "histogram": _histogram(saturation),
    }
    lens = {"lens": saturation.lens}
    return {name: [{**lens, **row} for row in rows] for name, rows in tables.items()}


def tau_tests(
    saturation: Saturation, walk: RandomWalk | None = None, *, draws: int = 999, seed: int = 0
) -> list[study.Row]:
    """Strict tau against both nulls, or exchangeable ranks alone; one row per selection."""
    limit = math.floor(FILTER_DEPTH * saturation.n_layers)
    _require_rows(saturation)
    return [
        _tau(saturation, walk, Cell(first, limit if is_filtered else None), draws, seed)
        for first in ((0, 1) if saturation.k > FEWEST_RANKS else (0,))
        for is_filtered in (False, True)
    ]


def saturation_places(layers: Tensor, n_layers: int) -> Tensor:
    """Which rank saturated first, second, ...: (row, k), from 1; NaN where it did not."""
    # Equal layers share the lowest place.
    earlier = (layers[:, None, :] < layers[:, :, None]).sum(-1)  # (row, k)
    return (earlier + 1.0).where(layers != n_layers, torch.nan)


def _require_rows(saturation: Saturation) -> None:
    if saturation.k < FEWEST_RANKS:
        raise BadSettings(
            f"an order of {saturation.k} ranks cannot be tested; expected {FEWEST_RANKS} or more"
        )
    n = int((~taus(saturation.layer, saturation.n_layers, Cell()).isnan()).sum())
    if n < NEEDED:
        more = NEEDED * len(saturation) / n if n else math.inf
        hint = f"about {math.ceil(more)} positions would do" if n else "read more text"
        raise BadText(
            f"rank {FEWEST_RANKS} or a later one saturates before the last layer in {n} of "
            f"{len(saturation)} positions; a test of order needs {NEEDED}: {hint}"
        )


def _places(saturation: Saturation) -> Iterator[study.Row]:
    """Mean place of every rank, over the rows in which it saturates."""
    places = saturation_places(saturation.layer, saturation.n_layers)
    for rank in range(saturation.k):
        yield {"rank": rank + 1, **_mean(places[:, rank], saturation.documents)}


def _steps(saturation: Saturation) -> Iterator[study.Row]:
    """By how many places a rank comes after the one before, where both saturate."""
    places = saturation_places(saturation.layer, saturation.n_layers)
    for rank in range(1, saturation.k):
        later = _mean(places[:, rank] - places[:, rank - 1], saturation.documents)
        yield {"ranks": f"{rank} to {rank + 1}", "rank": rank + 1, **later}


def _mean(values: Tensor, documents: Tensor) -> study.Row:
    """Over the rows that have a value, with an interval over their documents."""
    known = ~values.isnan()
    if not known.any():
        return {"value": None, "low": None, "high": None, "rows": 0, "documents": 0}
    return asdict(mean_interval(values[known, None], documents[known])[0])


def _ranks(saturation: Saturation) -> Iterator[study.Row]:
    """How often each rank never saturates, and its mean saturation layer where it does."""
    for rank, column in enumerate(saturation.layer.T.double(), 1):
        settled = column[column < saturation.n_layers]
        yield {
            "rank": rank,
            "mean_layer": float(settled.mean()) if len(settled) else None,
            "never": (len(column) - len(settled)) / len(column),
            "rows": len(column),
            "documents": len(saturation.documents.unique()),
        }


def _histogram(saturation: Saturation) -> Iterator[study.Row]:
    """How many rows saturate at each layer, by rank; at the last layer are those that never do."""
    for rank, column in enumerate(saturation.layer.T, 1):
        counts = torch.bincount(column.long(), minlength=saturation.n_layers + 1).tolist()
        for layer, rows in enumerate(counts):
            yield {"rank": rank, "layer": layer, "rows": rows}


def _tau(
    saturation: Saturation, walk: RandomWalk | None, cell: Cell, draws: int, seed: int
) -> study.Row:
    """One selection: tau, and against both nulls; with too few rows just how many there are."""
    tau, last = taus(saturation.layer, saturation.n_layers, cell), saturation.n_layers
    row: study.Row = {
        "lens": saturation.lens,
        "ranks": f"{cell.first + 1} to {saturation.k}",
        "filtered": cell.limit is not None,
        "limit": cell.limit,
        **_mean(tau, saturation.documents),
        "needed": NEEDED,
    }
    row |= {"beats_exchangeable": "cannot tell", "beats_walk": "cannot tell"}
    if row["rows"] < NEEDED:
        return row | {"value": None, "low": None, "high": None}
    null = exchangeable(saturation.layer, last, cell, draws=draws, seed=seed)
    if row["documents"] >= FEWEST_DOCUMENTS:
        answer = above(row, null["mean"])
        row["beats_exchangeable"] = confirmed(answer, null["p"] <= study.LEVEL)
    row |= {f"exchangeable_{key}": value for key, value in null.items()}
    if walk is not None:
        real = saturation.rows(walk.rows)
        other = against_walk(
            real.layer, walk.saturation.layer, real.documents, last, cell, draws=draws, seed=seed
        )
        enough = min(other["rows"], other["doubles"]) >= NEEDED
        if enough and other["documents"] >= FEWEST_DOCUMENTS:
            lead = {end: other[f"difference_{end}"] for end in ("low", "high")}
            row["beats_walk"] = confirmed(above(lead), other["p"] <= study.LEVEL)
        row |= {f"walk_{key}": value for key, value in other.items()}
    return row


def tau_words(tau: study.Row) -> str:
    """One selection, its numbers, and what they mean."""
    early = f" where the top token saturated by layer {tau['limit']}" if tau["filtered"] else ""
    if tau["value"] is None:
        return str(PAGE.say("tau_untested", tau=tau, early=early))
    few = "tau_few_walks" if tau.get("walk_difference") is None else "tau_walks"
    walks = PAGE.say(few if "walk_mean" in tau else "tau_no_walks", tau=tau)
    return str(PAGE.say("tau", tau=tau, early=early, walks=walks, answer=_answer(tau)))


def _answer(tau: study.Row) -> str:
    if tau["documents"] < FEWEST_DOCUMENTS:
        return f"{tau['documents']} documents cannot tell, {FEWEST_DOCUMENTS} or more are needed"
    if tau["beats_exchangeable"] != "yes":
        clearly = "no" if tau["beats_exchangeable"] == "no" else "not clearly"
        return f"{clearly} more order than chance gives"
    if tau["beats_walk"] == "yes":
        return "more order than chance or random walks give"
    walks = tau.get("walk_doubles", 0)
    if tau["beats_walk"] == "no":
        rest = "but no more than random walks"
    elif walks < tau["needed"]:
        rest = f"with too few random walks to compare ({walks})"
    else:
        rest = "but not clearly more than random walks"
    return f"more order than chance gives, {rest}"


def clear_ranks(steps: Iterable[study.Row]) -> int:
    """Up to which rank each one saturates clearly later than the one before; 1 if none does."""
    clear = 1
    for step in (row for row in steps if not row["filtered"]):
        if above(step) != "yes":
            break
        clear = step["rank"]
    return clear


def steps_words(steps: Sequence[study.Row]) -> str:
    """How far up the ranks the order goes."""
    clear = clear_ranks(steps)
    if clear == 1:
        return "Rank 2 does not clearly saturate after rank 1."
    return str(PAGE.say("steps", rank=clear))


def in_order(tau: study.Row | None) -> study.Answer:
    """Whether tau beats both nulls; "partly" if only one of them."""
    if tau is None or tau["value"] is None:
        return "cannot tell"
    return all_of([tau["beats_exchangeable"], tau["beats_walk"]])


def headline(selections: Sequence[study.Row]) -> str:
    """One clause on order that counts every selection of ranks and positions."""
    known = [tau for tau in selections if tau["value"] is not None]
    if not known:
        return "too few positions saturate to say whether ranks do so in order"
    chance, walks = (
        sum(tau[f"beats_{null}"] == "yes" for tau in known) for null in ("exchangeable", "walk")
    )
    few = len(selections) - len(known)
    rest = f" ({few} more had too few positions)" if few else ""
    return str(PAGE.say("selections", chance=chance, walks=walks, n=len(known), rest=rest))


def _findings(result: StudyResult) -> Iterator[study.Said]:
    for about in result.rows("order"):
        lens = about["lens"]
        top = result.rows("ranks", lens=lens)[0]
        key = "top_never" if top["mean_layer"] is None else "top"
        share, n_layers = 1 - top["never"], result.model["n_layers"]
        yield PAGE.say(key, lens=lens, about=about, share=share, top=top, n_layers=n_layers)
        yield f"Through {lens}: {steps_words(result.rows('steps', lens=lens))}"
        selections = result.rows("tau", lens=lens)
        for tau in selections:
            yield study.Finding(f"Through {lens}: {tau_words(tau)}", under="tau")
        yield PAGE.say("order", lens=LENSES[lens], selections=headline(selections))


TOO_FEW = "too few positions have a rank that saturates; see the notes"


@PAGE.claim("ordered")
def _ordered(result: StudyResult) -> study.Tested:
    selections = result.rows("tau", lens="logit", value=study.KNOWN)
    if not selections:
        return untested(TOO_FEW)
    return all_of(map(in_order, selections)), {"selections": headline(selections)}


@PAGE.claim("growing")
def _growing(result: StudyResult) -> study.Tested:
    steps = result.rows("steps", lens="logit", filtered=False)
    places = [row["value"] for row in result.rows("places", lens="logit", filtered=False)]
    if None in places or not places:
        return untested(TOO_FEW)
    grows = all_of(above(step) for step in steps)
    if grows == "yes" and places != sorted(places):
        grows = "partly"
    listed = ", ".join(f"{step['value']:+.2f}" for step in steps)
    means = ", ".join(f"{place:.2f}" for place in places)
    return grows, {"steps": listed, "means": means, "rank": clear_ranks(steps)}


def only_first_three(steps: Sequence[study.Row]) -> study.Tested:
    """Whether ranks 1 to 3 saturate in order, and later ones do not."""
    steps = [row for row in steps if not row["filtered"]]
    first = all_of(above(step) for step in steps[:2])
    later = all_of(above(step) for step in steps[2:])
    answer = first if first != "yes" else all_of([first, opposite(later)])
    return answer, {"steps": steps_words(steps)}


@PAGE.claim("speech")
def _speech(result: StudyResult) -> study.Tested:
    return only_first_three(result.rows("steps", lens="logit"))


def _histogram_rows(result: StudyResult) -> Iterator[study.Row]:
    """Rank after rank, the lenses side by side."""
    last = result.model["n_layers"]
    for rank in sorted({row["rank"] for row in result.rows("ranks")}):
        for about in result.rows("ranks", rank=rank):
            for row in result.rows("histogram", rank=rank, lens=about["lens"]):
                yield {
                    "x": row["layer"],
                    "y": row["rows"] / about["rows"],
                    "panel": f"Rank {rank}, {about['lens']}",
                    "muted": row["layer"] == last,
                    "note": f"{about['never']:.0%} never",
                    "rows": about["rows"],
                    "documents": about["documents"],
                }


def tau_rows(result: StudyResult) -> list[tuple[str, study.Row]]:
    """Every selection that was tested, with what to call it; the twin's come last."""
    named = [(row["lens"], row) for row in result.rows("tau")]
    named += [(f"untrained twin, {row['lens']}", row) for row in result.rows("twin_tau")]
    return [
        (f"{name}, ranks {row['ranks']}{', filtered' if row['filtered'] else ''}", row)
        for name, row in named
        if row["value"] is not None
    ]


def _tau_dots(result: StudyResult) -> Iterator[study.Row]:
    for name, tau in tau_rows(result):
        sample = {"y": name, "rows": tau["rows"], "documents": tau["documents"]}
        null = {end: tau[f"exchangeable_{end}"] for end in ("low", "high")}
        yield {**sample, "line": "exchangeable", "x": tau["exchangeable_mean"], **null}
        yield {**sample, "line": "walk", "x": tau.get("walk_mean")}
        yield {**sample, "line": "model", "x": tau["value"], "low": tau["low"], "high": tau["high"]}


FILTERED = {False: "all positions", True: "top token saturated early"}
PLACES: dict[str, Any] = {
    "x": "rank",
    "panel": "Through {lens}",
    "words": {"lens": LENSES, "filtered": FILTERED},
}


def rank_rows(result: StudyResult, prefix: str = "") -> Iterator[study.Row]:
    """Where each rank saturates, beside random walks; `prefix` of the tables it is taken from."""
    for row in result.rows(f"{prefix}ranks"):
        where = {"lens": row["lens"], "rank": row["rank"]}
        place = result.row(f"{prefix}places", filtered=False, **where) or {}
        walk = result.row(f"{prefix}walk_places", **where) or {}
        yield {**row, **place, **{f"walk_{key}": value for key, value in walk.items()}}


def tables_of(context: SaturationContext, data: SaturationData, where: str = "") -> study.Tables:
    """Order through every lens; tau is left out with a note where too few rows saturate."""
    draws, seed, tables = context.settings.draws, context.settings.seed, study.Tables()
    for lens, saturation in data.saturation.items():
        walk = data.walks[lens]
        made = described(saturation, walk)
        made["tau"] = (
            context.attempt(
                f"Order of saturation through {lens}{where}",
                partial(tau_tests, saturation, walk, draws=draws, seed=seed),
            )
            or []
        )
        for name, rows in made.items():
            tables.setdefault(name, []).extend(rows)
    return tables


SECTION = PAGE.section(
    "order",
    lambda context: tables_of(context, context.observed),
    findings=_findings,
    shows=(
        _ordered,
        _growing,
        _speech,
        PAGE.figure(
            "places",
            points("places", line="{filtered}", filtered=(False, True), **PLACES)
            + points("walk_places", line="random walks", **PLACES),
        ),
        PAGE.figure("histogram", _histogram_rows),
        PAGE.figure("tau", _tau_dots),
        PAGE.table("ranks-table", rank_rows),
        PAGE.table(
            "tau-table",
            lambda result: [{**row, "selection": name} for name, row in tau_rows(result)],
        ),
    ),
)
