"""What stitching costs in loss, for every pair of layers and every kernel.

In: both models and a held-out text. Out: the loss of each stitched model beside that of the second
model alone, as differences of the same positions, with intervals by document.

One pass of the first model and one of the second serve all pairs: only the blocks after the seam
run again. The floor is a guess by token frequency, counted on the fitting side.
"""

import time
from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from layerleap import StudyResult, Transformer, study
from layerleap.errors import BadText
from layerleap.lens import POSITIVE, Documents, chunks
from layerleap.memory import give_back
from layerleap.models import record
from layerleap.stream import Batch, TextCounts, batches_of
from layerleap.study import Claim, below, in_words, pick
from layerleap_papers.stitching.stitching_context import LINES, Kernels, StitchingContext

COUNTED_TEXTS = 3000  # whose tokens are counted, at least; no model runs on them
WORST = 1.5  # end of the colour scale: half as much again as the damage of guessing by frequency


def tables(context: StitchingContext) -> study.Tables:
    """Losses of all stitched models and of both models alone."""
    a, b = context.model, context.other
    pairs = [(i, j) for i in context.grid(a) for j in context.grid(b)]
    text_counts, started = TextCounts(), time.monotonic()
    fits = context.batches("fit", text_counts=text_counts)
    kernels, reports = context.kernels(b, pairs, fits, context.settings.n_fit)
    context.read("fit", context.text, text_counts.to_dict(), started)
    text_of_row, stitched, alone = measure(context, kernels)
    documents = Documents(text_of_row)
    damage = float((alone[:, 2] - alone[:, 0]).mean())
    costs, leads = [], []
    estimates = documents.means(stitched - alone[:, :1])
    for (kernel, (i, j)), cost, loss in zip(
        kernels, estimates, stitched.mean(0).tolist(), strict=True
    ):
        place = {"kernel": kernel, "layer_a": i, "layer_b": j}
        relative = cost.value / damage if damage > 0 else None
        costs.append({**place, **cost.to_dict(), "loss": loss, "relative": relative})
    # How much less the embedding kernel costs than each other one, at the same pair of layers.
    column = {key: number for number, key in enumerate(kernels)}
    others = [key for key in kernels if key[0] != "embedding"]
    gaps = [stitched[:, column[k]] - stitched[:, column["embedding", k[1]]] for k in others]
    for (kernel, (i, j)), lead in zip(others, documents.means(torch.stack(gaps, 1)), strict=True):
        leads.append({"against": kernel, "layer_a": i, "layer_b": j, **lead.to_dict()})
    names = (b.identity.name, a.identity.name, "token frequency")
    means = zip(names, documents.means(alone, POSITIVE), strict=True)
    return {
        "models": [context.describe()],
        "alone": [{"model": name, **mean.to_dict()} for name, mean in means],
        "costs": costs,
        "leads": leads,
        "kernel_fits": [report.to_dict() for report in reports],
    }


def measure(context: StitchingContext, kernels: Kernels) -> tuple[Tensor, Tensor, Tensor]:
    """-log p of the next token at every position of the held-out text.

    Documents of the rows; losses of stitched models, a column per kernel and pair; and of what runs
    alone: the second model, the first, and the guess by frequency.
    """
    frequency, started, texts = _log_frequency(context), time.monotonic(), 0
    text_counts, parts = TextCounts(), []
    for batch in context.batches(text_counts=text_counts):
        if batch.gold is not None and (known := batch.gold >= 0).any():
            stitched, alone = _losses(context, kernels, frequency, batch, known)
            parts.append((batch.documents[known], stitched, alone))
            texts += batch.n_texts
            context.progress("reading with stitched models", texts, context.settings.n_read)
            give_back()
    if not parts:
        raise BadText("no position with a next token to predict was found; give longer texts")
    context.read("read", context.text, text_counts.to_dict(), started)
    documents, stitched, alone = (torch.cat(part) for part in zip(*parts, strict=True))
    return documents, stitched, alone


def _losses(
    context: StitchingContext, kernels: Kernels, frequency: Tensor, batch: Batch, known: Tensor
) -> tuple[Tensor, Tensor]:
    a, b = context.model, context.other
    assert batch.gold is not None
    gold = batch.gold[known]

    def loss(model: Transformer, h: Tensor) -> Tensor:
        return token_losses(model, model.rows(h, batch.keep)[known.to(h.device)], gold)

    layers = {i for _, (i, _) in kernels}
    states = a.capture(batch.inputs, layers={*layers, a.n_layers}).states
    recording = record(b, batch.inputs)
    stitched = [
        loss(b, recording.run(carry(states[i]).to(b.device(j), b.model.dtype), j))
        for (_, (i, j)), carry in kernels.items()
    ]
    alone = [loss(b, recording.states[-1]), loss(a, states[a.n_layers]), -frequency[gold]]
    return torch.stack(stitched, 1), torch.stack(alone, 1).double()


