"""Are a state's top tokens those of the parameters that are most active there?

In: one pass over held-out text. Out: R_k by layer and kind of parameter, against parameters that
other documents made active; and the section of the study that shows it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from layerleap import StudyResult, study
from layerleap.errors import ModelRefused
from layerleap.lens import DIFFERENCE, SHARE, Documents
from layerleap.models.weights import refusals
from layerleap.study import Page, above, at_every, pick, points, untested
from layerleap_papers.embedding_space.embedding_context import EmbeddingContext
from layerleap_papers.embedding_space.matches import OTHERS, OWN, Matches
from layerleap_papers.embedding_space.passes import BY_SIZE, KEY_WAYS, WAYS

PAGE = Page(__file__)
LEAD = "lead"
GAIN = "gain"  # lead of carried states minus lead of states as they are
PANELS = {way: f"{way[0].upper()}{way[1:]}" for way in WAYS}


def share_rows(matches: Matches, *states: str, below: int | None = None) -> list[study.Row]:
    """Shares and leads of these states by way and layer, and their means over layers.

    With intervals over documents. Of "raw" and "linear" states, also the gain; `below` leaves out
    that layer and later ones.
    """
    documents, rows = Documents(matches.documents), []
    for way in dict.fromkeys(way for way, _ in matches.places):
        blocks = [b for other, b in matches.places if other == way and (below is None or b < below)]
        if not blocks:
            continue
        columns: dict[tuple[str, str], list[Tensor]] = {}
        for state in states:
            for source in (OWN, OTHERS):
                columns[state, source] = [matches.shares[way, b, state, source] for b in blocks]
            columns[state, LEAD] = [matches.lead(way, b, state) for b in blocks]
        if {"raw", "linear"} <= set(states):
            leads = zip(columns["linear", LEAD], columns["raw", LEAD], strict=True)
            columns["linear", GAIN] = [linear - raw for linear, raw in leads]
        for (state, measure), by_block in columns.items():
            values = torch.stack([*by_block, torch.stack(by_block).mean(0)], dim=1)
            means = documents.means(values, SHARE if measure in (OWN, OTHERS) else DIFFERENCE)
            for layer, mean in zip([*blocks, None], means, strict=True):
                about = {"way": way, "state": state, "measure": measure, "layer": layer}
                rows.append({**about, **mean.to_dict()})
    return rows


def _run(context: EmbeddingContext) -> study.Tables:
    if not context.matches.shares:
        raise ModelRefused("; ".join(refusals(context.model, 1)))
    return {"active": share_rows(context.matches, "raw", "last")}


def leads_of(result: StudyResult, way: str, state: str = "raw") -> list[study.Row]:
    """The lead of a position's own vectors, layer by layer."""
    return result.rows("active", way=way, state=state, measure=LEAD, layer=study.KNOWN)


def _claim(key: str, *ways: str) -> study.Claim:
    return PAGE.groups(
        key, lambda result: {way: [above(row) for row in leads_of(result, way)] for way in ways}
    )


@PAGE.claim("active_last")
def _last(result: StudyResult) -> study.Tested:
    rows = leads_of(result, BY_SIZE, "last")
    if not rows:
        return untested("FFN values, or their activity, are not verified in any layer")
    late = rows[-max(1, round(len(rows) / 3)) :]
    answers, values = [above(row) for row in late], [row["value"] for row in late]
    yes, ends = answers.count("yes"), {"least": min(values), "most": max(values)}
    return at_every(answers), {"yes": yes, "n": len(late), **ends}


def _findings(result: StudyResult) -> Iterator[study.Said]:
    k, n = result.settings["state_k"], result.settings["active"]
    for way in WAYS:
        if not (leads := leads_of(result, way)):
            continue
        own, other, last = (
            in_percent(result.rows("active", way=way, state=state, measure=measure, layer=None)[0])
            for state, measure in (("raw", OWN), ("raw", OTHERS), ("last", LEAD))
        )
        best = max(leads, key=lambda row: row["value"])
        values = {"way": way, "own": own, "other": other, "last": last, "layer": best["layer"]}
        key = "active_values" if way == BY_SIZE else "active"
        yield PAGE.say(key, k=k, n=n, lead=in_percent(best), **values)


def in_percent(row: study.Row) -> study.Row:
    """The value and its interval times 100."""
    ends = ("value", "low", "high")
    return {key: None if row[key] is None else 100 * row[key] for key in ends}


SECTION = PAGE.section(
    "active",
    _run,
    findings=_findings,
    shows=(
        _claim("active_values", BY_SIZE),
        _claim("active_keys", *KEY_WAYS),
        _claim("active_heads", "W_V columns", "W_O rows"),
        _last,
        PAGE.figure(
            "active",
            points(
                "active",
                line="{state} {measure}",
                panel="{way}",
                words={"way": PANELS},
                way=WAYS,
                state=("raw", "last"),
                measure=(OWN, OTHERS),
                layer=study.KNOWN,
            ),
        ),
        PAGE.table(
            "active-table", pick("active", way=WAYS, state="raw", measure=LEAD, layer=study.KNOWN)
        ),
    ),
)
