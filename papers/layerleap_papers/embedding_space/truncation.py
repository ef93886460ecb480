"""How few tokens can stand for a vector? The transposed matrix against the pseudo-inverse.

In: random vectors, FFN values and states. Out: what is left of their inner products when k tokens
are kept, where the curves of both inverses cross; and the section of the study that shows it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from layerleap import LayerleapError, StudyResult, Transformer, study
from layerleap.errors import ModelRefused
from layerleap.models.weights import feed_forwards, vectors
from layerleap.study import above, all_of, below, estimate, pick, points
from layerleap_papers.embedding_space.embedding_context import EmbeddingContext
from layerleap_papers.embedding_space.inner_products import INVERSES, Kept, keep_best, sizes
from layerleap_papers.embedding_space.pairs import interval

GAUSSIAN, VALUES, STATES = "random vectors", "FFN values", "states"
FEW = 64  # tokens at which the claim is judged; curves begin lower, to show where they cross
Grouped = tuple[Tensor, Tensor | None]  # rows, and which of them are drawn together
LINES = {
    "transposed": study.Line("transposed matrix", "blue"),
    "pseudo-inverse": study.Line("pseudo-inverse", "orange", marker="s", style="dashed"),
}


def _run(context: EmbeddingContext) -> study.Tables:
    n, model = context.settings.kept_rows, context.model
    generator = context.generator(4)
    sets: dict[str, Grouped] = {
        GAUSSIAN: (torch.randn(n, model.d_model, generator=generator), None)
    }
    for name, make in (
        (VALUES, lambda: (_values(model, n, generator), None)),
        (STATES, lambda: states_of(context)),
    ):
        try:
            sets[name] = make()
        except LayerleapError as error:
            context.leave_out(f"Inner products of {name}", error)
    rows: list[study.Row] = []
    crossings: list[study.Row] = []
    for name, chosen in sets.items():
        kept = kept_of(context, name, *chosen)
        rows += [{"of": name, **row} for row in kept.rows()]
        crossings.append({"of": name, **kept.crossing()})
    return {"kept": rows, "crossings": crossings}


def kept_of(
    context: EmbeddingContext, name: str, rows: Tensor, groups: Tensor | None = None
) -> Kept:
    """Inner products of one set of rows; the same groups are drawn from sets that have the same."""
    if name not in context.kept:
        context.progress("inner products", len(context.kept), None, "sets of vectors")
        ks = sizes(len(context.matrix))
        context.kept[name] = keep_best(rows, context.matrix, ks, groups=groups)
    return context.kept[name]


def _values(model: Transformer, n: int, generator: torch.Generator) -> Tensor:
    """Values of n neurons, drawn evenly from all blocks."""
    known = {b: ffn for b, ffn in feed_forwards(model).items() if not isinstance(ffn, str)}
    if not known:
        raise ModelRefused(str(next(iter(feed_forwards(model).values()))))
    each = -(-n // len(known))
    parts = []
    for block, ffn in known.items():
        drawn = torch.randperm(ffn.n_neurons, generator=generator)[:each]
        parts.append(vectors(model, block, "ffn.value")[drawn].float().cpu())
    rows = torch.cat(parts)
    return rows[torch.randperm(len(rows), generator=generator)[:n]]


def states_of(context: EmbeddingContext, *, carried: bool = False) -> tuple[Tensor, Tensor]:
    """States of random layers, as the output matrix takes them: after the final norm.

    Beside them their documents.
    """
    observed, last = context.observed, context.model.n_layers
    n = context.settings.kept_rows
    drawn = torch.randperm(len(observed.states), generator=context.generator(5))[:n]
    states, layers = observed.states[drawn], observed.layers[drawn]
    if carried:
        bank, moved = context.bank, torch.empty_like(states)
        for layer in layers.unique().tolist():
            here = layers == layer
            moved[here] = bank[layer, last](states[here])
        states = moved
    return normed(context.model, states), observed.documents[drawn]


@torch.no_grad()
def normed(model: Transformer, states: Tensor) -> Tensor:
    """States after the steps of the tail that come before its first matrix."""
    weights = next(model.model.parameters())
    value = states.to(model.device(model.n_layers), weights.dtype)[:, None]
    model.require_tail()
    for step in model.tail:
        if step.kind == "module":
            module = model.model.get_submodule(step.path)
            if any(parameter.dim() > 1 for parameter in module.parameters()):
                break
        value = model.apply(step, value)
    return value[:, 0].float().cpu()


# --- claims, findings, figures and tables ------------------------------------------------------


def _ends(result: StudyResult, name: str) -> tuple[study.Row, study.Row]:
    """The lead of the transposed matrix at few tokens, and at the most that are not all."""
    rows = result.rows("kept", of=name, inverse="lead")
    return next((row for row in rows[:-2] if row["k"] >= FEW), rows[0]), rows[-2]


def _fewest(result: StudyResult, name: str) -> study.Row:
    """The lead of the transposed matrix at the fewest tokens."""
    return result.rows("kept", of=name, inverse="lead")[0]


@study.claim("The transposed output matrix is better for few tokens, the pseudo-inverse for many.")
def _claim(result: StudyResult) -> study.Verdict:
    names = [row["of"] for row in result.rows("crossings")]
    answers = [all_of([above(few), below(many)]) for few, many in (_ends(result, n) for n in names)]
    few, many = _ends(result, names[0])
    seen = "; ".join(
        f"{name}: {interval(a, '{:+.2f}')} and {interval(b, '{:+.2f}')}"
        for name, (a, b) in ((name, _ends(result, name)) for name in names)
    )
    crossed = "; ".join(
        f"of {row['of']} {crossing_words(row, _fewest(result, row['of']))}"
        for row in result.rows("crossings")
    )
    return study.Verdict(
        all_of(answers),
        f"lead of the transposed matrix with {few['k']:,} and with {many['k']:,} tokens: {seen}; "
        f"the curves {crossed}",
        "yes if, for every set of vectors, the interval of the lead is above 0 with few tokens "
        f"({FEW}, or the fewest measured) and below 0 with the most that are not all; partly if "
        "some of these hold and others do not. The curves begin lower and show where they cross.",
    )


def crossing_words(row: study.Row, fewest: study.Row) -> str:
    """Where the curves of one set cross."""
    if row["value"] is None:
        better = "pseudo-inverse" if fewest["value"] <= 0 else "transposed matrix"
        return f"never cross: the {better} is better throughout"
    if row["low"] is None:
        share = f"{row['crosses']:.0%} of the sets without one group cross"
        return f"cross at about {row['value']:,.0f} tokens ({share}, so there is no interval)"
    return f"cross at {interval(row, '{:,.0f}')} tokens"


def _findings(result: StudyResult) -> Iterator[study.Finding]:
    for row in result.rows("crossings"):
        name = row["of"]
        few, _ = _ends(result, name)
        first, second = (
            result.row("kept", of=name, inverse=inverse, k=few["k"]) for inverse in INVERSES
        )
        assert first is not None
        assert second is not None
        yield study.Finding(
            f"Inner products of {name}: with {few['k']} tokens kept, the cosine is "
            f"{interval(first, '{:.2f}')} with the transposed matrix and "
            f"{interval(second, '{:.2f}')} with the pseudo-inverse; the curves "
            f"{crossing_words(row, _fewest(result, name))}.",
            under="kept",
            headline=name == STATES,
        )


SECTION = study.Section(
    "kept",
    "How few tokens can stand for a vector?",
    _run,
    "Two vectors are read in the vocabulary and all but k entries of each reading are set to 0. "
    "How close are inner products of what is left to those of the vectors? With the pseudo-inverse "
    "they are exact if all tokens are kept, but people look at few. Vectors are scaled to the same "
    "length; states are of random layers and taken after the final norm.",
    short="Tokens kept",
    help="transposed matrix or pseudo-inverse",
    findings=_findings,
    shows=(
        _claim,
        study.Figure(
            "kept",
            "Inner products with k tokens kept",
            "Cosine of the inner products of all pairs of vectors with those of their readings; 1 "
            "is perfect.",
            points("kept", x="k", line="{inverse}", panel="{of}", inverse=set(INVERSES)),
            x=study.Axis("tokens kept", "log"),
            y=study.Axis("cosine"),
            lines=LINES,
            unit="vectors",
            size=(3.6, 3.6),
            sample="bands: 95 %, over vectors; of states, over documents",
        ),
        study.Table(
            "crossings-table",
            "Tokens kept at which the pseudo-inverse becomes better",
            pick("crossings"),
            (
                study.Column("of", "vectors"),
                estimate("value", "tokens", "{:,.0f}"),
                study.Column("crosses", "sets without one group that cross (%)", "{:.0f}", 100),
                study.Column("rows", form="{:,.0f}"),
            ),
            terminal=True,
        ),
    ),
)
