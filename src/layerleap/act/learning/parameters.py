"""Which parameters learn, chosen by what they do or by their names.

In: a wrapped model, and words or patterns. Out: `Chosen`: parameter names, each with a mask of the
entries that learn where they are only a part of a matrix.

    keys-values                       W_K and W_V of every block, with their biases
    queries, keys, values, outputs    one of the four matrices of attention
    blocks                            everything inside the blocks
    all                               everything
    *.mlp.*                           parameters whose names match; * and ? stand for any letters

Matrices of attention are those of the verified view of the weights (`models.weights`), whatever
their names. In a fused matrix (GPT-2) only the entries that make keys and values learn.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.hooks.parameters import parameter_names, places
from layerleap.models.transformer import Transformer
from layerleap.models.weights import Heads, all_heads
from layerleap.models.weights.matrices import Rows
from layerleap.short_repr import ShortRepr

PARTS = ("queries", "keys", "values", "outputs")
WORDS = ("keys-values", *PARTS, "blocks", "all")


@dataclass(frozen=True, eq=False, repr=False)
class Chosen(ShortRepr):
    """Parameters by name, in the order of the model."""

    words: tuple[str, ...]  # by which they were chosen
    masks: Mapping[str, Tensor | None]  # True where an entry learns, like the parameter; None: all
    blocks: Mapping[str, int]  # the block of a parameter, 1 to n_layers; 0 outside the blocks

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return tuple(self.masks)

    def of_block(self, block: int) -> tuple[str, ...]:
        """The chosen parameters of one block; block 0 are those outside all blocks."""
        return tuple(name for name in self.masks if self.blocks[name] == block)

    def masked(self, name: str, value: Tensor) -> Tensor:
        """The value with 0 for entries that do not learn."""
        mask = self.masks[name]
        return value if mask is None else value * mask.to(value.device)


def choose(transformer: Transformer, parameters: str | Sequence[str] = "keys-values") -> Chosen:
    """The parameters that one or more words or patterns name."""
    words = (parameters,) if isinstance(parameters, str) else tuple(parameters)
    if not words:
        raise BadSettings(f"no parameters chosen; expected one of {', '.join(WORDS)}, or a pattern")
    aliases = parameter_names(transformer.model)
    blocks = _blocks(transformer, aliases)
    chosen: dict[str, Tensor | None] = {}
    for word in words:
        for name, mask in _named(transformer, word, aliases, blocks):
            if name not in chosen:
                chosen[name] = mask
                continue
            before = chosen[name]
            chosen[name] = None if before is None or mask is None else before | mask
    order = [name for name in blocks if name in chosen]
    places(transformer, order)  # refuses what cannot learn
    return Chosen(words, {name: chosen[name] for name in order}, {n: blocks[n] for n in order})


def _blocks(transformer: Transformer, aliases: Mapping[str, str]) -> dict[str, int]:
    """The block of each parameter; one that several share, or that lies outside, is of block 0."""
    blocks: dict[str, set[int]] = {}
    for alias, name in aliases.items():
        inside = {n for n, path in enumerate(transformer.blocks, 1) if alias.startswith(f"{path}.")}
        blocks.setdefault(name, set()).update(inside or {0})
    return {name: min(numbers) if len(numbers) == 1 else 0 for name, numbers in blocks.items()}


def _named(
    transformer: Transformer, word: str, aliases: Mapping[str, str], blocks: Mapping[str, int]
) -> Iterator[tuple[str, Tensor | None]]:
    if word == "all":
        yield from ((name, None) for name in blocks)
    elif word == "blocks":
        yield from ((name, None) for name, block in blocks.items() if block)
    elif word in WORDS:
        for part in ("keys", "values") if word == "keys-values" else (word,):
            yield from _of_heads(transformer, part, aliases)
    else:
        matches = {name for alias, name in aliases.items() if fnmatchcase(alias, word)}
        if not matches:
            raise BadSettings(
                f"no parameter of {transformer.identity.name} matches {word!r}; expected one of "
                f"{', '.join(WORDS)}, or a pattern of names such as {_example(transformer)!r}"
            )
        yield from ((name, None) for name in matches)


def _example(transformer: Transformer) -> str:
    """A pattern that matches something: the last matrix of the first block, in all blocks."""
    inside = transformer.block(1).named_parameters()
    return "*." + next((name for name, one in inside if one.dim() == 2), "*")


def _of_heads(
    transformer: Transformer, part: str, aliases: Mapping[str, str]
) -> Iterator[tuple[str, Tensor | None]]:
    for block, heads in all_heads(transformer).items():
        if isinstance(heads, str):
            raise ModelRefused(
                f"the {part} of block {block} are not known ({heads}); choose parameters by a "
                f"pattern of names such as {_example(transformer)!r}"
            )
        yield from _entries(transformer, rows_of(heads, part), aliases)


def rows_of(heads: Heads, part: str) -> Rows:
    """The rows of one of the four matrices of attention; refuses those that are not verified."""
    if part == "values":
        return heads.values
    if part == "outputs":
        return heads.outputs
    projection = heads.queries if part == "queries" else heads.keys
    if projection is None:
        raise ModelRefused(heads.qk_reason)
    return projection.rows


def _entries(
    transformer: Transformer, rows: Rows, aliases: Mapping[str, str]
) -> Iterator[tuple[str, Tensor | None]]:
    """The weight and the bias behind some rows of a matrix, with masks if not all are chosen."""
    module = transformer.model.get_submodule(rows.path)
    for kind in ("weight", "bias"):
        value = getattr(module, kind, None)
        name = aliases.get(f"{rows.path}.{kind}")
        if not isinstance(value, Tensor) or name is None:
            continue
        if rows.chosen is None:
            yield name, None
            continue
        mask = torch.zeros(value.shape, dtype=torch.bool)
        is_transposed = kind == "weight" and rows.is_transposed
        (mask.T if is_transposed else mask)[list(rows.chosen)] = True
        yield name, mask
