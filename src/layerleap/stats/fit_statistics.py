"""Run a stream of batches into moments: with progress, checkpoints, shards and many processes.

In: a wrapped model and batches of examples.
Out: a `FitStatistics`: moments to fit on, moments to choose a ridge on, optionally moments of the
parts of blocks, and the progress of the run.

A checkpoint is the moments plus the number of batches in them, written atomically. A run killed
at any time resumes from there and ends with bit-identical sums.
"""

import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from layerleap.errors import BadArtifact, BadSettings, WrongModel
from layerleap.models.discovery.parts import BlockPart
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.stats.moments import Moments, Pairs, load_with_rows, save_moments
from layerleap.stats.saved_states import StateWriter
from layerleap.stream.examples import Batch
from layerleap.stream.split import unpack_fingerprints

SAMPLE_ROWS = 384  # kept to choose a ridge on, from a few texts; 27 MB with 30 layers of 576
CHECKPOINT_SECONDS, LONGEST_SECONDS = 30.0, 55.0
MEDIA = ("pixel_values", "input_features", "decoder_input_ids")  # inputs of models without text


def pause_after(saving: float) -> float:
    """Seconds until the next checkpoint, if the last one took `saving` seconds to write.

    Twenty times as long keeps saving below 5 % of the run. But a kill should never cost more than
    about a minute, so the pause has a maximum, which a checkpoint of 2.75 s reaches.
    """
    return max(CHECKPOINT_SECONDS, min(20 * saving, LONGEST_SECONDS))


@dataclass
class FitStatistics:
    """The moments of one text, and the settings they were collected with."""

    fit: Moments
    ridge_rows: Moments | None  # to the last layer only; None unless a ridge will be chosen
    about: dict[str, Any]  # model identity, data, sampling: must agree to merge
    n_batches: int = 0  # batches passed, including those of other shards
    n_texts: int = 0
    digest: str = ""  # hash of all batches passed, to recognise the same text on resuming
    parts: Moments | None = None  # inputs and outputs of `block_parts`, in that order
    sample: Tensor | None = None  # rows to choose a ridge on: (row, n_layers + 1, d_model)

    @classmethod
    def empty(
        cls,
        transformer: Transformer,
        pairs: Pairs,
        about: dict[str, Any],
        choose_ridge: bool = False,
    ) -> "FitStatistics":
        """Statistics without rows; about["parts"] lists the parts of blocks to include."""
        shape = (transformer.n_layers, transformer.d_model)
        stats = cls(Moments(*shape, pairs), Moments(*shape) if choose_ridge else None, about)
        if names := _site_names(stats.block_parts):
            stats.parts = Moments(len(names) - 1, transformer.d_model, "parts", names)
        return stats

    def __repr__(self) -> str:
        model, text = self.about.get("model", {}).get("name"), self.about.get("text")
        return f"FitStatistics({self.fit.rows} rows from {self.n_texts} texts of {text}, {model})"

    @property
    def block_parts(self) -> list[BlockPart]:
        """The parts of blocks with moments, in the order of those moments."""
        return [BlockPart(block, part) for block, part in self.about.get("parts") or ()]

    def keep(self, states: Sequence[Tensor]) -> None:
        """Add rows to the sample until it is full."""
        room = SAMPLE_ROWS - (0 if self.sample is None else len(self.sample))
        if room > 0:
            rows = torch.stack([h[:room].detach().float().cpu() for h in states], dim=1)
            self.sample = _joined(self.sample, rows)

    @property
    def documents(self) -> frozenset[int] | None:
        """Fingerprints of the documents read; None before the end of a run."""
        packed = self.about.get("documents")
        return None if packed is None else unpack_fingerprints(packed)

    @property
    def sets(self) -> dict[str, Moments]:
        """All moments, by name."""
        named = {"fit": self.fit, "ridge_rows": self.ridge_rows, "parts": self.parts}
        return {name: moments for name, moments in named.items() if moments is not None}

    def save(self, path: str | Path) -> None:
        """Write everything into one file."""
        save_moments(path, self.sets, {key: getattr(self, key) for key in STATE}, self.sample)

    @classmethod
    def load(cls, path: str | Path) -> "FitStatistics":
        """The statistics that `save` wrote."""
        sets, state, sample = load_with_rows(path)
        is_ours = isinstance(state, dict) and state.keys() == STATE.keys()
        is_ours = is_ours and "fit" in sets and sets.keys() <= SETS
        if not is_ours or not all(isinstance(state[key], kind) for key, kind in STATE.items()):
            raise BadArtifact(f"{path} holds moments, but not statistics; recreate it")
        moments: dict[str, Any] = {"ridge_rows": None, **sets}
        stats = cls(**moments, **state, sample=sample)
        stats._check_parts(path)
        return stats

    def _check_parts(self, path: str | Path) -> None:
        """Check the moments of parts against `about`, which holds their names."""
        listed, shape = self.about.get("parts") or [], self.parts.shape if self.parts else None
        try:
            names = _site_names(self.block_parts)
        except (TypeError, ValueError) as error:
            raise BadArtifact(f"{path} lists its parts as {listed!r}; recreate it") from error
        expected = (len(names) - 1, self.fit.d_model, "parts") if names else None
        if shape != expected:
            raise BadArtifact(
                f"{path} holds moments of shape {shape} for {len(listed)} parts of blocks; "
                f"expected {expected}, recreate it"
            )
        if self.parts:
            self.parts.names = names

    def merge(self, other: "FitStatistics") -> "FitStatistics":
        """Both together; model, text and settings must be the same."""
        for key in self.about:
            if key != "shard" and self.about[key] != other.about.get(key):
                raise WrongModel(
                    f"these statistics differ in {key!r}: {self.about[key]!r} and "
                    f"{other.about.get(key)!r}; only shards of one run can be merged"
                )
        if self.about.get("shard") is not None and self.about["shard"] == other.about.get("shard"):
            raise BadSettings(f"shard {self.about['shard']} was given twice")
        if (self.ridge_rows is None) != (other.ridge_rows is None):
            raise WrongModel("only one of these has rows to choose a ridge; collect again")
        merged: dict[str, Any] = {
            name: moments.merge(other.sets[name]) for name, moments in self.sets.items()
        }
        return replace(
            self,
            **merged,
            about={**self.about, "shard": None},
            n_batches=max(self.n_batches, other.n_batches),
            n_texts=self.n_texts + other.n_texts,
            sample=_joined(self.sample, other.sample),
        )


