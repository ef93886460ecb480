"""Named patterns of heads: the previous token, the first one, induction, duplicates.

In: a wrapped model; no text is needed. Out: `HeadPatterns`: for every head the share of attention
that it pays to the positions of each pattern, on random tokens that are written twice. Nothing in
such a text can be guessed but by looking back, so what is measured is where a head looks.

    t-1        previous: the token before
    0          first: often a place to rest, where a head has nothing to take (attention sink)
    t-n        duplicate: the same token, one repetition earlier
    t-n+1      induction: what followed that token (arXiv 2209.11895)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from layerleap.arguments import checked
from layerleap.errors import BadSettings, ModelRefused, check_choice
from layerleap.lens.attention.recorder import patterns
from layerleap.lens.attribution.prompt import OneInput
from layerleap.lens.intervals import SHARE, Estimate, mean_interval
from layerleap.models.discovery.probe import READ, probe_ids
from layerleap.models.transformer import Transformer
from layerleap.results.base import Result
from layerleap.results.cells import Grid, grid_of
from layerleap.results.columns import Column, Row, Table, estimate
from layerleap.results.shapes import block_ticks, heat_map

PATTERNS = ("previous", "first", "duplicate", "induction")
NAMED = 0.3  # a head has the name of a pattern whose interval lies above this share
SHOWN = 5  # heads of each pattern in the table


@dataclass(frozen=True, eq=False, repr=False)
class StrongestHeads(Result):
    """The heads with the largest shares of one pattern, in order; `rows()` gives them as dicts."""

    TABLES: ClassVar[tuple[Table, ...]] = (
        Table(
            "heads",
            "",
            lambda result: result.lines,
            (Column("name", "head"), estimate("share", form="{:.0f} %", scale=100)),
        ),
    )

    FACTS: ClassVar[tuple[str, ...]] = ("pattern",)

    pattern: str
    lines: Sequence[Row]

    def short(self) -> str:
        """What it is, in one line."""
        names = ", ".join(line["name"] for line in self.lines)
        return f"StrongestHeads({self.pattern}: {names})"


@dataclass(frozen=True, eq=False, repr=False)
class HeadPatterns(Result):
    """The share of each pattern in the attention of every head, with intervals over texts."""

    KIND: ClassVar[str] = "heads"
    TEMPLATE: ClassVar[str] = "shapes"
    TABLES: ClassVar[tuple[Table, ...]] = (Table("heads", "", lambda result: result.lines()),)

    shares: dict[tuple[int, int], dict[str, Estimate]]  # by block and head, by pattern
    chance: dict[str, float]  # of attention that is spread evenly
    n_texts: int
    n_tokens: int
    notes: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[Row]:
        """One plain dict per head; `pattern` is its name, if it has one."""
        for (block, head), shares in self.shares.items():
            row: Row = {"name": f"L{block}.H{head}", "block": block, "head": head}
            # Nearly all heads rest at the first token at times; what else they do says more.
            order = sorted(shares, key=lambda one: (one == "first", -shares[one].value))
            named = (one for one in order if (shares[one].low or 0.0) > NAMED)
            row["pattern"] = next(named, None)
            for pattern, one in shares.items():
                row |= {pattern: one.value, f"{pattern}_low": one.low, f"{pattern}_high": one.high}
            yield row

    def of(self, pattern: str, count: int = SHOWN) -> StrongestHeads:
        """The heads with the largest shares of a pattern."""
        check_choice(pattern, PATTERNS, "pattern")
        order = sorted(self.shares, key=lambda place: -self.shares[place][pattern].value)
        lines: list[Row] = [
            {
                "name": f"L{block}.H{head}",
                "block": block,
                "head": head,
                "share": self.shares[block, head][pattern].value,
                "low": self.shares[block, head][pattern].low,
                "high": self.shares[block, head][pattern].high,
            }
            for block, head in order[:count]
        ]
        return StrongestHeads(pattern, lines)

    def short(self) -> str:
        """What it is, in one line."""
        names = [row["pattern"] for row in self.lines()]
        if self.n_texts == 1:
            return f"HeadPatterns({len(names)} heads, without names: one text gives no intervals)"
        counts = ", ".join(f"{names.count(one)} {one}" for one in PATTERNS)
        return f"HeadPatterns({len(names)} heads: {counts})"

    def headline(self) -> str:
        """How many heads have which name."""
        return self.short().partition("(")[2][:-1]

    def legend(self) -> str:
        """What was measured."""
        chance = ", ".join(f"{one} {100 * share:.0f} %" for one, share in self.chance.items())
        texts, intervals, named = "1 text", "", ""
        if self.n_texts > 1:
            texts, intervals = f"{self.n_texts} texts", ", with 95 % intervals over texts"
            named = f" Heads are named where the interval lies above {100 * NAMED:.0f} %."
        return (
            f"Shares of attention on {texts} of {self.n_tokens} random tokens, written "
            f"twice{intervals}. Means: previous from the second position on, first from the third, "
            "duplicate and induction over the second time that the tokens are written. Even "
            f"attention would give: {chance}.{named}"
        )

    def facts(self) -> Row:
        """The size of the probe, and chance."""
        return {"n_texts": self.n_texts, "n_tokens": self.n_tokens, "chance": self.chance}

    def grids(self, width: int | None = None) -> list[Grid]:
        """The strongest heads of each pattern."""
        rows = [{"pattern": one, **line} for one in PATTERNS for line in self.of(one).lines]
        share = estimate("share", form="{:.0f} %", scale=100)
        columns = (Column("pattern"), Column("name", "head"), share)
        return [grid_of(Table("", "", lambda _: rows, columns), self)]

    def picture(self) -> Row:
        """A map of all heads for each pattern: heads down, blocks across."""
        blocks, heads = (sorted({place[n] for place in self.shares}) for n in (0, 1))
        ticks, names = block_ticks(blocks), [f"head {head}" for head in heads]
        shapes = []
        for one in PATTERNS:
            rows = [[self.shares[block, head][one].value for block in blocks] for head in heads]
            shapes.append(heat_map(one, rows, names, ticks, cell=(14, 14), most=1.0))
        return {"shapes": shapes}


@checked
def heads(
    transformer: Transformer, *, n_texts: int = 8, n_tokens: int = 24, seed: int = 0
) -> HeadPatterns:
    """Which heads look at the previous token, the first one, a duplicate, or what followed it.

        ll.heads(model)
        ll.heads(model).of("induction")

    Args:
        n_texts: how many random texts; intervals are over texts.
        n_tokens: of each text, before it is repeated.
        seed: of the texts.
    """
    if n_texts < 1 or n_tokens < 2:
        raise BadSettings(f"n_texts={n_texts}, n_tokens={n_tokens}; expected at least 1 and 2")
    model = transformer.model
    if model.main_input_name != READ[0]:
        raise ModelRefused(f"{transformer.identity.name} reads no text that could be repeated")
    transformer.require_eval()
    transformer.refresh()
    blocks = list(range(1, transformer.n_layers + 1))
    rows, start = [], _start(transformer)
    for ids in probe_ids(model, n_texts, n_tokens, seed).tolist():
        text = [*start, *ids, *ids]
        pair = {"input_ids": torch.tensor([text]), "decoder_input_ids": torch.tensor([text])}
        given = OneInput.of(transformer, pair if model.config.is_encoder_decoder else text)
        with patterns(transformer, given, blocks) as recorder:
            transformer.capture(given.inputs, layers=[transformer.n_layers])
        by_block = recorder.found()
        rows.append(
            torch.cat([_shares(one.weights, n_tokens) for one in by_block.values()]).flatten()
        )
    even = torch.ones(1, len(text), len(text))
    even = even if by_block[1].weights.triu(1).any() else even.tril()
    chance = _shares(even / even.sum(-1, keepdim=True), n_tokens)[0].tolist()
    estimates = iter(mean_interval(torch.stack(rows), torch.arange(n_texts), SHARE))
    shares = {
        (block, head): {one: next(estimates) for one in PATTERNS}
        for block, one in by_block.items()
        for head in range(len(one.weights))
    }
    by_pattern = dict(zip(PATTERNS, chance, strict=True))
    return HeadPatterns(shares, by_pattern, n_texts, n_tokens)


def _start(transformer: Transformer) -> list[int]:
    """The token that the tokenizer puts in front of every text, if there is one."""
    if transformer.tokenizer is None:
        return []
    ids = transformer.tokenizer("a")["input_ids"]
    return ids[:1] if len(ids) > 1 and ids[0] in transformer.tokenizer.all_special_ids else []


def _shares(weights: Tensor, n: int) -> Tensor:
    """Of one block: (head, query, key) to (head, pattern), means over the queries."""
    second = range(weights.shape[1] - n, weights.shape[1])
    return torch.stack(
        [
            weights.diagonal(-1, 1, 2)[:, 1:].mean(-1),
            weights[:, 2:, 0].mean(-1),  # at position 1 the first token is the previous one
            weights[:, second, [t - n for t in second]].mean(-1),
            weights[:, second, [t - n + 1 for t in second]].mean(-1),
        ],
        -1,
    ).double()
