"""Saturation: the layer from which the token at each rank no longer changes.

In: a wrapped model, named lenses, and batches with positions to read.
Out: `Saturation`: for every row and rank 1 to k, the final token and its saturation layer.

The definition follows "Looking Beyond the Top-1" (arXiv 2410.20210), section 3. Layer 0 is the
input of the first block:
    s_i = min { l : the token at exactly rank i at l and at every later layer is the final one }
Other ranks may still change. s_i = 0: the token had that rank at every layer. s_i = n_layers: only
the last block put it there, so it does not saturate. Equal logits are ordered by id.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from layerleap.errors import BadSettings, BadText
from layerleap.lens.lens import Lens, require_none
from layerleap.lens.reader import RowQueue, StateRows
from layerleap.lens.readings import saturation_layers
from layerleap.lens.scores import TailCheck, iter_states
from layerleap.lens.top import top_k
from layerleap.models.transformer import Transformer
from layerleap.stats.tensor_file import TensorFile
from layerleap.stream.examples import Batch

FILE = TensorFile("saturation", 1)
TENSORS = ("layer", "tokens", "gold", "documents", "positions")


@dataclass(frozen=True, eq=False)
class Saturation:
    """Saturation layers of the top k tokens of every row, read through one lens."""

    layer: Tensor  # (row, k) int16: 0 if the rank never changes, n_layers if it never saturates
    tokens: Tensor  # (row, k) int32: the model's own top k, best first
    gold: Tensor  # (row,) int32: the token that follows, or the class; -1 if unknown
    documents: Tensor  # (row,)
    positions: Tensor  # (row,)
    n_layers: int
    lens: str

    @property
    def k(self) -> int:
        """The number of ranks."""
        return self.layer.shape[1]

    def __len__(self) -> int:
        return len(self.layer)

    def __repr__(self) -> str:
        ranges = f"ranks 1 to {self.k}, layers 0 to {self.n_layers}"
        return f"Saturation({len(self)} rows, {ranges}, lens {self.lens!r})"

    def rows(self, chosen: Tensor) -> "Saturation":
        """Some of the rows, selected by a mask or by indices."""
        return replace(self, **{name: getattr(self, name)[chosen] for name in TENSORS})

    def save(self, path: Path) -> None:
        """Write everything into one file."""
        tensors = {name: getattr(self, name) for name in TENSORS}
        FILE.save(path, tensors, {"n_layers": self.n_layers, "lens": self.lens})

    @classmethod
    def load(cls, path: Path) -> "Saturation":
        """The saturation layers that `save` wrote."""
        tensors, header = FILE.load(path)
        with FILE.parsing(path):
            return cls(**tensors, n_layers=header["n_layers"], lens=header["lens"])


@torch.no_grad()  # not inference mode: a probe may be trained on the states
def saturate(
    transformer: Transformer,
    lenses: Mapping[str, Lens],
    batches: Iterable[Batch],
    *,
    k: int = 5,
    on_states: Callable[[Mapping[int, Tensor], Batch], object] | None = None,
) -> dict[str, Saturation]:
    """The saturation layers of every kept position through every lens, from one forward pass.

    Args:
        batches: the text, images or speech to read.
        on_states: called with h[0] .. h[n_layers] at the rows of each batch, and the batch; rows
            are in the order of the result.
    """
    tracker = _Tracker(transformer, lenses, k)
    for batch, states in iter_states(transformer, batches, TailCheck()):
        if on_states is not None:
            on_states(states, batch)
        tracker.add_batch(batch)
        tracker.queue.add(states)
    tracker.queue.flush()
    if not tracker.tokens:
        raise BadText("no position to read: there is no text, or none of its positions is kept")
    return tracker.results()


def require_ranks(transformer: Transformer, k: int) -> None:
    """Refuse settings without saturation layers: more ranks than outputs, or a single layer."""
    if not 1 <= k <= transformer.d_vocab:
        raise BadSettings(
            f"cannot follow {k} ranks: {transformer.identity.name} has {transformer.d_vocab} "
            f"outputs; choose 1 to {transformer.d_vocab}"
        )
    if transformer.n_layers < 2:
        raise BadSettings(
            f"{transformer.identity.name} has {transformer.n_layers} layer, so no token can "
            "saturate before the last; expected 2 layers or more"
        )


class _Collector:
    """Collects saturation layers and the origin of their rows."""

    def __init__(self, transformer: Transformer, lenses: Mapping[str, Lens], k: int) -> None:
        require_ranks(transformer, k)
        self.transformer, self.lenses, self.k = transformer, lenses, k
        self.origins: list[tuple[Tensor, Tensor, Tensor]] = []
        self.tokens: list[Tensor] = []
        self.layers: dict[str, list[Tensor]] = {name: [] for name in lenses}

    def add_batch(self, batch: Batch) -> None:
        """Record the origin of a batch's rows."""
        gold = _gold(self.transformer, batch).to(torch.int32)
        self.origins.append((gold, batch.documents, batch.positions))

    def results(self) -> dict[str, Saturation]:
        """Saturation layers by lens; rows in the order they were added."""
        gold, documents, positions = map(torch.cat, zip(*self.origins, strict=True))
        tokens, last = torch.cat(self.tokens), self.transformer.n_layers
        return {
            name: Saturation(torch.cat(layers), tokens, gold, documents, positions, last, name)
            for name, layers in self.layers.items()
        }


