"""The long part of a study: banks fitted on texts, texts read through banks, kept as they finish.

In: a model, settings, and perhaps a folder for work. Out: banks, tables, and an account of what
was seen. With a folder, an interrupted study takes up what it had finished: moments while fitting,
fitted banks, and the tables of texts that were read.
"""

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import layerleap
from layerleap.errors import BadArtifact, BadText, LayerleapError
from layerleap.files import read_json, write_json
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.fit import bank_from, collect, finish
from layerleap.maps.parts import solve_parts
from layerleap.memory import give_back
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress
from layerleap.read.lens import Lens
from layerleap.read.scores import Quality, Scores, score
from layerleap.stats.saved_states import RowFile, Rows
from layerleap.stats.tally import Tally
from layerleap.stream.examples import Census, Sampling, iter_batches, iter_examples
from layerleap.stream.generated import NOTE
from layerleap.stream.source import n_to_generate, resolve_text
from layerleap.study.shortcuts.inside import Inside

if TYPE_CHECKING:
    from layerleap.study.shortcuts.study import ShortcutSettings

Tables = dict[str, Any]  # "scores", "r2" (None unless asked for), "tail", "parts", "schedules"


ENDS = ("", "-biased")  # of the folders of a fit


class Fitted(NamedTuple):
    """What was fitted on one text."""

    bank: ShortcutBank
    biased: ShortcutBank | None = None  # its parts alone, with an intercept; None without parts
    rows: Rows | None = None  # the rows fitted on, or a sample of them, if they were to be kept


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
        self._scratch = None if work else TemporaryDirectory(prefix="layerleap-")
        self.folder = work or Path(self._scratch.name)  # type: ignore[union-attr]
        self.data: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        """Without a folder for work nothing is left behind."""
        if self._scratch is not None:
            self._scratch.cleanup()

    def _source(self, text: str) -> tuple[Any, Sampling]:
        """What to stream for a text, and how to cut it."""
        is_generated = text == "generated"
        if is_generated and NOTE not in self.notes:
            self.notes.append(NOTE)
        s = self.settings
        share = s.sampling.held_out
        # One file for both sides: generated for whichever needs more.
        needs = n_to_generate(s.n_fit, 1 - share), n_to_generate(s.n_read, share) if share else 0
        return resolve_text(
            self.transformer, text, s.sampling, self.progress, s.starts if is_generated else None,
            max(needs),
        )  # fmt: skip

    def fit(
        self,
        text: str,
        pairs: Literal["final", "all"],
        *,
        parts: Sequence[str] = (),
        keep_rows: bool = False,
    ) -> Fitted:
        """A bank fitted on the fitting side of `text`; one finished earlier is taken up again.

        Args:
            text: what to fit on.
            pairs: which maps.
            parts: kinds of parts of blocks that are fitted too, in the same pass.
            keep_rows: also keep the rows, for what is fitted to them later without another pass.
        """
        started = time.monotonic()
        s, name, asked = self.settings, text, self.settings.n_fit
        source, sampling = self._source(text)
        key = [text, pairs, list(parts), asked, s.intercept, s.ridge, sampling.to_dict()]
        folder = self.folder / f"fitted-{slug(name)}"
        checkpoint = self.folder / f"fitting-{slug(name)}.safetensors"
        # By its key: rows of other settings must never be taken for those of this fit.
        file = self.folder / f"rows-{slug(name)}-{_digest(key)}"
        rows = RowFile(file) if keep_rows else None
        if fitted := self._kept(folder, rows, key, source, sampling, asked):
            return fitted
        tally = collect(
            self.transformer, source, sampling, n_texts=asked, pairs=pairs, parts=list(parts),
            choose_ridge=s.ridge == "auto", checkpoint=checkpoint if self.work else None,
            rows=rows, progress=named(self.progress, f"fitting on {name}"),
        )  # fmt: skip
        account = self.account("fit", name, tally.about["data"], asked, started)
        give_back()
        fitted = self._solved(tally, {"text": name, "study": key, "account": account})
        if self.work:
            for end, bank in zip(ENDS, fitted, strict=False):
                if isinstance(bank, ShortcutBank):
                    bank.save_pretrained(folder.with_name(folder.name + end))
            finish(checkpoint)
        del tally
        give_back()  # the moments: more than the maps themselves
        return fitted._replace(rows=None if rows is None else rows.open())

    def _solved(self, tally: Tally, said: Mapping[str, Any]) -> Fitted:
        """The bank, its parts without an intercept; and the same parts with one."""
        s, couples, parts = self.settings, tally.couples, tally.parts
        plain, biased = (
            solve_parts(parts, couples, intercept=bias, progress=self.progress)
            if parts is not None
            else ({}, [])
            for bias in (False, True)
        )
        tally.parts = parts = None  # much memory, and the maps are made
        bank = bank_from(tally, intercept=s.intercept, ridge=s.ridge, progress=self.progress)
        bank = bank.changed(data={**bank.data, **said})
        if not couples:
            return Fitted(bank)
        return Fitted(
            bank.changed(parts=plain[0], fits=[*bank.fits.values(), *plain[1]]),
            bank.changed(maps=[], parts=biased[0], fits=biased[1]),
        )

    def _kept(
        self,
        folder: Path,
        rows: RowFile | None,
        key: list[Any],
        source: Any,
        sampling: Sampling,
        asked: int,
    ) -> Fitted | None:
        """What an interrupted study had fitted, if it still is what would be fitted."""
        bank, biased = (self._kept_bank(folder.with_name(folder.name + end)) for end in ENDS)
        if bank is None or bank.data.get("study") != key:
            return None
        if bank.parts and (biased is None or biased.data.get("study") != key):
            return None
        if self._fingerprint(source, sampling, "fit", asked) != bank.data.get("fingerprint"):
            return None
        try:
            opened = None if rows is None else rows.open()
        except BadArtifact:
            return None
        self._note(bank.data["account"], asked)
        return Fitted(bank, biased if bank.parts else None, opened)

    def _kept_bank(self, folder: Path) -> ShortcutBank | None:
        if not folder.is_dir():
            return None
        try:
            bank = ShortcutBank.from_pretrained(folder)
            bank.check_model(self.transformer)
        except LayerleapError:
            return None  # of another model or damaged: fit again
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

    def beginning(self, text: str, n: int) -> list[int]:
        """The first tokens of a held-out text that is longer than they are; none if there is none.

        Args:
            text: of which.
            n: tokens.
        """
        source, sampling = self._source(text)
        examples = iter_examples(
            self.transformer, source, sampling, side="held-out", n_texts=self.settings.n_read
        )
        return next((list(one.ids[:n]) for one in examples if len(one.ids) > n), [])

    def read(
        self,
        text: str,
        banks: Mapping[str, ShortcutBank],
        measured: ShortcutBank | None = None,
        inside: Inside | None = None,
    ) -> tuple[Tables, Scores]:
        """Scores of every bank and of the logit lens on the held-out side of `text`.

        Args:
            text: what to read.
            banks: by the label of their fit.
            measured: the bank of which R2 is measured too.
            inside: what else is made of the same forward passes.
        """
        source, sampling = self._source(text)
        key = self._reading_key(text, banks, sampling, measured is not None, inside is not None)
        kept = self.work / f"read-{slug(text)}.json" if self.work else None
        if kept and (found := self._kept_reading(kept, key, source, sampling)):
            return found
        started, census = time.monotonic(), Census()
        quality = Quality(self.transformer, measured) if measured is not None else None
        scores = self._scores(text, source, sampling, banks, quality, inside, census)
        tables = {
            "scores": labelled(scores, text),
            "r2": quality.table() if quality is not None else None,
            "tail": {"text": text, **scores.check.to_dict()},
            **({} if inside is None else inside.tables()),
        }
        account = self.account("read", text, census.to_dict(), self.settings.n_read, started)
        if kept:
            scores.save(kept.with_suffix(".safetensors"))  # first: the tables say that all is there
            write_json(kept, {"key": key, "account": account, "tables": tables})
        return tables, scores

    def scores(self, text: str, banks: Mapping[str, ShortcutBank]) -> Scores:
        """The rows of `read`, for who needs more than tables; the logit lens is called "-"."""
        started, census = time.monotonic(), Census()
        source, sampling = self._source(text)
        found = self._scores(text, source, sampling, banks, None, None, census)
        self.account("read", text, census.to_dict(), self.settings.n_read, started)
        return found

    def _scores(
        self,
        text: str,
        source: Any,
        sampling: Sampling,
        banks: Mapping[str, ShortcutBank],
        quality: Quality | None,
        inside: Inside | None,
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
                keep_states=None if quality is None else quality.add,
                also=None if inside is None else inside.add,
                progress=self.progress, total=asked, phase=f"reading {text}",
            )  # fmt: skip
        except BadText as error:
            raise BadText(
                f"{error}; document-level separation needs several documents, and no document of "
                f"{text!r} fell to the held-out side: give more, or another seed"
            ) from error

    def _reading_key(
        self,
        text: str,
        banks: Mapping[str, ShortcutBank],
        sampling: Sampling,
        measured: bool,
        inside: bool,
    ) -> str:
        """Everything that the tables follow from, the held-out text itself excepted."""
        fits = {
            name: [bank.data["study"], bank.data["fingerprint"]] for name, bank in banks.items()
        }
        parts = [
            layerleap.__version__, self.transformer.identity.fingerprint, text,
            self.settings.n_read, sampling.to_dict(), measured, fits,
            inside and [self.settings.part_texts, self.settings.schedule_texts,
                        sorted(self.settings.sections)],
        ]  # fmt: skip
        return _digest(parts)

    def _kept_reading(
        self, path: Path, key: str, source: Any, sampling: Sampling
    ) -> tuple[Tables, Scores] | None:
        """The tables of a text that an interrupted study had read, if they still hold."""
        if not path.exists():
            return None
        try:
            kept = read_json(path)
            account, tables, same = kept["account"], kept["tables"], kept["key"] == key
            scores = Scores.load(path.with_suffix(".safetensors")) if same else None
        except (BadArtifact, KeyError, TypeError):
            return None  # damaged: read again
        asked = self.settings.n_read
        found = self._fingerprint(source, sampling, "held-out", asked)
        if scores is None or found != account["fingerprint"]:
            return None
        self._note(account, asked)
        return dict(tables), scores

    def account(
        self, role: str, text: str, data: dict[str, Any], asked: int, started: float
    ) -> dict[str, Any]:
        """Write down what was seen, and how long it took."""
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


def labelled(scores: Scores, text: str) -> list[dict[str, Any]]:
    """Score rows with what was fitted and what was read; lenses are named by what they fit on."""
    rows = scores.table(read=text)
    for row in rows:
        row["fit"] = row.pop("map")
        row["map"] = {"-": "id", "tuned": "tuned"}.get(row["fit"], "mat")
    return rows


def named(progress: Progress, name: str) -> Progress:
    """The same progress under another name."""

    def told(phase: str, done: int, total: int | None, unit: str = "texts") -> None:
        progress(name, done, total, unit)

    return told


def _digest(said: Any) -> str:
    return blake2b(json.dumps(said).encode(), digest_size=16).hexdigest()


def slug(text: str) -> str:
    """A file name for a text; the hash tells long or similar names apart."""
    readable = "".join(c if c.isalnum() else "-" for c in text)[-40:]
    return f"{readable}-{blake2b(text.encode(), digest_size=4).hexdigest()}"
