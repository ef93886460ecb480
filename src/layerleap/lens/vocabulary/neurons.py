"""Neurons at work: the strongest sub-updates of every FFN at one position, read as tokens.

In: a wrapped model and a text. Out: `DominantNeurons`: for each block what a lens reads before the
block, after attention and after the FFN, and the neurons that add most to the residual stream.

An FFN adds  sum_i m_i v_i + bias  (arXiv 2204.12130): m_i is the coefficient of neuron i at this
position, v_i its value vector. A sub-update m_i v_i is as strong as |m_i| ||v_i||. Its share is
<m_i v_i, o> / ||o||^2 of what the FFN adds in total, o; the shares of all neurons and the bias add
up to 1. Where a norm follows the FFN, vectors are those that leave this norm.

A vector is read by the output matrix alone, without the final norm: the tokens it promotes most,
and those it suppresses most. A negative coefficient swaps the two.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from layerleap.arguments import checked
from layerleap.errors import BadSettings, ModelRefused
from layerleap.lens.lens import Lens
from layerleap.lens.top import top_k
from layerleap.lens.vocabulary.ends import Scored, check_neuron, vector_ends
from layerleap.lens.vocabulary.tokens import TokenLabel, output_label, token_label
from layerleap.maps.bank import ShortcutBank
from layerleap.models.hooks.capture import Capture, check_block
from layerleap.models.hooks.recording import Recording
from layerleap.models.inputs import padded
from layerleap.models.prompts import OnePrompt, Prompts, numbered, several
from layerleap.models.transformer import Transformer
from layerleap.models.weights import FeedForward, feed_forward, feed_forwards
from layerleap.results.base import WIDE, Result
from layerleap.results.cells import Cell, Grid, grid_of
from layerleap.results.columns import Column, Row, Table
from layerleap.results.plain import Plain, plain
from layerleap.results.several import Several

Where = Literal["before", "attention", "ffn"]
ENDS = 5  # tokens shown of each end of a vector
STAGES = {"before": "before the block", "attention": "after attention", "ffn": "after the FFN"}
CLIMBED = {True: "\u25b2", False: "\u25bc"}


@dataclass(frozen=True)
class Predicted(Plain):
    """One of the top tokens of a state."""

    token: TokenLabel
    prob: float
    rank: int  # 0 is the top
    climbed: int | None  # ranks gained since the stage before; None at the first stage


@dataclass(frozen=True)
class Stage(Plain):
    """What a lens reads at one point of a block.

    "before" is h[block - 1] and "ffn" is h[block], each read through the map of its layer. The
    state after attention lies between layers; it is read through the map of h[block], so that the
    last two stages differ by what the FFN adds.
    """

    where: Where
    layer: int  # whose map read it
    top: tuple[Predicted, ...]
    watched: Predicted | None = None


@dataclass(frozen=True)
class SubUpdate(Plain):
    """What one neuron adds to the residual stream."""

    SHOWN: ClassVar[tuple[str, ...]] = ("name",)

    block: int
    neuron: int
    coefficient: float
    norm: float  # of the value vector
    strength: float  # |coefficient| * norm
    share: float  # of what the FFN adds
    promotes: tuple[Scored, ...] = ()  # by the value vector itself; see `coefficient` for the sign
    suppresses: tuple[Scored, ...] = ()

    @property
    def name(self) -> str:
        """Its name in edits, such as L12.N34."""
        return f"L{self.block}.N{self.neuron}"


@dataclass(frozen=True)
class BlockReading(Plain):
    """One block at one position."""

    SHOWN: ClassVar[tuple[str, ...]] = ("shown_share", "rest_share")

    block: int
    style: str | None  # "sequential", "parallel", "post-norm"; None if the parts are not known
    stages: tuple[Stage, ...]
    updates: tuple[SubUpdate, ...] = ()  # strongest first
    total_norm: float | None = None  # of what the FFN adds
    bias_share: float = 0.0
    missing: dict[str, str] = field(default_factory=dict)  # what cannot be shown, and why

    @property
    def shown_share(self) -> float:
        """The share of the FFN's output that the listed sub-updates explain."""
        return sum(update.share for update in self.updates)

    @property
    def rest_share(self) -> float:
        """The share of all other neurons."""
        return 1.0 - self.shown_share - self.bias_share


