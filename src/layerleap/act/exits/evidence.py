"""What an exit rule may look at: a few numbers per row and layer.

In: plain tensors, from a pass over a text (replay) or from a run under way (live decoding).
Out: `Evidence`, checked, with what follows from it: the gap, streaks, agreement.

Columns are layers in rising order; live decoding may know only some of them. What is not known
is NaN (-1 for tokens), and a rule that needs it says so instead of guessing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from layerleap.errors import BadSettings
from layerleap.read.probes.task import EVIDENCE, States, TaskProbe
from layerleap.read.scores import Scores

FIRST_EXIT = 1  # no rule exits at layer 0: nothing has been computed there
CHUNK = 256  # rows whose states a probe is shown at a time
SLACK = 1e-3  # probabilities and cosines of short floats may leave their range by so much
COLUMNS = ("top", "p1", "p2", "entropy", "cosine")


@dataclass(frozen=True, eq=False)
class Evidence:
    """Readings of every row at some layers; tensors are (row, layer) unless said otherwise."""

    top: Tensor  # the reading's top token; -1 where there is no reading
    p1: Tensor  # probability of the top token
    p2: Tensor  # probability of the second best
    entropy: Tensor  # of the reading, nats
    cosine: Tensor  # of h[layer] with h[layer - 1]; NaN where the latter does not exist
    position: Tensor  # (row,) place in the text, from 0
    document: Tensor  # (row,)
    layers: tuple[int, ...]  # which layers the columns are
    final: Tensor | None = None  # (row,) the model's own top token; None if not known yet
    extra: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        self._check_layers()
        rows, columns = self.position.shape[0] if self.position.dim() else -1, len(self.layers)
        wanted: dict[str, tuple[int, ...]] = {
            name: (rows, columns) for name in (*COLUMNS, *self.extra)
        }
        wanted |= {"position": (rows,), "document": (rows,)} | (
            {} if self.final is None else {"final": (rows,)}
        )
        for name, shape in wanted.items():
            found = self.extra[name] if name in self.extra else getattr(self, name)
            if tuple(found.shape) != shape:
                raise BadSettings(
                    f"evidence {name!r} has shape {tuple(found.shape)}; {shape} was wanted, "
                    f"for {rows} rows" + (f" and {columns} layers" if len(shape) == 2 else "")
                )
        self._check_ranges()

    def _check_layers(self) -> None:
        layers = self.layers
        rising = all(a < b for a, b in pairwise(layers))
        if not layers or layers[0] < 0 or not rising:
            raise BadSettings(f"layers {layers} of the evidence are not rising numbers from 0 on")
        if clash := {*COLUMNS, "position"} & set(self.extra):
            raise BadSettings(f"extra evidence may not be called {sorted(clash)[0]!r}; rename it")

    def _check_ranges(self) -> None:
        ranges = {"p1": (0, 1), "p2": (0, 1), "cosine": (-1, 1), "entropy": (0, torch.inf)}
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if ((value < low - SLACK) | (value > high + SLACK)).any():
                raise BadSettings(
                    f"evidence {name!r} reaches from {value.min().item():.4g} to "
                    f"{value.max().item():.4g}; values from {low} to {high} were wanted"
                )
        if (self.p2 > self.p1).any():
            raise BadSettings("evidence p2 is above p1 in some rows; the best two were wanted")

    @classmethod
    def known(
        cls,
        layers: Sequence[int],
        position: Tensor,
        document: Tensor,
        *,
        final: Tensor | None = None,
        extra: Mapping[str, Tensor] | None = None,
        **columns: Tensor,
    ) -> "Evidence":
        """Evidence of which only `columns` are known, as in a live run that saves readings."""
        if unknown := set(columns) - set(COLUMNS):
            raise BadSettings(f"no evidence is called {sorted(unknown)[0]!r}; use extra for it")
        shape = (len(position), len(layers))
        blank = {
            name: torch.full(shape, -1, device=position.device)
            if name == "top"
            else torch.full(shape, torch.nan, device=position.device)
            for name in COLUMNS
        }
        return cls(
            **{**blank, **columns}, position=position, document=document, layers=tuple(layers),
            final=final, extra=extra or {},
        )  # fmt: skip

    @classmethod
    def of(cls, scores: Scores, lens: str) -> "Evidence":
        """What one lens showed in a pass over a text.

        Extra evidence is `size`, the logarithm of the length of the state handed to the tail.
        """
        columns = {name: getattr(scores, name)[lens] for name in COLUMNS if name != "cosine"}
        return cls(
            **columns, cosine=scores.cosine, position=scores.positions, document=scores.documents,
            layers=tuple(range(scores.cosine.shape[1])), final=scores.top[lens][:, -1],
            extra={"size": scores.size[lens].clamp_min(1e-30).log()},
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.position)

    def __repr__(self) -> str:
        documents = len(self.document.unique())
        return f"Evidence({len(self)} rows of {documents} documents, layers {self.layers})"

    @property
    def gap(self) -> Tensor:
        """p1 - p2, in float64 as are all comparisons with thresholds."""
        return self.p1.double() - self.p2.double()

    @property
    def may_exit(self) -> Tensor:
        """(layer,): True from layer 1 on."""
        return torch.tensor([layer >= FIRST_EXIT for layer in self.layers], device=self.top.device)

    @property
    def repeats(self) -> Tensor:
        """True where the top token is that of the column before; layer 0 does not count."""
        same = torch.zeros_like(self.top, dtype=torch.bool)
        same[:, 1:] = (self.top[:, 1:] == self.top[:, :-1]) & self.may_exit[:-1]
        return same

    @property
    def streak(self) -> Tensor:
        """How many columns in a row, this one the last, have this top token; from layer 1 on.

        Layer 0 does not count: it is never an exit, so a live run need not read it.
        """
        index = torch.arange(len(self.layers), device=self.top.device).expand_as(self.top)
        start = torch.where(self.repeats, 0, index).cummax(1).values
        return index - start + 1

    @property
    def agrees(self) -> Tensor:
        """True where the top token is the model's own."""
        if self.final is None:
            raise BadSettings(
                "this evidence does not hold the model's own answer, which is known only after "
                "the last layer; use evidence of a finished pass"
            )
        return self.top == self.final[:, None]

    def rows(self, index: Tensor) -> "Evidence":
        """Some of the rows, by number or by a mask."""
        cut = {name: getattr(self, name)[index] for name in (*COLUMNS, "position", "document")}
        final = None if self.final is None else self.final[index]
        extra = {name: value[index] for name, value in self.extra.items()}
        return replace(self, **cut, final=final, extra=extra)

    def with_probe(self, probe: TaskProbe, states: States) -> "Evidence":
        """The same evidence with a task probe's answers, for the rule `Task`.

        Args:
            probe: a fitted probe.
            states: of the same rows in the same order.
        """
        if not torch.equal(self.document, states.documents):
            raise BadSettings(
                f"evidence of {len(self)} rows does not belong to states of {len(states)} "
                "rows; give both of the same rows in the same order"
            )
        parts = []
        for start in range(0, len(states), CHUNK):
            rows = torch.arange(start, min(start + CHUNK, len(states)))
            here = {
                layer: states.cells(rows, torch.full_like(rows, layer)) for layer in self.layers
            }
            parts.append(probe.evidence(here)[EVIDENCE])
        return replace(self, extra={**self.extra, EVIDENCE: torch.cat(parts)})

    def upto(self, column: int) -> "Evidence":
        """The columns up to and including `column`: what a run knows when it gets there."""
        if not 0 <= column < len(self.layers):
            raise BadSettings(f"column {column} is not in 0 to {len(self.layers) - 1}")
        cut = {name: getattr(self, name)[:, : column + 1] for name in COLUMNS}
        extra = {name: value[:, : column + 1] for name, value in self.extra.items()}
        return replace(self, **cut, layers=self.layers[: column + 1], extra=extra)

    def at(self, layers: Sequence[int]) -> "Evidence":
        """The columns of `layers` and the last one: what a run knows that checks only there.

        Streaks and the column before then count the columns that are left, not layers.
        """
        if missing := sorted(set(layers) - set(self.layers)):
            raise BadSettings(
                f"layer {missing[0]} is not among the layers {self.layers} of the evidence"
            )
        wanted = {*layers, self.layers[-1]}
        columns = [n for n, layer in enumerate(self.layers) if layer in wanted]
        cut = {name: getattr(self, name)[:, columns] for name in COLUMNS}
        extra = {name: value[:, columns] for name, value in self.extra.items()}
        return replace(self, **cut, layers=tuple(sorted(wanted)), extra=extra)


