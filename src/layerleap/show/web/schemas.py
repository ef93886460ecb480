"""The shapes of answers, for the schema at /api/openapi.json.

They document and are not enforced: answers are built from plain JSON types. A test holds them
against the answers of real models.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """An answer, or a part of one."""

    model_config = ConfigDict(extra="forbid")


class Token(Answer):
    """A token of the input or output, or a class; `label` is how it is shown."""

    id: int
    text: str
    label: str
    kind: Literal["text", "space", "bytes", "special", "class"]


class Block(Answer):
    """A block, and why its neurons cannot be read, if so."""

    block: int
    n_neurons: int | None
    reason: str | None
    style: str | None


class Lens(Answer):
    """A way to read hidden states."""

    name: str
    title: str


class Example(Answer):
    """A prompt to begin with."""

    title: str
    text: str
    watch: str | None


class Index(Answer):
    """Whether concepts can be searched, and why not."""

    ready: bool
    reason: str | None
    vectors: int | None
    buildable: bool  # whether this server may build it


class IndexBuild(Answer):
    """How far the concept index is; `seconds` are what is left, `megabytes` what it will take."""

    state: Literal["unavailable", "missing", "waiting", "building", "stopping", "failed", "ready"]
    message: str | None
    seconds: float | None
    share: float | None
    megabytes: float | None
    phase: str | None
    done: int | None
    total: int | None
    unit: str | None


class RequestLimits(Answer):
    """The most that one request may ask for."""

    tokens: int
    edits: int
    new_tokens: int
    top: int
    follow: int


class Model(Answer):
    """The model that is served."""

    name: str
    class_: str = Field(alias="class")
    kind: str
    n_layers: int
    d_model: int
    d_vocab: int
    blocks: list[Block]
    lenses: list[Lens]
    mask_token: str | None
    can_generate: bool
    generate_reason: str | None
    examples: list[Example]
    longest: int | None = None
    exit_rule: str | None = None
    bank: str | None = None
    index: Index
    limits: RequestLimits
    fingerprint: str
    version: str


class Tokens(Answer):
    """A text, token by token, and how many tokens a prompt may have."""

    tokens: list[Token]
    limit: int


class Vocabulary(Answer):
    """Output tokens."""

    tokens: list[Token]


class Match(Answer):
    """A value vector that matches a search."""

    block: int
    neuron: int
    score: float
    side: Literal["promoted", "suppressed"]
    matched: list[Token]
    promotes: list[Token]
    suppresses: list[Token]
    partial: bool  # no word of the query matches whole
    name: str | None


class Search(Answer):
    """The value vectors that match words; `notes` are on words that are not tokens."""

    query: str
    results: list[Match]
    notes: list[str]
    milliseconds: float


class Scored(Answer):
    """A token and its score."""

    token: Token
    score: float


class Range(Answer):
    """The natural range of a coefficient; `positive` is the share of positions above 0."""

    low: float
    mean: float
    high: float
    std: float
    positive: float


class Vector(Answer):
    """A value vector: both ends of its tokens, and what the user calls it."""

    block: int
    neuron: int
    norm: float
    promotes: list[Scored]
    suppresses: list[Scored]
    range: Range | None
    cluster: int | None
    name: str | None
    note: str | None


class Key(Answer):
    """One kind of key of a neuron: the tokens it responds to most and least."""

    kind: str
    norm: float
    promotes: list[Scored]
    suppresses: list[Scored]


class Keys(Answer):
    """The keys of a neuron, and why they cannot be read, if so."""

    keys: list[Key]
    reason: str | None


class Heads(Answer):
    """The heads of a block."""

    block: int
    n_heads: int
    n_kv_heads: int
    positions: str
    qk_reason: str | None


class TokenPair(Answer):
    """Two tokens, and their entry in a head's matrix."""

    first: Token
    second: Token
    score: float


class Pairs(Answer):
    """The strongest token pairs of a head; `roles` says what first and second are."""

    title: str
    legend: str
    roles: list[str]
    pairs: list[TokenPair]


class SavedTitle(Answer):
    """A saved session without its state; `updated` is in seconds since 1970."""

    id: str
    title: str
    updated: float


class SavedSession(SavedTitle):
    """A saved session."""

    state: dict[str, Any]


def shape(model: Any) -> dict[str, Any]:
    """Arguments for a route whose answer has the shape of `model`."""
    return {"response_model": None, "responses": {200: {"model": model}}}
