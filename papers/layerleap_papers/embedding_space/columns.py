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
from layerleap.errors import ModelRefused
from layerleap.models.weights import all_heads, heads, kinds, refusals, vectors
from layerleap.study import at_every, estimate, pick, points, untested
from layerleap_papers.embedding_space.embedding_context import EmbeddingContext
from layerleap_papers.embedding_space.pairs import (
    OWN,
    READINGS,
    Depth,
    Pairs,
    answers,
    interval,
    lead_over,
    mean_of,
    overlaps,
    sample_of,
    with_leads,
)
from layerleap_papers.embedding_space.tokens import derangement

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
    depth = Depth()
    blocks = _blocks(context, model)
    for number, (block, names) in enumerate(blocks.items()):
        context.progress("columns of heads", number, len(blocks), "layers")
        pairs = [_pairs(context, model, block, name, limit) for name in names]
        made = overlaps(model, matrix, block, pairs, readings, context.settings.k)
        # Columns of several query heads that share a partner are not independent.
        shared = {pair.name: pair.partners[OWN] for pair in pairs}
        for reading, overlap in made:
            for name, by_partner in overlap.items():
                columns = {(name, m): values for m, values in with_leads(by_partner).items()}
                depth.add(block, reading, columns, shared[name])
    return {"columns": depth.rows, "columns_depth": depth.over_all()}


def _pairs(
    context: EmbeddingContext, model: Transformer, block: int, name: str, limit: int | None
) -> Pairs:
    attention, (left, right) = heads(model, block), PAIRS[name]
    generator = context.generator(3, block, list(PAIRS).index(name))
    width = len(vectors(model, block, left)) // attention.n_heads
    partners = partners_of(attention.n_heads, attention.n_kv_heads, width, generator)
    rows = sample_of(len(partners[OWN]), limit, generator)
    return Pairs(name, left, right, rows, {key: value[rows] for key, value in partners.items()})


def _blocks(context: EmbeddingContext, model: Transformer) -> dict[int, list[str]]:
    """By block, the pairs that its verified heads have; what is missing is noted."""
    found: dict[int, list[str]] = {}
    reasons: dict[str, list[int]] = {}
    all_heads(model)  # verifies all in two passes
    for block in range(1, model.n_layers + 1):
        known = set(kinds(model, block))
        names = [name for name, both in PAIRS.items() if known >= set(both)]
        if names:
            found[block] = names
        if len(names) < len(PAIRS):
            reasons.setdefault("; ".join(refusals(model, block)), []).append(block)
    if not found:
        raise ModelRefused(next(iter(reasons)))
    for reason, blocks in reasons.items():
        numbers = ", ".join(map(str, blocks))
        context.note(f"Columns of heads of layers {numbers} are left out: {reason}.")
    return found


def _run(context: EmbeddingContext) -> study.Tables:
    readings = tuple(READINGS) if context.settings.fold else ("plain", "signed")
    return tables_of(context, context.model, context.matrix, context.settings.vectors, readings)


# --- claims and findings -----------------------------------------------------------------------


def _claim(name: str, result: StudyResult) -> study.Verdict:
    given = {
        control: answers(result, "columns", pair=name, measure=lead_over(control))
        for control in CONTROLS
    }
    if not given[LAYER]:
        return untested("these columns are not verified in any layer; see the notes")
    counts = "; ".join(
        f"above {control}: clearly at {own.count('yes')} of {len(own)} layers, clearly below at "
        f"{own.count('no')}"
        for control, own in given.items()
    )
    return study.Verdict(
        at_every(answer for own in given.values() for answer in own),
        counts,
        "yes if the intervals of the leads over both controls are above 0 at every layer, partly "
        "if most of them are",
    )


CLAIMS = (
    study.Claim(
        "Columns of W_Q and W_K of the same index share more top tokens than other columns, in "
        "every layer.",
        lambda result: _claim("W_Q and W_K", result),
    ),
    study.Claim(
        "Columns of W_V and rows of W_O of the same index share more top tokens than others, in "
        "every layer.",
        lambda result: _claim("W_V and W_O", result),
    ),
)


def _findings(result: StudyResult) -> Iterator[study.Said]:
    k = result.settings["k"]
    for name in PAIRS:
        rows = {m: mean_of(result, "columns_depth", pair=name, measure=m) for m in (OWN, *CONTROLS)}
        if (own := rows.pop(OWN)) is None:
            continue
        controls = " and ".join(
            f"{interval(row, '{:.4f}')} with {control}" for control, row in rows.items() if row
        )
        yield study.Headline(
            f"The top {k} tokens of {name} at the same index have a Jaccard index of "
            f"{interval(own, '{:.4f}')} on average over layers, {controls}."
        )
        for reading, words in (("signed", "by highest tokens"), ("folded", "with norms folded in")):
            lead = mean_of(
                result, "columns_depth", pair=name, measure=lead_over(LAYER), reading=reading
            )
            if lead is not None:
                yield (
                    f"{name}, {words}: the mean lead over {LAYER} is {interval(lead, '{:.4f}')}."
                )


SECTION = study.Section(
    "columns",
    "Do paired columns of a head name the same tokens?",
    _run,
    "Column i of a head's W_Q meets column i of W_K in a score, and column i of W_V meets row i of "
    "W_O in an output. With rotary positions that holds for W_Q and W_K at the same position "
    "(offset 0). Where heads share W_K and W_V, each query head is paired with the one that serves "
    "it. One control permutes the columns of the whole layer, the other those within a head.",
    short="Heads",
    help="columns of W_Q and W_K, W_V and W_O",
    findings=_findings,
    shows=(
        *CLAIMS,
        study.Figure(
            "columns",
            "Overlap of columns",
            "Jaccard index of the top tokens of both vectors, by magnitude: 0 if they share none.",
            points(
                "columns",
                line="{measure}",
                panel="{pair}",
                pair=PAIRS,
                reading="plain",
                measure=(OWN, *CONTROLS),
            ),
            y=study.Axis("Jaccard index", low=0),
            size=(4.6, 3.6),
            unit="columns",
            sample="bands: 95 %, over columns of W_K or W_V in a layer",
            share_y=False,
            lines={
                OWN: study.Line("same index", "blue"),
                LAYER: study.Line(LAYER, "grey", marker="s", style="dashed"),
                HEAD: study.Line(HEAD, "amber", marker="D", style="dashed"),
            },
        ),
        study.Table(
            "columns-table",
            "Lead of the same index over both controls, times 1,000, by layer",
            pick("columns", pair=PAIRS, measure=OVER, reading="plain", words={"measure": OVER}),
            (study.Column("layer"),),
            across="{pair}, {measure}",
            cells=(estimate("value", "", "{:.1f}", 1000),),
            dense=True,
        ),
    ),
)
