"""How good lenses are over a text: every measure, every layer, from one forward pass.

In: a wrapped model, named lenses, and batches of a text that was not fitted on.
Out: `Scores`: a few numbers per row, layer and lens, from which tables with intervals are made.
Every so often the model runs to its very end, and its own logits are compared with what the
tail makes of the last state: all measures rest on their being the same (`TailCheck`).
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from layerleap.errors import BadArtifact, BadText, ModelRefused
from layerleap.files import whole_file
from layerleap.memory import give_back
from layerleap.models.hooks.recording import Recording, record
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.read import lens as budget
from layerleap.read.lens import Lens, chunks
from layerleap.read.metrics import finite
from layerleap.read.quality import GROUPS, Quality
from layerleap.read.reader import (
    MEASURES,
    PRECISIONS,
    LogitObserver,
    Predictor,
    Reader,
    score_table,
)
from layerleap.stream.examples import Batch

__all__ = ["GROUPS", "MEASURES", "PRECISIONS", "Quality", "Scores", "TailCheck", "score"]

CHECK_EVERY = 16  # batches from one of which a few texts are run to the model's own logits on
TRIM_EVERY = 8  # batches after which freed memory is given back
MOST_WRONG = 0.01  # share of rows that may disagree with the model's own top token


@dataclass
class TailCheck:
    """The tail applied to the last state, against the model's own logits on the same rows."""

    rows: int = 0
    wrong: int = 0  # rows with another top token, ties up to rounding not counted
    gap: float = 0.0  # largest difference of log-probabilities

    @property
    def agreement(self) -> float | None:
        """The share of rows with the model's own top token; None before any was checked."""
        return 1 - self.wrong / self.rows if self.rows else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"rows": self.rows, "agreement": self.agreement, "gap": finite(self.gap)}

    def add(self, own: Tensor, made: Tensor) -> None:
        """Take in rows of the model's logits and of the tail's."""
        # Equal up to rounding, as bfloat16 logits often are: either token may then come first.
        slack = 4 * torch.finfo(own.dtype).eps * own.abs().amax(-1).double()
        own, made = own.double(), made.to(own.device).double()
        chosen = own.gather(-1, made.argmax(-1, keepdim=True))[:, 0]
        difference = (own.log_softmax(-1) - made.log_softmax(-1)).abs().max()
        self.rows += len(own)
        self.wrong += int((~(chosen >= own.amax(-1) - slack)).sum())
        self.gap = max(self.gap, float(difference))

    def require(self, *, rows: int = 0) -> None:
        """Refuse the model if too many rows disagree, of those checked or of `rows` if more."""
        if self.wrong > MOST_WRONG * max(self.rows, rows):
            raise ModelRefused(
                f"law 'tail' failed on real text: the tail applied to the last state gives another "
                f"top token than the model itself in {self.wrong} of {self.rows} rows; the tail "
                "was found wrongly: name blocks and tail by hand"
            )


ROWS = ("documents", "positions", "cosine")  # what is the same for every lens


@dataclass
class Scores:
    """What is kept of readings: (row, layer) by lens, as `metrics.Comparison` defines it."""

    documents: Tensor  # (row,)
    positions: Tensor  # (row,)
    rank: dict[str, Tensor]  # (row, layer) int8
    surprisal: dict[str, Tensor]  # (row, layer)
    kl: dict[str, Tensor]  # (row, layer)
    top: dict[str, Tensor]  # (row, layer) int32
    p1: dict[str, Tensor]
    p2: dict[str, Tensor]
    entropy: dict[str, Tensor]
    size: dict[str, Tensor]  # length of what is handed to the tail
    cosine: Tensor  # (row, layer): of h[layer] with h[layer - 1]; NaN at layer 0
    check: TailCheck = field(default_factory=TailCheck)

    def table(self, **labels: Any) -> list[dict[str, Any]]:
        """One row per lens, metric and layer, with 95 % intervals over documents."""
        columns = {"rank": self.rank, "surprisal": self.surprisal, "kl": self.kl}
        return score_table(self.documents, columns, labels)

    def save(self, path: Path) -> None:
        """Write everything into one file."""
        tensors = {f"{m}/{lens}": v for m in MEASURES for lens, v in getattr(self, m).items()}
        tensors |= {name: getattr(self, name) for name in ROWS}
        check = {"rows": self.check.rows, "wrong": self.check.wrong, "gap": repr(self.check.gap)}
        with whole_file(path) as temporary:
            save_file(
                {name: value.contiguous() for name, value in tensors.items()}, temporary,
                metadata={"layerleap.scores": json.dumps(check)},
            )  # fmt: skip

    @classmethod
    def load(cls, path: Path) -> "Scores":
        """Read what `save` wrote."""
        try:
            with safe_open(path, framework="pt") as file:
                check = json.loads(file.metadata()["layerleap.scores"])
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            columns: dict[str, Any] = {name: tensors.pop(name) for name in ROWS}
            for key, value in tensors.items():
                measure, _, lens = key.partition("/")
                columns.setdefault(measure, {})[lens] = value
            return cls(
                **columns, check=TailCheck(check["rows"], check["wrong"], float(check["gap"]))
            )
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise BadArtifact(f"{path} is missing, damaged or holds no scores ({error})") from error


