"""Are a state's top tokens those of the parameters that are most active there?

In: one pass over held-out text. Out: R_k by layer and kind of parameter, against parameters that
other documents made active; and the section of the study that shows it.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from layerleap import StudyResult, study
from layerleap.errors import ModelRefused
from layerleap.lens import DIFFERENCE, SHARE, Documents
from layerleap.models.weights import refusals
from layerleap.study import above, at_every, estimate, percent, pick, points, untested
from layerleap_papers.embedding_space.embedding_context import EmbeddingContext
from layerleap_papers.embedding_space.matches import OTHERS, OWN, Matches
from layerleap_papers.embedding_space.pairs import interval
from layerleap_papers.embedding_space.passes import BY_SIZE, KEY_WAYS, WAYS

LEAD = "lead"
PANELS = {way: f"{way[0].upper()}{way[1:]}" for way in WAYS}
STATES = {"raw": "its own layer's state", "last": "the last layer's state"}


def layer_rows(
    matches: Matches, columns: Mapping[tuple[str, str], Mapping[int, Tensor]], **about: str
) -> list[study.Row]:
    """Rows with intervals over documents: each column (state, measure) by layer, and its mean."""
    documents, rows = Documents(matches.documents), []
    for (state, measure), by_block in columns.items():
        values = torch.stack([*by_block.values(), torch.stack([*by_block.values()]).mean(0)], dim=1)
        possible = SHARE if measure in (OWN, OTHERS) else DIFFERENCE
        for layer, found in zip([*by_block, None], documents.means(values, possible), strict=True):
            row = {**about, "state": state, "measure": measure, "layer": layer}
            rows.append({**row, **found.to_dict()})
    return rows


def _run(context: EmbeddingContext) -> study.Tables:
    matches = context.matches
    if not matches.shares:
        raise ModelRefused("; ".join(refusals(context.model, 1)))
    rows: list[study.Row] = []
    for way in dict.fromkeys(way for way, _ in matches.places):
        blocks = [block for each, block in matches.places if each == way]
        columns: dict[tuple[str, str], dict[int, Tensor]] = {}
        for state in STATES:
            for source in (OWN, OTHERS):
                columns[state, source] = {b: matches.shares[way, b, state, source] for b in blocks}
            columns[state, LEAD] = {b: matches.lead(way, b, state) for b in blocks}
        rows += layer_rows(matches, columns, way=way)
    return {"active": rows}


def ways_of(result: StudyResult) -> list[str]:
    """The ways to choose vectors that this model allows."""
    return [way for way in WAYS if result.row("active", way=way)]


# --- claims and findings -----------------------------------------------------------------------


def _claim(result: StudyResult, *ways: str) -> study.Verdict:
    found = [way for way in ways if way in ways_of(result)]
    if not found:
        return untested("these vectors, or their activity, are not verified in any layer")
    given = {
        way: [
            above(row)
            for row in result.rows("active", way=way, state="raw", measure=LEAD, layer=study.KNOWN)
        ]
        for way in found
    }
    seen = "; ".join(
        f"{way}: clearly more at {own.count('yes')} of {len(own)} layers, clearly fewer at "
        f"{own.count('no')}"
        for way, own in given.items()
    )
    return study.Verdict(
        at_every(answer for own in given.values() for answer in own),
        seen,
        "yes if the interval of the lead over parameters chosen by other documents is above 0 at "
        "every layer, partly if at most of them",
    )


@study.claim(
    "The most active FFN values of late layers name tokens of the last state, more often "
    "than by chance."
)
def _last(result: StudyResult) -> study.Verdict:
    rows = result.rows("active", way=BY_SIZE, state="last", measure=LEAD, layer=study.KNOWN)
    if not rows:
        return untested("FFN values, or their activity, are not verified in any layer")
    late = rows[-max(1, round(len(rows) / 3)) :]
    given = [above(row) for row in late]
    return study.Verdict(
        at_every(given),
        f"clearly more at {given.count('yes')} of the last {len(late)} layers: "
        f"{percent(min(row['value'] for row in late), 1)} to "
        f"{percent(max(row['value'] for row in late), 1)} more",
        "yes if the intervals of the lead at all layers of the last third are above 0, partly if "
        "those of most are",
    )


CLAIMS = (
    study.Claim(
        "A state's top tokens are found among those of its most active FFN values, more often "
        "than by chance, in every layer.",
        lambda result: _claim(result, BY_SIZE),
    ),
    study.Claim(
        "They are found among those of its most active keys, more often than by chance, in every "
        "layer.",
        lambda result: _claim(result, *KEY_WAYS),
    ),
    study.Claim(
        "They are found among those of its most active W_V columns and W_O rows, more often than "
        "by chance, in every layer.",
        lambda result: _claim(result, "W_V columns", "W_O rows"),
    ),
    _last,
)


def _findings(result: StudyResult) -> Iterator[study.Finding]:
    k, n = result.settings["state_k"], result.settings["active"]
    for way in ways_of(result):
        own, other, last = (
            result.rows("active", way=way, state=state, measure=measure, layer=None)[0]
            for state, measure in (("raw", OWN), ("raw", OTHERS), ("last", LEAD))
        )
        leads = result.rows("active", way=way, state="raw", measure=LEAD, layer=study.KNOWN)
        best = max(leads, key=lambda row: row["value"])
        yield study.Finding(
            f"Of a state's top {k} tokens, {_percent(own)} are among those of the {n} most active "
            f"{way}, and {_percent(other)} among those that are active in other documents (mean "
            f"over layers). The lead is largest at layer {best['layer']}: {in_points(best)}. For "
            f"the last layer's state, the mean lead is {in_points(last)}.",
            under="active",
            headline=way == BY_SIZE,
        )


def _percent(row: study.Row) -> str:
    return f"{interval(in_percent(row), '{:.1f}')} %"


def in_points(row: study.Row) -> str:
    """A difference of shares with its interval, for sentences."""
    return f"{interval(in_percent(row), '{:+.1f}')} points"


def in_percent(row: study.Row) -> study.Row:
    """The value and its interval times 100."""
    ends = ("value", "low", "high")
    return {key: None if row[key] is None else 100 * row[key] for key in ends}


SECTION = study.Section(
    "active",
    "Do states say what active parameters say?",
    _run,
    "At every position, the parameter vectors of a layer that are most active there are read in "
    "the vocabulary, each with the sign of its activity. How many of the state's top tokens are "
    "among theirs? The control takes the vectors that were most active at a position of another "
    "document. Keys are those of the neurons whose values are most active.",
    help="states and active parameters",
    findings=_findings,
    shows=(
        *CLAIMS,
        study.Figure(
            "active",
            "Top tokens found among those of active parameters",
            "Share of a state's top tokens. Solid: vectors active at the position itself; dashed: "
            "at a position of another document.",
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
            y=study.Axis("share of tokens", "share", low=0),
            size=(3.6, 3.4),
            share_y=False,
            lines={
                f"raw {OWN}": study.Line("state of the layer", "blue"),
                f"raw {OTHERS}": study.Line("this layer, vectors of others", "sky", "", "dashed"),
                f"last {OWN}": study.Line("state of the last layer", "green"),
                f"last {OTHERS}": study.Line("last layer, vectors of others", "pale", "", "dashed"),
            },
        ),
        study.Table(
            "active-table",
            "Lead over parameters chosen by other documents (points), by layer",
            pick("active", way=WAYS, state="raw", measure=LEAD, layer=study.KNOWN),
            (study.Column("layer"),),
            across="way",
            cells=(estimate("value", "", "{:+.1f}", 100),),
            dense=True,
        ),
    ),
)
