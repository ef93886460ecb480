"""What the server asks, and of whom: the engine's answers in the shapes that the page reads.

In: a `Debugger` with its index. Out: plain JSON types. Ranks count from 1 here, as people count.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from layerleap.errors import BadArtifact
from layerleap.progress import Progress

if TYPE_CHECKING:
    from layerleap.act.debug.debugger import Debugger
    from layerleap.act.debug.index_cost import IndexCost

NO_INDEX = "there is no concept index of this model; build it with: layerleap index MODEL"
MEMBERS = 50  # of a cluster that are shown
FEW = 5  # tokens that stand for a vector
# Pairs are sought among the tokens with the lowest ids, which are frequent ones in most
# vocabularies: all 49,152 tokens of SmolLM2 would keep the page waiting for half a minute.
PAIR_TOKENS = 8192
Json = dict[str, Any]
OnToken = Callable[[Json, str], None]
ShouldStop = Callable[[], bool]


class Engine(Protocol):
    """What the routes call; tests replace it by one without a model."""

    def describe(self) -> Json:
        """The model, as the page shows it; it must not wait for the model."""

    def tokens(self, text: str) -> list[Json]:
        """A text cut into tokens."""

    def vocabulary(self, text: str) -> list[Json]:
        """Output tokens that a typed text may mean."""

    def trace(
        self,
        ids: Sequence[int],
        *,
        lens: str,
        watch: int | None,
        edits: Sequence[str],
        top: int,
        follow: Sequence[int],
        selected: int | None,
        should_stop: ShouldStop,
    ) -> Iterator[Json]:
        """Frames of a reading at every layer and position; `follow` is read in each of them."""

    def cell(
        self,
        ids: Sequence[int],
        *,
        block: int,
        position: int,
        lens: str,
        watch: int | None,
        edits: Sequence[str],
        top: int,
    ) -> Json:
        """One block at one position."""

    def generate(
        self,
        ids: Sequence[int],
        *,
        edits: Sequence[str],
        max_new_tokens: int,
        on_token: OnToken,
        should_stop: ShouldStop,
    ) -> None:
        """Continue a prompt."""

    def check_edits(self, edits: Sequence[str]) -> None:
        """Raise an error if an edit cannot be read or does not fit the model."""

    def vector(self, block: int, neuron: int) -> Json:
        """Both token ends of a value vector."""

    def check_neuron(self, block: int, neuron: int) -> None:
        """Raise an error if there is no such neuron."""

    def keys(self, block: int, neuron: int) -> Json:
        """The tokens that a neuron responds to, by each kind of key."""

    def heads(self, block: int) -> Json:
        """How many heads a block has, and why their scores cannot be read, if so."""

    def pairs(self, block: int, head: int, *, form: str, offset: int, top: int) -> Json:
        """The strongest token pairs of a head, from its weights."""

    def search(self, query: str, *, top: int, side: str, space: str) -> Json:
        """Vectors that match words, as `results`, and `notes` on words that are no tokens.

        This and what follows need the concept index.
        """

    def neighbours(self, block: int, neuron: int, *, top: int) -> list[Json]:
        """Vectors that point the same way."""

    def clusters(self, *, top: int, query: str | None) -> list[Json]:
        """Groups of vectors."""

    def cluster(self, number: int) -> Json:
        """One group with its members."""

    def index_cost(self) -> "IndexCost":
        """What building the index takes; raises an error if it cannot be built now."""

    def build_index(self, progress: Progress) -> None:
        """Build the index, or go on with it, and use it from then on."""


class ModelEngine:
    """The engine of one model."""

    def __init__(
        self,
        debugger: "Debugger",
        missing: str | None = None,
        bank: str | None = None,
        find_index: Callable[[], Any] = lambda: None,
        can_build: bool = False,
    ) -> None:
        """Wrap a debugger.

        Args:
            debugger: of the model.
            missing: why there is no index.
            bank: where the shortcuts came from.
            find_index: looks whether an index was built in the meantime.
            can_build: the index may be built in the cache.
        """
        self.debugger, self.missing, self.bank = debugger, missing or NO_INDEX, bank
        self._find_index, self._can_build = find_index, can_build
        self._described = self._describe()

    def describe(self) -> Json:
        """The model, as the page shows it, with the index that may have been built since."""
        if self.debugger.index is None and (index := self._find_index()) is not None:
            self.debugger.index = index
            self._described = self._describe()
        return self._described

    def _describe(self) -> Json:
        debugger = self.debugger
        known = debugger.index is not None
        return {
            **debugger.describe(),
            "fingerprint": debugger.transformer.identity.fingerprint,
            "bank": self.bank,
            "index": {
                "ready": known,
                "reason": None if known else self.missing,
                "vectors": debugger.index.n_vectors if known else None,
                "buildable": self._can_build and any(b["n_neurons"] for b in debugger.blocks),
            },
        }

    def tokens(self, text: str) -> list[Json]:
        """A text cut into tokens; none for an empty one."""
        return [token.to_dict() for token in self.debugger.tokens(text)] if text else []

    def vocabulary(self, text: str) -> list[Json]:
        """Output tokens that a typed text may mean."""
        return [token.to_dict() for token in self.debugger.outputs(text)] if text else []

    def trace(self, ids: Sequence[int], **options: Any) -> Iterator[Json]:
        """Frames of a reading at every layer and position."""
        for frame in self.debugger.trace(ids, **options):
            for cell in frame.get("cells", ()):
                cell["final"], cell["watch"] = _place(cell["final"]), _place(cell["watch"])
                cell["follow"] = {token: _place(at) for token, at in cell["follow"].items()}
            yield frame

    def cell(self, ids: Sequence[int], *, block: int, **options: Any) -> Json:
        """One block at one position."""
        cell = self.debugger.cell(ids, block=block, **options)
        names: dict[int, Json] = {}
        after = cell.pop("after")
        answer = {
            "block": block,
            "position": cell["position"],
            "token": cell["token"],
            **_reading(cell, names),
            "names": names,
        }
        if after is not None:
            answer["after"] = {**answer, **_reading(after, names)}
        return answer

    def generate(
        self,
        ids: Sequence[int],
        *,
        edits: Sequence[str],
        max_new_tokens: int,
        on_token: OnToken,
        should_stop: ShouldStop,
    ) -> None:
        """Continue a prompt."""
        from layerleap.lens.vocabulary.tokens import output_label

        def report(token: int, piece: str) -> None:
            on_token(output_label(self.debugger.transformer, token).to_dict(), piece)

        self.debugger.generate(
            ids,
            edits=edits,
            max_new_tokens=max_new_tokens,
            on_token=report,
            should_stop=should_stop,
        )

    def check_edits(self, edits: Sequence[str]) -> None:
        """Raise an error if an edit cannot be read or does not fit the model."""
        self.debugger.check_edits(edits)

    def vector(self, block: int, neuron: int) -> Json:
        """Both token ends of a value vector, from the index or computed now."""
        index = self.debugger.index
        if index is not None:
            return dict(index.vector(block, neuron).to_dict())
        from layerleap.lens.vocabulary.neurons import Neurons

        vector = Neurons(self.debugger.transformer).read(block, neuron).to_dict()
        kept = ("block", "neuron", "norm", "promotes", "suppresses")
        return {**{key: vector[key] for key in kept}, "range": None, "cluster": None}

    def check_neuron(self, block: int, neuron: int) -> None:
        """Raise an error if there is no such neuron."""
        from layerleap.lens.vocabulary.neurons import check_neuron
        from layerleap.models.weights import feed_forward

        check_neuron(feed_forward(self.debugger.transformer, block), neuron)

    def keys(self, block: int, neuron: int) -> Json:
        """The tokens that a neuron responds to, by each kind of key."""
        reading = self._weights.read(f"L{block}.N{neuron}")
        kept = ("kind", "norm", "promotes", "suppresses")
        keys = [vector for vector in reading.to_dict()["vectors"] if vector["role"] == "reads"]
        return {
            "keys": [{key: vector[key] for key in kept} for vector in keys],
            "reason": reading.missing.get("key"),
        }

    def heads(self, block: int) -> Json:
        """How many heads a block has, and why their scores cannot be read, if so."""
        from layerleap.models.weights import heads

        attention = heads(self.debugger.transformer, block)
        kept = ("block", "n_heads", "n_kv_heads", "positions", "qk_reason")
        return {key: getattr(attention, key) for key in kept}

    def pairs(self, block: int, head: int, *, form: str, offset: int, top: int) -> Json:
        """The strongest token pairs of a head, among the first tokens of the vocabulary."""
        transformer = self.debugger.transformer
        pairs = self._weights.pairs(
            f"L{block}.H{head}",
            form=form,
            offset=offset,
            top=top,
            progress=False,
            tokens=range(min(transformer.d_vocab, PAIR_TOKENS)),
        )
        rows = pairs.to_dict()
        some = f"the {pairs.n_tokens:,} lowest ids; " if pairs.restricted else ""
        return {
            "title": pairs.title,
            "legend": some + pairs.legend(),
            "roles": rows["roles"],
            "pairs": rows["pairs"],
        }

    @cached_property
    def _weights(self) -> Any:
        from layerleap.lens.vocabulary.weights import weights

        return weights(self.debugger.transformer)

    def search(self, query: str, *, top: int, side: str, space: str) -> Json:
        """Vectors that match words, and what became of words that are no tokens."""
        matches = self._index().search(query, top=top, side=side, space=space)
        return {"results": [each.to_dict() for each in matches], "notes": matches.notes}

    def neighbours(self, block: int, neuron: int, *, top: int) -> list[Json]:
        """Vectors that point the same way."""
        return [each.to_dict() for each in self._index().neighbours(block, neuron, top=top)]

    def clusters(self, *, top: int, query: str | None) -> list[Json]:
        """Groups of vectors, with the tokens that name them."""
        return [_cluster(each.to_dict()) for each in self._index().clusters(top=top, query=query)]

    def cluster(self, number: int) -> Json:
        """One group, with those of its members that are nearest to its middle."""
        index = self._index()
        cluster = index.cluster(number).to_dict()
        members = []
        for member in cluster["members"][:MEMBERS]:
            tokens = index.vector(member["block"], member["neuron"]).promotes[:FEW]
            members.append({**member, "promotes": [each.token.to_dict() for each in tokens]})
        return {**_cluster(cluster), "members": members}

    def index_cost(self) -> "IndexCost":
        """What building the index takes on this machine."""
        from layerleap.act.debug.index_cost import index_cost

        return index_cost(self.debugger.transformer)

    def build_index(self, progress: Progress | bool) -> None:
        """Build the index, or go on with it, and use it from then on."""
        from layerleap.lens.vocabulary.build import index

        self.debugger.index = index(self.debugger.transformer, progress=progress)
        self._described = self._describe()

    def _index(self) -> Any:
        if self.debugger.index is None:
            raise BadArtifact(self.missing)
        return self.debugger.index


def _cluster(cluster: Json) -> Json:
    tokens = [each["token"] for each in cluster["promotes"]]
    return {"number": cluster["number"], "size": cluster["size"], "tokens": tokens}


def _place(place: Sequence[Any] | None) -> list[Any] | None:
    """Probability and rank, the rank counted from 1."""
    return None if place is None else [place[0], place[1] + 1]


def _reading(cell: Json, names: dict[int, Json]) -> Json:
    """Stages and neurons of a block; tokens go into `names`."""
    missing = cell["missing"]
    return {
        "stages": [_stage(stage, names) for stage in cell["stages"]],
        "parallel": cell["style"] == "parallel",
        "reason": missing.get("attention"),
        "neurons": None if "neurons" in missing else _neurons(cell),
        "neurons_reason": missing.get("neurons") or missing.get("vectors"),
    }


def _stage(stage: Json, names: dict[int, Json]) -> Json:
    watched = stage["watched"]
    for each in (*stage["top"], *([watched] if watched else [])):
        names[each["token"]["id"]] = each["token"]
    return {
        "where": stage["where"],
        "layer": stage["layer"],
        "top": [[each["token"]["id"], each["prob"], each["climbed"]] for each in stage["top"]],
        "watch": None if watched is None else [watched["prob"], watched["rank"] + 1],
    }


def _neurons(cell: Json) -> Json:
    shares = {key: cell[key] for key in ("shown_share", "bias_share", "rest_share", "total_norm")}
    return {"updates": [_update(update) for update in cell["updates"]], **shares}


def _update(update: Json) -> Json:
    kept = ("neuron", "coefficient", "norm", "strength", "share", "range")
    ends = {side: [each["token"] for each in update[side]] for side in ("promotes", "suppresses")}
    return {**{key: update.get(key) for key in kept}, **ends, "name": None}