class LiveEvidence(Evidence):
    """Made at every look of a live run, from our own numbers: checking them would cost more."""

    def __post_init__(self) -> None:
        """Nothing is checked."""


def split(
    evidence: Evidence,
    shares: Sequence[float],
    *,
    seed: int = 0,
    by: Literal["document", "row"] = "document",
) -> list[Evidence]:
    """Disjoint random parts of the rows, for training, calibrating and verifying apart.

    Args:
        evidence: the rows to divide.
        shares: the share of documents (or rows) of each part; at most 1 in all.
        seed: the order they are drawn in.
        by: whole documents, so that no two parts share one; or single rows, which are then
            exchangeable between the parts, as calibration assumes.
    """
    if by not in ("document", "row"):
        raise BadSettings(f"by {by!r} is neither 'document' nor 'row'")
    if not shares or not all(share > 0 for share in shares) or sum(shares) > 1 + 1e-9:
        raise BadSettings(f"shares {tuple(shares)} are not positive numbers of at most 1 in all")
    units = evidence.document if by == "document" else torch.arange(len(evidence))
    names, group = units.unique(return_inverse=True)
    place = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))
    ends = [round(sum(shares[:n]) * len(names)) for n in range(len(shares) + 1)]
    parts = []
    for low, high in pairwise(ends):
        part = (place[group] >= low) & (place[group] < high)
        if not part.any():
            raise BadSettings(
                f"{len(names)} {by}s are too few for parts of {tuple(shares)}; give more rows"
            )
        parts.append(evidence.rows(part))
    return parts
