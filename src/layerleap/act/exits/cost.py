"""FLOPs per token of early exit, with the checks that "layers saved" leaves out.

In: a wrapped model, and the bank whose maps are applied, if any.
Out: `Cost`: FLOPs of blocks, head and maps, counted by torch on real calls; and the mean FLOPs per
token of a rule's exits.

A check that reads a state pays for a map and a head. In a small model with a large vocabulary a
head costs as much as several blocks, so saving layers may cost more than it saves.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from layerleap.act.exits.evidence import FIRST_EXIT
from layerleap.act.exits.replay import Exits
from layerleap.act.exits.rules import Rule
from layerleap.errors import BadSettings, ModelRefused
from layerleap.maps.bank import ShortcutBank
from layerleap.models.discovery.probe import prepare, probe, probe_ids
from layerleap.models.discovery.trace import state_given
from layerleap.models.hooks.forward import StopPass, Tap, tapped
from layerleap.models.transformer import Transformer
from layerleap.stream.examples import longest_input


class LayerPrices:
    """Base of `Cost` and `Timing`: what blocks, head and maps cost, each in its own unit."""

    blocks: tuple[float, ...]
    head: float
    maps: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.blocks or len(self.maps) != len(self.blocks) + 1:
            raise BadSettings(
                f"got {len(self.maps)} map costs for {len(self.blocks)} blocks; expected one for "
                "each layer, 0 and the last included"
            )

    @property
    def n_layers(self) -> int:
        """How many blocks there are."""
        return len(self.blocks)

    @property
    def full(self) -> float:
        """All blocks and one head: what the full model costs."""
        return sum(self.blocks) + self.head

    @property
    def block(self) -> float:
        """The mean block's cost."""
        return sum(self.blocks) / self.n_layers

    @property
    def head_in_blocks(self) -> float:
        """The head's cost in mean blocks."""
        return self.head / self.block

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}
        derived = ("n_layers", "full", "head_in_blocks")
        return values | {name: getattr(self, name) for name in derived}

    def _paid(
        self, reading: Tensor, check: Tensor, checked: Iterable[int], *, reads: bool
    ) -> Tensor:
        """(layer,): the price of a row that leaves at each layer.

        `reading` and `check` are prices by layer. A rule that `reads` gets its answer from the last
        check; other rules read once, at the exit. Layer 0 and the last are never exits, so nothing
        is checked there, and the answer of the last is the model's own.
        """
        is_checked = torch.zeros(self.n_layers + 1, dtype=torch.float64)
        is_checked[[layer for layer in checked if FIRST_EXIT <= layer < self.n_layers]] = 1.0
        answer = torch.zeros_like(reading) if reads else reading.clone()
        answer[-1] = self.head
        run = torch.tensor([0.0, *self.blocks], dtype=torch.float64).cumsum(0)
        return run + (is_checked * check).cumsum(0) + answer


@dataclass(frozen=True)
class Cost(LayerPrices):
    """FLOPs per token; a multiplication and an addition are two."""

    blocks: tuple[float, ...]  # of the blocks that make h[1], h[2], ...
    head: float  # of the tail: final norm, head and what comes after
    maps: tuple[float, ...]  # of mapping h[0], h[1], ... to the last layer; 0 for the identity
    d_model: int
    context: int  # tokens that the counted token attends to, itself included

    def per_text(self) -> "Cost":
        """The cost of an answer for which all tokens of a text go through the blocks."""
        return replace(self, blocks=tuple(self.context * block for block in self.blocks))

    def of(self, exits: Exits, rule: Rule, layers_checked: Sequence[int] | None = None) -> float:
        """Mean FLOPs per token of rows that leave at `exits`.

        Args:
            exits: where they leave.
            rule: what stopped them; its `needs` says what each check costs.
            layers_checked: where it was checked; every layer from 1 on when None. The last layer
                needs no check: rows that get there pay for the head once.
        """
        if exits.n_layers != self.n_layers:
            raise BadSettings(
                f"exits of a model with {exits.n_layers} layers do not fit costs of a model with "
                f"{self.n_layers}; measure the costs of the same model"
            )
        maps = torch.tensor(self.maps, dtype=torch.float64)
        reading = maps + self.head  # at the last layer there is no map: the model's own head
        one_check = {
            "reading": reading,
            "state": torch.full_like(maps, 2 * self.d_model),  # one dot product with h[layer - 1]
            "nothing": torch.zeros_like(maps),
        }[rule.needs]
        checked = range(self.n_layers + 1) if layers_checked is None else layers_checked
        by_layer = self._paid(reading, one_check, checked, reads=rule.needs == "reading")
        return by_layer[exits.layer].mean().item()


