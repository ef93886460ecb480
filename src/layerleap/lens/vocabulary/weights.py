"""A model's parameters read in its vocabulary, from the weights alone.

In: a wrapped model. Out: `Weights`: any neuron or column of a head as tokens, the strongest token
pairs of a head, and what every head does to the tokens it attends to.

    weights = ll.weights(model)
    weights.read("L12.N34")        the keys of a neuron, and its value
    weights.read("L12.H3.Q5")      one column of W_Q; K and V likewise, and a row of W_O
    weights.pairs("L12.H3")        W_VO of a head; form="qk" for W_QK
    weights.heads()                which heads copy, suppress or map tokens

No pass over a text is made, so nothing here knows how often a parameter is active.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from layerleap.arguments import checked
from layerleap.errors import BadSettings, ModelRefused
from layerleap.lens.vocabulary.addresses import Address, parse_address
from layerleap.lens.vocabulary.copying import HeadTable, head_table
from layerleap.lens.vocabulary.ends import Scored, vector_ends
from layerleap.lens.vocabulary.index_settings import Form, Inverse, Largest, Norms
from layerleap.lens.vocabulary.space import Space
from layerleap.lens.vocabulary.token_pairs import Pairs, head_pairs
from layerleap.models.facts import check_number
from layerleap.models.hooks.capture import check_block
from layerleap.models.transformer import Transformer
from layerleap.models.weights import heads as heads_of, kinds, vectors
from layerleap.progress import Progress, reporting
from layerleap.results.base import Result
from layerleap.results.cells import Cell, Grid, tokens_cell
from layerleap.results.columns import Row, Table
from layerleap.results.head import PageHead
from layerleap.stream.tokens import frequent_tokens

KEYS = ("ffn.key", "ffn.gate", "ffn.up")


@dataclass(frozen=True)
class VectorReading:
    """One vector of the residual stream as tokens.

    A vector that writes promotes some tokens and suppresses others. For a vector that reads, these
    are the tokens whose embeddings have the largest and the smallest product with it.
    """

    kind: str  # ffn.key, ffn.gate, ffn.up, ffn.value, attn.q, attn.k, attn.v or attn.o
    role: Literal["reads", "writes"]
    norm: float  # of the vector
    promotes: tuple[Scored, ...]
    suppresses: tuple[Scored, ...]  # the lowest score first

    @property
    def words(self) -> tuple[str, str]:
        """What the two ends mean."""
        if self.role == "writes":
            return "promotes", "suppresses"
        return "responds to", "responds least to"


@dataclass(frozen=True, repr=False)
class ParameterReading(Result):
    """A neuron or a column of a head: its vectors as tokens."""

    KIND: ClassVar[str] = "weights"
    TABLES: ClassVar[tuple[Table, ...]] = (
        Table(
            "vectors",
            "",
            lambda reading: map(asdict, reading.vectors),
            lines=lambda reading: reading._lines(),
        ),
    )

    name: str
    vectors: tuple[VectorReading, ...]
    about: dict[str, Any]  # norms, inverse, and the matrices that tokens were read through
    words: str  # the same in one line
    missing: dict[str, str] = field(default_factory=dict)  # what cannot be read, and why

    def __iter__(self) -> Iterator[VectorReading]:
        return iter(self.vectors)

    def short(self) -> str:
        """What it is, in one line."""
        parts = ", ".join(
            f"{one.kind} {one.words[0]} {' '.join(s.token.label for s in one.promotes[:3])}"
            for one in self.vectors
        )
        return f"ParameterReading({self.name}: {parts})"

    @property
    def notes(self) -> list[str]:
        """What cannot be read, and why."""
        return [f"no {name}: {why}" for name, why in self.missing.items()]

    def facts(self) -> Row:
        """Its name, and how it was read."""
        return {"name": self.name, **self.about, "missing": self.missing}

    def headline(self) -> str:
        """Its name."""
        return self.name

    def legend(self) -> str:
        """How tokens were read."""
        return self.words

    def _lines(self) -> Iterator[Row]:
        """One line per vector, end and rank."""
        for one in self.vectors:
            for end, words in zip(("promotes", "suppresses"), one.words, strict=True):
                for rank, scored in enumerate(getattr(one, end), 1):
                    token = {"id": scored.token.id, "token": scored.token.label}
                    place = {"kind": one.kind, "end": words, "rank": rank}
                    yield {**place, **token, "score": scored.score}

    def grids(self, width: int | None = None) -> list[Grid]:
        """A page has two columns per vector; a terminal, two lines: both ends of its tokens."""
        if width is not None:
            rows = [row for one in self.vectors for row in _ends(one)]
            return [Grid(("vector", "norm", "", "tokens"), rows)]
        names = ((f"{one.kind}, {one.role}, norm {one.norm:.3g}", one.words) for one in self)
        heads = [f"{name}: {word}" for name, words in names for word in words]
        columns = [end for one in self for end in (one.promotes, one.suppresses)]
        cells = zip_longest(*([_scored(s) for s in end] for end in columns), fillvalue=Cell(""))
        return [Grid(heads, [list(row) for row in cells])]


def weights_head(results: Sequence[Pairs | ParameterReading | HeadTable], name: str) -> PageHead:
    """What a page says around results; `name` is what was read."""
    about = results[0].about
    return PageHead(
        kicker="weights",
        title=("What", about["model"], "says in its weights"),
        facts=(name, f"inverse: {about['inverse']}", f"norms: {about['norms']}"),
        heading="Parameters as tokens",
        lead="Read from the weights alone, without running the model. Hover over a token to see "
        "its id.",
    )


def _ends(one: VectorReading) -> Iterator[list[Cell]]:
    first = [Cell(one.kind), Cell(f"{one.norm:.3g}", sort=one.norm)]
    ends = zip(one.words, (one.promotes, one.suppresses), strict=True)
    for word, end in ends:
        yield [*first, Cell(word), tokens_cell(asdict(scored) for scored in end)]
        first = [Cell(""), Cell("")]


def _scored(one: Scored) -> Cell:
    """A token and its score."""
    label = f"{one.token.label} ({one.token.id})"
    return Cell(one.token.label, f"{one.score:.3g}", title=label)


class Weights:
    """The parameters of a model in its embedding space."""

    def __init__(self, space: Space) -> None:
        self.space, self.transformer = space, space.transformer
        self._identity = self.transformer.identity

    def _refresh(self) -> None:
        """Rebuild the space if the weights were changed."""
        self.transformer.refresh()
        if self._identity != self.transformer.identity:
            self._identity = self.transformer.identity
            self.space = Space.of(self.transformer, self.space.norms, self.space.inverse)

    def __repr__(self) -> str:
        return f"Weights({self.transformer.identity.name}: {self.space.words()})"

    @checked
    def read(self, name: str, *, top: int = 20) -> ParameterReading:
        """A neuron (L12.N34) or a column of a head (L12.H3.Q5) as tokens at both ends.

        Args:
            name: of the parameter. A neuron has one key, or two in a gated FFN, and a value.
            top: tokens per end.
        """
        self._refresh()
        if top < 1:
            raise BadSettings(f"top is {top}; expected 1 or more")
        address = parse_address(name)
        check_block(self.transformer, address.block)
        if address.is_head:
            raise BadSettings(
                f"{address} is a whole head, a matrix; ask for its pairs, or for one of its "
                f"columns, such as {address}.Q0"
            )
        missing: dict[str, str] = {}
        if address.neuron is not None:
            rows = self._neuron(address, missing)
        else:
            rows = {f"attn.{str(address.part).lower()}": self._column(address)}
        readings = tuple(self.reading(kind, vector, top) for kind, vector in rows.items())
        about, words = self.space.about(), self.space.words()
        return ParameterReading(str(address), readings, about, words, missing)

    @checked
    def pairs(
        self,
        head: str,
        *,
        form: Form = "vo",
        top: int = 50,
        tokens: Sequence[int] | None = None,
        offset: int = 0,
        identical: bool = True,
        centred: bool = True,
        largest: Largest = "value",
        progress: Progress | bool = True,
    ) -> Pairs:
        """The strongest token pairs of a head (L12.H3).

        Args:
            head: its name.
            form: "vo", what attending to a token writes, or "qk", which tokens look for which.
            top: how many pairs.
            tokens: ids to restrict both sides to; see `frequent`. All when None.
            offset: for "qk" in models with rotary positions, how many positions the key lies
                behind the query.
            identical: whether pairs of a token with itself count.
            centred: subtract the mean embedding, which otherwise dominates every list.
            largest: "value", "negative" for the lowest scores, or "magnitude" for both.
            progress: a callable, or whether to show a bar.
        """
        self._refresh()
        address = parse_address(head)
        check_block(self.transformer, address.block)
        if not address.is_head:
            raise BadSettings(
                f"{address} is a single vector, which has no pairs; expected a head such as L12.H3"
            )
        with reporting(progress) as report:
            return head_pairs(
                self.space,
                address,
                form,
                top=top,
                tokens=tokens,
                offset=offset,
                identical=identical,
                centred=centred,
                largest=largest,
                progress=report,
            )

    @checked
    def heads(
        self,
        *,
        k: int = 10,
        sample: int = 500,
        tokens: Sequence[int] | None = None,
        blocks: Sequence[int] | None = None,
        centred: bool = True,
        seed: int = 0,
        progress: Progress | bool = True,
    ) -> HeadTable:
        """Which heads copy, suppress or map the tokens they attend to, each with its evidence.

        Args:
            k: a token is copied if its own score is among the k highest under W_VO.
            sample: how many tokens to draw for the shares of copying and suppressing.
            tokens: ids to draw from and to rank among; see `frequent`. All when None.
            blocks: 1 to n_layers; all when None.
            centred: subtract the mean embedding from that of the source token.
            seed: of the sample.
            progress: a callable, or whether to show a bar.
        """
        self._refresh()
        with reporting(progress) as report:
            return head_table(
                self.space,
                k=k,
                sample=sample,
                tokens=tokens,
                blocks=blocks,
                centred=centred,
                seed=seed,
                progress=report,
            )

    @checked
    def frequent(self, n: int, text: Any = None, *, progress: Progress | bool = True) -> list[int]:
        """The ids of the `n` most frequent tokens of a text, to restrict the vocabulary to.

        Args:
            n: how many.
            text: a bundled name, a file, a folder, a data set or strings; None is the model's
                default text.
            progress: a callable, or whether to show a bar.
        """
        with reporting(progress) as report:
            return frequent_tokens(self.transformer, n, text, progress=report)

    def _neuron(self, address: Address, missing: dict[str, str]) -> dict[str, Tensor]:
        """The keys and the value of a neuron, (1, d_model) each."""
        block, neuron, transformer = address.block, address.neuron, self.transformer
        assert neuron is not None
        known = [kind for kind in kinds(transformer, block) if kind.startswith("ffn.")]
        fold = self.space.folds
        matrices = {  # that of values says why, if none is known
            kind: vectors(transformer, block, kind, fold=fold) for kind in known or ["ffn.value"]
        }
        n = len(next(iter(matrices.values())))
        check_number("neuron", neuron, 0, n - 1, f"block {block}")
        if not set(KEYS) & set(known):
            try:
                vectors(transformer, block, "ffn.key")
            except ModelRefused as error:
                missing["key"] = str(error)
        return {kind: rows[neuron : neuron + 1] for kind, rows in matrices.items()}

    def _column(self, address: Address) -> Tensor:
        """A column of W_Q, W_K or W_V, or a row of W_O: (1, d_model)."""
        heads, transformer = heads_of(self.transformer, address.block), self.transformer
        head, part, column = address.head, address.part, address.column
        assert head is not None
        assert column is not None
        check_number("head", head, 0, heads.n_heads - 1, f"block {address.block}")
        if part in ("Q", "K") and heads.qk_reason is not None:
            raise ModelRefused(heads.qk_reason)
        width = heads.d_head if part in ("Q", "K") else heads.d_value
        where = f"W_{part} of L{address.block}.H{head}"
        check_number("row" if part == "O" else "column", column, 0, width - 1, where)
        parts = {"Q": heads.query, "K": heads.key, "V": heads.value, "O": heads.output}
        matrix = parts[str(part)](transformer, head, fold=self.space.folds)
        return (matrix if part == "O" else matrix.T)[column][None]

    @torch.no_grad()
    def reading(self, kind: str, vector: Tensor, top: int = 20) -> VectorReading:
        """Any vector of the stream, (1, d_model), read as one of a kind of `models.weights`."""
        reads = kind not in ("ffn.value", "attn.o")
        space = self.space
        matrix = space.source if reads else space.target
        rows = space.for_reading(vector) if reads else vector
        high, low = vector_ends(self.transformer, rows, top, matrix)[0]
        norm = float(vector.float().norm())
        return VectorReading(kind, "reads" if reads else "writes", norm, high, low)


@checked
def weights(
    transformer: Transformer, *, norms: Norms = "skip", inverse: Inverse = "transpose"
) -> Weights:
    """A model's parameters read in its vocabulary, from the weights alone.

        ll.weights(model).read("L12.N34")
        ll.weights(model).pairs("L12.H3", form="qk")
        ll.weights(model).heads()

    Args:
        norms: "fold" multiplies vectors that read by the gain of the norm in front of them, and
            vectors that write by the gain of the final norm; "skip" leaves norms out.
        inverse: how vectors that read become tokens: E "transpose", which is better for the first
            few tokens of a list, or the "pseudo" inverse, which keeps inner products exactly if all
            tokens are kept.
    """
    return Weights(Space.of(transformer, norms, inverse))
