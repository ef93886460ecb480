"""Two checkpoints side by side, of which only one block of each is in memory.

In: two folders or names of models saved as safetensors. Out: a `Window`: a wrapped model with the
embeddings, the tail and two blocks. `show(b)` puts block b of the base into its first block and
block b of the tuned model into its second, tensor by tensor.

So everything that is verified for a wrapped model (which matrix holds the values, where a head
begins) holds for both checkpoints, and no name of a tensor has to be interpreted. The window is
made from the base's own configuration, cut to two blocks; its widths are not touched. It needs
memory for the embeddings, the tail, and one block of each model, however deep the models are.

Not every model can be read like this. `NoWindow` says why, and the caller then loads both whole.
"""

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from layerleap.errors import BadArtifact, BadSettings, ModelRefused, UnknownModel, first_line
from layerleap.files import read_json
from layerleap.models.load import load, locate
from layerleap.models.transformer import Transformer
from layerleap.zoo.download import Tell

SLOTS = 2  # blocks of the window: one for each model
PIECE_BYTES = 2**26  # of an embedding that is read at a time
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class NoWindow(Exception):
    """Why a checkpoint cannot be read block by block; never leaves this package."""


class Checkpoint:
    """The tensors of a folder of safetensors files, read one at a time."""

    def __init__(self, folder: Path, name: str, config: Any) -> None:
        self.folder, self.name, self.config = folder, name, config
        self.files = _index(folder)

    @classmethod
    def open(cls, source: str, tell: Tell | None = None) -> "Checkpoint":
        """The checkpoint behind a bundled name, a hub name or a folder."""
        from transformers import AutoConfig

        place, name, extra = locate(source, tell)
        if extra:
            raise NoWindow(f"{name} is a GGUF file")
        folder = Path(place) if Path(place).is_dir() else _downloaded(place)
        try:
            config = AutoConfig.from_pretrained(folder)
        except (OSError, ValueError, KeyError) as error:
            raise UnknownModel(f"cannot load a model from {source}: {first_line(error)}") from error
        if getattr(config, "quantization_config", None) is not None:
            raise ModelRefused(
                f"the weights of {name} are quantised, so its vectors cannot be compared; "
                "dequantise the model (model.dequantize() in transformers), save it and compare it"
            )
        return cls(folder, name, config)

    def find(self, name: str, prefix: str) -> str | None:
        """The name in the file of a parameter; saved without its head, it lacks a prefix."""
        bare = name.removeprefix(f"{prefix}.")
        return next((one for one in (name, bare, f"{prefix}.{bare}") if one in self.files), None)

    def tensor(self, name: str) -> Tensor:
        """One tensor; nothing else of the file is read."""
        with self._opened(name) as file:
            return _floating(file.get_tensor(name), name, self.name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, from the head of the file."""
        with self._opened(name) as file:
            return tuple(file.get_slice(name).get_shape())

    def dtype(self) -> torch.dtype:
        """The type that holds the values of all tensors, from the heads of the files."""
        found = set()
        for path in set(self.files.values()):
            with safe_open(self.folder / path, framework="pt") as file:
                found |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        kinds = [DTYPES[name] for name in found if name in DTYPES] or [torch.float32]
        return functools.reduce(torch.promote_types, kinds)

    def pieces(self, name: str, rows: int) -> Iterator[Tensor]:
        """The first `rows` rows of a tensor in pieces of bounded size."""
        with self._opened(name) as file:
            lazy = file.get_slice(name)
            step = _step(lazy.get_shape())
            for first in range(0, rows, step):
                yield _floating(lazy[first : min(rows, first + step)], name, self.name)

    def _opened(self, name: str) -> Any:
        path = self.folder / self.files[name]
        try:
            return safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise BadArtifact(
                f"{path} cannot be read ({first_line(error)}); copy or download it again"
            ) from error


class Window:
    """One block of a base model and the same block of a tuned one, as a wrapped model."""

    def __init__(self, base: Checkpoint, tuned: Checkpoint, transformer: Transformer) -> None:
        self.base, self.tuned, self.transformer = base, tuned, transformer
        self.n_layers = int(base.config.num_hidden_layers)
        places = [path.rpartition(".") for path in transformer.blocks]
        if [place[2] for place in places] != ["0", "1"]:
            raise NoWindow(f"the blocks of {base.name} are not a list of their own")
        self.blocks = places[0][0]
        self._check_names()
        self._check_shapes()

    @classmethod
    def open(cls, base: str, tuned: str, tell: Tell | None = None) -> "Window":
        """The window of two names or folders; `NoWindow` where there is none."""
        sides = [Checkpoint.open(source, tell) for source in (base, tuned)]
        depths = [_depth(side) for side in sides]
        if depths[0] != depths[1]:
            raise BadSettings(
                f"{sides[0].name} has {depths[0]} blocks and {sides[1].name} has {depths[1]}; a "
                "tuned model has the architecture of its base"
            )
        # The wider type of both: no value of either is rounded.
        dtype = torch.promote_types(*(side.dtype() for side in sides))
        options = {"config": _shallow(sides[0].config), "dtype": dtype}
        return cls(sides[0], sides[1], load(base, tell=tell, **options))

    def show(self, block: int) -> None:
        """Put block `block` of the base into block 1 of the window, the tuned one into block 2."""
        for slot, side in enumerate((self.base, self.tuned), 1):
            for name, parameter in self.transformer.block(slot).named_parameters():
                stored = self._name(side, block, name)
                value = side.tensor(stored)
                if value.shape != parameter.shape:
                    raise ModelRefused(
                        f"{stored} of {side.name} has the shape {tuple(value.shape)}; expected "
                        f"{tuple(parameter.shape)}, as in block 1 of {self.base.name}"
                    )
                parameter.data.copy_(value)

    def outside(self) -> Iterator[tuple[str, Tensor, str | None]]:
        """Tensors outside the blocks: name, values in the base, name in the tuned model's files."""
        for name, own in self.transformer.model.named_parameters():
            if not name.startswith(f"{self.blocks}."):
                yield name, own.detach(), self._stored(name, own.detach())

    def added(self) -> list[str]:
        """Tensors in the files of the tuned model that its base does not have."""
        model = self.transformer.model
        names = model.state_dict().keys()  # a tied head is in some files and not in others
        return [
            name
            for name in self.tuned.files
            if name not in names and self.base.find(name, model.base_model_prefix) is None
        ]

    def pieces(self, own: Tensor, stored: str, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The first rows of a tensor of the base, beside those of the tuned model."""
        same = own[:rows].split(_step(own.shape))
        for base, tuned in zip(same, self.tuned.pieces(stored, rows), strict=True):
            yield base, tuned.to(base.dtype)

    def _stored(self, name: str, own: Tensor) -> str | None:
        """The name in the tuned model's files of a tensor outside the blocks.

        The library renames some (the head of GPT-NeoX). Such a tensor has the name under which the
        base's files hold its values.
        """
        prefix = self.transformer.model.base_model_prefix
        if (stored := self.tuned.find(name, prefix)) is not None:
            return stored
        if self.base.find(name, prefix) is not None:
            return None
        for other in self.base.files:
            if other in self.tuned.files and self.base.shape(other) == tuple(own.shape):
                same = zip(
                    own.split(_step(own.shape)), self.base.pieces(other, len(own)), strict=True
                )
                if all(torch.equal(x, y.to(x.dtype)) for x, y in same):
                    return other
        return None

    def _name(self, side: Checkpoint, block: int, name: str) -> str:
        full = f"{self.blocks}.{block - 1}.{name}"
        stored = side.find(full, self.transformer.model.base_model_prefix)
        if stored is None:
            raise NoWindow(f"{side.name} has no tensor {full}")
        return stored

    def _check_names(self) -> None:
        """The library may rename or reshape what it reads: then names mean something else here."""
        for name, parameter in self.transformer.block(1).named_parameters():
            value = self.base.tensor(self._name(self.base, 1, name))
            if value.shape != parameter.shape or not torch.equal(
                value.to(parameter.dtype), parameter.detach()
            ):
                raise NoWindow(f"{name} of {self.base.name} is changed when it is loaded")

    def _check_shapes(self) -> None:
        for name, parameter in self.transformer.block(2).named_parameters():
            stored = self._name(self.tuned, 1, name)
            if (shape := self.tuned.shape(stored)) != tuple(parameter.shape):
                raise BadSettings(
                    f"{stored} has the shape {shape} in {self.tuned.name}; expected "
                    f"{tuple(parameter.shape)}: a tuned model has the architecture of its base"
                )


def _depth(side: Checkpoint) -> int:
    """How many blocks there are; `NoWindow` where a configuration cannot be cut."""
    config = side.config
    if getattr(config, "is_encoder_decoder", False):
        raise NoWindow(f"{side.name} is an encoder-decoder")
    if config.get_text_config() is not config or not hasattr(config, "num_hidden_layers"):
        raise NoWindow(f"the configuration of {side.name} has no single number of blocks")
    if config.num_hidden_layers < SLOTS:
        raise NoWindow(f"{side.name} has a single block")
    return int(config.num_hidden_layers)


def _shallow(config: Any) -> Any:
    """The configuration with two blocks; lists with an entry per block are cut as well."""
    shallow, depth = copy.deepcopy(config), config.num_hidden_layers
    for key, value in vars(config).items():
        if isinstance(value, list) and len(value) == depth:
            setattr(shallow, key, value[:SLOTS])
    shallow.num_hidden_layers = SLOTS
    return shallow


def _index(folder: Path) -> dict[str, str]:
    """The file of each tensor."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.is_file():
        return dict(read_json(index).get("weight_map", {}))
    if not single.is_file():
        raise NoWindow(f"{folder} has no safetensors files")
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single.name)
    except (OSError, SafetensorError) as error:
        raise BadArtifact(
            f"{single} cannot be read ({first_line(error)}); copy or download it again"
        ) from error


def _downloaded(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model"]))
    except Exception as error:  # no network, no such model, no access, or an invalid name
        raise UnknownModel(
            f"no model {name!r}: it is not bundled, not a folder, and could not be loaded from the "
            f"hub ({first_line(error)[:160]}); check the spelling and the network"
        ) from error


def _floating(value: Tensor, name: str, model: str) -> Tensor:
    if not value.is_floating_point() or value.dtype.itemsize < 2:
        kind = str(value.dtype).removeprefix("torch.")
        raise ModelRefused(
            f"{name} of {model} is {kind}: quantised weights cannot be compared as vectors; "
            "dequantise the model, save it and compare it"
        )
    return value


def _step(shape: Any) -> int:
    """Rows of a matrix that are read at a time."""
    width = 1
    for size in shape[1:]:
        width *= size
    return max(1, PIECE_BYTES // (8 * width))
