"""Is early exit worth it for this model, on this text, on this machine?

In: a model, a text, a tolerance: the share of answers that may differ from the full model's.
Out: one plain dictionary: agreement by layer, what a rule could save at most, what calibrated rules
do save in layers, FLOPs and seconds, where it is best to check, and a verdict with its reasons.

One pass over the fitting side of the text gives the maps, one over its held-out side all the rest:
rules are replayed, and their time is put together from measured blocks, heads and maps.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

import layerleap
from layerleap.act.exits.cost import Cost, measure
from layerleap.act.exits.evidence import Evidence
from layerleap.act.exits.timing import measure_timing
from layerleap.errors import BadSettings
from layerleap.extras import learn_library
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.fit import default_text
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.read.scores import Scores
from layerleap.stream.examples import Sampling, longest_input, require_text
from layerleap.study.engine import work_folder
from layerleap.study.fits import FitContext, FitSettings
from layerleap.study.suitability.plans import (
    Costs,
    all_plans,
    ceiling,
    compare,
    divide,
    everywhere,
    outcome,
    quickest,
    require_enough,
)
from layerleap.study.suitability.verdict import findings, verdict

FORMAT = 1
LENSES = {"id": "-", "mat": "mat"}  # what scores call them


@dataclass(frozen=True)
class SuitabilitySettings:
    """What is asked."""

    text: str | None = None  # None is what suits the model: wikipedia, or drawn
    tolerance: float = 0.05  # largest share of answers that may differ from the full model's
    delta: float = 0.05  # how often, over calibration sets, the promise may fail
    n_fit: int = 2000  # texts to fit maps on, unless there is a bank
    n_read: int = 1000  # held-out texts to read
    context: int = 32  # tokens that a timed answer rests on
    repeats: int = 20  # timed passes
    starts: str | None = None  # real sequences from which a masked model draws its texts
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        for name in ("tolerance", "delta"):
            if not 0 < getattr(self, name) < 1:
                raise BadSettings(f"{name} {getattr(self, name)} is not between 0 and 1")
        for name in ("n_fit", "n_read", "repeats"):
            if getattr(self, name) < 1:
                raise BadSettings(f"{name} {getattr(self, name)} is too few; 1 or more was wanted")
        if self.context < 2:
            raise BadSettings(f"context {self.context} is no context; 2 tokens or more were wanted")

    def to_dict(self) -> dict[str, Any]:
        """Flat and JSON-able."""
        flat = asdict(self)
        return {**{k: v for k, v in flat.items() if k != "sampling"}, **flat["sampling"]}


def suitability(
    transformer: Transformer,
    settings: SuitabilitySettings | None = None,
    *,
    bank: ShortcutBank | None = None,
    work: Path | None = None,
    progress: Progress = silent,
    **changes: Any,
) -> dict[str, Any]:
    """Whether early exit would save time, and why.

    Args:
        transformer: a model that reads plain text.
        settings: what is asked; the defaults when None.
        bank: maps to the last layer to use instead of fitting them on the text.
        work: a folder for checkpoints; an interrupted fit goes on from there. What it kept is
            removed once there is an answer.
        progress: told about every batch.
        changes: fields of the settings, by name: `suitability(model, tolerance=0.1)`.
    """
    settings = _settled(transformer, settings or SuitabilitySettings(), changes, bank)
    folder = _folder(work, transformer, settings)
    with work_folder(folder) as work:
        run = FitContext(transformer, _of_run(settings), work, progress)
        result = _answered(run, settings, bank)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    return {**result, "findings": findings(result), "verdict": verdict(result)}


def _answered(
    run: FitContext[FitSettings], settings: SuitabilitySettings, bank: ShortcutBank | None
) -> dict[str, Any]:
    """All the numbers."""
    transformer, progress = run.model, run.progress
    plans = all_plans(transformer.n_layers)
    assert settings.text is not None
    if settings.text != "-":  # which can be read only once
        seen = run.census(text=settings.text)
        require_enough(seen.rows, seen.documents, settings.tolerance, settings.delta)
    maps = run.fit(settings.text).bank if bank is None else bank
    scores = run.scores(settings.text, {"mat": maps})
    evidence = {name: Evidence.of(scores, lens) for name, lens in LENSES.items()}
    rows = divide(evidence, settings.tolerance, settings.delta, seed=settings.sampling.seed)
    progress("timing", 0, settings.repeats, "passes")
    clock = measure_timing(
        transformer, tokens=settings.context, bank=maps, repeats=settings.repeats
    )
    prices = Costs(clock, _flops(transformer, maps, settings.context, clock.way == "whole"))
    asked = settings.tolerance, settings.delta
    compared = compare(plans, rows, prices, settings.tolerance, progress)
    best = quickest(plans, compared)
    return {
        **_about(transformer, settings, run, maps if bank is not None else None),
        "rows": rows.counts(), "agreement": _agreement(scores),
        "ceiling": ceiling(evidence, clock), "clock": clock.to_dict(),
        "flops": {name: cost.to_dict() for name, cost in prices.flops.items()},
        "rules": [outcome(plan, rows, prices, *asked) for plan in everywhere(plans)],
        "plans": compared,
        "chosen": None if best is None else outcome(best, rows, prices, *asked),
    }  # fmt: skip


def _settled(
    transformer: Transformer,
    settings: SuitabilitySettings,
    changes: Mapping[str, Any],
    bank: ShortcutBank | None,
) -> SuitabilitySettings:
    """The settings with the text decided; what cannot work is refused before a pass is spent."""
    try:
        settings = replace(settings, **changes)
    except TypeError as error:
        known = ", ".join(SuitabilitySettings.__dataclass_fields__)
        raise BadSettings(f"no such setting: {error}; there are: {known}") from error
    require_text(transformer)
    for name in ("scipy.stats", "sklearn.linear_model"):
        learn_library(name)
    if bank is not None:
        bank.check_model(transformer)
    if bank is None and settings.text == "-":
        raise BadSettings(
            "standard input can be read only once, and the text is read twice, to fit and to test; "
            "save it to a file first and name that, or give a bank"
        )
    if settings.context > (limit := longest_input(transformer)):
        raise BadSettings(f"context {settings.context} is above {limit}, which this model can take")
    text = settings.text
    if text is None:
        text = default_text(transformer) if settings.starts is None else "drawn"
    return replace(settings, text=text)


def _folder(
    work: Path | None, transformer: Transformer, settings: SuitabilitySettings
) -> Path | None:
    """A folder of its own for each fit, so that none finds the checkpoint of another."""
    if work is None:
        return None
    s = settings
    drawn = s.n_read if s.text == "drawn" else None  # one file is drawn for both sides
    fit = [transformer.identity.fingerprint, s.text, s.n_fit, s.starts, s.sampling.to_dict(), drawn]
    return work / blake2b(json.dumps(fit).encode(), digest_size=8).hexdigest()


def _of_run(settings: SuitabilitySettings) -> FitSettings:
    """The same, as the passes over texts want it."""
    text = None if settings.text == "-" else settings.text  # read once only, which is allowed here
    return FitSettings(
        text=text, n_fit=settings.n_fit, n_read=settings.n_read, starts=settings.starts,
        **settings.sampling.to_dict(),
    )  # fmt: skip


def _flops(
    transformer: Transformer, maps: ShortcutBank, tokens: int, whole: bool
) -> dict[str, Cost]:
    """By map; of a text that is run whole, all its tokens go through the blocks for one answer."""
    found = {}
    for name, bank in (("id", None), ("mat", maps)):
        cost = measure(transformer, tokens=tokens, bank=bank)
        times = cost.context if whole else 1
        found[name] = replace(cost, blocks=tuple(times * block for block in cost.blocks))
    return found


def _agreement(scores: Scores) -> list[dict[str, Any]]:
    """Share of rows read as the model answers, by map and layer."""
    names = {lens: name for name, lens in LENSES.items()}
    rows = [row for row in scores.table() if row["metric"] == "precision@1"]
    return [{**row, "map": names[row["map"]]} for row in rows]


def _about(
    transformer: Transformer, settings: SuitabilitySettings, run: FitContext[FitSettings],
    given: ShortcutBank | None,
) -> dict[str, Any]:  # fmt: skip
    return {
        "format": FORMAT, "kind": "suitability", "version": layerleap.__version__,
        "made": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "model": {
            **transformer.identity.to_dict(), "kind": transformer.kind,
            "n_layers": transformer.n_layers, "d_model": transformer.d_model,
            "d_vocab": transformer.d_vocab,
        },
        "settings": settings.to_dict(), "data": run.data,
        "notes": [*run.notes, *_bank_notes(given, settings)],
    }  # fmt: skip


def _bank_notes(bank: ShortcutBank | None, settings: SuitabilitySettings) -> list[str]:
    """A bank that may have been fitted on what is read here looks better than it is."""
    if bank is None or bank.data.get("text") != settings.text:
        return []
    same = all(
        bank.settings.get(key) == getattr(settings.sampling, key) for key in ("held_out", "seed")
    )
    if same:
        return []
    return [
        f"The bank was fitted on {settings.text} with other documents held out: some that are read "
        "here may be among those it was fitted on, which flatters it."
    ]
