"""Banks fitted on a text, and held-out text scored through them.

In: a model, and settings for the text and the fit. Out: a context with `fit` and `scores`.

A fit saves its moments about every half minute and its result at the end, both in the folder of the
run. An interrupted run continues from there and gives the same result.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import layerleap
from layerleap.errors import BadText, LayerleapError, check_choice
from layerleap.lens.lens import Lens
from layerleap.lens.map_errors import MapErrors
from layerleap.lens.scores import Scores, score
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.fit import METHOD, solve_bank
from layerleap.maps.linear import solve_parts
from layerleap.maps.map_settings import check_solving
from layerleap.memory import give_back
from layerleap.progress import Progress
from layerleap.stats.collect import METHOD as collect_method, collect, finish
from layerleap.stats.fit_statistics import FitStatistics
from layerleap.stats.saved_states import SavedStates, StateFile
from layerleap.stream.examples import TextCounts
from layerleap.stream.split import Side
from layerleap.study.engine import option
from layerleap.study.result import Row
from layerleap.study.texts import TextContext, TextSettings

SHORT_PASS = 500  # texts; moments of all pairs of layers take longer to save than so few to read


def _parse_ridge(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # "auto"; anything else is refused by the settings


@dataclass(frozen=True)
class FitSettings(TextSettings):
    """Which text, and how maps are fitted on it."""

    intercept: bool = option(False, "Fit a bias too.", flags=("--intercept",))
    ridge: float | str = option(
        0.0, "Penalty as a fraction of the mean eigenvalue, or 'auto'.", parse=_parse_ridge
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_solving(self.ridge, None, 1)


class Fitted(NamedTuple):
    """What was fitted on one text."""

    bank: ShortcutBank
    biased: ShortcutBank | None  # its maps of parts, fitted with an intercept; None without parts
    rows: SavedStates | None  # the rows fitted on, or a sample of them, if they were saved
    key: str  # differs if anything differs that the maps depend on


FS = TypeVar("FS", bound=FitSettings)


class FitContext(TextContext[FS]):
    """Fits banks on one side of a text, and scores lenses on the other."""

    @cached_property
    def _fingerprints(self) -> dict[tuple[Side, str], str]:
        return {}

    def fingerprint_of(self, side: Side, text: str) -> str:
        """A digest of one side of a text, counted once."""
        if (side, text) not in self._fingerprints:
            self._fingerprints[side, text] = self.text_counts(side, text).to_dict()["fingerprint"]
        return self._fingerprints[side, text]

    def fingerprint(self) -> list[str]:
        """Digests of both sides of all texts: if one changes, everything is done again."""
        sides: tuple[Side, ...] = ("fit", "held-out")
        texts = (self.text, *self.settings.other_texts)
        return [self.fingerprint_of(side, text) for text in texts for side in sides]

    def file(self, kind: str, name: str, *depends: Any) -> Path:
        """A path in the folder of the run that is different for everything that may differ.

        Args:
            kind: what is saved.
            name: of a text, for instance.
            depends: all that it depends on besides the model, as plain values.
        """
        methods = [layerleap.__version__, METHOD, collect_method]
        parts = [*methods, self.model.identity.fingerprint, kind, name, depends]
        digest = blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()
        readable = "".join(c if c.isalnum() else "-" for c in name)[-40:]
        return self.folder / f"{kind}-{readable}-{digest}"

    def fit(
        self,
        text: str,
        pairs: Literal["final", "all"] = "final",
        *,
        parts: Sequence[str] = (),
        keep_rows: bool = False,
    ) -> Fitted:
        """A bank fitted on one side of `text`, or the one that an earlier run saved.

        Args:
            text: what to fit on.
            pairs: maps to the last layer, or between all pairs of layers.
            parts: kinds of parts of blocks to fit maps for, in the same pass.
            keep_rows: also save rows, so that more can be fitted on them without another pass.
        """
        check_choice(pairs, ("final", "all"), "pairs")
        started, s = time.monotonic(), self.settings
        source, sampling = self.source(text)
        of_text = (self.fingerprint_of("fit", text), sampling.to_dict())
        depends = (*of_text, pairs, list(parts), keep_rows, s.intercept, s.ridge)
        folder = self.file("fitted", text, *depends)
        rows = StateFile(self.file("rows", text, *depends)) if keep_rows else None
        fitted = _saved(folder, rows)
        if fitted is None:
            checkpoint = self.file("fitting", text, *depends).with_suffix(".safetensors")
            is_short = s.n_fit is not None and s.n_fit <= SHORT_PASS
            how: dict[str, Any] = {"n_texts": s.n_fit, "pairs": pairs, "parts": list(parts)}
            stats = collect(
                self.model,
                source,
                sampling,
                choose_ridge=s.ridge == "auto",
                checkpoint=None if is_short else checkpoint,
                save_states=rows,
                progress=named(self.progress, f"fitting on {text}"),
                **how,
            )
            give_back()
            bank, biased = self._solved(stats, text)
            del stats
            give_back()  # the moments take more memory than the maps
            if biased is not None:
                biased.save_pretrained(_beside(folder))
            bank.save_pretrained(folder)  # last: it says that all is there
            finish(checkpoint)
            fitted = Fitted(bank, biased, None if rows is None else rows.open(), folder.name)
        self.read("fit", text, fitted.bank.data, started)
        return fitted

    def _solved(self, stats: FitStatistics, text: str) -> tuple[ShortcutBank, ShortcutBank | None]:
        """The bank, its parts without an intercept; and a bank of the same parts with one."""
        s, block_parts, parts = self.settings, stats.block_parts, stats.parts
        plain, biased = (
            solve_parts(parts, block_parts, intercept=bias, progress=self.progress)
            if parts is not None
            else ({}, [])
            for bias in (False, True)
        )
        stats.parts = parts = None  # frees much memory
        bank = solve_bank(stats, intercept=s.intercept, ridge=s.ridge, progress=self.progress)
        bank = bank.changed(data={**bank.data, "text": text})
        if not block_parts:
            return bank, None
        return (
            bank.changed(parts=plain[0], fits=[*bank.fits.values(), *plain[1]]),
            bank.changed(maps=[], parts=biased[0], fits=biased[1]),
        )

    def scores(
        self, text: str, banks: Mapping[str, ShortcutBank], errors: MapErrors | None = None
    ) -> Scores:
        """Scores of the logit lens, called "-", and of every bank on the held-out side of `text`.

        Args:
            text: what to read.
            banks: by label.
            errors: also measures R2 on the same rows.
        """
        started, text_counts = time.monotonic(), TextCounts()
        lenses = {"-": Lens(self.model)}
        lenses |= {label: Lens(self.model, bank) for label, bank in banks.items()}
        try:
            scores = score(
                self.model,
                lenses,
                self.batches(text=text, text_counts=text_counts),
                on_states=None if errors is None else errors.add,
                progress=self.progress,
                total=self.settings.n_read,
                phase=f"reading {text}",
            )
        except BadText as error:
            raise BadText(
                f"{error}; no document of {text!r} fell to the held-out side: give more documents, "
                "or another seed"
            ) from error
        self.read("read", text, text_counts.to_dict(), started)
        return scores

    def counts(self, role: str, text: str) -> Row:
        """How much of a text was read for a purpose."""
        return next(row for row in self.data if (row["role"], row["text"]) == (role, text))


def _saved(folder: Path, rows: StateFile | None) -> Fitted | None:
    """What an earlier run fitted, if it is whole."""
    if not folder.is_dir():
        return None
    try:
        bank = ShortcutBank.from_pretrained(folder)
        biased = ShortcutBank.from_pretrained(_beside(folder)) if bank.parts else None
        return Fitted(bank, biased, None if rows is None else rows.open(), folder.name)
    except LayerleapError:  # incomplete or damaged: fit again
        return None


def _beside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-biased")


def named(progress: Progress, name: str) -> Progress:
    """The same progress, reported under another name."""

    def report(phase: str, done: int, total: int | None, unit: str = "texts") -> None:
        progress(name, done, total, unit)

    return report
