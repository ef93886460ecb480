"""Strip: the saturation layers of one text, token by token.

In: a text, and its saturation layers through one or two lenses.
Out: rows, a data frame, JSON, or a strip of cards in a notebook.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from layerleap.lens.saturation import Saturation


@dataclass(frozen=True, eq=False)
class Strip:
    """One text and, at each position read, the layer from which the top k tokens keep their rank.

    tokens     the text, token by token
    positions  the positions that were read
    tracks     by map: "logit" is the logit lens, "linear" (or "tuned", ...) the bank's maps
    """

    tokens: list[str]
    positions: list[int]
    n_layers: int
    k: int
    tracks: dict[str, Saturation]
    decode: Callable[[int], str] = field(repr=False)
    notes: list[str] = field(default_factory=list)  # what limits it, a sentence each

    def rows(self) -> Iterator[dict[str, Any]]:
        """One plain dict per map and position."""
        for name, track in self.tracks.items():
            for place, position in enumerate(self.positions):
                gold = int(track.gold[place])
                tokens, layers = track.tokens[place].tolist(), track.layer[place].tolist()
                yield {
                    "map": name,
                    "position": position,
                    "token": self.tokens[position],
                    "next": None if gold < 0 else self.decode(gold),
                    "ranks": [
                        {
                            "rank": rank,
                            "id": token,
                            "token": self.decode(token),
                            "layer": layer,
                            "saturates": layer < self.n_layers,
                            "is_next": None if gold < 0 else token == gold,
                        }
                        for rank, (token, layer) in enumerate(zip(tokens, layers, strict=True), 1)
                    ],
                }

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        own = {"tokens": self.tokens, "n_layers": self.n_layers, "k": self.k}
        notes = {"notes": self.notes} if self.notes else {}
        return {**own, "saturation": list(self.rows()), **notes}

    def to_pandas(self) -> Any:
        """A data frame with one line per map, position and rank."""
        import pandas

        return pandas.DataFrame(
            [
                {
                    **{key: row[key] for key in ("map", "position", "token")},
                    "rank": rank["rank"],
                    "rank_token": rank["token"],
                    **{key: rank[key] for key in ("layer", "saturates", "is_next")},
                }
                for row in self.rows()
                for rank in row["ranks"]
            ]
        )

    def __repr__(self) -> str:
        size = f"{len(self.positions)} positions, ranks 1 to {self.k}, layers 0 to {self.n_layers}"
        lines = [f"Strip({size}, {' and '.join(self.tracks)})"]
        return "\n".join([*lines, *(f"  note: {one}" for one in self.notes)])

    def _repr_html_(self) -> str:
        from layerleap.show.html.strip import strip_html

        return strip_html(self)
