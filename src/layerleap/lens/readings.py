"""Readings of one text: what every layer predicts at every position, and saturation layers.

In: top tokens, probabilities, agreement and divergence per lens, layer and position.
Out: rows, a data frame, JSON, a table or a grid; `saturation` shows since when each rank is kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, product
from typing import ClassVar

import torch
from torch import Tensor

from layerleap.errors import BadSettings
from layerleap.lens.vocabulary.tokens import token_text
from layerleap.maps.kinds import lens_title
from layerleap.results.base import Result
from layerleap.results.cells import Cell, Grid, Part
from layerleap.results.colours import legend_layers, saturation_colour
from layerleap.results.columns import Row, Table
from layerleap.results.head import PageHead
from layerleap.short_repr import ShortRepr

MEASURES = ("agrees", "kl", "surprisal")


@dataclass(frozen=True, eq=False, repr=False)
class LensReadings(ShortRepr):
    """The readings of one lens; the first axis is the layer, the second the position."""

    ids: Tensor  # (layer, row, k)
    probs: Tensor  # (layer, row, k)
    agrees: Tensor  # (layer, row): is the top token the model's own?
    kl: Tensor  # (layer, row): KL(model || reading), nats
    surprisal: Tensor  # (layer, row): -ln p_model(top token), nats

    def rows(self, chosen: Tensor) -> "LensReadings":
        """The readings of some of the rows."""
        return LensReadings(*(value[:, chosen] for value in vars(self).values()))

    def layer(self, number: int) -> "LensReadings":
        """The readings of one layer, with the row as the first axis."""
        return LensReadings(*(value[number] for value in vars(self).values()))


@dataclass(frozen=True, eq=False, repr=False)
class Readings(Result):
    """The readings of one text at every layer.

    tokens     the text, token by token
    positions  the positions that were read
    tracks     by map: "logit" is the logit lens, "linear" (or "tuned", ...) the bank's maps
    """

    KIND: ClassVar[str] = "readings"
    FACTS: ClassVar[tuple[str, ...]] = ("tokens", "n_layers")
    LEGEND: ClassVar[str] = "\u2713 same top answer as the model; KL(model || reading) in nats"
    TEMPLATE: ClassVar[str] = "readings"
    TABLES: ClassVar[tuple[Table, ...]] = (
        Table("readings", "", lambda r: r._rows(), lines=lambda r: r._lines()),
    )

    tokens: list[str]
    positions: list[int]
    n_layers: int
    tracks: dict[str, LensReadings]
    decode: Callable[[int], str]
    notes: list[str] = field(default_factory=list)  # what limits them, a sentence each
    following: list[int] = field(default_factory=list)  # by position, the next token's id or -1

    def _rows(self) -> Iterator[Row]:
        """One plain dict per map, position and layer, layers ascending."""
        cells = product(enumerate(self.positions), range(self.n_layers + 1))
        for (name, track), ((place, position), layer) in product(self.tracks.items(), cells):
            values = {key: value[layer, place].tolist() for key, value in vars(track).items()}
            top = [
                {"id": token, "token": self.decode(token), "prob": prob}
                for token, prob in zip(values["ids"], values["probs"], strict=True)
            ]
            row = {"map": name, "position": position, "token": self.tokens[position]}
            measures = {key: values[key] for key in MEASURES}
            yield {**row, "layer": layer, "top": top, **measures}

    def _lines(self) -> Iterator[Row]:
        """One line per map, position, layer and rank."""
        for row in self._rows():
            for rank, top in enumerate(row["top"], 1):
                place = {key: row[key] for key in ("map", "position", "token", "layer")}
                ranked = {"rank": rank, "top_token": top["token"], "prob": top["prob"]}
                yield {**place, **ranked, **{key: row[key] for key in MEASURES}}

    def at(self, position: int) -> list[Row]:
        """The rows of one position; negative positions count from the end."""
        if not -len(self.tokens) <= position < len(self.tokens):
            raise BadSettings(
                f"position {position} does not exist: the text has {len(self.tokens)} tokens"
            )
        index = position % len(self.tokens)
        return [row for row in self.rows() if row["position"] == index]

    def only(self, position: int) -> "Readings":
        """The readings of one position that was read; negative positions count from the end."""
        number = position % len(self.tokens) if position < 0 else position
        if number not in self.positions:
            raise BadSettings(f"position {position} was not read; expected one of {self.positions}")
        place = self.positions.index(number)
        tracks = {name: track.rows(torch.tensor([place])) for name, track in self.tracks.items()}
        following = self.following[place : place + 1]
        return replace(self, positions=[number], tracks=tracks, following=following)

    def saturation(self) -> "SaturationLayers":
        """Since which layer each of the top tokens keeps its rank."""
        return SaturationLayers(self)

    def short(self) -> str:
        """What it is, in one line."""
        names = " and ".join(self.tracks)
        return f"Readings({len(self.positions)} positions, layers 0 to {self.n_layers}, {names})"

    def headline(self) -> str:
        """The position that a table shows: the last one."""
        last, n = self.positions[-1], len(self.positions)
        more = f"; {n} were read, `only` shows another" if n > 1 else ""
        return f"position {last}, {token_text(self.tokens[last])}{more}"

    def grids(self, width: int | None = None) -> list[Grid]:
        """In a terminal, the last position: per lens its top tokens, agreement and KL."""
        if width is None:
            return []  # a page shows all positions
        layers: list[list[Row]] = [[] for _ in range(self.n_layers + 1)]
        for row in self.at(self.positions[-1]):
            layers[row["layer"]].append(row)
        rows = [
            [Cell(str(layer), sort=layer), *(cell for row in by_lens for cell in _cells(row))]
            for layer, by_lens in enumerate(layers[:-1])
        ]
        heads = ["layer", *(head for name in self.tracks for head in (name, "=", "KL"))]
        answer = "  ".join(f"{part.text} {part.small}" for part in _top(layers[-1][0]))
        last = f"{self.n_layers:>5}  the model's own answer: {answer}"
        return [Grid(heads, rows, legend=last, one_line=True)]

    def link(self) -> str | None:
        """The text in the model's debugger, if it runs."""
        from layerleap.show.web.session import running  # a convenience

        session = running(getattr(self.decode, "__self__", None))
        return None if session is None else session.link(self.tokens)

    def picture(self) -> Row:
        """A grid per lens, the last layer on top."""
        cells: dict[tuple[str, int], list[Row]] = {}
        for row in self.rows():
            cells.setdefault((row["map"], row["layer"]), []).append(
                {
                    "text": token_text(row["top"][0]["token"]),
                    "listed": ", ".join(f"{e['token']!r} {e['prob']:.2f}" for e in row["top"]),
                    "agrees": row["agrees"],
                    "depth": f"{0.05 + 0.75 * row['top'][0]['prob']:.2f}",
                }
            )
        layers = range(self.n_layers, -1, -1)
        return {
            "heads": [token_text(self.tokens[position]) for position in self.positions],
            "width": 4.5 + 10 * len(self.positions),  # so that all grids have the same columns
            "lenses": {
                lens_title(name): {layer: cells[name, layer] for layer in layers}
                for name in self.tracks
            },
        }

    def head(self, model: str, text: str) -> PageHead:
        """What a page says around them."""
        return PageHead(
            kicker="readings",
            title=("What", model, "is about to say"),
            facts=(f"{self.n_layers} layers", f"{len(self.positions)} positions"),
            heading="Layer by layer",
            lead="One column per token of the text: what each layer would predict next. Hover over "
            "a cell to see its top tokens.",
            text=text,
        )


def _cells(row: Row) -> tuple[Cell, Cell, Cell]:
    """The top tokens, a tick if the first is the model's own, and the divergence."""
    parts = _top(row)
    mark = Cell("\u2713", verdict="good") if row["agrees"] else Cell("\u00b7", verdict="open")
    text = " ".join(f"{part.text} {part.small}" for part in parts)
    return Cell(text, parts=parts), mark, Cell(f"{row['kl']:.2f}", sort=row["kl"])


def _top(row: Row) -> tuple[Part, ...]:
    """The top tokens, each with its probability."""
    return tuple(
        Part(token_text(one["token"]), strong=not place, small=f"{100 * one['prob']:.0f}%")
        for place, one in enumerate(row["top"])
    )


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
                place = {key: row[key] for key in ("map", "position", "token")}
                ranked = {"rank": rank["rank"], "rank_token": rank["token"]}
                layer = {key: rank[key] for key in ("layer", "saturates", "is_next")}
                yield {**place, **ranked, **layer}

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
