"""A folder of one JSON file and one of tensors that can be saved, shared and trusted.

In: plain values and tensors, under file names that tell what kind of thing it is.
Out: the folder, written all or nothing; or what it holds, once its format, its checksums and the
model that it says it is of have been looked at. No pickle is ever read.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from layerleap.errors import BadArtifact, CannotFetch, CannotWrite, WrongModel
from layerleap.files import read_json, sha256_of, whole_folder, write_json
from layerleap.models.transformer import Transformer


@dataclass(frozen=True)
class Artifact:
    """One kind of folder: a bank, a probe."""

    what: str
    config: str  # name of the JSON file
    weights: str  # name of the safetensors file
    format: int

    def save(
        self,
        folder: str | Path,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        readme: str,
    ) -> Path:
        """Write it, all or nothing; only an earlier one of its kind or an empty folder goes."""
        folder = Path(folder)
        self.check_target(folder)
        with whole_folder(folder) as temporary:
            save_file(dict(tensors), temporary / self.weights)
            checksum = sha256_of(temporary / self.weights)
            said = {"format": self.format, **config, "sha256": checksum}
            write_json(temporary / self.config, {**said, "content_sha256": content_hash(said)})
            (temporary / "README.md").write_text(readme, encoding="utf8")
        return folder

    def check_target(self, folder: str | Path) -> None:
        """Refuse a folder that cannot be written to, or that holds anything but its own kind.

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
            is_full = folder.is_dir() and any(folder.iterdir())
            is_other = is_full and not (folder / self.config).is_file()
        except OSError as error:
            raise CannotWrite(
                f"cannot look into {folder} ({error.strerror}); name another"
            ) from error
        if is_other:
            raise CannotWrite(
                f"{folder} holds other things than a {self.what}, and would be replaced; name "
                "another folder"
            )
        above = next(path for path in folder.absolute().parents if os.path.exists(path))
        if not (above.is_dir() and os.access(above, os.W_OK)):
            raise CannotWrite(
                f"cannot write {folder}: {above} takes no new folder; name another place"
            )

    def load(
        self, source: str | Path, *, revision: str | None = None, token: str | None = None
    ) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
        """Where it lies, what it says and its tensors; from a folder or a hub repository."""
        folder = Path(source)
        if not folder.is_dir():
            folder = self._download(str(source), revision, token)
        path = folder / self.config
        if not path.is_file():
            raise BadArtifact(
                f"{folder} is no {self.what}, or not a whole one: it has no {self.config}"
            )
        config = read_json(path)
        found = config.get("format") if isinstance(config, dict) else None
        if found != self.format:
            raise BadArtifact(
                f"{path} holds format {found}; {self.format} was wanted, "
                f"fit the {self.what} again or update layerleap"
            )
        if config.get("content_sha256") != content_hash(config):
            raise BadArtifact(
                f"{path} was changed since it was saved; copy or fit the {self.what} again"
            )
        return path, config, _load_weights(folder / self.weights, config.get("sha256"))

    def _download(self, repo_id: str, revision: str | None, token: str | None) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        wanted = [self.config, self.weights, "README.md"]
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

    def check_model(
        self, model: Mapping[str, Any], n_layers: int, d_model: int, transformer: Transformer
    ) -> None:
        """Raise `WrongModel` unless what was made of `model` was made of exactly these weights."""
        found = transformer.identity
        if (n_layers, d_model) != (transformer.n_layers, transformer.d_model):
            raise WrongModel(
                f"this {self.what} is of {model['name']} with {n_layers} layers of {d_model}, "
                f"but {found.name} has {transformer.n_layers} of {transformer.d_model}; "
                f"fit a {self.what} for it"
            )
        if model.get("fingerprint") != found.fingerprint:
            raise WrongModel(
                f"this {self.what} is of {model['name']} (weights "
                f"{str(model.get('fingerprint'))[:8]}), but the weights of {found.name} are "
                f"{found.fingerprint[:8]}; fit a {self.what} for them"
            )


def content_hash(config: Mapping[str, Any]) -> str:
    """A hash of what the JSON file says, whatever its layout; the hash itself is left out."""
    said = {key: value for key, value in config.items() if key != "content_sha256"}
    # There and back first: JSON has no tuples, and its keys are strings.
    plain = json.loads(json.dumps(said))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def require_identity(model: Mapping[str, Any]) -> None:
    """Without a fingerprint an artefact would pass for one of any model of its shape."""
    for key in ("name", "fingerprint"):
        if not isinstance(model.get(key), str) or not model[key]:
            raise ValueError(f"it does not say which model it is of: no {key}")


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
