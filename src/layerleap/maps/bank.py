"""ShortcutBank: all maps of one model, with their model card, to save and share.

In: maps, and how they were fitted and scored.
Out: a folder with `bank.json`, `maps.safetensors` and a README. Loading verifies all of it.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from layerleap.errors import BadArtifact, BadSettings, OtherModelWarning, WrongModel
from layerleap.maps.artifact import BANK, require_identity
from layerleap.maps.card import model_card
from layerleap.maps.kinds import kind_by_tensors, kind_named, leading_kind
from layerleap.maps.linear import FitReport
from layerleap.maps.map import IdentityMap, Map
from layerleap.models.identity import caveats
from layerleap.models.transformer import Transformer
from layerleap.results.cells import grid_of
from layerleap.results.columns import Column, Table
from layerleap.stream.split import pack_fingerprints, unpack_fingerprints

if TYPE_CHECKING:
    from layerleap.lens.evaluate import Evaluation
    from layerleap.lens.lens import Lens

CONFIG, WEIGHTS = BANK.config, BANK.weights
PART = "part."  # prefix of tensors of parts; names of layer maps start with a number


class ShortcutBank:
    """Maps by (src, dst), the model they belong to, and their card. Immutable, always fitted.

    `parts` holds maps that replace parts of blocks, by (block, part): (3, "attn"), (3, "ffn"),
    (3, "attn_norm"), ...; their reports are in `part_fits`. `documents` holds fingerprints of the
    documents that the maps were fitted or tuned on; None if they are not known.
    """

    def __init__(
        self,
        maps: Iterable[Map],
        *,
        model: Mapping[str, Any],
        n_layers: int,
        d_model: int,
        parts: Mapping[tuple[int, str], Map] | None = None,
        fits: Iterable[FitReport] = (),
        settings: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        quality: Iterable[Mapping[str, Any]] = (),
        source: str = "layerleap",
        documents: Iterable[int] | None = None,
    ) -> None:
        self.maps = {(m.src, m.dst): m for m in maps}
        self.model = dict(model)  # the identity of the model, as JSON types
        self.n_layers, self.d_model = n_layers, d_model
        self.parts = dict(parts or {})
        fits = list(fits)
        self.fits = {(fit.src, fit.dst): fit for fit in fits if fit.part is None}
        self.part_fits = {(fit.dst, fit.part): fit for fit in fits if fit.part is not None}
        self.settings, self.data = dict(settings or {}), dict(data or {})
        self.quality = [dict(row) for row in quality]  # held-out scores, if measured
        self.source = source  # the program that fitted it
        self.documents = None if documents is None else frozenset(documents)

    def __getitem__(self, pair: tuple[int, int]) -> Map:
        """The map from src to dst; the identity if both are the same layer."""
        src, dst = pair
        if src == dst and 0 <= src <= self.n_layers:
            return IdentityMap(src, dst)
        if pair not in self.maps:
            pairs = "every layer to the last" if self.is_final_only else f"{len(self.maps)} pairs"
            raise BadSettings(
                f"no map from layer {src} to layer {dst} in this bank of {self.model['name']}: "
                f"the model has layers 0 to {self.n_layers}, the bank holds {pairs}"
            )
        return self.maps[pair]

    def __len__(self) -> int:
        return len(self.maps)

    def __repr__(self) -> str:
        return f"ShortcutBank({len(self)} maps of {self.model['name']}, {self.n_layers} layers)"

    def _repr_html_(self) -> str:
        from layerleap.results.page import facts_html

        known = {key: value for key, value in self.data.items() if value not in (None, "", [])}
        facts = {"maps": len(self), "layers": self.n_layers, "d_model": self.d_model, **known}
        columns = tuple(Column(key, form="{:.4g}") for key in (self.quality or [{}])[0])
        scores = Table("quality", "scores on held-out documents", lambda _: self.quality, columns)
        return facts_html(f"bank of {self.model['name']}", facts, grid_of(scores, self))

    @property
    def is_final_only(self) -> bool:
        """True if the bank holds a map from every layer to the last, and no others."""
        return set(self.maps) == {(src, self.n_layers) for src in range(self.n_layers)}

    @property
    def kind(self) -> str:
        """The kind of its maps to the last layer, which names lenses; see `leading_kind`."""
        final = {m.kind for (_, dst), m in self.maps.items() if dst == self.n_layers}
        return leading_kind(final or {m.kind for m in self.maps.values()})

    def check_model(self, transformer: Transformer) -> None:
        """Raise `WrongModel` unless the bank was fitted on exactly these weights."""
        BANK.check_model(self.model, self.n_layers, self.d_model, transformer)

    def lent_to(self, transformer: Transformer) -> "ShortcutBank":
        """The bank for a model that it was not fitted on, such as a fine-tuned one.

        It must have the same class, number of layers and width. A warning names both models, and
        every result says so; the bank itself stays as it is.
        """
        transformer.refresh()
        origin, theirs = self.model, transformer.identity.to_dict()
        if origin["fingerprint"] == theirs["fingerprint"]:
            return self
        known = origin.get("architecture", theirs["architecture"])  # imported banks do not say
        ours = known, self.n_layers, self.d_model
        if ours != (theirs["architecture"], transformer.n_layers, transformer.d_model):
            raise WrongModel(
                f"this bank belongs to {origin['name']} ({known}, {self.n_layers} layers of "
                f"{self.d_model}), but {theirs['name']} is {theirs['architecture']} with "
                f"{transformer.n_layers} of {transformer.d_model}; only a bank of the same class, "
                "number of layers and width can be lent"
            )
        fitted = origin.get("fitted_on") or {key: origin[key] for key in ("name", "fingerprint")}
        lent = self.changed(model={**theirs, "fitted_on": fitted})
        warnings.warn(caveats(lent.model)[-1], OtherModelWarning, stacklevel=3)
        return lent

    def lens(self, transformer: Transformer, *, other_model: bool = False) -> "Lens":
        """A lens that reads `transformer` through these maps.

        Args:
            other_model: allow a model that the bank was not fitted on; see `lent_to`.
        """
        from layerleap.lens.lens import Lens  # imported on demand, for convenience

        return Lens(transformer, self, other_model=other_model)

    def evaluate(
        self, transformer: Transformer, text: Any = None, *args: Any, **options: Any
    ) -> "Evaluation":
        """The scores of this bank on a text; see `layerleap.evaluate`."""
        from layerleap.lens.evaluate import evaluate

        return evaluate(transformer, self, text, *args, **options)

    def to(self, devices: Callable[[int], Any] | Mapping[int, Any]) -> "ShortcutBank":
        """The bank with each map on the device of its source layer.

        Args:
            devices: the device of each layer. A map on another device than its input copies its
                weights on every call; placing it here avoids that. A part's map goes to the
                device of its block's output.
        """
        device_of = devices.__getitem__ if isinstance(devices, Mapping) else devices
        placed = [m.to(device_of(m.src)) for m in self.maps.values()]
        parts = {key: m.to(device_of(m.dst)) for key, m in self.parts.items()}
        moved = self.changed(maps=placed, parts=parts)
        is_same = all(value is moved._tensors()[key] for key, value in self._tensors().items())
        return self if is_same else moved

    def changed(self, **changes: Any) -> "ShortcutBank":
        """A copy of the bank with some arguments of the constructor changed."""
        arguments: dict[str, Any] = {key: getattr(self, key) for key in FIELDS}
        fits = [*self.fits.values(), *self.part_fits.values()]
        arguments |= {"maps": self.maps.values(), "parts": self.parts, "fits": fits}
        arguments |= {"documents": self.documents, **changes}
        return ShortcutBank(arguments.pop("maps"), **arguments)

    def card(self) -> str:
        """The model card in Markdown."""
        return model_card(self)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the bank atomically; only an earlier bank or an empty folder is replaced."""
        return BANK.save(folder, self._config(), self._tensors(), self.card())

    def digest(self) -> str:
        """Hash of all numbers in the bank, and of what they mean."""
        digest = blake2b(digest_size=16)
        for key, one in sorted(self._keys().items()):
            digest.update(f"{key} {one.kind}".encode())
        for name, value in sorted(self._tensors().items()):
            digest.update(name.encode() + value.detach().cpu().float().numpy().tobytes())
        return digest.hexdigest()

    def _keys(self) -> dict[str, Map]:
        """Every map by the key it is saved under."""
        keys = {f"{src}-{dst}": m for (src, dst), m in self.maps.items()}
        return keys | {f"{PART}{block}.{part}": m for (block, part), m in self.parts.items()}

    def _tensors(self) -> dict[str, Tensor]:
        keys = self._keys().items()
        return {f"{key}.{name}": t for key, m in keys for name, t in m.tensors().items()}

    def _config(self) -> dict[str, Any]:
        fits = [fit.to_dict() for fit in (*self.fits.values(), *self.part_fits.values())]
        documents = None if self.documents is None else pack_fingerprints(self.documents)
        config = {key: getattr(self, key) for key in FIELDS}
        kinds = {key: kind_named(m.kind).kind for key, m in self._keys().items()}
        return {**config, "fits": fits, "documents": documents, "kinds": kinds}

    @classmethod
    def from_pretrained(
        cls, source: str | Path, *, revision: str | None = None, token: str | None = None
    ) -> "ShortcutBank":
        """The bank in a folder or hub repository; a damaged one is an error."""
        path, config, tensors = BANK.load(source, revision=revision, token=token)
        try:
            require_identity(config["model"])
            maps, parts = _grouped(tensors, config.get("kinds") or _kinds_before(tensors, config))
            fits = [FitReport.from_dict(fit) for fit in config["fits"]]
            packed = config.get("documents")  # banks of older versions do not have it
            documents = None if packed is None else unpack_fingerprints(packed)
            fields = {key: config[key] for key in FIELDS}
            return cls(maps, parts=parts, fits=fits, documents=documents, **fields)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadArtifact(f"{path} does not describe a bank ({error})") from error

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, token: str | None = None
    ) -> str:
        """Upload the bank as a model repository, and return its URL."""
        import tempfile

        from huggingface_hub import HfApi

        api = HfApi(token=token)
        with tempfile.TemporaryDirectory() as temporary:
            folder = self.save_pretrained(Path(temporary) / "bank")
            url = api.create_repo(repo_id, private=private, exist_ok=True)
            message = f"Upload {self!r}"
            api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message)
        return str(url)


