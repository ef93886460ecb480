"""The concept index of a model: all its value vectors, to look up, search, compare and group.

In: a wrapped model and the file that `build` made for it. Out: `ConceptIndex`.

    index = ll.index(model)                       builds the file if there is none
    index.search("guitar music band")             vectors by the words they promote or suppress
    index.vector(12, 34)                          both token ends, norm, natural range, cluster
    index.neighbours(12, 34), index.clusters()    vectors that point the same way
"""

from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layerleap.arguments import checked
from layerleap.errors import BadArtifact, BadSettings, CannotFetch, WrongModel
from layerleap.lens.vocabulary.clusters import NAMES
from layerleap.lens.vocabulary.ends import Scored
from layerleap.lens.vocabulary.index_settings import (
    IndexSettings,
    SearchSide,
    Space,
    default_path,
    index_folder,
)
from layerleap.lens.vocabulary.lookup import BlockEntry, End, IndexFile, ends_of, labels, scored
from layerleap.lens.vocabulary.ranges import Range
from layerleap.lens.vocabulary.search import Matches, Words, find_tokens, search
from layerleap.lens.vocabulary.tokens import TokenLabel
from layerleap.models.transformer import Transformer
from layerleap.models.weights import feed_forward
from layerleap.results.plain import Plain

FEW = 5  # tokens per end of a neighbour


@dataclass(frozen=True)
class Vector(Plain):
    """One value vector: what the neuron writes when it is active."""

    block: int
    neuron: int
    norm: float
    promotes: tuple[Scored, ...]
    suppresses: tuple[Scored, ...]  # most suppressed first
    range: Range | None  # natural values of the coefficient; None if no text was read
    cluster: int | None

    def to_pandas(self) -> Any:
        """One line per end and rank."""
        import pandas

        rows = [
            (end, rank, one.token.id, one.token.label, one.score)
            for end in ("promotes", "suppresses")
            for rank, one in enumerate(getattr(self, end), 1)
        ]
        return pandas.DataFrame(rows, columns=["end", "rank", "id", "token", "score"])


@dataclass(frozen=True)
class Neighbour(Plain):
    """A value vector that points nearly the same way as another."""

    block: int
    neuron: int
    cosine: float
    promotes: tuple[TokenLabel, ...]
    suppresses: tuple[TokenLabel, ...]


@dataclass(frozen=True)
class Member(Plain):
    """A vector of a cluster, and its cosine to the cluster's centre."""

    block: int
    neuron: int
    cosine: float


@dataclass(frozen=True)
class Cluster(Plain):
    """Value vectors that point the same way, named by the tokens they share."""

    number: int
    size: int
    promotes: tuple[Scored, ...]  # scores are means over the members
    suppresses: tuple[Scored, ...]
    members: tuple[Member, ...] = ()  # nearest to the centre first; only if asked for


