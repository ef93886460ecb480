"""What steering costs: how much worse the model predicts neutral text with a direction added.

In: a wrapped model, a direction, factors, and a text. Out: `SteeringCost`: KL from the unsteered
model and loss by factor, each beside random vectors of the same length. Without these any text
looks steered: what matters is what a direction does beyond a push of that size.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from layerleap.act.edits.vectors import AddVector
from layerleap.act.steering.saved import Direction
from layerleap.arguments import checked
from layerleap.errors import BadSettings
from layerleap.lens.intervals import ANY, POSITIVE, Documents
from layerleap.lens.lens import chunks
from layerleap.lens.metrics import Reference
from layerleap.models.hooks.rows import Positions
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, reporting
from layerleap.results.base import Result
from layerleap.results.columns import Column, Row, Table, estimate
from layerleap.stream.batches import batches_of
from layerleap.stream.examples import Batch, Sampling
from layerleap.stream.source import resolve_text


@dataclass(frozen=True, eq=False, repr=False)
class SteeringCost(Result):
    """KL and loss on neutral text by factor, of a direction and of random vectors as long."""

    TABLES: ClassVar[tuple[Table, ...]] = (
        Table(
            "cost",
            "",
            lambda cost: cost.lines,
            (
                Column("factor"),
                Column("vector"),
                Column("kl", "KL (nats)", "{:.3f}", low="kl_low", high="kl_high"),
                estimate("loss", "loss more than unsteered (nats)", "{:+.3f}"),
            ),
        ),
    )

    lines: Sequence[Row]
    about: Mapping[str, Any]

    def facts(self) -> Row:
        """What was measured."""
        return dict(self.about)

    def short(self) -> str:
        """What it is, in one line."""
        about = self.about
        documents = "1 document" if about["documents"] == 1 else f"{about['documents']:,} documents"
        return (
            f"SteeringCost(h[{about['layer']}] of {about['model']}, {about['rows']:,} tokens of "
            f"{documents} of {about['text']}, "
            f"loss {about['loss']:.3f} unsteered)"
        )

    def legend(self) -> str:
        """How to read it, in one line."""
        random, documents = self.about["random"], self.about["documents"]
        vectors = (
            "1 random vector of the same length"
            if random == 1
            else f"{random} random vectors of the same length, their mean"
        )
        intervals = (
            "one document gives no intervals" if documents == 1 else "95 % intervals over documents"
        )
        return f"random: {vectors}; {intervals}"


@checked
@torch.no_grad()
def steering_cost(
    transformer: Transformer,
    direction: Direction,
    *,
    factors: Sequence[float] = (1.0, 2.0, 4.0),
    text: Any = None,
    n_texts: int = 20,
    random: int = 2,
    positions: Positions = "all",
    seed: int = 0,
    progress: Progress | bool = True,
) -> SteeringCost:
    """What `AddVector(direction.layer, direction, factor)` costs on a neutral text.

        print(steering_cost(model, direction, factors=[1, 2, 4]))

    Args:
        factors: those of the edit.
        text: what to read; by default the text that suits the model, such as "wikipedia".
        n_texts: how many sentences of it.
        random: how many random vectors of equal length to add as a control.
        positions: where the edit acts: "all" or numbers; "last" as well if a model looks ahead.
        seed: of the random vectors.
    """
    if random < 1 or not factors:
        raise BadSettings(f"factors {list(factors)} and random {random}; expected one or more")
    transformer.require_eval()
    direction.check_model(transformer)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(random, transformer.d_model, generator=generator)
    noise = noise * (direction.vector.norm() / noise.norm(dim=1, keepdim=True))
    layer = direction.layer
    edits: dict[tuple[float, int], AddVector] = {}
    for factor in factors:
        vectors: list[Any] = [direction, *noise]
        for number, vector in enumerate(vectors):
            edits[float(factor), number] = AddVector(
                layer, vector, float(factor), positions=positions
            )
    with reporting(progress) as report:
        every = "every:8" if transformer.kind == "masked-token" else "all"
        source, sampling = resolve_text(transformer, text, Sampling(positions=every), report)
        batches = list(batches_of(transformer, source, sampling, side="both", n_texts=n_texts))
        _require_scored(transformer, positions, batches)
        done, values = 0, []
        for batch in batches:
            values.append(_of_batch(transformer, batch, edits))
            done += batch.n_texts
            report("steering neutral text", done, n_texts, "texts")
    table = torch.cat(values)  # (row, unsteered loss, then kl and loss of each edit)
    known = ~table[:, 0].isnan()  # what follows the end of a text is not known
    documents = Documents(torch.cat([batch.documents for batch in batches])[known])
    table = table[known]
    lines = []
    for factor in dict.fromkeys(float(one) for one in factors):
        for name, numbers in (("direction", [0]), ("random", list(range(1, random + 1)))):
            places = [1 + 2 * list(edits).index((factor, number)) for number in numbers]
            kl = documents.means(table[:, places].mean(1, keepdim=True), POSITIVE)[0]
            more = table[:, [place + 1 for place in places]].mean(1, keepdim=True) - table[:, :1]
            loss = documents.means(more, ANY)[0].to_dict()
            lines.append(
                {
                    "factor": factor,
                    "vector": name,
                    "kl": kl.value,
                    "kl_low": kl.low,
                    "kl_high": kl.high,
                    "loss": loss["value"],
                    "low": loss["low"],
                    "high": loss["high"],
                }
            )
    about = {
        "model": transformer.identity.name,
        "layer": layer,
        "text": str(source) if isinstance(source, str) else "the text",
        "rows": documents.n_rows,
        "documents": documents.n_documents,
        "loss": float(table[:, 0].mean()),
        "random": random,
        "seed": seed,
        "norm": direction.norm,
    }
    return SteeringCost(lines, about)


def _require_scored(
    transformer: Transformer, positions: Positions, batches: Sequence[Batch]
) -> None:
    """Refuse positions that no scored prediction depends on: they would seem to cost nothing."""
    is_causal = transformer.kind == "next-token"
    if positions == "generated" or (positions == "last" and is_causal):
        raise BadSettings(
            f"positions={positions!r} would change nothing that is scored: the text is read, not "
            "written, and what follows its last token is not known; choose 'all' or numbers"
        )
    if isinstance(positions, str):
        return
    lengths = [int(batch.mask.sum(1).max()) for batch in batches]
    end = max(lengths, default=0) - is_causal
    if min(positions) >= end:
        raise BadSettings(
            f"positions {list(positions)} would change nothing that is scored: the longest text "
            f"has predictions up to position {end - 1}"
        )


def _of_batch(transformer: Transformer, batch: Batch, edits: Mapping[Any, AddVector]) -> Tensor:
    """Per row: the loss without edits, then KL and loss with each edit."""
    last = transformer.n_layers

    def states(edit: AddVector | None) -> Tensor:
        with nullcontext() if edit is None else transformer.edit(edit):
            return transformer.capture(batch.inputs, layers=[last], keep=batch.keep).states[last]

    plain = states(None)
    edited = [states(edit) for edit in edits.values()]
    if batch.gold is None:
        raise BadSettings(
            f"the correct outputs of this text are not known for {transformer.identity.name}, so "
            "there is no loss; give another text"
        )
    table = torch.zeros(len(plain), 1 + 2 * len(edits), dtype=torch.float64)
    for rows in chunks(len(plain), transformer.d_vocab):
        right = batch.gold[rows]
        gold = right.clamp_min(0)[:, None]
        unedited = transformer.logits(plain[rows]).float().cpu()
        reference = Reference(unedited)
        loss = -unedited.log_softmax(-1).gather(1, gold)[:, 0]
        table[rows, 0] = loss.double().masked_fill(right < 0, torch.nan)
        for place, h in enumerate(edited):
            logits = transformer.logits(h[rows]).float().cpu()
            table[rows, 1 + 2 * place] = reference.compare(logits).kl.double()
            loss = -logits.log_softmax(-1).gather(1, gold)[:, 0]
            table[rows, 2 + 2 * place] = loss.double()
    return table
