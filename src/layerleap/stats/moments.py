"""Moments: all that a linear map needs to know about the data, in constant memory.

In: batches of vectors, one tensor per layer, or per side of the parts of blocks.
Out: sums and cross products, additive: moments of parts add up to moments of the whole,
in any order, on any number of machines.

Sums are float64. With unit-free states of any size, a covariance then keeps about eight
digits even where a mean is 1e4 standard deviations away from zero.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from layerleap.errors import BadArtifact, BadSettings, NotFinite, WrongModel
from layerleap.files import whole_file

FORMAT = 1
BUFFER = 1024  # rows gathered before the products are taken, at most: large products are fast

Pairs = Literal["final", "all", "couples"]
LAYOUTS: tuple[Pairs, ...] = ("final", "all", "couples")
HELD = {
    "final": "every layer to the last",
    "all": "every pair src < dst",
    "couples": "every even vector to the next",
}


class Moments:
    """Running sums over rows of h[0] .. h[n_layers].

    n         rows seen
    sums[l]   sum of h[l]                                  (n_layers + 1, d)
    cross[s]  h[s]^T [h[s], h[t1], h[t2], ...]             (d, (1 + targets) * d)
              with targets t = n_layers alone, or every later layer

    With pairs "couples" the vectors are x0, y0, x1, y1, ...: each even one has the next as its
    only target. An odd one is the source of nothing, so instead of a Gram matrix its entry of
    `cross` holds just the squares that R2 needs, (1, d).
    """

    def __init__(
        self,
        n_layers: int,
        d_model: int,
        pairs: Pairs = "final",
        names: Sequence[str] | None = None,
    ) -> None:
        """Nothing seen yet.

        Args:
            n_layers: the number of the last vector; vectors are counted from 0.
            d_model: entries of each vector.
            pairs: which maps the moments are for.
            names: what to call each vector in errors; "layer 0" and so on when None.
        """
        if pairs == "couples" and n_layers % 2 == 0:
            raise BadSettings(f"{n_layers + 1} vectors are no couples; an even number was wanted")
        self.n_layers, self.d_model, self.pairs = n_layers, d_model, pairs
        self.names = names or [f"layer {layer}" for layer in range(n_layers + 1)]
        self.n = 0
        self.sums = torch.zeros(n_layers + 1, d_model, dtype=torch.float64)
        self.cross = [
            torch.zeros(
                d_model if self.has_gram(src) else 1,
                (1 + len(self.targets(src))) * d_model,
                dtype=torch.float64,
            )
            for src in range(n_layers + 1)
        ]
        self._filled = 0  # rows waiting to be multiplied

    def targets(self, src: int) -> list[int]:
        """The layers that maps from `src` can be fitted to."""
        if self.pairs == "couples":
            return [src + 1] if self.has_gram(src) else []
        if src == self.n_layers:
            return []
        return [self.n_layers] if self.pairs == "final" else list(range(src + 1, self.n_layers + 1))

    def has_gram(self, vector: int) -> bool:
        """True if a vector's products with itself are kept, and not its squares alone."""
        return self.pairs != "couples" or vector % 2 == 0

    def add(self, states: Sequence[Tensor]) -> None:
        """Take in one batch: states[l] holds the rows of h[l]."""
        if len(states) != self.n_layers + 1:
            raise BadSettings(f"{len(states)} layers of states; {self.n_layers + 1} were wanted")
        wanted = (len(states[0]), self.d_model)
        for name, h in zip(self.names, states, strict=True):
            if tuple(h.shape) != wanted:
                raise BadSettings(
                    f"states of {name} have shape {tuple(h.shape)}; {wanted} was wanted"
                )
        self._check_finite(states)
        seen, n_rows = 0, wanted[0]
        while seen < n_rows:
            taken = min(n_rows - seen, len(self._waiting) - self._filled)
            place = self._waiting[self._filled : self._filled + taken]
            # Layer by layer, widened on the way: no second copy of the whole batch.
            for layer, h in enumerate(states):
                columns = place[:, layer * self.d_model : (layer + 1) * self.d_model]
                columns.copy_(h.detach()[seen : seen + taken])
            self._filled += taken
            seen += taken
            if self._filled == len(self._waiting):
                self._multiply()

    @cached_property
    def _waiting(self) -> Tensor:
        """Rows of all layers side by side, waiting to be multiplied: (row, (n_layers + 1) * d).

        Of fixed size, so that memory does not depend on batches and products not on their cut.
        """
        width = (self.n_layers + 1) * self.d_model
        return torch.empty(min(BUFFER, max(64, 2**24 // width)), width, dtype=torch.float64)

    def _check_finite(self, states: Sequence[Tensor]) -> None:
        for name, h in zip(self.names, states, strict=True):
            if not torch.isfinite(h).all():
                raise NotFinite(
                    f"NaN or infinite states at {name} after {self.n + self._filled} good "
                    "rows; run the model in float32 or bfloat16 and look for broken weights or "
                    "inputs"
                )

    def _multiply(self) -> None:
        """Turn the waiting rows into products."""
        if self._filled == 0:
            return
        rows = self._waiting[: self._filled]
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
                self.cross[src].addmm_(h.T, self._with_last(rows, h, src))
            else:  # targets lie side by side already: all of them in one product, no copy
                self.cross[src].addmm_(h.T, rows[:, start : start + self.cross[src].shape[1]])

    def _with_last(self, rows: Tensor, h: Tensor, src: int) -> Tensor:
        return h if src == self.n_layers else torch.cat([h, rows[:, -self.d_model :]], dim=1)

    @property
    def rows(self) -> int:
        """Rows seen, waiting ones included."""
        return self.n + self._filled

    def settle(self) -> "Moments":
        """Count every row that was added; read-outs need it. Returns itself."""
        self._multiply()
        return self

    def xx(self, src: int) -> Tensor:
        """Sum of h[src] h[src]^T."""
        self.settle()
        if not self.has_gram(src):
            raise BadSettings(
                f"no products of {self.names[src]} with itself: it is the target of a couple, and "
                "only its squares are kept"
            )
        return self.cross[src][:, : self.d_model]

    def squares(self, vector: int) -> Tensor:
        """Sum of squares of each coordinate of h[vector]."""
        self.settle()
        return self.xx(vector).diagonal() if self.has_gram(vector) else self.cross[vector][0]

    def xy(self, src: int, dst: int) -> Tensor:
        """Sum of h[src] h[dst]^T."""
        self.settle()
        if dst not in self.targets(src):
            raise BadSettings(
                f"no moments from layer {src} to layer {dst}: these hold {HELD[self.pairs]}"
            )
        start = (1 + self.targets(src).index(dst)) * self.d_model
        return self.cross[src][:, start : start + self.d_model]

    def merge(self, other: "Moments") -> "Moments":
        """Moments of both data sets together, as a new object."""
        mine, theirs = self.shape, other.shape
        if mine != theirs:
            raise WrongModel(f"moments of shape {theirs} cannot be added to moments of {mine}")
        merged = Moments(self.n_layers, self.d_model, self.pairs, self.names)
        merged.n = self.settle().n + other.settle().n
        merged.sums = self.sums + other.sums
        merged.cross = [a + b for a, b in zip(self.cross, other.cross, strict=True)]
        return merged

    @property
    def shape(self) -> tuple[int, int, str]:
        """What must agree for two moments to be added."""
        return self.n_layers, self.d_model, self.pairs

    def tensors(self) -> dict[str, Tensor]:
        """Everything, waiting rows included, so that a resumed run adds in the same order."""
        found = {"n": torch.tensor(self.n), "sums": self.sums}
        found |= {f"cross.{src}": value for src, value in enumerate(self.cross)}
        if self._filled:
            found["waiting"] = self._waiting[: self._filled].clone()
        return found

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], shape: tuple[int, int, Pairs]
    ) -> "Moments":
        """The inverse of `tensors`."""
        if shape[2] not in LAYOUTS:
            raise BadArtifact(f"pairs {shape[2]!r} are unknown; one of {LAYOUTS} was wanted")
        if shape[2] == "couples" and shape[0] % 2 == 0:
            raise BadArtifact(f"{shape[0] + 1} vectors are no couples; make it again")
        moments = cls(*shape)
        _require_like("n", tensors["n"], torch.tensor(0))
        moments.n = int(tensors["n"])
        sums = {"sums": moments.sums} | {f"cross.{s}": m for s, m in enumerate(moments.cross)}
        for key, empty in sums.items():
            _require_like(key, tensors[key], empty)
            empty.copy_(tensors[key])
        if "waiting" in tensors:
            # Never as many as there is room for: such rows would have been multiplied.
            rows = min(len(tensors["waiting"]), len(moments._waiting) - 1)
            _require_like("waiting", tensors["waiting"], moments._waiting[:rows])
            moments._waiting[:rows] = tensors["waiting"]
            moments._filled = rows
        return moments


def _require_like(key: str, found: Tensor, wanted: Tensor) -> None:
    """Exactly that shape: torch would stretch a row or a number to any other."""
    kinds = [(tuple(tensor.shape), tensor.dtype) for tensor in (found, wanted)]
    if kinds[0] != kinds[1]:
        raise BadArtifact(f"{key} is of {kinds[0]}; {kinds[1]} was wanted, make it again")


def save_moments(path: Path, sets: Mapping[str, Moments], about: Mapping[str, Any]) -> None:
    """Write named moments and what they are about into one file, in one step."""
    tensors = {
        f"{name}/{key}": value.contiguous()
        for name, moments in sets.items()
        for key, value in moments.tensors().items()
    }
    shapes = {name: moments.shape for name, moments in sets.items()}
    header = {"format": FORMAT, "shapes": shapes, "about": about}
    header["sha256"] = content_hash(tensors, header)
    metadata = {"layerleap.moments": json.dumps(header, allow_nan=False)}
    with whole_file(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def content_hash(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    """A hash over all numbers, and over what the header says they are."""
    said = {key: value for key, value in header.items() if key != "sha256"}
    # There and back first: JSON has no tuples, and its keys are strings.
    plain = json.loads(json.dumps(said))
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode())
    for key, value in sorted(tensors.items()):
        digest.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).numpy().data)
    return digest.hexdigest()


