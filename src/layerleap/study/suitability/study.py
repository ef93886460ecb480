"""Does early exit pay off for this model, on this text, on this machine?

In: a model, a text, and a tolerance: the fraction of answers that may differ from the full model's.
Out: `Suitability`: an answer with its reasons; agreement by layer, the upper bound for any rule,
what calibrated rules save in layers, FLOPs and seconds, and where it is best to check.

One pass over the fitting side of the text gives the maps, one over its held-out side all the rest:
rules are replayed, and their time is added up from measured blocks, heads and maps.
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
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.read.metrics import Estimate
from layerleap.read.scores import Scores
from layerleap.stream.examples import Sampling, longest_input, require_text
from layerleap.stream.source import default_text
from layerleap.study.engine import work_folder
from layerleap.study.fits import FitContext, FitSettings
from layerleap.study.suitability.candidates import (
    Prices,
    all_candidates,
    ceilings,
    checked_everywhere,
    divide,
    dry_run,
    fastest,
    outcome,
    require_enough,
)
from layerleap.study.suitability.result import Suitability

LENSES = {"id": "-", "mat": "mat"}  # by map, the name of the lens in the scores


@dataclass(frozen=True)
class SuitabilitySettings:
    """Settings of a suitability study."""

    text: str | None = None  # None is the default text of the model: wikipedia, or generated
    tolerance: float = 0.05  # largest fraction of answers that may differ from the full model's
    delta: float = 0.05  # how often, over calibration sets, the guarantee may fail
    n_fit: int = 2000  # texts to fit maps on, unless a bank is passed
    n_read: int = 1000  # held-out texts to read
    context: int = 32  # context length of a timed answer, in tokens
    repeats: int = 20  # timed passes
    starts: str | None = None  # real sequences from which a masked model draws its texts
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        for name in ("tolerance", "delta"):
            if not 0 < getattr(self, name) < 1:
                raise BadSettings(
                    f"{name} {getattr(self, name)} is out of range; expected between 0 and 1"
                )
        for name in ("n_fit", "n_read", "repeats"):
            if getattr(self, name) < 1:
                raise BadSettings(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.context < 2:
            raise BadSettings(f"context is {self.context} tokens; expected at least 2")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, with the fields of `sampling` among them."""
        flat = asdict(self)
        return {**{k: v for k, v in flat.items() if k != "sampling"}, **flat["sampling"]}


