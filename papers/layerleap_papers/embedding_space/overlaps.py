"""Overlap of paired parameter vectors, against pairs that do not belong together.

In: which vectors of a block belong together, and controls. Out: Jaccard indices of their top
tokens, and rows with intervals, layer by layer and over the depth.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from layerleap import StudyResult, Transformer
from layerleap.errors import ModelRefused
from layerleap.lens import ANY, Documents, ends, finite, freedom
from layerleap.models.weights import kinds, refusals, vectors
from layerleap.study import Answer, Row, Tables, above
from layerleap_papers.embedding_space.embedding_context import EmbeddingContext, Vectors
from layerleap_papers.embedding_space.tokens import READINGS, jaccard, top_ids

OWN, SHUFFLED = "own", "shuffled"


@dataclass(frozen=True)
class Pairs:
    """Vectors of one kind, and their partners of another."""

    name: str
    left: str  # kind
    right: str
    rows: Tensor  # of `left`
    partners: Mapping[str, Tensor]  # rows of `right`: those under "own" belong to `rows`


GATED = ("ffn.gate", "ffn.up")  # keys of a neuron that are compared with each other, too
BETTER = "gate over up"  # lead of gates minus lead of ups


def verified(
    context: EmbeddingContext,
    model: Transformer,
    pairs: Mapping[str, tuple[str, str]],
    what: str,
    *,
    least: int,
) -> dict[int, list[str]]:
    """By block, the pairs with two verified kinds; blocks with fewer than `least` are noted."""
    by_block: dict[int, list[str]] = {}
    reasons: dict[str, list[int]] = {}
    for block in range(1, model.n_layers + 1):
        known = set(kinds(model, block))
        names = [name for name, both in pairs.items() if known >= set(both)]
        if names:
            by_block[block] = names
        if len(names) < least:
            reasons.setdefault("; ".join(refusals(model, block)), []).append(block)
    if not by_block:
        raise ModelRefused(next(iter(reasons)))
    for reason, blocks in reasons.items():
        context.note(f"{what} of layers {', '.join(map(str, blocks))} are left out: {reason}.")
    return by_block


def overlap_tables(
    context: EmbeddingContext,
    read: Vectors,
    blocks: Mapping[int, Sequence[str]],
    pairs_of: Callable[[int, str], Pairs],
    name: str,
) -> Tables:
    """Overlaps of the pairs of every block, by layer and over the depth; `name` of the table."""
    depth = Depth()
    for number, (block, names) in enumerate(blocks.items()):
        context.progress(f"overlap of {name}", number, len(blocks), "layers")
        pairs = [pairs_of(block, pair) for pair in names]
        made = overlaps(read.model, read.matrix, block, pairs, read.readings, context.settings.k)
        for reading, by_pair in made:
            leads = {pair: with_leads(by_partner) for pair, by_partner in by_pair.items()}
            for pair in pairs:
                columns = {(pair.name, m): value for m, value in leads[pair.name].items()}
                depth.add(block, reading, columns, pair.partners[OWN])
            if set(GATED) <= set(names):
                gates, ups = (leads[key][lead_over(SHUFFLED)] for key in GATED)
                depth.add(block, reading, {("both", BETTER): gates - ups})
    return {name: depth.rows, f"{name}_depth": depth.over_all()}


def overlaps(
    model: Transformer,
    matrix: Tensor,
    block: int,
    pairs: Sequence[Pairs],
    readings: Iterable[str],
    k: int,
) -> Iterator[tuple[str, dict[str, dict[str, Tensor]]]]:
    """For each reading, the Jaccard indices of each pair by name and partner: (row,)."""
    needed: dict[str, Tensor] = {}
    for pair in pairs:
        for kind, rows in ((pair.left, [pair.rows]), (pair.right, [*pair.partners.values()])):
            needed[kind] = torch.cat([needed.get(kind, pair.rows[:0]), *rows]).unique()

    def at(tokens: Mapping[str, Tensor], kind: str, rows: Tensor) -> Tensor:
        return tokens[kind][torch.searchsorted(needed[kind], rows)]

    readings = list(readings)
    for fold in sorted({READINGS[reading][1] for reading in readings}):
        orders = {r: READINGS[r][0] for r in readings if READINGS[r][1] is fold}
        ids = {
            kind: top_ids(vectors(model, block, kind, fold=fold)[rows], matrix, k, *orders.values())
            for kind, rows in needed.items()
        }
        for reading, order in orders.items():
            tokens = {kind: by_order[order] for kind, by_order in ids.items()}
            indices = {
                pair.name: {
                    name: jaccard(at(tokens, pair.left, pair.rows), at(tokens, pair.right, partner))
                    for name, partner in pair.partners.items()
                }
                for pair in pairs
            }
            yield reading, indices


def with_leads(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same columns, and for each control what a vector's own partner has more."""
    controls = {name: value for name, value in columns.items() if name != OWN}
    return {**columns, **{lead_over(n): columns[OWN] - value for n, value in controls.items()}}


