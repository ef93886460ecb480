"""Run a stream of batches into moments: with progress, checkpoints, shards and many processes.

In: a wrapped model and batches of examples.
Out: `Tally`: moments to fit on, moments held back to choose a ridge, moments of the parts of blocks
if they are wanted, and where the run stands.

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

from layerleap.errors import BadArtifact, BadSettings, WrongModel
from layerleap.models.discovery.parts import BlockPart
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.stats.moments import Moments, Pairs, load_moments, save_moments
from layerleap.stats.rows import RowWriter
from layerleap.stream.examples import Batch

CHECKPOINT_SECONDS, LONGEST_SECONDS = 30.0, 55.0
MEDIA = (
    "pixel_values",
    "input_features",
    "decoder_input_ids",
)  # what a model is given, if not text


def pause_after(saving: float) -> float:
    """Seconds to the next checkpoint, when the last one took `saving` seconds to write.

    Twenty times as long keeps saving below 5 % of the run; but a kill should never cost more than
    about a minute, so where a checkpoint takes more than 2.75 s that comes first.
    """
    return max(CHECKPOINT_SECONDS, min(20 * saving, LONGEST_SECONDS))


@dataclass
class Tally:
    """Moments of one text, and the settings that made them."""

    fit: Moments
    held_back: Moments | None  # to the last layer only; None unless a ridge is to be chosen
    about: dict[str, Any]  # model identity, data, sampling: what must agree to merge
    n_batches: int = 0  # batches seen, counted or left to other shards
    n_texts: int = 0
    mark: str = ""  # a hash over all batches seen: what a resumed run must find again
    parts: Moments | None = None  # couples, one per [block, part] of about["parts"]

    @classmethod
    def empty(
        cls,
        transformer: Transformer,
        pairs: Pairs,
        about: dict[str, Any],
        *,
        hold_back: bool = False,
    ) -> "Tally":
        """Nothing seen yet; about["parts"] says which parts of blocks are to be seen too."""
        shape = (transformer.n_layers, transformer.d_model)
        tally = cls(Moments(*shape, pairs), Moments(*shape, "final") if hold_back else None, about)
        if tally.couples:
            last = 2 * len(tally.couples) - 1
            tally.parts = Moments(last, transformer.d_model, "couples", _names(tally.couples))
        return tally

    @property
    def couples(self) -> list[BlockPart]:
        """The parts of blocks that are seen too, in the order of their moments."""
        return [BlockPart(block, part) for block, part in self.about.get("parts") or ()]

    @property
    def sets(self) -> dict[str, Moments]:
        """The moments there are, by name."""
        named = {"fit": self.fit, "held_back": self.held_back, "parts": self.parts}
        return {name: moments for name, moments in named.items() if moments is not None}

    def save(self, path: Path) -> None:
        """Write everything into one file."""
        save_moments(path, self.sets, {key: getattr(self, key) for key in STATE})

    @classmethod
    def load(cls, path: Path) -> "Tally":
        """Read what `save` wrote."""
        sets, state = load_moments(path)
        is_tally = isinstance(state, dict) and state.keys() == STATE.keys() and "fit" in sets
        if not is_tally or not all(isinstance(state[key], kind) for key, kind in STATE.items()):
            raise BadArtifact(f"{path} holds moments, but no tally; make it again")
        tally = cls(sets["fit"], sets.get("held_back"), **state, parts=sets.get("parts"))
        tally._check_parts(path)
        return tally

    def _check_parts(self, path: Path) -> None:
        """What is said about parts must be what there is; their names are not saved twice."""
        said, shape = self.about.get("parts") or [], None if not self.parts else self.parts.shape
        try:
            names = _names(self.couples)
        except (TypeError, ValueError) as error:
            raise BadArtifact(f"{path} names its parts as {said!r}; make it again") from error
        wanted = (len(names) - 1, self.fit.d_model, "couples") if names else None
        if shape != wanted:
            raise BadArtifact(
                f"{path} holds parts of {shape}; {wanted} was wanted for {len(said)} couples, "
                "make it again"
            )
        if self.parts:
            self.parts.names = names

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
        if (self.held_back is None) != (other.held_back is None):
            raise WrongModel("only one of these statistics has rows held back; make them again")
        return Tally(
            self.fit.merge(other.fit),
            _merged(self.held_back, other.held_back),
            {**self.about, "shard": None},
            max(self.n_batches, other.n_batches),
            self.n_texts + other.n_texts,
            self.mark,
            _merged(self.parts, other.parts),
        )


def _merged(mine: Moments | None, theirs: Moments | None) -> Moments | None:
    return None if mine is None or theirs is None else mine.merge(theirs)


def _names(couples: Iterable[BlockPart]) -> list[str]:
    """What each vector of the parts' moments is."""
    return [f"{site} of block {block}" for couple in couples for block, site in couple.sites]