@dataclass(frozen=True, repr=False)
class DominantNeurons(Result):
    """The strongest sub-updates of every block at one position of a text."""

    KIND: ClassVar[str] = "neurons"
    LEGEND: ClassVar[str] = (
        "Neurons that add most to the residual stream at this position. Share: the part of the "
        "FFN's output that a neuron explains. A negative coefficient promotes the tokens that the "
        "vector suppresses."
    )
    TABLES: ClassVar[tuple[Table, ...]] = (
        Table(
            "blocks",
            "",
            lambda result: plain(result.blocks),
            lines=lambda result: map(_line, (u for b in result.blocks for u in b.updates)),
        ),
    )

    tokens: tuple[TokenLabel, ...]
    position: int
    lens: str
    blocks: tuple[BlockReading, ...]
    notes: tuple[str, ...] = ()  # what limits it, a sentence each

    def __iter__(self) -> Iterator[BlockReading]:
        return iter(self.blocks)

    def short(self) -> str:
        """What it is, in one line."""
        place = f"position {self.position} ({self.tokens[self.position].label})"
        return f"DominantNeurons({place}, {len(self.blocks)} blocks, lens {self.lens})"

    def headline(self) -> str:
        """The position and the lens."""
        return f"Position {self.position}, {self.tokens[self.position].label}; lens {self.lens}"

    def strongest(self, count: int = 12) -> list[SubUpdate]:
        """The strongest sub-updates of all blocks, strongest first."""
        updates = [update for block in self.blocks for update in block.updates]
        return sorted(updates, key=lambda update: -update.strength)[:count]

    def facts(self) -> Row:
        """The text, and what is known of every block."""
        return {"tokens": plain(self.tokens), "position": self.position, "lens": self.lens}

    def grids(self, width: int | None = None) -> list[Grid]:
        """The strongest neurons; a page can also open every block, the last first."""
        wide = width is None or width >= WIDE
        first = grid_of(UPDATES, self.strongest(), wide=wide)
        first = replace(first, caption="Strongest of all blocks", one_line=width is not None)
        blocks = reversed(self.blocks) if width is None else ()
        return [first, *(grid for block in blocks for grid in _block(block))]


def _line(update: SubUpdate) -> Row:
    """What a data frame holds of one neuron."""
    row = update.to_dict()
    keys = ("block", "neuron", "coefficient", "strength", "share", "promotes", "suppresses")
    return {key: row[key] for key in keys}


def _update(update: SubUpdate) -> Row:
    """What a table shows of one neuron."""
    row = update.to_dict()
    return {**row, "adds to": row["promotes" if update.coefficient >= 0 else "suppresses"]}


UPDATES = Table(
    "updates",
    "",
    lambda updates: map(_update, updates),
    (
        Column("name", "neuron"),
        Column("coefficient", form="{:+.3g}"),
        Column("strength", form="{:.3g}", wide="column"),
        Column("share", form="{:.0f} %", scale=100),
        Column("adds to"),
        Column("promotes", wide="column"),
        Column("suppresses", wide="column"),
    ),
)


def _block(block: BlockReading) -> Iterator[Grid]:
    """What is predicted before and inside a block, and its neurons."""
    rows = [
        [Cell(STAGES[stage.where], strong=True), *map(_predicted, stage.top[:6])]
        for stage in block.stages
    ]
    width = max(map(len, rows), default=0)
    rows = [[*row, *[Cell("")] * (width - len(row))] for row in rows]
    reasons = " ".join(block.missing.values())
    shares = f"{block.shown_share:.0%} explained by these, {block.rest_share:.0%} by the others"
    bias = f", {block.bias_share:.0%} by the bias" if block.bias_share else ""
    name = f"Block {block.block}"
    yield Grid([""] * width, rows, folded=f"{name}: predictions", legend=reasons)
    if block.updates:
        updates = grid_of(UPDATES, block.updates)
        yield replace(updates, folded=f"{name}: neurons", legend=f"{shares}{bias}.")


