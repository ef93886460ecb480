"""Moments: everything a linear map needs to know about the data, in constant memory.

In: batches of hidden states, one tensor per layer (or per input and output of a block's parts).
Out: sums and cross products. They are additive: the moments of shards add up to the moments of
the whole, in any order, on any number of machines.

Sums are float64, so a covariance keeps about eight digits even if the mean is 1e4 standard
deviations away from zero.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from layerleap.errors import BadArtifact, BadSettings, NotFinite, WrongModel, check_choice
from layerleap.stats.tensor_file import TensorFile

FILE = TensorFile("moments", 2)
BUFFER = 1024  # rows gathered before they are multiplied: large matrix products are fast

Pairs = Literal["final", "all", "parts"]
LAYOUTS: dict[Pairs, str] = {
    "final": "every layer to the last",
    "all": "every pair src < dst",
    "parts": "the input of each part to its output",
}


class Moments:
    """Running sums over rows of h[0] .. h[n_layers].

    n         rows multiplied so far
    sums[l]   sum of h[l]                                  (n_layers + 1, d)
    cross[s]  h[s]^T [h[s], h[t1], h[t2], ...]             (d, (1 + targets) * d)
              the targets t are the last layer only, or every later layer

    With pairs "parts" the vectors are x0, y0, x1, y1, ...: the input and the output of each part
    of a block. Each input has one target, its output. An output is never a source, so `cross`
    holds only its squares, which R2 needs: (1, d).
    """

    def __init__(
        self, n_layers: int, d_model: int, pairs: Pairs = "final", names: Sequence[str] = ()
    ) -> None:
        """Start with no rows.

        Args:
            n_layers: index of the last vector; vectors are counted from 0.
            names: what error messages call each vector; "layer 0" and so on by default.
        """
        check_choice(pairs, LAYOUTS, "pairs")
        if pairs == "parts" and n_layers % 2 == 0:
            raise BadSettings(
                f"{n_layers + 1} vectors cannot be inputs and outputs; expected an even number"
            )
        self.n_layers, self.d_model, self.pairs = n_layers, d_model, pairs
        self.names = names or [f"layer {layer}" for layer in range(n_layers + 1)]
        self.n = 0
        self.sums = torch.zeros(n_layers + 1, d_model, dtype=torch.float64)
        rows = [d_model if self.has_gram(src) else 1 for src in range(n_layers + 1)]
        self.cross = [
            torch.zeros(n, (1 + len(self.targets(src))) * d_model, dtype=torch.float64)
            for src, n in enumerate(rows)
        ]
        self._filled = 0  # rows in the buffer

    def targets(self, src: int) -> list[int]:
        """The layers that maps from `src` can be fitted to."""
        if self.pairs == "parts":
            return [src + 1] if self.has_gram(src) else []
        if src == self.n_layers:
            return []
        return [self.n_layers] if self.pairs == "final" else list(range(src + 1, self.n_layers + 1))

    def has_gram(self, vector: int) -> bool:
        """True if the vector's full Gram matrix is kept, False if only its squares are."""
        return self.pairs != "parts" or vector % 2 == 0

    def add(self, states: Sequence[Tensor]) -> None:
        """Add one batch: states[l] holds the rows of h[l]."""
        if len(states) != self.n_layers + 1:
            raise BadSettings(f"got {len(states)} layers of states; expected {self.n_layers + 1}")
        shape = (len(states[0]), self.d_model)
        for name, h in zip(self.names, states, strict=True):
            if tuple(h.shape) != shape:
                raise BadSettings(f"states of {name} have shape {tuple(h.shape)}; expected {shape}")
            if not torch.isfinite(h).all():
                raise NotFinite(
                    f"NaN or infinite states at {name} after {self.rows} good rows; run the "
                    "model in float32 or bfloat16, and check its weights and inputs"
                )
        start, n_rows = 0, shape[0]
        while start < n_rows:
            count = min(n_rows - start, len(self._buffer) - self._filled)
            target = self._buffer[self._filled : self._filled + count]
            # Layer by layer, converted on the way: no second copy of the whole batch.
            for layer, h in enumerate(states):
                columns = target[:, layer * self.d_model : (layer + 1) * self.d_model]
                columns.copy_(h.detach()[start : start + count])
            self._filled += count
            start += count
            if self._filled == len(self._buffer):
                self.flush()

    @cached_property
    def _buffer(self) -> Tensor:
        """Rows not multiplied yet, all layers side by side: (row, (n_layers + 1) * d).

        The size is fixed, so neither memory nor rounding depends on how rows are batched.
        """
        width = (self.n_layers + 1) * self.d_model
        return torch.empty(min(BUFFER, max(64, 2**24 // width)), width, dtype=torch.float64)

    def flush(self) -> "Moments":
        """Multiply the rows that are still in the buffer. Returns self."""
        if self._filled == 0:
            return self
        rows = self._buffer[: self._filled]
        self.n += len(rows)
        self._filled = 0
        self.sums += rows.sum(0).view_as(self.sums)
        width = self.d_model
        for src in range(self.n_layers + 1):
            start = src * width
            h = rows[:, start : start + width]
            if not self.has_gram(src):
                self.cross[src] += h.square().sum(0)
            elif self.pairs == "final":
                last = [] if src == self.n_layers else [rows[:, -width:]]
                self.cross[src].addmm_(h.T, torch.cat([h, *last], dim=1))
            else:  # the targets are adjacent columns: one product, no copy
                self.cross[src].addmm_(h.T, rows[:, start : start + self.cross[src].shape[1]])
        return self

    @property
    def rows(self) -> int:
        """Number of rows added, including those still in the buffer."""
        return self.n + self._filled

    def __repr__(self) -> str:
        return f"Moments({self.rows} rows of {self.n_layers + 1} x {self.d_model}, {self.pairs})"

    def xx(self, src: int) -> Tensor:
        """Sum of h[src] h[src]^T."""
        self.flush()
        if not self.has_gram(src):
            raise BadSettings(
                f"{self.names[src]} is the output of a part: only its squares are kept, not its "
                "products with itself"
            )
        return self.cross[src][:, : self.d_model]

    def squares(self, vector: int) -> Tensor:
        """Sum of squares of each coordinate of h[vector]."""
        self.flush()
        return self.xx(vector).diagonal() if self.has_gram(vector) else self.cross[vector][0]

    def xy(self, src: int, dst: int) -> Tensor:
        """Sum of h[src] h[dst]^T."""
        self.flush()
        if dst not in self.targets(src):
            raise BadSettings(
                f"no moments from layer {src} to layer {dst}: these hold {LAYOUTS[self.pairs]}"
            )
        start = (1 + self.targets(src).index(dst)) * self.d_model
        return self.cross[src][:, start : start + self.d_model]

    def merge(self, other: "Moments") -> "Moments":
        """Moments of both data sets together, as a new object."""
        if self.shape != other.shape:
            raise WrongModel(
                f"moments of shape {other.shape} cannot be added to moments of {self.shape}"
            )
        merged = Moments(self.n_layers, self.d_model, self.pairs, self.names)
        merged.n = self.flush().n + other.flush().n
        merged.sums = self.sums + other.sums
        merged.cross = [a + b for a, b in zip(self.cross, other.cross, strict=True)]
        return merged

    @property
    def shape(self) -> tuple[int, int, str]:
        """What must agree for two moments to be added."""
        return self.n_layers, self.d_model, self.pairs

    def tensors(self) -> dict[str, Tensor]:
        """All state. The buffer is included, so a resumed run adds rows in the same order."""
        tensors = {"n": torch.tensor(self.n), "sums": self.sums}
        tensors |= {f"cross.{src}": value for src, value in enumerate(self.cross)}
        if self._filled:
            tensors["buffer"] = self._buffer[: self._filled].clone()
        return tensors

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], shape: tuple[int, int, Pairs]
    ) -> "Moments":
        """The inverse of `tensors`."""
        if shape[2] not in LAYOUTS:
            raise BadArtifact(f"unknown pairs {shape[2]!r}; expected one of {tuple(LAYOUTS)}")
        if shape[2] == "parts" and shape[0] % 2 == 0:
            raise BadArtifact(f"{shape[0] + 1} vectors cannot be inputs and outputs; recreate it")
        moments = cls(*shape)
        _require_like("n", tensors["n"], torch.tensor(0))
        moments.n = int(tensors["n"])
        sums = {"sums": moments.sums} | {f"cross.{s}": m for s, m in enumerate(moments.cross)}
        for key, empty in sums.items():
            _require_like(key, tensors[key], empty)
            empty.copy_(tensors[key])
        if "buffer" in tensors:
            # A full buffer would have been multiplied, so there is always room for one more row.
            rows = min(len(tensors["buffer"]), len(moments._buffer) - 1)
            _require_like("buffer", tensors["buffer"], moments._buffer[:rows])
            moments._buffer[:rows] = tensors["buffer"]
            moments._filled = rows
        return moments


def _require_like(key: str, tensor: Tensor, expected: Tensor) -> None:
    """Require the exact shape and dtype: torch would broadcast a row or a number."""
    actual, needed = ((tuple(t.shape), t.dtype) for t in (tensor, expected))
    if actual != needed:
        raise BadArtifact(f"{key} has shape and dtype {actual}; expected {needed}, recreate it")


def save_moments(
    path: str | Path, sets: Mapping[str, Moments], about: Any, rows: Tensor | None = None
) -> None:
    """Write named moments, their description and optionally some rows into one file, atomically."""
    tensors = {
        f"{name}/{key}": value
        for name, moments in sets.items()
        for key, value in moments.tensors().items()
    }
    if rows is not None:
        tensors["rows"] = rows
    shapes = {name: moments.shape for name, moments in sets.items()}
    FILE.save(path, tensors, {"shapes": shapes, "about": about})


def load_moments(path: str | Path) -> tuple[dict[str, Moments], dict[str, Any]]:
    """The moments and the description that `save_moments` wrote."""
    return load_with_rows(path)[:2]


def load_with_rows(path: str | Path) -> tuple[dict[str, Moments], dict[str, Any], Tensor | None]:
    """The moments, the description and the rows that `save_moments` wrote."""
    tensors, header = FILE.load(path)
    sets = {}
    with FILE.parsing(path):
        for name, shape in header["shapes"].items():
            size = len(name) + 1
            named = {key[size:]: v for key, v in tensors.items() if key.startswith(f"{name}/")}
            sets[name] = Moments.from_tensors(named, tuple(shape))
        return sets, header["about"], tensors.get("rows")


def load_about(path: str | Path) -> dict[str, Any]:
    """The description in a file of moments, without reading the numbers."""
    with FILE.parsing(path):
        return dict(FILE.header(path)["about"])
