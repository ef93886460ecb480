"""The whole pipeline in a few short functions; the file to read first.

    model = load("smollm2")                      models
    tally = collect(model, "wikipedia", ...)     stream, stats
    bank  = bank_from(tally, ...)                maps
    bank.lens(model).read("The capital of")      read
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from layerleap.errors import BadArtifact, BadSettings, BadText, WrongModel
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.linear import solve
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.stats.moments import Pairs
from layerleap.stats.tally import Tally, reduce_tally, run_tally, world
from layerleap.stream.examples import Census, Sampling, iter_batches, iter_examples

RIDGE_SHARE = 0.1  # of the documents fitted on; held back when the ridge is chosen by itself


def collect(
    transformer: Transformer,
    text: Any,
    sampling: Sampling | None = None,
    *,
    n_texts: int | None = None,
    pairs: Pairs = "final",
    choose_ridge: bool = False,
    shard: tuple[int, int] | None = None,
    checkpoint: Path | None = None,
    tokens_per_batch: int = 1024,
    progress: Progress = silent,
) -> Tally:
    """Moments of the fitting side of `text`, in one pass.

    Args:
        transformer: the model.
        text: anything `iter_documents` reads.
        sampling: how texts are cut and positions chosen.
        n_texts: stop after that many texts.
        pairs: "final" for maps to the last layer, "all" for every pair.
        choose_ridge: hold back a tenth of the documents for choosing a ridge.
        shard: (which, of how many) when several runs share the work by hand.
        checkpoint: a file to save to about every half minute, and to go on from.
        tokens_per_batch: padded tokens per forward pass.
        progress: told about every batch.
    """
    sampling = sampling or Sampling()
    about = {
        "model": transformer.identity.to_dict(),
        "text": text if isinstance(text, str | Path) else "given texts",
        "sampling": sampling.to_dict(),
        "n_texts": n_texts, "pairs": pairs, "choose_ridge": choose_ridge,
        "tokens_per_batch": tokens_per_batch, "shard": list(shard) if shard else None,
    }  # fmt: skip
    about["text"] = str(about["text"])
    rank, processes = world()
    if shard and processes > 1:
        raise BadSettings("torchrun already divides the work; leave --shard out")
    if shard and not 0 <= shard[0] < shard[1]:
        raise BadSettings(f"shard {shard[0]} of {shard[1]} does not exist; count from 0")
    if checkpoint and processes > 1:
        checkpoint = checkpoint.with_suffix(f".{rank}of{processes}{checkpoint.suffix}")
    tally = _resume(checkpoint, about) or Tally.empty(transformer, pairs, about)
    census = Census()
    examples = iter_examples(
        transformer, text, sampling, n_texts=n_texts, census=census,
        ridge_share=RIDGE_SHARE if choose_ridge else 0.0,
    )  # fmt: skip
    batches = iter_batches(transformer, examples, tokens_per_batch=tokens_per_batch)
    mine = shard or (rank, processes)
    expected = None if n_texts is None else -(-n_texts // mine[1])
    run_tally(
        transformer, batches, tally, shard=mine, checkpoint=checkpoint, progress=progress,
        total=expected,
    )  # fmt: skip
    tally.about = {**about, "data": census.to_dict()}
    reduce_tally(tally)
    if tally.fit.n == 0 and not shard:
        raise BadText("no position to fit on: the text is empty or every piece is too short")
    if checkpoint:
        checkpoint.unlink(missing_ok=True)
    return tally


def _resume(checkpoint: Path | None, about: dict[str, Any]) -> Tally | None:
    """The tally of an interrupted run with the very same settings, if there is one."""
    if checkpoint is None or not checkpoint.exists():
        return None
    tally = Tally.load(checkpoint)
    if tally.about != about:
        differing = [key for key in about if tally.about.get(key) != about[key]]
        raise WrongModel(
            f"{checkpoint} is of a run with other settings ({', '.join(differing)}); "
            "delete it to start anew, or repeat those settings to go on"
        )
    return tally


def merge(paths: Sequence[Path]) -> Tally:
    """Add up shards of one run; all of them must be there."""
    if not paths:
        raise BadSettings("nothing to merge: name the files of all shards")
    tallies = [Tally.load(path) for path in paths]
    shards = [tally.about.get("shard") for tally in tallies]
    for path, shard in zip(paths, shards, strict=True):
        if shard is None:
            raise BadArtifact(f"{path} is no shard but a whole or unfinished run")
    of = shards[0][1]
    missing = set(range(of)) - {which for which, _ in shards}
    if missing:
        raise BadSettings(f"shards {sorted(missing)} of {of} are missing")
    whole = tallies[0]
    for tally in tallies[1:]:
        whole = whole.merge(tally)
    return whole


def bank_from(
    tally: Tally,
    *,
    intercept: bool = False,
    ridge: float | str = 0.0,
    rank: int | None = None,
    progress: Progress = silent,
) -> ShortcutBank:
    """Solve every map the tally's moments hold; see `maps.linear.solve` for the options."""
    moments = tally.fit
    maps, fits = [], []
    for src in range(moments.n_layers):
        for found, fit in solve(
            moments, src, intercept=intercept, ridge=ridge, rank=rank, held_back=tally.held_back
        ):
            maps.append(found)
            fits.append(fit)
        progress("solving", src + 1, moments.n_layers, "layers")
    settings = {"intercept": intercept, "ridge": ridge, "rank": rank, **tally.about["sampling"]}
    data = {"text": tally.about["text"], **tally.about.get("data", {}), "rows_fitted": moments.n}
    return ShortcutBank(
        maps, model=tally.about["model"], n_layers=moments.n_layers, d_model=moments.d_model,
        fits=fits, settings=settings, data=data,
    )  # fmt: skip


def fit_bank(
    transformer: Transformer,
    text: Any,
    sampling: Sampling | None = None,
    *,
    intercept: bool = False,
    ridge: float | str = 0.0,
    rank: int | None = None,
    progress: Progress = silent,
    **options: Any,
) -> ShortcutBank:
    """`collect`, then `bank_from`; `options` go to `collect`."""
    tally = collect(
        transformer, text, sampling, choose_ridge=ridge == "auto", progress=progress, **options
    )
    return bank_from(tally, intercept=intercept, ridge=ridge, rank=rank, progress=progress)