def lead_over(control: str) -> str:
    """The measure "own partner minus control"."""
    return f"lead over {control}"


@dataclass
class Depth:
    """Means of many measures with intervals, by layer and over all layers.

    Vectors of each layer are their own, so layers are independent.
    """

    rows: list[Row] = field(default_factory=list)
    # The variance of each mean and its degrees of freedom, by layer.
    spreads: dict[tuple[str, str, str], list[tuple[float, float]]] = field(default_factory=dict)

    def add(
        self,
        block: int,
        reading: str,
        columns: Mapping[tuple[str, str], Tensor],
        groups: Tensor | None = None,
    ) -> None:
        """Take in columns (pair, measure) of one layer; vectors of a group belong together."""
        values = torch.stack(list(columns.values()), dim=1)
        groups = torch.arange(len(values)) if groups is None else groups
        vectors = Documents(groups)
        degrees, variances = freedom(vectors.sizes), vectors.spread(values)[1].tolist()
        for (pair, measure), estimate, variance in zip(
            columns, vectors.means(values), variances, strict=True
        ):
            row = {"layer": block, "pair": pair, "reading": reading, "measure": measure}
            # Intervals are over vectors: no documents are read.
            counts = {key: v for key, v in estimate.to_dict().items() if key != "documents"}
            self.rows.append({**row, **counts})
            self.spreads.setdefault((pair, reading, measure), []).append((variance, degrees))

    def over_all(self) -> list[Row]:
        """Each measure's mean over layers, and its rise along a straight line through them."""
        return [row for key in self.spreads for row in self._summary(*key)]

    def _summary(self, pair: str, reading: str, measure: str) -> Iterator[Row]:
        about = {"pair": pair, "reading": reading, "measure": measure}
        rows = [row for row in self.rows if about.items() <= row.items()]
        spreads = torch.tensor(self.spreads[pair, reading, measure], dtype=torch.float64)
        variances, degrees = spreads.unbind(1)  # (layer,)
        values = torch.tensor([row["value"] for row in rows], dtype=torch.float64)
        x = torch.tensor([row["layer"] for row in rows], dtype=torch.float64)
        weights = {"mean": torch.ones_like(x) / len(x)}
        if len(x) > 1:
            centred = x - x.mean()
            weights["rise"] = (x[-1] - x[0]) * centred / centred.square().sum()
        for name, weight in weights.items():
            parts, value = weight.square() * variances, values @ weight
            # Satterthwaite's degrees of freedom of a sum of variances.
            together = float(parts.sum().square() / (parts.square() / degrees).sum())
            low, high = ends(value, parts.sum(), together if together > 0 else 1.0, ANY, 1.0)
            yield {
                **about,
                "over": name,
                "value": float(value),
                "low": finite(float(low)),
                "high": finite(float(high)),
                "layers": len(x),
                "rows": sum(row["rows"] for row in rows),
            }


def sample_of(n: int, limit: int | None, generator: torch.Generator) -> Tensor:
    """At most `limit` of n rows, in order; all when None."""
    if limit is None or limit >= n:
        return torch.arange(n)
    return torch.randperm(n, generator=generator)[:limit].sort().values


def answers(result: StudyResult, table: str, reading: str = "plain", **where: str) -> list[Answer]:
    """Is a lead above 0, layer by layer?"""
    return [above(row) for row in result.rows(table, reading=reading, **where)]


def mean_of(result: StudyResult, table: str, **where: str) -> Row | None:
    """The mean over layers of one measure, from a table of `Depth.over_all`."""
    return result.row(table, **{"reading": "plain", "over": "mean", **where})
