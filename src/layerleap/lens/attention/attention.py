"""Attention: which tokens each head looks at, and how much of what it takes comes from there.

In: a wrapped model and a prompt. Out: `Attention`: the patterns of all heads, or of some, with
entropy, distance and the share of the first token; and the same weighted by the size of the values,
because a large weight on the first token often carries next to nothing (attention sinks).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from layerleap.arguments import checked
from layerleap.errors import BadSettings, ModelRefused
from layerleap.lens.attention.recorder import patterns
from layerleap.lens.attribution.prompt import OneInput
from layerleap.lens.attribution.readout import wide
from layerleap.models.facts import check_number
from layerleap.models.transformer import Transformer
from layerleap.models.weights import heads
from layerleap.results.base import Result
from layerleap.results.cells import Grid, grid_of
from layerleap.results.columns import Column, Row, Table
from layerleap.results.shapes import block_ticks, heat_map

SHOWN = 20  # heads of several blocks in a table; JSON and data frames have all
ENTROPY = Column("entropy", "entropy (nats)", form="{:.2f}")
DISTANCE = Column("distance", form="{:.1f}")


@dataclass(frozen=True, eq=False, repr=False)
class Attention(Result):
    """The attention of heads to one input.

    weights  by block, (head, query, key): rows sum to 1, less what a sink takes
    sizes    by block, (head, key): the length of what a head writes into the stream if it takes one
             value whole; a norm after attention counts with its gain, but not the common factor
    """

    KIND: ClassVar[str] = "attention"
    TEMPLATE: ClassVar[str] = "shapes"
    TABLES: ClassVar[tuple[Table, ...]] = (
        Table(
            "heads",
            "",
            lambda result: result.lines(),
            (
                Column("name", "head"),
                ENTROPY,
                DISTANCE,
                Column("first", "on the first token", form="{:.0f} %", scale=100),
                Column("first_weighted", "weighted", form="{:.0f} %", scale=100),
            ),
        ),
    )

    tokens: tuple[str, ...]
    weights: Mapping[int, Tensor]
    sizes: Mapping[int, Tensor]
    heads: tuple[int, ...]  # those that were asked for
    position: int | None = None  # the only query that measures are of; all but the first when None
    notes: list[str] = field(default_factory=list)  # what limits it, a sentence each

    def weighted(self, block: int) -> Tensor:
        """Weights times the size of the values, as shares: (head, query, key)."""
        scaled = self.weights[block] * self.sizes[block][:, None]
        return scaled / scaled.sum(-1, keepdim=True).clamp_min(1e-30)

    def lines(self) -> Iterator[Row]:
        """One plain dict per head: means over the queries."""
        n = len(self.tokens)
        queries = slice(min(1, n - 1), None)
        if self.position is not None:
            queries = slice(self.position, self.position + 1)
        places = torch.arange(n)
        for block, weights in self.weights.items():
            shares = weights[:, queries].double()
            entropy = -torch.special.xlogy(shares, shares).sum(-1)
            far = (places[queries, None] - places).abs().double()
            distance = (shares * far).sum(-1) / shares.sum(-1).clamp_min(1e-30)
            columns = {"entropy": entropy, "distance": distance, "first": shares[..., 0]}
            if block in self.sizes:
                columns["first_weighted"] = self.weighted(block)[:, queries, 0].double()
            means = {key: value.mean(1).tolist() for key, value in columns.items()}
            for head in self.heads:
                measures = {key: value[head] for key, value in means.items()}
                yield {"name": f"L{block}.H{head}", "block": block, "head": head, **measures}

    def _many(self) -> str:
        count = len(self.weights) * len(self.heads)
        return "1 head" if count == 1 else f"{count} heads"

    def short(self) -> str:
        """What it is, in one line."""
        return f"Attention({self._many()}, {len(self.tokens)} positions)"

    def headline(self) -> str:
        """How many heads, and on how much text."""
        n = len(self.tokens)
        return f"Attention of {self._many()} on {n} position{'s' if n > 1 else ''}"

    def _measured(self) -> str:
        """From where the heads look that are measured."""
        if self.position is not None:
            return f"from position {self.position}, {self.tokens[self.position]}"
        if len(self.tokens) == 1:
            return "from the only position"
        if len(self.tokens) == 2:
            return f"from the second position, {self.tokens[1]}"
        return "means over all positions but the first"

    def legend(self) -> str:
        """What the columns mean."""
        return (
            f"Measures of heads: {self._measured()}. Entropy: 0 looks at one token. Distance: how "
            "many positions away a head looks, on average. Weighted: shares of weight times the "
            "length of what the head would write from there."
        )

    def grids(self, width: int | None = None) -> list[Grid]:
        """All heads of a block; of several blocks, those that rest least at the first token."""
        rows = sorted(self.lines(), key=lambda row: row["first"] if len(self.weights) > 1 else 0)
        caption = ""
        if len(rows) > SHOWN and len(self.weights) > 1:
            caption = (
                f"The {SHOWN} heads that look least at the first token; name a block for its own"
            )
            rows = rows[:SHOWN]
        return [grid_of(replace(self.TABLES[0], rows=lambda _: rows, caption=caption), self)]

    def facts(self) -> Row:
        """The text, and the patterns where few were asked for."""
        shown = self.weights if len(self.weights) == 1 else {}
        by_name = {f"L{block}": one[list(self.heads)].tolist() for block, one in shown.items()}
        return {"tokens": list(self.tokens), "position": self.position, "weights": by_name}

    def picture(self) -> Row:
        """The pattern of each head of one block; of all blocks, a strip and measures of heads."""
        if len(self.weights) > 1:
            return {"shapes": [self._strip(), *self._measures()]}
        ((block, weights),) = self.weights.items()
        forms = [("", weights)]
        if len(self.heads) == 1 and block in self.sizes:
            forms.append((", weighted by values", self.weighted(block)))
        cell = None if len(self.heads) == 1 else (11, 11)
        labels = self.tokens if len(self.tokens) <= 40 else [""] * len(self.tokens)
        return {
            "shapes": [
                heat_map(
                    f"L{block}.H{head}{form}",
                    matrix[head].tolist(),
                    labels,
                    labels,
                    cell=cell,
                    most=1.0,
                )
                for head in self.heads
                for form, matrix in forms
            ]
        }

    def _strip(self) -> Row:
        """What all heads look at from one position: tokens down, heads across."""
        at = len(self.tokens) - 1 if self.position is None else self.position
        rows = torch.cat([one[list(self.heads), at] for one in self.weights.values()]).T
        room = [""] * (len(self.heads) - 1)
        ticks = [one for name in block_ticks(self.weights) for one in (name, *room)]
        width = max(2, min(12, 900 // rows.shape[1]))
        title = f"weights from position {at}, {self.tokens[at]}, all heads"
        size = (width, max(4, min(16, 480 // len(self.tokens))))
        return heat_map(title, rows.tolist(), self.tokens, ticks, cell=size, most=1.0)

    def _measures(self) -> Iterator[Row]:
        """Heads down, blocks across."""
        lines = {(row["block"], row["head"]): row for row in self.lines()}
        names = [f"head {head}" for head in self.heads]
        ticks = block_ticks(self.weights)
        keys = [
            ("first", "share of the first token"),
            ("entropy", "entropy"),
            ("distance", "distance"),
        ]
        where = self._measured()
        for key, title in keys:
            rows = [[lines[block, head][key] for block in self.weights] for head in self.heads]
            yield heat_map(f"{title}, {where}", rows, names, ticks, cell=(11, 14))


@checked
def attention(
    transformer: Transformer,
    prompt: Any,
    block: int | None = None,
    head: int | None = None,
    *,
    position: int | None = None,
) -> Attention:
    """Which tokens each head attends to, for any attention implementation.

        ll.attention(model, "The capital of France is")
        ll.attention(model, "The capital of France is", block=24, head=4).weights[24][4]

    Patterns are computed from what enters the model's attention, and verified against what it
    gives; the model is not loaded again. Of an encoder-decoder, the decoder's self-attention.

    Args:
        prompt: a text, chat messages or token ids; for other models what `model.capture` takes.
        block: only this block, 1 to n_layers.
        head: only this head, from 0.
        position: measure attention from this position only, negative from the end; by default,
            means over all positions but the first.
    """
    transformer.require_eval()
    transformer.refresh()
    last = transformer.n_layers
    check_number("block", 1 if block is None else block, 1, last)
    given = OneInput.of(transformer, prompt)
    n = len(given.tokens)
    if position is not None and not -n <= position < n:
        raise BadSettings(f"position {position} does not exist: the text has {n} tokens")
    blocks = list(range(1, last + 1)) if block is None else [block]
    with patterns(transformer, given, blocks) as recorder:
        transformer.capture(given.inputs, layers=[blocks[-1]])
    by_block = recorder.found()
    n_heads = len(by_block[blocks[0]].weights)
    check_number("head", 0 if head is None else head, 0, n_heads - 1)
    sizes, notes = {}, []
    for number, one in by_block.items():
        try:
            writers = wide(heads(transformer, number).rows(transformer, "attn.o")).cpu()
        except ModelRefused as error:
            notes = [f"values have no size: {error}"]
            continue
        written = writers.unflatten(0, (n_heads, -1))
        sizes[number] = (one.values @ written.to(one.values.dtype)).norm(dim=-1)
    return Attention(
        given.tokens,
        {number: one.weights for number, one in by_block.items()},
        sizes,
        tuple(range(n_heads)) if head is None else (head,),
        None if position is None else position % n,
        notes,
    )