@torch.no_grad()  # not inference mode: the results are the caller's to use as they like
def score(
    transformer: Transformer,
    lenses: Mapping[str, Lens],
    batches: Iterable[Batch],
    *,
    keep_states: Callable[[Mapping[int, Tensor], Batch], object] | None = None,
    watch: LogitObserver | None = None,
    also: Callable[[Recording, Batch], object] | None = None,
    progress: Progress = silent,
    total: int | None = None,
    phase: str = "reading",
) -> Scores:
    """Read every kept position through every lens at every layer.

    Args:
        transformer: the model.
        lenses: by name.
        batches: of a text that was not fitted on.
        keep_states: given h[0] .. h[n_layers] at the rows of each batch, and the batch; the
            `add` of a `Quality` measures R2 of the same rows.
        watch: shown all logits, by lens and layer.
        also: what else is to be made of each forward pass, which is then recorded whole.
        progress: told the number of texts.
        total: how many texts there will be, if known.
        phase: what progress calls it.
    """
    ways = {name: _way(name, lens) for name, lens in lenses.items()}
    reader, check, texts = Reader(transformer, ways, watch=watch), TailCheck(), 0
    cosine: list[Tensor] = []
    documents: list[Tensor] = []
    positions: list[Tensor] = []
    for number, batch in enumerate(batches):
        if number % CHECK_EVERY == 0:
            check_tail(transformer, batch, check)
        states = _states(transformer, batch, also)
        documents.append(batch.documents)
        positions.append(batch.positions)
        if keep_states is not None:
            keep_states(states, batch)
        reader.add(states)
        cosine.append(_cosines(states))
        texts += batch.n_texts
        if number % TRIM_EVERY == 0:
            give_back()
        progress(phase, texts, total)
    if not documents:
        raise BadText("no position to read: the held-out part of the text is empty")
    check.require()
    return Scores(
        torch.cat(documents), torch.cat(positions), **reader.columns(),
        cosine=torch.cat(cosine), check=check,
    )  # fmt: skip


def _states(
    transformer: Transformer, batch: Batch, also: Callable[[Recording, Batch], object] | None
) -> dict[int, Tensor]:
    """The kept rows of every layer, from one forward pass."""
    if also is None:
        return transformer.capture(batch.inputs, keep=batch.keep).states
    recording = record(transformer, batch.inputs)
    also(recording, batch)
    return recording.rows(batch.keep)


def _way(name: str, lens: Lens) -> Predictor:
    return Predictor(
        f"lens {name!r} ({lens.name})", lambda rows, layer: lens.map(layer)(rows[layer])
    )


@torch.no_grad()
def check_tail(transformer: Transformer, batch: Batch, check: TailCheck) -> None:
    """Compare the model's own logits with the tail of the last states, on some texts of a batch.

    A model makes logits of all positions at once, so there are as many texts as one chunk of
    logits has room for (one at least): memory must not hang on which batch is checked.
    """
    read = batch.keep.any(1)
    if not read.any():
        return
    room = budget.ENTRIES // (transformer.d_vocab * batch.keep.shape[1])
    few = batch.texts(read & (read.cumsum(0) <= max(1, room)))
    last = transformer.n_layers
    seen = transformer.capture(few.inputs, keep=few.keep, layers=[last], logits=True)
    assert seen.logits is not None
    own = seen.logits  # of every position, or in a class model of the whole input
    own = own[few.keep.to(own.device)] if own.dim() == 3 else own[few.keep.nonzero()[:, 0]]
    for rows in chunks(len(own), transformer.d_vocab):
        check.add(own[rows], transformer.logits(seen.states[last][rows]))
    check.require(rows=100)  # a handful of rows must not decide it


def _cosines(h: Mapping[int, Tensor]) -> Tensor:
    """Of each state with the one a layer below: (row, layer), NaN at layer 0."""
    pairs = [
        torch.cosine_similarity(h[layer - 1].float().to(h[layer].device), h[layer].float()).cpu()
        for layer in range(1, len(h))
    ]
    return torch.stack([torch.full((len(h[0]),), torch.nan), *pairs], dim=1)
