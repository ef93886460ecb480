"""Settings of the study of sparsity, and what its sections share.

In: a model and plain values. Out: `SparsitySettings`, checked; and a context with the rows to read
and the rows that budgets are chosen on, each made when first used.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Self, TypeVar

from layerleap import Transformer
from layerleap.errors import BadSettings
from layerleap.models.weights import FeedForward, feed_forwards
from layerleap.stream import (
    DENSEST_MASKS,
    Batch,
    Side,
    TextCounts,
    batches_of,
    modality,
    reads_pairs,
)
from layerleap.study import TextContext, TextSettings, option
from layerleap_papers.topk_attention.comparisons import Rows

T = TypeVar("T")
CLAIMED = (0.125, 0.5)  # shares of neurons that claims are about; a quick run keeps these
SHORTEST = 128  # a length at which memory is measured: twice k, so that keys are selected


def _parsed(text: str, kind: Callable[[str], T], words: str) -> tuple[T, ...]:
    try:
        return tuple(kind(part.strip()) for part in text.split(","))
    except ValueError as error:
        raise BadSettings(f"{text!r} cannot be read; expected {words} with commas") from error


numbers = partial(_parsed, kind=int, words="whole numbers")
shares = partial(_parsed, kind=float, words="numbers")


@dataclass(frozen=True)
class SparsitySettings(TextSettings):
    """What the study of sparsity does, and with how much data."""

    n_fit: int | None = option(
        6,
        "Texts that budgets are chosen on; results come from others.",
        flags=("--fit-texts",),
        quick=2,
    )
    n_read: int | None = option(16, "Held-out texts to read.", flags=("--read-texts",), quick=6)
    unit: str = option("document", "What one text is: sentence, paragraph or document.")
    max_tokens: int = option(384, "Longer texts are cut here.", quick=128)
    positions: str | None = option(
        None,
        f"'one' random position per text, 'all', or 'every:N'. By default every:4, "
        f"every:{DENSEST_MASKS} of a masked model, or all of an encoder-decoder.",
    )
    keys: tuple[int, ...] = option(
        (2, 4, 8, 16, 32, 64, 128), "How many keys attention keeps, one run each.", parse=numbers
    )
    shares: tuple[float, ...] = option(
        (0.015625, 0.03125, 0.0625, 0.125, 0.25, 0.5, 0.75),
        "Shares of neurons that FFNs keep, one run each.",
        parse=shares,
    )
    kl: float = option(0.05, "KL in nats that a budget may cost: the upper end of its interval.")
    budget_tokens: int = option(
        256, "Texts that budgets are chosen and verified on are cut here.", least=2, quick=48
    )
    window: int = option(8, "Positions back that count as near when heads are described.", least=1)
    seeds: int = option(4, "Runs from scratch of each kind of attention.", least=2)
    tune_seeds: int = option(3, "Fine-tuning runs of each kind, minutes each.", least=2)
    steps: int = option(1200, "Steps of training from scratch on ListOps.", least=1)
    review_steps: int = option(1000, "Steps of training from scratch on reviews.", least=1)
    tune_steps: int = option(200, "Steps of fine-tuning.", least=1)
    tested: int = option(1000, "Held-out items that trained models are tested on.", least=2)
    lengths: tuple[int, ...] = option(
        (256, 512, 1024, 2048), "Lengths at which memory is measured.", parse=numbers
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.kl < math.inf:
            raise BadSettings(f"kl is {self.kl}; expected a positive number of nats")
        if not self.keys or min(self.keys) < 1:
            raise BadSettings(f"keys are {list(self.keys)}; expected numbers from 1 on")
        if not self.shares or not all(0 < share <= 1 for share in self.shares):
            raise BadSettings(f"shares are {list(self.shares)}; expected numbers above 0, up to 1")
        if len(set(self.lengths)) < 3 or min(self.lengths) < SHORTEST:
            raise BadSettings(
                f"lengths are {list(self.lengths)}; expected three or more, each at least "
                f"{SHORTEST}, to fit how memory grows"
            )

    def scaled_down(self) -> Self:
        """Few short texts, few k."""
        return replace(
            super().scaled_down(),
            keys=_spread(tuple(sorted(self.keys))[1:-1] or self.keys, 3),
            shares=tuple(sorted({min(self.shares, key=lambda s: abs(s - w)) for w in CLAIMED})),
            lengths=tuple(sorted(self.lengths)[:3]),
        )

    def resolved(self, model: Transformer) -> Self:
        """Text and positions that suit the model; k in order, each once."""
        positions = f"every:{DENSEST_MASKS if model.kind == 'masked-token' else 4}"
        if reads_pairs(model):
            positions = "all"  # what a decoder writes is short
        return replace(
            self,
            text=self.main_text(model),
            positions=self.positions or positions,
            keys=tuple(sorted(set(self.keys))),
            shares=tuple(sorted(set(self.shares))),
        )


def _spread(values: tuple[T, ...], n: int) -> tuple[T, ...]:
    """At most n of the values, evenly spread, both ends among them."""
    if len(values) <= n:
        return values
    return tuple(values[round(i * (len(values) - 1) / (n - 1))] for i in range(n))


class SparsityContext(TextContext[SparsitySettings]):
    """Held-out rows with the model's own last states, and rows to choose budgets on."""

    @cached_property
    def rows(self) -> Rows:
        """Kept rows of the held-out texts."""
        return self._rows("read", "reading held-out texts", self.batches, self.settings.n_read)

    @cached_property
    def chosen_on(self) -> Rows:
        """Kept rows of short texts of the fitting side, to choose budgets on."""
        return self._short("fit", "fit", self.settings.n_fit)

    @cached_property
    def verified_on(self) -> Rows:
        """Kept rows of held-out texts that are cut as short, to verify budgets on."""
        return self._short("verify budgets", "held-out", self.settings.n_read)

    def rows_of(self, model: Transformer) -> Rows:
        """Held-out rows of the same text for another model."""
        words, n = f"reading with {model.identity.name}", self.settings.n_read
        return Rows.of(model, self.batches(model=model), lambda done: self.progress(words, done, n))

    def _short(self, role: str, side: Side, n: int | None) -> Rows:
        """Texts cut short: a budget takes hundreds of passes."""
        source, sampling = self.source()
        limit = min(sampling.max_tokens, self.settings.budget_tokens)
        short = partial(batches_of, self.model, source, replace(sampling, max_tokens=limit))
        return self._rows(role, "reading short texts", partial(short, side=side, n_texts=n), n)

    def _rows(
        self, role: str, words: str, batches: Callable[..., Iterator[Batch]], n: int | None
    ) -> Rows:
        started, text_counts = time.monotonic(), TextCounts()
        read = batches(text_counts=text_counts)
        rows = Rows.of(self.model, read, lambda done: self.progress(words, done, n))
        self.read(role, self.text, text_counts.to_dict(), started)
        return rows

    @property
    def reads_plain_text(self) -> bool:
        """Whether the model reads text, and no pairs of texts."""
        return modality(self.model) == "text" and not reads_pairs(self.model)

    @cached_property
    def ffns(self) -> dict[int, FeedForward]:
        """The blocks whose neurons are verified; what is missing is noted."""
        known, reasons = {}, dict[str, list[int]]()
        for block, ffn in feed_forwards(self.model).items():
            if isinstance(ffn, str):
                reasons.setdefault(ffn, []).append(block)
            else:
                known[block] = ffn
        for reason, blocks in reasons.items():
            listed = f"s {', '.join(map(str, blocks))}" if len(blocks) > 1 else f" {blocks[0]}"
            self.note(f"The neurons of layer{listed} stay whole: {reason}.")
        return known
