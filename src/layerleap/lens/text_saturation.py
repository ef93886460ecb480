"""Saturation layers of one text, token by token.

In: readings of a text. Out: since which layer each of the top tokens keeps its rank, as rows, a
data frame, JSON, a table or a strip of cards.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

import torch
from torch import Tensor

from layerleap.lens.readings import Readings
from layerleap.lens.vocabulary.tokens import token_text
from layerleap.maps.kinds import lens_title
from layerleap.results.base import Result
from layerleap.results.cells import Cell, Grid
from layerleap.results.colours import legend_layers, saturation_colour
from layerleap.results.columns import Row, Table
from layerleap.results.head import PageHead


def saturation_layers(tops: Tensor) -> Tensor:
    """The layer from which each rank keeps its final token: (row, layer, k) -> (row, k) int16.

    tops[:, l] are the top k tokens at layer l = 0 .. n_layers, best first.
    """
    is_final = (tops == tops[:, -1:]).flip(1)  # from the last layer down
    n_final = is_final.cumprod(1).sum(1)  # for how many layers, including the last
    return (tops.shape[1] - n_final).to(torch.int16)


@dataclass(frozen=True, eq=False, repr=False)
class SaturationLayers(Result):
    """At each position read of a text, the layer from which each of the top k keeps its rank."""

    KIND: ClassVar[str] = "strip"
    TEMPLATE: ClassVar[str] = "strip"
    TABLES: ClassVar[tuple[Table, ...]] = (
        Table("saturation", "", lambda s: s._rows(), lines=lambda s: s._lines()),
    )

    readings: Readings

    @property
    def notes(self) -> list[str]:
        """What limits the readings."""
        return self.readings.notes

    @property
    def k(self) -> int:
        """The number of ranks."""
        return next(iter(self.readings.tracks.values())).ids.shape[-1]

    def _rows(self) -> Iterator[Row]:
        """One plain dict per map and position."""
        readings, last = self.readings, self.readings.n_layers
        for name, track in readings.tracks.items():
            layers = saturation_layers(track.ids.transpose(0, 1)).tolist()
            for place, position in enumerate(readings.positions):
                following, top = readings.following[place], track.ids[-1, place].tolist()
                is_known = following >= 0
                ranks = [
                    {
                        "rank": rank,
                        "id": token,
                        "token": readings.decode(token),
                        "layer": layer,
                        "saturates": layer < last,
                        "is_next": token == following if is_known else None,
                    }
                    for rank, token, layer in zip(count(1), top, layers[place], strict=False)
                ]
                row = {"map": name, "position": position, "token": readings.tokens[position]}
                next_token = readings.decode(following) if is_known else None
                yield {**row, "next": next_token, "ranks": ranks}

    def _lines(self) -> Iterator[Row]:
        """One line per map, position and rank."""
        for row in self._rows():
            for rank in row["ranks"]:
                yield {
                    **{key: row[key] for key in ("map", "position", "token")},
                    "rank": rank["rank"],
                    "rank_token": rank["token"],
                    **{key: rank[key] for key in ("layer", "saturates", "is_next")},
                }

    def facts(self) -> Row:
        """The text, the number of layers and of ranks."""
        return {**self.readings.facts(), "k": self.k}

    def short(self) -> str:
        """What it is, in one line."""
        size = f"{len(self.readings.positions)} positions, ranks 1 to {self.k}"
        names = " and ".join(self.readings.tracks)
        return f"SaturationLayers({size}, layers 0 to {self.readings.n_layers}, {names})"

    def legend(self) -> str:
        """What colours and marks mean."""
        return (
            "darker: keeps its rank from an earlier layer on; no colour: only the last layer, "
            f"{self.readings.n_layers}, put it there; framed or underlined: the token that "
            "actually comes next"
        )

    def grids(self, width: int | None = None) -> list[Grid]:
        """In a terminal, a line per position: its token, then each rank with its layer."""
        if width is None:
            return []  # a page has a card per position
        heads = ["token", *(f"rank {rank}" for rank in range(1, self.k + 1))]
        grids = []
        for name in self.readings.tracks:
            rows = [
                [Cell(token_text(row["token"]), strong=True), *map(self._cell, row["ranks"])]
                for row in self.rows()
                if row["map"] == name
            ]
            grids.append(Grid(heads, rows, lens_title(name), one_line=True))
        last = self.readings.n_layers
        steps = [Cell(str(n), colour=saturation_colour(n, last)) for n in legend_layers(last)]
        return [*grids, Grid([""] * len(steps), [steps], "keeps its rank from layer ... on")]

    def _cell(self, rank: Row) -> Cell:
        # The layer comes first: it is the point of the strip, and a narrow column cuts the end off.
        colour = saturation_colour(rank["layer"], self.readings.n_layers)
        text = f"{rank['layer']:>2} {token_text(rank['token'])}"
        verdict = "open" if colour is None else ""
        return Cell(text, colour=colour, verdict=verdict, framed=bool(rank["is_next"]))

    def picture(self) -> Row:
        """Cards by lens, and the legend's colours."""
        last = self.readings.n_layers
        cards: dict[str, list[Row]] = {lens_title(name): [] for name in self.readings.tracks}
        for row in self.rows():
            ranks = [
                {
                    "text": token_text(rank["token"]),
                    "layer": rank["layer"],
                    "colour": saturation_colour(rank["layer"], last),
                    "is_next": rank["is_next"],
                    "title": f"rank {rank['rank']}: {rank['token']!r} "
                    + (f"from layer {rank['layer']} on" if rank["saturates"] else ONLY_LAST),
                }
                for rank in row["ranks"]
            ]
            card = {"position": row["position"], "token": token_text(row["token"]), "ranks": ranks}
            cards[lens_title(row["map"])].append(card)
        steps = [(layer, saturation_colour(layer, last)) for layer in legend_layers(last)]
        return {"cards": cards, "steps": steps}

    def head(self, model: str, text: str) -> PageHead:
        """What a page says around it."""
        last, n_positions = self.readings.n_layers, len(self.readings.positions)
        return PageHead(
            kicker="saturation layers",
            title=("Where", model, "makes up its mind"),
            facts=(f"{last} layers", f"ranks 1 to {self.k}", f"{n_positions} positions"),
            heading="From which layer on each token keeps its rank",
            lead=f"Below each token of the text are the {self.k} tokens that the model finds most "
            "likely to come next, best first. The number is the layer from which that token has "
            f"this rank and keeps it: layer 0 is the input, layer {last} the finished prediction. "
            "Darker means decided earlier.",
            text=text,
        )


ONLY_LAST = "only at the last layer"