def suitability(
    transformer: Transformer,
    settings: SuitabilitySettings | None = None,
    *,
    bank: ShortcutBank | str | Path | None = None,
    work: Path | None = None,
    progress: Progress = silent,
    **changes: Any,
) -> Suitability:
    """Measure whether early exit saves time, and why.

        result = ll.suitability(model, text="wikipedia", tolerance=0.05, bank="bank")
        print(result.answer, result.reasons)
        result.save_plan("plan.json")  # for ll.generate(model, prompt, plan="plan.json")

    Args:
        transformer: a model that reads plain text.
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
    """Run all measurements."""
    transformer, progress = run.model, run.progress
    candidates = all_candidates(transformer.n_layers)
    assert settings.text is not None
    if settings.text != "-":  # standard input can be read only once
        held_out = run.census(text=settings.text)
        require_enough(held_out.rows, held_out.documents, settings.tolerance, settings.delta)
    bank = run.fit(settings.text).bank if given is None else given
    scores = run.scores(settings.text, {"mat": bank})
    evidence = {name: Evidence.from_scores(scores, lens) for name, lens in LENSES.items()}
    rows = divide(evidence, settings.tolerance, settings.delta, seed=settings.sampling.seed)
    progress("timing", 0, settings.repeats, "passes")
    timing = measure_timing(
        transformer, tokens=settings.context, bank=bank, repeats=settings.repeats
    )
    prices = Prices(timing, _flops(transformer, bank, settings.context, timing.mode == "whole"))
    limits = settings.tolerance, settings.delta
    runs = dry_run(candidates, rows, prices, settings.tolerance, progress)
    best = fastest(runs)
    return Suitability(
        model=_model(transformer), settings=settings.to_dict(), data=run.data, made_by=_made_by(),
        notes=[*run.notes, *_bank_notes(given, settings)],
        splits=rows.counts(), agreement=_agreement(scores), ceilings=ceilings(evidence, timing),
        timing=timing, costs=dict(prices.flops),
        rules=[outcome(each, rows, prices, *limits) for each in checked_everywhere(candidates)],
        plans=runs, chosen=None if best is None else outcome(best, rows, prices, *limits),
        bank=bank,
    )  # fmt: skip


def _resolved(
    transformer: Transformer,
    settings: SuitabilitySettings,
    changes: Mapping[str, Any],
    bank: ShortcutBank | None,
) -> SuitabilitySettings:
    """The settings with the text filled in; refuses what cannot work before any pass is run."""
    try:
        settings = replace(settings, **changes)
    except TypeError as error:
        names = ", ".join(SuitabilitySettings.__dataclass_fields__)
        raise BadSettings(f"unknown setting: {error}; expected some of: {names}") from error
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
    work: Path | None, transformer: Transformer, settings: SuitabilitySettings
) -> Path | None:
    """A folder for the checkpoints of this fit alone."""
    if work is None:
        return None
    s = settings
    read = s.n_read if s.text == "generated" else None  # one file is generated for both sides
    fit = [transformer.identity.fingerprint, s.text, s.n_fit, s.starts, s.sampling.to_dict(), read]
    return work / blake2b(json.dumps(fit).encode(), digest_size=8).hexdigest()


def _run_settings(settings: SuitabilitySettings) -> FitSettings:
    """The settings for the passes over texts."""
    text = None if settings.text == "-" else settings.text  # it is read only once here
    return FitSettings(
        text=text, n_fit=settings.n_fit, n_read=settings.n_read, starts=settings.starts,
        **settings.sampling.to_dict(),
    )  # fmt: skip


def _flops(
    transformer: Transformer, maps: ShortcutBank, tokens: int, whole: bool
) -> dict[str, Cost]:
    """FLOPs by map. Without a cache, all tokens of a text go through the blocks for one answer."""
    costs = {}
    for name, bank in (("id", None), ("mat", maps)):
        cost = measure(transformer, tokens=tokens, bank=bank)
        times = cost.context if whole else 1
        costs[name] = replace(cost, blocks=tuple(times * block for block in cost.blocks))
    return costs


def _agreement(scores: Scores) -> dict[str, list[Estimate]]:
    """By map and layer, the fraction of rows read as the model answers."""
    estimates: dict[str, list[Estimate]] = {name: [] for name in LENSES}
    names = {lens: name for name, lens in LENSES.items()}
    for row in sorted(scores.table(), key=lambda row: int(row["layer"])):
        if row["metric"] == "precision@1":
            values = (row[key] for key in Estimate.__dataclass_fields__)
            estimates[names[row["map"]]].append(Estimate(*values))
    return estimates


def _model(transformer: Transformer) -> dict[str, Any]:
    return {
        **transformer.identity.to_dict(), "kind": transformer.kind,
        "n_layers": transformer.n_layers, "d_model": transformer.d_model,
        "d_vocab": transformer.d_vocab,
    }  # fmt: skip


def _made_by() -> dict[str, str]:
    created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"version": layerleap.__version__, "created": created}


def _bank_notes(bank: ShortcutBank | None, settings: SuitabilitySettings) -> list[str]:
    """A warning if the bank may have been fitted on documents that are read here."""
    if bank is None or bank.data.get("text") != settings.text:
        return []
    same = all(
        bank.settings.get(key) == getattr(settings.sampling, key) for key in ("held_out", "seed")
    )
    if same:
        return []
    return [
        f"The bank was fitted on {settings.text} with different documents held out: it may have "
        "been fitted on some that are read here, which makes it look better than it is."
    ]
