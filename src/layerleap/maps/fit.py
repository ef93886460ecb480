"""Fit a bank: statistics of a text in one pass, then every map in closed form.

model = load("smollm2")                      models
tally = collect(model, "wikipedia", ...)     stream, stats
bank  = solve_bank(tally, ...)               maps
bank.lens(model).read("The capital of")      read
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from layerleap.errors import BadArtifact, BadSettings, CannotWrite, WrongModel
from layerleap.files import cache_root
from layerleap.maps.bank import ShortcutBank, check_target
from layerleap.maps.linear import LinearMap, check_solving, solve
from layerleap.maps.parts import solve_parts
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.stats.collect import collect, finish, own_checkpoint
from layerleap.stats.moments import Moments
from layerleap.stats.tally import Tally
from layerleap.stream.batches import reads
from layerleap.stream.examples import Sampling
from layerleap.stream.source import default_text


def solve_bank(
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
        parts, part_fits = solve_parts(tally.parts, tally.block_parts, **plain, progress=progress)
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
        return tally.fit, back.flush().n
    return tally.fit.merge(back), 0


def fit(
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
    """`collect`, then `solve_bank`; `options` go to `collect`.

    A checkpoint among them stays until the bank is saved and `stats.collect.finish` is called.
    """
    check_solving(ridge, rank, transformer.d_model)
    solving = {"intercept": intercept, "ridge": ridge, "rank": rank}
    tally = collect(
        transformer, text, sampling, choose_ridge=ridge == "auto", solving=solving,
        progress=progress, **options,
    )  # fmt: skip
    return solve_bank(tally, progress=progress)


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
    if reads(transformer) == "images":
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
    own = own_checkpoint(checkpoint)
    try:
        check_target(folder)
        return fit(transformer, checkpoint=checkpoint, **plan)
    except (BadArtifact, WrongModel) as error:  # a damaged checkpoint, or of another text
        if own is None or not own.is_file():
            raise
        tell(str(error))
        own.unlink()
        return fit(transformer, checkpoint=checkpoint, **plan)
    except CannotWrite as error:
        tell(f"fitting without a checkpoint: {error}")
        return fit(transformer, **plan)