def _joined(*samples: Tensor | None) -> Tensor | None:
    known = [rows for rows in samples if rows is not None]
    return torch.cat(known) if known else None


def _site_names(parts: Iterable[BlockPart]) -> list[str]:
    """The name of the input and the output of each part, for error messages."""
    return [f"{site} of block {block}" for part in parts for block, site in part.sites]


SETS = {"fit", "ridge_rows", "parts"}  # names of moments
STATE = {"about": dict, "n_batches": int, "n_texts": int, "digest": str}  # saved with the moments


def accumulate(
    transformer: Transformer,
    batches: Iterable[Batch],
    stats: FitStatistics,
    *,
    shard: tuple[int, int] = (0, 1),
    checkpoint: Path | None = None,
    writer: StateWriter | None = None,
    progress: Progress = silent,
    total: int | None = None,
) -> FitStatistics:
    """Add every batch of this shard that is not in `stats` yet; others are skipped.

    They are saved to `checkpoint` about every half minute, when interrupted, and at the end;
    `writer` also saves the states that are fitted on.
    """
    saver = Saver(stats.save, checkpoint)
    n_new, digest = 0, ""
    before = stats.n_batches
    consistent = True  # False while a batch is half added: such sums must never be saved
    try:
        for batch in batches:
            digest = _extended(digest, batch)
            if batch.index < before:
                if batch.index + 1 == before:
                    _require_same_text(digest, stats, checkpoint)
                continue
            if batch.index % shard[1] == shard[0]:
                sites = [site for part in stats.block_parts for site in part.sites]
                captured = transformer.capture(batch.inputs, keep=batch.keep, sites=sites)
                states = [captured.states[layer] for layer in range(transformer.n_layers + 1)]
                consistent = False
                _add(stats, batch, states, [captured.sites[site] for site in sites], writer)
            stats.n_batches, stats.digest = batch.index + 1, digest
            consistent = True
            n_new += 1
            progress("fitting", stats.n_texts, total)
            saver.save_if_due()
    except KeyboardInterrupt:
        if n_new and consistent:
            saver.save()
        raise
    if not n_new and before:  # the run was complete already, or the text got shorter
        _require_same_text(digest, stats, checkpoint)
    if n_new and stats.fit.rows:
        saver.save()
    for moments in stats.sets.values():
        moments.flush()
    return stats


