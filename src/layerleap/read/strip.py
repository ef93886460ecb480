"""Strip: the saturation layers of one text, token by token.

In: a text, and its saturation layers through one or two lenses.
Out: rows, a data frame, JSON, or a self-contained strip for a notebook or a page.
"""

import html
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from layerleap.read.readings import TITLES, shown
from layerleap.read.saturation import Saturation

# From early to late, after ColorBrewer's Blues: one hue, so that it reads without colour as well.
SHADES = ((8, 48, 107), (33, 113, 181), (107, 174, 214), (222, 235, 247))


@dataclass(frozen=True, eq=False)
class Strip:
    """One text and, for each position read, the layer from which each of the k best tokens stays.

    tokens     the text, token by token
    positions  the positions that were read
    tracks     by map: "id" is the logit lens, "mat" (or "tuned") the bank's shortcuts
    """

    tokens: list[str]
    positions: list[int]
    n_layers: int
    k: int
    tracks: dict[str, Saturation]
    decode: Callable[[int], str] = field(repr=False)

    def rows(self) -> Iterator[dict[str, Any]]:
        """One plain dict per map and position."""
        for name, track in self.tracks.items():
            for place, position in enumerate(self.positions):
                gold = int(track.gold[place])
                yield {
                    "map": name,
                    "position": position,
                    "token": self.tokens[position],
                    "next": None if gold < 0 else self.decode(gold),
                    "ranks": [
                        self._rank(rank, int(token), int(layer), gold)
                        for rank, (token, layer) in enumerate(
                            zip(track.tokens[place], track.layer[place], strict=True), 1
                        )
                    ],
                }

    def _rank(self, rank: int, token: int, layer: int, gold: int) -> dict[str, Any]:
        return {
            "rank": rank, "id": token, "token": self.decode(token), "layer": layer,
            "saturates": layer < self.n_layers, "right": None if gold < 0 else token == gold,
        }  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "tokens": self.tokens, "n_layers": self.n_layers, "k": self.k,
            "saturation": list(self.rows()),
        }  # fmt: skip

    def to_pandas(self) -> Any:
        """One line per map, position and rank."""
        import pandas

        return pandas.DataFrame(
            [
                {
                    **{key: row[key] for key in ("map", "position", "token")},
                    "rank": one["rank"], "rank_token": one["token"],
                    **{key: one[key] for key in ("layer", "saturates", "right")},
                }
                for row in self.rows()
                for one in row["ranks"]
            ]
        )  # fmt: skip

    def __repr__(self) -> str:
        return (
            f"Strip({len(self.positions)} positions, ranks 1 to {self.k}, layers 0 to "
            f"{self.n_layers}, {' and '.join(self.tracks)})"
        )

    def _repr_html_(self) -> str:
        """A card per position and map: the token, and under it ranks 1 to k by their layer."""
        cards: dict[str, list[str]] = {name: [] for name in self.tracks}
        for row in self.rows():
            cards[row["map"]].append(self._card(row))
        parts = (
            f"<section><h3>{html.escape(TITLES.get(name, name))}</h3>"
            f'<ol class="cards">{"".join(found)}</ol></section>'
            for name, found in cards.items()
        )
        return f'{STYLE}<div class="layerleap-strip">{self._legend()}{"".join(parts)}</div>'

    def _card(self, row: dict[str, Any]) -> str:
        ranks = "".join(self._cell(one) for one in row["ranks"])
        token = shown(row["token"])
        return f'<li><b title="position {row["position"]}">{token}</b><ol>{ranks}</ol></li>'

    def _cell(self, one: dict[str, Any]) -> str:
        said = f"rank {one['rank']}: {one['token']!r} " + (
            f"from layer {one['layer']} on" if one["saturates"] else "only from the last layer on"
        )
        right = " class=right" if one["right"] else ""
        title, style = html.escape(said, quote=True), self._style(one["layer"])
        return (
            f'<li{right} style="{style}" title="{title}">'
            f"<span>{shown(one['token'])}</span> <i>{one['layer']}</i></li>"
        )

    def _style(self, layer: int) -> str:
        colours = shade(layer, self.n_layers)
        if colours is None:
            return "background:transparent"
        return "background:rgb({},{},{});color:{}".format(*colours, ink(colours))

    def _legend(self) -> str:
        steps = "".join(
            f'<i style="{self._style(layer)}">{layer}</i>' for layer in marks(self.n_layers)
        )
        return (
            f'<p class="legend">Settled for good from layer {steps} on; no colour: only the last '
            f"layer, {self.n_layers}, put it there; framed: the token that does come next.</p>"
        )


def shade(layer: int, n_layers: int) -> tuple[int, int, int] | None:
    """Red, green and blue for a saturation layer, the darker the earlier; None if it never was."""
    if layer >= n_layers:
        return None
    place = layer / max(1, n_layers - 1) * (len(SHADES) - 1)
    low = min(int(place), len(SHADES) - 2)
    share = place - low
    red, green, blue = (
        round(a + share * (b - a)) for a, b in zip(SHADES[low], SHADES[low + 1], strict=True)
    )
    return red, green, blue


def ink(colours: tuple[int, int, int]) -> str:
    """A colour for letters that can be read on the given one."""
    red, green, blue = colours
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else "#111111"


def marks(n_layers: int) -> list[int]:
    """A few layers below the last, evenly spread, for a legend."""
    steps = min(7, n_layers)
    return sorted({round(step * (n_layers - 1) / max(1, steps - 1)) for step in range(steps)})


STYLE = """<style>
.layerleap-strip{font-family:system-ui,sans-serif}
.layerleap-strip .legend{font-size:13px;max-width:60em}
.layerleap-strip .legend i{font:12px ui-monospace,monospace;padding:2px 7px}
.layerleap-strip h3{font-size:14px;margin:1em 0 .4em}
.layerleap-strip ol{list-style:none;margin:0;padding:0}
.layerleap-strip .cards{display:flex;flex-wrap:wrap;gap:12px 6px}
.layerleap-strip .cards>li{width:7.6em;font:12px ui-monospace,monospace}
.layerleap-strip .cards b{display:block;white-space:pre;overflow:hidden;text-overflow:ellipsis}
.layerleap-strip .cards b{padding:2px 4px;border-bottom:2px solid currentColor;margin-bottom:2px}
.layerleap-strip .cards ol li{display:flex;justify-content:space-between;gap:4px;padding:1px 4px}
.layerleap-strip .cards ol li{margin-top:1px;border:1px solid transparent}
.layerleap-strip .cards ol li.right{border-color:#e07b00;box-shadow:0 0 0 1px #e07b00}
.layerleap-strip .cards span{white-space:pre;overflow:hidden;text-overflow:ellipsis}
.layerleap-strip .cards i{font-style:normal;opacity:.85}
</style>"""
