"""The whole pipeline in a few short functions; the file to read first.

model = load("smollm2")                      models
tally = collect(model, "wikipedia", ...)     stream, stats
bank  = bank_from(tally, ...)                maps
bank.lens(model).read("The capital of")      read
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerleap.errors import BadArtifact, BadSettings, BadText, WrongModel
from layerleap.files import cache_root
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.linear import check_solving, solve
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.stats.moments import Pairs
from layerleap.stats.tally import Tally, reduce_tally, run_tally, world
from layerleap.stream.drawn import drawn
from layerleap.stream.examples import Census, Sampling, iter_batches, iter_examples

DRAWN_BY_DEFAULT = ("rxnfp", "rxnmapper", "mgm")  # bundled, and not speaking English
TOKENS_PER_BATCH = 1024
RIDGE_SHARE = 0.1  # of the documents fitted on; held back when the ridge is chosen by itself


def resolve_text(
    transformer: Transformer,
    text: Any,
    sampling: Sampling,
    progress: Progress = silent,
) -> tuple[Any, Sampling]:
    """What to stream for `text`, and how to cut it; draws texts from the model if asked to."""
    if text is None:
        text = default_text(transformer)
    if text != "drawn":
        return text, sampling
    path = drawn(transformer, progress=progress)
    return path, replace(sampling, unit="paragraph", per_document=None)


def default_text(transformer: Transformer) -> str:
    """Wikipedia, or for bundled models that do not speak English, what they write themselves."""
    return "drawn" if transformer.identity.name in DRAWN_BY_DEFAULT else "wikipedia"


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
    tokens_per_batch: int | None = None,
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
        tokens_per_batch: padded tokens per forward pass; suited to a CPU when None.
        progress: told about every batch.
    """
    sampling = sampling or Sampling()
    tokens_per_batch = tokens_per_batch or TOKENS_PER_BATCH
    if pairs not in ("final", "all"):
        raise BadSettings(f"pairs {pairs!r} are unknown; 'final' or 'all' was wanted")
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
        raise BadText(
            "no position to fit on: the text is empty, every piece is too short, or every document "
            "fell to the held-out side; give more documents"
        )
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
    shards: list[Sequence[int]] = [tally.about.get("shard") or () for tally in tallies]
    for path, shard in zip(paths, shards, strict=True):
        if not shard:
            raise BadArtifact(f"{path} is no shard but a whole or unfinished run")
    of = shards[0][1]
    if any(other != of for _, other in shards):
        raise BadSettings(f"shards of different divisions: {sorted({o for _, o in shards})} parts")
    if len(shards) != len({which for which, _ in shards}):
        raise BadSettings(
            f"a shard was given twice: {sorted(which for which, _ in shards)} of {of}"
        )
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
    check_solving(ridge, rank, transformer.d_model)
    tally = collect(
        transformer, text, sampling, choose_ridge=ridge == "auto", progress=progress, **options
    )
    return bank_from(tally, intercept=intercept, ridge=ridge, rank=rank, progress=progress)


def default_bank(
    transformer: Transformer,
    *,
    tell: Callable[[str], None] = lambda _: None,
    progress: Progress = silent,
) -> ShortcutBank:
    """The bank kept in the cache for these very weights; fitted now if there is none."""
    folder = cache_root() / "banks" / transformer.identity.fingerprint
    if folder.is_dir():
        try:
            bank = ShortcutBank.from_pretrained(folder)
            bank.check_model(transformer)
            return bank
        except BadArtifact as error:  # a cache can be made again
            tell(str(error))
    text = default_text(transformer)
    name = transformer.identity.name
    tell(f"no bank of {name} yet: fitting one on {text} (once; kept in {folder})")
    source, sampling = resolve_text(transformer, text, DEFAULT_BANK, progress)
    bank = fit_bank(
        transformer, source, sampling, n_texts=DEFAULT_BANK_TEXTS, progress=progress,
        checkpoint=folder.with_suffix(".fitting.safetensors"),
    )  # fmt: skip
    bank.save_pretrained(folder)
    return bank


DEFAULT_BANK = Sampling(unit="paragraph", positions="every:2", held_out=0.0)
DEFAULT_BANK_TEXTS = 500