def _predicted(one: Predicted) -> Cell:
    """A token, its probability, and how many ranks it climbed."""
    climbed = "" if not one.climbed else f"{CLIMBED[one.climbed > 0]}{abs(one.climbed)}"
    return Cell(f"{one.token.label} {one.prob:.0%}", climbed)


class _Options(TypedDict, total=False):
    top: int
    blocks: Sequence[int] | None
    watch: int | None
    tokens: int


class Neurons:
    """The neurons of a model's FFNs, and what they do on a text."""

    def __init__(self, transformer: Transformer, bank: ShortcutBank | None = None) -> None:
        transformer.refresh()
        self.transformer, self.lens = transformer, Lens(transformer, bank)

    def __repr__(self) -> str:
        return f"Neurons({self.transformer.identity.name}, lens {self.lens.name})"

    def feed_forward(self, block: int) -> FeedForward:
        """The verified neurons of a block (1 to n_layers)."""
        return feed_forward(self.transformer, block)

    def values(self, block: int) -> Tensor:
        """The value vectors of a block: (n_neurons, d_model), a view of the weights."""
        return self.feed_forward(block).values(self.transformer)

    @checked
    def coefficients(self, text: Any, block: int) -> Tensor:
        """The coefficients of a block's neurons at every position: (batch, pos, n_neurons)."""
        site = self.feed_forward(block).site
        return self.transformer.capture(text, layers=(), sites=[(block, site)]).sites[block, site]

    @checked
    def read(self, block: int, neuron: int, *, top: int = 50) -> SubUpdate:
        """One value vector: the tokens it promotes and suppresses most, as a unit sub-update."""
        ffn = self.feed_forward(block)
        check_neuron(ffn, neuron)
        vector = ffn.written(self.transformer, [neuron]).float()
        ends = vector_ends(self.transformer, vector, top)[0]
        norm = float(vector.norm())
        return SubUpdate(block, neuron, 1.0, norm, norm, 0.0, *ends)

    @overload
    def dominant(
        self, text: OnePrompt, position: int | None = None, **options: Unpack[_Options]
    ) -> DominantNeurons: ...

    @overload
    def dominant(
        self, text: Prompts, position: int | None = None, **options: Unpack[_Options]
    ) -> Several[DominantNeurons]: ...

    @checked
    def dominant(
        self,
        text: Any,
        position: int | None = None,
        *,
        top: int = 10,
        blocks: Sequence[int] | None = None,
        watch: int | None = None,
        tokens: int = 10,
    ) -> DominantNeurons | Several[DominantNeurons]:
        """The strongest sub-updates of each block at one position, and what the layers read there.

        Args:
            text: a text, chat messages or token ids; or several of them, for as many results.
            position: of the token; negative ones count from the end. By default the last one that
                a lens reads: the last token, the last mask, or where a classifier reads.
            top: how many sub-updates per block.
            blocks: 1 to n_layers; all when None.
            watch: an output token to follow through all stages.
            tokens: how many predicted tokens per stage.
        """
        self.lens.check_model()
        prompts = several(self.transformer, text)
        texts = [text] if prompts is None else prompts
        places = []
        for number, prompt in enumerate(texts, 1):
            with numbered(number, len(texts)):
                places.append(self._place(prompt, position))
        results = Several(
            self.at(ids, place, top=top, blocks=blocks, watch=watch, tokens=tokens)
            for ids, place in places
        )
        return results[0] if prompts is None else results

    def _place(self, prompt: Any, position: int | None) -> tuple[list[int], int]:
        """The token ids of a prompt, and the position to look at, counted from 0."""
        ids = self.lens.encode(prompt)
        place = self.lens.positions(ids)[-1] if position is None else position
        if not -len(ids) <= place < len(ids):
            raise BadSettings(f"position {place} does not exist: the text has {len(ids)} tokens")
        return ids, place % len(ids)

    @torch.no_grad()
    def at(
        self,
        ids: Sequence[int],
        position: int,
        *,
        top: int = 10,
        blocks: Sequence[int] | None = None,
        watch: int | None = None,
        tokens: int = 10,
    ) -> DominantNeurons:
        """`dominant` for token ids and a position counted from 0; edits in force apply."""
        transformer = self.transformer
        chosen = range(1, transformer.n_layers + 1) if blocks is None else blocks
        for block in chosen:
            check_block(transformer, block)
        self._check(top, watch, tokens)
        if blocks is None:
            feed_forwards(transformer)  # all in one pass
        places = {block: _Places.of(transformer, block) for block in chosen}
        keep = torch.zeros(1, len(ids), dtype=torch.bool)
        keep[0, position] = True
        captured = transformer.capture(
            padded(transformer, [ids]),
            keep=keep,
            layers={layer for block in chosen for layer in (block - 1, block)},
            sites=[(b, site) for b, place in places.items() for site in place.sites],
        )
        readings = tuple(self._block(p, captured, top, watch, tokens) for p in places.values())
        labels = tuple(token_label(transformer, token) for token in ids)
        notes = tuple(self.lens.caveats())
        return DominantNeurons(labels, position, self.lens.name, readings, notes)

    def recorded(
        self,
        recording: Recording,
        block: int,
        position: int,
        *,
        h: Tensor | None = None,
        top: int = 10,
        watch: int | None = None,
        tokens: int = 10,
    ) -> BlockReading:
        """One block of a recorded text; only this block runs, on `h` or on its recorded input."""
        check_block(self.transformer, block)
        self._check(top, watch, tokens)
        place = _Places.of(self.transformer, block)
        keep = torch.zeros(recording.states[0].shape[:2], dtype=torch.bool)
        keep[0, position] = True
        captured = recording.inside(block, place.sites, keep, h)
        with torch.no_grad():
            return self._block(place, captured, top, watch, tokens)

    def _check(self, top: int, watch: int | None, tokens: int) -> None:
        if top < 0 or tokens < 1:
            raise BadSettings(f"top={top}, tokens={tokens}; expected at least 0 and 1")
        if watch is not None and not 0 <= watch < self.transformer.d_vocab:
            raise BadSettings(
                f"output {watch} does not exist; expected 0 to {self.transformer.d_vocab - 1}"
            )

    def _block(
        self, place: "_Places", captured: Capture, top: int, watch: int | None, tokens: int
    ) -> BlockReading:
        block, middle = place.block, place.middle
        states: dict[Where, tuple[int, Tensor]] = {
            "before": (block - 1, captured.states[block - 1])
        }
        if middle is not None:
            states["attention"] = block, captured.sites[block, middle]
        states["ffn"] = block, captured.states[block]
        stages = self._stages(states, tokens, watch)
        if place.ffn is None:
            return BlockReading(block, place.style, stages, missing=place.missing)
        updates, total, bias = self._updates(place, captured, top)
        missing = dict(place.missing)
        try:
            chosen = [update[0] for update in updates]
            vectors = place.ffn.written(self.transformer, chosen).float()
            ends = vector_ends(self.transformer, vectors, ENDS)
        except ModelRefused as error:
            ends, missing["vectors"] = [((), ())] * len(updates), str(error)
        pairs = zip(updates, ends, strict=True)
        listed = tuple(SubUpdate(block, *update, *both) for update, both in pairs)
        return BlockReading(block, place.style, stages, listed, total, bias, missing)

    def _stages(
        self, states: dict[Where, tuple[int, Tensor]], tokens: int, watch: int | None
    ) -> tuple[Stage, ...]:
        stages, before = [], None
        for where, (layer, state) in states.items():
            logits = self.lens.logits(state, layer)[0].float()
            ids = top_k(logits[None], min(tokens, len(logits)))[1][0].tolist()
            top = tuple(self._predicted(logits, before, index) for index in ids)
            watched = None if watch is None else self._predicted(logits, before, watch)
            stages.append(Stage(where, layer, top, watched))
            before = logits
        return tuple(stages)

    def _predicted(self, logits: Tensor, before: Tensor | None, index: int) -> Predicted:
        rank = _rank(logits, index)
        climbed = None if before is None else _rank(before, index) - rank
        prob = float((logits[index] - logits.logsumexp(-1)).exp())
        return Predicted(output_label(self.transformer, index), prob, rank, climbed)

    def _updates(
        self, place: "_Places", captured: Capture, top: int
    ) -> tuple[list[tuple[int, float, float, float, float]], float, float]:
        """(neuron, coefficient, norm, strength, share) of the strongest, total norm, bias share."""
        ffn, transformer = place.ffn, self.transformer
        assert ffn is not None
        narrow = captured.sites[place.block, ffn.site][0]
        # At least float32: sums and squares of float16 overflow.
        wide = torch.promote_types(narrow.dtype, torch.float32)
        coefficients, values = narrow.to(wide), ffn.values(transformer).to(wide)
        bias = ffn.bias(transformer)
        bias = None if bias is None else bias.to(wide)
        exact = coefficients @ values + (0 if bias is None else bias)
        output = exact.to(narrow.dtype)  # what a norm after the FFN takes
        norms = values.norm(dim=1) * abs(ffn.scale)
        if ffn.after is not None:
            norms = ffn.into_stream(transformer, output[None], values[None])[0].norm(dim=1)
        strengths = coefficients.float().abs() * norms
        strongest = strengths.topk(min(top, ffn.n_neurons)).indices
        parts = coefficients[strongest, None] * values[strongest]
        shift = torch.zeros_like(exact) if bias is None else bias
        rows = torch.stack([*parts, shift, exact])[None]
        carried = ffn.into_stream(transformer, output[None], rows)[0]
        extra = ffn.into_stream_bias(transformer, output[None])
        added = (carried[-1] + extra).double()
        size = added.square().sum().clamp_min(1e-300)
        shares = (carried[:-1].double() @ added) / size
        updates = [
            (int(n), float(coefficients[n]), float(norms[n]), float(strengths[n]), float(share))
            for n, share in zip(strongest, shares, strict=False)
        ]
        return updates, float(added.norm()), float(shares[-1] + (extra.double() @ added) / size)