def measure_cost(
    transformer: Transformer, *, tokens: int = 128, bank: ShortcutBank | None = None
) -> Cost:
    """Count the FLOPs of a token that attends to `tokens` tokens, itself included.

    Counts one forward pass over that many random tokens, products only (norms and activations are
    a percent or less), and divides by their number: the counter treats attention as if every token
    saw all of them. `tokens` is ignored for images, whose number of tokens is fixed.

    Args:
        transformer: the wrapped model.
        tokens: the context length.
        bank: its maps to the last layer are applied before the head; None for the logit lens.
    """
    limit = longest_input(transformer)
    if not 1 <= tokens <= limit:
        raise BadSettings(f"tokens {tokens}; expected 1 to {limit}, the most this model takes")
    if bank is not None:
        bank.check_model(transformer)
    model, counter = transformer.model, _counter()
    inputs = probe(model, rows=1)
    ids = None if model.main_input_name == "pixel_values" else probe_ids(model, 1, tokens, 0)
    if ids is not None and "decoder_input_ids" in inputs:
        inputs = prepare(model, {**inputs, "decoder_input_ids": ids})
    elif ids is not None:
        mask = torch.ones_like(ids)
        inputs = prepare(model, {**inputs, "input_ids": ids, "attention_mask": mask})
    with counter:
        blocks, h = metered_blocks(transformer, inputs, lambda _: counter.get_total_flops())
    context = h.shape[1]
    transformer.require_tail()  # now, because a check of hooks would be counted as the head
    with _counter() as head, torch.no_grad():
        transformer.logits(transformer.any_row(h))
    if 0 in blocks or head.get_total_flops() == 0:
        raise ModelRefused(
            f"torch counts no FLOPs in a block or the head of {transformer.identity.name}: its "
            "products run in kernels that the counter does not know, such as quantised ones"
        )
    n, states = transformer.n_layers, context if transformer.row_kind == "sequence" else 1
    maps = (0.0 if bank is None else float(states * bank[layer, n].flops) for layer in range(n))
    return Cost(
        tuple(count / context for count in blocks),
        float(head.get_total_flops()),
        (*maps, 0.0),
        transformer.d_model,
        context,
    )


def metered_blocks(
    transformer: Transformer, inputs: dict[str, Any], meter: Callable[[int], float]
) -> tuple[list[float], Tensor]:
    """How far `meter(layer)` rises in each block of one pass, and the state that the last gives.

    The pass ends there: the head is measured on its own.
    """
    before: list[float] = []
    after: list[float] = []
    last: list[Tensor] = []

    def leave(output: Any) -> None:
        after.append(meter(len(before)))
        state = state_given(output)
        if len(after) == transformer.n_layers and state is not None:
            last.append(state)
            raise StopPass

    tap = Tap(see_input=lambda *_: before.append(meter(len(before) + 1)), see_output=leave)
    taps = {block: tap for block in transformer.block_modules()}
    with tapped(transformer.model, taps), suppress(StopPass), torch.no_grad():
        transformer.model(**inputs)
    if not last:
        raise ModelRefused(
            f"{len(after)} blocks ran in this forward pass; expected {transformer.n_layers}"
        )
    return [end - start for start, end in zip(before, after, strict=True)], last[0]


def _counter() -> FlopCounterMode:
    """Torch's counter, extended by kernels that it leaves out on the CPU and for experts."""
    aten = torch.ops.aten
    return FlopCounterMode(
        display=False,
        custom_mapping={
            aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
            aten._grouped_mm: _grouped_flops,
        },
    )


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Scores and weighted sums of every query head; shapes are (batch, head, token, width)."""
    batch, heads, queries, width = q
    return int(2 * batch * heads * queries * k[2] * (width + v[3]))


def _grouped_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Each row of `a` times the one matrix of `b` that it is sent to."""
    return int(2 * a[0] * b[-2] * b[-1])
