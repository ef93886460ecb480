"""Evidence: the few numbers per row and layer that an exit rule may use.

In: a model and a text; scores of a finished pass (replay); or tensors of a pass in progress (live).
Out: `Evidence`, validated, with derived values: the gap, streaks, agreement.

Columns are layers in ascending order; live decoding may know only some of them. Unknown values are
NaN (-1 for tokens), and a rule that needs one raises an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from layerleap.arguments import checked
from layerleap.errors import BadSettings, TooFewRows, check_choice
from layerleap.lens.lens import Lens
from layerleap.lens.probes.task import EVIDENCE, States, TaskProbe
from layerleap.lens.scores import Scores, score
from layerleap.maps.bank import ShortcutBank
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.stream.batches import batches_of
from layerleap.stream.examples import Sampling
from layerleap.stream.source import n_to_generate, resolve_text

FIRST_EXIT = 1  # no rule exits at layer 0: nothing has been computed there
CHUNK = 256  # rows per call of a probe
SLACK = 1e-3  # rounding may take probabilities and cosines this far out of their range
COLUMNS = ("top", "top_prob", "second_prob", "entropy", "cosine")
PER_ROW = ("position", "document", "final")
RANGES = {"top_prob": (0, 1), "second_prob": (0, 1), "cosine": (-1, 1), "entropy": (0, torch.inf)}


@dataclass(frozen=True, eq=False)
class Evidence:
    """Readings of every row at some layers; tensors are (row, layer) unless noted otherwise."""

    top: Tensor  # the reading's top token; -1 where there is no reading
    top_prob: Tensor  # probability of the top token
    second_prob: Tensor  # probability of the second best token
    entropy: Tensor  # entropy of the reading, nats
    cosine: Tensor  # cosine between h[layer] and h[layer - 1]; NaN at layer 0
    position: Tensor  # (row,) position in the text, from 0
    document: Tensor  # (row,)
    layers: tuple[int, ...]  # the layer of each column
    final: Tensor | None = None  # (row,) the model's own top token; None if not known yet
    extra: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in pairwise(self.layers))
        if not self.layers or self.layers[0] < 0 or not rising:
            raise BadSettings(
                f"layers {self.layers} of the evidence are not in order; expected ascending layers "
                "from 0 on"
            )
        if clash := {*COLUMNS, *PER_ROW} & set(self.extra):
            raise BadSettings(f"the name {sorted(clash)[0]!r} is taken; rename this extra evidence")
        rows, columns = self.position.shape[0] if self.position.dim() else -1, len(self.layers)
        values = {name: getattr(self, name) for name in (*COLUMNS, *PER_ROW)} | dict(self.extra)
        for name, value in values.items():
            shape = (rows,) if name in PER_ROW else (rows, columns)
            if value is not None and tuple(value.shape) != shape:
                raise BadSettings(
                    f"evidence {name!r} has shape {tuple(value.shape)}; expected {shape} for "
                    f"{rows} rows" + (f" and {columns} layers" if len(shape) == 2 else "")
                )
        self._check_ranges()

    def _check_ranges(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if ((value < low - SLACK) | (value > high + SLACK)).any():
                raise BadSettings(
                    f"evidence {name!r} ranges from {value.min().item():.4g} to "
                    f"{value.max().item():.4g}; expected values from {low} to {high}"
                )
        if (self.second_prob > self.top_prob).any():
            raise BadSettings(
                "evidence second_prob is above top_prob in some rows; expected it to be the smaller"
            )

    @classmethod
    def from_scores(cls, scores: Scores, lens: str) -> "Evidence":
        """The evidence of one lens in a pass over a text.

        The extra evidence `size` is the log norm of the state that goes into the tail.
        """
        columns = {name: getattr(scores, name)[lens] for name in COLUMNS if name != "cosine"}
        return cls(
            **columns,
            cosine=scores.cosine,
            position=scores.positions,
            document=scores.documents,
            layers=tuple(range(scores.cosine.shape[1])),
            final=scores.top[lens][:, -1],
            extra={"size": scores.size[lens].clamp_min(1e-30).log()},
        )

    def __len__(self) -> int:
        return len(self.position)

    def __repr__(self) -> str:
        documents = len(self.document.unique())
        return f"Evidence({len(self)} rows of {documents} documents, layers {self.layers})"

    @property
    def gap(self) -> Tensor:
        """top_prob - second_prob, in float64 like all comparisons with thresholds."""
        return self.top_prob.double() - self.second_prob.double()

    @property
    def may_exit(self) -> Tensor:
        """(layer,): True from layer 1 on."""
        return torch.tensor([layer >= FIRST_EXIT for layer in self.layers], device=self.top.device)

    @property
    def repeats(self) -> Tensor:
        """True where the top token equals that of the previous column; layer 0 does not count."""
        same = torch.zeros_like(self.top, dtype=torch.bool)
        same[:, 1:] = (self.top[:, 1:] == self.top[:, :-1]) & self.may_exit[:-1]
        return same

    @property
    def streak(self) -> Tensor:
        """The number of consecutive columns, up to this one, with the same top token.

        Layer 0 does not count: it is never an exit, so live decoding does not read it.
        """
        index = torch.arange(len(self.layers), device=self.top.device).expand_as(self.top)
        start = torch.where(self.repeats, 0, index).cummax(1).values
        return index - start + 1

    @property
    def agrees(self) -> Tensor:
        """True where the top token is the model's own."""
        if self.final is None:
            raise BadSettings(
                "this evidence lacks the model's own answer, which is known only after the last "
                "layer; use evidence of a finished pass"
            )
        return self.top == self.final[:, None]

    def rows(self, index: Tensor) -> "Evidence":
        """Some of the rows, selected by index or by mask."""
        per_row = {} if self.final is None else {"final": self.final[index]}
        per_row |= {"position": self.position[index], "document": self.document[index]}
        return self._cut(index, **per_row)

    def with_probe(self, probe: TaskProbe, states: States) -> "Evidence":
        """The same evidence plus a task probe's probabilities, for the rule `Task`.

        `states` are those of the same rows, in the same order.
        """
        if not torch.equal(self.document, states.documents):
            raise BadSettings(
                f"evidence of {len(self)} rows does not match states of {len(states)} rows; pass "
                "both for the same rows in the same order"
            )
        parts = []
        for start in range(0, len(states), CHUNK):
            rows = torch.arange(start, min(start + CHUNK, len(states)))
            h = {layer: states.cells(rows, torch.full_like(rows, layer)) for layer in self.layers}
            parts.append(probe.evidence(h)[EVIDENCE])
        return replace(self, extra={**self.extra, EVIDENCE: torch.cat(parts)})

    def at(self, layers: Sequence[int]) -> "Evidence":
        """The columns of `layers` and the last one: what a run knows that checks only there.

        Streaks and "the previous column" then refer to the remaining columns, not to layers.
        """
        if missing := sorted(set(layers) - set(self.layers)):
            raise BadSettings(
                f"layer {missing[0]} is not among the layers {self.layers} of the evidence"
            )
        chosen = {*layers, self.layers[-1]}
        columns = [n for n, layer in enumerate(self.layers) if layer in chosen]
        return self._cut((slice(None), columns), layers=tuple(sorted(chosen)))

    def _cut(self, index: Any, **changes: Any) -> "Evidence":
        columns = {name: getattr(self, name)[index] for name in COLUMNS}
        extra = {name: value[index] for name, value in self.extra.items()}
        return replace(self, **columns, extra=extra, **changes)


