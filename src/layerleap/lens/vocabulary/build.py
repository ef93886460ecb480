"""Building a concept index: every value vector of a model read in its vocabulary, into one file.

In: a wrapped model, and a text for natural ranges. Out: a `ConceptIndex`.

The steps are blocks, tokens, postings, ranges and clusters. Each is kept as soon as it is done, so
that an interrupted build goes on from there. Neurons are read a few hundred at a time: beyond the
model itself the build takes less than 1 GB.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layerleap.arguments import checked
from layerleap.errors import (
    BadArtifact,
    BadSettings,
    BadText,
    CannotFetch,
    CannotWrite,
    ModelRefused,
)
from layerleap.extras import library
from layerleap.lens.vocabulary.clusters import (
    NEEDED,
    cluster_names,
    cluster_vectors,
    default_number,
)
from layerleap.lens.vocabulary.ends import Ends, both_ends
from layerleap.lens.vocabulary.index import ConceptIndex
from layerleap.lens.vocabulary.index_settings import (
    IndexSettings,
    SearchSide,
    Space,
    default_path,
    reference_text,
    text_name,
)
from layerleap.lens.vocabulary.lookup import End
from layerleap.lens.vocabulary.ranges import BlockRanges, natural_ranges
from layerleap.lens.vocabulary.search import Matches
from layerleap.lens.vocabulary.store import PROMOTED, SUPPRESSED, Building, check_not_building
from layerleap.lens.vocabulary.tokens import output_label
from layerleap.memory import give_back
from layerleap.models.transformer import Transformer
from layerleap.models.weights import FeedForward, feed_forwards, unembedding
from layerleap.progress import Progress, reporting

logger = logging.getLogger(__name__)

COLUMNS = {PROMOTED: "promoted", SUPPRESSED: "suppressed"}
POSTINGS_AT_ONCE = 2**22
ROWS_AT_ONCE = 256  # vectors between two calls of `progress`: a server answers others then
SEARCHED = ("text", "class")  # kinds of tokens that words are looked up in


@checked
def index(
    transformer: Transformer,
    path: str | Path | None = None,
    *,
    top: int = 50,
    text: Any = None,
    n_texts: int = 200,
    clusters: int | None = None,
    seed: int = 0,
    progress: Progress | bool = True,
) -> ConceptIndex:
    """The concept index of a model, built if there is none.

        index = ll.index(model)
        index.search("guitar music band")

    All value vectors are multiplied by the output matrix, without a norm. Blocks without verified
    neurons (mixtures of experts) are left out; `index.blocks` says why. An interrupted build goes
    on where it stopped.

    Args:
        path: the file; by default one in the cache for exactly these weights and settings.
        top: tokens to keep at both ends of each vector.
        text: what natural ranges of coefficients are measured on: anything `ll.fit` reads. By
            default bundled English text, if the model reads it and it can be fetched.
        n_texts: sentences of it; 0 leaves the ranges out.
        clusters: how many; 0 for none. By default one per 40 vectors if scikit-learn is installed.
        seed: of the clusters.
        progress: a function to call, True for bars on a terminal or in a notebook, or False.
    """
    settings = IndexSettings(top, text_name(text), n_texts, clusters, seed)
    target = default_path(transformer, settings) if path is None else Path(path)
    if target.is_dir():
        raise CannotWrite(f"{target} is a folder; expected a file for the index")
    if target.is_file() and (known := _known(transformer, target, settings, path is None)):
        return known
    if clusters:
        library("sklearn.cluster", "learn", NEEDED)  # fails before the long part, not after it
    check_not_building(target)  # before the neurons are verified, which takes a while
    work = _Work(transformer, settings, text)
    name = transformer.identity.name
    logger.info(f"building the concept index of {name} (once; kept in {target})")
    with reporting(progress) as report, Building(target, settings.to_dict(transformer)) as building:
        work.run(building, report)
        building.finish()
    return ConceptIndex.open(transformer, target)


@checked
def search(
    transformer: Transformer,
    query: str,
    *,
    top: int = 10,
    side: SearchSide = "both",
    space: Space = "any",
    path: str | Path | None = None,
    progress: Progress | bool = True,
) -> Matches:
    """The neurons whose value vectors match words best; builds the model's index if there is none.

        ll.search(model, "guitar music band")

    Args:
        query: words separated by white space or commas; "guitar*" matches what begins like that.
        top: how many neurons.
        side: search what neurons promote, what they suppress, or both.
        space: "with" matches only tokens with a leading space, "without" only those without.
        path: the file of the index; by default the cached one.
        progress: of building the index, if there is none.
    """
    if path is not None:
        opened = ConceptIndex.open(transformer, path)
    else:
        opened = index(transformer, progress=progress)
    return opened.search(query, top=top, side=side, space=space)


def _known(
    transformer: Transformer, target: Path, settings: IndexSettings, is_cached: bool
) -> ConceptIndex | None:
    """The index that is already there; None if it was damaged in the cache and is removed."""
    try:
        index = ConceptIndex.open(transformer, target)
    except BadArtifact:
        if not is_cached:
            raise
        target.unlink()  # a cache can be recreated
        return None
    known, needed = index.file.about["settings"], settings.to_dict(transformer)
    if differing := [key for key in needed if known.get(key) != needed[key]]:
        raise BadSettings(
            f"{target} was built with other settings ({', '.join(differing)}); delete it, repeat "
            "them, or choose another file"
        )
    return index


class _Work:
    """The steps of one build."""

    def __init__(self, transformer: Transformer, settings: IndexSettings, text: Any) -> None:
        """Check the model first, so that a refused one leaves no file."""
        self.transformer, self.settings, self.text = transformer, settings, text
        self.matrix = unembedding(transformer)
        self.ffns: list[FeedForward] = []
        self.reasons: dict[int, str] = {}
        for block, ffn in feed_forwards(transformer).items():
            if isinstance(ffn, FeedForward):
                self.ffns.append(ffn)
            else:
                self.reasons[block] = str(ffn)
        if not self.ffns:
            raise ModelRefused(
                f"{transformer.identity.name} has no neurons to index: {self.reasons[1]}"
            )
        self.sizes = [ffn.n_neurons for ffn in self.ffns]
        self.top = min(settings.top, len(self.matrix))
        if (settings.clusters or 0) > sum(self.sizes):
            raise BadSettings(
                f"clusters is {settings.clusters}, but there are only {sum(self.sizes)} vectors"
            )

    def run(self, building: Building, progress: Progress) -> None:
        """Whatever an earlier run has not finished."""
        building.note("model", self.transformer.identity.to_dict())
        self.vectors(building, progress)
        for step in (self.tokens, self.postings, self.ranges, self.clusters):
            if not building.is_done(step.__name__):
                step(building, progress)
            give_back()

    def vectors(self, building: Building, progress: Progress) -> None:
        """One step per block: both ends of its vectors."""
        n_layers, first = self.transformer.n_layers, 0
        ffns = {ffn.block: ffn for ffn in self.ffns}
        for block in range(1, n_layers + 1):
            ffn = ffns.get(block)
            if not building.is_done(f"block {block}"):
                between = partial(progress, "reading neurons", block - 1, n_layers, "blocks")
                rows = [] if ffn is None else self._rows(ffn, first, between)
                self._add_block(building, block, first, rows)
            first += 0 if ffn is None else ffn.n_neurons
            progress("reading neurons", block, n_layers, "blocks")

    def _rows(self, ffn: FeedForward, first: int, between: Callable[[], None]) -> list[Any]:
        """(number, norm, promoted, suppressed) of each vector of a block."""
        rows: list[tuple[int, float, bytes, bytes]] = []
        for part in ffn.written(self.transformer).float().split(ROWS_AT_ONCE):
            packed = map(_packed, both_ends(part, self.matrix, self.top))
            numbers = range(first + len(rows), first + len(rows) + len(part))
            rows += zip(numbers, part.norm(dim=1).tolist(), *packed, strict=True)
            between()
        return rows

    def _add_block(self, building: Building, block: int, first: int, rows: list[Any]) -> None:
        with building.step(f"block {block}") as connection:
            connection.execute(
                "INSERT INTO blocks VALUES (?, ?, ?, ?)",
                (block, first, len(rows), self.reasons.get(block)),
            )
            connection.executemany("INSERT INTO vectors VALUES (?, ?, ?, ?)", rows)

    def tokens(self, building: Building, progress: Progress) -> None:
        """How every output is shown, and the full-text index over their words."""
        total = len(self.matrix)
        with building.step("tokens") as connection:
            building.note("tokens", total)
            for id_ in range(total):
                token = output_label(self.transformer, id_)
                row = (id_, token.text, token.label, token.kind)
                connection.execute("INSERT INTO tokens VALUES (?, ?, ?, ?)", row)
                if token.kind in SEARCHED:
                    connection.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", row[:2])
                if id_ % 4096 == 0 or id_ + 1 == total:
                    progress("naming tokens", id_ + 1, total, "tokens")

    def postings(self, building: Building, progress: Progress) -> None:
        """The inverse of the vectors: by token and end, who has it and at which rank."""
        with building.step("postings") as connection:
            for end in COLUMNS:
                ids, _ = self._ends(building, end)
                total = len(self.matrix)
                for token, vectors, ranks in _inverted(ids, total):
                    row = (2 * token + end, vectors.tobytes(), ranks.tobytes())
                    connection.execute("INSERT INTO postings VALUES (?, ?, ?)", row)
                    if token % 4096 == 0:
                        progress("sorting tokens", end * total + token, 2 * total, "tokens")

    def _ends(self, building: Building, end: int) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
        """One end of all vectors: ids and scores, (vector, top)."""
        ids = np.empty((sum(self.sizes), self.top), np.int32)
        scores = np.empty(ids.shape, np.float16)
        rows = building.connection.execute(f"SELECT {COLUMNS[end]} FROM vectors ORDER BY id")
        for number, (packed,) in enumerate(rows):
            ids[number], scores[number] = End.unpacked(packed)
        return ids, scores

    def ranges(self, building: Building, progress: Progress) -> None:
        """Natural ranges on the reference text, or a note why there are none."""
        text, reason = self.text, ""
        if not self.settings.n_texts:
            text, reason = None, "they were not asked for"
        elif text is None:
            text, reason = reference_text(self.transformer)
        ranges: list[BlockRanges] = []
        if text is not None:
            options: dict[str, Any] = {"n_texts": self.settings.n_texts, "progress": progress}
            try:
                measured = natural_ranges(self.transformer, self.ffns, text, **options)
                ranges = list(measured.values())
            except (CannotFetch, BadText) as error:
                if self.text is not None:
                    raise
                reason = str(error)  # an index without ranges is better than none
        rows = (row for of_block in ranges for row in of_block.table())
        with building.step("ranges") as connection:
            about = {"text": text_name(text), "positions": ranges[0].n} if ranges else None
            building.note("ranges", about)
            building.note("no_ranges", reason or None)
            connection.executemany(
                "INSERT INTO ranges VALUES (?, ?, ?, ?, ?, ?)",
                ((number, *row) for number, row in enumerate(rows)),
            )

    def clusters(self, building: Building, progress: Progress) -> None:
        """Groups of vectors, or a note why there are none."""
        number, reason = self.settings.clusters, ""
        if number is None:
            number = default_number(sum(self.sizes))
            reason = _missing_library()
        elif not number:
            reason = "they were not asked for"
        with building.step("clusters") as connection:
            building.note("no_clusters", reason or None)
            if not reason:
                clusters, cosines = cluster_vectors(
                    self._values, self.sizes, number, seed=self.settings.seed, progress=progress
                )
                names = self._named(building, clusters, progress)
                connection.executemany("INSERT INTO clusters VALUES (?, ?, ?, ?)", names)
                members = zip(count(), clusters.tolist(), cosines.tolist(), strict=False)
                connection.executemany("INSERT INTO members VALUES (?, ?, ?)", members)

    def _named(
        self, building: Building, clusters: NDArray[np.int64], progress: Progress
    ) -> Iterator[tuple[int, int, bytes, bytes]]:
        """Number, size and both ends of each cluster; scores are means over its members."""
        named = []
        for end, sign in ((PROMOTED, 1), (SUPPRESSED, -1)):
            ids, scores = self._ends(building, end)
            named.append(cluster_names(clusters, ids, sign * scores))
            progress("naming clusters", end + 1, 2, "ends")
        numbers, sizes = np.unique(clusters, return_counts=True)
        for cluster, size in zip(numbers.tolist(), sizes.tolist(), strict=True):
            up, down = (names[cluster] for names in named)
            ends = End(up.ids, up.sums / size), End(down.ids, -down.sums / size)
            yield cluster, size, ends[0].packed(), ends[1].packed()

    def _values(self, place: int) -> Tensor:
        return self.ffns[place].written(self.transformer).float()


def _missing_library() -> str:
    """Why there can be no clusters; "" if there can."""
    try:
        library("sklearn.cluster", "learn", NEEDED)
    except CannotFetch as error:
        return str(error)
    return ""


def _packed(end: Ends) -> list[bytes]:
    """One end of some vectors as the file keeps it."""
    return [End(*row).packed() for row in zip(end.ids.numpy(), _half(end.scores), strict=True)]


def _half(scores: Tensor) -> NDArray[np.float16]:
    """Scores as the index keeps them; those beyond its range stay finite."""
    largest = torch.finfo(torch.float16).max
    return scores.clamp(-largest, largest).half().numpy()


def _inverted(
    ids: NDArray[np.int32], n_tokens: int
) -> Iterator[tuple[int, NDArray[np.int32], NDArray[np.uint8]]]:
    """(token, vectors that have it, its rank in each), for every token that occurs.

    A range of tokens at a time, so that sorting does not take several times the memory of `ids`.
    """
    top, flat = ids.shape[1], ids.ravel()
    span = max(1, int(n_tokens * POSTINGS_AT_ONCE / flat.size))
    for start in range(0, n_tokens, span):
        places = np.flatnonzero((flat >= start) & (flat < start + span))
        tokens = flat[places]
        order = np.argsort(tokens, kind="stable")
        places, tokens = places[order], tokens[order]
        vectors, ranks = (places // top).astype("<i4"), (places % top).astype(np.uint8)
        firsts = np.flatnonzero(np.diff(tokens, prepend=-1))
        for first, limit in zip(firsts, [*firsts[1:], len(tokens)], strict=True):
            yield int(tokens[first]), vectors[first:limit], ranks[first:limit]
