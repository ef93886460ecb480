"""The same reading of several models: do their curves agree over relative depth?

In: the study of one model, and other models. Out: the same study with the curves of all, and its
findings and claims made anew.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerleap.errors import BadSettings
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.study.shortcuts.claims import claims
from layerleap.study.shortcuts.findings import findings
from layerleap.study.shortcuts.more_findings import more_findings
from layerleap.study.shortcuts.run import slug
from layerleap.study.shortcuts.study import ShortcutSettings, study_shortcuts


def with_sizes(
    study: Mapping[str, Any],
    others: Iterable[Callable[[], Transformer]],
    settings: ShortcutSettings,
    *,
    work: Path | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """The study with curves of other models beside its own.

    Args:
        study: of the first model.
        others: each gives one more model when it is called: they are not held all at once.
        settings: of the study; the others are fitted and read with the same, to the last layer
            alone. A text that only suits the first model is replaced by what suits them.
        work: a folder for checkpoints; each model gets its own inside.
        progress: told about every batch.
    """
    sizes = _curves(study)
    small = replace(settings, other=None, pairs="final", sections=())
    for load in others:
        transformer = load()
        name = transformer.identity.name
        if name in {row["model"] for row in sizes}:
            raise BadSettings(f"{name} is given twice; name other models to compare with")
        own = None if work is None else work / f"beside-{slug(name)}"
        beside, _ = study_shortcuts(transformer, small, work=own, progress=progress)
        sizes += _curves(beside)
    result = {**study, "sizes": sizes}
    result["claims"] = claims(result)
    result["findings"] = [*findings(result), *more_findings(result)]
    return result


def _curves(study: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Curves of one model on its own text, mat and id, with what the model is."""
    model, text = study["model"], study["settings"]["text"]
    said = {"model": model["name"], **{k: model[k] for k in ("n_layers", "d_model", "parameters")}}
    kept = ("map", "layer", "metric", "value", "low", "high", "rows", "documents")
    return [
        {**said, "read": text, **{key: row[key] for key in kept}}
        for row in study["scores"]
        if row["read"] == text and row["fit"] in ("-", text)
    ]