@torch.no_grad()
def token_losses(model: Transformer, rows: Tensor, gold: Tensor) -> Tensor:
    """-log p(gold) read off states of the last layer, in nats: (row,), float64 on the CPU."""
    losses = torch.empty(len(rows), dtype=torch.float64)
    for part in chunks(len(rows), model.d_vocab):
        logits = model.logits(rows[part]).float()
        targets = gold[part].to(logits.device)
        losses[part] = torch.nn.functional.cross_entropy(logits, targets, reduction="none").double()
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


def best(result: StudyResult, kernel: str) -> list[study.Row]:
    """By layer of the first model, the pair that costs least."""
    rows = sorted(result.rows("costs", kernel=kernel), key=lambda row: row["layer_a"])
    groups = groupby(rows, key=lambda row: row["layer_a"])
    return [min(group, key=lambda row: row["value"]) for _, group in groups]


def findings(result: StudyResult) -> Iterator[study.Said]:
    """What the second model loses by it, and with which kernel."""
    models = result.tables["models"][0]
    loss, _, frequency = (row["value"] for row in result.tables["alone"])
    yield (
        f"{models['b']} alone has a loss of {loss:.2f} nats a token on this text; guessing by "
        f"token frequency has {frequency:.2f}."
    )
    for kernel, line in LINES.items():
        rows = result.rows("costs", kernel=kernel)
        # Some blocks of both models run: else one of them is only a table or a head.
        inside = [
            row
            for row in rows
            if 0 < row["layer_a"] < models["layers_a"] and row["layer_b"] < models["layers_b"]
        ]
        if rows:
            least = min(inside or rows, key=lambda row: row["value"])
            yield study.Finding(
                f"{line.label[:1].upper()}{line.label[1:]}: the cheapest seam inside both models "
                f"is from layer {least['layer_a']} of {models['a']} to layer {least['layer_b']} of "
                f"{models['b']}, which costs {in_words(least)} nats a token (loss "
                f"{least['loss']:.2f}; guessing by token frequency costs {frequency - loss:.2f}).",
                under="costs",
                headline=kernel in ("embedding", "folded", "least-squares"),
            )
    fitted = [below(row) for row in result.rows("leads", against="least-squares")]
    yield (
        f"The fitted kernel costs clearly less than the embedding kernel in {fitted.count('yes')} "
        f"of {len(fitted)} pairs of layers."
    )
    rows = [row for row in result.rows("costs", kernel="embedding") if row["layer_a"] > 0]
    better = [below(row, frequency - loss) for row in rows]
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


def _cells(result: StudyResult) -> Iterator[study.Row]:
    for kernel, line in LINES.items():
        rows = result.rows("costs", kernel=kernel, relative=study.KNOWN)
        high = sum(row["relative"] > WORST for row in rows)
        note = f"{high} of {len(rows)} above,\nshown as {WORST:g}" if high else ""
        for row in rows:
            place = {"x": row["layer_a"], "y": row["layer_b"], "value": row["relative"]}
            yield {**row, **place, "panel": line.label, "note": note}


def _best_rows(result: StudyResult) -> Iterator[study.Row]:
    for kernel, line in LINES.items():
        for row in best(result, kernel):
            point = {"x": row["layer_a"], "y": row["value"], "line": kernel}
            yield {**row, **point, "column": line.label, "partner": f"to layer {row['layer_b']}"}


def _damage(result: StudyResult) -> Iterator[study.Mark]:
    loss, _, frequency = (row["value"] for row in result.tables["alone"])
    damage = frequency - loss
    yield study.Mark("y", damage, f"guessing by token frequency, {damage:.2f}")


SECTION = study.Section(
    key="pairs",
    title="What stitching costs",
    run=tables,
    required=True,
    lead="The first blocks of one model run on a text. A kernel carries their states into the "
    "other model, whose last blocks and head go on from there. The loss of the stitched model is "
    "compared with that of the second model alone, at the same positions of held-out documents.",
    findings=findings,
    shows=(
        Claim(
            "The vocabulary relates the spaces of two models: the embedding kernel carries states "
            "better than a random kernel of the same size.",
            _beats("random"),
        ),
        Claim(
            "Without it, the spaces of two models have nothing in common: the kernel is better "
            "than leaving states as they are.",
            _beats("identity", "the models differ in width, so there is no identity kernel"),
        ),
        study.Figure(
            "costs",
            "Every pair of layers",
            "What the seam costs: 0 is as good as the second model alone, 1 no better than "
            "guessing by token frequency. Across, the layer at which the first model ends; up, the "
            "layer at which the second one goes on. At the top only its norm and head are left. "
            f"The colours end at {WORST:g}.",
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
            "For each layer of the first model, the cost in nats a token with the layer of the "
            "second that costs least. It is the least of several, so it flatters all kernels "
            "alike.",
            _best_rows,
            x=study.Axis("layer of the first model", "layer"),
            y=study.Axis("cost (nats a token)"),
            lines=LINES,
            marks=_damage,
            size=(7.2, 3.8),
            unit="positions",
        ),
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
                study.estimate("value", "loss"),
                study.Column("rows", "positions", "{:,.0f}"),
            ),
            terminal=True,
        ),
    ),
)
