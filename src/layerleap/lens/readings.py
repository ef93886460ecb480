"""Readings: what every layer predicts at every position of one text.

In: top tokens, probabilities, agreement and divergence per lens, layer and position.
Out: rows, a data frame, JSON, or a grid in a notebook.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from layerleap.brief import Brief
from layerleap.errors import BadSettings


@dataclass(frozen=True, eq=False, repr=False)
class Track(Brief):
    """The readings of one lens; the first axis is the layer, the second the position."""

    ids: Tensor  # (layer, row, k)
    probs: Tensor  # (layer, row, k)
    agrees: Tensor  # (layer, row): is the top token the model's own?
    kl: Tensor  # (layer, row): KL(model || reading), nats
    surprisal: Tensor  # (layer, row): -ln p_model(top token), nats

    def rows(self, chosen: Tensor) -> "Track":
        """The readings of some of the rows."""
        return Track(*(value[:, chosen] for value in vars(self).values()))

    def layer(self, number: int) -> "Track":
        """The readings of one layer, with the row as the first axis."""
        return Track(*(value[number] for value in vars(self).values()))


@dataclass(frozen=True, eq=False)
class Readings:
    """The readings of one text at every layer.

    tokens     the text, token by token
    positions  the positions that were read
    tracks     by map: "logit" is the logit lens, "linear" (or "tuned", ...) the bank's maps
    """

    tokens: list[str]
    positions: list[int]
    n_layers: int
    tracks: dict[str, Track]
    decode: Callable[[int], str] = field(repr=False)
    notes: list[str] = field(default_factory=list)  # what limits them, a sentence each

    def rows(self) -> Iterator[dict[str, Any]]:
        """One plain dict per map, position and layer."""
        for name, track in self.tracks.items():
            for place, position in enumerate(self.positions):
                for layer in range(self.n_layers + 1):
                    one = {key: value[layer, place].tolist() for key, value in vars(track).items()}
                    top = [
                        {"id": token, "token": self.decode(token), "prob": prob}
                        for token, prob in zip(one["ids"], one["probs"], strict=True)
                    ]
                    yield {
                        "map": name,
                        "position": position,
                        "token": self.tokens[position],
                        "layer": layer,
                        "top": top,
                        **{key: one[key] for key in ("agrees", "kl", "surprisal")},
                    }

    def at(self, position: int) -> list[dict[str, Any]]:
        """The rows of one position; negative positions count from the end."""
        if not -len(self.tokens) <= position < len(self.tokens):
            raise BadSettings(
                f"position {position} does not exist: the text has {len(self.tokens)} tokens"
            )
        index = position % len(self.tokens)
        return [row for row in self.rows() if row["position"] == index]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        own = {"tokens": self.tokens, "n_layers": self.n_layers, "readings": list(self.rows())}
        return {**own, "notes": self.notes} if self.notes else own

    def to_pandas(self) -> Any:
        """A data frame with one line per map, position, layer and rank."""
        import pandas

        return pandas.DataFrame(
            [
                {
                    **{key: row[key] for key in ("map", "position", "token", "layer")},
                    "rank": rank,
                    "top_token": top["token"],
                    "prob": top["prob"],
                    **{key: row[key] for key in ("agrees", "kl", "surprisal")},
                }
                for row in self.rows()
                for rank, top in enumerate(row["top"], 1)
            ]
        )

    def __repr__(self) -> str:
        names = " and ".join(self.tracks)
        size = f"{len(self.positions)} positions, layers 0 to {self.n_layers}"
        return "\n".join([f"Readings({size}, {names})", *(f"  note: {one}" for one in self.notes)])

    def _repr_html_(self) -> str:
        from layerleap.show.html.readings import readings_html

        return readings_html(self)
