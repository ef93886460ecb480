"""How few tokens can stand for a vector? The transposed matrix against the pseudo-inverse.

In: random vectors, FFN values and states. Out: what is left of their inner products when k tokens
are kept, where the curves of both inverses cross; and the section of the study that shows it.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from layerleap import LayerleapError, StudyResult, Transformer, study
from layerleap.errors import ModelRefused
from layerleap.models.weights import feed_forwards, vectors
from layerleap.study import Page, above, all_of, below, in_words, pick, points
from layerleap_papers.embedding_space.embedding_context import EmbeddingContext
from layerleap_papers.embedding_space.inner_products import INVERSES, Kept, keep_best, sizes

PAGE = Page(__file__)
GAUSSIAN, VALUES, STATES = "random vectors", "FFN values", "states"
FEW = 64  # tokens at which the claim is judged; curves begin lower, to show where they cross


def _run(context: EmbeddingContext) -> study.Tables:
    n, model = context.settings.kept_rows, context.model
    generator = context.generator(4)
    sets: dict[str, Callable[[], tuple[Tensor, Tensor | None]]] = {
        GAUSSIAN: lambda: (torch.randn(n, model.d_model, generator=generator), None),
        VALUES: lambda: (_values(model, n, generator), None),
        STATES: lambda: states_of(context),
    }
    rows: list[study.Row] = []
    crossings: list[study.Row] = []
    for name, make in sets.items():
        try:
            chosen = make()
        except LayerleapError as error:
            context.leave_out(f"Inner products of {name}", error)
            continue
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
    per_block = -(-n // len(known))
    parts = []
    for block, ffn in known.items():
        drawn = torch.randperm(ffn.n_neurons, generator=generator)[:per_block]
        parts.append(vectors(model, block, "ffn.value")[drawn].float().cpu())
    rows = torch.cat(parts)
    return rows[torch.randperm(len(rows), generator=generator)[:n]]


def states_of(context: EmbeddingContext, *, carried: bool = False) -> tuple[Tensor, Tensor]:
    """States of random layers after the final norm, as E takes them, and their documents."""
    observed, last = context.observed, context.model.n_layers
    order = torch.randperm(len(observed.states), generator=context.generator(5))
    drawn = order[: context.settings.kept_rows]
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


def _leads(result: StudyResult, name: str) -> list[study.Row]:
    """The lead of the transposed matrix, from the fewest tokens on."""
    return result.rows("kept", of=name, inverse="lead")


def _few(result: StudyResult, name: str) -> study.Row:
    """The lead at few tokens."""
    rows = _leads(result, name)
    return next((row for row in rows[:-2] if row["k"] >= FEW), rows[0])


@PAGE.claim("inverses")
def _claim(result: StudyResult) -> study.Tested:
    sets = {
        row["of"]: (_few(result, row["of"]), _leads(result, row["of"])[-2])
        for row in result.rows("crossings")
    }
    few, many = next(iter(sets.values()))
    leads = "; ".join(
        f"{name}: {in_words(a, '+.2f')} and {in_words(b, '+.2f')}" for name, (a, b) in sets.items()
    )
    curves = "; ".join(
        f"of {row['of']} {crossing_words(row, _leads(result, row['of'])[0])}"
        for row in result.rows("crossings")
    )
    return (
        all_of(all_of([above(a), below(b)]) for a, b in sets.values()),
        {"few": few["k"], "many": many["k"], "leads": leads, "curves": curves, "usual": FEW},
    )


def crossing_words(row: study.Row, fewest: study.Row) -> str:
    """Where the curves of one set cross; `fewest` is the lead at the fewest tokens."""
    if row["value"] is None:
        better = "pseudo-inverse" if fewest["value"] <= 0 else "transposed matrix"
        return f"never cross: the {better} is better throughout"
    if row["low"] is None:
        share = f"{row['crosses']:.0%} of the sets without one group cross"
        return f"cross at about {row['value']:,.0f} tokens ({share}, so there is no interval)"
    return f"cross at {in_words(row, ',.0f')} tokens"


def _findings(result: StudyResult) -> Iterator[study.Said]:
    for row in result.rows("crossings"):
        name = row["of"]
        k, curves = _few(result, name)["k"], crossing_words(row, _leads(result, name)[0])
        first, second = (result.row("kept", of=name, inverse=way, k=k) for way in INVERSES)
        key = "kept_states" if name == STATES else "kept"
        yield PAGE.say(key, name=name, k=k, first=first, second=second, curves=curves)


SECTION = PAGE.section(
    "kept",
    _run,
    findings=_findings,
    shows=(
        _claim,
        PAGE.figure(
            "kept", points("kept", x="k", line="{inverse}", panel="{of}", inverse=set(INVERSES))
        ),
        PAGE.table("crossings-table", pick("crossings")),
    ),
)