def load_moments(path: Path) -> tuple[dict[str, Moments], dict[str, Any]]:
    """Read what `save_moments` wrote; anything else is a `BadArtifact`."""
    with _only_moments(path), safe_open(path, framework="pt") as file:
        header = _header(path, file)
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if header.get("sha256") != content_hash(tensors, header):
            raise BadArtifact(f"{path} was changed since it was saved; make it again")
        sets = {}
        for name, shape in header["shapes"].items():
            own = {
                k.removeprefix(f"{name}/"): tensors[k] for k in tensors if k.startswith(f"{name}/")
            }
            sets[name] = Moments.from_tensors(own, tuple(shape))
        return sets, header["about"]


def load_about(path: Path) -> dict[str, Any]:
    """Only what a file of moments says it is about, without reading the numbers."""
    with _only_moments(path), safe_open(path, framework="pt") as file:
        return dict(_header(path, file)["about"])


@contextmanager
def _only_moments(path: Path) -> Iterator[None]:
    try:
        yield
    except (
        SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError, RuntimeError
    ) as error:  # fmt: skip
        raise BadArtifact(f"{path} is missing, truncated or no moments file ({error})") from error


def _header(path: Path, file: Any) -> dict[str, Any]:
    header = json.loads((file.metadata() or {}).get("layerleap.moments", "{}"))
    number = header.get("format") if isinstance(header, dict) else None
    if number != FORMAT:
        raise BadArtifact(
            f"{path} holds format {number}; format {FORMAT} was wanted, make it again"
        )
    found: dict[str, Any] = header
    return found
