"""Other tensors in place of a model's parameters, inside a `with` block.

In: a wrapped model and tensors by parameter name. Out: passes on this thread compute with them,
and gradients reach them alone. The model's own parameters are neither written to nor replaced, so
they are the same bits afterwards, whatever happens inside.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.hooks.forward import Parameters, Tap, hooks_of, tapped

if TYPE_CHECKING:
    from layerleap.models.transformer import Transformer

Places = dict[nn.Module, dict[str, str]]  # by module, its own name of a parameter -> its full name


def parameter_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter -> the first name of it; tied parameters have several."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def places(transformer: "Transformer", names: Collection[str]) -> Places:
    """The modules that use some parameters, by their first names; tied ones have several users.

    Weights that are offloaded, or used by another library's forward, are refused.
    """
    model, hooks = transformer.model, hooks_of(transformer.model)
    known = dict(model.named_parameters())
    if unknown := sorted(set(names) - set(known)):
        raise BadSettings(
            f"{transformer.identity.name} has no parameter {unknown[0]}; its parameters are named "
            f"like {next(iter(known), '(it has none)')}"
        )
    by_tensor = {id(known[name]): name for name in names}
    found: Places = {}
    for module in model.modules():
        for own, parameter in module._parameters.items():
            if parameter is None or id(parameter) not in by_tensor:
                continue
            name = by_tensor[id(parameter)]
            if parameter.is_meta or hooks.instance_forward(module) is not None:
                raise ModelRefused(
                    f"{name} of {transformer.identity.name} is offloaded or adapted by another "
                    "library, so it cannot be replaced; load the model into memory"
                )
            if not parameter.is_floating_point():
                raise ModelRefused(f"{name} of {transformer.identity.name} is quantised")
            found.setdefault(module, {})[own] = name
    return found


@contextmanager
def computing_with(transformer: "Transformer", values: Mapping[str, Tensor]) -> Iterator[None]:
    """Run the model with `values` as parameters; only they can get a gradient.

    Gradients are recorded inside, even if the caller switched that off. The lock of the model is
    held. Parameters that an edit in force has changed already are refused.
    """
    model, hooks = transformer.model, hooks_of(transformer.model)
    with hooks.lock:
        found = places(transformer, values)
        if any(hooks.is_reweighted(module) for module in found):
            raise BadSettings(
                "a delta is in force for the parameters to be trained; leave its `with` block, and "
                "start from it with start=delta"
            )
        taps = {module: Tap(parameters=_giving(own, values)) for module, own in found.items()}
        with tapped(model, taps), frozen(model), torch.inference_mode(False), torch.enable_grad():
            yield


def _giving(own: Mapping[str, str], values: Mapping[str, Tensor]) -> Any:
    def parameters(_: Parameters) -> Parameters:
        return {name: values[full] for name, full in own.items()}

    return parameters


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Keep the model's own parameters out of gradients, which would hold activations for them.

    Other threads that run this model get its values as ever, but no gradients meanwhile.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
