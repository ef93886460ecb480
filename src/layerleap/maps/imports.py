"""Import published maps without executing anything they contain.

In: a folder of mat's `i_j.pickle` matrices, or a tuned-lens folder.
Out: a `ShortcutBank` of the same maps.

Both formats are pickles. The unpickler used here can only build tensors and arrays: any other name
in the file is refused before it is looked up.
"""

import io
import pickle
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerleap.arguments import checked
from layerleap.errors import BadArtifact, first_line
from layerleap.files import read_json
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.linear import LinearMap, TunedMap
from layerleap.maps.map import Map
from layerleap.models.transformer import Transformer


@checked
def import_mat(folder: str | Path, transformer: Transformer) -> ShortcutBank:
    """A bank of the matrices of "Jump to Conclusions": `i_j.pickle` holds A with h[j] ~ A h[i]."""
    if not Path(folder).is_dir():
        raise BadArtifact(f"there is no folder {folder}; expected a folder of mat's matrices")
    maps = []
    for path in sorted(Path(folder).iterdir()):
        if match := re.fullmatch(r"(\d+)_(\d+)\.pickle", path.name):
            src, dst = int(match[1]), int(match[2])
            matrix = _read_matrix(path)
            _check_shape(path, matrix, transformer, src, dst)
            maps.append(LinearMap(src, dst, weight=matrix.float().T.contiguous()))
    if not maps:
        raise BadArtifact(f"no files like 0_24.pickle in {folder}; expected mat's matrices")
    highest = max(m.dst for m in maps)
    if highest != transformer.n_layers:
        raise BadArtifact(
            f"the matrices in {folder} reach layer {highest}, but the model's last layer is "
            f"{transformer.n_layers}; they belong to another model"
        )
    return _bank(maps, transformer, f"mat, {folder}")


@checked
def import_tuned_lens(folder: str | Path, transformer: Transformer) -> ShortcutBank:
    """A bank of a tuned lens (`config.json`, `params.pt`): translator l maps h to h + W h + b."""
    folder = Path(folder)
    config, path = read_json(folder / "config.json"), folder / "params.pt"
    count = config.get("num_hidden_layers") if isinstance(config, dict) else None
    if not isinstance(count, int):
        raise BadArtifact(f"{folder / 'config.json'} has no num_hidden_layers")
    _check_count(folder / "config.json", count, transformer)
    base = _check_base(folder / "config.json", config, transformer)
    state = _read_state(path)
    matches = [re.fullmatch(r"(\d+)\.weight", str(key)) for key in state]
    stored = [int(match[1]) + 1 for match in matches if match]
    _check_count(path, max([count, *stored]), transformer)  # a missing one is reported later
    maps = [_translator(state, path, transformer, layer) for layer in range(count)]
    return _bank(maps, transformer, f"tuned-lens, {folder}", base)


def _check_count(path: Path, count: int, transformer: Transformer) -> None:
    last = transformer.n_layers
    if count != last:
        raise BadArtifact(
            f"{path} belongs to a lens with {count} translators; the model has layers 0 to {last}, "
            f"so {last} are expected"
        )


def _check_base(path: Path, config: dict[str, Any], transformer: Transformer) -> dict[str, Any]:
    """The base model named in the config; refused if it is another model.

    Owners and mirrors differ, so only the last parts of the names are compared. A local folder can
    have any name, and a model without a name goes by its class: these are not compared.
    """
    base, name = config.get("base_model_name_or_path"), transformer.identity.name
    if not isinstance(base, str) or not base:
        return {}
    is_known = name != transformer.identity.architecture and not Path(name).exists()
    last_parts = {one.rstrip("/").rsplit("/", 1)[-1].lower() for one in (base, name)}
    if is_known and len(last_parts) > 1:
        raise BadArtifact(f"{path} belongs to a lens for {base}, but the model is {name}")
    return {"base_model_name_or_path": base}


def _translator(
    state: dict[str, Any], path: Path, transformer: Transformer, layer: int
) -> TunedMap:
    delta, bias = state.get(f"{layer}.weight"), state.get(f"{layer}.bias")
    if not isinstance(delta, Tensor):
        raise BadArtifact(f"{path} has no translator for layer {layer}")
    _check_shape(path, delta, transformer, layer, transformer.n_layers)
    if bias is not None and getattr(bias, "shape", None) != (len(delta),):
        raise BadArtifact(f"{path} has no bias of {len(delta)} numbers for layer {layer}")
    weight = torch.eye(len(delta)) + delta.float().T
    bias = None if bias is None else bias.float()
    return TunedMap(layer, transformer.n_layers, weight=weight.contiguous(), bias=bias)


def _bank(
    maps: Sequence[Map], transformer: Transformer, source: str, data: Any = None
) -> ShortcutBank:
    return ShortcutBank(
        maps,
        model=transformer.identity.to_dict(),
        n_layers=transformer.n_layers,
        d_model=transformer.d_model,
        source=source,
        data=data,
    )


def _check_shape(path: Path, matrix: Tensor, transformer: Transformer, src: int, dst: int) -> None:
    width = transformer.d_model
    if tuple(matrix.shape) != (width, width):
        raise BadArtifact(
            f"{path} holds a matrix of {tuple(matrix.shape)}; expected {width} x {width}"
        )
    last = transformer.n_layers
    if not 0 <= src < dst <= last:
        raise BadArtifact(f"{path} maps {src} to {dst}; the model has layers 0 to {last}")


def _read_matrix(path: Path) -> Tensor:
    try:
        with path.open("rb") as stream, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about odd files, which fail anyway
            return torch.as_tensor(_TensorsOnly(stream).load())
    except Exception as error:  # a damaged pickle can make its reader raise anything
        raise BadArtifact(f"{path} cannot be read safely ({first_line(error)[:160]})") from error


def _read_state(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise BadArtifact(f"{path} is missing; copy the whole folder")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch has no common class for unreadable files
        raise BadArtifact(
            f"{path} cannot be read safely: it is damaged or holds more than tensors"
        ) from error
    if not isinstance(state, dict):
        raise BadArtifact(f"{path} is not a dictionary of tensors; expected a tuned lens")
    return state


class _TensorsOnly(pickle.Unpickler):
    """An unpickler that builds only tensors and arrays; any other name is an error."""

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            # A tensor's storage: plain pickle nests a file, which torch's safe loader reads.
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        module = module.replace("numpy.core", "numpy._core")  # the name in old files is numpy.core
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not a tensor")
        return super().find_class(module, name)


ALLOWED = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("collections", "OrderedDict"),
    ("_codecs", "encode"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.numeric", "_frombuffer"),
}