class SaturationObserver(_Collector):
    """Collects saturation layers while `score` reads the same rows.

    Call `add_batch` for each batch, and pass `on_logits` to `score`.
    """

    def __init__(self, transformer: Transformer, lenses: Mapping[str, Lens], k: int = 5) -> None:
        super().__init__(transformer, lenses, k)
        self._tops: list[Tensor] = []  # of one chunk of rows, layer by layer

    def on_logits(self, name: str, layer: int, logits: Tensor) -> None:
        """Add the logits of some rows at one layer; layers come in ascending order."""
        label = f"lens {name!r} ({self.lenses[name].name})"
        self._tops.append(finite_top(logits, self.k, label, layer))
        if layer < self.transformer.n_layers:
            return
        tops, self._tops = torch.stack(self._tops, dim=1), []
        self.layers[name].append(saturation_layers(tops))
        if name == next(iter(self.lenses)):  # the last layer is the same through all lenses
            self.tokens.append(tops[:, -1].to(torch.int32))


class _Tracker(_Collector):
    """Tracks the model's top k tokens from the last layer down, until each rank changes.

    A rank is done at the first layer, from the end, with another token there. A row whose ranks
    are all done needs no lower layer, so lower layers are read for fewer rows.
    """

    def __init__(self, transformer: Transformer, lenses: Mapping[str, Lens], k: int) -> None:
        super().__init__(transformer, lenses, k)
        self.queue = RowQueue(transformer, self._track)

    def _track(self, rows: StateRows) -> None:
        last = self.transformer.n_layers
        final = finite_top(self.transformer.logits(rows[last]), self.k, "the model itself", last)
        self.tokens.append(final.to(torch.int32))
        for name, lens in self.lenses.items():
            label = f"lens {name!r} ({lens.name})"
            unchanged = torch.ones_like(final, dtype=torch.bool)
            layers = torch.full_like(final, last, dtype=torch.int16)
            for layer in range(last - 1, -1, -1):
                open_rows = unchanged.any(1).nonzero()[:, 0]
                if not len(open_rows):
                    break
                h = rows[layer][open_rows.to(rows[layer].device)]
                top = finite_top(lens.logits(h, layer), self.k, label, layer)
                unchanged[open_rows] &= top == final[open_rows]
                layers[unchanged] = layer
            self.layers[name].append(layers)


def finite_top(logits: Tensor, k: int, reader: str, layer: int) -> Tensor:
    """Ids of the top k, on the CPU; raises `NotFinite` if one of them is NaN or infinite."""
    values, ids = top_k(logits, k)
    require_none(~values.isfinite().all(-1), reader, layer)
    return ids.cpu()


def _gold(transformer: Transformer, batch: Batch) -> Tensor:
    """The correct output at each row: as given by the batch, else the token that follows."""
    if batch.gold is not None:
        return batch.gold
    unknown = torch.full(batch.documents.shape, -1)
    if transformer.kind != "next-token":
        return unknown
    prefix = "decoder_" if "decoder_input_ids" in batch.inputs else ""
    ids = batch.inputs[f"{prefix}input_ids"].cpu()
    real = batch.inputs.get(f"{prefix}attention_mask")
    real = torch.ones_like(ids) if real is None else real.cpu()
    following = torch.full_like(ids, -1)
    following[:, :-1] = ids[:, 1:].where(real[:, 1:] > 0, -1)
    return following[batch.keep.cpu()]
