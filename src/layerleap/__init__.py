"""layerleap: see what a transformer is about to say, layers before it says it, and act on it.

    models -> stream -> stats -> maps -> read -> act -> show

A stage imports only from stages to its left; `study` and `show` may use all. Public names are
loaded when first used, so that `layerleap --help` does not wait for torch.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

STAGES = ("models", "stream", "stats", "maps", "read", "act", "study", "show")

_HOME = {
    "load": "layerleap.models.load",
    "Transformer": "layerleap.models.transformer",
    "check_model": "layerleap.models.laws",
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
    "collect": "layerleap.recipes",
    "merge": "layerleap.recipes",
    "bank_from": "layerleap.recipes",
    "fit_bank": "layerleap.recipes",
    "ShortcutSettings": "layerleap.study.shortcuts",
    "study_shortcuts": "layerleap.study.shortcuts",
    "decoder": "layerleap.act.decoder",
    "write": "layerleap.act.write",
    "suitability": "layerleap.study.suitability",
    "write_report": "layerleap.show.report",
    "LayerleapError": "layerleap.errors",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'layerleap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