class ConceptIndex:
    """A finished index of exactly these weights; safe to use from several threads."""

    def __init__(self, transformer: Transformer, file: IndexFile) -> None:
        self.transformer, self.file = transformer, file

    @classmethod
    @checked
    def open(cls, transformer: Transformer, path: str | Path | None = None) -> "ConceptIndex":
        """The index in a file, by default the cached one; it must be of the same weights."""
        file = Path(default_path(transformer, IndexSettings()) if path is None else path)
        name = transformer.identity.name
        if path is None and not file.is_file():
            raise BadArtifact(f"there is no index of {name} yet; run: layerleap index {name}")
        index = cls(transformer, IndexFile(file))
        index.check_model()
        return index

    def check_model(self) -> None:
        """Raise `WrongModel` unless the index is of exactly the weights that the model has now."""
        self.transformer.refresh()
        indexed, identity = self.file.about["model"], self.transformer.identity
        if indexed["fingerprint"] != identity.fingerprint:
            name, fingerprint = identity.name, identity.fingerprint[:8]
            since = ", changed since it was loaded" if self.transformer.is_changed else ""
            raise WrongModel(
                f"{self.path} is an index of other weights ({indexed['name']}, fingerprint "
                f"{indexed['fingerprint'][:8]}) than those of {name} ({fingerprint}{since}); "
                f"build one with: layerleap index {name}"
            )

    @property
    def path(self) -> Path:
        """The file."""
        return self.file.path

    @property
    def n_vectors(self) -> int:
        """How many value vectors it holds."""
        return self.file.n_vectors

    @property
    def blocks(self) -> list[BlockEntry]:
        """Number of neurons of each block, or why they are not in the index."""
        return self.file.blocks

    def __repr__(self) -> str:
        name, blocks = self.transformer.identity.name, len({e.block for e in self._known()})
        return f"ConceptIndex({name}: {self.n_vectors} value vectors of {blocks} blocks)"

    def to_dict(self) -> dict[str, Any]:
        """Settings, counts and what is missing, as plain JSON types."""
        about = {key: value for key, value in self.file.about.items() if key != "format"}
        return {
            "path": str(self.path),
            "vectors": self.n_vectors,
            **about,
            "blocks": [entry.to_dict() for entry in self.blocks],
        }

    @checked
    def search(
        self, query: str, *, top: int = 20, side: SearchSide = "both", space: Space = "any"
    ) -> Matches:
        """The vectors that match words best; see `layerleap.lens.vocabulary.search`."""
        self.check_model()
        return search(self.file, query, top=top, side=side, space=space)

    @checked
    def vector(self, block: int, neuron: int) -> Vector:
        """What is known about one value vector."""
        self.check_model()
        number = self.file.vector(block, neuron)
        with self.file.reading() as connection:
            words = scored(connection, ends_of(connection, number))
            norm, cluster, *values = connection.execute(
                "SELECT norm, cluster, low, mean, high, std, positive FROM vectors "
                "LEFT JOIN members ON members.vector = vectors.id "
                "LEFT JOIN ranges ON ranges.id = vectors.id WHERE vectors.id = ?",
                (number,),
            ).fetchone()
        natural = None if values[0] is None else Range(*values)
        return Vector(block, neuron, norm, *words, natural, cluster)

    @checked
    def range(self, block: int, neuron: int) -> dict[str, float] | None:
        """The natural range of a coefficient as plain JSON types; None if no text was read."""
        number = self.file.vector(block, neuron)
        with self.file.reading() as connection:
            row = connection.execute(
                "SELECT low, mean, high, std, positive FROM ranges WHERE id = ?", (number,)
            ).fetchone()
        return None if row is None else Range(*row).to_dict()

    @checked
    @torch.no_grad()
    def neighbours(self, block: int, neuron: int, *, top: int = 10) -> list[Neighbour]:
        """The vectors of all blocks with the largest cosine to one, largest first.

        Computed from the weights block by block: nothing of the size of all vectors is made.
        """
        number = self.file.vector(block, neuron)
        if top < 1:
            raise BadSettings(f"top is {top}; expected 1 or more")
        vector = self._values(block)[neuron]
        if not vector.any():
            raise BadSettings(
                f"the value vector of L{block}.N{neuron} is zero, so it has no direction and no "
                "neighbours"
            )
        cosines = torch.cat([_cosines(self._values(e.block), vector) for e in self._known()])
        cosines[number] = -torch.inf
        best = cosines.sort(descending=True, stable=True)
        order = [i for i in best.indices[:top].tolist() if cosines[i] > -torch.inf]
        neighbours = []
        with self.file.reading() as connection:
            for other in order:
                ends = [end.ids[:FEW].tolist() for end in ends_of(connection, other)]
                names = labels(connection, chain(*ends))
                words = (tuple(names[id_] for id_ in ids) for ids in ends)
                cosine = round(float(cosines[other]), 6)
                neighbours.append(Neighbour(*self.file.neuron(other), cosine, *words))
        return neighbours

    @checked
    def clusters(self, *, top: int = 50, query: str | None = None) -> list[Cluster]:
        """The largest clusters; with a query, those named by most of its words."""
        self._need_clusters()
        if top < 1:
            raise BadSettings(f"top is {top}; expected 1 or more")
        with self.file.reading() as connection:
            rows = connection.execute(
                "SELECT number, size, promoted, suppressed FROM clusters ORDER BY size DESC, number"
            ).fetchall()
            ends = [(End.unpacked(row[2]), End.unpacked(row[3])) for row in rows]
            order = np.arange(len(rows))
            if query is not None:
                points = _named(ends, find_tokens(connection, query))
                order = np.argsort(-points, kind="stable")[: np.count_nonzero(points)]
            chosen = order[:top].tolist()
            return [Cluster(rows[i][0], rows[i][1], *scored(connection, ends[i])) for i in chosen]

    @checked
    def cluster(self, number: int) -> Cluster:
        """One cluster with its members."""
        self._need_clusters()
        with self.file.reading() as connection:
            row = connection.execute(
                "SELECT size, promoted, suppressed FROM clusters WHERE number = ?", (number,)
            ).fetchone()
            if row is None:
                raise BadSettings(f"there is no cluster {number}; `clusters()` lists them")
            words = scored(connection, (End.unpacked(row[1]), End.unpacked(row[2])))
            members = connection.execute(
                "SELECT vector, cosine FROM members WHERE cluster = ? ORDER BY cosine DESC, vector",
                (number,),
            ).fetchall()
        near = tuple(Member(*self.file.neuron(vector), cosine) for vector, cosine in members)
        return Cluster(number, row[0], *words, near)

    def _need_clusters(self) -> None:
        if reason := self.file.about.get("no_clusters"):
            raise CannotFetch(f"{self.path} has no clusters: {reason}")

    def _known(self) -> list[BlockEntry]:
        return [entry for entry in self.blocks if entry.n_neurons]

    def _values(self, block: int) -> Tensor:
        return feed_forward(self.transformer, block).written(self.transformer).float()


def _cosines(values: Tensor, vector: Tensor) -> Tensor:
    """The cosine of each row to a vector; zero vectors have none and come last."""
    vector = vector.to(values.device)
    norms = values.norm(dim=1)
    cosines = values @ vector / (norms * vector.norm())
    return torch.where(norms > 0, cosines, -torch.inf).cpu()


def _named(ends: list[tuple[End, End]], words: Words) -> NDArray[np.float64]:
    """How strongly words name each cluster: by word 1 and more for a hit, 2 for its first token."""
    ids = np.full((len(ends), 2, NAMES), -1)
    for cluster, both in enumerate(ends):
        for end, tokens_of in enumerate(both):
            ids[cluster, end, : len(tokens_of.ids)] = tokens_of.ids
    points = np.zeros(len(ends))
    for tokens in words.tokens.values():
        hits = np.isin(ids, tokens)
        points += (hits * (2 - np.arange(NAMES) / NAMES)).max((1, 2))
    return points


def known_range(transformer: Transformer, block: int, neuron: int) -> Range | None:
    """The natural range of a coefficient in a cached index of these weights, if there is one."""
    for file in sorted(index_folder().glob(f"{transformer.identity.fingerprint}-*.sqlite")):
        with suppress(BadArtifact, WrongModel, BadSettings):
            if values := ConceptIndex.open(transformer, file).range(block, neuron):
                return Range(**values)
    return None
