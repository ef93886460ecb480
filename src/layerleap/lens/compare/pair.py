"""A base model and a tuned one, block by block: in memory, or in their files.

In: two wrapped models, or names of checkpoints.
Out: a `ModelPair`, which shows where a block of both is, and the tensors outside the blocks.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from layerleap.errors import BadSettings
from layerleap.lens.compare.checkpoint import NoWindow, Window
from layerleap.models.load import load
from layerleap.models.transformer import Transformer
from layerleap.zoo.download import Tell

Source = Transformer | str | Path
Place = tuple[Transformer, int]  # a wrapped model and one of its blocks
Pieces = Iterator[tuple[Tensor, Tensor]]  # of a tensor, of both models


class ModelPair:
    """Two models in memory."""

    def __init__(self, base: Transformer, tuned: Transformer, how: str) -> None:
        self.base, self.tuned, self.how = base.identity.name, tuned.identity.name, how
        self.reader, self.other = base, tuned  # tokens are read with the base's output matrix
        self.n_layers = base.n_layers
        if (base.n_layers, base.d_model) != (tuned.n_layers, tuned.d_model):
            raise BadSettings(
                f"{self.base} has {base.n_layers} blocks of width {base.d_model} and {self.tuned} "
                f"has {tuned.n_layers} of width {tuned.d_model}; a tuned model has the "
                "architecture of its base"
            )

    def show(self, block: int) -> tuple[Place, Place]:
        """Where a block of both models is."""
        return (self.reader, block), (self.other, block)

    def outside(self) -> Iterator[tuple[str, Pieces, str]]:
        """Each tensor outside the blocks: its name, pieces of both models, and a remark."""
        paths = tuple(f"{path}." for path in self.reader.blocks)
        theirs = dict(self.other.model.named_parameters())
        for name, own in self.reader.model.named_parameters():
            if name.startswith(paths):
                continue
            other = theirs.get(name)
            if other is None:
                yield name, iter(()), f"{self.tuned} has no such tensor"
            elif other.shape[1:] != own.shape[1:]:
                yield name, iter(()), f"its shape is {tuple(other.shape)} in {self.tuned}"
            else:
                rows = min(len(own), len(other))
                remark = "" if own.shape == other.shape else only_common(rows)
                yield name, iter([(own.detach()[:rows], other.detach()[:rows])]), remark
        ours = dict(self.reader.model.named_parameters())
        yield from self._added(name for name in theirs if name not in ours)

    def _added(self, names: Iterable[str]) -> Iterator[tuple[str, Pieces, str]]:
        for name in names:
            yield name, iter(()), f"only {self.tuned} has this tensor"


class FilePair(ModelPair):
    """Two checkpoints, of which one block each is in memory."""

    def __init__(self, window: Window) -> None:
        self.window, self.reader = window, window.transformer
        self.base, self.tuned = window.base.name, window.tuned.name
        self.n_layers = window.n_layers
        self.how = "read from safetensors files, one block of each model at a time"

    def show(self, block: int) -> tuple[Place, Place]:
        """Both blocks of the window, filled with this block of both models."""
        self.window.show(block)
        return (self.reader, 1), (self.reader, 2)

    def outside(self) -> Iterator[tuple[str, Pieces, str]]:
        """As for models in memory, the tuned one's piece by piece."""
        for name, own, stored in self.window.outside():
            shape = None if stored is None else self.window.tuned.shape(stored)
            if stored is None or shape is None:
                yield name, iter(()), f"{self.tuned} has no such tensor"
            elif shape[1:] != own.shape[1:]:
                yield name, iter(()), f"its shape is {shape} in {self.tuned}"
            else:
                rows = min(len(own), shape[0])
                remark = "" if shape == tuple(own.shape) else only_common(rows)
                yield name, self.window.pieces(own, stored, rows), remark
        yield from self._added(self.window.added())


def only_common(rows: int) -> str:
    """Said of embeddings that got more rows, for new tokens."""
    return f"only the {rows:,} rows that both models have"


def open_pair(base: Source, tuned: Source, tell: Tell | None) -> ModelPair:
    """Files where both are names and can be read block by block; otherwise models in memory."""
    how = "both models in memory"
    if not isinstance(base, Transformer) and not isinstance(tuned, Transformer):
        try:
            return FilePair(Window.open(str(base), str(tuned), tell))
        except NoWindow as reason:
            how = f"{how}, because {reason}"
    models = [
        one if isinstance(one, Transformer) else load(one, tell=tell) for one in (base, tuned)
    ]
    return ModelPair(models[0], models[1], how)
