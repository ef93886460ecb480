"""The whole pipeline in a few short functions; the file to read first.

model = load("smollm2")                      models
tally = collect(model, "wikipedia", ...)     stream, stats
bank  = bank_from(tally, ...)                maps
bank.lens(model).read("The capital of")      read
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from layerleap.errors import BadArtifact, BadSettings, CannotWrite, NothingToFit, WrongModel
from layerleap.files import cache_root
from layerleap.maps.bank import ShortcutBank, check_target
from layerleap.maps.linear import LinearMap, check_solving, solve
from layerleap.maps.parts import solve_parts
from layerleap.models.discovery.parts import KINDS, block_parts
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.stats.moments import Moments, Pairs, load_about
from layerleap.stats.rows import RowFile, RowWriter
from layerleap.stats.tally import Tally, reduce_tally, run_tally, wait_for_all, world
from layerleap.stream.batches import batches_of, modality
from layerleap.stream.examples import Census, Sampling
from layerleap.stream.source import default_text, n_to_generate, resolve_text

TOKENS_PER_BATCH = 1024
RIDGE_SHARE = 0.1  # of the documents fitted on; held back when the ridge is chosen by itself


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
    solving: Mapping[str, Any] | None = None,
    shard: tuple[int, int] | None = None,
    checkpoint: Path | None = None,
    rows: RowFile | Path | None = None,
    tokens_per_batch: int | None = None,
    progress: Progress = silent,
) -> Tally:
    """Moments of the fitting side of `text`, in one pass.

    Args:
        transformer: the model.
        text: anything `batches_of` reads, "generated", or None for the model's default.
        sampling: how texts are cut and positions chosen.
        starts: a text of real sequences from which a masked model generates its texts.
        n_texts: stop after that many texts.
        pairs: "final" for maps to the last layer, "all" for every pair.
        parts: in the same pass, see what enters and leaves attention, FFN and norms of every
            block; or some kinds of `models.parts` alone. Rows held back do not enter.
        choose_ridge: hold back a tenth of the documents for choosing a ridge.
        solving: options that `bank_from` is to use unless told otherwise; kept with the result.
        shard: (which, of how many) when several runs share the work by hand.
        checkpoint: a file to save to about every half minute, and to go on from. The finished
            tally stays in it; call `finish` once what is made of it is safe.
        rows: a file to keep a sample of the rows in that are fitted on, for `tune`.
        tokens_per_batch: padded tokens per forward pass; suited to a CPU when None.
        progress: told about every batch.
    """
    tokens = TOKENS_PER_BATCH if tokens_per_batch is None else tokens_per_batch
    rank, processes = world()
    mine = _check_run(pairs, n_texts, tokens, shard, rank, processes)
    kept = RowFile(rows) if isinstance(rows, Path) else rows
    if kept is not None and mine[1] > 1:
        raise BadSettings("rows are kept by a run of its own; leave rows, or the sharing, out")
    if text is None:
        text = default_text(transformer) if starts is None else "generated"
    sampling = sampling or Sampling()
    n_generated = None if n_texts is None else n_to_generate(n_texts, 1 - sampling.held_out)
    source, sampling = resolve_text(transformer, text, sampling, progress, starts, n_generated)
    kinds = KINDS if parts is True else parts or ()
    about = {
        "model": transformer.identity.to_dict(),
        "text": str(text) if isinstance(text, str | Path) else "given texts",
        "sampling": sampling.to_dict(), "solve": dict(solving or {}),
        "n_texts": n_texts, "pairs": pairs, "parts": block_parts(transformer, kinds) or None,
        "choose_ridge": choose_ridge, "rows_kept": kept.settings() if kept else None,
        "tokens_per_batch": tokens, "shard": list(shard) if shard else None,
    }  # fmt: skip
    own = _own(checkpoint)
    tally = _resume(own, about)
    if tally is None:
        tally = Tally.empty(transformer, pairs, about, hold_back=choose_ridge)
    census = Census()
    batches = batches_of(
        transformer, source, sampling, n_texts=n_texts, census=census, tokens_per_batch=tokens,
        ridge_share=RIDGE_SHARE if choose_ridge else 0.0,
    )  # fmt: skip
    with closing(RowWriter(kept, transformer, tally.fit.rows)) if kept else nullcontext() as writer:
        run_tally(
            transformer, batches, tally,
            shard=mine, checkpoint=own, rows=writer, progress=progress,
            total=None if n_texts is None else -(-n_texts // mine[1]),
        )  # fmt: skip
    tally.about = {**about, "data": census.to_dict()}
    reduce_tally(tally)
    if tally.fit.n == 0 and not shard:
        raise NothingToFit(
            "no position to fit on: the text is empty, every piece is too short, or every document "
            "fell to the held-out side; give more documents"
        )
    if writer is not None:
        writer.finish()
    return tally


def _check_run(
    pairs: str,
    n_texts: int | None,
    tokens_per_batch: int,
    shard: tuple[int, int] | None,
    rank: int,
    processes: int,
) -> tuple[int, int]:
    """This process's share of the work; settings without meaning are refused."""
    if pairs not in ("final", "all"):
        raise BadSettings(f"pairs {pairs!r} are unknown; 'final' or 'all' was wanted")
    if n_texts is not None and n_texts < 1:
        raise BadSettings(f"n_texts {n_texts} leaves nothing to fit on; 1 or more was wanted")
    if tokens_per_batch < 1:
        raise BadSettings(f"tokens_per_batch {tokens_per_batch} is no size; 1 or more was wanted")
    if shard and processes > 1:
        raise BadSettings("torchrun already divides the work; leave --shard out")
    if shard and not 0 <= shard[0] < shard[1]:
        raise BadSettings(f"shard {shard[0]} of {shard[1]} does not exist; count from 0")
    return shard or (rank, processes)


