"""Fit a bank: the statistics of a text in one pass, then every map in closed form.

In: a wrapped model and a text. Out: a `ShortcutBank`.

    model = ll.load("smollm2")
    bank = ll.fit(model, "wikipedia")
    print(ll.evaluate(model, bank, "wikipedia"))

`fit` is `collect` (in `layerleap.stats`) followed by `solve_bank`; shards of a large run are
collected separately, merged, then solved.
"""

import hashlib
import json
import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from layerleap.arguments import checked
from layerleap.errors import (
    BadArtifact,
    BadSettings,
    BadText,
    CannotWrite,
    FewRowsWarning,
    WeakBankWarning,
    WrongModel,
)
from layerleap.files import cache_root
from layerleap.maps.artifact import BANK
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.linear import solve, solve_parts
from layerleap.maps.map import IdentityMap, Map
from layerleap.maps.map_settings import check_solving
from layerleap.maps.ridge import RidgeChooser, without_rows
from layerleap.models.hooks.foreign import foreign_code, in_words
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, reporting, silent
from layerleap.stats.collect import METHOD as COLLECTED, collect, finish, own_checkpoint
from layerleap.stats.fit_statistics import FitStatistics, world
from layerleap.stats.moments import Moments, Pairs
from layerleap.stats.saved_states import StateFile
from layerleap.stream.batches import modality
from layerleap.stream.examples import Sampling
from layerleap.stream.source import default_text

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from layerleap.lens.evaluate import Evaluation

METHOD = 3  # raise it when a fit of the same text would give other maps: it invalidates caches
ROWS_PER_DIRECTION = 3  # with fewer rows, maps are poor whatever the ridge
# Below this many a ridge is chosen: there it takes something off the KL of readings, from here on
# next to nothing (`benchmarks/run.py ridge` measures both).
CHOSEN_BELOW = 10
FEW_ROWS_RIDGE = 0.01  # for few rows, if there is nothing to choose it on
SCORED_TEXTS = 100  # held-out texts behind the scores in a card, one row each


def solve_bank(
    stats: FitStatistics,
    transformer: Transformer | None = None,
    *,
    intercept: bool | None = None,
    ridge: float | str | None = None,
    rank: int | None = None,
    progress: Progress = silent,
) -> ShortcutBank:
    """A bank of every map that their moments determine; see `maps.linear.solve`.

    Options default to those given to `collect`, else to plain least squares. With a model, a ridge
    is chosen by the KL of readings, otherwise by squared errors. Maps of parts always have full
    rank, and no penalty if the ridge is chosen.
    """
    arguments = {"intercept": intercept, "ridge": ridge, "rank": rank}
    options = {"intercept": False, "ridge": 0.0, "rank": None, **stats.about.get("solve", {})}
    options |= {key: value for key, value in arguments.items() if value is not None}
    moments, n_unused = _moments_for(stats, options["ridge"])
    by_default = options["ridge"] is None
    if by_default:
        options["ridge"] = FEW_ROWS_RIDGE if _is_few(moments) else 0.0
    may_need_ridge = moments.flush().n < CHOSEN_BELOW * moments.d_model
    is_chosen = options["ridge"] == "auto" or (by_default and may_need_ridge)
    chooser, why = None, {}
    if is_chosen and transformer and stats.sample is not None:
        options["ridge"] = "auto"
        fresh = without_rows(moments, stats.sample) if by_default else moments
        chooser = RidgeChooser(transformer, fresh, stats.sample, intercept=options["intercept"])
        why = {"ridge": _why_chosen(moments, stats.sample, by_default=by_default)}
    maps, fits = [], []
    for src in range(moments.n_layers):
        solving = {**options, "ridge": chooser.choose(src)} if chooser else options
        for linear, report in solve(moments, src, ridge_rows=stats.ridge_rows, **solving):
            maps.append(linear)
            fits.append(report)
        progress("solving", src + 1, moments.n_layers, "layers")
    parts: dict[tuple[int, str], Map] = {}
    if stats.parts is not None:
        penalty = 0.0 if isinstance(options["ridge"], str) else options["ridge"]
        plain = {"intercept": options["intercept"], "ridge": penalty}
        parts, part_fits = solve_parts(stats.parts, stats.block_parts, **plain, progress=progress)
        fits += part_fits
    data = {"text": stats.about["text"], **stats.about.get("data", {}), "rows_fitted": moments.n}
    if hooks := stats.about.get("hooks"):
        data["hooks"] = hooks  # of others, that the model had
    return ShortcutBank(
        maps,
        model=stats.about["model"],
        n_layers=moments.n_layers,
        d_model=moments.d_model,
        parts=parts,
        fits=fits,
        settings={**options, **stats.about["sampling"]},
        data={**data, **why, "ridge_rows": n_unused},
        documents=stats.documents,
    )


