"""ShortcutBank: all maps of one model as one artefact that can be saved, shared and trusted.

In: maps and the card that says how they were made and how good they are.
Out: a folder of `bank.json`, `maps.safetensors` and a README; loading checks all of it.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from layerleap.errors import BadArtifact, BadSettings, CannotFetch, WrongModel
from layerleap.files import read_json, sha256_of, whole_folder, write_json
from layerleap.maps.card import readme
from layerleap.maps.linear import Fit, Identity, LinearMap
from layerleap.models.transformer import Transformer

if TYPE_CHECKING:
    from layerleap.read.lens import Lens

FORMAT = 1
CONFIG, WEIGHTS = "bank.json", "maps.safetensors"


class ShortcutBank:
    """Maps by (src, dst), the model they belong to, and their card. Immutable, always fitted."""

    def __init__(
        self,
        maps: Iterable[LinearMap],
        *,
        model: Mapping[str, Any],
        n_layers: int,
        d_model: int,
        fits: Iterable[Fit] = (),
        settings: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        quality: Iterable[Mapping[str, Any]] = (),
        source: str = "layerleap",
    ) -> None:
        self.maps = {(m.src, m.dst): m for m in maps}
        self.model = dict(model)  # the identity of the model, as JSON types
        self.n_layers, self.d_model = n_layers, d_model
        self.fits = {(fit.src, fit.dst): fit for fit in fits}
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
        """True if every map leads to the last layer."""
        return all(dst == self.n_layers for _, dst in self.maps)

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
        if wanted.get("fingerprint") and wanted["fingerprint"] != found.fingerprint:
            raise WrongModel(
                f"this bank is of {wanted['name']} (weights {wanted['fingerprint'][:8]}), but the "
                f"weights of {found.name} are {found.fingerprint[:8]}; fit a bank for them"
            )

    def lens(self, transformer: Transformer) -> "Lens":
        """A lens that reads `transformer` through these maps."""
        from layerleap.read.lens import Lens  # the one look to the right: sugar for users

        return Lens(transformer, self)

    def card(self) -> str:
        """The quality card in Markdown."""
        return readme(self)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the bank, all or nothing."""
        folder = Path(folder)
        with whole_folder(folder) as temporary:
            save_file(self._tensors(), temporary / WEIGHTS)
            write_json(temporary / CONFIG, self._config(sha256_of(temporary / WEIGHTS)))
            (temporary / "README.md").write_text(self.card(), encoding="utf8")
        return folder

    def _tensors(self) -> dict[str, Tensor]:
        return {
            f"{src}-{dst}.{name}": value
            for (src, dst), m in self.maps.items()
            for name, value in m.tensors().items()
        }

    def _config(self, sha256: str) -> dict[str, Any]:
        return {
            "format": FORMAT, "source": self.source, "model": self.model,
            "n_layers": self.n_layers, "d_model": self.d_model, "sha256": sha256,
            "settings": self.settings, "data": self.data,
            "fits": [fit.to_dict() for fit in self.fits.values()], "quality": self.quality,
        }  # fmt: skip

    @classmethod
    def from_pretrained(
        cls, source: str | Path, *, revision: str | None = None, token: str | None = None
    ) -> "ShortcutBank":
        """Load a bank from a folder or a hub repository; a damaged one is an error."""
        folder = Path(source)
        if not folder.is_dir():
            folder = _download(str(source), revision, token)
        config = read_json(folder / CONFIG)
        found = config.get("format") if isinstance(config, dict) else None
        if found != FORMAT:
            raise BadArtifact(
                f"{folder / CONFIG} holds format {found}; {FORMAT} was wanted, "
                "fit the bank again or update layerleap"
            )
        tensors = _load_weights(folder / WEIGHTS, config.get("sha256"))
        try:
            return cls(
                _maps(tensors),
                fits=[Fit(**fit) for fit in config["fits"]],
                **{key: config[key] for key in KEPT},
            )
        except (KeyError, TypeError, ValueError) as error:
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


def _maps(tensors: Mapping[str, Tensor]) -> list[LinearMap]:
    grouped: dict[tuple[int, int], dict[str, Tensor]] = {}
    for key, value in tensors.items():
        pair, _, name = key.partition(".")
        src, _, dst = pair.partition("-")
        grouped.setdefault((int(src), int(dst)), {})[name] = value
    return [LinearMap(src, dst, **named) for (src, dst), named in sorted(grouped.items())]


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
