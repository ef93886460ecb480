"""Direction: a vector at a layer that tells two sets of prompts apart, as a value.

In: what `ll.direction` found, or a file. Out: a vector for `ll.edits.AddVector` and the like, with
how well it separates, what it says in tokens, and which model it belongs to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from layerleap.errors import BadArtifact
from layerleap.maps.artifact import Artifact, require_identity
from layerleap.models.transformer import Transformer
from layerleap.results.base import Result
from layerleap.results.columns import Column, Row, Table, estimate
from layerleap.results.head import PageHead
from layerleap.stats.tensor_file import TensorFile

FORMAT = 1
FILE = TensorFile("direction", FORMAT)
MODEL = Artifact("direction", "direction.json", "direction.safetensors", FORMAT)
WIDTH, HEIGHT = 460, 130  # of the curve, in pixels


@dataclass(frozen=True, eq=False, repr=False)
class Direction(Result):
    """A vector of h[layer] that points from one set of prompts to another.

    vector      (d_model,), as long as the means of the two sets lie apart
    norm        its length in mean lengths of the states there
    ends        the mean coordinates of both sets along it: (negative, positive)
    auc         how well it separates prompts that it was not found on, with its interval; the
                choice of the layer is part of what was held out
    """

    TEMPLATE: ClassVar[str] = "direction"
    KIND: ClassVar[str] = "direction"
    TABLES: ClassVar[tuple[Table, ...]] = (
        Table(
            "layers",
            "Separation of held-out prompts by layer",
            lambda direction: direction.layers,
            (
                Column("layer"),
                estimate("auc", "AUC", "{:.3f}"),
                Column("norm", "norm (states)", "{:.2f}"),
            ),
        ),
    )

    layer: int
    vector: Tensor
    method: str
    positions: str
    norm: float
    ends: tuple[float, float]
    auc: Mapping[str, float | None]  # value, low, high
    layers: Sequence[Row]  # AUC, norm and mean length of states at every layer
    promoted: Sequence[Row]  # tokens, each with its score
    suppressed: Sequence[Row]
    counts: tuple[int, int]  # of positive and of negative prompts
    model: Mapping[str, Any]  # the identity of the model, as JSON types
    n_layers: int
    remarks: Sequence[str] = ()
    source: str = field(default="", kw_only=True)  # the file that it was read from

    @property
    def notes(self) -> Sequence[str]:
        """What limits it, a sentence each."""
        return self.remarks

    def state_length(self, layer: int) -> float:
        """The mean length of the states of h[layer] that it was found among."""
        length = self.layers[layer].get("state_length")
        if length is None:
            raise BadArtifact(
                f"{self.source or 'this direction'} was saved by an earlier version, without the "
                "lengths of states; find it again with ll.direction, or use unit='vector'"
            )
        return float(length)

    def check_model(self, transformer: Transformer) -> None:
        """Raise `WrongModel` unless it was found in exactly this model."""
        MODEL.check_model(self.model, self.n_layers, len(self.vector), transformer)

    def save(self, path: str | Path) -> Path:
        """Write it as one safetensors file, with everything else in its header."""
        FILE.save(path, {"vector": self.vector}, {name: getattr(self, name) for name in HEADER})
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> "Direction":
        """What `save` wrote; a file of another kind, or a damaged one, is an error."""
        tensors, header = FILE.load(path)
        try:
            require_identity(header["model"])
            values = {name: header[name] for name in HEADER}
            pairs: Any = {name: tuple(values.pop(name)) for name in ("ends", "counts")}
            return cls(vector=tensors["vector"], source=str(path), **values, **pairs)
        except (KeyError, TypeError, ValueError) as error:
            raise BadArtifact(f"{path} does not describe a direction ({error})") from error

    def facts(self) -> Row:
        """What it is, without the vector."""
        return {name: getattr(self, name) for name in HEADER if name not in ("layers", "remarks")}

    def short(self) -> str:
        """What it is, in one line."""
        auc, name = self.auc, self.model["name"]
        ends = "" if auc["low"] is None else f" ({auc['low']:.2f} to {auc['high']:.2f})"
        return (
            f"Direction(h[{self.layer}] of {name}, AUC {auc['value']:.2f}{ends} on held-out "
            f"prompts, norm {self.norm:.2f})"
        )

    def headline(self) -> str:
        """One line above everything."""
        words = [_words(tokens) for tokens in (self.promoted, self.suppressed)]
        said = f"; towards {words[0]}; away from {words[1]}" if all(words) else ""
        return self.short() + said

    def legend(self) -> str:
        """How to read it, in one line."""
        n, m = self.counts
        how = (
            "the difference of means" if self.method == "mean" else "the first principal component"
        )
        where = "at the last token" if self.positions == "last" else "as the mean over tokens"
        return (
            f"{how} of {n} positive and {m} negative prompts, read {where}; AUC is "
            "the share of pairs of held-out prompts in the right order, with its 95 % interval; "
            "the norm is in mean lengths of the states of the layer"
        )

    def head(self) -> PageHead:
        """What a page around it says."""
        return PageHead(
            "direction",
            ("A direction of ", str(self.model["name"]), f" at layer {self.layer}"),
            [f"method: {self.method}", f"prompts: {self.counts[0]} and {self.counts[1]}"],
            f"h[{self.layer}]",
            "How well a direction separates prompts that it was not found on, by layer.",
        )

    def picture(self) -> Row:
        """The curve of AUC by layer, with its intervals."""
        step = WIDTH / max(1, self.n_layers)

        def y(value: float) -> float:
            return round(HEIGHT * (1 - value), 1)

        rows = [row for row in self.layers if row["auc"] is not None]
        places = [(round(row["layer"] * step, 1), row) for row in rows]
        upper = [(x, y(row["high"])) for x, row in places if row["high"] is not None]
        lower = [(x, y(row["low"])) for x, row in places if row["low"] is not None]
        area = [*upper, *reversed(lower)]
        ticks = max(1, -(-self.n_layers // 10))
        return {
            "width": WIDTH,
            "height": HEIGHT,
            "line": _points([(x, y(row["auc"])) for x, row in places]),
            "area": _points(area),
            "dots": [(x, y(row["auc"]), row) for x, row in places],
            "chosen": round(self.layer * step, 1),
            "layer": self.layer,
            "columns": [(round(n * step, 1), n) for n in range(0, self.n_layers + 1, ticks)],
            "lines": [(y(value), f"{value:g}") for value in (0, 0.5, 1)],
        }


HEADER = tuple(one.name for one in fields(Direction) if one.name not in ("vector", "source"))


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in places)


def _words(tokens: Sequence[Row], n: int = 5) -> str:
    return " ".join(token["label"] for token in tokens[:n])
