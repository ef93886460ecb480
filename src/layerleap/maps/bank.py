"""ShortcutBank: all maps of one model as one artefact that can be saved, shared and trusted.

In: maps and the card that says how they were made and how good they are.
Out: a folder of `bank.json`, `maps.safetensors` and a README; loading checks all of it.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from layerleap.errors import BadArtifact, BadSettings, CannotFetch, CannotWrite, WrongModel
from layerleap.files import read_json, sha256_of, whole_folder, write_json
from layerleap.maps.card import readme
from layerleap.maps.linear import Fit, Identity, LinearMap
from layerleap.models.transformer import Transformer

if TYPE_CHECKING:
    from layerleap.read.lens import Lens

FORMAT = 1
CONFIG, WEIGHTS = "bank.json", "maps.safetensors"
PART = "part."  # how the names of tensors of parts begin; those of layers begin with a number


class ShortcutBank:
    """Maps by (src, dst), the model they belong to, and their card. Immutable, always fitted.

    `parts` holds maps that stand in for parts of blocks, by (block, part): (3, "attn"), (3, "ffn"),
    (3, "attn_norm"), ...; their fits are in `part_fits`.
    """

    def __init__(
        self,
        maps: Iterable[LinearMap],
        *,
        model: Mapping[str, Any],
        n_layers: int,
        d_model: int,
        parts: Mapping[tuple[int, str], LinearMap] | None = None,
        fits: Iterable[Fit] = (),
        settings: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        quality: Iterable[Mapping[str, Any]] = (),
        source: str = "layerleap",
    ) -> None:
        self.maps = {(m.src, m.dst): m for m in maps}
        self.model = dict(model)  # the identity of the model, as JSON types
        self.n_layers, self.d_model = n_layers, d_model
        self.parts = dict(parts or {})
        fits = list(fits)
        self.fits = {(fit.src, fit.dst): fit for fit in fits if fit.part is None}
        self.part_fits = {(fit.dst, fit.part): fit for fit in fits if fit.part is not None}
        self.settings, self.data = dict(settings or {}), dict(data or {})
        self.quality = [dict(row) for row in quality]  # held-out scores, if they were measured
        self.source = source  # who fitted it

    def __getitem__(self, pair: tuple[int, int]) -> LinearMap | Identity:
        """The map from src to dst; from a layer to itself, the identity."""
        src, dst = pair
        if src == dst and 0 <= src <= self.n_layers:
            return Identity(src, dst)
        if pair not in self.maps:
            have = "every layer to the last" if self.is_final_only else f"{len(self.maps)} pairs"
            raise BadSettings(
                f"no map from layer {src} to layer {dst} in this bank of {self.model['name']}: "
                f"it has layers 0 to {self.n_layers} and holds {have}"
            )
        return self.maps[pair]

    def __len__(self) -> int:
        return len(self.maps)

    def __repr__(self) -> str:
        return f"ShortcutBank({len(self)} maps of {self.model['name']}, {self.n_layers} layers)"

    @property
    def is_final_only(self) -> bool:
        """True if there is a map from every layer to the last, and no other."""
        return set(self.maps) == {(src, self.n_layers) for src in range(self.n_layers)}

    def check_model(self, transformer: Transformer) -> None:
        """Raise `WrongModel` unless the bank was fitted on exactly these weights."""
        wanted, found = self.model, transformer.identity
        shape = (self.n_layers, self.d_model)
        if shape != (transformer.n_layers, transformer.d_model):
            raise WrongModel(
                f"this bank is of {wanted['name']} with {self.n_layers} layers of {self.d_model}, "
                f"but {found.name} has {transformer.n_layers} of {transformer.d_model}; "
                "fit a bank for it"
            )
        if wanted.get("fingerprint") != found.fingerprint:
            raise WrongModel(
                f"this bank is of {wanted['name']} (weights {str(wanted.get('fingerprint'))[:8]}), "
                f"but the weights of {found.name} are {found.fingerprint[:8]}; fit a bank for them"
            )

    def lens(self, transformer: Transformer) -> "Lens":
        """A lens that reads `transformer` through these maps."""
        from layerleap.read.lens import Lens  # the one look to the right: sugar for users

        return Lens(transformer, self)

    def to(self, devices: Callable[[int], Any] | Mapping[int, Any]) -> "ShortcutBank":
        """The bank with each map on the device of the rows that it takes.

        Args:
            devices: from a source layer to its device. A map copies its weights on every call
                while they lie elsewhere; once placed, it copies nothing. A part's map goes to
                the layer that its block makes, for it is the block that holds the part.
        """
        device_of = devices.__getitem__ if isinstance(devices, Mapping) else devices
        placed = [m.to(device_of(m.src)) for m in self.maps.values()]
        parts = {key: m.to(device_of(m.dst)) for key, m in self.parts.items()}
        before, after = (
            [t for m in maps for t in m.tensors().values()]
            for maps in ([*self.maps.values(), *self.parts.values()], [*placed, *parts.values()])
        )
        if all(a is b for a, b in zip(before, after, strict=True)):
            return self
        return self.changed(maps=placed, parts=parts)

    def changed(self, **changes: Any) -> "ShortcutBank":
        """The same bank, but for the named arguments of the constructor."""
        every: dict[str, Any] = {key: getattr(self, key) for key in KEPT}
        fits = [*self.fits.values(), *self.part_fits.values()]
        every |= {"maps": self.maps.values(), "parts": self.parts, "fits": fits, **changes}
        return ShortcutBank(every.pop("maps"), **every)

    def card(self) -> str:
        """The quality card in Markdown."""
        return readme(self)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the bank, all or nothing; only an earlier bank or an empty folder is replaced."""
        folder = Path(folder)
        check_target(folder)
        with whole_folder(folder) as temporary:
            save_file(self._tensors(), temporary / WEIGHTS)
            config = self._config(sha256_of(temporary / WEIGHTS))
            write_json(temporary / CONFIG, {**config, "content_sha256": content_hash(config)})
            (temporary / "README.md").write_text(self.card(), encoding="utf8")
        return folder

    def _tensors(self) -> dict[str, Tensor]:
        keys = {f"{src}-{dst}": m for (src, dst), m in self.maps.items()}
        keys |= {f"{PART}{block}.{part}": m for (block, part), m in self.parts.items()}
        return {f"{key}.{name}": t for key, m in keys.items() for name, t in m.tensors().items()}

    def _config(self, sha256: str) -> dict[str, Any]:
        return {
            "format": FORMAT, "source": self.source, "model": self.model,
            "n_layers": self.n_layers, "d_model": self.d_model, "sha256": sha256,
            "settings": self.settings, "data": self.data,
            "fits": [f.to_dict() for f in (*self.fits.values(), *self.part_fits.values())],
            "quality": self.quality,
        }  # fmt: skip

    @classmethod
    def from_pretrained(
        cls, source: str | Path, *, revision: str | None = None, token: str | None = None
    ) -> "ShortcutBank":
        """Load a bank from a folder or a hub repository; a damaged one is an error."""
        folder = Path(source)
        if not folder.is_dir():
            folder = _download(str(source), revision, token)
        if not (folder / CONFIG).is_file():
            raise BadArtifact(f"{folder} is no bank, or not a whole one: it has no {CONFIG}")
        config = read_json(folder / CONFIG)
        found = config.get("format") if isinstance(config, dict) else None
        if found != FORMAT:
            raise BadArtifact(
                f"{folder / CONFIG} holds format {found}; {FORMAT} was wanted, "
                "fit the bank again or update layerleap"
            )
        if config.get("content_sha256") != content_hash(config):
            raise BadArtifact(
                f"{folder / CONFIG} was changed since it was saved; copy or fit the bank again"
            )
        tensors = _load_weights(folder / WEIGHTS, config.get("sha256"))
        try:
            _require_identity(config["model"])
            return cls(
                _maps(tensors),
                parts=_parts(tensors),
                fits=[Fit(**fit) for fit in config["fits"]],
                **{key: config[key] for key in KEPT},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadArtifact(f"{folder / CONFIG} does not describe a bank ({error})") from error

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, token: str | None = None
    ) -> str:
        """Upload the bank as a model repository of its own; returns its address."""
        import tempfile

        from huggingface_hub import HfApi

        api = HfApi(token=token)
        with tempfile.TemporaryDirectory() as temporary:
            folder = self.save_pretrained(Path(temporary) / "bank")
            address = api.create_repo(repo_id, private=private, exist_ok=True)
            api.upload_folder(
                repo_id=repo_id, folder_path=folder, commit_message=f"Upload {self!r}"
            )
        return str(address)


