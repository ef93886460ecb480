"""What the sections of the study of sparsity share.

In: a model and settings. Out: a context with the rows to read and the rows that budgets are chosen
on; each is made when first used.
"""

import time
from dataclasses import replace
from functools import cached_property

from layerleap import Transformer
from layerleap.models.weights import FeedForward, feed_forwards
from layerleap.stream import Census, Side, batches_of
from layerleap.study import TextContext
from layerleap_papers.topk_attention.passes import Rows
from layerleap_papers.topk_attention.sparsity_settings import SparsitySettings


class SparsityContext(TextContext[SparsitySettings]):
    """Held-out rows with the model's own last states, and rows to choose budgets on."""

    @cached_property
    def rows(self) -> Rows:
        """Kept rows of the held-out texts."""
        started, census, n = time.monotonic(), Census(), self.settings.n_read
        batches = self.batches(census=census)
        rows = Rows.of(
            self.model, batches, lambda done: self.progress("reading held-out texts", done, n)
        )
        self.read("read", self.text, census.to_dict(), started)
        return rows

    @cached_property
    def chosen_on(self) -> Rows:
        """Kept rows of short texts of the fitting side, to choose budgets on."""
        return self._short("fit", self.settings.n_fit)

    @cached_property
    def verified_on(self) -> Rows:
        """Kept rows of held-out texts that are cut as short, to verify budgets on."""
        return self._short("held-out", self.settings.n_read)

    def rows_of(self, model: Transformer) -> Rows:
        """Held-out rows of the same text for another model."""
        n = self.settings.n_read
        return Rows.of(
            model,
            self.batches(model=model),
            lambda done: self.progress(f"reading with {model.identity.name}", done, n),
        )

    def _short(self, side: Side, n: int | None) -> Rows:
        """Texts cut short: a budget takes hundreds of passes."""
        started, census = time.monotonic(), Census()
        source, sampling = self.source()
        limit = min(sampling.max_tokens, self.settings.budget_tokens)
        batches = batches_of(
            self.model,
            source,
            replace(sampling, max_tokens=limit),
            side=side,
            n_texts=n,
            census=census,
        )
        rows = Rows.of(
            self.model, batches, lambda done: self.progress("reading short texts", done, n)
        )
        role = "fit" if side == "fit" else "verify budgets"
        self.read(role, self.text, census.to_dict(), started)
        return rows

    @cached_property
    def ffns(self) -> dict[int, FeedForward]:
        """The blocks whose neurons are verified; what is missing is noted."""
        found, reasons = {}, dict[str, list[int]]()
        for block, ffn in feed_forwards(self.model).items():
            if isinstance(ffn, str):
                reasons.setdefault(ffn, []).append(block)
            else:
                found[block] = ffn
        for reason, blocks in reasons.items():
            listed = f"s {', '.join(map(str, blocks))}" if len(blocks) > 1 else f" {blocks[0]}"
            self.note(f"The neurons of layer{listed} stay whole: {reason}.")
        return found
