"""Concepts: what can be read from a model's weights alone, and searched with its concept index.

In: a wrapped model, and an index if there is one. Out: plain JSON types. `Debugger` adds prompts.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

from layerleap.act.debug.index_cost import IndexCost, index_cost
from layerleap.errors import BadArtifact
from layerleap.lens.vocabulary.ends import check_neuron
from layerleap.lens.vocabulary.index_settings import Form
from layerleap.lens.vocabulary.neurons import Neurons
from layerleap.lens.vocabulary.weights import Weights, weights
from layerleap.models.transformer import Transformer
from layerleap.models.weights import FeedForward, feed_forward, feed_forwards, heads
from layerleap.progress import Progress

NO_INDEX = "there is no concept index of this model; build it with: layerleap index MODEL"
MEMBERS = 50  # of a cluster that are shown
FEW = 5  # tokens that stand for a vector
# Pairs are searched for among the tokens with the lowest ids, which are frequent ones in most
# vocabularies: all 49,152 tokens of SmolLM2 would keep the page waiting for half a minute.
PAIR_TOKENS = 8192
Json = dict[str, Any]


class Concepts:
    """Vectors, keys and heads of a model; `index` adds names, search and natural ranges."""

    def __init__(
        self,
        transformer: Transformer,
        index: Any = None,
        *,
        no_index: str | None = None,
        find_index: Callable[[], Any] | None = None,
    ) -> None:
        """Read `transformer`.

        Args:
            index: a concept index (`ll.index`).
            no_index: why there is none.
            find_index: looks whether one was built in the meantime; without it, none may be built.
        """
        self.transformer, self.index = transformer, index
        self._no_index, self._find_index = no_index or NO_INDEX, find_index

    @cached_property
    def blocks(self) -> list[Json]:
        """Per block: how many neurons it has, or why they are not known; and its style."""
        ffns = feed_forwards(self.transformer)
        return [
            {
                "block": block,
                "n_neurons": ffn.n_neurons if isinstance(ffn, FeedForward) else None,
                "reason": ffn if isinstance(ffn, str) else None,
                "style": None if isinstance(anatomy, str) else anatomy.style,
            }
            for (block, ffn), anatomy in zip(ffns.items(), self.transformer.anatomy, strict=True)
        ]

    def vector(self, block: int, neuron: int) -> Json:
        """Both token ends of a value vector, from the index or computed now."""
        if self.index is not None:
            return dict(self.index.vector(block, neuron).to_dict())
        vector = Neurons(self.transformer).read(block, neuron).to_dict()
        fields = ("block", "neuron", "norm", "promotes", "suppresses")
        return {**{key: vector[key] for key in fields}, "range": None, "cluster": None}

    def check_neuron(self, block: int, neuron: int) -> None:
        """Raise an error if there is no such neuron."""
        check_neuron(feed_forward(self.transformer, block), neuron)

    def keys(self, block: int, neuron: int) -> Json:
        """The tokens that a neuron responds to, by each kind of key."""
        reading = self._weights.read(f"L{block}.N{neuron}")
        fields = ("kind", "norm", "promotes", "suppresses")
        keys = [vector for vector in reading.to_dict()["vectors"] if vector["role"] == "reads"]
        return {
            "keys": [{key: vector[key] for key in fields} for vector in keys],
            "reason": reading.missing.get("key"),
        }

    def heads(self, block: int) -> Json:
        """How many heads a block has, and why their scores cannot be read, if so."""
        attention = heads(self.transformer, block)
        fields = ("block", "n_heads", "n_kv_heads", "positions", "qk_reason")
        return {key: getattr(attention, key) for key in fields}

    def pairs(self, block: int, head: int, *, form: Form, offset: int, top: int) -> Json:
        """The strongest token pairs of a head, among the first tokens of the vocabulary."""
        tokens = range(min(self.transformer.d_vocab, PAIR_TOKENS))
        options: Any = {"form": form, "offset": offset, "top": top, "tokens": tokens}
        pairs = self._weights.pairs(f"L{block}.H{head}", progress=False, **options)
        rows = pairs.to_dict()
        some = f"the {pairs.n_tokens:,} lowest ids; " if pairs.restricted else ""
        legend = some + pairs.legend()
        return {"title": pairs.title, "legend": legend, **{k: rows[k] for k in ("roles", "pairs")}}

    @cached_property
    def _weights(self) -> Weights:
        return weights(self.transformer)

    def index_state(self) -> Json:
        """Whether there is an index, which may have been built since; if not, why not."""
        if self.index is None and self._find_index is not None:
            self.index = self._find_index()
        is_ready = self.index is not None
        has_neurons = any(block["n_neurons"] for block in self.blocks)
        return {
            "ready": is_ready,
            "reason": None if is_ready else self._no_index,
            "vectors": self.index.n_vectors if is_ready else None,
            "buildable": self._find_index is not None and has_neurons,
        }

    def search(self, query: str, *, top: int, side: str, space: str) -> Json:
        """Vectors that match words, as `results`, and `notes` on words that are no tokens."""
        matches = self._need_index().search(query, top=top, side=side, space=space)
        return {"results": [match.to_dict() for match in matches], "notes": matches.notes}

    def neighbours(self, block: int, neuron: int, *, top: int) -> list[Json]:
        """Vectors that point the same way."""
        return [one.to_dict() for one in self._need_index().neighbours(block, neuron, top=top)]

    def clusters(self, *, top: int, query: str | None) -> list[Json]:
        """Groups of vectors, with the tokens that name them."""
        clusters = self._need_index().clusters(top=top, query=query)
        return [_cluster(cluster.to_dict()) for cluster in clusters]

    def cluster(self, number: int) -> Json:
        """One group, with those of its members that are nearest to its middle."""
        index = self._need_index()
        cluster = index.cluster(number).to_dict()
        members = []
        for member in cluster["members"][:MEMBERS]:
            scored = index.vector(member["block"], member["neuron"]).promotes[:FEW]
            members.append({**member, "promotes": [one.token.to_dict() for one in scored]})
        return {**_cluster(cluster), "members": members}

    def range(self, block: int, neuron: int) -> Json | None:
        """The natural range of a coefficient on the index's reference text, if there is one."""
        return None if self.index is None else self.index.range(block, neuron)

    def index_cost(self) -> IndexCost:
        """What building the index takes here; raises an error if it cannot be built now."""
        return index_cost(self.transformer)

    def build_index(self, progress: Progress | bool) -> None:
        """Build the index, or go on with it, and use it from then on."""
        from layerleap.lens.vocabulary.build import index

        self.index = index(self.transformer, progress=progress)

    def _need_index(self) -> Any:
        if self.index is None:
            raise BadArtifact(self._no_index)
        return self.index


def _cluster(cluster: Json) -> Json:
    tokens = [scored["token"] for scored in cluster["promotes"]]
    return {"number": cluster["number"], "size": cluster["size"], "tokens": tokens}
