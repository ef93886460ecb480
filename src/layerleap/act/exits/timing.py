"""Seconds on this machine: blocks, head, maps and checks, for one answer at batch 1.

In: a wrapped model, and the bank whose maps are applied, if any.
Out: `Timing`: the median seconds of each, and what a row takes that exits early.

An answer is one new token after a short cached context; for a model without a cache, such as a
masked one, it is one text of that length. Every repeat runs all blocks once and then the head, so
that weights come from where they would come from in a real run. Only blocks, heads, maps and checks
are counted: not embeddings, and not the keys and values of skipped layers, which later tokens would
need. So these numbers are an upper bound on the seconds that early exit saves.
"""

import time
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from layerleap.act.exits.cost import LayerPrices, metered_blocks
from layerleap.errors import BadSettings
from layerleap.lens.lens import Lens
from layerleap.lens.metrics import Distribution
from layerleap.maps.bank import ShortcutBank
from layerleap.models.discovery.probe import accepts, prepare, probe, probe_ids
from layerleap.models.transformer import Transformer
from layerleap.stream.examples import longest_input, require_text


@dataclass(frozen=True)
class Timing(LayerPrices):
    """Median seconds per answer."""

    blocks: tuple[float, ...]  # of the blocks that make h[1], h[2], ...
    head: float  # of the tail, on one row
    check: float  # from logits to what a rule needs: softmax, the top two, entropy
    maps: tuple[float, ...]  # of mapping one row of h[0], h[1], ... to the last layer; 0 there
    context: int  # tokens that the answer depends on, its own included
    mode: Literal["cached", "whole"] = "cached"  # one new token, or the whole text
    repeats: int = 1
    spread: float = 0.0  # interquartile range of the full model's seconds, over their median
    threads: int = 1
    device: str = "cpu"
    dtype: str = "float32"

    def by_layer(
        self,
        checked: Iterable[int],
        *,
        carried: bool,
        reads: bool = True,
        head: float | None = None,
    ) -> Tensor:
        """(layer,): seconds of a row that exits at each layer.

        Args:
            checked: the layers at which the rule is checked.
            carried: True if states go through the maps of a bank first.
            reads: every check reads; if not, checks are free and only the exit is read.
            head: seconds of the head, to see what another one would change; measured when None.
        """
        if head is not None:
            return replace(self, head=head).by_layer(checked, carried=carried, reads=reads)
        maps = torch.tensor(self.maps, dtype=torch.float64) * carried
        reading = maps + self.head + self.check
        return self._paid(reading, reading * reads, checked, reads=reads)


def measure_timing(
    transformer: Transformer,
    *,
    tokens: int = 32,
    bank: ShortcutBank | None = None,
    repeats: int = 20,
    warm_up: int = 3,
) -> Timing:
    """Time the blocks, head, check and maps of one answer at batch 1; medians over the repeats.

    Args:
        transformer: a model of text, or an image classifier, for which `tokens` is ignored.
        tokens: the context length, the answer's own token included.
        bank: whose maps to the last layer are timed; none for the logit lens.
        repeats: passes that count.
        warm_up: passes before them that do not.
    """
    if transformer.kind != "image-class":
        require_text(transformer)
    limit = longest_input(transformer)
    if not 2 <= tokens <= limit:
        raise BadSettings(f"tokens {tokens}; expected 2 to {limit}, the most this model takes")
    if repeats < 1 or warm_up < 0:
        raise BadSettings(
            f"repeats {repeats} and warm_up {warm_up}; expected at least 1 and at least 0"
        )
    lens = Lens(transformer, bank)
    inputs, mode = _inputs(transformer, tokens)
    if transformer.kind == "image-class":  # as many tokens as an image has
        tokens = transformer.capture(inputs(), layers=[0]).states[0].shape[1]
    passes = [_one_pass(lens, inputs()) for _ in range(warm_up + repeats)][warm_up:]
    seconds = torch.tensor(passes, dtype=torch.float64)
    n = transformer.n_layers
    low, high = torch.quantile(seconds[:, : n + 1].sum(1), torch.tensor([0.25, 0.75]).double())
    median = seconds.quantile(0.5, dim=0).tolist()
    return Timing(
        tuple(median[:n]),
        median[n],
        median[n + 1],
        (*median[n + 2 :], 0.0),
        tokens,
        mode,
        repeats,
        float(high - low) / sum(median[: n + 1]),
        torch.get_num_threads(),
        str(transformer.device(n)),
        str(transformer.model.dtype).removeprefix("torch."),
    )


@torch.no_grad()
def _inputs(
    transformer: Transformer, tokens: int
) -> tuple[Callable[[], dict[str, Any]], Literal["cached", "whole"]]:
    """A function that returns the inputs of a pass, and whether they are one token or a text.

    One token comes with its own copy of the cache.
    """
    model = transformer.model
    if transformer.kind == "image-class":
        image = probe(model, rows=1)
        return lambda: image, "whole"
    ids = probe_ids(model, 1, tokens, 0)
    mask = torch.ones_like(ids)
    whole = prepare(model, {"input_ids": ids, "attention_mask": mask})
    if transformer.kind != "next-token" or not accepts(model, "past_key_values"):
        return lambda: whole, "whole"
    before = prepare(model, {"input_ids": ids[:, :-1], "attention_mask": mask[:, :-1]})
    cache = getattr(model(**{**before, "use_cache": True}), "past_key_values", None)
    if cache is None:
        return lambda: whole, "whole"
    step = {**prepare(model, {"input_ids": ids[:, -1:], "attention_mask": mask}), "use_cache": True}
    return lambda: {**step, "past_key_values": deepcopy(cache)}, "cached"


@torch.no_grad()
def _one_pass(lens: Lens, inputs: dict[str, Any]) -> list[float]:
    """Seconds of each block, the head, the check, and the map of each layer below the last."""
    transformer = lens.transformer
    blocks, h = metered_blocks(transformer, inputs, lambda layer: _now(transformer.device(layer)))
    row, device = transformer.any_row(h), transformer.device(transformer.n_layers)
    head, logits = _timed(lambda: transformer.logits(row), device)
    check, _ = _timed(lambda: Distribution(logits).second(), device)
    maps = []
    for layer in range(transformer.n_layers):
        carry, h = lens.map(layer), row.to(transformer.device(layer))
        # The identity costs nothing, however long it takes to call a function.
        maps.append(0.0 if lens.bank is None else _timed(partial(carry, h), h.device)[0])
    return [*blocks, head, check, *maps]


def _timed(work: Callable[[], Tensor], device: torch.device) -> tuple[float, Tensor]:
    started = _now(device)
    result = work()
    return _now(device) - started, result


def _now(device: torch.device) -> float:
    """The time once the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
