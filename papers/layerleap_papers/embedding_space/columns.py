"""Do columns of the same index in W_Q and W_K, or in W_V and W_O, name the same tokens?

In: the heads of every block. Out: their Jaccard overlap against two controls; and the section of
the study that shows it.

A query head is paired with the head of W_K or W_V that serves it. One control pairs columns of the
whole layer, the other columns of the same head. (The code released with the paper shuffled only as
many rows as a head has columns, and so compared one head alone.)
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from layerleap import StudyResult, Transformer, study
from layerleap.models.weights import all_heads, heads, vectors
from layerleap.study import Page, at_every, in_words, pick, points, untested
from layerleap_papers.embedding_space.embedding_context import EmbeddingContext
from layerleap_papers.embedding_space.overlaps import (
    OWN,
    Pairs,
    answers,
    lead_over,
    mean_of,
    overlap_tables,
    sample_of,
    verified,
)
from layerleap_papers.embedding_space.tokens import derangement

PAGE = Page(__file__)
# Names of pairs; the first kind has a column for every query head, the second may have fewer heads.
PAIRS = {"W_Q and W_K": ("attn.q", "attn.k"), "W_V and W_O": ("attn.o", "attn.v")}
LAYER, HEAD = "other columns of the layer", "other columns of the head"
CONTROLS = (LAYER, HEAD)
OVER = {lead_over(control): f"over {control}" for control in CONTROLS}


def partners_of(
    n_heads: int, n_kv_heads: int, width: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """For every column of every query head, rows of the other kind: its own, and two controls.

    No control is a column's own partner: the columns of the layer are permuted once for each query
    head that a head of the other kind serves, and every column moves.
    """
    group = n_heads // n_kv_heads
    head, column = torch.arange(n_heads * width) // width, torch.arange(n_heads * width) % width
    serving = head // group
    own = serving * width + column
    layer = torch.stack([derangement(n_kv_heads * width, generator) for _ in range(group)])
    within = torch.stack([derangement(width, generator) for _ in range(n_heads)])
    return {
        OWN: own,
        LAYER: layer[head % group, own],
        HEAD: serving * width + within[head, column],
    }


def tables_of(
    context: EmbeddingContext,
    model: Transformer,
    matrix: Tensor,
    limit: int | None,
    readings: tuple[str, ...],
) -> study.Tables:
    """Overlaps of columns in every block of a model whose heads are verified."""
    all_heads(model)  # verifies all in two passes
    blocks = verified(context, model, PAIRS, "Columns of heads", least=len(PAIRS))

    def pairs_of(block: int, name: str) -> Pairs:
        attention, (left, right) = heads(model, block), PAIRS[name]
        generator = context.generator(3, block, list(PAIRS).index(name))
        width = len(vectors(model, block, left)) // attention.n_heads
        partners = partners_of(attention.n_heads, attention.n_kv_heads, width, generator)
        rows = sample_of(len(partners[OWN]), limit, generator)
        return Pairs(name, left, right, rows, {key: value[rows] for key, value in partners.items()})

    return overlap_tables(context, model, matrix, blocks, pairs_of, readings, "columns")


def _claim(key: str, pair: str) -> study.Claim:
    def test(result: StudyResult) -> study.Tested:
        by_control = {
            control: answers(result, "columns", pair=pair, measure=lead_over(control))
            for control in CONTROLS
        }
        if not by_control[LAYER]:
            return untested("these columns are not verified in any layer; see the notes")
        counts = "; ".join(
            f"above {control}: clearly at {leads.count('yes')} of {len(leads)} layers, clearly "
            f"below at {leads.count('no')}"
            for control, leads in by_control.items()
        )
        return at_every(lead for leads in by_control.values() for lead in leads), {"counts": counts}

    return PAGE.claim(key)(test)


def _findings(result: StudyResult) -> Iterator[study.Said]:
    k = result.settings["k"]
    for pair in PAIRS:
        own, *controls = (
            mean_of(result, "columns_depth", pair=pair, measure=m) for m in (OWN, *CONTROLS)
        )
        if own is None:
            continue
        named = zip(CONTROLS, controls, strict=True)
        listed = " and ".join(f"{in_words(row, '.4f')} with {name}" for name, row in named if row)
        yield PAGE.say("columns", k=k, pair=pair, own=own, controls=listed)
        for reading in ("signed", "folded"):
            where = {"pair": pair, "measure": lead_over(LAYER), "reading": reading}
            if (lead := mean_of(result, "columns_depth", **where)) is not None:
                yield PAGE.say(f"columns_{reading}", pair=pair, control=LAYER, lead=lead)


SECTION = PAGE.section(
    "columns",
    lambda context: tables_of(context, *context.own_vectors),
    findings=_findings,
    shows=(
        _claim("columns_qk", "W_Q and W_K"),
        _claim("columns_vo", "W_V and W_O"),
        PAGE.figure(
            "columns",
            points(
                "columns",
                line="{measure}",
                panel="{pair}",
                pair=PAIRS,
                reading="plain",
                measure=(OWN, *CONTROLS),
            ),
        ),
        PAGE.table(
            "columns-table",
            pick("columns", pair=PAIRS, measure=OVER, reading="plain", words={"measure": OVER}),
        ),
    ),
)
