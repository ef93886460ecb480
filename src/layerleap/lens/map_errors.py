"""How well maps carry states from layer to layer: squared errors and R2 for all pairs.

In: states of held-out rows, and a bank. Out: `MapErrors`, and a table with intervals.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from layerleap.lens.intervals import finite, jackknife
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.map import IdentityMap
from layerleap.stream.examples import Batch

BUFFER_ROWS = 512  # rows collected before errors are computed
GROUPS = 32  # documents are dealt into at most this many groups for the intervals of R2


class MapErrors:
    """Squared errors of the bank's maps and of the identity, per coordinate and document group.

    Intervals are over documents, or over groups of them where there are more than GROUPS documents:
    sums by document, pair and coordinate would not fit into memory. R2 is a ratio whose spread is
    itself estimated: few documents put it too low on average. So its interval lies around the value
    less its bias, and is stretched to contain the value.

    R2(src, dst) is the plain average over coordinates of 1 - error / spread, as in the paper;
    `weighted` weights each coordinate by its spread. Coordinates that never vary are left out of
    both. First positions are also counted separately, because their states are often outliers of
    enormous norm.
    """

    def __init__(self, bank: ShortcutBank) -> None:
        self.bank, self.n_layers = bank, bank.n_layers
        self.pairs = sorted(bank.maps)
        self.group_of: dict[int, int] = {}
        # First axis of the tensors below: GROUPS groups, then the first positions once more.
        shape = (GROUPS + 1, bank.d_model)
        self.n = torch.zeros(GROUPS + 1, dtype=torch.float64)
        self.sums = torch.zeros(self.n_layers + 1, 2, *shape, dtype=torch.float64)  # y and y^2
        self.kind = bank.kind  # beside the identity
        self.errors = {
            name: {pair: torch.zeros(shape, dtype=torch.float64) for pair in self.pairs}
            for name in (self.kind, IdentityMap.kind)
        }
        self._buffer: list[tuple[dict[int, Tensor], Tensor]] = []

    def add(self, states: Mapping[int, Tensor], batch: Batch) -> None:
        """Add the rows of one batch."""
        groups = [
            self.group_of.setdefault(document, len(self.group_of) % GROUPS)
            for document in batch.documents.tolist()
        ]
        member = torch.zeros(len(groups), GROUPS + 1, dtype=torch.float64)
        member[torch.arange(len(groups)), groups] = 1
        member[:, GROUPS] = (batch.positions == 0).double()
        h = {layer: value.float().cpu() for layer, value in states.items()}
        if h[0].dim() == 3:  # a row is a whole sequence, and maps act on each of its states
            member = member.repeat_interleave(h[0].shape[1], 0)
            h = {layer: value.flatten(0, 1) for layer, value in h.items()}
        self._buffer.append((h, member))
        if sum(len(rows) for _, rows in self._buffer) >= BUFFER_ROWS:
            self._flush()

    def _flush(self) -> None:
        """Add up the buffered rows; many at a time, because every map is read from memory."""
        if not self._buffer:
            return
        member = torch.cat([rows for _, rows in self._buffer]).T  # (group, row)
        layers = range(self.n_layers + 1)
        h = {layer: torch.cat([states[layer] for states, _ in self._buffer]) for layer in layers}
        self._buffer = []
        self.n += member.sum(1)
        for layer, value in h.items():
            exact = value.double()
            self.sums[layer, 0] += member @ exact
            self.sums[layer, 1] += member @ exact.square()
        for src, dst in self.pairs:
            predicted = {IdentityMap.kind: h[src], self.kind: self.bank[src, dst](h[src])}
            for name, y in predicted.items():
                self.errors[name][src, dst] += member @ (y - h[dst]).square().double()

    def table(self) -> list[dict[str, Any]]:
        """One row per map and pair of layers."""
        weights, n = self._weights()
        table = []
        for name, by_pair in self.errors.items():
            for (src, dst), errors in by_pair.items():
                error, spread = weights @ errors, self._spread(dst, weights, n)
                r2 = _average(error, spread)
                varies = ~spread[0].isnan()
                weighted = 1 - error[0][varies].sum() / spread[0][varies].sum()
                row = {"map": name, "src": src, "dst": dst, "weighted": finite(weighted.item())}
                row["no_first"] = finite(r2[1].item()) if n[1] > 1 else None
                table.append({**row, **self._estimate("r2", r2, n, is_r2=True)})
        return table

    def leads(self) -> list[dict[str, Any]]:
        """R2 of the maps minus R2 of the identity by pair of layers, with paired intervals."""
        weights, n = self._weights()
        rows = []
        for src, dst in self.pairs:
            spread = self._spread(dst, weights, n)
            mapped, plain = (
                _average(weights @ self.errors[name][src, dst], spread)
                for name in (self.kind, IdentityMap.kind)
            )
            rows.append({"src": src, "dst": dst, **self._estimate("value", mapped - plain, n)})
        return rows

    def _weights(self) -> tuple[Tensor, Tensor]:
        """Weights of groups, one row per way of counting; and the rows counted so.

        The ways: everything, without first positions, and without each group.
        """
        self._flush()
        used = min(GROUPS, len(self.group_of))
        weights = torch.ones(2 + used, GROUPS + 1, dtype=torch.float64)
        weights[:, GROUPS] = 0
        weights[1, GROUPS] = -1
        weights[2:, :used] -= torch.eye(used, dtype=torch.float64)
        return weights, weights @ self.n

    def _spread(self, dst: int, weights: Tensor, n: Tensor) -> Tensor:
        """Squared deviations from the mean, NaN for a coordinate that never varies."""
        y, yy = (weights @ self.sums[dst, power] for power in (0, 1))
        spread = yy - y.square() / n[:, None]
        return spread.where(spread > 1e-12 * yy, torch.nan)

    def _estimate(
        self, key: str, values: Tensor, n: Tensor, *, is_r2: bool = False
    ) -> dict[str, Any]:
        """The value of all rows and its 95 % interval; no interval from one document.

        Nor if too few rows are left to vary without one of them. That of R2 is found for the
        logarithm of what is not explained, so it stays below 1.
        """
        value, left_out = values[0], values[2:]
        sizes = n[0] - n[2:]
        if is_r2:
            unexplained = jackknife((1 - value).log(), (1 - left_out).log(), sizes, centred=True)
            high, low = (1 - end.exp() for end in unexplained)
        else:
            low, high = jackknife(value, left_out, sizes, centred=True)
        return {
            key: finite(value.item()),
            "low": finite(torch.minimum(low, value).item()),
            "high": finite(torch.maximum(high, value).item()),
            "rows": int(n[0]),
            "documents": len(self.group_of),
            "groups": min(GROUPS, len(self.group_of)),
        }


def _average(error: Tensor, spread: Tensor) -> Tensor:
    """R2 averaged over coordinates; those that never vary are left out."""
    return (1 - error / spread).nanmean(-1)