STATE = {"about": dict, "n_batches": int, "n_texts": int, "mark": str}  # saved with the moments


def run_tally(
    transformer: Transformer,
    batches: Iterable[Batch],
    tally: Tally,
    *,
    shard: tuple[int, int] = (0, 1),
    checkpoint: Path | None = None,
    rows: RowWriter | None = None,
    progress: Progress = silent,
    total: int | None = None,
) -> Tally:
    """Add every batch of this shard that `tally` has not seen yet.

    Args:
        transformer: the model whose states are added.
        batches: the whole stream; batches of other shards and seen ones are passed over.
        tally: empty, or loaded from a checkpoint.
        shard: (which, of how many).
        checkpoint: where to save the tally about every half minute, on interruption, and in
            the end: the pass is then safe until its result is.
        rows: takes the rows that are fitted on, too; finished with the pass.
        progress: told the number of texts.
        total: how many texts there will be, if known.
    """
    saver = _Saver(tally, checkpoint)
    seen, mark = 0, ""
    before = tally.n_batches
    whole = True  # not while a batch is half added: such sums must never be saved
    try:
        for batch in batches:
            mark = _marked(mark, batch)
            if batch.index < before:
                if batch.index + 1 == before:
                    _require_same_text(mark, tally, checkpoint)
                continue
            if batch.index % shard[1] == shard[0]:
                seen_now = _states(transformer, batch, tally)
                whole = False
                _add(tally, batch, *seen_now, rows)
            tally.n_batches, tally.mark = batch.index + 1, mark
            whole = True
            seen += 1
            progress("fitting", tally.n_texts, total)
            saver.save_if_due()
    except KeyboardInterrupt:
        if seen and whole:
            saver.save()
        raise
    if not seen and before:  # nothing was left to do, or the text got shorter
        _require_same_text(mark, tally, checkpoint)
    if seen and tally.fit.rows:
        saver.save()
    for moments in tally.sets.values():
        moments.settle()
    return tally


class _Saver:
    """Writes the checkpoint, if one is wanted."""

    def __init__(self, tally: Tally, path: Path | None) -> None:
        self.tally, self.path = tally, path
        self.saved, self.pause = time.monotonic(), pause_after(0.0)

    def save_if_due(self) -> None:
        if time.monotonic() - self.saved > self.pause:
            self.save()

    def save(self) -> None:
        if self.path is None:
            return
        started = time.monotonic()
        self.tally.save(self.path)
        self.saved = time.monotonic()
        self.pause = pause_after(self.saved - started)


def _marked(mark: str, batch: Batch) -> str:
    # Of a text, the ids say it all; images and sound are what they are.
    names = ("input_ids",) if "input_ids" in batch.inputs else MEDIA
    inputs = [batch.inputs[name] for name in names if name in batch.inputs]
    whole = [part.float() if part.is_floating_point() else part for part in inputs]
    data = b"".join(part.cpu().numpy().tobytes() for part in (*whole, batch.keep, batch.held_back))
    return hashlib.sha256(mark.encode() + data).hexdigest()


def _require_same_text(mark: str, tally: Tally, checkpoint: Path | None) -> None:
    if mark != tally.mark:
        raise WrongModel(
            f"the text has changed since the checkpoint of {tally.n_batches} batches was saved; "
            f"delete {checkpoint or 'it'} to start anew"
        )


def _states(
    transformer: Transformer, batch: Batch, tally: Tally
) -> tuple[list[Tensor], list[Tensor]]:
    """Rows of every layer and of both sides of every part, from one forward pass."""
    sites = [site for couple in tally.couples for site in couple.sites]
    seen = transformer.capture(batch.inputs, keep=batch.keep, sites=sites)
    states = [seen.states[layer] for layer in range(transformer.n_layers + 1)]
    return states, [seen.sites[site] for site in sites]


def _add(
    tally: Tally, batch: Batch, states: list[Tensor], parts: list[Tensor], rows: RowWriter | None
) -> None:
    back = batch.held_back
    if back.any():
        assert tally.held_back is not None, "rows to hold back, and no place for them"
        tally.held_back.add([h[back.to(h.device)] for h in states])
        states, parts = ([h[~back.to(h.device)] for h in side] for side in (states, parts))
    tally.fit.add(states)
    if rows is not None:
        rows.add(states, batch.documents[~back])
    if tally.parts is not None:
        tally.parts.add(parts)
    tally.n_texts += batch.n_texts


def world() -> tuple[int, int]:
    """(rank, processes) under torchrun, else (0, 1); joins the process group on first use."""
    if dist.is_available() and dist.is_torchelastic_launched():
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def wait_for_all() -> None:
    """Go on when every process of torchrun has come here."""
    if world()[1] > 1:
        dist.barrier()


def reduce_tally(tally: Tally) -> Tally:
    """Add up the tallies of all processes; each then holds the whole."""
    if world()[1] == 1:
        return tally
    for moments in tally.sets.values():
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
