"""A base model and a tuned one, block by block: in memory, or in their safetensors files.

In: two wrapped models, or names of checkpoints. Out: a `ModelPair`, which shows where a block of
both is, and the tensors outside the blocks.

Of checkpoints, a `Window` keeps one block of each in memory: a wrapped model with the embeddings,
the tail and two blocks. `show(b)` puts block b of the base into its first block and block b of the
tuned model into its second, tensor by tensor. So everything that is verified for a wrapped model
(which matrix holds the values, where a head begins) holds for both checkpoints, and no name of a
tensor has to be interpreted. The window is made from the base's own configuration, cut to two
blocks; its widths are not touched. It needs memory for the embeddings, the tail, and one block of
each model, however deep the models are.

Not every model can be read like this. `NoWindow` says why, and both are then loaded whole.
"""

import copy
import functools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from layerleap.errors import BadArtifact, BadSettings, ModelRefused, UnknownModel, first_line
from layerleap.files import read_json
from layerleap.models.load import load, locate
from layerleap.models.transformer import Transformer

SLOTS = 2  # blocks of the window: one for each model
PIECE_BYTES = 2**26  # of an embedding that is read at a time
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Source = Transformer | str | Path
Place = tuple[Transformer, int]  # a wrapped model and one of its blocks
Pieces = Iterator[tuple[Tensor, Tensor]]  # of a tensor, of both models


class NoWindow(Exception):
    """Why a checkpoint cannot be read block by block; never leaves this package."""


class ModelPair:
    """Two models in memory."""

    def __init__(self, base: Transformer, tuned: Transformer, how: str) -> None:
        self.base, self.tuned, self.how = base.identity.name, tuned.identity.name, how
        self.reader, self.other = base, tuned  # tokens are read with the base's output matrix
        self.n_layers = base.n_layers
        self._parameters = {k: v.detach() for k, v in tuned.model.named_parameters()}
        if (base.n_layers, base.d_model) != (tuned.n_layers, tuned.d_model):
            raise BadSettings(
                f"{self.base} has {base.n_layers} blocks of width {base.d_model} and {self.tuned} "
                f"has {tuned.n_layers} of width {tuned.d_model}; a tuned model has the "
                "architecture of its base"
            )

    def show(self, block: int) -> tuple[Place, Place]:
        """Where a block of both models is."""
        return (self.reader, block), (self.other, block)

    def outside(self) -> Iterator[tuple[str, Pieces, str]]:
        """Each tensor outside the blocks: its name, pieces of both models, and a remark."""
        blocks = tuple(f"{path}." for path in self.reader.blocks)
        for name, parameter in self.reader.model.named_parameters():
            if name.startswith(blocks):
                continue
            values = parameter.detach()
            shape = self._tuned_shape(name, values)
            if shape is None:
                yield name, iter(()), f"{self.tuned} has no such tensor"
            elif shape[1:] != values.shape[1:]:
                yield name, iter(()), f"its shape is {shape} in {self.tuned}"
            else:  # embeddings may have got more rows, for new tokens
                rows = min(len(values), shape[0])
                remark = f"only the {rows:,} rows that both models have"
                is_same = shape == tuple(values.shape)
                yield name, self._pieces(name, values, rows), "" if is_same else remark
        for name in self._added():
            yield name, iter(()), f"only {self.tuned} has this tensor"

    def _tuned_shape(self, name: str, values: Tensor) -> tuple[int, ...] | None:
        """The shape of a tensor of the base in the tuned model; None if it has no such tensor."""
        return tuple(self._parameters[name].shape) if name in self._parameters else None

    def _pieces(self, name: str, values: Tensor, rows: int) -> Pieces:
        """The first rows of a tensor of the base, beside those of the tuned model."""
        yield values[:rows], self._parameters[name][:rows]

    def _added(self) -> Iterable[str]:
        """Tensors of the tuned model that its base does not have."""
        names = dict(self.reader.model.named_parameters())
        return [name for name in self._parameters if name not in names]


