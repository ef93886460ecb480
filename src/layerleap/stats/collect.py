"""Collect the statistics of a text in one pass; it can be resumed and split into shards.

In: a wrapped model and a text. Out: a `FitStatistics`, from which maps are solved.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from layerleap.arguments import checked
from layerleap.errors import BadArtifact, BadSettings, NothingToFit, check_choice
from layerleap.models.discovery.parts import KINDS, block_parts
from layerleap.models.hooks.foreign import foreign_code, in_words
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.stats.fit_statistics import (
    FitStatistics,
    accumulate,
    sum_over_processes,
    wait_for_all,
    world,
)
from layerleap.stats.moments import Pairs, load_about
from layerleap.stats.saved_states import StateFile, StateWriter
from layerleap.stats.tensor_file import require_same_run
from layerleap.stream.batches import batches_of, check_amounts
from layerleap.stream.examples import Sampling, TextCounts
from layerleap.stream.sampling import check_shard
from layerleap.stream.source import default_text, n_to_generate, resolve_text
from layerleap.stream.split import pack_fingerprints

METHOD = 1  # raise it when a pass over the same text would give other sums: old ones are refused
TOKENS_PER_BATCH = 1024
RIDGE_SHARE = 0.1  # share of the fitting documents reserved for choosing a ridge


@checked
def collect(
    transformer: Transformer,
    text: Any = None,
    sampling: Sampling | None = None,
    *,
    starts: str | None = None,
    n_texts: int | None = None,
    pairs: Pairs = "final",
    parts: bool | Sequence[str] = False,
    choose_ridge: bool = False,
    keep_sample: bool = False,
    solving: Mapping[str, Any] | None = None,
    shard: tuple[int, int] | None = None,
    checkpoint: str | Path | None = None,
    save_states: StateFile | str | Path | None = None,
    tokens_per_batch: int | None = None,
    progress: Progress = silent,
) -> FitStatistics:
    """Moments of the fitting documents of `text`, collected in one pass.

    Args:
        text: anything `batches_of` reads, "generated", or None for the model's default text.
        sampling: how to cut texts and choose positions.
        starts: a text of real sequences from which a masked model draws its texts.
        pairs: "final" for maps to the last layer, "all" for maps between all layers.
        parts: also collect the inputs and outputs of attention, FFN and norms of every block; or
            name some of these kinds. Rows for choosing the ridge are not included.
        choose_ridge: hold back a tenth of the documents to choose a ridge.
        keep_sample: keep some rows of that tenth, which are fitted on unless `choose_ridge`.
        solving: default options for `solve_bank`, stored with the result.
        shard: (index, number of shards) if several runs share the work.
        checkpoint: a file to save to about every half minute, and to resume from. The finished
            stats stays there; call `finish` once your results are saved.
        save_states: a file for a sample of the states fitted on, which `tune` trains on.
        tokens_per_batch: padded tokens per forward pass; the default suits a CPU.
    """
    tokens = TOKENS_PER_BATCH if tokens_per_batch is None else tokens_per_batch
    check_choice(pairs, ("final", "all"), "pairs")
    check_amounts(n_texts, tokens)
    rank, n_processes = world()
    if shard and n_processes > 1:
        raise BadSettings("torchrun already divides the work; leave --shard out")
    process_shard = check_shard(shard) if shard else (rank, n_processes)
    file = StateFile(save_states) if isinstance(save_states, str | Path) else save_states
    if file is not None and process_shard[1] > 1:
        raise BadSettings("a sharded run cannot save states; run without shards or save_states")
    if file is not None and transformer.row_kind == "sequence":
        raise BadSettings(
            f"the head of {transformer.identity.name} reads all positions at once, so single "
            "states cannot be saved for tuning; leave save_states out"
        )
    if text is None:
        text = default_text(transformer) if starts is None else "generated"
    sampling = sampling or Sampling()
    n_generated = None if n_texts is None else n_to_generate(n_texts, 1 - sampling.held_out)
    source, sampling = resolve_text(transformer, text, sampling, progress, starts, n_generated)
    kinds = KINDS if parts is True else parts or ()
    transformer.refresh(thorough=True)
    about = {
        "method": METHOD,
        "model": transformer.identity.to_dict(),
        "text": str(text) if isinstance(text, str | Path) else "given texts",
        "sampling": sampling.to_dict(),
        "solve": dict(solving or {}),
        "n_texts": n_texts,
        "pairs": pairs,
        "parts": block_parts(transformer, kinds) or None,
        "choose_ridge": choose_ridge,
        "keep_sample": keep_sample,
        "save_states": file.settings() if file else None,
        "tokens_per_batch": tokens,
        "shard": list(shard) if shard else None,
        "hooks": in_words(foreign_code(transformer.model)) or None,
    }
    path = own_checkpoint(checkpoint)
    stats = _resume(path, about)
    if stats is None:
        stats = FitStatistics.empty(transformer, pairs, about, choose_ridge=choose_ridge)
    text_counts = TextCounts()
    batches = batches_of(
        transformer,
        source,
        sampling,
        n_texts=n_texts,
        text_counts=text_counts,
        tokens_per_batch=tokens,
        ridge_share=RIDGE_SHARE if choose_ridge or keep_sample else 0.0,
    )
    with (
        closing(StateWriter(file, transformer, stats.fit.rows)) if file else nullcontext()
    ) as writer:
        accumulate(
            transformer,
            batches,
            stats,
            shard=process_shard,
            checkpoint=path,
            writer=writer,
            progress=progress,
            total=None if n_texts is None else -(-n_texts // process_shard[1]),
        )
    documents = pack_fingerprints(text_counts.used)
    stats.about = {**about, "data": text_counts.to_dict(), "documents": documents}
    sum_over_processes(stats)
    if stats.fit.n == 0 and not shard:
        raise NothingToFit(
            "no position to fit on: the text is empty, every piece is too short, or every document "
            "is held out; give more documents"
        )
    if writer is not None:
        writer.finish()
    return stats


def own_checkpoint(checkpoint: str | Path | None) -> Path | None:
    """The checkpoint of this process."""
    rank, n_processes = world()
    if checkpoint is None or n_processes == 1:
        return None if checkpoint is None else Path(checkpoint)
    return Path(checkpoint).with_suffix(f".{rank}of{n_processes}{Path(checkpoint).suffix}")


def _resume(checkpoint: Path | None, about: dict[str, Any]) -> FitStatistics | None:
    """The statistics of an earlier run with the same settings, if there is one."""
    if checkpoint is None or not checkpoint.exists():
        return None
    stats = FitStatistics.load(checkpoint)
    # The solving options do not affect the sums.
    sums = {key: value for key, value in about.items() if key != "solve"}
    require_same_run(checkpoint, stats.about, sums)
    stats.about = about
    return stats


def finish(checkpoint: str | Path | None) -> None:
    """Remove the checkpoint of a run whose result is saved; under torchrun, call it everywhere."""
    path = own_checkpoint(checkpoint)
    wait_for_all()  # the first process may still be saving
    if path is not None:
        path.unlink(missing_ok=True)


def merge(paths: Sequence[str | Path]) -> FitStatistics:
    """The sum of all shards of one run, read one file at a time."""
    if not paths:
        raise BadSettings("nothing to merge: name the files of all shards")
    shards, counts = (sorted(side) for side in zip(*map(_shard_of, paths), strict=True))
    of = counts[0]
    if of != counts[-1]:
        counts = sorted(set(counts))
        raise BadSettings(f"these shards come from runs split into {counts} shards; merge one run")
    if len(shards) != len(set(shards)):
        raise BadSettings(f"a shard was given twice: {shards} of {of}")
    if missing := set(range(of)) - set(shards):
        raise BadSettings(f"shards {sorted(missing)} of {of} are missing")
    total = FitStatistics.load(paths[0])
    for path in paths[1:]:
        total = total.merge(FitStatistics.load(path))
    return total


def _shard_of(path: str | Path) -> tuple[int, int]:
    match load_about(path).get("about"):
        case {"shard": [int(which), int(of)], "data": dict()}:
            return which, of
    raise BadArtifact(f"{path} is not a finished shard: it holds a whole or an unfinished run")
