"""Saturation: from which layer on the token at each rank no longer changes.

In: a wrapped model, named lenses, and batches with positions to read.
Out: `Saturation`: for every row and rank 1 to k the final token and its saturation layer.

The definition is that of "Looking Beyond the Top-1" (arXiv 2410.20210), section 3, in this house's
layers, where 0 is what enters the first block:
    s_i = min { l : the token at exactly rank i at l and at every later layer is the final one }
The other ranks may still move. s_i = 0: it always stood there; s_i = n_layers: only the last
block put it there, which is no saturation. Equal logits are in order of id.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from layerleap.errors import BadArtifact, BadSettings, BadText, NotFinite
from layerleap.files import whole_file
from layerleap.memory import give_back
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.read.lens import Lens
from layerleap.read.reader import RowQueue, Rows
from layerleap.read.scores import CHECK_EVERY, TRIM_EVERY, TailCheck, check_tail
from layerleap.read.top import top_k
from layerleap.stream.examples import Batch

FORMAT = 1
TENSORS = ("layer", "tokens", "gold", "documents", "positions")


@dataclass(frozen=True, eq=False)
class Saturation:
    """Saturation layers of the k best tokens of every row, read through one lens."""

    layer: Tensor  # (row, k) int16: 0 if the token always stood there, n_layers if never before
    tokens: Tensor  # (row, k) int32: the model's own k best, best first
    gold: Tensor  # (row,) int32: the token that follows, or the class; -1 where unknown
    documents: Tensor  # (row,)
    positions: Tensor  # (row,)
    n_layers: int
    lens: str

    @property
    def k(self) -> int:
        """How many ranks are known."""
        return self.layer.shape[1]

    def __len__(self) -> int:
        return len(self.layer)

    def __repr__(self) -> str:
        return (
            f"Saturation({len(self)} rows, ranks 1 to {self.k}, layers 0 to {self.n_layers}, "
            f"lens {self.lens!r})"
        )

    def rows(self, chosen: Tensor) -> "Saturation":
        """The same at some of the rows, by a mask or by numbers."""
        return replace(self, **{name: getattr(self, name)[chosen] for name in TENSORS})

    def save(self, path: Path) -> None:
        """Write everything into one file."""
        about = {"format": FORMAT, "n_layers": self.n_layers, "lens": self.lens}
        with whole_file(path) as temporary:
            save_file(
                {name: getattr(self, name).contiguous() for name in TENSORS}, temporary,
                metadata={"layerleap.saturation": json.dumps(about)},
            )  # fmt: skip

    @classmethod
    def load(cls, path: Path) -> "Saturation":
        """Read what `save` wrote."""
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads(file.metadata()["layerleap.saturation"])
                tensors = {name: file.get_tensor(name) for name in TENSORS}
            if about["format"] != FORMAT:
                raise ValueError(f"format {about['format']}, {FORMAT} was wanted")
            return cls(**tensors, n_layers=about["n_layers"], lens=about["lens"])
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise BadArtifact(
                f"{path} is missing, damaged or holds no saturation layers ({error})"
            ) from error


def saturation_layers(tops: Tensor) -> Tensor:
    """The layer from which each rank keeps its final token: (row, layer, k) -> (row, k) int16.

    tops[:, l] are the k best tokens at layer l = 0 .. n_layers, best first.
    """
    final = (tops == tops[:, -1:]).flip(1)  # from the last layer down
    held = final.cumprod(1).sum(1)  # for how many layers, the last included
    return (tops.shape[1] - held).to(torch.int16)


@torch.no_grad()  # not inference mode: a probe may be trained on what is kept
def saturate(
    transformer: Transformer,
    lenses: Mapping[str, Lens],
    batches: Iterable[Batch],
    *,
    k: int = 5,
    keep_states: Callable[[Mapping[int, Tensor], Batch], object] | None = None,
    progress: Progress = silent,
    total: int | None = None,
    phase: str = "reading",
) -> dict[str, Saturation]:
    """The saturation layers of every kept position through every lens, from one forward pass.

    Args:
        transformer: the model.
        lenses: by name.
        batches: what to read; any input of the model will do.
        k: how many ranks.
        keep_states: given h[0] .. h[n_layers] at the rows of each batch, in the order of the
            rows that come out, and the batch.
        progress: told the number of texts.
        total: how many texts there will be, if known.
        phase: what progress calls it.
    """
    follower = _Follower(transformer, lenses, k)
    check, texts = TailCheck(), 0
    for number, batch in enumerate(batches):
        if number % CHECK_EVERY == 0:
            check_tail(transformer, batch, check)
        seen = transformer.capture(batch.inputs, keep=batch.keep)
        if keep_states is not None:
            keep_states(seen.states, batch)
        follower.note(batch)
        follower.waiting.add(seen.states)
        texts += batch.n_texts
        if number % TRIM_EVERY == 0:
            give_back()
        progress(phase, texts, total)
    if not follower.n_rows:
        raise BadText("no position to read: there is no text, or none of its positions is kept")
    check.require()
    follower.waiting.settle()
    return follower.results()


def require_ranks(transformer: Transformer, k: int) -> None:
    """Refuse what has no saturation layers: more ranks than outputs, or a single layer."""
    if not 1 <= k <= transformer.d_vocab:
        raise BadSettings(
            f"{k} ranks were asked for, and {transformer.identity.name} has {transformer.d_vocab} "
            f"outputs; choose 1 to {transformer.d_vocab}"
        )
    if transformer.n_layers < 2:
        raise BadSettings(
            f"{transformer.identity.name} has {transformer.n_layers} layer, so no token can settle "
            "before the last; 2 layers or more are wanted"
        )


class _Ranks:
    """Gathers saturation layers, and where their rows are from."""

    def __init__(self, transformer: Transformer, lenses: Mapping[str, Lens], k: int) -> None:
        require_ranks(transformer, k)
        self.transformer, self.lenses, self.k = transformer, lenses, k
        self.n_rows = 0
        self.origins: list[tuple[Tensor, Tensor, Tensor]] = []
        self.tokens: list[Tensor] = []
        self.layers: dict[str, list[Tensor]] = {name: [] for name in lenses}

    def note(self, batch: Batch) -> None:
        """Where the next rows are from."""
        self.n_rows += len(batch.documents)
        self.origins.append((_gold(self.transformer, batch), batch.documents, batch.positions))

    def results(self) -> dict[str, Saturation]:
        """By lens; the rows in their order."""
        gold, documents, positions = (
            torch.cat(column) for column in zip(*self.origins, strict=True)
        )
        tokens = torch.cat(self.tokens)
        return {
            name: Saturation(
                torch.cat(layers), tokens, gold.to(torch.int32), documents, positions,
                self.transformer.n_layers, name,
            )
            for name, layers in self.layers.items()
        }  # fmt: skip


class Ranks(_Ranks):
    """Saturation layers of rows that are read at every layer for another reason.

    `note` each batch, and let `watch` be shown all logits: `score(watch=ranks.watch, ...)`.
    """

    def __init__(self, transformer: Transformer, lenses: Mapping[str, Lens], k: int = 5) -> None:
        super().__init__(transformer, lenses, k)
        self._tops: list[Tensor] = []  # of one chunk of rows, layer by layer

    def watch(self, way: str, layer: int, logits: Tensor) -> None:
        """Take in what some rows say at one layer; layers come in rising order."""
        said = f"lens {way!r} ({self.lenses[way].name})"
        self._tops.append(finite_top(logits, self.k, said, layer))
        if layer < self.transformer.n_layers:
            return
        tops, self._tops = torch.stack(self._tops, dim=1), []
        self.layers[way].append(saturation_layers(tops))
        if way == next(iter(self.lenses)):  # the last layer is the same through all of them
            self.tokens.append(tops[:, -1].to(torch.int32))


class _Follower(_Ranks):
    """Follows the model's k best tokens from the last layer down, until each stands elsewhere.

    A rank is done with at the first layer, from the end, that puts another token there; a row of
    which all ranks are done with needs no lower layer. So fewer rows are read than there are.
    """

    def __init__(self, transformer: Transformer, lenses: Mapping[str, Lens], k: int) -> None:
        super().__init__(transformer, lenses, k)
        self.waiting = RowQueue(transformer, self._follow)

    def _follow(self, rows: Rows) -> None:
        last = self.transformer.n_layers
        final = finite_top(self.transformer.logits(rows[last]), self.k, "the model itself", last)
        self.tokens.append(final.to(torch.int32))
        for name, lens in self.lenses.items():
            said = f"lens {name!r} ({lens.name})"
            stands = torch.ones_like(final, dtype=torch.bool)
            layers = torch.full_like(final, last, dtype=torch.int16)
            for layer in range(last - 1, -1, -1):
                open_rows = stands.any(1).nonzero()[:, 0]
                if not len(open_rows):
                    break
                h = rows[layer][open_rows.to(rows[layer].device)]
                top = finite_top(lens.logits(h, layer), self.k, said, layer)
                stands[open_rows] &= top == final[open_rows]
                layers[stands] = layer
            self.layers[name].append(layers)


def finite_top(logits: Tensor, k: int, reader: str, layer: int) -> Tensor:
    """Ids of the k best, on the CPU; `NotFinite` if there is anything higher than any number."""
    values, ids = top_k(logits, k)
    bad = ~values.isfinite().all(-1)
    if bad.any():
        raise NotFinite(
            f"NaN or infinite logits of {reader} at layer {layer} in {int(bad.sum())} of "
            f"{len(bad)} rows; look for a dtype too narrow, or a map fitted on too few rows"
        )
    return ids.cpu()


def _gold(transformer: Transformer, batch: Batch) -> Tensor:
    """The right answer at each row: as the batch has it, else the token that follows."""
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
