"""What the sections of the shortcuts study share: banks, their scores, and recorded texts.

Its parts are made when first used, and saved in the folder of the run. There is one pass over the
fitting side of each text and one over its held-out side. If the texts differ in size, a second bank
is fitted on as many rows of the larger one, so that transfer compares fits of equal size. Maps are
also trained on the rows that the pass has saved.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from layerleap import ShortcutBank
from layerleap.errors import BadArtifact, BadSettings, ModelRefused
from layerleap.files import read_json, write_json
from layerleap.lens import MapErrors, Scores
from layerleap.memory import give_back
from layerleap.models import KINDS, Recording, record, replaceable
from layerleap.stats import SavedStates
from layerleap.stream import Batch, iter_examples
from layerleap.study import FitContext, Fitted, Row
from layerleap_papers.jump_to_conclusions.curves import in_paper_words
from layerleap_papers.jump_to_conclusions.shortcut_settings import ShortcutSettings
from layerleap_papers.jump_to_conclusions.trained import Trained, bank_of, train

SAME_SIZE = 1.25  # fits whose row counts differ by a smaller factor are compared as they are
TRIM_EVERY = 8  # batches after which freed memory is given back


class Reading(NamedTuple):
    """What one pass over a held-out text gave."""

    scores: Scores
    r2: list[Row]  # of the main bank on the main text, otherwise empty
    r2_lead: list[Row]  # R2 of mat minus R2 of id


class ShortcutContext(FitContext[ShortcutSettings]):
    """Banks by label, scores by text, and texts to run again."""

    @cached_property
    def kinds(self) -> tuple[tuple[str, ...], str]:
        """The kinds of parts that maps can replace in this model, and why not the others."""
        kinds, reasons = [], []
        for kind in KINDS:
            try:
                replaceable(self.model, [kind])
                kinds.append(kind)
            except ModelRefused as error:
                reasons.append(str(error))
        return tuple(kinds), "; ".join(dict.fromkeys(reasons))

    @cached_property
    def fitted(self) -> dict[str, Fitted]:
        """What was fitted on each text, the main one first."""
        s = self.settings
        parts = self.kinds[0] if "parts" in self.sections else ()
        keep = s.other is not None or "tuned" in self.sections
        pairs = cast(Literal["final", "all"], s.pairs)
        fitted = {self.text: self.fit(self.text, pairs, parts=parts, keep_rows=keep)}
        if s.other is not None:
            fitted[s.other] = self.fit(s.other, keep_rows=True)
        return fitted

    @property
    def bank(self) -> ShortcutBank:
        """The bank fitted on the main text."""
        return self.fitted[self.text].bank

    @cached_property
    def equal_fits(self) -> dict[str, str]:
        """By text, the label of the fit to compare: of a much larger text, that of fewer rows."""
        equal = {text: text for text in self.fitted}
        sizes = {text: one.bank.data["rows_fitted"] for text, one in self.fitted.items()}
        small, large = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
        if sizes[large] > SAME_SIZE * sizes[small]:
            n_rows = min(len(self._rows(large)), sizes[small])
            equal[large] = f"{large}, {n_rows:,} rows"
        return equal

    @cached_property
    def banks(self) -> dict[str, ShortcutBank]:
        """Every bank that texts are read through, by label."""
        banks = {text: one.bank for text, one in self.fitted.items()}
        for text, label in self.equal_fits.items():
            if label != text:
                banks[label] = self._sample_bank(text, label)
        if "tuned" in self.sections:
            with suppress(BadSettings):  # its section reports it
                banks["tuned"] = self.trained.bank
        return banks

    def _rows(self, text: str) -> SavedStates:
        rows = self.fitted[text].rows
        assert rows is not None  # saved wherever they are needed
        return rows

    def _sample_bank(self, text: str, label: str) -> ShortcutBank:
        """A bank fitted on as many rows of `text` as the smaller text has."""
        started, s, rows = time.monotonic(), self.settings, self._rows(text)
        n_rows = min(one.bank.data["rows_fitted"] for one in self.fitted.values())
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(s.seed))
        chosen = order[:n_rows]
        bank = bank_of(rows, chosen, s)
        documents = len(rows.documents[chosen].unique())
        counts = {"documents": documents, "texts": len(chosen), "rows": len(chosen)}
        seconds = round(time.monotonic() - started, 2)
        self.account({"role": "fit", "text": label, **counts, "seconds": seconds})
        return bank

    @cached_property
    def trained(self) -> Trained:
        """Maps trained on the rows of the main text, starting from the closed form."""
        s, rows = self.settings, self._rows(self.text)
        checkpoint = self.file(
            "tuning", self.text, rows.fingerprint(), s.intercept, s.ridge, s.tuned_rows, s.seed
        )
        return train(self.model, rows, s, checkpoint, self.progress)

    @cached_property
    def readings(self) -> dict[str, Reading]:
        """Every held-out text, read through the logit lens and all banks."""
        return {text: self._saved_reading(text) or self._read(text) for text in self.fitted}

    def _read(self, text: str) -> Reading:
        errors = MapErrors(self.bank) if text == self.text else None
        scores = self.scores(text, self.banks, errors)
        r2 = {
            "r2": [] if errors is None else in_paper_words(errors.table()),
            "r2_lead": [] if errors is None else errors.leads(),
        }
        path = self._reading_file(text)
        scores.save(path.with_suffix(".safetensors"))  # first: the other says that all is there
        write_json(path.with_suffix(".json"), {"data": self.counts("read", text), **r2})
        return Reading(scores, **r2)

    def _saved_reading(self, text: str) -> Reading | None:
        """What an earlier run read, if it is whole."""
        started, path = time.monotonic(), self._reading_file(text)
        if not path.with_suffix(".json").exists():
            return None
        try:
            saved: dict[str, Any] = read_json(path.with_suffix(".json"))
            scores = Scores.load(path.with_suffix(".safetensors"))
            self.read("read", text, saved["data"], started)
            return Reading(scores, saved["r2"], saved["r2_lead"])
        except (BadArtifact, KeyError):  # damaged: read again
            return None

    def _reading_file(self, text: str) -> Path:
        s, fits = self.settings, [one.key for one in self.fitted.values()]
        return self.file(
            "read",
            text,
            self.fingerprint_of("held-out", text),
            fits,
            list(self.banks),
            s.tuned_rows,
            s.seed,
        )

    @torch.no_grad()
    def run_again(
        self, n_texts: int, phase: str, *uses: Callable[[Recording, Batch], None]
    ) -> Tensor:
        """Record about `n_texts` held-out texts and hand every recording to `uses`.

        Batches are sorted by length, so texts are drawn one by one: each has the same chance.
        Returns which rows of the reading of the main text these are, as a mask.
        """
        assert self.settings.n_read is not None
        share, texts, rows = n_texts / self.settings.n_read, 0, []
        for number, batch in enumerate(self.batches()):
            draw = torch.Generator().manual_seed(batch.index)
            drawn = torch.rand(batch.n_texts, generator=draw) < share
            rows.append(drawn[batch.text_of_row])
            if drawn.any():
                some = batch if share >= 1 else batch.texts(drawn)
                recording = record(self.model, some.inputs)
                for use in uses:
                    use(recording, some)
                texts += some.n_texts
            if number % TRIM_EVERY == 0:
                give_back()
            self.progress(phase, texts, min(n_texts, self.settings.n_read))
        return torch.cat(rows)

    def beginning(self, n_tokens: int) -> list[int]:
        """The first tokens of a held-out text that is longer; none if all are shorter."""
        n_read = self.settings.n_read
        examples = iter_examples(self.model, *self.source(), side="held-out", n_texts=n_read)
        return next((list(one.ids[:n_tokens]) for one in examples if len(one.ids) > n_tokens), [])

    def artifacts(self) -> dict[str, Any]:
        """The maps of the main text to the last layer, with held-out scores on their card."""
        bank, last = self.bank, self.model.n_layers
        maps = [shortcut for (_, dst), shortcut in bank.maps.items() if dst == last]
        fits = [fit for fit in bank.fits.values() if fit.dst == last]
        return {"bank": bank.changed(maps=maps, fits=fits, parts={}, quality=self._quality())}

    def _quality(self) -> list[Row]:
        """One row per layer for the card of the bank."""
        quality: dict[int, Row] = {}
        for metric in ("precision@1", "surprisal", "kl"):
            for fit in (self.text, "-"):
                for row in self.tables["scores"]:
                    if (row["read"], row["fit"], row["metric"]) == (self.text, fit, metric):
                        name = f"{metric} {row['map']}"
                        shared = {key: row[key] for key in ("layer", "rows", "documents")}
                        line = quality.setdefault(row["layer"], shared)
                        line[name] = row["value"]
                        if metric == "precision@1":
                            line |= {f"{name} low": row["low"], f"{name} high": row["high"]}
        return list(quality.values())
