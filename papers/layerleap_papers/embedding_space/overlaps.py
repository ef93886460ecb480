"""Overlap of paired parameter vectors, against pairs that do not belong together.

In: which vectors of a block belong together, and controls. Out: Jaccard indices of their top
tokens, and rows with intervals, layer by layer and over the depth.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from layerleap import StudyResult, Transformer
from layerleap.lens import ANY, Documents, ends, finite, freedom
from layerleap.models.weights import vectors
from layerleap.study import Answer, Row, above
from layerleap_papers.embedding_space.tokens import Order, jaccard, top_ids

# Which tokens of a vector count, and whether norms are folded in.
READINGS: dict[str, tuple[Order, bool]] = {
    "plain": ("magnitude", False),
    "signed": ("high", False),
    "folded": ("magnitude", True),
}
OWN = "own"


@dataclass(frozen=True)
class Pairs:
    """Vectors of one kind, and their partners of another."""

    name: str
    left: str  # kind
    right: str
    rows: Tensor  # of `left`
    partners: Mapping[str, Tensor]  # rows of `right`: those under "own" belong to `rows`


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
    readings = list(readings)
    for fold in sorted({READINGS[reading][1] for reading in readings}):
        chosen = [reading for reading in readings if READINGS[reading][1] is fold]
        orders = [READINGS[reading][0] for reading in chosen]
        ids = {
            kind: top_ids(vectors(model, block, kind, fold=fold)[rows], matrix, k, *orders)
            for kind, rows in needed.items()
        }
        for reading, order in zip(chosen, orders, strict=True):
            yield (
                reading,
                {
                    pair.name: {
                        name: jaccard(
                            ids[pair.left][order][torch.searchsorted(needed[pair.left], pair.rows)],
                            ids[pair.right][order][torch.searchsorted(needed[pair.right], partner)],
                        )
                        for name, partner in pair.partners.items()
                    }
                    for pair in pairs
                },
            )


def with_leads(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same columns, and for each control what a vector's own partner has more."""
    leads = {
        lead_over(name): columns[OWN] - value for name, value in columns.items() if name != OWN
    }
    return {**columns, **leads}


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
        """Take in columns (pair, measure) of one layer, all with a value per vector.

        `groups` says which vectors belong together; by default each stands alone.
        """
        values = torch.stack(list(columns.values()), dim=1)
        groups = torch.arange(len(values)) if groups is None else groups
        vectors = Documents(groups)
        degrees, variances = freedom(vectors.sizes), vectors.spread(values)[1].tolist()
        for (pair, measure), estimate, variance in zip(
            columns, vectors.means(values), variances, strict=True
        ):
            row = {"layer": block, "pair": pair, "reading": reading, "measure": measure}
            self.rows.append({**row, **_without_documents(estimate.to_dict())})
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


def _without_documents(row: Row) -> Row:
    return {key: value for key, value in row.items() if key != "documents"}


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


def interval(row: Row, form: str = "{:.3f}") -> str:
    """A value with its interval, for sentences."""
    value = form.format(row["value"])
    if row.get("low") is None or row.get("high") is None:
        return f"{value} (no interval)"
    return f"{value} ({form.format(row['low'])} to {form.format(row['high'])})"
