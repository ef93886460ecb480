"""A saved artifact: a folder with one JSON file, one safetensors file and a README.

In: plain values and tensors. Out: the folder, written atomically; or its contents, after checking
format, checksums and the model it belongs to. No pickle is ever read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from layerleap.errors import BadArtifact, CannotFetch, CannotWrite, WrongModel, first_line
from layerleap.files import (
    check_writable,
    content_hash,
    read_json,
    sha256_of,
    whole_folder,
    write_json,
)
from layerleap.models.facts import ModelFacts

if TYPE_CHECKING:
    from torch import Tensor

    from layerleap.models.transformer import Transformer


@dataclass(frozen=True)
class Artifact:
    """One kind of artifact: a bank, a probe."""

    what: str  # its name in error messages
    config: str  # name of the JSON file
    weights: str  # name of the safetensors file
    format: int

    def save(
        self,
        folder: str | Path,
        config: Mapping[str, Any],
        tensors: "Mapping[str, Tensor]",
        readme: str,
    ) -> Path:
        """Write it atomically; only an earlier one of its kind or an empty folder is replaced."""
        from safetensors.torch import save_file  # here: settings are checked without torch

        folder = Path(folder)
        self.check_target(folder)
        with whole_folder(folder) as temporary:
            save_file(dict(tensors), temporary / self.weights)
            checksum = sha256_of(temporary / self.weights)
            content = {"format": self.format, **config, "sha256": checksum}
            content["content_sha256"] = config_hash(content)
            write_json(temporary / self.config, content)
            (temporary / "README.md").write_text(readme, encoding="utf8")
        return folder

    def check_target(self, folder: str | Path, *, replace: bool = True) -> None:
        """Refuse a folder that is not writable, or holds other files; or a saved artifact to keep.

        Saving replaces the folder, so a mistyped path must not delete other files. Call it before a
        long run, so that the run does not fail when it saves its result.
        """
        folder = Path(folder)
        check_writable(folder, "folder")
        if Path.cwd().is_relative_to(folder.resolve()):
            raise CannotWrite(
                f"{folder} is, or contains, the current folder, and would be replaced; choose a "
                "new folder"
            )
        try:
            is_full = folder.is_dir() and any(folder.iterdir())
            is_other = is_full and not (folder / self.config).is_file()
        except OSError as error:
            raise CannotWrite(
                f"cannot read {folder} ({error.strerror}); choose another folder"
            ) from error
        if is_other:
            raise CannotWrite(
                f"{folder} holds other files than a {self.what}, and would be replaced; choose "
                "another folder"
            )
        if is_full and not replace:
            raise already_there(folder, self.what)

    def load(
        self, source: str | Path, *, revision: str | None = None, token: str | None = None
    ) -> tuple[Path, dict[str, Any], dict[str, Any]]:
        """The path of the JSON file, its content, and the tensors; from a folder or the hub."""
        path, config = self.read(source, revision=revision, token=token)
        return path, config, _load_weights(path.parent / self.weights, config.get("sha256"))

    def read(
        self, source: str | Path, *, revision: str | None = None, token: str | None = None
    ) -> tuple[Path, dict[str, Any]]:
        """The path of the JSON file and its content, without the tensors."""
        folder = Path(source)
        if not folder.is_dir():
            folder = self._download(str(source), revision, token)
        path = folder / self.config
        if not path.is_file():
            raise BadArtifact(f"{folder} is not a complete {self.what}: it has no {self.config}")
        config = read_json(path)
        number = config.get("format") if isinstance(config, dict) else None
        if number != self.format:
            raise BadArtifact(
                f"{path} has format {number}; expected format {self.format}: fit the {self.what} "
                "again, or update layerleap"
            )
        if config.get("content_sha256") != config_hash(config):
            raise BadArtifact(
                f"{path} was changed after it was saved; copy or fit the {self.what} again"
            )
        return path, config

    def _download(self, repo_id: str, revision: str | None, token: str | None) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        files = [self.config, self.weights, "README.md"]
        try:
            return Path(
                snapshot_download(repo_id, revision=revision, token=token, allow_patterns=files)
            )
        except HFValidationError as error:
            raise BadArtifact(
                f"{repo_id} is neither a folder nor a valid name of a hub repository"
            ) from error
        except (HfHubHTTPError, OSError, ValueError) as error:
            raise CannotFetch(
                f"there is no folder {repo_id}, and downloading it from the hub failed "
                f"({first_line(error)[:160]})"
            ) from error

    def check_shape(self, config: Mapping[str, Any], facts: ModelFacts) -> None:
        """Raise `WrongModel` if the card says that the model has another shape than is known."""
        card = config.get("n_layers"), config.get("d_model")
        known = facts.n_layers, facts.d_model
        if any(None not in both and both[0] != both[1] for both in zip(card, known, strict=True)):
            raise WrongModel(
                f"this {self.what} belongs to {config['model']['name']} with {card[0]} layers of "
                f"{card[1]}, but {facts.name} has {known[0]} of {known[1]}; fit a {self.what} for "
                "it"
            )

    def check_model(
        self, model: Mapping[str, Any], n_layers: int, d_model: int, transformer: "Transformer"
    ) -> None:
        """Raise `WrongModel` unless `model` has exactly the weights of `transformer`."""
        transformer.refresh()
        identity = transformer.identity
        shape = {"model": model, "n_layers": n_layers, "d_model": d_model}
        facts = ModelFacts(identity.name, transformer.n_layers, transformer.d_model)
        self.check_shape(shape, facts)
        if model.get("fingerprint") != identity.fingerprint:
            since = ", changed since it was loaded" if transformer.is_changed else ""
            lend = LEND if self.what == "bank" else ""
            raise WrongModel(
                f"this {self.what} belongs to {model['name']} (weights "
                f"{str(model.get('fingerprint'))[:8]}), but the weights of {identity.name} are "
                f"{identity.fingerprint[:8]}{since}; fit a {self.what} for them{lend}"
            )


def already_there(place: Path, what: str) -> CannotWrite:
    """The refusal to replace what a command wrote before."""
    return CannotWrite(f"{place} already holds a {what}; --force replaces it, or choose another")


LEND = ", or read through it all the same with other_model=True (--other-model)"


def config_hash(config: Mapping[str, Any]) -> str:
    """Hash of the JSON content, without the hash itself."""
    return content_hash({}, config, "content_sha256")


def require_identity(model: Mapping[str, Any]) -> None:
    """Require name and fingerprint; otherwise any model of the same shape would be accepted."""
    for key in ("name", "fingerprint"):
        if not isinstance(model.get(key), str) or not model[key]:
            raise ValueError(f"it does not identify its model: no {key}")


def _load_weights(path: Path, sha256: str | None) -> "dict[str, Tensor]":
    from safetensors.torch import load_file

    if not path.is_file():
        raise BadArtifact(f"{path} is missing; copy the whole folder")
    actual = sha256_of(path)
    if actual != sha256:
        raise BadArtifact(
            f"{path} was changed or truncated after it was saved (sha256 {actual[:8]}, expected "
            f"{str(sha256)[:8]}); copy or fit it again"
        )
    try:
        return load_file(path)
    except SafetensorError as error:
        raise BadArtifact(f"{path} is not a safetensors file ({error})") from error


BANK = Artifact("bank", "bank.json", "maps.safetensors", 1)
TUNED_MODEL = Artifact("fine-tuned model", "layerleap.json", "", 1)