def _own(checkpoint: Path | None) -> Path | None:
    """The checkpoint of this process."""
    rank, processes = world()
    if checkpoint is None or processes == 1:
        return checkpoint
    return checkpoint.with_suffix(f".{rank}of{processes}{checkpoint.suffix}")


def _resume(checkpoint: Path | None, about: dict[str, Any]) -> Tally | None:
    """The tally of an earlier run with the very same settings, if there is one."""
    if checkpoint is None or not checkpoint.exists():
        return None
    tally = Tally.load(checkpoint)
    # How the sums will be solved changes none of them.
    differing = [key for key in about if key != "solve" and tally.about.get(key) != about[key]]
    if differing:
        raise WrongModel(
            f"{checkpoint} is of a run with other settings ({', '.join(differing)}); "
            "delete it to start anew, or repeat those settings to go on"
        )
    tally.about = about
    return tally


def finish(checkpoint: Path | None) -> None:
    """Remove the checkpoint of a run whose result is saved; under torchrun, all call it."""
    own = _own(checkpoint)
    wait_for_all()  # the first process may still be saving
    if own is not None:
        own.unlink(missing_ok=True)


def merge(paths: Sequence[Path]) -> Tally:
    """Add up shards of one run; all of them must be there. Read one at a time."""
    if not paths:
        raise BadSettings("nothing to merge: name the files of all shards")
    shards = [_shard_of(path) for path in paths]
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
    whole = Tally.load(paths[0])
    for path in paths[1:]:
        whole = whole.merge(Tally.load(path))
    return whole


def _shard_of(path: Path) -> tuple[int, int]:
    match load_about(path).get("about"):
        case {"shard": [int(which), int(of)], "data": dict()}:
            return which, of
    raise BadArtifact(f"{path} is no shard but a whole or unfinished run")


def bank_from(
    tally: Tally,
    *,
    intercept: bool | None = None,
    ridge: float | str | None = None,
    rank: int | None = None,
    progress: Progress = silent,
) -> ShortcutBank:
    """Solve every map the tally's moments hold; see `maps.linear.solve` for the options.

    Options left out are those that `collect` was given, else a plain least-squares fit. Maps of
    parts are of full rank, and without a penalty where the ridge is "auto".
    """
    asked = {"intercept": intercept, "ridge": ridge, "rank": rank}
    options = {"intercept": False, "ridge": 0.0, "rank": None, **tally.about.get("solve", {})}
    options |= {key: value for key, value in asked.items() if value is not None}
    moments, unused = _rows_for(tally, options["ridge"])
    maps, fits = [], []
    for src in range(moments.n_layers):
        for found, fit in solve(moments, src, held_back=tally.held_back, **options):
            maps.append(found)
            fits.append(fit)
        progress("solving", src + 1, moments.n_layers, "layers")
    parts: dict[tuple[int, str], LinearMap] = {}
    if tally.parts is not None:
        penalty = 0.0 if options["ridge"] == "auto" else options["ridge"]
        plain = {"intercept": options["intercept"], "ridge": penalty}
        parts, part_fits = solve_parts(tally.parts, tally.couples, **plain, progress=progress)
        fits += part_fits
    data = {"text": tally.about["text"], **tally.about.get("data", {}), "rows_fitted": moments.n}
    return ShortcutBank(
        maps, model=tally.about["model"], n_layers=moments.n_layers, d_model=moments.d_model,
        parts=parts, fits=fits, settings={**options, **tally.about["sampling"]},
        data={**data, "rows_held_back": unused},
    )  # fmt: skip


