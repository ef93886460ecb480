"""Which text and position each row of an activation belongs to.

In: a forward pass: its mask and cache, or a source that knows better, such as a cursor.
Out: `Rows`, and the rows that an edit's `positions` select.

Positions count from the first real token of each text, whatever padding is in front of it and
however many of its tokens a cache already holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from layerleap.errors import BadSettings

Positions = Literal["all", "last", "generated"] | Sequence[int]
NAMED = ("all", "last", "generated")


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of an activation in row-major order; every field is (row,) and on the CPU."""

    texts: Tensor  # which text of the batch
    positions: Tensor  # which position of that text; -1 for padding
    prompts: Tensor | None = None  # how many tokens its prompt has; None outside `generate`

    def select(self, positions: Positions) -> Tensor:
        """(row,) True where `positions` apply.

        "last" is the last position of each text. Inside `generate` that is the end of the prompt
        and then every token written, so that a pass over several tokens, or over the whole text
        again, is edited like passes over one token each. "generated" is every token written.
        """
        is_real = self.positions >= 0
        if positions == "all":
            return is_real
        if positions == "generated":
            if self.prompts is None:
                return torch.zeros_like(is_real)
            return is_real & (self.positions >= self.prompts)
        if positions == "last":
            return is_real & (self.positions >= self._ends())
        return torch.isin(self.positions, torch.as_tensor(positions, dtype=torch.long))

    def _ends(self) -> Tensor:
        """(row,) the first position of the row's text that counts as "last"."""
        if self.prompts is not None:
            return self.prompts - 1
        ends = torch.full((int(self.texts.max()) + 1,), -1)
        return ends.scatter_reduce(0, self.texts, self.positions, "amax")[self.texts]


def check_positions(positions: Positions) -> Positions:
    """The positions as a name or a tuple of numbers from 0 on."""
    if isinstance(positions, str):
        if positions not in NAMED:
            raise BadSettings(
                f"positions {positions!r}; expected {', '.join(map(repr, NAMED))}, or numbers"
            )
        return positions
    numbers = tuple(int(number) for number in positions)
    if not numbers or min(numbers) < 0 or max(numbers) >= 2**31:
        raise BadSettings(
            f"positions {list(numbers)}; expected one or more, counted from 0 (the first token of "
            "each text); the last one is positions='last'"
        )
    return numbers


class PassRows(Protocol):
    """A forward pass that knows which rows its blocks are given."""

    is_cached: bool  # it reads or writes a cache that outlives it
    block: int  # the block that is running, 1 to n_layers

    def rows(self, n: int) -> Rows:
        """The n rows that the running block is given."""


@dataclass(frozen=True)
class Prompt:
    """What `generate` was called with."""

    texts: int  # how many
    columns: int | None  # tokens of each, padding included; None for an encoder-decoder


@dataclass(eq=False)
class ModelPass:
    """A call of the model, described by its arguments."""

    mask: Any  # of all tokens, those in the cache included
    past: int  # positions in the cache
    position_ids: Any = None
    prompt: Prompt | None = None
    is_cached: bool = False
    block: int = 0
    shape: tuple[int, ...] = ()  # (batch, pos) of the states, known from the first block on
    # The edits that h[0] has in it already, if a recorded pass is run again.
    in_force: tuple[Any, ...] = ()

    @classmethod
    def of(
        cls, model: nn.Module, arguments: Mapping[str, Any], prompt: Prompt | None
    ) -> "ModelPass":
        """The pass that a call of `model` with these arguments will make."""
        is_decoder = bool(model.config.is_encoder_decoder)  # type: ignore[union-attr]
        cache = arguments.get("past_key_values")
        mask = arguments.get("decoder_attention_mask" if is_decoder else "attention_mask")
        past = 0 if cache is None else int(cache.get_seq_length())
        if arguments.get("cache_params") is not None:
            raise BadSettings(
                f"{type(model).__name__} keeps a recurrent state, which does not tell how many "
                "tokens were read before; edit passes without a cache (use_cache=False)"
            )
        return cls(mask, past, arguments.get("position_ids"), prompt, cache is not None)

    def rows(self, n: int) -> Rows:
        """The rows of all texts, one text after the other."""
        if n != len(self._rows.positions):
            raise BadSettings(
                f"a module got {n} rows in a pass over {' x '.join(map(str, self.shape))} "
                "positions, so it is not known which row is at which position; this edit cannot be "
                "used here"
            )
        return self._rows

    @cached_property
    def _rows(self) -> Rows:
        batch, width = self.shape
        columns = self.past + width
        if self.mask is None:
            real = torch.ones(batch, columns, dtype=torch.bool)
        elif isinstance(self.mask, Tensor) and self.mask.shape == (batch, columns):
            real = self.mask.cpu().bool()
        else:
            shape = tuple(getattr(self.mask, "shape", ())) or type(self.mask).__name__
            raise BadSettings(
                f"an attention mask of {shape} for {batch} texts of {columns} tokens does not tell "
                f"where texts begin; expected a mask of {(batch, columns)}, without a static cache"
            )
        positions = (real.long().cumsum(1) - 1).masked_fill(~real, -1)[:, -width:]
        self._check_position_ids(positions)
        texts, prompts = torch.arange(batch), None
        if self.prompt is not None:
            texts = texts // max(1, batch // self.prompt.texts)  # beams of a text lie together
        if self.prompt is not None and self.prompt.columns is not None:
            prompts = real[:, : self.prompt.columns].sum(1)[:, None].expand(-1, width).flatten()
        return Rows(texts[:, None].expand(-1, width).flatten(), positions.flatten(), prompts)

    def _check_position_ids(self, positions: Tensor) -> None:
        """Refuse several texts packed into one row, which no mask tells apart."""
        given = self.position_ids
        if not isinstance(given, Tensor) or given.dim() != 2:
            return  # none, or of several axes, as for images
        is_inside = (positions[:, 1:] >= 0) & (positions[:, :-1] >= 0)
        steps = given.cpu()[:, -positions.shape[1] :].diff(dim=1).expand_as(is_inside)
        if (steps[is_inside] != 1).any():
            raise BadSettings(
                "position_ids do not count up by one inside a text, so positions of edits are "
                "ambiguous; give each text its own row"
            )
