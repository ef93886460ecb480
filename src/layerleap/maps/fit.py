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
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from layerleap.errors import BadArtifact, BadSettings, CannotWrite, WrongModel
from layerleap.files import cache_root
from layerleap.maps.bank import BANK, ShortcutBank
from layerleap.maps.linear import LinearMap, check_solving, solve, solve_parts
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.stats.collect import collect, finish, own_checkpoint
from layerleap.stats.moments import Moments
from layerleap.stats.tally import Tally
from layerleap.stream.batches import modality
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
    """A bank of every map that the tally's moments determine; see `maps.linear.solve`.

    Options default to those given to `collect`, else to plain least squares. Maps of parts always
    have full rank, and no penalty if the ridge is "auto".
    """
    given = {"intercept": intercept, "ridge": ridge, "rank": rank}
    options = {"intercept": False, "ridge": 0.0, "rank": None, **tally.about.get("solve", {})}
    options |= {key: value for key, value in given.items() if value is not None}
    moments, n_unused = _moments_for(tally, options["ridge"])
    maps, fits = [], []
    for src in range(moments.n_layers):
        for linear, report in solve(moments, src, held_back=tally.held_back, **options):
            maps.append(linear)
            fits.append(report)
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
        data={**data, "rows_held_back": n_unused}, documents=tally.documents,
    )  # fmt: skip


def _moments_for(tally: Tally, ridge: float | str) -> tuple[Moments, int]:
    """The moments to fit on, and the number of rows not used in the fit."""
    back = tally.held_back
    if ridge == "auto" and back is None:
        raise BadSettings(
            "ridge 'auto' needs rows held back, but these statistics have none: collect them again "
            "with --ridge auto (choose_ridge=True), or give a ridge as a number"
        )
    if back is None:
        return tally.fit, 0
    if ridge == "auto" or back.shape != tally.fit.shape:  # held-back moments lack inner targets
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
    """A bank of linear shortcuts, fitted in one pass over a text.

        bank = ll.fit(model, "wikipedia", n_texts=500)
        bank.save_pretrained("bank")

    Args:
        text: anything `batches_of` reads, "generated", or None for the model's default text.
        sampling: how to cut texts, choose positions and hold out documents.
        ridge: penalty as a fraction of the mean eigenvalue of the Gram matrix, or "auto" to choose
            it on a tenth of the documents.
        options: passed on to `collect`: n_texts, pairs, parts, checkpoint, ... A checkpoint stays
            until you call `layerleap.stats.finish`, after saving the bank.
    """
    check_solving(ridge, rank, transformer.d_model)
    solving = {"intercept": intercept, "ridge": ridge, "rank": rank}
    tally = collect(
        transformer, text, sampling, choose_ridge=ridge == "auto", solving=solving,
        progress=progress, **options,
    )  # fmt: skip
    return solve_bank(tally, progress=progress)


def find_bank(
    transformer: Transformer,
    bank: ShortcutBank | str | Path | None,
    *,
    tell: Callable[[str], None] = lambda _: None,
    progress: Progress = silent,
) -> ShortcutBank | None:
    """The bank itself, the one in a folder or on the hub, or with "default" the cached one."""
    if bank == "default":
        return default_bank(transformer, tell=tell, progress=progress)
    found = ShortcutBank.from_pretrained(bank) if isinstance(bank, str | Path) else bank
    if found is not None:
        found.check_model(transformer)
    return found


def default_bank(
    transformer: Transformer,
    *,
    tell: Callable[[str], None] = lambda _: None,
    progress: Progress = silent,
) -> ShortcutBank:
    """The cached bank for exactly these weights; fitted now if there is none."""
    text, plan = default_text(transformer), _default_plan(transformer)
    key = json.dumps([text, plan["sampling"].to_dict(), plan["n_texts"]])
    digest = hashlib.sha256(key.encode()).hexdigest()[:8]  # other defaults give another bank
    folder = cache_root() / "banks" / f"{transformer.identity.fingerprint}-{digest}"
    if folder.is_dir():
        try:
            bank = ShortcutBank.from_pretrained(folder)
            bank.check_model(transformer)
            return bank
        except (BadArtifact, WrongModel) as error:  # a cache can be recreated
            tell(str(error))
            shutil.rmtree(folder, ignore_errors=True)
    name = transformer.identity.name
    tell(f"no bank for {name} yet: fitting one on {text} (once; cached in {folder})")
    checkpoint = folder.with_suffix(".fitting.safetensors")
    plan = {"text": text, "progress": progress, **plan}
    bank = _fit_in_cache(transformer, plan, folder, checkpoint, tell)
    try:
        bank.save_pretrained(folder)
        finish(checkpoint)
    except (CannotWrite, OSError) as error:
        tell(f"the bank was not cached: {error}")
    return bank


def _default_plan(transformer: Transformer) -> dict[str, Any]:
    """How the default bank samples its text.

    A masked model is read at its masked positions. Masking many at once would leave little context,
    so it gets one position per text, and more and shorter texts. An image is one row, so all
    images that are not held out are used.
    """
    if modality(transformer) == "images":
        return {"sampling": Sampling(), "n_texts": None}
    if transformer.kind == "masked-token":
        return {"sampling": Sampling(positions="one", held_out=0.0), "n_texts": 4000}
    sampling = Sampling(unit="paragraph", positions="every:2", held_out=0.0)
    return {"sampling": sampling, "n_texts": 500}


def _fit_in_cache(
    transformer: Transformer, plan: Mapping[str, Any], folder: Path, checkpoint: Path,
    tell: Callable[[str], None],
) -> ShortcutBank:  # fmt: skip
    """Fit with a checkpoint if possible; a broken or read-only cache must not prevent the fit."""
    own = own_checkpoint(checkpoint)
    try:
        BANK.check_target(folder)
        return fit(transformer, checkpoint=checkpoint, **plan)
    except (BadArtifact, WrongModel) as error:  # a checkpoint that is damaged or of another text
        if own is None or not own.is_file():
            raise
        tell(str(error))
        own.unlink()
        return fit(transformer, checkpoint=checkpoint, **plan)
    except CannotWrite as error:
        tell(f"fitting without a checkpoint: {error}")
        return fit(transformer, **plan)
