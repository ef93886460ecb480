"""How good lenses are on a text: every measure at every layer, from one forward pass.

In: a wrapped model, named lenses, and batches of held-out text.
Out: `Scores`: a few numbers per row, layer and lens, and tables with intervals.
For some batches the model also computes its own logits. They are compared with the tail applied
to the last state, because all measures assume that both are the same (`TailCheck`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerleap.errors import BadText, ModelRefused
from layerleap.lens.intervals import finite
from layerleap.lens.lens import Lens, chunks
from layerleap.lens.reader import MEASURES, LogitObserver, Predictor, Reader, score_table
from layerleap.memory import give_back, rows_at_once
from layerleap.models.hooks.recording import Recording, record
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.short_repr import ShortRepr
from layerleap.stats.tensor_file import TensorFile
from layerleap.stream.examples import Batch

FILE = TensorFile("scores", 2)
CHECK_EVERY = 16  # the tail is checked on a few texts of one batch in this many
TRIM_EVERY = 8  # batches after which freed memory is returned to the system
MOST_WRONG = 0.01  # largest share of rows with another top token than the model


@dataclass
class TailCheck:
    """Compares the tail applied to the last state with the model's own logits."""

    rows: int = 0
    wrong: int = 0  # rows with another top token; ties up to rounding do not count
    gap: float = 0.0  # largest difference of log-probabilities

    @property
    def agreement(self) -> float | None:
        """The share of rows with the model's own top token; None if none was checked."""
        return 1 - self.wrong / self.rows if self.rows else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"rows": self.rows, "agreement": self.agreement, "gap": finite(self.gap)}

    def add(self, from_model: Tensor, from_tail: Tensor) -> None:
        """Add rows of the model's logits and of the tail's."""
        # bfloat16 logits are often equal up to rounding: either token may then come first.
        slack = 4 * torch.finfo(from_model.dtype).eps * from_model.abs().amax(-1).double()
        from_model, from_tail = from_model.double(), from_tail.to(from_model.device).double()
        chosen = from_model.gather(-1, from_tail.argmax(-1, keepdim=True))[:, 0]
        difference = (from_model.log_softmax(-1) - from_tail.log_softmax(-1)).abs().max()
        self.rows += len(from_model)
        self.wrong += int((~(chosen >= from_model.amax(-1) - slack)).sum())
        self.gap = max(self.gap, float(difference))

    def require(self, *, rows: int = 0) -> None:
        """Refuse the model if too many rows disagree, relative to at least `rows` rows."""
        if self.wrong > MOST_WRONG * max(self.rows, rows):
            raise ModelRefused(
                f"law 'tail' failed on real text: in {self.wrong} of {self.rows} rows the tail "
                "applied to the last state gives another top token than the model; discovery got "
                "the tail wrong: name blocks and tail by hand"
            )


ROWS = ("documents", "positions", "cosine")  # the same for every lens


@dataclass(repr=False)
class Scores(ShortRepr):
    """The measures of all readings: (row, layer) by lens; see `metrics.Comparison`."""

    documents: Tensor  # (row,)
    positions: Tensor  # (row,)
    rank: dict[str, Tensor]  # (row, layer) int8
    surprisal: dict[str, Tensor]  # (row, layer)
    kl: dict[str, Tensor]  # (row, layer)
    top: dict[str, Tensor]  # (row, layer) int32
    top_prob: dict[str, Tensor]
    second_prob: dict[str, Tensor]
    entropy: dict[str, Tensor]
    size: dict[str, Tensor]  # norm of the state passed to the tail
    cosine: Tensor  # (row, layer): between h[layer] and h[layer - 1]; NaN at layer 0
    check: TailCheck = field(default_factory=TailCheck)

    def table(self, **labels: Any) -> list[dict[str, Any]]:
        """One row per lens, metric and layer, with 95 % intervals over documents."""
        columns = {"rank": self.rank, "surprisal": self.surprisal, "kl": self.kl}
        return score_table(self.documents, columns, labels)

    def save(self, path: Path) -> None:
        """Write everything into one file."""
        tensors = {f"{m}/{lens}": v for m in MEASURES for lens, v in getattr(self, m).items()}
        tensors |= {name: getattr(self, name) for name in ROWS}
        # As text, because JSON has no infinity.
        FILE.save(path, tensors, {"check": {**asdict(self.check), "gap": repr(self.check.gap)}})

    @classmethod
    def load(cls, path: Path) -> "Scores":
        """The scores that `save` wrote."""
        tensors, header = FILE.load(path)
        with FILE.parsing(path):
            columns: dict[str, Any] = {name: tensors.pop(name) for name in ROWS}
            for key, value in tensors.items():
                measure, _, lens = key.partition("/")
                columns.setdefault(measure, {})[lens] = value
            check = header["check"]
            return cls(**columns, check=TailCheck(**{**check, "gap": float(check["gap"])}))


