"""Readings: what every layer would say at every position of one text.

In: top tokens, probabilities, agreement and divergence per map, layer and position.
Out: rows, a data frame, JSON, or a self-contained table for a notebook.
"""

import html
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from layerleap.errors import BadSettings


@dataclass(frozen=True, eq=False)
class Track:
    """One map's readings; the first axis is the layer, the second the position."""

    ids: Tensor  # (layer, row, k)
    probs: Tensor  # (layer, row, k)
    agrees: Tensor  # (layer, row): the top token is the model's own
    kl: Tensor  # (layer, row): KL(model || reading), nats
    surprisal: Tensor  # (layer, row): -ln p_model(top token), nats

    def rows(self, chosen: Tensor) -> "Track":
        """The same at some of the rows."""
        return Track(*(value[:, chosen] for value in vars(self).values()))


@dataclass(frozen=True, eq=False)
class Readings:
    """One text as every layer reads it.

    tokens     the text, token by token
    positions  the positions that were read
    tracks     by map: "id" is the logit lens, "mat" (or "tuned") the bank's shortcuts
    """

    tokens: list[str]
    positions: list[int]
    n_layers: int
    tracks: dict[str, Track]
    decode: Callable[[int], str] = field(repr=False)

    def rows(self) -> Iterator[dict[str, Any]]:
        """One plain dict per map, position and layer."""
        for name, track in self.tracks.items():
            for place, position in enumerate(self.positions):
                for layer in range(self.n_layers + 1):
                    pairs = zip(track.ids[layer, place], track.probs[layer, place], strict=True)
                    yield {
                        "map": name,
                        "position": position,
                        "token": self.tokens[position],
                        "layer": layer,
                        "top": [
                            {"id": int(i), "token": self.decode(int(i)), "prob": float(p)}
                            for i, p in pairs
                        ],
                        "agrees": bool(track.agrees[layer, place]),
                        "kl": float(track.kl[layer, place]),
                        "surprisal": float(track.surprisal[layer, place]),
                    }

    def at(self, position: int) -> list[dict[str, Any]]:
        """The rows of one position, negative ones from the end."""
        if not -len(self.tokens) <= position < len(self.tokens):
            raise BadSettings(
                f"position {position} does not exist: the text has {len(self.tokens)} tokens"
            )
        wanted = position % len(self.tokens)
        return [row for row in self.rows() if row["position"] == wanted]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"tokens": self.tokens, "n_layers": self.n_layers, "readings": list(self.rows())}

    def to_pandas(self) -> Any:
        """One line per map, position, layer and rank."""
        import pandas

        return pandas.DataFrame(
            [
                {
                    **{key: row[key] for key in ("map", "position", "token", "layer")},
                    "rank": rank + 1,
                    "top_token": best["token"],
                    "prob": best["prob"],
                    **{key: row[key] for key in ("agrees", "kl", "surprisal")},
                }
                for row in self.rows()
                for rank, best in enumerate(row["top"])
            ]
        )

    def __repr__(self) -> str:
        names = " and ".join(self.tracks)
        return f"Readings({len(self.positions)} positions, layers 0 to {self.n_layers}, {names})"

    def _repr_html_(self) -> str:
        """A grid per map: a row per layer, last on top, a column per position."""
        grids = "".join(self._grid(name, track) for name, track in self.tracks.items())
        return f'{STYLE}<div class="layerleap-grids">{grids}</div>'

    def _grid(self, name: str, track: Track) -> str:
        head = "".join(f"<th>{shown(self.tokens[position])}</th>" for position in self.positions)
        body = "".join(self._line(track, layer) for layer in range(self.n_layers, -1, -1))
        title = TITLES.get(name, name)
        return (
            f'<div class="layerleap"><table><caption>{html.escape(title)}: top token by layer; '
            "the darker, the more probable; framed where it already is the model's answer</caption>"
            f"<thead><tr><th>layer</th>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def _line(self, track: Track, layer: int) -> str:
        cells = []
        for place in range(len(self.positions)):
            best, prob = int(track.ids[layer, place, 0]), float(track.probs[layer, place, 0])
            others = ", ".join(
                f"{self.decode(int(i))!r} {float(p):.2f}"
                for i, p in zip(track.ids[layer, place], track.probs[layer, place], strict=True)
            )
            agrees = " class=agrees" if bool(track.agrees[layer, place]) else ""
            cells.append(
                f'<td{agrees} style="background:rgba(42,120,214,{0.05 + 0.75 * prob:.2f})" '
                f'title="{html.escape(others, quote=True)}">{shown(self.decode(best))}</td>'
            )
        return f"<tr><th>{layer}</th>{''.join(cells)}</tr>"


def shown(token: str) -> str:
    """A token with its white space visible, safe inside HTML."""
    visible = token.replace("\n", "\u23ce").replace("\t", "\u21e5")
    return html.escape(visible if visible.strip() else repr(visible)[1:-1].replace(" ", "\u2423"))


TITLES = {
    "id": "id (logit lens)",
    "mat": "mat (linear shortcut)",
    "tuned": "tuned (trained lens)",
}
STYLE = """<style>
.layerleap-grids{display:flex;flex-wrap:wrap;gap:1em 3em}
.layerleap{overflow-x:auto;margin:.5em 0;max-width:100%}
.layerleap table{border-collapse:separate;border-spacing:1px;font:12px ui-monospace,monospace}
.layerleap caption{text-align:left;font-family:system-ui,sans-serif;padding:.3em 0}
.layerleap th{font-weight:600;text-align:center;padding:1px 6px}
.layerleap td{background-color:#fff;color:#111;text-align:center;padding:1px 6px}
.layerleap td{white-space:pre;border:2px solid transparent}
.layerleap td.agrees{border-color:#e07b00}
</style>"""