class Checkpoint:
    """The tensors of a folder of safetensors files, read one at a time."""

    def __init__(self, folder: Path, name: str, config: Any) -> None:
        self.folder, self.name, self.config = folder, name, config
        self.files = _index(folder)

    @classmethod
    def open(cls, source: str) -> "Checkpoint":
        """The checkpoint behind a bundled name, a hub name or a folder."""
        from transformers import AutoConfig

        place, name, extra = locate(source)
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
        spellings = (name, bare, f"{prefix}.{bare}")
        return next((spelling for spelling in spellings if spelling in self.files), None)

    def tensor(self, name: str) -> Tensor:
        """One tensor; nothing else of the file is read."""
        with _opened(self.folder / self.files[name]) as file:
            return _floating(file.get_tensor(name), name, self.name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, from the head of the file."""
        with _opened(self.folder / self.files[name]) as file:
            return tuple(file.get_slice(name).get_shape())

    def dtype(self) -> torch.dtype:
        """The type that holds the values of all tensors, from the heads of the files."""
        names = set()
        for path in set(self.files.values()):
            with safe_open(self.folder / path, framework="pt") as file:
                names |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        dtypes = [DTYPES[name] for name in names if name in DTYPES] or [torch.float32]
        return functools.reduce(torch.promote_types, dtypes)

    def pieces(self, name: str, rows: int) -> Iterator[Tensor]:
        """The first `rows` rows of a tensor in pieces of bounded size."""
        with _opened(self.folder / self.files[name]) as file:
            lazy = file.get_slice(name)
            step = _step(lazy.get_shape())
            for first in range(0, rows, step):
                yield _floating(lazy[first : min(rows, first + step)], name, self.name)


class Window(ModelPair):
    """Two checkpoints; one block of each is in memory, as the two blocks of a wrapped model."""

    def __init__(self, base: Checkpoint, tuned: Checkpoint, transformer: Transformer) -> None:
        self.reader, self.base, self.tuned = transformer, base.name, tuned.name
        self.how = "read from safetensors files, one block of each model at a time"
        self.n_layers = int(base.config.num_hidden_layers)
        self._files, self._tuned_files = base, tuned
        self._stored_names: dict[str, str | None] = {}
        places = [path.rpartition(".") for path in transformer.blocks]
        if [place[2] for place in places] != ["0", "1"]:
            raise NoWindow(f"the blocks of {base.name} are not a list of their own")
        self._blocks, self._prefix = places[0][0], transformer.model.base_model_prefix
        self._check_names()
        self._check_shapes()

    @classmethod
    def open(cls, base: str, tuned: str) -> "Window":
        """The window of two names or folders; `NoWindow` where there is none."""
        sides = [Checkpoint.open(source) for source in (base, tuned)]
        depths = [_depth(side) for side in sides]
        if depths[0] != depths[1]:
            raise BadSettings(
                f"{sides[0].name} has {depths[0]} blocks and {sides[1].name} has {depths[1]}; a "
                "tuned model has the architecture of its base"
            )
        # The wider type of both: no value of either is rounded.
        dtype = torch.promote_types(*(side.dtype() for side in sides))
        options = {"config": _shallow(sides[0].config), "dtype": dtype}
        return cls(sides[0], sides[1], load(base, **options))

    def show(self, block: int) -> tuple[Place, Place]:
        """Block 1 of the window, filled with this block of the base, and block 2 with the tuned."""
        for slot, side in enumerate((self._files, self._tuned_files), 1):
            for name, parameter in self.reader.block(slot).named_parameters():
                stored = self._name(side, block, name)
                value = side.tensor(stored)
                if value.shape != parameter.shape:
                    raise ModelRefused(
                        f"{stored} of {side.name} has the shape {tuple(value.shape)}; expected "
                        f"{tuple(parameter.shape)}, as in block 1 of {self.base}"
                    )
                parameter.data.copy_(value)
        return (self.reader, 1), (self.reader, 2)

    def _tuned_shape(self, name: str, values: Tensor) -> tuple[int, ...] | None:
        self._stored_names[name] = stored = self._stored(name, values)
        return None if stored is None else self._tuned_files.shape(stored)

    def _pieces(self, name: str, values: Tensor, rows: int) -> Pieces:
        stored = self._stored_names[name]
        assert stored is not None
        parts = values[:rows].split(_step(values.shape))
        for base, tuned in zip(parts, self._tuned_files.pieces(stored, rows), strict=True):
            yield base, tuned.to(base.dtype)

    def _added(self) -> Iterable[str]:
        names = self.reader.model.state_dict().keys()  # a tied head is in some files only
        return [
            name
            for name in self._tuned_files.files
            if name not in names and self._files.find(name, self._prefix) is None
        ]

    def _stored(self, name: str, values: Tensor) -> str | None:
        """The name in the tuned model's files of a tensor outside the blocks.

        The library renames some (the head of GPT-NeoX). Such a tensor has the name under which the
        base's files hold its values.
        """
        if (stored := self._tuned_files.find(name, self._prefix)) is not None:
            return stored
        if self._files.find(name, self._prefix) is not None:
            return None
        parts = values.split(_step(values.shape))
        for other in self._files.files:
            is_shared = other in self._tuned_files.files
            if is_shared and self._files.shape(other) == tuple(values.shape):
                pairs = zip(parts, self._files.pieces(other, len(values)), strict=True)
                if all(torch.equal(x, y.to(x.dtype)) for x, y in pairs):
                    return other
        return None

    def _name(self, side: Checkpoint, block: int, name: str) -> str:
        full = f"{self._blocks}.{block - 1}.{name}"
        stored = side.find(full, self._prefix)
        if stored is None:
            raise NoWindow(f"{side.name} has no tensor {full}")
        return stored

    def _check_names(self) -> None:
        """The library may rename or reshape what it reads: then names mean something else here."""
        for name, parameter in self.reader.block(1).named_parameters():
            value = self._files.tensor(self._name(self._files, 1, name)).to(parameter.dtype)
            if not torch.equal(value, parameter.detach()):  # False for other shapes, too
                raise NoWindow(f"{name} of {self.base} is changed when it is loaded")

    def _check_shapes(self) -> None:
        for name, parameter in self.reader.block(2).named_parameters():
            stored = self._name(self._tuned_files, 1, name)
            if (shape := self._tuned_files.shape(stored)) != tuple(parameter.shape):
                raise BadSettings(
                    f"{stored} has the shape {shape} in {self.tuned}; expected "
                    f"{tuple(parameter.shape)}: a tuned model has the architecture of its base"
                )


def open_pair(base: Source, tuned: Source) -> ModelPair:
    """Files where both are names and can be read block by block; otherwise models in memory."""
    how = "both models in memory"
    if not isinstance(base, Transformer) and not isinstance(tuned, Transformer):
        try:
            return Window.open(str(base), str(tuned))
        except NoWindow as reason:
            how = f"{how}, because {reason}"
    a, b = (side if isinstance(side, Transformer) else load(side) for side in (base, tuned))
    return ModelPair(a, b, how)


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
    with _opened(single) as file:
        return dict.fromkeys(file.keys(), single.name)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise BadArtifact(
            f"{path} cannot be read ({first_line(error)}); copy or download it again"
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
    return max(1, PIECE_BYTES // (8 * math.prod(shape[1:])))