@torch.no_grad()  # not inference mode: callers may use the results in autograd
def score(
    transformer: Transformer,
    lenses: Mapping[str, Lens],
    batches: Iterable[Batch],
    *,
    on_states: Callable[[Mapping[int, Tensor], Batch], object] | None = None,
    on_logits: LogitObserver | None = None,
    on_recording: Callable[[Recording, Batch], object] | None = None,
    progress: Progress = silent,
    total: int | None = None,
    phase: str = "reading",
) -> Scores:
    """The measures of every lens at every layer and kept position.

    Args:
        batches: of text that was not fitted on.
        on_states: called with h[0] .. h[n_layers] at the rows of each batch, and the batch. Pass
            `MapErrors.add` to measure R2 on the same rows.
        on_logits: called with all logits, by lens and layer.
        on_recording: called with a full recording of each forward pass, and the batch.
    """
    for lens in lenses.values():
        lens.check_model()
    predictors = {name: _predictor(name, lens) for name, lens in lenses.items()}
    reader, check = Reader(transformer, predictors, on_logits=on_logits), TailCheck()
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    states_of_batches = iter_states(
        transformer, batches, check, lambda texts: progress(phase, texts, total), on_recording
    )
    for batch, states in states_of_batches:
        if on_states is not None:
            on_states(states, batch)
        reader.add(states)
        rows.append((batch.documents, batch.positions, _cosines(states)))
    if not rows:
        raise BadText("no position to read: the text is empty, or none of it is held out")
    documents, positions, cosine = (torch.cat(column) for column in zip(*rows, strict=True))
    return Scores(documents, positions, **reader.columns(), cosine=cosine, check=check)


def iter_states(
    transformer: Transformer,
    batches: Iterable[Batch],
    check: TailCheck,
    report: Callable[[int], object] = lambda texts: None,
    on_recording: Callable[[Recording, Batch], object] | None = None,
) -> Iterator[tuple[Batch, dict[int, Tensor]]]:
    """Every batch with the kept rows of every layer; the tail is checked now and then."""
    texts = 0
    for number, batch in enumerate(batches):
        if number % CHECK_EVERY == 0:
            check_tail(transformer, batch, check)
        if on_recording is None:
            yield batch, transformer.capture(batch.inputs, keep=batch.keep).states
        else:
            recording = record(transformer, batch.inputs)
            on_recording(recording, batch)
            yield batch, recording.rows(batch.keep)
        if number % TRIM_EVERY == 0:
            give_back()
        texts += batch.n_texts
        report(texts)
    check.require()


def _predictor(name: str, lens: Lens) -> Predictor:
    label = f"lens {name!r} ({lens.name})"
    return Predictor(label, lambda rows, layer: lens.map(layer)(rows[layer]))


@torch.no_grad()
def check_tail(transformer: Transformer, batch: Batch, check: TailCheck) -> None:
    """Compare the model's own logits with the tail of the last states, on a few texts of a batch.

    A model computes the logits of all positions at once. So it gets only as many texts as fit the
    logit budget (at least one): memory must not depend on which batch is checked.
    """
    is_read = batch.keep.any(1)
    if not is_read.any():
        return
    room = rows_at_once(transformer.d_vocab * batch.keep.shape[1])
    few = batch.texts(is_read & (is_read.cumsum(0) <= room))
    last = transformer.n_layers
    # Where rows depend on their neighbours, the tail has to get all those that the model's got.
    is_whole = "rows" in dict(transformer.identity.loosened) and transformer.pooling is None
    keep = torch.ones_like(few.keep) if is_whole else few.keep
    captured = transformer.capture(few.inputs, keep=keep, layers=[last], logits=True)
    assert captured.logits is not None
    logits = captured.logits  # of every position, or of the whole input of a classifier
    logits = logits[keep.to(logits.device)] if logits.dim() == 3 else logits[few.text_of_row]
    for rows in [slice(None)] if is_whole else chunks(len(logits), transformer.d_vocab):
        check.add(logits[rows], transformer.logits(captured.states[last][rows]))
    check.require(rows=100)  # a handful of rows must not decide


def _cosines(h: Mapping[int, Tensor]) -> Tensor:
    """Between each state and the one a layer below: (row, layer), NaN at layer 0."""
    flat = [h[layer].flatten(1).float() for layer in range(len(h))]
    pairs = [torch.cosine_similarity(x.to(y.device), y).cpu() for x, y in pairwise(flat)]
    return torch.stack([torch.full((len(flat[0]),), torch.nan), *pairs], dim=1)
