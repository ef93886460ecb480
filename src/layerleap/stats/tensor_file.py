"""Tensors and a JSON header in one safetensors file, with a format number and a checksum.

In: named tensors and plain values. Out: a file, written atomically; or its content, verified.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from layerleap.errors import BadArtifact, WrongModel
from layerleap.files import content_hash, whole_file

# What reading a damaged file can raise.
DAMAGED: tuple[type[Exception], ...] = (SafetensorError, OSError, RuntimeError, LookupError)
DAMAGED += (TypeError, ValueError, AttributeError)


@dataclass(frozen=True)
class TensorFile:
    """One kind of file: moments, scores, saturation layers, a training checkpoint."""

    kind: str
    format: int

    def save(
        self, path: str | Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]
    ) -> None:
        """Write everything."""
        plain = {name: value.cpu().contiguous() for name, value in tensors.items()}
        header = {"format": self.format, **header}
        header["sha256"] = content_hash(plain, header)
        with whole_file(path) as temporary:
            metadata = {f"layerleap.{self.kind}": json.dumps(header, allow_nan=False)}
            save_file(plain, temporary, metadata=metadata)

    def load(self, path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors and the header that `save` wrote; anything else is a `BadArtifact`."""
        with self.parsing(path), safe_open(path, framework="pt") as file:
            header = self._header(path, file)
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            if header.get("sha256") != content_hash(tensors, header):
                raise BadArtifact(f"{path} was changed after it was saved; recreate it")
            return tensors, header

    def header(self, path: str | Path) -> dict[str, Any]:
        """Only the header, without reading the tensors or their checksum."""
        with self.parsing(path), safe_open(path, framework="pt") as file:
            return self._header(path, file)

    def _header(self, path: str | Path, file: Any) -> dict[str, Any]:
        header = json.loads((file.metadata() or {}).get(f"layerleap.{self.kind}", "{}"))
        number = header.get("format") if isinstance(header, dict) else None
        if number != self.format:
            raise BadArtifact(
                f"{path} has format {number}; expected format {self.format} of a {self.kind} file, "
                "recreate it"
            )
        return dict(header)

    @contextmanager
    def parsing(self, path: str | Path) -> Iterator[None]:
        """Turn errors of the code inside, which reads the content, into a `BadArtifact`."""
        try:
            yield
        except DAMAGED as error:
            raise BadArtifact(
                f"{path} is missing, truncated or not a {self.kind} file ({error})"
            ) from error


def require_same_run(path: str | Path, saved: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another run; `about` is what a resumed run must have in common."""
    plain = json.loads(json.dumps(about))
    differing = [key for key in plain if saved.get(key) != plain[key]]
    if differing:
        raise WrongModel(
            f"{path} was written by a run with different settings ({', '.join(differing)}); "
            "delete it to start over, or repeat those settings to resume"
        )