FIELDS = ("source", "model", "n_layers", "d_model", "settings", "data", "quality")


def _grouped(
    tensors: Mapping[str, Tensor], kinds: Mapping[str, str]
) -> tuple[list[Map], dict[tuple[int, str], Map]]:
    """The maps of layers and of parts, from the tensors that `ShortcutBank._tensors` named."""
    named: dict[str, dict[str, Tensor]] = {key: {} for key in kinds}
    named |= _by_key(tensors)
    maps, parts = [], {}
    for key, by_name in named.items():
        kind = kind_named(kinds[key])
        if key.startswith(PART):
            block, part = key.removeprefix(PART).split(".")
            parts[int(block), part] = kind.from_tensors(int(block) - 1, int(block), by_name)
        else:
            src, dst = map(int, key.split("-"))
            maps.append(kind.from_tensors(src, dst, by_name))
    return sorted(maps, key=lambda m: (m.src, m.dst)), dict(sorted(parts.items()))


def _kinds_before(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, str]:
    """The kind of each map in a bank that was saved when banks did not say it."""
    is_tuned, last = config["settings"].get("lens") == "tuned", f"-{config['n_layers']}"
    return {
        key: kind_by_tensors(names, tuned=is_tuned and key.endswith(last))
        for key, names in _by_key(tensors).items()
    }


def _by_key(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """By the key of a map, its tensors by name."""
    named: dict[str, dict[str, Tensor]] = {}
    for name, value in sorted(tensors.items()):
        key, _, short = name.rpartition(".")
        named.setdefault(key, {})[short] = value
    return named