class LiveEvidence(Evidence):
    """Evidence of a live run, built at every check; validation would cost more than the check."""

    def __post_init__(self) -> None:
        """Skip validation."""


@checked
def evidence(
    transformer: Transformer,
    bank: ShortcutBank | None = None,
    text: Any = None,
    sampling: Sampling | None = None,
    *,
    n_texts: int | None = None,
    progress: Progress = silent,
) -> Evidence:
    """Read held-out text at every layer and return the evidence for exit rules.

    Args:
        transformer: the model.
        bank: shortcuts to read through; None is the logit lens.
        text: anything `fit_bank` accepts; None is the default text of the model.
        sampling: how texts are cut and positions chosen. Its `held_out` and `seed` must be those
            that the bank was fitted with, or documents that it was fitted on are read.
        n_texts: stop after this many texts; None reads all of them.
        progress: called after every batch.
    """
    sampling = sampling or Sampling()
    n_generated = None if n_texts is None else n_to_generate(n_texts, sampling.held_out)
    source, sampling = resolve_text(transformer, text, sampling, progress, n_generated=n_generated)
    batches = batches_of(transformer, source, sampling, side="held-out", n_texts=n_texts)
    lens = Lens(transformer, bank)
    scores = score(transformer, {lens.name: lens}, batches, progress=progress, total=n_texts)
    return Evidence.from_scores(scores, lens.name)


def split(
    evidence: Evidence,
    fractions: Sequence[float],
    *,
    seed: int = 0,
    by: Literal["document", "row"] = "document",
) -> list[Evidence]:
    """Disjoint random parts of the rows, for training, calibration and verification.

    Args:
        evidence: the rows to split.
        fractions: the fraction of documents (or rows) in each part; at most 1 in total.
        seed: seed of the random order.
        by: "document" puts all rows of a document into one part; "row" splits single rows, which
            are then exchangeable between parts, as calibration assumes.
    """
    check_choice(by, ("document", "row"), "by")
    if not fractions or not all(part > 0 for part in fractions) or sum(fractions) > 1 + 1e-9:
        raise BadSettings(
            f"fractions {tuple(fractions)} are not valid; expected positive numbers that add up "
            "to at most 1"
        )
    units = evidence.document if by == "document" else torch.arange(len(evidence))
    names, group = units.unique(return_inverse=True)
    place = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))
    ends = [round(sum(fractions[:n]) * len(names)) for n in range(len(fractions) + 1)]
    parts = []
    for low, high in pairwise(ends):
        part = (place[group] >= low) & (place[group] < high)
        if not part.any():
            raise TooFewRows(
                f"{len(names)} {by}s are too few to split into {tuple(fractions)}; use more text"
            )
        parts.append(evidence.rows(part))
    return parts
