"""What a score loses if a component's mean is put in its place, and the model runs on.

In: components of one input, and a reference text for the means. Out: for each component, the score
less the score without it. Later components see the change and may make up for it, so this is not
what the component adds directly.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerleap.errors import BadText
from layerleap.lens.attention.recorder import mixed_site
from layerleap.lens.attribution.contributions import Component, Places
from layerleap.lens.attribution.prompt import OneInput
from layerleap.models.discovery.sites import Site
from layerleap.models.hooks.edit import Change, Edit
from layerleap.models.hooks.recording import record
from layerleap.models.hooks.rows import Rows
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress
from layerleap.stream.batches import batches_of
from layerleap.stream.examples import Sampling
from layerleap.stream.source import default_text, resolve_text

AT_ONCE = 8  # components of one site that are removed in one pass, each in a copy of the input


def is_removable(one: Component) -> bool:
    """True for what has a mean to put in its place."""
    return one.part in ("attn", "cross", "ffn") and not one.rest and one.block is not None


class Removal:
    """Where components are, and their means on a reference text."""

    def __init__(self, places: Places, components: Sequence[Component]) -> None:
        self.places, self.transformer = places, places.transformer
        self.slots = {one: self._slot(one) for one in components if is_removable(one)}
        self.means: dict[tuple[int, Site], Tensor] = {}
        self.n_rows = 0

    def _slot(self, one: Component) -> tuple[Site, slice]:
        """The site of a component, and which of its columns are its own."""
        block = one.block or 0
        if one.head is not None and (heads := self.places.heads.get(block)):
            columns = slice(one.head * heads.d_value, (one.head + 1) * heads.d_value)
            return mixed_site(self.transformer, heads), columns
        if one.neuron is not None and (ffn := self.places.ffns.get(block)):
            return ffn.site, slice(one.neuron, one.neuron + 1)
        return self.places.added(block)[one.part], slice(None)

    @torch.no_grad()
    def measure(self, text: Any, n_texts: int, progress: Progress) -> str:
        """Take means over a text, without the first token of each; how many rows, in words.

        The edit MeanHead differs: a few sentences by default, first tokens included.
        """
        transformer = self.transformer
        sampling = Sampling(positions="one" if transformer.kind == "masked-token" else "all")
        source, sampling = resolve_text(transformer, text, sampling, progress, n_generated=n_texts)
        wanted = list(
            dict.fromkeys((one.block or 0, site) for one, (site, _) in self.slots.items())
        )
        sums: dict[tuple[int, Site], Tensor] = {}
        for batch in batches_of(transformer, source, sampling, side="both", n_texts=n_texts):
            keep = batch.keep.clone()
            if transformer.pooling is None:
                keep[:, 0] = False  # many models park outsized activations at the first token
            if not keep.any():
                continue
            captured = transformer.capture(batch.inputs, layers=(), sites=wanted, keep=keep)
            for place in wanted:
                rows = captured.sites[place].double()
                sums[place] = sums.get(place, torch.zeros(())) + rows.sum(0)
            self.n_rows += len(captured.sites[wanted[0]])
        if not self.n_rows:
            raise BadText(f"{text!s:.60} has no text with two tokens or more to take means over")
        self.means = {place: total / self.n_rows for place, total in sums.items()}
        if text is None:
            text = default_text(transformer)
        named = text if isinstance(text, str) else "a text"
        return f"means are over {self.n_rows:,} positions of {named}"

    @torch.no_grad()
    def effects(
        self, given: OneInput, score: Callable[[Tensor], Tensor], progress: Progress
    ) -> dict[Component, float]:
        """The score less the score without each component; `score` takes rows of h[layer]."""
        transformer, layer = self.transformer, len(self.places.blocks)
        effects: dict[Component, float] = {}
        inputs = {
            name: value.repeat(AT_ONCE, *[1] * (value.dim() - 1))
            if isinstance(value, Tensor)
            else value
            for name, value in given.inputs.items()
        }
        recording, keep = record(transformer, inputs), given.keep.expand(AT_ONCE, -1)
        before = score(transformer.rows(recording.states[layer], keep))
        for (block, site), group in self._groups():
            columns = [self.slots[one][1] for one in group]
            edit = _PutMeans(block, site, columns, self.means[block, site], given.keep[0])
            with transformer.edit(edit):
                h = recording.run(recording.states[block - 1], block - 1, layer)
            lost = before - score(transformer.rows(h, keep))
            effects |= dict(zip(group, lost.tolist(), strict=False))
            progress("removing", len(effects), len(self.slots), "components")
        return effects

    def _groups(self) -> Iterator[tuple[tuple[int, Site], list[Component]]]:
        """Components of one site, as many as are removed at once."""
        by_site: dict[tuple[int, Site], list[Component]] = {}
        for one, (site, _) in self.slots.items():
            by_site.setdefault((one.block or 0, site), []).append(one)
        for place, group in by_site.items():
            for start in range(0, len(group), AT_ONCE):
                yield place, group[start : start + AT_ONCE]


@dataclass(frozen=True, eq=False)
class _PutMeans(Edit):
    """Means in the place of components of one site, each in a copy of its own."""

    block: int
    site: Site
    columns: Sequence[slice]  # by copy
    mean: Tensor
    keep: Tensor  # (pos,)

    def changes(self, transformer: Transformer) -> list[Change]:
        module = transformer.site_module(self.block, self.site)
        return [Change(self.block, module, self.site.side, self._apply)]

    def _apply(self, values: Tensor, rows: Callable[[], Rows]) -> tuple[Tensor, int]:
        where, changed = rows(), values.clone()
        for copy, columns in enumerate(self.columns):
            at = (where.texts == copy) & self.keep[where.positions]
            changed[at.to(values.device), columns] = self.mean[columns].to(values)
        return changed, len(self.columns)
