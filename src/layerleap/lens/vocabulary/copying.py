"""What every head does to a token it attends to: copies it, suppresses it, or maps it to another.

In: a `Space`. Out: `HeadTable`: for each head three kinds of scores, each with its evidence.

    copies        share of tokens whose own score is among the k highest of their row of W_VO
    suppresses    share of tokens whose own score is among the k lowest
    maps          share of known pairs (cat -> cats) whose second word is among the k highest of the
                  first one's row; the control is the same for the second words of all other pairs

A row of W_VO holds the logits that attending to one token writes, so all of this comes from the
weights alone, with no text. Rows are made a few at a time and only ranks are kept.

A share has Wilson's 95 % interval. Tokens are a sample of the vocabulary; by chance a share would
be k / d_vocab. A head that copies everything also "maps" words whose embeddings are alike, such as
one with and without a capital letter: compare its scores.
"""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from layerleap.errors import BadSettings, ModelRefused
from layerleap.lens.intervals import wilson
from layerleap.lens.top import ranks_of, top_k
from layerleap.lens.vocabulary.space import Space
from layerleap.lens.vocabulary.token_pairs import chosen_tokens
from layerleap.lens.vocabulary.tokens import TokenLabel, token_label
from layerleap.models.hooks.capture import check_block
from layerleap.models.weights import Heads, all_heads
from layerleap.progress import Progress, silent
from layerleap.results.base import Result
from layerleap.results.cells import Cell, Grid, tokens_cell
from layerleap.results.colours import signed_colour
from layerleap.results.columns import Row, Table
from layerleap.results.plain import Plain

Role = Literal["copies", "suppresses", "maps"]
PIECE = 2**24  # entries of W_VO held at a time: 64 MB of float32
FEWEST = 5  # pairs that a relation needs
EXAMPLES = 5  # tokens or pairs shown as evidence
SHOWN, PER_RELATION = 12, 5  # heads in a table
ROLES: dict[Role, str] = {
    "copies": "Heads that copy the token they attend to",
    "suppresses": "Heads that suppress it",
}
MAPS = (
    "Control: second words of other pairs among the same highest; identity: pairs that similar "
    "embeddings alone would map"
)
MAP = "Blue: share of tokens copied; orange: share suppressed; the larger one, in percent."
LISTED = 0.1  # a head has a role if the low end of its share is above this


@dataclass(frozen=True)
class Share(Plain):
    """Successes among cases, with Wilson's 95 % interval."""

    SHOWN: ClassVar[tuple[str, ...]] = ("value",)

    hits: int
    n: int
    low: float
    high: float

    @property
    def value(self) -> float:
        """The share."""
        return self.hits / self.n


@cache
def share(hits: int, n: int) -> Share:
    """A share and its interval; cached, because the same few occur in many heads."""
    low, high = wilson(hits, n)
    return Share(hits, n, float(low), float(high))


@dataclass(frozen=True)
class Mapped(Plain):
    """How well a head maps the pairs of one relation."""

    relation: str
    share: Share
    control: float  # share of the second words of other pairs among the same k highest
    similar: float  # share of pairs whose embeddings are so alike that the identity would do
    examples: tuple[tuple[TokenLabel, TokenLabel], ...]

    @property
    def is_clear(self) -> bool:
        """The interval lies above the control, the identity, and what counts as a role."""
        return self.share.low > max(self.control, self.similar, LISTED)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        examples = [[first.label, second.label] for first, second in self.examples]
        row = {**self.share.to_dict(), **super().to_dict(), "examples": examples}
        return {key: value for key, value in row.items() if key != "share"}