KEPT = ("source", "model", "n_layers", "d_model", "settings", "data", "quality")


def check_target(folder: str | Path) -> None:
    """Refuse a folder that a bank cannot be written to, or that holds anything but a bank.

    Saving replaces the folder, so a mistyped path must not cost a folder of other things; and
    a long pass must not end with the news that there is no place for its result.
    """
    folder = Path(folder)
    if folder.is_file():
        raise CannotWrite(f"{folder} is a file; a folder was wanted there")
    if Path.cwd().is_relative_to(folder.resolve()):
        raise CannotWrite(
            f"{folder} is the folder you are in, or holds it, and would be replaced; "
            "name a new folder"
        )
    try:
        is_other = folder.is_dir() and any(folder.iterdir()) and not (folder / CONFIG).is_file()
    except OSError as error:
        raise CannotWrite(f"cannot look into {folder} ({error.strerror}); name another") from error
    if is_other:
        raise CannotWrite(
            f"{folder} holds other things than a bank, and would be replaced; name another folder"
        )
    above = next(path for path in folder.absolute().parents if os.path.exists(path))
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise CannotWrite(f"cannot write {folder}: {above} takes no new folder; name another place")


def content_hash(config: Mapping[str, Any]) -> str:
    """A hash of what `bank.json` says, whatever its layout; the hash itself is left out."""
    said = {key: value for key, value in config.items() if key != "content_sha256"}
    # There and back first: JSON has no tuples, and its keys are strings.
    plain = json.loads(json.dumps(said))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _require_identity(model: Mapping[str, Any]) -> None:
    """Without a fingerprint a bank would pass for a bank of any model of its shape."""
    for key in ("name", "fingerprint"):
        if not isinstance(model.get(key), str) or not model[key]:
            raise ValueError(f"it does not say which model it is of: no {key}")


