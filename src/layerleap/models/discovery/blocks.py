"""The blocks of a model, discovered from the order in which its modules run.

In: the trace of one forward pass.
Out: the call of the block behind each layer.
Not here: verification. `laws` checks the result on fresh inputs.

No model family is named: the blocks are the last outermost chain of modules in which each takes
exactly the state that the one before returned.
"""

import itertools
from collections.abc import Sequence

from torch import nn

from layerleap.errors import ModelRefused
from layerleap.models.discovery.compare import is_same
from layerleap.models.discovery.trace import Call

PATHS_HINT = (
    "if you know the model's structure, pass the paths yourself: "
    "load(model, blocks='path.of.the.list', tail=['path.of.final.norm', 'path.of.head'])"
)


def find_blocks(
    model: nn.Module, calls: Sequence[Call], path: str | None = None
) -> tuple[Call, ...]:
    """The call behind each layer: entry 0 turns h[0] into h[1].

    `path` is that of the list of blocks; None to discover it.
    """
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and (path is None or name == path)
    }
    if not lists:
        raise ModelRefused(
            f"no list of blocks{f' at {path!r}' if path else ''} in {type(model).__name__}: "
            f"expected an nn.ModuleList whose items run one after another; {PATHS_HINT}"
        )
    chains = [chain for module in lists.values() if (chain := _chain(module, calls))]
    outermost = [
        chain
        for chain in chains
        if not any(call.contains(chain[0]) for other in chains for call in other)
    ]
    if not outermost:
        raise ModelRefused(
            f"law 'chain' failed for {type(model).__name__}: in none of {sorted(lists)} does each "
            f"item take exactly the state that the item before returned; {PATHS_HINT}"
        )
    # An encoder-decoder has two chains; the one that ends last feeds the head.
    return max(outermost, key=lambda chain: chain[-1].end)


def _chain(items: nn.Module, calls: Sequence[Call]) -> tuple[Call, ...]:
    """The calls of a list's items if each takes what the one before returned, otherwise ()."""
    members = {id(item) for item in items.children()}
    chain = tuple(call for call in calls if id(call.module) in members)
    if not chain or members != {id(call.module) for call in chain}:
        return ()
    for call in chain:
        if call.takes is None or call.gives is None or call.takes.dim() != 3:
            return ()
        if call.gives.shape != call.takes.shape:
            return ()
    for before, after in itertools.pairwise(chain):
        if before.end > after.start or not is_same(after.takes, before.gives):
            return ()
    return chain