@dataclass(frozen=True)
class HeadScores(Plain):
    """One head: its shares, and tokens or pairs that show them."""

    SHOWN: ClassVar[tuple[str, ...]] = ("name", "roles")

    block: int
    head: int
    copies: Share
    suppresses: Share
    copied: tuple[TokenLabel, ...]  # a few of them, whole words first
    suppressed: tuple[TokenLabel, ...]
    maps: tuple[Mapped, ...]  # by relation

    @property
    def name(self) -> str:
        """Such as L12.H3."""
        return f"L{self.block}.H{self.head}"

    @property
    def clear_maps(self) -> list[Mapped]:
        """The relations that the head clearly maps, those that stand out most first."""
        clear = [one for one in self.maps if one.is_clear]
        return sorted(clear, key=lambda one: one.control - one.share.value)

    @property
    def roles(self) -> tuple[Role, ...]:
        """What the head clearly does: the low end of a share is above a tenth.

        A mapping must also lie above its control, and above what similar embeddings explain.
        """
        has: dict[Role, bool] = {
            "copies": self.copies.low > LISTED,
            "suppresses": self.suppresses.low > LISTED,
            "maps": bool(self.clear_maps),
        }
        return tuple(role for role in has if has[role])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        tokens = {"copied": self.copied, "suppressed": self.suppressed}
        return super().to_dict() | {key: [t.label for t in tokens[key]] for key in tokens}


@dataclass(frozen=True, repr=False)
class HeadTable(Result):
    """Every head of a model with what it does to tokens it attends to."""

    KIND: ClassVar[str] = "weights"
    TABLES: ClassVar[tuple[Table, ...]] = (
        Table(
            "heads",
            "",
            lambda table: [head.to_dict() for head in table.heads],
            lines=lambda table: map(_line, table.heads),
        ),
    )

    heads: tuple[HeadScores, ...]  # by block and head
    k: int
    n_sample: int  # tokens that shares of copying and suppressing are taken over
    n_tokens: int  # tokens that a score is ranked among
    restricted: bool
    centred: bool
    relations: dict[str, int]  # pairs of each, with single tokens
    left_out: dict[str, str]  # relations that could not be tested, and why
    missing: dict[int, str]  # blocks whose heads are not known, and why
    about: dict[str, Any]
    words: str

    def __len__(self) -> int:
        return len(self.heads)

    def __iter__(self) -> Iterator[HeadScores]:
        return iter(self.heads)

    def short(self) -> str:
        """What it is, in one line."""
        roles: list[str] = [role for head in self.heads for role in head.roles]
        verbs = {"copies": "copy", "suppresses": "suppress", "maps": "map"}
        counts = ", ".join(f"{roles.count(role)} {verb}" for role, verb in verbs.items())
        return f"HeadTable({self.about['model']}: {len(self)} heads; {counts})"

    def having(self, role: Role) -> list[HeadScores]:
        """The heads with a role, the highest share first."""
        heads = [head for head in self.heads if role in head.roles]
        return sorted(heads, key=lambda head: -_strength(head, role))

    def mapping(self, relation: str) -> list[tuple[HeadScores, Mapped]]:
        """The heads that clearly map the pairs of a relation, the highest share first."""
        maps = ((head, one) for head in self.heads for one in head.clear_maps)
        pairs = [(head, one) for head, one in maps if one.relation == relation]
        return sorted(pairs, key=lambda pair: pair[1].control - pair[1].share.value)

    def legend(self) -> str:
        """How the shares were made, in one line."""
        some = f"{self.n_tokens:,} chosen" if self.restricted else f"all {self.n_tokens:,}"
        source = "centred" if self.centred else "raw"
        return (
            f"shares of {self.n_sample:,} tokens whose own score is among the {self.k} highest "
            f"(copies) or lowest (suppresses) of {some} tokens under W_VO; {source} embeddings, "
            f"{self.words}. {MAPS}"
        )

    @property
    def notes(self) -> list[str]:
        """What is missing, and why."""
        blocks = [f"block {block} left out: {reason}" for block, reason in self.missing.items()]
        if not self.relations:
            why = next(iter(self.left_out.values()))
            return [*blocks, f"no mappings tested: {why}"]
        return blocks + [f"{name} not tested: {why}" for name, why in self.left_out.items()]

    def headline(self) -> str:
        """The model."""
        return f"What the heads of {self.about['model']} do to a token"

    def facts(self) -> Row:
        """How the shares were made, and what is missing."""
        keys = ("k", "n_sample", "n_tokens", "restricted", "centred", "relations", "left_out")
        missing = {str(block): reason for block, reason in self.missing.items()}
        return {**{key: getattr(self, key) for key in keys}, **self.about, "missing": missing}

    def grids(self, width: int | None = None) -> list[Grid]:
        """The heads with a role, each with its evidence; on a page below a map of all heads."""
        roles = [self._role(role, title) for role, title in ROLES.items()]
        grids = [*roles, self._mappings(EXAMPLES if width is None else 2)]
        return grids if width is not None else [self._map(), *grids]

    def _map(self) -> Grid:
        """A row per block and a cell per head."""
        n = 1 + max(head.head for head in self)
        blocks = sorted({head.block for head in self})
        rows = [
            [Cell(f"L{block}", strong=True), *(_square(h) for h in self if h.block == block)]
            for block in blocks
        ]
        rows = [[*row, *[Cell("")] * (n + 1 - len(row))] for row in rows]
        return Grid(["", *(f"H{number}" for number in range(n))], rows, MAP)

    def _role(self, role: Role, title: str) -> Grid:
        heads, rows = self.having(role), []
        for head in heads[:SHOWN]:
            is_copied = role == "copies"
            tokens = head.copied if is_copied else head.suppressed
            cell = _share(head.copies if is_copied else head.suppresses)
            rows.append([Cell(head.name), cell, tokens_cell(t.to_dict() for t in tokens)])
        of = f"; the first {SHOWN} of {len(heads)}" if len(heads) > SHOWN else ""
        return Grid(("head", "share, 95 %", "for example"), rows, f"{title}{of}")

    def _mappings(self, examples: int) -> Grid:
        rows = [
            [
                Cell(one.relation),
                Cell(head.name),
                _share(one.share),
                Cell(f"{one.control:.0%}", sort=one.control),
                Cell(f"{one.similar:.0%}", sort=one.similar),
                Cell("  ".join(f"{a.label}\u2192{b.label}" for a, b in one.examples[:examples])),
            ]
            for relation in self.relations
            for head, one in self.mapping(relation)[:PER_RELATION]
        ]
        heads = ("relation", "head", "share, 95 %", "control", "identity", "for example")
        caption = f"Heads that map it to another; the first {PER_RELATION} of each relation"
        return Grid(heads, rows, caption)


