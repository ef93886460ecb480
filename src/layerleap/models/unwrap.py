"""The model of transformers inside of what other libraries wrap around it.

In: anything: a compiled model, a model with adapters, a model spread over devices.
Out: the `PreTrainedModel` inside and a sentence for each wrapper left out, or `ModelRefused`.

No wrapper is known by its class. One is left out only if the model inside computes the same: LoRA
lives inside, so it stays in force; a prompt or prefix that is put before every input does not, and
without it another model would be read.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from layerleap.errors import LayerleapError, ModelRefused, first_line
from layerleap.models.discovery.compare import rounding, row_gap
from layerleap.models.discovery.probe import probe
from layerleap.models.hooks.foreign import KINDS, foreign_code, in_words
from layerleap.models.hooks.forward import uncompiled


def unwrap(model: Any) -> tuple[Any, tuple[str, ...]]:
    """The model inside, and what was left out, a sentence each; other things as they are."""
    notes: list[str] = []
    while isinstance(model, nn.Module) and not isinstance(model, PreTrainedModel):
        name = type(model).__name__
        code = foreign_code(model, [("", model)])
        hooks = [entry for entry in code if entry.kind in KINDS.values()]
        if hooks:
            raise ModelRefused(
                f"its {name} has {in_words(hooks)}, which only acts when the {name} is called; put "
                "it on the model inside, or remove it"
            )
        if isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
            notes.append("it was compiled; while layerleap reads or edits it, it runs uncompiled")
        elif callable(base := getattr(model, "get_base_model", None)):
            inner = base()
            _require_same(model, inner)
            notes.append(f"read inside of its {name}, with the adapters that are on")
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
            notes.append(f"read inside of its {name}, on one device")
        else:
            break
        model = inner
    return model, tuple(notes)


def _require_same(wrapper: nn.Module, inner: Any) -> None:
    """Refuse a wrapper that does more than the model inside, which would not be read."""
    if not isinstance(inner, PreTrainedModel) or inner.training:
        return  # refused for that, with a better reason
    name = type(wrapper).__name__
    try:
        inputs = probe(inner)
        with torch.no_grad(), uncompiled():
            theirs, ours = (module(**inputs).logits for module in (wrapper, inner))
        gap = row_gap(theirs, ours)
        reason = f"their logits differ by {gap:.1g}"
        if ours.shape != theirs.shape:
            reason = f"{theirs.shape[1]} positions come out of {ours.shape[1]}"
        is_same = gap <= rounding(ours)
    except LayerleapError:
        raise
    except Exception as error:  # whatever the wrapper's own code raises
        is_same, reason = False, f"{type(error).__name__}: {first_line(error)}"
    if not is_same:
        raise ModelRefused(
            f"{name} does more than the model inside of it ({reason}), as an adapter that puts a "
            "prompt or prefix before every input; only adapters inside of the model can be read. "
            "Merge it, or read the model without it: load(model.get_base_model())"
        )
