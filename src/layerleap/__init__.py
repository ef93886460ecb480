"""layerleap: see what a transformer is about to say, layers before it says it, and act on it.

    zoo -> models -> stream -> stats -> maps -> read -> act -> study -> show

A stage imports only from stages to its left. Public names are
loaded when first used, so that `layerleap --help` does not wait for torch.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

STAGES = ("zoo", "models", "stream", "stats", "maps", "read", "act", "study", "show")

_HOME = {
    "load": "layerleap.models.load",
    "Transformer": "layerleap.models.transformer",
    "check_model": "layerleap.models.discovery.laws",
    "Sampling": "layerleap.stream.examples",
    "iter_documents": "layerleap.stream.texts",
    "Moments": "layerleap.stats.moments",
    "Tally": "layerleap.stats.tally",
    "LinearMap": "layerleap.maps.linear",
    "ShortcutBank": "layerleap.maps.bank",
    "import_mat": "layerleap.maps.imports",
    "import_tuned_lens": "layerleap.maps.imports",
    "Lens": "layerleap.read.lens",
    "Readings": "layerleap.read.readings",
    "collect": "layerleap.maps.fit",
    "merge": "layerleap.maps.fit",
    "bank_from": "layerleap.maps.fit",
    "fit_bank": "layerleap.maps.fit",
    "ShortcutSettings": "layerleap.study.shortcuts.settings",
    "decoder": "layerleap.act.decode.decoder",
    "generate": "layerleap.act.decode.generate",
    "suitability": "layerleap.study.suitability.study",
    "write_report": "layerleap.show.report.report",
    "LayerleapError": "layerleap.errors",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'layerleap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
