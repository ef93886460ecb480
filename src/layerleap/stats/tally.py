"""Run a stream of batches into moments: with progress, checkpoints, shards and many processes.

In: a wrapped model and batches of examples.
Out: `Tally`: moments to fit on, moments held back to choose a ridge, and where the run stands.

A checkpoint is the moments and the number of the last batch in them, written in one step, so
a run killed at any moment goes on from there and ends with the same sums to the bit.
"""

import hashlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from layerleap.errors import BadArtifact, BadSettings, BadText, WrongModel
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.stats.moments import Moments, Pairs, load_moments, save_moments
from layerleap.stream.examples import Batch

CHECKPOINT_SECONDS = 30.0


@dataclass
class Tally:
    """Moments of one text, and the settings that made them."""

    fit: Moments
    held_back: Moments
    about: dict[str, Any]  # model identity, data, sampling: what must agree to merge
    n_batches: int = 0  # batches seen, counted or left to other shards
    n_texts: int = 0
    mark: str = ""  # a hash over all batches seen: what a resumed run must find again

    @classmethod
    def empty(cls, transformer: Transformer, pairs: Pairs, about: dict[str, Any]) -> "Tally":
        """Nothing seen yet."""
        shape = (transformer.n_layers, transformer.d_model)
        return cls(Moments(*shape, pairs), Moments(*shape, "final"), about)

    def save(self, path: Path) -> None:
        """Write everything into one file."""
        state = {key: getattr(self, key) for key in ("about", "n_batches", "n_texts", "mark")}
        save_moments(path, {"fit": self.fit, "held_back": self.held_back}, state)

    @classmethod
    def load(cls, path: Path) -> "Tally":
        """Read what `save` wrote."""
        sets, state = load_moments(path)
        try:
            return cls(sets["fit"], sets["held_back"], **state)
        except (KeyError, TypeError) as error:
            raise BadArtifact(f"{path} holds moments, but no tally; make it again") from error

    def merge(self, other: "Tally") -> "Tally":
        """Both together; they must be of one model, one text and one way of sampling."""
        for key in self.about:
            if key != "shard" and self.about[key] != other.about.get(key):
                raise WrongModel(
                    f"these statistics differ in {key!r}: {self.about[key]!r} and "
                    f"{other.about.get(key)!r}; only shards of one run can be merged"
                )
        if self.about.get("shard") is not None and self.about["shard"] == other.about.get("shard"):
            raise BadSettings(f"shard {self.about['shard']} was given twice")
        return Tally(
            self.fit.merge(other.fit),
            self.held_back.merge(other.held_back),
            {**self.about, "shard": None},
            max(self.n_batches, other.n_batches),
            self.n_texts + other.n_texts,
            self.mark,
        )


def run_tally(
    transformer: Transformer,
    batches: Iterable[Batch],
    tally: Tally,
    *,
    shard: tuple[int, int] = (0, 1),
    checkpoint: Path | None = None,
    progress: Progress = silent,
    total: int | None = None,
) -> Tally:
    """Add every batch of this shard that `tally` has not seen yet.

    Args:
        transformer: the model whose states are added.
        batches: the whole stream; batches of other shards and seen ones are passed over.
        tally: empty, or loaded from a checkpoint.
        shard: (which, of how many).
        checkpoint: where to save the tally about every half minute, and on interruption.
        progress: told the number of texts.
        total: how many texts there will be, if known.
    """
    saved = time.monotonic()
    seen, mark = 0, ""
    before = tally.n_batches
    whole = True  # not while a batch is half added: such sums must never be saved
    try:
        for batch in batches:
            mark = _marked(mark, batch)
            if batch.index < before:
                if batch.index + 1 == before:
                    _require_same_text(mark, tally)
                continue
            if batch.index % shard[1] == shard[0]:
                states = _states(transformer, batch)
                whole = False
                _add(tally, batch, states)
            tally.n_batches, tally.mark = batch.index + 1, mark
            whole = True
            seen += 1
            progress("fitting", tally.n_texts, total)
            if checkpoint and time.monotonic() - saved > CHECKPOINT_SECONDS:
                tally.save(checkpoint)
                saved = time.monotonic()
    except KeyboardInterrupt:
        if checkpoint and seen and whole:
            tally.save(checkpoint)
        raise
    if not seen and before:
        _require_same_text(mark, tally)  # nothing was left to do, or the text got shorter
    tally.fit.settle(), tally.held_back.settle()
    if shard[1] == 1 and tally.fit.n == 0:
        raise BadText(
            "no position to fit on: the text is empty, every piece is too short, or every document "
            "fell to the held-out side; give more documents"
        )
    return tally


def _marked(mark: str, batch: Batch) -> str:
    parts = (batch.inputs["input_ids"], batch.keep, batch.held_back)
    data = b"".join(part.cpu().numpy().tobytes() for part in parts)
    return hashlib.sha256(mark.encode() + data).hexdigest()


def _require_same_text(mark: str, tally: Tally) -> None:
    if mark != tally.mark:
        raise WrongModel(
            f"the text has changed since the checkpoint of {tally.n_batches} batches was saved; "
            "delete the checkpoint to start anew"
        )


def _states(transformer: Transformer, batch: Batch) -> list[Tensor]:
    seen = transformer.see(batch.inputs, keep=batch.keep)
    return [seen.states[layer] for layer in range(transformer.n_layers + 1)]


def _add(tally: Tally, batch: Batch, states: list[Tensor]) -> None:
    back = batch.held_back
    if back.any():
        tally.held_back.add([h[back.to(h.device)] for h in states])
        states = [h[~back.to(h.device)] for h in states]
    tally.fit.add(states)
    tally.n_texts += batch.n_texts


def world() -> tuple[int, int]:
    """(rank, processes) under torchrun, else (0, 1); joins the process group on first use."""
    if dist.is_available() and dist.is_torchelastic_launched():
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def reduce_tally(tally: Tally) -> Tally:
    """Add up the tallies of all processes; each then holds the whole."""
    if world()[1] == 1:
        return tally
    for moments in (tally.fit, tally.held_back):
        moments.settle()
        count = torch.tensor([moments.n])
        dist.all_reduce(count)
        moments.n = int(count)
        for tensor in _sums(moments):
            dist.all_reduce(tensor)
    texts = torch.tensor([tally.n_texts])
    dist.all_reduce(texts)
    tally.n_texts = int(texts)
    return tally


def _sums(moments: Moments) -> Iterator[Tensor]:
    yield moments.sums
    yield from moments.cross
