"""What edits change: readings before and after, at every layer and position.

In: a wrapped model, a text and edits. Out: `Effect`. Outside the causal cone of the edits (later
layers, same or later positions) nothing changes, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from layerleap.act.debug.debugger import Debugger
from layerleap.act.edits.spec import describe
from layerleap.arguments import checked
from layerleap.errors import BadSettings
from layerleap.maps.bank import ShortcutBank
from layerleap.models.hooks.edit import Edit
from layerleap.models.transformer import Transformer
from layerleap.read.vocabulary.tokens import output_label


@dataclass(frozen=True, eq=False)
class Effect:
    """The readings of one text without and with edits.

    cells   by (layer, position), what was read without edits
    edited  the same with edits, where the state is another one; see `act.debug.cells.Cell`
    """

    transformer: Transformer
    tokens: list[str]
    positions: list[int]
    edits: list[str]
    cells: dict[tuple[int, int], dict[str, Any]]
    edited: dict[tuple[int, int], dict[str, Any]]

    @property
    def changed(self) -> list[tuple[int, int]]:
        """The layers and positions whose state changed."""
        return sorted(self.edited)

    @property
    def answers(self) -> dict[int, tuple[str, str]]:
        """By position, the model's top token before and after."""
        last = self.transformer.n_layers
        return {
            position: (
                self._top(self.cells[last, position]),
                self._top(self._after(last, position)),
            )
            for position in self.positions
        }

    def _after(self, layer: int, position: int) -> dict[str, Any]:
        return self.edited.get((layer, position), self.cells[layer, position])

    def _top(self, cell: dict[str, Any]) -> str:
        return output_label(self.transformer, cell["top"][0][0]).label

    def rows(self) -> list[dict[str, Any]]:
        """One plain dict per layer and position.

        `kl` is KL(before || after), and `final_*` follow the token that the unedited model predicts
        at that position.
        """
        rows = []
        for (layer, position), before in sorted(self.cells.items()):
            after = self._after(layer, position)
            rows.append(
                {
                    "layer": layer, "position": position, "token": self.tokens[position],
                    "changed": (layer, position) in self.edited,
                    "before": self._top(before), "after": self._top(after),
                    "kl": after["change"] or 0.0,
                    "final_prob_before": before["final"][0], "final_prob_after": after["final"][0],
                    "final_rank_before": before["final"][1], "final_rank_after": after["final"][1],
                }
            )  # fmt: skip
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"tokens": self.tokens, "edits": self.edits, "cells": self.rows()}

    def to_pandas(self) -> Any:
        """A data frame with one line per layer and position."""
        import pandas

        return pandas.DataFrame(self.rows())

    def __repr__(self) -> str:
        moved = sum(before != after for before, after in self.answers.values())
        return (
            f"Effect({len(self.edits)} edits, {len(self.edited)} of {len(self.cells)} states "
            f"changed, another top token at {moved} of {len(self.positions)} positions)"
        )


@checked
def effect(
    transformer: Transformer,
    text: str | Sequence[int],
    edits: Sequence[Edit],
    *,
    bank: ShortcutBank | None = None,
) -> Effect:
    """What edits change in the readings of a text, layer by layer and position by position.

        ll.effect(model, "The capital of France is", [ll.edits.ZeroNeuron(30, 511)])

    Args:
        bank: shortcuts to read through; None is the logit lens.
    """
    if not edits:
        raise BadSettings("no edits given; expected at least one")
    debugger = Debugger(transformer, bank=bank)
    lens = list(debugger.lenses)[-1]
    sides: dict[str, dict[tuple[int, int], dict[str, Any]]] = {"before": {}, "after": {}}
    tokens: list[str] = []
    positions: list[int] = []
    for frame in debugger.trace(text, lens=lens, edits=edits, top=1):
        if frame["frame"] == "meta":
            tokens = [token["label"] for token in frame["tokens"]]
            positions = frame["positions"]
        elif frame["frame"] == "cells":
            sides[frame["side"]] |= {(c["layer"], c["position"]): c for c in frame["cells"]}
    sentences = [str(describe(edit)["sentence"]) for edit in edits]
    return Effect(transformer, tokens, positions, sentences, sides["before"], sides["after"])
