"""PatchGrid: what each cell of a patch grid carries, as a table and as a heat map."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from layerleap.errors import BadSettings
from layerleap.lens.intervals import Documents, finite
from layerleap.results.base import Result
from layerleap.results.cells import MINUS, Grid, grid_of
from layerleap.results.colours import signed_colour
from layerleap.results.columns import Column, Row, Table
from layerleap.results.head import PageHead

PLACE = {
    "state": "states",
    "attn": "outputs of attention",
    "ffn": "outputs of FFNs",
    "head": "heads",
    "neuron": "neurons",
}
HOW = {
    "denoise": "clean put into the corrupt run: what is enough",
    "noise": "corrupt put into the clean run: what is needed",
}
STRONGEST = 12  # cells listed under the heat map
WIDEST = 80  # columns that a heat map has room for; more are only listed
SHADES = 7  # of the scale
WEAK = 0.1  # of the mean difference of pairs; those below are named
LISTED = 10  # of them, and of hints


@dataclass(frozen=True, eq=False, repr=False)
class PatchGrid(Result):
    """The share of the difference between two runs that each cell carries.

    shares    (layer or block, column): 0 where patching changes nothing, 1 where it turns one run
              into the other; NaN where there is no such cell
    low, high 95 % intervals over pairs, or None for one pair
    passes    how many passes over one prompt it took
    """

    TEMPLATE: ClassVar[str] = "patch"
    KIND: ClassVar[str] = "patch"
    TABLES: ClassVar[tuple[Table, ...]] = (
        Table("cells", "", lambda grid: grid._lines(), keys=("layer", "share")),
    )

    model: str
    at: str
    how: str
    method: str
    metric: str
    layers: Sequence[int]  # of states; else blocks
    columns: Sequence[str]  # positions, heads or neurons
    tokens: Sequence[tuple[str, str]]  # by position, of the clean and the corrupt prompt
    shares: Tensor
    clean: float  # the metric of the clean run
    corrupt: float
    passes: float
    correlation: float | None = None  # ranks of the gradient's cells with those of exact ones
    checked_cells: int = 0
    low: Tensor | None = None
    high: Tensor | None = None
    pairs: int = 1
    remarks: Sequence[str] = ()

    @property
    def notes(self) -> Sequence[str]:
        """What limits it, a sentence each."""
        if self.method == "exact":
            return self.remarks
        seen = (
            "not compared with exact cells"
            if self.correlation is None
            else f"rank correlation {self.correlation:.2f} with {self.checked_cells} exact cells"
        )
        return [f"Estimated from the gradient: {seen}.", *self.remarks]

    @property
    def row_name(self) -> str:
        """What a row is."""
        return "layer" if self.at == "state" else "block"

    @property
    def is_by_position(self) -> bool:
        """True if a column is a position."""
        return self.at in ("state", "attn", "ffn") and len(self.columns) > 0

    def best(self, n: int = STRONGEST) -> list[Row]:
        """The cells with the largest shares, positive or negative."""
        lines = [line for line in self._lines() if line["share"]]
        return sorted(lines, key=lambda line: -abs(line["share"]))[:n]

    def _lines(self) -> Iterator[Row]:
        for row, layer in enumerate(self.layers):
            for column, name in enumerate(self.columns):
                share = float(self.shares[row, column])
                if share == share:
                    place = int(name) if name.lstrip("-").isdigit() else name
                    line: Row = {self.row_name: layer, self._column_name: place}
                    if self.is_by_position and (token := self._token(name)):
                        line["token"] = token
                    line["share"] = share
                    if self.low is not None and self.high is not None:
                        ends = (self.low[row, column], self.high[row, column])
                        line["low"], line["high"] = (finite(float(end)) for end in ends)
                    yield line

    @property
    def _column_name(self) -> str:
        return "position" if self.is_by_position else self.at

    def _token(self, name: str) -> str:
        if not self.tokens or not name.lstrip("-").isdigit():
            return ""
        clean, corrupt = self.tokens[int(name)]
        return clean if clean == corrupt else f"{clean} / {corrupt}"

    def facts(self) -> Row:
        """What was patched, and how."""
        names = ("model", "at", "how", "method", "metric", "clean", "corrupt", "pairs", "passes")
        tokens = [{"clean": a, "corrupt": b} for a, b in self.tokens]
        checked = {"rank_correlation": self.correlation, "checked_cells": self.checked_cells}
        return {**{name: getattr(self, name) for name in names}, **checked, "tokens": tokens}

    def short(self) -> str:
        """What it is, in one line."""
        return (
            f"PatchGrid({self.how} {PLACE[self.at]} of {self.model}, {self.metric}: "
            f"{_signed(self.clean)} clean, {_signed(self.corrupt)} corrupt{self._of_pairs})"
        )

    @property
    def _of_pairs(self) -> str:
        return "" if self.pairs == 1 else f", mean of {self.pairs} pairs"

    def headline(self) -> str:
        """One line above everything."""
        return (
            f"{self.model}, {PLACE[self.at]} ({HOW[self.how]}). {self.metric}: "
            f"{_signed(self.clean)} clean, {_signed(self.corrupt)} corrupt{self._of_pairs}"
        )

    def legend(self) -> str:
        """How to read it, in one line."""
        text = (
            "share: 0 where patching this cell alone changes nothing, 1 where it turns one run "
            "into the other"
        )
        return text if self.pairs == 1 else f"{text}; 95 % intervals over pairs"

    def grids(self, width: int | None = None) -> list[Grid]:
        """The strongest cells."""
        shown = [Column(self.row_name), Column(self._column_name)]
        shown += [Column("token")] if self.is_by_position and self.tokens else []
        shown.append(Column("share", "share", "{:.3f}", low="low", high="high"))
        best = self.best()
        title = f"The {len(best)} strongest of {int((~self.shares.isnan()).sum()):,} cells"
        table = Table("best", title, lambda _: best, tuple(shown))
        tokens = self._tokens_table()
        return [grid_of(table, self), *([grid_of(tokens, self)] if tokens else [])]

    def _tokens_table(self) -> Table | None:
        """Where the prompts differ, if there is one pair."""
        differ = [
            {"position": place, "clean": clean, "corrupt": corrupt}
            for place, (clean, corrupt) in enumerate(self.tokens)
            if clean != corrupt
        ]
        columns = (Column("position"), Column("clean"), Column("corrupt"))
        if not differ:
            return None
        title = f"Where the prompts of {len(self.tokens)} tokens differ"
        return Table("tokens", title, lambda _: differ, columns)

    def head(self) -> PageHead:
        """What a page around it says."""
        return PageHead(
            "activation patching",
            ("What carries the difference in ", self.model, ""),
            [f"metric: {self.metric}", f"{self.how}, {self.method}", f"pairs: {self.pairs}"],
            f"By {self.row_name} and {self._column_name}",
            "Each cell is patched alone; the others run as they would."
            if self.method == "exact"
            else "Each cell is a linear estimate from the gradient of what patching it alone does.",
        )

    def picture(self) -> Row:
        """Rectangles of the heat map, its labels and its scale; no map where columns are many."""
        n_rows, n_columns = self.shares.shape
        if n_columns > WIDEST:
            return {"map": None}
        cell = max(9, min(17, 560 // n_rows)), max(11, min(34, 720 // n_columns))
        known = self.shares[~self.shares.isnan()]
        most = max(float(known.abs().max()) if len(known) else 1.0, 1e-9)
        cells = []
        for row, column in (~self.shares.isnan()).nonzero().tolist():
            share = float(self.shares[row, column])
            title = (
                f"{self.row_name} {self.layers[row]}, {self._column_name} {self.columns[column]}"
            )
            y = (n_rows - 1 - row) * cell[0]
            cells.append(
                (column * cell[1], y, signed_colour(share / most), f"{title}: {share:.3f}")
            )
        step = max(1, -(-n_rows // 16))
        labels = [self._label(name) for name in self.columns]
        longest = max(2, *(len(clean) + len(corrupt) for clean, corrupt in labels))
        return {
            "map": {
                "cell": (cell[1], cell[0]),
                "cells": cells,
                "width": n_columns * cell[1],
                "height": n_rows * cell[0],
                "rows": [
                    ((n_rows - 1 - row + 0.5) * cell[0], layer)
                    for row, layer in enumerate(self.layers)
                    if row % step == 0
                ],
                "row_name": self.row_name,
                "column_name": "token"
                if self.is_by_position and self.tokens
                else self._column_name,
                "labels": [((n + 0.5) * cell[1], *label) for n, label in enumerate(labels)],
                "slanted": longest > 2,
                "below": 14 + (round(longest * 4.6) if longest > 2 else 0),
                "scale": [
                    (place, signed_colour(2 * place / (SHADES - 1) - 1)) for place in range(SHADES)
                ],
                "most": f"{most:.2f}",
            }
        }

    def _label(self, name: str) -> tuple[str, str]:
        """The words under a column: the token, and the corrupt one where it is another."""
        if not self.is_by_position or not self.tokens or not name.lstrip("-").isdigit():
            return name, ""
        clean, corrupt = self.tokens[int(name)]
        return clean, "" if clean == corrupt else corrupt


def mean_grid(grids: Sequence[PatchGrid], remarks: Sequence[str]) -> PatchGrid:
    """One grid of several pairs, with intervals; pairs must have the same cells.

    Pairs count by how far their runs are apart, so that none with a small difference rules.
    """
    first, *rest = grids
    remarks = [
        *remarks,
        *list(dict.fromkeys(hint for one in grids for hint in one.remarks))[:LISTED],
    ]
    if not rest:
        return replace(first, remarks=tuple(remarks))
    for one in rest:
        require_same_columns(len(first.columns), len(one.columns))
    sizes = torch.tensor([abs(one.clean - one.corrupt) for one in grids]).double()
    every = torch.stack([one.shares for one in grids]).flatten(1)
    shares, low, high = Documents(torch.arange(len(grids))).of(
        lambda sums: sums[..., 1:] / sums[..., :1],
        torch.cat([sizes[:, None], sizes[:, None] * every], 1),
    )
    weak = [str(n) for n, size in enumerate(sizes, 1) if size < WEAK * sizes.mean()]
    if weak:
        remarks = [
            *remarks,
            f"{len(weak)} of {len(grids)} pairs differ by less than {WEAK:.0%} of the mean and "
            f"hardly count: {', '.join(weak[:LISTED])}{' ...' * (len(weak) > LISTED)}",
        ]

    correlations = [one.correlation for one in grids if one.correlation is not None]
    tokens = first.tokens if all(one.tokens == first.tokens for one in rest) else ()
    metrics = {one.metric for one in grids}
    return replace(
        first,
        shares=shares.view_as(first.shares),
        low=low.view_as(first.shares),
        high=high.view_as(first.shares),
        pairs=len(grids),
        tokens=tokens,
        metric=first.metric if len(metrics) == 1 else first.metric.partition("(")[0],
        clean=sum(one.clean for one in grids) / len(grids),
        corrupt=sum(one.corrupt for one in grids) / len(grids),
        passes=sum(one.passes for one in grids),
        correlation=sum(correlations) / len(correlations) if correlations else None,
        checked_cells=sum(one.checked_cells for one in grids),
        remarks=tuple(remarks),
    )


def require_same_columns(first: int, other: int) -> None:
    """Refuse a pair with another number of columns than the first."""
    if first != other:
        raise BadSettings(
            f"it has {other} columns of positions, and the first pair {first}; give pairs of equal "
            "length, positions='all', or positions from the end as in positions=[-1], or patch "
            "heads"
        )


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's: the correlation of ranks, with mean ranks for equal values."""
    ranks = []
    for values in (torch.tensor(a).double(), torch.tensor(b).double()):
        below = (values[:, None] > values).double().sum(1)
        same = (values[:, None] == values).double().sum(1)
        own = below + (same - 1) / 2
        ranks.append(own - own.mean())
    size = ranks[0].norm() * ranks[1].norm()
    return float(ranks[0] @ ranks[1] / size) if size > 0 else None


def _signed(value: float) -> str:
    return f"{value:.3g}".replace("-", MINUS)
