"""What studies of a text share: settings for the text, and the batches of its two sides.

In: a model and the settings of a study. Out: a context that knows what to fit on and what to read.
Maps are fitted on one side of the text; everything is measured on the other.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from layerleap.arguments import check_fields
from layerleap.errors import BadSettings, BadText
from layerleap.maps.bank import ShortcutBank
from layerleap.models.transformer import Transformer
from layerleap.stream import espeak, generated
from layerleap.stream.batches import batches_of, modality
from layerleap.stream.examples import Batch, Sampling, TextCounts
from layerleap.stream.source import default_text, n_to_generate, resolve_text
from layerleap.stream.split import Side
from layerleap.study.engine import Context, Settings, option
from layerleap.zoo.catalog import CATALOG


@dataclass(frozen=True)
class TextSettings(Settings):
    """Which text, how much of it, and how it is cut. Images and speech count as texts."""

    text: str | None = option(
        None,
        "wikipedia, enwik8 (far more articles), news, 'generated' (sampled from the model), a file "
        "(txt, jsonl, parquet, .gz), a folder, or a data set of the hub. For image classifiers: "
        "mnist, digits, a folder of images, .npz or .csv. For speech: beckett, spoken (by "
        "espeak-ng), a .wav file with its transcript as .txt beside it, or a folder of these. By "
        "default, what suits the model and the number of texts.",
        flags=("--text", "-t"),
    )
    n_fit: int | None = option(None, "Texts to fit on.", flags=("--fit-texts",))
    n_read: int | None = option(None, "Held-out texts to read.", flags=("--read-texts",))
    unit: str = option("sentence", "What one text is: sentence, paragraph or document.")
    positions: str | None = option(
        None,
        "'one' random position per text, 'all', or 'every:N'. By default, what suits the model.",
    )
    max_tokens: int = option(128, "Longer texts are cut here.")
    per_document: int | None = option(256, "Texts of one document, at most.")
    field: str = option("text", "The key or column that holds the text in jsonl and parquet.")
    held_out: float = option(0.25, "Share of documents that is never fitted on.", within=(0, 1))
    include_special: bool = option(False, "Masked models: special tokens may be masked and read.")
    starts: str | None = option(
        None, "File of real sequences from which a masked model samples its texts."
    )
    seed: int = option(0, "Decides which documents, texts and positions are used.")

    def __post_init__(self) -> None:
        check_fields(self)
        super().__post_init__()
        texts = (self.text or "generated", *self.other_texts)
        read_again = texts[1:] if self.reads_once else texts
        if "-" in (*read_again, self.starts):
            raise BadSettings(
                "standard input can be read only once, and a study reads its text several times; "
                "save it to a file first and name that"
            )
        if self.starts is not None and "generated" not in texts:
            raise BadSettings("starts are for texts sampled from the model; leave one of them out")
        for name in ("n_fit", "n_read"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise BadSettings(f"{name} is {value}; expected 1 or more")
        _ = self.sampling  # refuses what cannot be cut

    def main_text(self, model: Transformer) -> str:
        """The text asked for, or what suits the model."""
        if self.text is None and self.starts is not None:
            return "generated"
        return self.text or default_text(model, (self.n_fit or 0) + (self.n_read or 0))

    @property
    def reads_once(self) -> bool:
        """Whether the main text is read only once, so that it may be standard input."""
        return False

    @property
    def other_texts(self) -> tuple[str, ...]:
        """Texts that a study reads besides the main one."""
        return ()

    @property
    def sampling(self) -> Sampling:
        """How texts are cut and positions chosen."""
        values: dict[str, Any] = {key.name: getattr(self, key.name) for key in fields(Sampling)}
        return Sampling(**{**values, "positions": self.positions or "one"})


def trained_on(model: str, text: str, sampling: Sampling) -> Iterator[str]:
    """A warning if a bundled model was trained on some of what is held out here.

    Models that are trained on first use leave out what the default seed and share hold out.
    """
    entry, usual = CATALOG.get(model), Sampling()
    if entry is None or text not in (entry.trained_from or ()):
        return
    if sampling.seed != usual.seed or sampling.held_out > usual.held_out:
        yield (
            f"{model} was trained on {text}, without what seed {usual.seed} holds out "
            f"({usual.held_out:.0%}). Some of what is held out here (seed {sampling.seed}, "
            f"{sampling.held_out:.0%}) it has seen."
        )


TS = TypeVar("TS", bound=TextSettings)


class TextContext(Context[TS]):
    """Batches of a text's two sides, and an account of what was read."""

    @property
    def text(self) -> str:
        """The main text."""
        assert self.settings.text is not None  # decided in `resolved`
        return self.settings.text

    def source(self, text: str | None = None) -> tuple[Any, Sampling]:
        """What to stream for a text, and how to cut it; samples texts from the model if need be."""
        s, text = self.settings, text or self.text
        assert s.n_fit is not None
        assert s.n_read is not None
        is_generated = text == "generated"
        if is_generated:
            self.note(generated.NOTE)
        if modality(self.model) == "sound" and text.partition(":")[0] == "spoken":
            self.note(espeak.NOTE)
        self.note(*trained_on(self.model.identity.name, text, s.sampling))
        # One file for both sides, sampled for whichever needs more.
        needs = n_to_generate(s.n_fit, 1 - s.held_out), n_to_generate(s.n_read, s.held_out)
        starts = s.starts if is_generated else None
        return resolve_text(self.model, text, s.sampling, self.progress, starts, max(needs))

    def batches(
        self,
        side: Side = "held-out",
        *,
        text: str | None = None,
        text_counts: TextCounts | None = None,
        model: Transformer | None = None,
    ) -> Iterator[Batch]:
        """One side of a text, always in the same order; for another model if one is given."""
        source, sampling = self.source(text)
        n_texts = self.settings.n_fit if side == "fit" else self.settings.n_read
        return batches_of(
            model or self.model,
            source,
            sampling,
            side=side,
            n_texts=n_texts,
            text_counts=text_counts,
        )

    def text_counts(
        self, side: Side = "held-out", text: str | None = None, *, may_be_empty: bool = False
    ) -> TextCounts:
        """What there is on one side, counted without running the model; none is an error."""
        text_counts = TextCounts()
        for _ in self.batches(side, text=text, text_counts=text_counts):
            pass
        if not text_counts.texts and not may_be_empty:
            raise BadText(
                f"no document of {text or self.text!r} fell to the {side} side; give more "
                "documents, or another seed"
            )
        return text_counts

    def fingerprint(self) -> Any:
        """Digests of both sides: a changed text must be fitted on and read again."""
        sides = self.text_counts("fit", may_be_empty=True), self.text_counts()
        return [side.to_dict()["fingerprint"] for side in sides]

    def judged(self, bank: ShortcutBank, *, is_given: bool) -> ShortcutBank:
        """The bank, with a note if what is read through it cannot be trusted as it is."""
        deficient = [fit for fit in bank.fits.values() if fit.is_deficient]
        if is_given:
            self.note(
                "The bank was given, so it may have been fitted on documents that are read here."
            )
        elif deficient:
            self.note(
                f"{len(deficient)} of {len(bank.fits)} maps were fitted on fewer independent rows "
                f"than the {bank.d_model} that they need: fit on more before you judge its maps."
            )
        return bank

    def read(self, role: str, text: str, data: Mapping[str, Any], started: float) -> None:
        """Record what was fitted on or read, and note a shortage.

        Args:
            role: "fit", "read" or another purpose.
            text: its name.
            data: counts, as `TextCounts.to_dict` gives them.
            started: `time.monotonic()` when it began.
        """
        counts = ("documents", "texts", "tokens", "rows", "fingerprint")
        row = {"role": role, "text": text, **{key: data.get(key) for key in counts}}
        self.account({**row, "seconds": round(time.monotonic() - started, 2)})
        requested = {"fit": self.settings.n_fit, "read": self.settings.n_read}.get(role)
        texts = int(data.get("texts") or 0)
        if requested is not None and texts < requested:
            purpose = "fit on" if role == "fit" else "read"
            self.note(f"{text}: only {texts:,} of {requested:,} texts were found to {purpose}.")
