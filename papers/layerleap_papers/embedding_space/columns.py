"""Do columns of the same index in W_Q and W_K, or in W_V and W_O, name the same tokens?

In: the heads of every block. Out: their Jaccard overlap against two controls; and the section of
the study that shows it.

A query head is paired with the head of W_K or W_V that serves it. One control pairs columns of the
whole layer, the other columns of the same head. (The code released with the paper shuffled only as
many rows as a head has columns, and so compared one head alone.)
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from layerleap import StudyResult, study
from layerleap.models.weights import all_heads, heads, vectors
from layerleap.study import Page, in_words, pick, points
from layerleap_papers.embedding_space import overlaps
from layerleap_papers.embedding_space.embedding_context import EmbeddingContext, Vectors
from layerleap_papers.embedding_space.overlaps import OWN
from layerleap_papers.embedding_space.tokens import derangement

PAGE = Page(__file__)
# Names of pairs; the first kind has a column for every query head, the second may have fewer heads.
PAIRS = {"W_Q and W_K": ("attn.q", "attn.k"), "W_V and W_O": ("attn.o", "attn.v")}
LAYER, HEAD = "other columns of the layer", "other columns of the head"
CONTROLS = (LAYER, HEAD)
OVER = {overlaps.lead_over(control): control for control in CONTROLS}


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
    partner = serving * width + column
    layer = torch.stack([derangement(n_kv_heads * width, generator) for _ in range(group)])
    within = torch.stack([derangement(width, generator) for _ in range(n_heads)])
    return {
        OWN: partner,
        LAYER: layer[head % group, partner],
        HEAD: serving * width + within[head, column],
    }


def tables_of(context: EmbeddingContext, read: Vectors) -> study.Tables:
    """Overlaps of columns in every block of a model whose heads are verified."""
    all_heads(read.model)  # verifies all in two passes
    blocks = overlaps.verified(context, read.model, PAIRS, "Columns of heads", least=len(PAIRS))

    def pairs_of(block: int, name: str) -> overlaps.Pairs:
        attention, (left, right) = heads(read.model, block), PAIRS[name]
        generator = context.generator(3, block, list(PAIRS).index(name))
        width = len(vectors(read.model, block, left)) // attention.n_heads
        partners = partners_of(attention.n_heads, attention.n_kv_heads, width, generator)
        rows = overlaps.sample_of(len(partners[OWN]), read.limit, generator)
        chosen = {key: partner[rows] for key, partner in partners.items()}
        return overlaps.Pairs(name, left, right, rows, chosen)

    return overlaps.overlap_tables(context, read, blocks, pairs_of, "columns")


def _claim(key: str, pair: str) -> study.Claim:
    return PAGE.groups(
        key,
        lambda result: {
            control: overlaps.answers(result, "columns", pair=pair, measure=lead)
            for lead, control in OVER.items()
        },
    )


def _findings(result: StudyResult) -> Iterator[study.Said]:
    k = result.settings["k"]
    for pair in PAIRS:
        mean_of = partial(overlaps.mean_of, result, "columns_depth", pair=pair)
        own, *controls = (mean_of(measure=measure) for measure in (OWN, *CONTROLS))
        if own is None:
            continue
        named = zip(CONTROLS, controls, strict=True)
        listed = " and ".join(f"{in_words(row, '.4f')} with {name}" for name, row in named if row)
        yield PAGE.say("columns", k=k, pair=pair, own=own, controls=listed)
        for reading in ("signed", "folded"):
            lead = mean_of(measure=overlaps.lead_over(LAYER), reading=reading)
            if lead is not None:
                yield PAGE.say(f"columns_{reading}", pair=pair, control=LAYER, lead=lead)


SECTION = PAGE.section(
    "columns",
    lambda context: tables_of(context, context.own_vectors),
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
            pick(
                "columns",
                pair=PAIRS,
                measure=OVER,
                reading="plain",
                words={"measure": {lead: f"over {control}" for lead, control in OVER.items()}},
            ),
        ),
    ),
)
