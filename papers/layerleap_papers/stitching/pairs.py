"""What stitching costs in loss, for every pair of layers and every kernel.

In: both models and a held-out text. Out: the loss of each stitched model beside that of the second
model alone, as differences of the same positions, with intervals by document.

One pass of the first model and one of the second serve all pairs: only the blocks after the seam
run again. The floor is a guess by token frequency, counted on the fitting side.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from layerleap import StudyResult, Transformer, study
from layerleap.errors import BadText
from layerleap.lens import POSITIVE, Documents, chunks
from layerleap.maps import LayerPair
from layerleap.memory import give_back
from layerleap.models import record
from layerleap.stream import Census, batches_of
from layerleap.study import below, estimate, in_words, pick
from layerleap_papers.stitching.stitching_context import KERNELS, Kernels, StitchingContext

LINES = {
    "embedding": study.Line("embedding kernel", "blue"),
    "folded": study.Line("folded kernel", "purple", marker="X"),
    "least-squares": study.Line("fitted kernel", "green", marker="D"),
    "random": study.Line("random kernel", "grey", marker="s", style="dashed"),
    "identity": study.Line("identity", "orange", marker="^", style="dashed"),
}
COUNTED_TEXTS = 3000  # whose tokens are counted, at least; no model runs on them
WORST = 1.5  # end of the colour scale: half as much again as the damage of guessing by frequency


@dataclass(frozen=True)
class Losses:
    """-log p of the next token at every position read; columns by kernel and pair."""

    documents: Tensor
    columns: list[tuple[str, LayerPair]]
    stitched: Tensor  # (row, column)
    alone: Tensor  # (row, 3): the second model, the first, and the guess by frequency


def tables(context: StitchingContext) -> study.Tables:
    """Losses of all stitched models and of both models alone."""
    a, b = context.model, context.other
    pairs = [(i, j) for i in context.grid(a) for j in context.grid(b)]
    census, started = Census(), time.monotonic()
    fits = context.batches("fit", census=census)
    kernels, reports = context.kernels(b, pairs, fits, context.settings.n_fit)
    context.read("fit", context.text, census.to_dict(), started)
    losses = measure(context, kernels)
    documents = Documents(losses.documents)
    alone = [one.to_dict() for one in documents.means(losses.alone, POSITIVE)]
    named = zip((b.identity.name, a.identity.name, "token frequency"), alone, strict=True)
    return {
        "models": [context.describe()],
        "alone": [{"model": name, **row} for name, row in named],
        "costs": _costs(losses, documents),
        "leads": _leads(losses, documents),
        "kernel_fits": [report.to_dict() for report in reports],
    }


def measure(context: StitchingContext, kernels: Kernels) -> Losses:
    """Read the held-out text with every stitched model."""
    a, b, started, texts = context.model, context.other, time.monotonic(), 0
    layers = {pair[0] for _, pair in kernels}
    frequency = _log_frequency(context)
    census, parts = Census(), []
    for batch in context.batches(census=census):
        if batch.gold is None or not (known := batch.gold >= 0).any():
            continue
        gold = batch.gold[known]
        first = a.capture(batch.inputs, layers={*layers, a.n_layers}).states
        recording = record(b, batch.inputs)

        def loss(
            model: Transformer,
            h: Tensor,
            known: Tensor = known,
            gold: Tensor = gold,
            keep: Tensor = batch.keep,
        ) -> Tensor:
            return token_losses(model, model.rows(h, keep)[known.to(h.device)], gold)

        columns = [
            loss(b, recording.run(carry(first[i]).to(b.device(j), b.model.dtype), j))
            for (_, (i, j)), carry in kernels.items()
        ]
        alone = [loss(b, recording.states[-1]), loss(a, first[a.n_layers]), -frequency[gold]]
        parts.append(
            (batch.documents[known], torch.stack(columns, 1), torch.stack(alone, 1).double())
        )
        texts += batch.n_texts
        context.progress("reading with stitched models", texts, context.settings.n_read)
        give_back()
    if not parts:
        raise BadText("no position with a next token to predict was found; give longer texts")
    documents, stitched, alone_rows = (torch.cat(part) for part in zip(*parts, strict=True))
    context.read("read", context.text, census.to_dict(), started)
    return Losses(documents, list(kernels), stitched, alone_rows)


@torch.no_grad()
def token_losses(model: Transformer, rows: Tensor, gold: Tensor) -> Tensor:
    """-log p(gold) read off states of the last layer, in nats: (row,), float64 on the CPU."""
    losses = torch.empty(len(rows), dtype=torch.float64)
    for part in chunks(len(rows), model.d_vocab):
        logits = model.logits(rows[part]).float()
        own = gold[part].to(logits.device)
        losses[part] = torch.nn.functional.cross_entropy(logits, own, reduction="none").double()
    return losses


def _log_frequency(context: StitchingContext) -> Tensor:
    """The log of each token's share on the fitting side.

    Tokens that do not occur share the probability of those that occur once (Good-Turing).
    """
    counts = torch.zeros(context.other.d_vocab, dtype=torch.float64)
    source, sampling = context.source()
    n_texts = max(COUNTED_TEXTS, context.settings.n_fit or 0)
    for batch in batches_of(context.model, source, sampling, side="fit", n_texts=n_texts):
        if batch.gold is not None:
            counts += batch.gold[batch.gold >= 0].bincount(minlength=len(counts))
    total, once, never = counts.sum(), (counts == 1).sum(), (counts == 0).sum()
    rare = once.clamp_min(1) / (total + 1) if never else torch.tensor(0.0, dtype=counts.dtype)
    return torch.where(counts > 0, counts / total * (1 - rare), rare / never.clamp_min(1)).log()


def _costs(losses: Losses, documents: Documents) -> list[study.Row]:
    """What each stitched model loses against the second model alone; and its loss."""
    own = losses.alone[:, :1]
    damage = float((losses.alone[:, 2] - losses.alone[:, 0]).mean())
    rows = []
    costs = documents.means(losses.stitched - own)
    for (kernel, (i, j)), cost, loss in zip(
        losses.columns, costs, losses.stitched.mean(0).tolist(), strict=True
    ):
        relative = cost.value / damage if damage > 0 else None
        place = {"kernel": kernel, "layer_a": i, "layer_b": j}
        rows.append({**place, **cost.to_dict(), "loss": loss, "relative": relative})
    return rows


def _leads(losses: Losses, documents: Documents) -> list[study.Row]:
    """By pair of layers, how much less the embedding kernel costs than each other one."""
    at = {column: number for number, column in enumerate(losses.columns)}
    others = [column for column in losses.columns if column[0] != "embedding"]
    gaps = [
        losses.stitched[:, at[column]] - losses.stitched[:, at["embedding", column[1]]]
        for column in others
    ]
    return [
        {"against": kernel, "layer_a": i, "layer_b": j, **lead.to_dict()}
        for (kernel, (i, j)), lead in zip(
            others, documents.means(torch.stack(gaps, 1)), strict=True
        )
    ]


def best(result: StudyResult, kernel: str) -> list[study.Row]:
    """By layer of the first model, the pair that costs least."""
    by: dict[int, study.Row] = {}
    for row in result.rows("costs", kernel=kernel):
        known = by.get(row["layer_a"])
        if known is None or row["value"] < known["value"]:
            by[row["layer_a"]] = row
    return [by[layer] for layer in sorted(by)]


def _names(result: StudyResult) -> tuple[str, str]:
    models = result.tables["models"][0]
    return models["a"], models["b"]


def findings(result: StudyResult) -> Iterator[study.Said]:
    """What the second model loses by it, and with which kernel."""
    a, b = _names(result)
    alone = {row["model"]: row["value"] for row in result.tables["alone"]}
    frequency = alone["token frequency"]
    yield (
        f"{b} alone has a loss of {result.tables['alone'][0]['value']:.2f} nats a token on this "
        f"text; guessing by token frequency has {frequency:.2f}."
    )
    for kernel in KERNELS:
        rows = result.rows("costs", kernel=kernel)
        inner = [row for row in rows if _is_inside(result, row)] or rows
        if not inner:
            continue
        least = min(inner, key=lambda row: row["value"])
        yield study.Finding(
            f"{LINES[kernel].label[:1].upper()}{LINES[kernel].label[1:]}: the cheapest seam inside "
            f"both models is from layer {least['layer_a']} of {a} to layer {least['layer_b']} of "
            f"{b}, which costs {in_words(least)} nats a token (loss {least['loss']:.2f}; guessing "
            f"by token frequency costs {frequency - result.tables['alone'][0]['value']:.2f}).",
            under="costs",
            headline=kernel in ("embedding", "folded", "least-squares"),
        )
    yield from _comparisons(result)


def _is_inside(result: StudyResult, row: study.Row) -> bool:
    """Whether some blocks of both models run: else one of them is only a table or a head."""
    models = result.tables["models"][0]
    return bool(0 < row["layer_a"] < models["layers_a"] and row["layer_b"] < models["layers_b"])


def _comparisons(result: StudyResult) -> Iterator[study.Said]:
    """What else the intervals say about the embedding kernel."""
    fitted = [below(row) for row in result.rows("leads", against="least-squares")]
    yield (
        f"The fitted kernel costs clearly less than the embedding kernel in {fitted.count('yes')} "
        f"of {len(fitted)} pairs of layers."
    )
    own, _, frequency = (row["value"] for row in result.tables["alone"])
    rows = [row for row in result.rows("costs", kernel="embedding") if row["layer_a"] > 0]
    better = [below(row, frequency - own) for row in rows]
    yield (
        "A model stitched with the embedding kernel predicts clearly better than token frequency "
        f"in {better.count('yes')} of {len(better)} pairs after at least one block, clearly worse "
        f"in {better.count('no')}."
    )


def _beats(against: str, missing: str = "") -> study.Each:
    return study.Each(
        pick("leads", against=against),
        "clearly in {yes} of {n} pairs of layers",
        "yes if the interval says so for all pairs, partly if for most",
        missing=missing,
    )


CLAIMS = (
    study.Claim(
        "The vocabulary relates the spaces of two models: the embedding kernel carries states "
        "better than a random kernel of the same size.",
        _beats("random"),
    ),
    study.Claim(
        "Without it, the spaces of two models have nothing in common: the kernel is better than "
        "leaving states as they are.",
        _beats("identity", "the models differ in width, so there is no identity kernel"),
    ),
)


def _cells(result: StudyResult) -> Iterator[study.Row]:
    for kernel in KERNELS:
        rows = result.rows("costs", kernel=kernel, relative=study.KNOWN)
        high = sum(row["relative"] > WORST for row in rows)
        note = f"{high} of {len(rows)} above,\nshown as {WORST:g}" if high else ""
        for row in rows:
            place = {"x": row["layer_a"], "y": row["layer_b"], "value": row["relative"]}
            yield {**row, **place, "panel": LINES[kernel].label, "note": note}


def _curves(result: StudyResult) -> Iterator[study.Row]:
    for kernel in KERNELS:
        for row in best(result, kernel):
            yield {**row, "x": row["layer_a"], "y": row["value"], "line": kernel}


def _damage(result: StudyResult) -> Iterator[study.Mark]:
    own, _, frequency = (row["value"] for row in result.tables["alone"])
    yield study.Mark("y", frequency - own, f"guessing by token frequency, {frequency - own:.2f}")


FIGURES = (
    study.Figure(
        "costs",
        "Every pair of layers",
        "What the seam costs: 0 is as good as the second model alone, 1 no better than guessing by "
        "token frequency. Across, the layer at which the first model ends; up, the layer at which "
        "the second one goes on. At the top only its norm and head are left. The colours end at "
        f"{WORST:g}.",
        _cells,
        "heatmap",
        x=study.Axis("layer of the first model"),
        y=study.Axis("layer of the second model"),
        value=study.Axis("cost, as a share of that of guessing", low=0, high=WORST),
        size=(4.2, 4.2),
        columns=2,
        unit="positions",
        sample="95 % intervals are in costs.csv: over documents",
    ),
    study.Figure(
        "best",
        "The best partner of each layer",
        "For each layer of the first model, the cost in nats a token with the layer of the second "
        "that costs least. It is the least of several, so it flatters all kernels alike.",
        _curves,
        x=study.Axis("layer of the first model", "layer"),
        y=study.Axis("cost (nats a token)"),
        lines=LINES,
        marks=_damage,
        size=(7.2, 3.8),
        unit="positions",
    ),
)


def _best_rows(result: StudyResult) -> Iterator[study.Row]:
    for kernel in KERNELS:
        for row in best(result, kernel):
            yield {**row, "column": LINES[kernel].label, "partner": f"to layer {row['layer_b']}"}


TABLES = (
    study.Table(
        "best-table",
        "Cost in nats a token at the best partner of each layer",
        _best_rows,
        (study.Column("layer_a", "layer of the first model"),),
        across="column",
        cells=(study.Column("value", "", "{:.2f}", low="low", high="high", note="partner"),),
        terminal=True,
    ),
    study.Table(
        "alone-table",
        "Loss of each model alone, in nats a token",
        pick("alone"),
        (
            study.Column("model"),
            estimate("value", "loss"),
            study.Column("rows", "positions", "{:,.0f}"),
        ),
        terminal=True,
    ),
)

SECTION = study.Section(
    key="pairs",
    title="What stitching costs",
    run=tables,
    required=True,
    lead="The first blocks of one model run on a text. A kernel carries their states into the "
    "other model, whose last blocks and head go on from there. The loss of the stitched model is "
    "compared with that of the second model alone, at the same positions of held-out documents.",
    findings=findings,
    shows=(*CLAIMS, *FIGURES, *TABLES),
)
