"""What edits change: readings before and after, at every layer and position.

In: a wrapped model, a text and edits. Out: `Effect`. Outside the causal cone of the edits (later
layers, same or later positions) nothing changes, bit for bit.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from layerleap.act.debug.debugger import Debugger
from layerleap.act.edits.spec import Edits, as_edits, describe
from layerleap.arguments import checked
from layerleap.errors import BadSettings
from layerleap.lens.vocabulary.tokens import output_label
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.fit import find_bank
from layerleap.models.prompts import OnePrompt
from layerleap.models.transformer import Transformer
from layerleap.results.base import Result
from layerleap.results.cells import Grid, grid_of
from layerleap.results.columns import Column, Row, Table


@dataclass(frozen=True, eq=False, repr=False)
class Effect(Result):
    """The readings of one text without and with edits.

    cells   by (layer, position), what was read without edits
    edited  the same with edits, where the final state is another one; `act.debug.cells.Cell`
    unused  edits that met no position of the text
    notes   what limits the result, and what to know about the edits, a sentence each
    """

    KIND: ClassVar[str] = "effect"
    TABLES: ClassVar[tuple[Table, ...]] = (Table("cells", "", lambda effect: effect._rows()),)

    transformer: Transformer
    tokens: list[str]
    positions: list[int]
    edits: list[str]
    cells: dict[tuple[int, int], dict[str, Any]]
    edited: dict[tuple[int, int], dict[str, Any]]
    unused: list[str]
    notes: list[str] = field(default_factory=list)

    @property
    def changed(self) -> list[tuple[int, int]]:
        """The layers and positions whose state changed."""
        return sorted(place for place, cell in self.edited.items() if cell["changed"])

    @property
    def answers(self) -> dict[int, tuple[str, str]]:
        """By position, the model's top token before and after."""
        last = self.transformer.n_layers
        return {
            place: (self._top(self.cells[last, place]), self._top(self._after(last, place)))
            for place in self.positions
        }

    def _after(self, layer: int, position: int) -> dict[str, Any]:
        return self.edited.get((layer, position), self.cells[layer, position])

    def _top(self, cell: dict[str, Any]) -> str:
        return output_label(self.transformer, cell["top"][0][0]).label

    def _rows(self) -> list[Row]:
        """One plain dict per layer and position.

        `kl` is KL(before || after), and `final_*` follow the token that the unedited model predicts
        at that position.
        """
        rows = []
        for (layer, position), before in sorted(self.cells.items()):
            after = self._after(layer, position)
            rows.append(
                {
                    "layer": layer,
                    "position": position,
                    "token": self.tokens[position],
                    "changed": bool(after["changed"]),
                    "before": self._top(before),
                    "after": self._top(after),
                    "kl": after["change"] or 0.0,
                    "final_prob_before": before["final"][0],
                    "final_prob_after": after["final"][0],
                    "final_rank_before": before["final"][1],
                    "final_rank_after": after["final"][1],
                }
            )
        return rows

    def facts(self) -> Row:
        """The text and the edits."""
        return {"tokens": self.tokens, "edits": self.edits, "unused": self.unused}

    def short(self) -> str:
        """What it is, in one line."""
        moved = sum(before != after for before, after in self.answers.values())
        edits = "1 edit" if len(self.edits) == 1 else f"{len(self.edits)} edits"
        unused = f", not applied: {'; '.join(self.unused)}" if self.unused else ""
        return (
            f"Effect({edits}, {len(self.changed)} of {len(self.cells)} states changed, another top "
            f"token at {moved} of {len(self.positions)} positions{unused})"
        )

    def headline(self) -> str:
        """The edits in words."""
        return "; ".join(self.edits)

    def grids(self, width: int | None = None) -> list[Grid]:
        """The model's answer at every position, without and with edits."""
        last = self.transformer.n_layers
        answers = Table(
            "answers",
            "",
            lambda _: [row for row in self.rows() if row["layer"] == last],
            (
                Column("position", ""),
                Column("token"),
                Column("before", "without edits"),
                Column("after", "with edits"),
                Column("kl", "KL (nats)", "{:.3g}"),
            ),
        )
        return [grid_of(answers, self)]


@checked
def effect(
    transformer: Transformer,
    text: OnePrompt,
    edits: Edits,
    *,
    bank: ShortcutBank | str | Path | None = None,
    other_model: bool = False,
) -> Effect:
    """What edits change in the readings of a text, layer by layer and position by position.

        ll.effect(model, "The capital of France is", ["L30.N511=off"])

    Args:
        text: a text, chat messages or token ids.
        edits: values of `ll.edits`, or strings such as "L12.N34=5@last".
        bank: shortcuts to read through, or their folder or hub name; "default" is the bank in the
            cache. None is the logit lens.
        other_model: allow a bank of another model of the same class and width, with a warning.
    """
    if not edits:
        raise BadSettings("no edits given; expected at least one")
    parsed = as_edits(edits)
    debugger = Debugger(transformer, bank=find_bank(transformer, bank, other_model=other_model))
    lens = list(debugger.lenses)[-1]
    sides: dict[str, dict[tuple[int, int], dict[str, Any]]] = {"before": {}, "after": {}}
    tokens: list[str] = []
    positions: list[int] = []
    unused: list[str] = []
    notes = debugger.lenses[lens].caveats()
    for frame in debugger.trace(text, lens=lens, edits=parsed, top=1):
        if frame["frame"] == "meta":
            unused = [edit["sentence"] for edit in frame["edits"] if not edit["applied"]]
            remarks = ((edit["spec"], edit["remark"]) for edit in frame["edits"])
            notes += [f"{spec}: {remark}" for spec, remark in remarks if remark]
            tokens = [token["label"] for token in frame["tokens"]]
            positions = frame["positions"]
        elif frame["frame"] == "cells":
            sides[frame["side"]] |= {(c["layer"], c["position"]): c for c in frame["cells"]}
    sentences = [str(describe(edit)["sentence"]) for edit in parsed]
    before, after = sides["before"], sides["after"]
    return Effect(transformer, tokens, positions, sentences, before, after, unused, notes)
