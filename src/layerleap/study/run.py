"""The long part of a study: banks fitted on texts, texts read through banks, kept as they finish.

In: a model, settings, and perhaps a folder for work. Out: banks, tables, and an account of what
was seen. With a folder, an interrupted study takes up what it had finished: moments while fitting,
fitted banks, and the tables of texts that were read.
"""

import json
import time
from collections import deque
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import layerleap
from layerleap.errors import BadArtifact, BadText, LayerleapError
from layerleap.files import read_json, write_json
from layerleap.maps.bank import ShortcutBank
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress
from layerleap.read.lens import Lens
from layerleap.read.scores import Quality, Scores, score
from layerleap.recipes import bank_from, collect, enough, finish, resolve_text
from layerleap.stream.drawn import NOTE
from layerleap.stream.examples import Census, Sampling, iter_batches, iter_examples

if TYPE_CHECKING:
    from layerleap.study.shortcuts import ShortcutSettings

Tables = dict[str, Any]  # "scores", "r2" (None unless asked for) and "tail"


class Run:
    """Fits and reads texts, and keeps account of what was seen."""

    def __init__(
        self,
        transformer: Transformer,
        settings: "ShortcutSettings",
        work: Path | None,
        progress: Progress,
    ) -> None:
        self.transformer, self.settings = transformer, settings
        self.work, self.progress = work, progress
        self.data: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def _source(self, text: str) -> tuple[Any, Sampling]:
        """What to stream for a text, and how to cut it."""
        is_drawn = text == "drawn"
        if is_drawn and NOTE not in self.notes:
            self.notes.append(NOTE)
        s = self.settings
        share = s.sampling.held_out
        # One file for both sides: drawn for whichever needs more.
        needs = enough(s.n_fit, 1 - share), enough(s.n_read, share) if share else 0
        return resolve_text(
            self.transformer, text, s.sampling, self.progress, s.starts if is_drawn else None,
            max(needs),
        )  # fmt: skip

    def fit(
        self,
        text: str,
        pairs: Literal["final", "all"],
        *,
        n_texts: int | None = None,
        label: str | None = None,
    ) -> ShortcutBank:
        """A bank fitted on the fitting side of `text`; one finished earlier is taken up again.

        Args:
            text: what to fit on.
            pairs: which maps.
            n_texts: how many texts; as the settings say when None.
            label: what to call the fit; by its text when None.
        """
        started = time.monotonic()
        s, name, asked = self.settings, label or text, n_texts or self.settings.n_fit
        source, sampling = self._source(text)
        key = [name, text, pairs, asked, s.intercept, s.ridge, sampling.to_dict()]
        kept = self.work / f"fitted-{slug(name)}" if self.work else None
        checkpoint = self.work / f"fitting-{slug(name)}.safetensors" if self.work else None
        if kept and (bank := self._kept_bank(kept, key, source, sampling, asked)):
            return bank
        tally = collect(
            self.transformer, source, sampling, n_texts=asked, pairs=pairs,
            choose_ridge=s.ridge == "auto", checkpoint=checkpoint,
            progress=_named(self.progress, f"fitting on {name}"),
        )  # fmt: skip
        fitted = bank_from(tally, intercept=s.intercept, ridge=s.ridge, progress=self.progress)
        account = self._account("fit", name, tally.about["data"], asked, started)
        bank = with_data(fitted, {**fitted.data, "text": name, "study": key, "account": account})
        if kept:
            bank.save_pretrained(kept)
            finish(checkpoint)
        return bank

    def _kept_bank(
        self, folder: Path, key: list[Any], source: Any, sampling: Sampling, asked: int
    ) -> ShortcutBank | None:
        """A bank that an interrupted study had finished, if it still is what would be fitted."""
        if not folder.is_dir():
            return None
        try:
            bank = ShortcutBank.from_pretrained(folder)
            bank.check_model(self.transformer)
        except LayerleapError:
            return None  # of another model or damaged: fit again
        found = self._fingerprint(source, sampling, "fit", asked)
        if bank.data.get("study") != key or found != bank.data.get("fingerprint"):
            return None
        self._note(bank.data["account"], asked)
        return bank

    def _fingerprint(
        self, source: Any, sampling: Sampling, side: Literal["fit", "held-out"], n_texts: int
    ) -> str:
        """Of what would be seen: tokenising is cheap, and a changed text must be seen again."""
        return str(self._census(source, sampling, side, n_texts).to_dict()["fingerprint"])

    def _census(
        self, source: Any, sampling: Sampling, side: Literal["fit", "held-out"], n_texts: int
    ) -> Census:
        census = Census()
        examples = iter_examples(
            self.transformer, source, sampling, side=side, n_texts=n_texts, census=census
        )
        deque(examples, maxlen=0)
        return census

    def held_out(self, text: str) -> Census:
        """What there is to read of `text`, counted without running the model."""
        source, sampling = self._source(text)
        return self._census(source, sampling, "held-out", self.settings.n_read)

    def read(
        self, text: str, banks: Mapping[str, ShortcutBank], measured: ShortcutBank | None = None
    ) -> Tables:
        """Scores of every bank and of the logit lens on the held-out side of `text`.

        Args:
            text: what to read.
            banks: by the label of their fit.
            measured: the bank of which R2 is measured too.
        """
        source, sampling = self._source(text)
        key = self._reading_key(text, banks, sampling, measured is not None)
        kept = self.work / f"read-{slug(text)}.json" if self.work else None
        if kept and (tables := self._kept_tables(kept, key, source, sampling)):
            return tables
        started, census = time.monotonic(), Census()
        quality = Quality(self.transformer, measured) if measured is not None else None
        scores = self._scores(text, source, sampling, banks, quality, census)
        asked = self.settings.n_read
        tables = {
            "scores": labelled(scores, text),
            "r2": quality.table() if quality is not None else None,
            "tail": {"text": text, **scores.check.to_dict()},
        }
        account = self._account("read", text, census.to_dict(), asked, started)
        if kept:
            write_json(kept, {"key": key, "account": account, "tables": tables})
        return tables

    def scores(self, text: str, banks: Mapping[str, ShortcutBank]) -> Scores:
        """The rows of `read`, for who needs more than tables; the logit lens is called "-"."""
        started, census = time.monotonic(), Census()
        source, sampling = self._source(text)
        found = self._scores(text, source, sampling, banks, None, census)
        self._account("read", text, census.to_dict(), self.settings.n_read, started)
        return found

    def _scores(
        self,
        text: str,
        source: Any,
        sampling: Sampling,
        banks: Mapping[str, ShortcutBank],
        quality: Quality | None,
        census: Census,
    ) -> Scores:
        asked = self.settings.n_read
        examples = iter_examples(
            self.transformer, source, sampling, side="held-out", n_texts=asked, census=census
        )
        lenses = {"-": Lens(self.transformer)}
        lenses |= {name: Lens(self.transformer, bank) for name, bank in banks.items()}
        try:
            return score(
                self.transformer, lenses, iter_batches(self.transformer, examples),
                quality=quality, progress=self.progress, total=asked, phase=f"reading {text}",
            )  # fmt: skip
        except BadText as error:
            raise BadText(
                f"{error}; document-level separation needs several documents, and no document of "
                f"{text!r} fell to the held-out side: give more, or another seed"
            ) from error

    def _reading_key(
        self, text: str, banks: Mapping[str, ShortcutBank], sampling: Sampling, measured: bool
    ) -> str:
        """Everything that the tables follow from, the held-out text itself excepted."""
        fits = {
            name: [bank.data["study"], bank.data["fingerprint"]] for name, bank in banks.items()
        }
        parts = [
            layerleap.__version__, self.transformer.identity.fingerprint, text,
            self.settings.n_read, sampling.to_dict(), measured, fits,
        ]  # fmt: skip
        return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def _kept_tables(self, path: Path, key: str, source: Any, sampling: Sampling) -> Tables | None:
        """The tables of a text that an interrupted study had read, if they still hold."""
        if not path.exists():
            return None
        try:
            kept = read_json(path)
            account, tables, same = kept["account"], kept["tables"], kept["key"] == key
        except (BadArtifact, KeyError, TypeError):
            return None  # damaged: read again
        asked = self.settings.n_read
        found = self._fingerprint(source, sampling, "held-out", asked)
        if not same or found != account["fingerprint"]:
            return None
        self._note(account, asked)
        return dict(tables)

    def _account(
        self, role: str, text: str, data: dict[str, Any], asked: int, started: float
    ) -> dict[str, Any]:
        seconds = round(time.monotonic() - started, 2)
        row = {"role": role, "text": text, **data, "seconds": seconds}
        self._note(row, asked)
        return row

    def _note(self, row: dict[str, Any], asked: int) -> None:
        self.data.append(row)
        if row["texts"] < asked:
            self.notes.append(
                f"{row['text']}: {row['texts']:,} of {asked:,} texts asked for were found to "
                f"{'fit on' if row['role'] == 'fit' else 'read'}."
            )


def with_data(bank: ShortcutBank, data: Mapping[str, Any]) -> ShortcutBank:
    """The same bank with other data on its card."""
    return bank.changed(data=data)


def labelled(scores: Scores, text: str) -> list[dict[str, Any]]:
    """Score rows with what was fitted and what was read; lenses are named by what they fit on."""
    rows = scores.table(read=text)
    for row in rows:
        row["fit"] = row.pop("map")
        row["map"] = "id" if row["fit"] == "-" else "mat"
    return rows


def _named(progress: Progress, name: str) -> Progress:
    def told(phase: str, done: int, total: int | None, unit: str = "texts") -> None:
        progress(name, done, total, unit)

    return told


def slug(text: str) -> str:
    """A file name for a text; the hash tells long or similar names apart."""
    readable = "".join(c if c.isalnum() else "-" for c in text)[-40:]
    return f"{readable}-{blake2b(text.encode(), digest_size=4).hexdigest()}"
