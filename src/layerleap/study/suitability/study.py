"""Does early exit pay off for this model, on this text, on this machine?

One pass over the fitting side of the text gives the maps, one over its held-out side all the rest:
rules are replayed, and their time is added up from measured blocks, heads and maps.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import layerleap
from layerleap.act.exits.cost import measure_cost
from layerleap.act.exits.evidence import Evidence
from layerleap.act.exits.timing import measure_timing
from layerleap.arguments import check_names, checked
from layerleap.errors import BadSettings
from layerleap.extras import learn_library
from layerleap.lens.intervals import SHARE, Documents, Estimate
from layerleap.lens.scores import Scores
from layerleap.maps.bank import ShortcutBank
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.stream.examples import longest_input, require_text
from layerleap.stream.source import default_text
from layerleap.study.engine import describe, now, work_folder
from layerleap.study.fits import FitContext, FitSettings
from layerleap.study.suitability import candidates
from layerleap.study.suitability.result import Suitability
from layerleap.study.suitability.settings import SuitabilitySettings

LENSES = {"id": "-", "mat": "mat"}  # by map, the name of the lens in the scores


@checked
def suitability(
    transformer: Transformer,
    settings: SuitabilitySettings | None = None,
    *,
    bank: ShortcutBank | str | Path | None = None,
    work: str | Path | None = None,
    progress: Progress = silent,
    **changes: Any,
) -> Suitability:
    """Measure whether early exit saves time, and why.

        result = ll.suitability(model, text="wikipedia", tolerance=0.05, bank="bank")
        print(result.answer, result.reasons)
        result.save_plan("plan.json")  # for ll.generate(model, prompt, plan="plan.json")

    Args:
        transformer: a model that reads plain text, or an image classifier.
        settings: the settings; None takes the defaults.
        bank: maps to the last layer, or their folder or hub name; None fits them on the text.
        work: a folder for checkpoints, from which an interrupted fit resumes. They are removed
            once there is an answer.
        progress: called after every batch.
        changes: single settings by name, such as `tolerance=0.1`.
    """
    name = str(bank) if isinstance(bank, str | Path) else None
    given = ShortcutBank.from_pretrained(bank) if isinstance(bank, str | Path) else bank
    settings = _resolved(transformer, settings or SuitabilitySettings(), changes, given)
    folder = _folder(work, transformer, settings)
    with work_folder(folder) as work_place:
        run = FitContext(transformer, _run_settings(settings), work_place, progress)
        result = _measured(run, settings, given)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    return replace(result, bank_name=name)


def _measured(
    run: FitContext[FitSettings], settings: SuitabilitySettings, given: ShortcutBank | None
) -> Suitability:
    model, s, limits = run.model, settings, (settings.tolerance, settings.delta)
    plans = candidates.all_candidates(model.n_layers)
    assert s.text is not None
    if s.text != "-":  # standard input can be read only once
        held_out = run.census(text=s.text)
        candidates.require_enough(held_out.rows, held_out.documents, *limits)
    bank = run.fit(s.text).bank if given is None else given
    scores = run.scores(s.text, {"mat": bank})
    evidence = {name: Evidence.from_scores(scores, lens) for name, lens in LENSES.items()}
    rows = candidates.divide(evidence, *limits, seed=s.sampling.seed)
    run.progress("timing", 0, s.repeats, "passes")
    timing = measure_timing(model, tokens=s.context, bank=bank, repeats=s.repeats)
    costs = {
        name: measure_cost(model, tokens=s.context, bank=maps)
        for name, maps in (("id", None), ("mat", bank))
    }
    if timing.mode == "whole":
        costs = {name: cost.per_text() for name, cost in costs.items()}
    prices = candidates.Prices(timing, costs)
    runs = candidates.dry_run(plans, rows, prices, s.tolerance, run.progress)
    best = candidates.fastest(runs)
    return Suitability(
        model=describe(model),
        settings=s.to_dict(),
        data=run.data,
        made_by={"version": layerleap.__version__, "created": now()},
        notes=[*run.notes, *_bank_notes(given, s)],
        splits=rows.counts(),
        agreement=_agreement(scores),
        ceilings=candidates.ceilings(evidence, timing),
        timing=timing,
        costs=costs,
        plans=runs,
        bank=bank,
        rules=[
            candidates.outcome(plan, rows, prices, *limits)
            for plan in candidates.checked_everywhere(plans)
        ],
        chosen=None if best is None else candidates.outcome(best, rows, prices, *limits),
    )


def _resolved(
    transformer: Transformer,
    settings: SuitabilitySettings,
    changes: Mapping[str, Any],
    bank: ShortcutBank | None,
) -> SuitabilitySettings:
    """The settings with the text filled in; refuses what cannot work before any pass is run."""
    check_names("suitability", changes, SuitabilitySettings.__dataclass_fields__)
    settings = replace(settings, **changes)
    if transformer.kind != "image-class":
        require_text(transformer)
    for name in ("scipy.stats", "sklearn.linear_model"):
        learn_library(name)
    if bank is not None:
        bank.check_model(transformer)
    if bank is None and settings.text == "-":
        raise BadSettings(
            "standard input can be read only once, but the text is read twice, to fit and to test; "
            "save it to a file and pass that, or pass a bank"
        )
    if settings.context > (limit := longest_input(transformer)):
        raise BadSettings(
            f"context {settings.context} is too long; this model takes at most {limit} tokens"
        )
    text = settings.text
    if text is None:
        text = default_text(transformer) if settings.starts is None else "generated"
    return replace(settings, text=text)


def _folder(
    work: str | Path | None, transformer: Transformer, s: SuitabilitySettings
) -> Path | None:
    """A folder for the checkpoints of this fit alone."""
    if work is None:
        return None
    read = s.n_read if s.text == "generated" else None  # one file is generated for both sides
    fit = [transformer.identity.fingerprint, s.text, s.n_fit, s.starts, s.sampling.to_dict(), read]
    return Path(work) / blake2b(json.dumps(fit).encode(), digest_size=8).hexdigest()


def _run_settings(settings: SuitabilitySettings) -> FitSettings:
    """The settings for the passes over texts."""
    text = None if settings.text == "-" else settings.text  # it is read only once here
    return FitSettings(
        text=text,
        n_fit=settings.n_fit,
        n_read=settings.n_read,
        starts=settings.starts,
        **settings.sampling.to_dict(),
    )


def _agreement(scores: Scores) -> dict[str, list[Estimate]]:
    """By map and layer, the fraction of rows read as the model answers."""
    documents = Documents(scores.documents)
    return {
        name: documents.means((scores.rank[lens] == 0).double(), SHARE)
        for name, lens in LENSES.items()
    }


def _bank_notes(bank: ShortcutBank | None, settings: SuitabilitySettings) -> list[str]:
    """A warning if the bank may have been fitted on documents that are read here."""
    if bank is None or bank.data.get("text") != settings.text:
        return []
    sampling = settings.sampling
    if (bank.settings.get("held_out"), bank.settings.get("seed")) == (
        sampling.held_out,
        sampling.seed,
    ):
        return []
    return [
        f"The bank was fitted on {settings.text} with different documents held out: it may have "
        "been fitted on some that are read here, which makes it look better than it is."
    ]