def _why_chosen(moments: Moments, sample: Tensor, *, by_default: bool) -> str:
    """A line for the card and the terminal."""
    how = f"chosen for each layer by the KL of readings on {len(sample)} rows"
    few = f"{moments.n:,} rows are {moments.n / moments.d_model:.1f} per direction"
    why = f", because {few}; from {CHOSEN_BELOW} on it hardly matters"
    return how + why if by_default else how


def _is_few(moments: Moments) -> bool:
    """Warn and return True if there are too few rows for plain least squares."""
    rows, least = moments.flush().n, ROWS_PER_DIRECTION * moments.d_model
    if rows < least:
        warnings.warn(
            f"rows are few: {rows} for maps of width {moments.d_model}, which need {least} or "
            f"more, better {CHOSEN_BELOW * moments.d_model}; so a ridge is used. Fit on more text "
            "for better maps, or pass ridge=0.0 for plain least squares",
            FewRowsWarning,
            stacklevel=4,
        )
    return rows < least


def _moments_for(stats: FitStatistics, ridge: float | str | None) -> tuple[Moments, int]:
    """The moments to fit on, and the number of rows not used in the fit."""
    ridge_rows = stats.ridge_rows
    if ridge == "auto" and ridge_rows is None:
        raise BadSettings(
            "ridge 'auto' needs rows held back, but these statistics have none: collect them again "
            "with --ridge auto (choose_ridge=True), or give a ridge as a number"
        )
    if ridge_rows is None:
        return stats.fit, 0
    # Rows to choose a ridge on have no moments to inner layers.
    if ridge == "auto" or ridge_rows.shape != stats.fit.shape:
        return stats.fit, ridge_rows.flush().n
    return stats.fit.merge(ridge_rows), 0