def _line(head: HeadScores) -> Row:
    """What a data frame holds of one head; mappings have a column of shares each."""
    return {
        "head": head.name,
        "block": head.block,
        "copies": head.copies.value,
        "suppresses": head.suppresses.value,
        "roles": " ".join(head.roles),
        **{one.relation: one.share.value for one in head.maps},
    }


def _share(share: Share) -> Cell:
    ends = f"{100 * share.low:.0f} to {100 * share.high:.0f}"
    return Cell(f"{share.value:.0%}", ends, sort=share.value)


def _square(head: HeadScores) -> Cell:
    """The larger of two shares on its colour."""
    copies, suppresses = head.copies.value, head.suppresses.value
    share = copies if copies >= suppresses else -suppresses
    title = f"{head.name}: copies {copies:.1%}, suppresses {suppresses:.1%}"
    text = f"{100 * abs(share):.0f}"
    return Cell(text, sort=abs(share), colour=signed_colour(share), title=title)


def _strength(head: HeadScores, role: Role) -> float:
    if role == "maps":
        return head.clear_maps[0].share.value - head.clear_maps[0].control
    return float(getattr(head, role).value)


class Relation(NamedTuple):
    """Pairs of tokens: ids of the first and second words."""

    name: str
    firsts: Tensor
    seconds: Tensor

    @property
    def wrong(self) -> Tensor:
        """(first, second): True where no pair joins these words; two countries share London."""
        same = (part[:, None] == part for part in (self.firsts, self.seconds))
        first, second = (one.double() for one in same)
        return first @ second == 0