class Saver:
    """Writes a checkpoint now and then, if there is one."""

    def __init__(
        self, write: Callable[[Path], None], path: Path | None, longest: float = LONGEST_SECONDS
    ) -> None:
        """`write` saves everything to `path`, at least every `longest` seconds; None: nowhere."""
        self.write, self.path, self.longest = write, path, longest
        self.saved = self.checked = time.monotonic()
        self.pause = min(pause_after(0.0), longest)

    def save_if_due(self) -> None:
        """Save if the last checkpoint is old enough, or would be too old after the next step."""
        now = time.monotonic()
        step, self.checked = now - self.checked, now
        if now - self.saved > self.pause or now - self.saved + step > self.longest:
            self.save()

    def save(self) -> None:
        """Save now."""
        if self.path is None:
            return
        started = time.monotonic()
        self.write(self.path)
        self.saved = self.checked = time.monotonic()
        self.pause = min(pause_after(self.saved - started), self.longest)


@contextmanager
def interrupts_wait() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C only sets a flag, which a loop asks for between two steps.

    What a step has half changed is never saved. A second Ctrl-C does not wait. Off the main thread,
    and where the program handles Ctrl-C itself, nothing changes.
    """
    pressed: list[int] = []

    def note(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _extended(digest: str, batch: Batch) -> str:
    """The digest of all batches up to this one."""
    # The ids identify a text; images and sound have to be hashed themselves.
    names = ("input_ids",) if "input_ids" in batch.inputs else MEDIA
    inputs = [batch.inputs[name] for name in names if name in batch.inputs]
    exact = [value.float() if value.is_floating_point() else value for value in inputs]
    tensors = (*exact, batch.keep, batch.ridge_rows)
    data = b"".join(tensor.cpu().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(digest.encode() + data).hexdigest()


def _require_same_text(digest: str, stats: FitStatistics, checkpoint: Path | None) -> None:
    if digest != stats.digest:
        raise WrongModel(
            f"the text has changed since the checkpoint of {stats.n_batches} batches was saved; "
            f"delete {checkpoint or 'it'} to start over"
        )


def _add(
    stats: FitStatistics,
    batch: Batch,
    states: list[Tensor],
    part_states: list[Tensor],
    writer: StateWriter | None,
) -> None:
    for_ridge, documents = batch.ridge_rows, batch.documents
    is_pooled = states[0].dim() == 3
    if for_ridge.any() and not is_pooled:  # a state of a pooled head has no reading of its own
        stats.keep([h[for_ridge.to(h.device)] for h in states])
    if is_pooled:  # a row is a whole sequence, and maps act on each of its states
        n = states[0].shape[1]
        for_ridge, documents = for_ridge.repeat_interleave(n), documents.repeat_interleave(n)
        states = [h.flatten(0, 1) for h in states]
        part_states = [h.flatten(0, 1) for h in part_states]
    if stats.ridge_rows is not None and for_ridge.any():
        stats.ridge_rows.add([h[for_ridge.to(h.device)] for h in states])
        states, part_states = (
            [h[~for_ridge.to(h.device)] for h in tensors] for tensors in (states, part_states)
        )
    stats.fit.add(states)
    if writer is not None:
        is_fitted = torch.ones_like(for_ridge) if stats.ridge_rows is None else ~for_ridge
        writer.add(states, documents[is_fitted])
    if stats.parts is not None:
        stats.parts.add(part_states)
    stats.n_texts += batch.n_texts


def world() -> tuple[int, int]:
    """(rank, number of processes) under torchrun, else (0, 1); joins the process group."""
    if dist.is_available() and dist.is_torchelastic_launched():
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def cpu_group() -> Any:
    """The process group that can add up CPU tensors; None is the default one.

    A script that trains on GPUs has started NCCL, which cannot. All processes must call this.
    """
    return None if "gloo" in dist.get_backend_config() else dist.new_group(backend="gloo")


def wait_for_all() -> None:
    """Wait until every torchrun process gets here."""
    if world()[1] > 1:
        dist.barrier(group=cpu_group())


def sum_over_processes(stats: FitStatistics) -> FitStatistics:
    """Add up the statistics of all processes; each then holds the total."""
    if world()[1] == 1:
        return stats
    group, sets = cpu_group(), stats.sets.values()
    counts = torch.tensor([stats.n_texts, *(moments.flush().n for moments in sets)])
    dist.all_reduce(counts, group=group)
    stats.n_texts, *rows = counts.tolist()
    for moments, n in zip(sets, rows, strict=True):
        moments.n = n
        for tensor in (moments.sums, *moments.cross):
            dist.all_reduce(tensor, group=group)
    return stats