@checked
def fit(
    transformer: Transformer,
    text: Any = None,
    sampling: Sampling | None = None,
    *,
    intercept: bool = False,
    ridge: float | str | None = None,
    rank: int | None = None,
    starts: str | None = None,
    n_texts: int | None = None,
    pairs: Pairs = "final",
    parts: bool | Sequence[str] = False,
    shard: tuple[int, int] | None = None,
    checkpoint: str | Path | None = None,
    save_states: StateFile | str | Path | None = None,
    tokens_per_batch: int | None = None,
    evaluate: bool = True,
    progress: Progress | bool = True,
) -> ShortcutBank:
    """A bank of linear shortcuts, fitted in one pass over a text.

        bank = ll.fit(model, "wikipedia", n_texts=500)
        bank.save_pretrained("bank")

    Args:
        text: anything `batches_of` reads, "generated", or None for the model's default text.
        sampling: how to cut texts, choose positions and hold out documents.
        ridge: penalty as a fraction of the mean eigenvalue of the Gram matrix, or "auto" to choose
            it by the KL of readings on a tenth of the documents, which are then not fitted on. By
            default it is chosen up to ten rows per direction, as far as it matters, on a few rows
            that are fitted on afterwards; beyond there is none.
        starts: a text of real sequences from which a masked model draws its texts.
        n_texts: how many texts to fit on; all when None.
        pairs: "final" for maps to the last layer, "all" for maps between all layers.
        parts: also fit maps that replace attention, FFN and norms, or some of these kinds.
        shard: (index, number of shards) if several runs share the work.
        checkpoint: a file to save to about every half minute, and to resume from. It stays until
            you call `layerleap.stats.finish`, after saving the bank.
        save_states: a file for a sample of the states fitted on, which `tune` trains on.
        tokens_per_batch: padded tokens per forward pass; the default suits a CPU.
        evaluate: score the bank on a few held-out documents, for its card.
        progress: a function to call, True for bars on a terminal or in a notebook, or False.
    """
    check_solving(ridge, rank, transformer.d_model)
    solving = {"intercept": intercept, "ridge": ridge, "rank": rank}
    with reporting(progress) as report:
        stats = collect(
            transformer,
            text,
            sampling,
            choose_ridge=ridge == "auto",
            keep_sample=ridge in (None, "auto"),
            solving=solving,
            progress=report,
            starts=starts,
            n_texts=n_texts,
            pairs=pairs,
            parts=parts,
            shard=shard,
            checkpoint=checkpoint,
            save_states=save_states,
            tokens_per_batch=tokens_per_batch,
        )
        bank = solve_bank(stats, transformer, progress=report)
        if evaluate and world()[0] == 0:
            bank = with_scores(transformer, bank, text, progress=report)
    return bank


def sampling_of(bank: ShortcutBank) -> Sampling:
    """The sampling the bank was fitted with; the defaults if it does not say."""
    known = {f.name: bank.settings[f.name] for f in fields(Sampling) if f.name in bank.settings}
    return Sampling(**known)


def with_scores(
    transformer: Transformer, bank: ShortcutBank, text: Any, *, progress: Progress = silent
) -> ShortcutBank:
    """The bank with its scores on a few held-out documents of its text, for its card.

    A text that can be read only once, or was generated, gives none; nor does one with fewer than
    two documents left.
    """
    sampling = replace(sampling_of(bank), positions="one")
    text = default_text(transformer) if text is None else text
    if isinstance(text, Iterator) or text == "generated" or not sampling.held_out:
        return bank
    try:
        scores = bank.evaluate(
            transformer, text, sampling, side="held-out", n_texts=SCORED_TEXTS, progress=progress
        )
    except BadText:
        return bank
    size = f"{scores.n_rows} rows from {scores.n_documents} held-out documents"
    data = {**bank.data, "evaluated_on": f"{size} of {scores.text}"}
    if worse := worse_layers(scores):
        layers = ", ".join(map(str, worse))
        data["worse_than_the_logit_lens"] = f"layers {layers}"
        warnings.warn(
            f"at layers {layers} this bank reads worse than the logit lens, on {size}; fit on more "
            "text (n_texts, or positions='all')",
            WeakBankWarning,
            stacklevel=3,
        )
    return bank.changed(quality=scores.by_layer(), data=data)


def worse_layers(scores: "Evaluation") -> list[int]:
    """Layers where the first bank reads worse than the logit lens: by KL, or clearly by its tops.

    Differences of shares are small near the last layer; so a lower precision counts only if it is
    below the interval of the logit lens's.
    """
    name, layers = scores.maps[1], []
    for layer in range(scores.n_layers):
        at = {(row["map"], row["metric"]): row for row in scores.at(layer)}
        kl, logit_kl = (at[lens, "kl"]["value"] for lens in (name, IdentityMap.kind))
        precision, logit = (at[lens, "precision@1"] for lens in (name, IdentityMap.kind))
        if kl > logit_kl or precision["value"] < logit["low"]:
            layers.append(layer)
    return layers