def head_table(
    space: Space,
    *,
    k: int,
    sample: int,
    tokens: Sequence[int] | None,
    blocks: Sequence[int] | None,
    centred: bool,
    seed: int,
    progress: Progress = silent,
) -> HeadTable:
    """The scores of all heads; see `Weights.heads`."""
    if k < 1 or sample < 1:
        raise BadSettings(f"k={k}, sample={sample}; expected 1 or more")
    chosen = chosen_tokens(space, tokens)
    ids = torch.arange(min(len(space.source), len(space.target))) if chosen is None else chosen
    if k * 2 > len(ids):
        raise BadSettings(
            f"k is {k}, but there are only {len(ids)} tokens; expected at most half of them"
        )
    known, missing = _known_heads(space, blocks)
    drawn = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))[:sample]
    relations, left_out = known_relations(space, ids)
    scorer = _Scorer(space, ids, drawn.sort().values, relations, k, centred)
    total, rows = sum(heads.n_heads for heads in known), []
    for heads in known:
        for head in range(heads.n_heads):
            rows.append(scorer.score(heads, head))
            progress("heads", len(rows), total, unit="heads")
    return HeadTable(
        tuple(rows),
        k,
        n_sample=len(drawn),
        n_tokens=len(ids),
        restricted=chosen is not None,
        centred=centred,
        relations={one.name: len(one.firsts) for one in relations},
        left_out=left_out,
        missing=missing,
        about=space.about(),
        words=space.words(),
    )


def _known_heads(space: Space, blocks: Sequence[int] | None) -> tuple[list[Heads], dict[int, str]]:
    """The heads of each block, and why the heads of others are not known."""
    if blocks is not None and not blocks:
        raise BadSettings("blocks is empty; expected at least one block, or None for all")
    for block in blocks or ():
        check_block(space.transformer, block)
    by_block = all_heads(space.transformer)
    chosen = {block: by_block[block] for block in blocks or by_block}
    known = [heads for heads in chosen.values() if not isinstance(heads, str)]
    missing = {block: heads for block, heads in chosen.items() if isinstance(heads, str)}
    if not known:
        raise ModelRefused(next(iter(missing.values())))
    return known, missing


def known_relations(space: Space, ids: Tensor) -> tuple[list[Relation], dict[str, str]]:
    """The relations with enough pairs of single tokens among `ids`, and why others have not."""
    tokenizer, relations, left_out = space.transformer.tokenizer, [], {}
    allowed = set(ids.tolist())
    for name, pairs in word_pairs().items():
        if tokenizer is None:
            left_out[name] = "the model has no tokenizer"
            continue
        tokens = {pair for words in pairs if (pair := _single_tokens(tokenizer, words))}
        known = sorted(pair for pair in tokens if allowed.issuperset(pair))
        if len(known) < FEWEST:
            left_out[name] = (
                f"only {len(known)} of {len(pairs)} pairs of words are single tokens of the model; "
                f"expected {FEWEST} or more"
            )
            continue
        relations.append(Relation(name, *torch.tensor(known).T.contiguous()))
    return relations, left_out


@cache
def word_pairs() -> dict[str, list[tuple[str, str]]]:
    """The pairs of words in the repository, by relation."""
    text = files("layerleap.lens.vocabulary").joinpath("relations.toml").read_text("utf8")
    return {
        name: [(first, second) for first, second in map(str.split, entry["pairs"].split(","))]
        for name, entry in tomllib.loads(text).items()
    }


def _single_tokens(tokenizer: Any, words: tuple[str, str]) -> tuple[int, int] | None:
    """The tokens of two words, if each is a single one; as inside a text, else as at its start."""
    for space in (" ", ""):
        ids = [tokenizer(space + word, add_special_tokens=False)["input_ids"] for word in words]
        if all(len(tokens) == 1 for tokens in ids):
            first, second = ids[0][0], ids[1][0]
            if first != second and tokenizer.unk_token_id not in (first, second):
                return first, second
    return None