def _rows_for(tally: Tally, ridge: float | str) -> tuple[Moments, int]:
    """The rows to fit on, and how many are kept out of the fit."""
    back = tally.held_back
    if ridge == "auto" and back is None:
        raise BadSettings(
            "an automatic ridge needs rows held back, and these statistics were made without: "
            "make them again with --ridge auto (choose_ridge), or give a ridge as a number"
        )
    if back is None:
        return tally.fit, 0
    if ridge == "auto" or back.shape != tally.fit.shape:  # they hold no pairs of inner layers
        return tally.fit, back.settle().n
    return tally.fit.merge(back), 0


def fit_bank(
    transformer: Transformer,
    text: Any = None,
    sampling: Sampling | None = None,
    *,
    intercept: bool = False,
    ridge: float | str = 0.0,
    rank: int | None = None,
    progress: Progress = silent,
    **options: Any,
) -> ShortcutBank:
    """`collect`, then `bank_from`; `options` go to `collect`.

    A checkpoint among them stays until the bank is saved and `recipes.finish` is called.
    """
    check_solving(ridge, rank, transformer.d_model)
    solving = {"intercept": intercept, "ridge": ridge, "rank": rank}
    tally = collect(
        transformer, text, sampling, choose_ridge=ridge == "auto", solving=solving,
        progress=progress, **options,
    )  # fmt: skip
    return bank_from(tally, progress=progress)


def default_bank(
    transformer: Transformer,
    *,
    tell: Callable[[str], None] = lambda _: None,
    progress: Progress = silent,
) -> ShortcutBank:
    """The bank kept in the cache for these very weights; fitted now if there is none."""
    text, plan = default_text(transformer), _default_plan(transformer)
    made_of = json.dumps([text, plan["sampling"].to_dict(), plan["n_texts"]])
    digest = hashlib.sha256(made_of.encode()).hexdigest()[:8]  # other defaults, another bank
    folder = cache_root() / "banks" / f"{transformer.identity.fingerprint}-{digest}"
    if folder.is_dir():
        try:
            bank = ShortcutBank.from_pretrained(folder)
            bank.check_model(transformer)
            return bank
        except (BadArtifact, WrongModel) as error:  # a cache can be made again
            tell(str(error))
            shutil.rmtree(folder, ignore_errors=True)
    name = transformer.identity.name
    tell(f"no bank of {name} yet: fitting one on {text} (once; kept in {folder})")
    checkpoint = folder.with_suffix(".fitting.safetensors")
    plan = {"text": text, "progress": progress, **plan}
    bank = _fit_in_cache(transformer, plan, folder, checkpoint, tell)
    try:
        bank.save_pretrained(folder)
        finish(checkpoint)
    except (CannotWrite, OSError) as error:
        tell(f"the bank is not kept: {error}")
    return bank


def _default_plan(transformer: Transformer) -> dict[str, Any]:
    """How the default bank samples its text.

    A masked model reads the positions that are hidden from it: many at once would leave it
    little to read from, so it gets one per text, and more and shorter texts. An image is one row,
    so all images that are not held out are taken.
    """
    if modality(transformer) == "images":
        return {"sampling": Sampling(), "n_texts": None}
    if transformer.kind == "masked-token":
        return {"sampling": Sampling(positions="one", held_out=0.0), "n_texts": 4000}
    sampling = Sampling(unit="paragraph", positions="every:2", held_out=0.0)
    return {"sampling": sampling, "n_texts": 500}


def _fit_in_cache(
    transformer: Transformer,
    plan: Mapping[str, Any],
    folder: Path,
    checkpoint: Path,
    tell: Callable[[str], None],
) -> ShortcutBank:
    """Fit with a checkpoint if the cache can hold one; nothing in a cache may be in the way."""
    own = _own(checkpoint)
    try:
        check_target(folder)
        return fit_bank(transformer, checkpoint=checkpoint, **plan)
    except (BadArtifact, WrongModel) as error:  # a damaged checkpoint, or of another text
        if own is None or not own.is_file():
            raise
        tell(str(error))
        own.unlink()
        return fit_bank(transformer, checkpoint=checkpoint, **plan)
    except CannotWrite as error:
        tell(f"fitting without a checkpoint: {error}")
        return fit_bank(transformer, **plan)