def find_bank(
    transformer: Transformer,
    bank: ShortcutBank | str | Path | None,
    *,
    other_model: bool = False,
    progress: Progress | bool = True,
) -> ShortcutBank | None:
    """The bank itself, the one in a folder or on the hub, or with "default" the cached one.

    With `other_model`, one that was fitted on another model is lent to this one.
    """
    if bank == "default":
        return default_bank(transformer, progress=progress)
    if bank is None:
        return None
    opened = bank if isinstance(bank, ShortcutBank) else ShortcutBank.from_pretrained(bank)
    opened = opened.lent_to(transformer) if other_model else opened
    opened.check_model(transformer)
    return opened


@checked
def default_bank(
    transformer: Transformer,
    *,
    progress: Progress | bool = True,
) -> ShortcutBank:
    """The cached bank for exactly these weights; fitted now if there is none.

    It is that of the model itself: edits and hooks of others do not act while it is fitted. If a
    forward is replaced, which cannot be suspended, the bank is not cached.
    """
    transformer.refresh()
    text, plan = default_text(transformer), _default_plan(transformer)
    key = json.dumps([METHOD, COLLECTED, text, plan["sampling"].to_dict(), plan["n_texts"]])
    digest = hashlib.sha256(key.encode()).hexdigest()[:8]  # other defaults give another bank
    folder = cache_root() / "banks" / f"{transformer.identity.fingerprint}-{digest}"
    if folder.is_dir():
        try:
            bank = ShortcutBank.from_pretrained(folder)
            bank.check_model(transformer)
            return bank
        except (BadArtifact, WrongModel) as error:  # a cache can be recreated
            logger.warning(str(error))
            shutil.rmtree(folder, ignore_errors=True)
    name = transformer.identity.name
    logger.info(f"no bank for {name} yet: fitting one on {text} (once; cached in {folder})")
    checkpoint = folder.with_suffix(".fitting.safetensors")
    plan = {"text": text, "progress": progress, "evaluate": False, **plan}
    with transformer.itself():
        if code := foreign_code(transformer.model):
            logger.warning(f"the bank will not be cached, because the model has {in_words(code)}")
            return fit(transformer, **plan)
        bank = _fit_in_cache(transformer, plan, folder, checkpoint)
    try:
        bank.save_pretrained(folder)
        finish(checkpoint)
    except (CannotWrite, OSError) as error:
        logger.warning(f"the bank was not cached: {error}")
    return bank


def _default_plan(transformer: Transformer) -> dict[str, Any]:
    """How the default bank samples its text.

    A masked model is read at its masked positions. Masking many at once would leave little context,
    so it gets one position per text, and more and shorter texts. So does a classifier of texts,
    for which a text is one row. An image is one row, so all images that are not held out are used.
    """
    if modality(transformer) == "images":
        return {"sampling": Sampling(), "n_texts": None}
    if transformer.kind in ("masked-token", "text-class"):
        return {"sampling": Sampling(positions="one"), "n_texts": 4000}
    # Every position: the forward pass costs far more than its rows.
    sampling = Sampling(unit="paragraph", positions="all")
    return {"sampling": sampling, "n_texts": 200}


def _fit_in_cache(
    transformer: Transformer,
    plan: Mapping[str, Any],
    folder: Path,
    checkpoint: Path,
) -> ShortcutBank:
    """Fit with a checkpoint if possible; a broken or read-only cache must not prevent the fit."""
    path = own_checkpoint(checkpoint)
    try:
        BANK.check_target(folder)
        return fit(transformer, checkpoint=checkpoint, **plan)
    except (BadArtifact, WrongModel) as error:  # a checkpoint that is damaged or of another text
        if path is None or not path.is_file():
            raise
        logger.warning(str(error))
        path.unlink()
        return fit(transformer, checkpoint=checkpoint, **plan)
    except CannotWrite as error:
        logger.warning(f"fitting without a checkpoint: {error}")
        return fit(transformer, **plan)