class _Scorer:
    """Ranks in the rows of W_VO that belong to sampled tokens and to first words of pairs."""

    def __init__(
        self,
        space: Space,
        ids: Tensor,
        drawn: Tensor,
        relations: list[Relation],
        k: int,
        centred: bool,
    ) -> None:
        self.space, self.ids, self.drawn, self.k, self.centred = space, ids, drawn, k, centred
        self.relations = relations
        self.sources = torch.cat([ids[drawn], *(one.firsts for one in relations)])
        self.places = [torch.searchsorted(ids, one.seconds) for one in relations]
        self.columns = None if len(ids) == len(space.target) else ids
        size = min(len(self.sources), max(1, PIECE // len(ids)))
        self.buffer = torch.empty(size, len(ids), dtype=space.dtype, device=space.device)
        self.similar = self._similar()

    @torch.no_grad()
    def score(self, heads: Heads, head: int) -> HeadScores:
        """All shares of one head."""
        space, transformer = self.space, self.space.transformer
        value = heads.value(transformer, head, fold=space.folds)
        output = heads.output(transformer, head, fold=space.folds)
        rows = space.read(value.T, self.sources, centred=self.centred)
        columns = space.written(output, self.columns)
        n = len(self.drawn)
        parts = rows.split([n, *map(len, self.places)])
        copies, suppresses = self._clear(parts[0], columns)
        maps = (self._mapped(number, part, columns) for number, part in enumerate(parts[1:]))
        shares = share(int(copies.sum()), n), share(int(suppresses.sum()), n)
        examples = self._examples(copies), self._examples(suppresses)
        return HeadScores(heads.block, head, *shares, *examples, tuple(maps))

    def _clear(self, rows: Tensor, columns: Tensor) -> Iterator[Tensor]:
        """Whether each sampled token is among the k highest of its row, and among the k lowest."""
        pieces = self.drawn.split(len(self.buffer))
        ranks = [
            ranks_of(scores, places.to(scores.device), self.k)
            for scores, places in zip(self._scores(rows, columns), pieces, strict=True)
        ]
        return (torch.cat(side) < self.k for side in zip(*ranks, strict=True))

    def _scores(self, rows: Tensor, columns: Tensor) -> Iterator[Tensor]:
        """Scores of all tokens, a few rows at a time; the next ones overwrite them."""
        for part in rows.split(len(self.buffer)):
            yield torch.mm(part, columns.T, out=self.buffer[: len(part)])

    def _among(self, scores: Tensor, places: Tensor) -> Tensor:
        """Whether each place is among the k highest of each row: (row, place)."""
        best = top_k(scores, self.k)[1].cpu()
        return (best[:, None, :] == places[None, :, None]).any(-1)

    @torch.no_grad()
    def _similar(self) -> list[float]:
        """By relation, the share of pairs that a W_VO equal to the identity would map."""
        space, shares = self.space, []
        basis = torch.eye(space.source.shape[1], dtype=space.dtype)
        for relation, places in zip(self.relations, self.places, strict=True):
            embeddings = space.read(basis, relation.firsts, centred=self.centred)
            hits = self._among(space.written(embeddings, self.columns).T, places)
            shares.append(float(hits.diagonal().double().mean()))
        return shares

    def _mapped(self, number: int, rows: Tensor, columns: Tensor) -> Mapped:
        relation, places = self.relations[number], self.places[number]
        hits = torch.cat([self._among(scores, places) for scores in self._scores(rows, columns)])
        right = hits.diagonal()
        examples = tuple(
            (self._label(relation.firsts[i]), self._label(relation.seconds[i]))
            for i in right.nonzero()[:EXAMPLES, 0]
        )
        control = float(hits[relation.wrong].double().mean())
        hit_share = share(int(right.sum()), len(places))
        return Mapped(relation.name, hit_share, control, self.similar[number], examples)

    def _examples(self, chosen: Tensor) -> tuple[TokenLabel, ...]:
        """A few tokens: words before parts of words, then by id, which puts frequent ones first."""
        labels = [self._label(self.ids[place]) for place in self.drawn[chosen]]
        return tuple(sorted(labels, key=lambda one: not _is_word(one))[:EXAMPLES])

    def _label(self, id_: Tensor) -> TokenLabel:
        return token_label(self.space.transformer, int(id_))


def _is_word(token: TokenLabel) -> bool:
    return len(token.text) > 4 and token.text[0] == " " and token.text[1:].isalpha()