def _maps(tensors: Mapping[str, Tensor]) -> list[LinearMap]:
    grouped: dict[tuple[int, int], dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith(PART):
            continue
        pair, _, name = key.partition(".")
        src, _, dst = pair.partition("-")
        grouped.setdefault((int(src), int(dst)), {})[name] = value
    return [LinearMap(src, dst, **named) for (src, dst), named in sorted(grouped.items())]


def _parts(tensors: Mapping[str, Tensor]) -> dict[tuple[int, str], LinearMap]:
    grouped: dict[tuple[int, str], dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith(PART):
            block, part, name = key.removeprefix(PART).split(".")
            grouped.setdefault((int(block), part), {})[name] = value
    return {key: LinearMap(key[0] - 1, key[0], **named) for key, named in sorted(grouped.items())}


def _load_weights(path: Path, sha256: str | None) -> dict[str, Tensor]:
    if not path.is_file():
        raise BadArtifact(f"{path} is missing; was the folder copied whole?")
    found = sha256_of(path)
    if found != sha256:
        raise BadArtifact(
            f"{path} was changed or cut short since it was saved (sha256 {found[:8]}, "
            f"{str(sha256)[:8]} was wanted); copy or fit it again"
        )
    try:
        return load_file(path)
    except SafetensorError as error:
        raise BadArtifact(f"{path} is not a safetensors file ({error})") from error


def _download(repo_id: str, revision: str | None, token: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    wanted = [CONFIG, WEIGHTS, "README.md"]
    try:
        return Path(
            snapshot_download(repo_id, revision=revision, token=token, allow_patterns=wanted)
        )
    except HFValidationError as error:
        raise BadArtifact(f"no folder {repo_id}, and it is no hub name either") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CannotFetch(
            f"no folder {repo_id}, and the hub did not give it either ({first[:160]})"
        ) from error
