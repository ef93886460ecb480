"""The shapes of answers: validated when they are made, shown at /api/openapi.json.

`python tests/web/page_types.py` writes them down for the page, in `static/types.js`; after
a change, run it. Ranks count from 1 here, as people count, and from 0 in the debugger.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Json = dict[str, Any]


class Answer(BaseModel):
    """An answer, or a part of one; JSON has null for a number that is not finite."""

    model_config = ConfigDict(extra="forbid", from_attributes=True)


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


BuildState = Literal["unavailable", "missing", "waiting", "building", "stopping", "failed", "ready"]


class IndexBuild(Answer):
    """How far the concept index is; `seconds` are what is left, `megabytes` what it will take."""

    state: BuildState
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
    longest: int | None
    exit_rule: str  # of the exit marks, in words
    bank: str | None
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


class Neuron(Answer):
    """A neuron, and what the user calls its value vector."""

    block: int
    neuron: int
    name: str | None


class Match(Neuron):
    """A value vector that matches a search."""

    score: float
    side: Literal["promoted", "suppressed"]
    matched: list[Token]
    promotes: list[Token]
    suppresses: list[Token]
    partial: bool  # no word of the query matches whole


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


class Predicted(Answer):
    """A token of a stage; `climbed` counts ranks gained since the stage before."""

    token: Token
    prob: float
    rank: int
    climbed: int | None


class Stage(Answer):
    """What a lens reads at one point of a block."""

    where: Literal["before", "attention", "ffn"]
    layer: int
    top: list[Predicted]
    watched: Predicted | None


class Update(Neuron):
    """What a neuron adds to the residual stream, and what the user calls the neuron."""

    coefficient: float
    norm: float
    strength: float
    share: float
    promotes: list[Scored]
    suppresses: list[Scored]
    range: Range | None


class BlockReading(Answer):
    """The stages and neurons of a block; `missing` says what cannot be shown, and why."""

    block: int
    style: str | None
    stages: list[Stage]
    updates: list[Update]
    total_norm: float | None
    shown_share: float
    bias_share: float
    rest_share: float
    missing: dict[str, str]


class CellReading(BlockReading):
    """A block at one position; `after` is the same with edits."""

    position: int
    token: Token
    after: BlockReading | None


def ranks_from_one(cell: Json) -> Json:
    """The debugger's cell with ranks as the page counts them."""
    for side in filter(None, (cell, cell["after"])):
        for stage in side["stages"]:
            for predicted in filter(None, (*stage["top"], stage["watched"])):
                predicted["rank"] += 1
    return cell


class VectorName(Neuron):
    """What the user calls a value vector."""

    note: str | None


class Member(Neuron):
    """A value vector of a cluster, and its cosine to the centre."""

    cosine: float
    promotes: list[Token]


class Neighbour(Member):
    """A value vector that points the same way as another."""

    suppresses: list[Token]


class Neighbours(Answer):
    """The value vectors that are nearest to one."""

    neighbours: list[Neighbour]


class ClusterTitle(Answer):
    """A group of value vectors, and the tokens they share."""

    number: int
    size: int
    tokens: list[Token]


class Clusters(Answer):
    """Groups of value vectors."""

    clusters: list[ClusterTitle]


class Cluster(ClusterTitle):
    """A group with the members that are nearest to its centre."""

    members: list[Member]


class Vector(VectorName):
    """A value vector: both ends of its tokens, and what the user calls it."""

    norm: float
    promotes: list[Scored]
    suppresses: list[Scored]
    range: Range | None
    cluster: int | None


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


class Deleted(Answer):
    """That a session is gone."""

    deleted: bool


class Exported(Answer):
    """A session as JSON, and as Python that reproduces it."""

    json_: Json = Field(alias="json")
    python: str
