"""What the sections of the saturation study share: the bank, and one pass over the text.

In: a model and settings. Out: a context whose bank and readings are made when first used, and
continued from files if an earlier run was interrupted.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

from layerleap import Lens, ShortcutBank, Transformer, fit, untrained
from layerleap.errors import BadArtifact, BadText, NothingToFit
from layerleap.stream import Batch, Side, TextCounts
from layerleap.study import Tables, TextContext
from layerleap_papers.beyond_the_top1.rows import SaturationData, observe
from layerleap_papers.beyond_the_top1.saturation_settings import SaturationSettings


class SaturationContext(TextContext[SaturationSettings]):
    """A bank, and what the model and its untrained twin show of the text."""

    @cached_property
    def bank(self) -> ShortcutBank | None:
        """The bank given, or one fitted on the text; None if there is nothing to fit on."""
        s, started = self.settings, time.monotonic()
        assert not isinstance(s.bank, str)  # loaded in `resolved`
        if s.bank is not None:
            return self.judged(s.bank, is_given=True)
        try:
            bank = fit(
                self.model,
                self.text,
                s.sampling,
                ridge=0.0,
                evaluate=False,
                n_texts=s.n_fit,
                starts=s.starts,
                checkpoint=self.workspace / "fit.safetensors",
                progress=self.progress,
            )
        except NothingToFit as error:
            self.note(
                "No shortcuts could be fitted, so the whole text is read through the logit lens: "
                f"{error}."
            )
            return None
        self.read("fit", self.text, bank.data, started)
        return self.judged(bank, is_given=False)

    @property
    def side(self) -> Side:
        """The side that is read: all of the text if nothing is fitted on it."""
        return "both" if self.bank is None else "held-out"

    @cached_property
    def data_read(self) -> TextCounts:
        """What there is to read."""
        return self.text_counts(self.side)

    @property
    def tokens(self) -> int:
        """Mean length of a text."""
        return max(1, round(self.data_read.tokens / self.data_read.texts))

    @cached_property
    def observed(self) -> SaturationData:
        """The model on the text, through the logit lens and through the bank if there is one."""
        lenses = {"logit": Lens(self.model)}
        if self.bank is not None:
            lenses["linear"] = Lens(self.model, self.bank)
        return self._observe(self.model, lenses, "read")

    def untrained_control(self) -> SaturationData:
        """The same model with random weights on the same text, through the logit lens.

        Not kept: it takes as much memory as the model.
        """
        control = untrained(self.model, seed=self.settings.seed)
        return self._observe(control, {"logit": Lens(control)}, "twin")

    def _observe(self, model: Transformer, lenses: Mapping[str, Lens], role: str) -> SaturationData:
        """One pass over the text, or what an earlier run saved of it."""
        s, started, file = self.settings, time.monotonic(), self.workspace / f"{role}.rows"

        def batches() -> Iterator[Batch]:
            return self.batches(self.side, model=model)

        total = self.data_read.texts
        try:
            data = SaturationData.load(file, model, lenses, batches)
        except BadArtifact:  # none yet, or interrupted
            data = observe(
                model,
                lenses,
                batches,
                file,
                k=s.k,
                walk_share=s.walk_share,
                seed=s.seed,
                total=total,
                progress=self.progress,
                phase=f"reading {self.text}" if role == "read" else "reading (untrained twin)",
            )
            data.save(file)
        self.read(role, self.text, self.data_read.to_dict(), started)
        return data

    def through_each(self, what: str, make: Callable[[str], Tables]) -> Tables:
        """The tables that `make` gives for every lens, joined.

        A lens for which there are too few rows is left out with a note; if none is left, that is
        the error of the first.
        """
        tables: Tables = {}
        errors: dict[str, BadText] = {}
        for lens in self.observed.lenses:
            try:
                made = make(lens)
            except BadText as error:
                errors[lens] = error
                continue
            for name, rows in made.items():
                tables.setdefault(name, []).extend(rows)
        if not tables:
            raise next(iter(errors.values()))
        for lens, reason in errors.items():
            self.leave_out(f"{what} through {lens}", reason)
        return tables
