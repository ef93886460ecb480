"""The study of linear shortcuts: how well can each layer be read, and carried to later ones?

In: a model, a text to fit and read on, another text to transfer to, and settings.
Out: one plain dictionary: tables of R2, Precision@k, Surprisal and KL with intervals, fits,
laws that must hold, and findings in words. `show.report` draws it.

One pass over the fitting side of each text, one over its held-out side. If the texts differ in
size, the larger one is fitted a second time to as many of its rows, which the pass has kept, so
that transfer compares fits of equal size; and maps are trained on those rows.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import layerleap
from layerleap.act.exits.cost import measure
from layerleap.errors import BadSettings, ModelRefused
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.linear import check_solving
from layerleap.maps.tuned import summary
from layerleap.memory import peak_memory
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.read.scores import Scores
from layerleap.stream.examples import Sampling
from layerleap.stream.source import default_text
from layerleap.study.early_texts import early_texts
from layerleap.study.exits import (
    Lensed,
    calibrated_tables,
    exit_tables,
    lensed,
    same_rows,
)
from layerleap.study.shortcuts.claims import claims
from layerleap.study.shortcuts.findings import findings, half_layers, laws
from layerleap.study.shortcuts.inside import Inside, kinds_of
from layerleap.study.shortcuts.kept_rows import fit_sample, train
from layerleap.study.shortcuts.more_findings import more_findings
from layerleap.study.shortcuts.run import Fitted, Run

FORMAT = 1
DEFAULT_OTHER = "news"
SECTIONS = ("parts", "alternation", "exits", "tuned")
SHOWN_AT = 0.95  # the agreement of the rules that texts are written by
BEGINNING = 12  # tokens from which they go on
SAME_SIZE = 1.1  # fits whose row counts differ by less than this factor are compared as they are


@dataclass(frozen=True)
class ShortcutSettings:
    """What the study does; the defaults are the paper's sizes."""

    text: str | None = None  # None is what suits the model: wikipedia, or generated
    other: str | None = DEFAULT_OTHER  # fitted and read as well, for transfer; None leaves it out
    n_fit: int = 9000  # texts to fit on
    n_read: int = 3000  # held-out texts to read
    intercept: bool = False
    ridge: float | str = 0.0
    pairs: str = "all"  # "final" leaves out the heat maps between inner layers
    sections: tuple[str, ...] = SECTIONS  # what is studied besides the readings themselves
    part_texts: int = 300  # of the texts read, those in which parts of blocks are replaced
    schedule_texts: int = 300  # and those along which blocks and jumps take turns
    tuned_rows: int = 23_040  # rows that each trained map sees at most
    tolerance: float = 0.05  # largest disagreement that calibrated exits may have
    delta: float = 0.05  # how often that promise may be broken
    quick: bool = False  # a first look: far fewer texts
    starts: str | None = None  # real sequences from which a masked model draws its texts
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if self.pairs not in ("final", "all"):
            raise BadSettings(f"pairs {self.pairs!r} are unknown; 'final' or 'all' was wanted")
        if unknown := [name for name in self.sections if name not in SECTIONS]:
            raise BadSettings(
                f"section {unknown[0]!r} is unknown; of {', '.join(SECTIONS)} were wanted"
            )
        if "tuned" in (self.text, self.other):
            raise BadSettings("a text cannot be called 'tuned', as trained maps are; write ./tuned")
        if "-" in (self.text, self.other, self.starts):
            raise BadSettings(
                "standard input can be read only once, and a study reads its text twice, to fit "
                "and to test; save it to a file first and name that"
            )
        if self.starts is not None and "generated" not in (self.text or "generated", self.other):
            raise BadSettings("starts are for texts that the model draws; leave them out")
        if min(self.n_fit, self.n_read) < 1:
            raise BadSettings(f"{self.n_fit} texts to fit on and {self.n_read} to read; wanted 1+")
        if min(self.part_texts, self.schedule_texts) < 1:
            raise BadSettings(
                f"{self.part_texts} texts for parts and {self.schedule_texts} for schedules; "
                "wanted 1+, or leave the sections out"
            )
        for name in ("tolerance", "delta"):
            if not 0 < getattr(self, name) < 1:
                raise BadSettings(f"{name} {getattr(self, name)} is not between 0 and 1")

    def quickened(self) -> "ShortcutSettings":
        """A first look: far fewer texts to fit on and to read, all else as it was."""
        return replace(
            self, n_fit=min(self.n_fit, 1500), n_read=min(self.n_read, 300),
            part_texts=min(self.part_texts, 30), schedule_texts=min(self.schedule_texts, 30),
            tuned_rows=min(self.tuned_rows, 1024), quick=True,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Flat and JSON-able."""
        flat = {**asdict(self), "sections": list(self.sections)}  # JSON has no tuples
        return {**{k: v for k, v in flat.items() if k != "sampling"}, **flat["sampling"]}


def study_shortcuts(
    transformer: Transformer,
    settings: ShortcutSettings | None = None,
    *,
    work: Path | None = None,
    progress: Progress = silent,
) -> tuple[dict[str, Any], ShortcutBank]:
    """Run the study; returns its result and the bank fitted on the main text.

    Args:
        transformer: the model.
        settings: sizes, texts and the kind of fit.
        work: a folder for checkpoints; an interrupted study goes on from there.
        progress: told about every batch.
    """
    settings = _settled(transformer, settings or ShortcutSettings())
    check_solving(settings.ridge, None, transformer.d_model)
    started, is_fresh = time.monotonic(), work is None or not work.exists()
    with Run(transformer, settings, work, progress) as run:
        result, bank = _studied(run)
    seconds = round(time.monotonic() - started, 1)
    # Without the time that an interrupted run had spent before.
    result["summary"]["run"] = {"seconds": seconds, "whole": is_fresh, "peak_mib": peak_memory()}
    return result, bank


def _studied(run: Run) -> tuple[dict[str, Any], ShortcutBank]:
    transformer, settings = run.transformer, run.settings
    main, other = settings.text, settings.other
    assert main is not None
    kinds, reason = kinds_of(transformer) if "parts" in settings.sections else ((), None)
    keep = other is not None or "tuned" in settings.sections
    fitted = {main: run.fit(main, settings.pairs, parts=kinds, keep_rows=keep)}  # type: ignore[arg-type]
    if other is not None:
        fitted[other] = run.fit(other, "final", keep_rows=True)
    banks = {text: found.bank for text, found in fitted.items()}
    equal = _equal_fits(run, banks, fitted)
    tuned = _tuned(run, fitted[main], banks)
    tables, scores = {}, {}
    inside = _inside(transformer, fitted[main], settings)
    tables[main], scores[main] = run.read(main, banks, banks[main], inside)
    if other is not None:
        tables[other], scores[other] = run.read(other, banks)
    result: dict[str, Any] = {
        "format": FORMAT, "kind": "shortcuts", "version": layerleap.__version__,
        "made": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "model": {
            **transformer.identity.to_dict(), "kind": transformer.kind,
            "n_layers": transformer.n_layers, "d_model": transformer.d_model,
            "d_vocab": transformer.d_vocab,
        },
        "settings": settings.to_dict(), "data": run.data, "notes": run.notes,
        "r2": tables[main]["r2"],
        "scores": [row for found in tables.values() for row in found["scores"]],
        "fits": [fit.to_dict() for fit in banks[main].fits.values()],
        "parts": _parts(tables[main], banks[main], reason) if kinds or reason else None,
        "schedules": tables[main].get("schedules"), "tuned": tuned,
        "sizes": None,  # filled in by `sizes.with_sizes`
    }  # fmt: skip
    result |= _exits(run, banks, scores)
    result["summary"] = {
        "half": half_layers(result),
        "equal_fits": equal,  # by text: the fit that transfer is judged by
        "tail": [found["tail"] for found in tables.values()],
    }
    _note_poor_fits(run, banks[main])
    result["laws"] = laws(result)
    result["claims"] = claims(result)
    result["findings"] = [*findings(result), *more_findings(result)]
    return result, _with_quality(banks[main], result)


def _note_poor_fits(run: Run, bank: ShortcutBank) -> None:
    """Whatever is said of shortcuts rests on maps that the rows determine."""
    finals = [fit for fit in bank.fits.values() if fit.dst == bank.n_layers]
    poor = [fit for fit in finals if fit.is_deficient]
    if poor:
        run.notes.append(
            f"{len(poor)} of {len(finals)} maps to the last layer rest on fewer independent rows "
            f"than the {bank.d_model} that they need, so shortcuts may look worse here than they "
            "are: fit on more texts before you believe a verdict."
        )


def _inside(transformer: Transformer, fitted: Fitted, settings: ShortcutSettings) -> Inside | None:
    """What else is made of the passes that read the main text."""
    wanted = settings.sections
    inside = Inside(
        transformer, fitted.bank, fitted.biased, read_texts=settings.n_read,
        part_texts=settings.part_texts if "parts" in wanted else 0,
        schedule_texts=settings.schedule_texts if "alternation" in wanted else 0,
    )  # fmt: skip
    return None if inside.is_idle else inside


def _parts(tables: Mapping[str, Any], bank: ShortcutBank, reason: str | None) -> dict[str, Any]:
    fits = [fit.to_dict() for fit in bank.part_fits.values()]
    return {"reason": reason, "scores": tables.get("parts") or [], "fits": fits}


def _exits(
    run: Run, banks: Mapping[str, ShortcutBank], scores: Mapping[str, Scores]
) -> dict[str, Any]:
    """Exits and promises; what too few rows do not allow is left out and noted."""
    transformer, settings, notes = run.transformer, run.settings, run.notes
    if "exits" not in settings.sections:
        return {"exits": None, "calibrated": None}
    main = settings.text
    assert main is not None
    read = next(row for row in run.data if (row["role"], row["text"]) == ("read", main))
    tokens = max(1, round(read["tokens"] / read["texts"]))
    lenses = {}
    try:
        for name, label in (("id", "-"), ("mat", main), ("tuned", "tuned")):
            if label in scores[main].top:
                cost = measure(transformer, tokens=tokens, bank=banks.get(label))
                if transformer.kind == "masked-token":  # one answer takes the whole text
                    cost = replace(cost, blocks=tuple(tokens * block for block in cost.blocks))
                lenses[name] = lensed(scores, main, label, cost, seed=settings.sampling.seed)
        exits = {**exit_tables(lenses), "same_rows": same_rows(lenses)}
    except (BadSettings, ModelRefused) as error:
        notes.append(f"Early exit is left out: {error}.")
        return {"exits": None, "calibrated": None}
    if lenses["id"].train is None:
        notes.append("No rule is learned: there are too few documents to train it on some alone.")
    maps = {"id": None, "mat": banks.get(main), "tuned": banks.get("tuned")}
    exits["texts"] = _texts(run, maps, lenses, exits["saved"], main)
    try:
        promised = calibrated_tables(lenses, main, settings.tolerance, settings.delta)
    except BadSettings as error:
        notes.append(f"Exits with a promise are left out: {error}.")
        return {"exits": exits, "calibrated": None}
    return {"exits": exits, "calibrated": promised}


def _texts(
    run: Run,
    maps: Mapping[str, ShortcutBank | None],
    lenses: Mapping[str, Lensed],
    saved: list[dict[str, Any]],
    text: str,
) -> list[dict[str, Any]]:
    """What the rule writes that saves most through each lens, at an agreement of `SHOWN_AT`."""
    rules = {}
    for lens, rows in lenses.items():
        known = [
            row for row in saved
            if (row["map"], row["target"]) == (lens, SHOWN_AT) and row["knob"] is not None
        ]  # fmt: skip
        if known:
            best = max(known, key=lambda row: row["saved"])
            rules[lens, best["rule"]] = rows.families[best["rule"]].at(best["knob"])
    try:
        return early_texts(run.transformer, maps, rules, run.beginning(text, BEGINNING))
    except (BadSettings, ModelRefused) as error:  # of a kind that cannot be decoded here
        run.notes.append(f"No text is written by leaving early: {error}.")
        return []


def _settled(transformer: Transformer, settings: ShortcutSettings) -> ShortcutSettings:
    """The settings with both texts decided."""
    if settings.text == settings.other not in (None, DEFAULT_OTHER):
        raise BadSettings(
            f"{settings.text!r} is given twice; name another text to transfer to, or none"
        )
    main = "generated" if settings.text is None and settings.starts is not None else settings.text
    main, other = default_texts(transformer, main, settings.other)
    return replace(settings, text=main, other=other)


def default_texts(
    transformer: Transformer, text: str | None, other: str | None
) -> tuple[str, str | None]:
    """The texts to study: as asked, or what suits the model; never one text against itself."""
    main = text if text is not None else default_text(transformer)
    # A model whose texts have to be generated seldom speaks the language of the news.
    if other == main or (main == "generated" and other == DEFAULT_OTHER):
        return main, None
    return main, other


def _tuned(run: Run, fitted: Fitted, banks: dict[str, ShortcutBank]) -> dict[str, Any] | None:
    """Adds a bank of trained maps; returns the record of the training."""
    if "tuned" not in run.settings.sections or fitted.rows is None:
        return None
    try:
        banks["tuned"], record, judged = train(run, fitted.rows)
    except BadSettings as error:
        run.notes.append(f"Trained maps are left out: {error}.")
        return None
    return {"progress": record, "summary": summary(record), "judged": judged}


def _equal_fits(
    run: Run, banks: dict[str, ShortcutBank], fitted: Mapping[str, Fitted]
) -> dict[str, str]:
    """By text, the label of the fit to compare; adds a smaller fit of a much larger text."""
    equal = {text: text for text in banks}
    if len(banks) < 2:
        return equal
    small, large = sorted(banks, key=lambda text: banks[text].data["rows_fitted"])
    rows = {text: banks[text].data["rows_fitted"] for text in banks}
    if rows[large] > SAME_SIZE * rows[small]:
        kept = fitted[large].rows
        assert kept is not None
        n_rows = min(len(kept), rows[small])
        equal[large] = f"{large}, {n_rows:,} rows"
        banks[equal[large]] = fit_sample(run, kept, n_rows, equal[large])
    return equal


CARD = {"precision@1": ("", " low", " high"), "surprisal": ("",), "kl": ("",)}


def _with_quality(bank: ShortcutBank, result: Mapping[str, Any]) -> ShortcutBank:
    """The maps to the last layer, with their held-out scores on the card: one row per layer."""
    text = result["settings"]["text"]
    rows = [row for row in result["scores"] if row["read"] == text and row["fit"] in ("-", text)]
    by = {(row["layer"], row["metric"], row["map"]): row for row in rows}
    quality = []
    for layer in range(bank.n_layers + 1):
        first = by[layer, "precision@1", "mat"]
        named = {"layer": layer, "rows": first["rows"], "documents": first["documents"]}
        for metric, ends in CARD.items():
            for name in ("mat", "id"):
                row = by[layer, metric, name]
                named |= {f"{metric} {name}{end}": row[end.strip() or "value"] for end in ends}
        quality.append(named)
    last = bank.n_layers
    return ShortcutBank(
        [m for (_, dst), m in bank.maps.items() if dst == last],
        fits=[fit for fit in bank.fits.values() if fit.dst == last],
        model=bank.model, n_layers=last, d_model=bank.d_model, settings=bank.settings,
        data={k: v for k, v in bank.data.items() if k not in ("study", "account")},
        quality=quality,
    )  # fmt: skip
