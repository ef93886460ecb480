"""Where the training of maps stands: counters, record, and a checkpoint to go on from.

In: translators and what the held-out rows say of them. Out: which layers still train, the record,
and one file of safetensors with all of it, written in one step.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from layerleap.errors import BadArtifact, WrongModel
from layerleap.files import whole_file
from layerleap.maps.translator import Translator
from layerleap.stats.moments import content_hash

FORMAT, NAME = 1, "layerleap.tuning"
COUNTERS = ("seconds", "best", "misses", "stopped")  # by layer


@dataclass
class Training:
    """The translators of all layers, and how far they have come."""

    translators: dict[int, Translator]
    step: int = 0
    checked: int = -1  # the step of the last look at the held-out rows
    seconds: dict[int, float] = field(default_factory=dict)  # spent on each layer
    best: dict[int, float] = field(default_factory=dict)  # the least KL
    misses: dict[int, int] = field(default_factory=dict)  # looks since then
    stopped: dict[int, int] = field(default_factory=dict)  # the step at which a layer stopped
    record: list[dict[str, Any]] = field(default_factory=list)

    @property
    def active(self) -> list[int]:
        """Layers that still train."""
        return [layer for layer in self.translators if layer not in self.stopped]

    def judge(self, layer: int, kl: float, patience: int) -> bool:
        """True if the layer has never been better; one that keeps failing is stopped."""
        if kl < self.best.get(layer, math.inf):
            self.best[layer], self.misses[layer] = kl, 0
            self.translators[layer].keep()
            return True
        self.misses[layer] += 1
        if self.misses[layer] >= patience or not math.isfinite(kl):
            self.stopped[layer] = self.step
        return False

    def note(
        self, layer: int, start: str, rows_seen: int, kl: float, agreement: float, *, best: bool
    ) -> None:
        """Write one look into the record; a KL that is no number is None there."""
        spent = self.seconds.get(layer, 0.0)
        self.record.append(
            {
                "layer": layer, "start": start, "rows_seen": rows_seen, "seconds": spent,
                "kl": kl if math.isfinite(kl) else None, "agreement": agreement, "best": best,
            }
        )  # fmt: skip

    def save(self, path: Path, about: Mapping[str, Any]) -> None:
        """Write everything; `about` is what a run that goes on must have in common."""
        tensors = {
            f"{layer}.{name}": value.cpu().contiguous()
            for layer, translator in self.translators.items()
            for name, value in translator.state().items()
        }
        counters = {
            name: [[layer, value] for layer, value in getattr(self, name).items()]
            for name in COUNTERS
        }
        header = {
            "format": FORMAT, "about": about, "step": self.step, "checked": self.checked,
            "record": self.record, **counters,
        }  # fmt: skip
        header["sha256"] = content_hash(tensors, header)
        with whole_file(path) as temporary:
            save_file(tensors, temporary, metadata={NAME: json.dumps(header, allow_nan=False)})

    def resume(self, path: Path, about: Mapping[str, Any]) -> None:
        """Go on from what `save` wrote; a file of another run is refused."""
        tensors, header = _read(path)
        differing = [key for key in about if header["about"].get(key) != _plain(about[key])]
        if differing:
            raise WrongModel(
                f"{path} is of a training with other settings ({', '.join(differing)}); "
                "delete it to start anew, or repeat those settings to go on"
            )
        self.step, self.checked = header["step"], header["checked"]
        self.record = header["record"]
        for name in COUNTERS:
            setattr(self, name, {layer: value for layer, value in header[name]})
        for layer, translator in self.translators.items():
            translator.restore({n: tensors[f"{layer}.{n}"] for n in translator.state()})


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(NAME, "null"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise BadArtifact(
            f"{path} is truncated or no checkpoint of a training ({error})"
        ) from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise BadArtifact(f"{path} is no checkpoint of a training of format {FORMAT}; delete it")
    if header.get("sha256") != content_hash(tensors, header):
        raise BadArtifact(f"{path} was changed since it was saved; delete it to start anew")
    return tensors, header


def summary(record: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per layer and start: what training took to get ahead of the closed form, and where it ended.

    `record` may be of several runs together. rows_needed and seconds_needed are those at the first
    look with a lower KL than the closed form's, None if there was none; kl_tuned and
    agreement_tuned are of the state that was kept, and `improved` is False where that is the start.
    """
    closed = {r["layer"]: r for r in record if (r["start"], r["rows_seen"]) == ("mat", 0)}
    runs: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in record:
        runs.setdefault((row["layer"], row["start"]), []).append(row)
    found = []
    for (layer, start), rows in sorted(runs.items()):
        if not any(row["rows_seen"] for row in rows):
            continue  # the closed form, noted for comparison
        kept = [row for row in rows if row["best"]][-1]
        base = closed[layer]
        ahead = [r for r in rows if r["rows_seen"] and r["kl"] is not None and r["kl"] < base["kl"]]
        first: dict[str, Any] = ahead[0] if ahead else {}
        found.append(
            {
                "layer": layer, "start": start, "rows_needed": first.get("rows_seen"),
                "seconds_needed": first.get("seconds"), "kl_closed": base["kl"],
                "kl_tuned": kept["kl"], "agreement_closed": base["agreement"],
                "agreement_tuned": kept["agreement"], "improved": kept["rows_seen"] > 0,
            }
        )  # fmt: skip
    return found
