"""The study of linear shortcuts: how well can each layer be read, and carried to later ones?

In: a model, a text to fit and read on, another text to transfer to, and settings.
Out: one plain dictionary: tables of R2, Precision@k, Surprisal and KL with intervals, fits,
laws that must hold, and findings in words. `show.report` draws it.

One pass over the fitting side of each text, one over its held-out side.
"""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

import layerleap
from layerleap.errors import BadSettings, BadText, LayerleapError
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.linear import check_solving
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.read.lens import Lens
from layerleap.read.scores import Quality, Scores, score
from layerleap.recipes import bank_from, collect, default_text, resolve_text
from layerleap.stream.drawn import NOTE
from layerleap.stream.examples import Census, Sampling, iter_batches, iter_examples
from layerleap.study.findings import findings, laws

FORMAT = 1


@dataclass(frozen=True)
class ShortcutSettings:
    """What the study does; the defaults are the paper's sizes."""

    text: str = "wikipedia"
    other: str | None = "news"  # fitted and read as well, for transfer; None leaves it out
    n_fit: int = 9000  # texts to fit on
    n_read: int = 3000  # held-out texts to read
    intercept: bool = False
    ridge: float | str = 0.0
    pairs: str = "all"  # "final" leaves out the heat maps between inner layers
    quick: bool = False  # a first look: far fewer texts
    sampling: Sampling = field(default_factory=Sampling)

    def quickened(self) -> "ShortcutSettings":
        """A first look: few texts, maps to the last layer and every pair from them."""
        return replace(self, n_fit=min(self.n_fit, 1500), n_read=min(self.n_read, 300), quick=True)

    def to_dict(self) -> dict[str, Any]:
        """Flat and JSON-able."""
        flat = asdict(self)
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
        work: a folder for checkpoints; a study interrupted while fitting goes on from there.
        progress: told about every batch.
    """
    settings = settings or ShortcutSettings()
    check_solving(settings.ridge, None, transformer.d_model)
    main, other = settings.text, settings.other
    if main == other:
        raise BadSettings(f"{main!r} is given twice; name another text to transfer to, or none")
    run = _Run(transformer, settings, work, progress)
    banks = {main: run.fit(main, settings.pairs)}
    if other is not None:
        banks[other] = run.fit(other, "final")
    quality = Quality(transformer, banks[main])
    tables = []
    for text in banks:
        scores = run.read(text, banks, quality if text == main else None)
        tables += _labelled(scores, text)
    bank = banks[main]
    result: dict[str, Any] = {
        "format": FORMAT, "kind": "shortcuts", "version": layerleap.__version__,
        "made": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "model": {
            **transformer.identity.to_dict(), "kind": transformer.kind,
            "n_layers": transformer.n_layers, "d_model": transformer.d_model,
            "d_vocab": transformer.d_vocab,
        },
        "settings": settings.to_dict(), "data": run.data, "notes": run.notes,
        "r2": quality.table(), "scores": tables,
        "fits": [fit.to_dict() for fit in bank.fits.values()],
    }  # fmt: skip
    result["laws"] = laws(result)
    result["findings"] = findings(result)
    return result, _with_quality(bank, result)


def default_texts(
    transformer: Transformer, text: str | None, other: str | None
) -> tuple[str, str | None]:
    """The texts to study: as asked, or what suits the model; never one text against itself."""
    main = text if text is not None else default_text(transformer)
    if main == "drawn" or other == main:
        return main, None
    return main, other


class _Run:
    """Fits and reads texts, and keeps account of what was seen."""

    def __init__(
        self,
        transformer: Transformer,
        settings: ShortcutSettings,
        work: Path | None,
        progress: Progress,
    ) -> None:
        self.transformer, self.settings = transformer, settings
        self.work, self.progress = work, progress
        self.data: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def _source(self, text: str) -> tuple[Any, Sampling]:
        """What to stream for a text, and how to cut it."""
        if text == "drawn" and NOTE not in self.notes:
            self.notes.append(NOTE)
        return resolve_text(self.transformer, text, self.settings.sampling, self.progress)

    def fit(self, text: str, pairs: str) -> ShortcutBank:
        """A bank fitted on the fitting side of `text`; one finished earlier is taken up again."""
        started = time.monotonic()
        source, sampling = self._source(text)
        kept = self.work / f"fitted-{_slug(text)}" if self.work else None
        if kept and (bank := self._kept(kept, self._key(text, pairs, sampling), source, sampling)):
            return bank
        tally = collect(
            self.transformer, source, sampling, n_texts=self.settings.n_fit, pairs=pairs,  # type: ignore[arg-type]
            choose_ridge=self.settings.ridge == "auto",
            checkpoint=self.work / f"fitting-{_slug(text)}.safetensors" if self.work else None,
            progress=_named(self.progress, f"fitting on {text}"),
        )  # fmt: skip
        bank = bank_from(
            tally,
            intercept=self.settings.intercept,
            ridge=self.settings.ridge,
            progress=self.progress,
        )
        self._account("fit", text, tally.about["data"], started)
        bank.data = {**bank.data, "text": text, "study": self._key(text, pairs, sampling)}
        bank.data["account"] = self.data[-1]
        if kept:
            bank.save_pretrained(kept)
        return bank

    def _key(self, text: str, pairs: str, sampling: Sampling) -> list[Any]:
        s = self.settings
        return [text, pairs, s.n_fit, s.intercept, s.ridge, sampling.to_dict()]

    def _kept(
        self, folder: Path, key: list[Any], source: Any, sampling: Sampling
    ) -> ShortcutBank | None:
        """A bank that an interrupted study had finished, if it still is what would be fitted."""
        if not folder.is_dir():
            return None
        try:
            bank = ShortcutBank.from_pretrained(folder)
            bank.check_model(self.transformer)
        except LayerleapError:
            return None  # of another model or damaged: fit again
        census = Census()  # tokenising is cheap; a text that has changed must be fitted again
        fitted = iter_examples(
            self.transformer, source, sampling, n_texts=self.settings.n_fit, census=census
        )
        deque(fitted, maxlen=0)
        same_text = census.to_dict()["fingerprint"] == bank.data.get("fingerprint")
        if bank.data.get("study") != key or not same_text:
            return None
        self.data.append(bank.data["account"])
        return bank

    def read(self, text: str, banks: Mapping[str, ShortcutBank], quality: Quality | None) -> Scores:
        """Scores of every bank and of the logit lens on the held-out side of `text`."""
        started = time.monotonic()
        source, sampling = self._source(text)
        census = Census()
        examples = iter_examples(
            self.transformer, source, sampling, side="held-out", n_texts=self.settings.n_read,
            census=census,
        )  # fmt: skip
        lenses = {"-": Lens(self.transformer)}
        lenses |= {name: Lens(self.transformer, bank) for name, bank in banks.items()}
        try:
            scores = score(
                self.transformer, lenses, iter_batches(self.transformer, examples),
                quality=quality, progress=self.progress, total=self.settings.n_read,
                phase=f"reading {text}",
            )  # fmt: skip
        except BadText as error:
            raise BadText(
                f"{error}; document-level separation needs several documents, and no document of "
                f"{text!r} fell to the held-out side: give more, or another seed"
            ) from error
        self._account("read", text, census.to_dict(), started)
        return scores

    def _account(self, role: str, text: str, data: dict[str, Any], started: float) -> None:
        seconds = round(time.monotonic() - started, 2)
        self.data.append({"role": role, "text": text, **data, "seconds": seconds})


def _labelled(scores: Scores, text: str) -> list[dict[str, Any]]:
    """Score rows with what was fitted and what was read; lenses are named by what they fit on."""
    rows = scores.table(read=text)
    for row in rows:
        row["fit"] = row.pop("map")
        row["map"] = "id" if row["fit"] == "-" else "mat"
    return rows


def _with_quality(bank: ShortcutBank, result: Mapping[str, Any]) -> ShortcutBank:
    """The maps to the last layer, with their held-out scores on the card."""
    text = result["settings"]["text"]
    quality: dict[int, dict[str, Any]] = {}
    for row in result["scores"]:
        if row["read"] == text and row["fit"] in ("-", text):
            named = quality.setdefault(row["layer"], {"layer": row["layer"]})
            named[f"{row['metric']} {row['map']}"] = row["value"]
    last = bank.n_layers
    return ShortcutBank(
        [m for (_, dst), m in bank.maps.items() if dst == last],
        fits=[fit for fit in bank.fits.values() if fit.dst == last],
        model=bank.model, n_layers=last, d_model=bank.d_model, settings=bank.settings,
        data={k: v for k, v in bank.data.items() if k not in ("study", "account")},
        quality=quality.values(),
    )  # fmt: skip


def _named(progress: Progress, name: str) -> Progress:
    def told(phase: str, done: int, total: int | None, unit: str = "texts") -> None:
        progress(name, done, total, unit)

    return told


def _slug(text: str) -> str:
    """A file name for a text; the hash tells long or similar names apart."""
    readable = "".join(c if c.isalnum() else "-" for c in text)[-40:]
    return f"{readable}-{blake2b(text.encode(), digest_size=4).hexdigest()}"