@checked
def neurons(
    transformer: Transformer,
    *,
    bank: ShortcutBank | str | Path | None = None,
    other_model: bool = False,
) -> Neurons:
    """The neurons of a model's FFNs: what they add at a position, and the tokens they promote.

        ll.neurons(model).dominant("The capital of France is", position=-1, top=10)

    Args:
        bank: shortcuts to read states through, or their folder or hub name; "default" is the bank
            in the cache. None is the logit lens.
        other_model: allow a bank of another model of the same class and width, with a warning.
    """
    from layerleap.maps.fit import find_bank

    return Neurons(transformer, find_bank(transformer, bank, other_model=other_model))


@dataclass(frozen=True)
class _Places:
    """Where the stages and neurons of a block are captured."""

    block: int
    style: str | None
    middle: str | None  # the site of the state between attention and FFN
    ffn: FeedForward | None
    missing: dict[str, str]

    @classmethod
    def of(cls, transformer: Transformer, block: int) -> "_Places":
        anatomy, missing = transformer.anatomy[block - 1], {}
        middle = style = None
        if isinstance(anatomy, str):
            missing["attention"] = f"the parts of the block are not known: {anatomy}"
        else:
            style = anatomy.style
            if style == "parallel":
                missing["attention"] = (
                    "attention and FFN of this model start from the same state, so there is no "
                    "state between them"
                )
            else:
                is_normed = style != "post-norm" and "ffn_norm.in" in anatomy.sites
                middle = "ffn_norm.in" if is_normed else "ffn.in"
        ffn = None
        try:
            ffn = feed_forward(transformer, block)
        except ModelRefused as error:
            missing["neurons"] = str(error)
        return cls(block, style, middle, ffn, missing)

    @property
    def sites(self) -> list[Any]:
        sites: list[Any] = [] if self.middle is None else [self.middle]
        return sites if self.ffn is None else [*sites, self.ffn.site]


def _rank(logits: Tensor, index: int) -> int:
    """How many outputs come before this one; ties are ordered by id."""
    return int((logits > logits[index]).sum() + (logits[:index] == logits[index]).sum())
