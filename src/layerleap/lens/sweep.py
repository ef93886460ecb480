"""One sweep over the logits of all layers at a few rows: what `Readings` keep of them.

In: logits, those of the last layer first. Out: `LensReadings`: top tokens, agreement with the last
layer, which is the model's answer, and divergence from it. Nothing V-sized is kept but the answer.

`metrics.Reference` compares in more ways. Here are only those of `LensReadings`, with as few passes
over the logits as they need: one for the top tokens, one for the norm, one for the divergence.
"""

import torch
from torch import Tensor

from layerleap.lens.readings import LensReadings
from layerleap.lens.top import top_k

CACHED = 2**18  # entries that are exponentiated at a time: 1 MB in float32
COLUMNS = 2**11  # terms of a mean that are added up in one product


class Sweep:
    """The readings of one lens, layer after layer, at the same rows."""

    def __init__(self, n_rows: int, k: int) -> None:
        """Start without layers; the top `k` tokens will be kept of each."""
        self.n_rows, self.k = n_rows, k
        self._parts: list[tuple[Tensor, ...]] = []

    def add(self, logits: Tensor) -> None:
        """Add the logits of one layer or several, each with all rows: (layer x row, d_vocab)."""
        values, ids = top_k(logits, self.k)
        log_norm = _log_norm(logits, values[:, 0])
        n, top = self.n_rows, ids[:, 0]
        if not self._parts:
            self._answer, self._top, self._log_norm = logits[:n].clone(), top[:n], log_norm[:n]
            self._p = (self._answer - self._log_norm[:, None]).exp_()
        expected = self._expected(logits)
        rows = torch.arange(len(logits), device=logits.device) % n
        surprisal = self._log_norm[rows] - self._answer[rows, top]
        probs, agrees = (values - log_norm[:, None]).exp(), top == self._top[rows]
        columns = ids, probs, agrees, log_norm - expected, surprisal
        self._parts.append(tuple(column.unflatten(0, (-1, n)) for column in columns))

    def _expected(self, logits: Tensor) -> Tensor:
        """The mean of each row of logits under the answer's probabilities.

        One product serves all layers of a row. It covers few columns, because rounding errors grow
        with the number of terms that are added one by one.
        """
        n, total = self.n_rows, torch.zeros(len(logits), device=logits.device)
        for some, p in zip(logits.split(COLUMNS, 1), self._p.split(COLUMNS, 1), strict=True):
            total += torch.stack([some[row::n] @ p[row] for row in range(n)], 1).flatten()
        return total

    def track(self) -> LensReadings:
        """What was read, with the last layer at its end."""
        columns = (torch.cat(parts).roll(-1, 0).cpu() for parts in zip(*self._parts, strict=True))
        ids, probs, agrees, cross, surprisal = columns
        # A divergence is the cross-entropy beyond the entropy of the answer, which is that of the
        # answer with itself. Clamped because rounding can push it slightly below zero.
        return LensReadings(ids, probs, agrees, (cross - cross[-1]).clamp_min(0), surprisal)


def _log_norm(logits: Tensor, highest: Tensor) -> Tensor:
    """`logsumexp` of each row whose highest value is known, a few rows at a time."""
    few = max(1, CACHED // logits.shape[-1])
    pairs = zip(logits.split(few), highest[:, None].split(few), strict=True)
    return highest + torch.cat([(some - high).exp_().sum(-1) for some, high in pairs]).log()
