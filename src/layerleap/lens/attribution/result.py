"""Attribution: contributions to one score, as rows that add up to it.

In: components with what each adds. Out: a table, a data frame, JSON, and pictures for papers.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from layerleap.lens.attribution.contributions import By, Component
from layerleap.lens.attribution.pictures import pictures
from layerleap.results.base import Result
from layerleap.results.cells import Grid, grid_of
from layerleap.results.columns import Column, Row, Table

KEYS = ("part", "block", "head", "neuron")
SHOWN = 20  # rows of a table, but for neurons; JSON and data frames have all


@dataclass(frozen=True, eq=False, repr=False)
class Attribution(Result):
    """What each component adds to a logit, or to a difference of logits.

    rows     by component, in order of execution: `direct`, what it adds; and with `total=True`
             `if_removed`, how much the score falls if its mean is put in its place
    value    the score itself, as the model (or the lens at an inner layer) gives it
    total    the sum of all rows
    residue  total less value: rounding, if all is well
    """

    KIND: ClassVar[str] = "attribution"
    TEMPLATE: ClassVar[str] = "shapes"

    TABLES: ClassVar[tuple[Table, ...]] = (
        Table("contributions", "", lambda result: result.lines()),
    )

    what: str  # such as "logit of Paris"
    by: By
    tokens: tuple[str, ...]
    position: int
    layer: int
    lens: str  # that reads this layer
    value: float
    components: tuple[tuple[Component, float], ...]
    removed: tuple[float | None, ...] | None = None
    notes: list[str] = field(default_factory=list)  # what limits it, a sentence each

    @property
    def total(self) -> float:
        """The sum of all contributions."""
        return sum(value for _, value in self.components)

    @property
    def residue(self) -> float:
        """How far the sum is from the score: rounding."""
        return self.total - self.value

    def lines(self) -> list[Row]:
        """One plain dict per component, in order of execution."""
        lines: list[Row] = []
        removed = self.removed or [None] * len(self.components)
        for (one, value), lost in zip(self.components, removed, strict=True):
            row: Row = {"name": one.name, **{key: getattr(one, key) for key in KEYS}}
            if self.by == "source":
                token = None if one.source is None else self.tokens[one.source]
                row |= {"source": one.source, "token": token}
            more = {} if self.removed is None else {"if_removed": lost}
            lines.append({**row, "direct": value, **more})
        return lines

    def strongest(self, count: int = SHOWN) -> list[Row]:
        """The rows that add or take away most, strongest first."""
        return sorted(self.lines(), key=lambda row: -abs(row["direct"]))[:count]

    def _shown(self) -> list[Row]:
        """The rows of the table: the neurons, where these were asked for."""
        rows = self.strongest(len(self.components))
        neurons = [row for row in rows if row["neuron"] is not None]
        return neurons or rows[:SHOWN]

    def short(self) -> str:
        """What it is, in one line."""
        return (
            f"Attribution({self.what}, by {self.by}: {len(self.components)} rows add up to "
            f"{self.total:.4g}, residue {self.residue:.1e})"
        )

    def headline(self) -> str:
        """The score and where it is read."""
        where = f"position {self.position}, {self.tokens[self.position]}"
        layer = f"; layer {self.layer}, {self.lens} lens" if self.lens else ""
        return f"{self.what} = {self.value:.3f} at {where}{layer}"

    def legend(self) -> str:
        """How to read it."""
        shown, removed = self._shown(), ""
        more = len(self.components) - len(shown)
        if self.removed is not None:
            removed = (
                " If removed: how much the score falls if the component's output here is its mean "
                "over a reference text, and later components react."
            )
        what = " neurons" if shown[0]["neuron"] is not None else ""
        others = f"The strongest {len(shown)}{what}; {more} other rows in to_pandas(). "
        return (
            f"{others * (more > 0)}Direct: what a component adds to the score; all rows add up to "
            f"{self.total:.4g}, {abs(self.residue):.1e} off.{removed}"
        )

    def grids(self, width: int | None = None) -> list[Grid]:
        """The strongest components."""
        columns = [Column("name", "component"), Column("direct", form="{:+.3f}")]
        if self.by == "source":
            columns.insert(1, Column("token", "from"))
        if self.removed is not None:
            columns.append(Column("if_removed", "if removed", form="{:+.3f}"))
        return [grid_of(Table("", "", lambda _: self._shown(), tuple(columns)), self)]

    def picture(self) -> Row:
        """A waterfall of parts or neurons, or heat maps of heads."""
        return {"shapes": pictures(self.what, self.by, self.lines(), self.tokens, self.value)}

    def facts(self) -> Row:
        """What is attributed, and how well the rows add up."""
        keys = ("what", "by", "position", "layer", "lens", "value", "total", "residue")
        return {"tokens": list(self.tokens), **{key: getattr(self, key) for key in keys}}
