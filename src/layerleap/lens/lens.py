"""Lens: a map to the last layer, then the model's own tail: what each layer would predict.

In: a wrapped model, and a bank of shortcuts or none (the logit lens).
Out: logits for states of any layer, and `Readings` of texts.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from layerleap.arguments import checked
from layerleap.errors import BadSettings, BadText, NotFinite
from layerleap.lens.metrics import Comparison
from layerleap.lens.readings import LensReadings, Readings, SaturationLayers
from layerleap.lens.top import top_k
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.fit import find_bank
from layerleap.maps.kinds import kind_named
from layerleap.maps.map import IdentityMap, Map
from layerleap.memory import rows_at_once
from layerleap.models.hooks.foreign import foreign_code
from layerleap.models.identity import caveats
from layerleap.models.inputs import without_padding
from layerleap.models.prompts import (
    OnePrompt,
    Prompts,
    as_pair,
    encode,
    encode_pair,
    numbered,
    several,
)
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress
from layerleap.results.several import Several
from layerleap.stream.examples import (
    Example,
    iter_batches,
    reads_pairs,
    require_length,
    require_text,
)

Batched = Prompts | Mapping[str, Any]  # several prompts, or a tokenizer's batch
PASS_TOKENS = 4096  # padded tokens of several texts that share a pass


class Lens:
    """Reads states of a model through a bank, or directly if there is none (the logit lens)."""

    def __init__(
        self,
        transformer: Transformer,
        bank: ShortcutBank | None = None,
        *,
        other_model: bool = False,
    ) -> None:
        """Read through a bank of this model; or, with `other_model`, of one like it."""
        if not isinstance(transformer, Transformer):
            raise BadSettings(
                f"a lens needs a wrapped model, not a {type(transformer).__name__}; wrap it with "
                "layerleap.load(model)"
            )
        if bank is not None and other_model:
            bank = bank.lent_to(transformer)
        if bank is not None:
            bank.check_model(transformer)
        # Each map is on the device of its layer, so reading never moves a matrix.
        self.transformer, self.bank = transformer, bank.to(transformer.device) if bank else None

    @property
    def name(self) -> str:
        """The kind of its maps: `logit` without a bank, else such as `linear` or `tuned`."""
        return IdentityMap.kind if self.bank is None else self.bank.kind

    @property
    def title(self) -> str:
        """The name in words, such as "logit lens"."""
        return kind_named(self.name).title

    def check_model(self) -> None:
        """Raise `WrongModel` if the weights were changed since the lens was made."""
        self.transformer.refresh()
        if self.bank is not None:
            self.bank.check_model(self.transformer)

    def caveats(self) -> list[str]:
        """What limits every result read through this lens, a sentence each."""
        identity = self.transformer.identity.to_dict()
        return caveats(identity if self.bank is None else self.bank.model)

    def map(self, layer: int) -> Map:
        """The map from `layer` to the last layer."""
        last = self.transformer.n_layers
        return IdentityMap(layer, last) if self.bank is None else self.bank[layer, last]

    @torch.no_grad()  # not inference mode: a probe may be trained on the result
    def logits(self, h: Tensor, layer: int) -> Tensor:
        """The logits that rows of h[layer] predict: (row, d_model) -> (row, d_vocab)."""
        if h.shape[-1] != self.transformer.d_model:
            raise BadSettings(
                f"got states of {tuple(h.shape)}; expected (row, {self.transformer.d_model})"
            )
        return self.transformer.logits(self.map(layer)(h))

    @overload
    def read(
        self, text: OnePrompt, *, positions: Sequence[int] | None = None, top_k: int = 5
    ) -> Readings: ...

    @overload
    def read(
        self, text: Batched, *, positions: Sequence[int] | None = None, top_k: int = 5
    ) -> Several[Readings]: ...

    def read(
        self, text: Any, *, positions: Sequence[int] | None = None, top_k: int = 5
    ) -> Readings | Several[Readings]:
        """Every layer's reading of a prompt, through this lens and through the logit lens.

        Args:
            text: a text, chat messages or token ids. For masked models it should contain the mask
                token. Several of them, or a tokenizer's batch, give as many readings. For an
                encoder-decoder, a tuple (source, target): the target is read.
            positions: which tokens to read; negative ones count from the end. By default all, or
                only the masked ones if there are any.
        """
        texts = several(self.transformer, text)
        if texts is None:
            return self.read_batch([text], positions=positions, top_k=top_k)[0]
        return Several(self.read_batch(texts, positions=positions, top_k=top_k))

    def read_batch(
        self, texts: Sequence[Any], *, positions: Sequence[int] | None = None, top_k: int = 5
    ) -> list[Readings]:
        """Readings of several texts in shared passes; each is the same as if read alone."""
        if self.transformer.kind.endswith("-class"):  # often fewer classes than the default
            top_k = min(top_k, self.transformer.d_vocab)
        if not 1 <= top_k <= self.transformer.d_vocab:
            raise BadSettings(
                f"top_k {top_k} is out of range; expected 1 to {self.transformer.d_vocab}"
            )
        self.check_model()
        model, identity = self.transformer.model, self.transformer.identity
        # Hooks may see the padding, and loose laws let rows depend on each other.
        if len(texts) > 1 and (foreign_code(model) or identity.loosened):
            return [self.read_batch([one], positions=positions, top_k=top_k)[0] for one in texts]
        examples = self._examples(texts, positions)
        last, name = self.transformer.n_layers, self.transformer.output_name
        logit = Lens(self.transformer)
        lenses = {logit.name: logit} | ({self.name: self} if self.bank is not None else {})
        readings = {}
        for batch in iter_batches(self.transformer, examples, tokens_per_batch=PASS_TOKENS):
            states = self.transformer.capture(batch.inputs, keep=batch.keep).states
            tracks = {key: track(lens, states, top_k) for key, lens in lenses.items()}
            for number in batch.documents.unique().tolist():
                rows = batch.documents == number
                of_text = {key: value.rows(rows) for key, value in tracks.items()}
                ids, places = list(examples[number].ids), list(examples[number].keep)
                following = [self._following(ids, place) for place in places]
                limits = self.caveats()
                readings[number] = Readings(
                    self._tokens(ids), places, last, of_text, name, limits, following
                )
        return [readings[number] for number in range(len(texts))]

    def _following(self, ids: list[int], position: int) -> int:
        """The id of the token after a position, or -1 where the model predicts something else."""
        is_known = self.transformer.kind == "next-token" and position + 1 < len(ids)
        return ids[position + 1] if is_known else -1

    def saturation(
        self, text: OnePrompt, *, positions: Sequence[int] | None = None, k: int = 5
    ) -> SaturationLayers:
        """The saturation layer of each of the top k tokens at every position.

        Args:
            text: a text, chat messages or token ids. For masked models it should contain the mask
                token.
            positions: which tokens to read, as in `read`.
        """
        from layerleap.lens.saturation import require_ranks  # imported here: it imports this module

        if self.transformer.kind.endswith("-class"):
            k = min(k, self.transformer.d_vocab)
        require_ranks(self.transformer, k)
        (readings,) = self.read_batch([text], positions=positions, top_k=k)
        return readings.saturation()

    def _examples(self, texts: Sequence[Any], positions: Sequence[int] | None) -> list[Example]:
        """The token ids of each text, and the positions to read."""
        if not texts:
            raise BadText("no text to read; expected at least one")
        examples = []
        for number, text in enumerate(texts):
            with numbered(number + 1, len(texts)):
                source, ids = self._encode(text)
                places = self.positions(ids, positions)
            examples.append(Example(number, tuple(ids), tuple(places), source=tuple(source)))
        return examples

    def last_position(self, text: OnePrompt) -> int:
        """The last position that `read` reads by default: the last token, or the last mask."""
        return self.positions(self.encode(text))[-1]

    def encode(self, text: OnePrompt) -> list[int]:
        """The token ids of one prompt that this model can read."""
        return self._encode(text)[1]

    def _encode(self, text: Any) -> tuple[list[int], list[int]]:
        """Token ids of the encoder, if there is one, and of the text that is read."""
        if reads_pairs(self.transformer):
            source, ids = encode_pair(self.transformer, *as_pair(self.transformer, text))
        else:
            require_text(self.transformer)
            source, ids = [], without_padding(self.transformer, encode(self.transformer, text))
        require_length(self.transformer, max(len(source), len(ids)))
        return source, ids

    def positions(self, ids: list[int], positions: Sequence[int] | None = None) -> list[int]:
        """The positions to read: by default all, the masked ones, or the pooled one."""
        if self.transformer.pooling is not None:
            is_pooled = self.transformer.pooled(torch.ones(1, len(ids)))[0]
            pooled: list[int] = is_pooled.nonzero()[:, 0].tolist()
            if positions is not None and sorted({p % len(ids) for p in positions}) != pooled:
                raise BadSettings(
                    f"{self.transformer.identity.name} classifies whole texts: omit positions"
                )
            return pooled
        if positions is None:
            mask = getattr(self.transformer.tokenizer, "mask_token_id", None)
            is_masked = self.transformer.kind == "masked-token" and mask is not None
            masked = [p for p, token in enumerate(ids) if is_masked and token == mask]
            return masked or list(range(len(ids)))
        if not positions:
            raise BadSettings("no position to read; name at least one, or omit positions for all")
        for position in positions:
            if not -len(ids) <= position < len(ids):
                raise BadSettings(
                    f"position {position} does not exist: the text has {len(ids)} tokens"
                )
        return sorted({position % len(ids) for position in positions})

    def _tokens(self, ids: list[int]) -> list[str]:
        tokenizer: Any = self.transformer.tokenizer
        return [str(token) if tokenizer is None else tokenizer.decode([token]) for token in ids]


@torch.no_grad()
def track(lens: Lens, states: dict[int, Tensor], top_k: int) -> LensReadings:
    """The readings of every layer at the given rows, reduced to the entries of `LensReadings`.

    All layers of a few rows go through the head in one product: it is by far the largest matrix,
    and it is read from memory once per product. The last layer comes first, because the others
    are compared with it.
    """
    transformer, last = lens.transformer, lens.transformer.n_layers
    parts = []
    for rows in chunks(len(states[last]), (last + 1) * transformer.d_vocab):
        mapped = [lens.map(layer)(states[layer][rows]) for layer in (last, *range(last))]
        stacked = torch.cat([state.to(mapped[0].device) for state in mapped])
        sweep = Sweep(len(mapped[0]), top_k)
        for part in chunks(len(stacked), transformer.d_vocab):
            sweep.add(transformer.logits(stacked[part]).float())
        parts.append(vars(sweep.track()).values())
    readings = LensReadings(*(torch.cat(columns, dim=1) for columns in zip(*parts, strict=True)))
    for layer in range(last + 1):
        require_finite(readings.layer(layer), f"lens {lens.name!r}", layer)
    return readings


@overload
def read(
    transformer: Transformer,
    text: OnePrompt,
    *,
    bank: ShortcutBank | str | Path | None = "default",
    other_model: bool = False,
    positions: Sequence[int] | None = None,
    top_k: int = 5,
    progress: Progress | bool = True,
) -> Readings: ...


@overload
def read(
    transformer: Transformer,
    text: Batched,
    *,
    bank: ShortcutBank | str | Path | None = "default",
    other_model: bool = False,
    positions: Sequence[int] | None = None,
    top_k: int = 5,
    progress: Progress | bool = True,
) -> Several[Readings]: ...


@checked
def read(
    transformer: Transformer,
    text: Any,
    *,
    bank: ShortcutBank | str | Path | None = "default",
    other_model: bool = False,
    positions: Sequence[int] | None = None,
    top_k: int = 5,
    progress: Progress | bool = True,
) -> Readings | Several[Readings]:
    """What every layer would say at every position of a text: logit lens and shortcuts.

        readings = ll.read(model, "The capital of France is")
        readings.to_pandas()
        ll.read(model, ["One prompt", "Another one"])[1]
        ll.read(model, [{"role": "user", "content": "Name a colour."}])  # a chat

    Args:
        text: what to read: a text (for a masked model, with its mask token), chat messages or
            token ids. Several of them, or a tokenizer's batch, give as many readings.
        bank: shortcuts of the model, or their folder or hub name. "default" is the bank in the
            cache, fitted on first use; None reads through the logit lens alone.
        other_model: allow a bank of another model of the same class and width, with a warning.
        positions: which tokens to read, negative from the end; all of them when None.
    """
    opened = find_bank(transformer, bank, other_model=other_model, progress=progress)
    return Lens(transformer, opened).read(text, positions=positions, top_k=top_k)


def require_finite(compared: Comparison | LensReadings, reader: str, layer: int) -> None:
    """Raise `NotFinite` if some logits were not finite, which shows in KL and surprisal."""
    require_none(~(compared.kl.isfinite() & compared.surprisal.isfinite()), reader, layer)


def require_none(bad: Tensor, reader: str, layer: int) -> None:
    """Raise `NotFinite` if a row is bad: its logits are not finite."""
    if bad.any():
        raise NotFinite(
            f"NaN or infinite logits of {reader} at layer {layer} in {int(bad.sum())} of "
            f"{len(bad)} rows; use a wider dtype, or fit the map on more rows"
        )


def chunks(n_rows: int, d_vocab: int) -> Iterator[slice]:
    """Slices of rows whose logits fit the budget; results do not depend on the size."""
    size = rows_at_once(d_vocab)
    for start in range(0, n_rows, size):
        yield slice(start, min(start + size, n_rows))


CACHED = 2**18  # entries that are exponentiated at a time: 1 MB in float32
COLUMNS = 2**11  # terms of a mean that are added up in one product


class Sweep:
    """The readings of one lens, layer after layer, at the same rows."""

    def __init__(self, n_rows: int, k: int) -> None:
        """Start without layers; the top `k` tokens will be kept of each."""
        self.n_rows, self.k = n_rows, k
        self._parts: list[tuple[Tensor, ...]] = []

    def add(self, logits: Tensor) -> None:
        """Add the logits of one layer or several, each with all rows: (layer x row, d_vocab)."""
        values, ids = top_k(logits, self.k)
        log_norm = _log_norm(logits, values[:, 0])
        n, top = self.n_rows, ids[:, 0]
        if not self._parts:
            self._answer, self._top, self._log_norm = logits[:n].clone(), top[:n], log_norm[:n]
            self._p = (self._answer - self._log_norm[:, None]).exp_()
        expected = self._expected(logits)
        rows = torch.arange(len(logits), device=logits.device) % n
        surprisal = self._log_norm[rows] - self._answer[rows, top]
        probs, agrees = (values - log_norm[:, None]).exp(), top == self._top[rows]
        columns = ids, probs, agrees, log_norm - expected, surprisal
        self._parts.append(tuple(column.unflatten(0, (-1, n)) for column in columns))

    def _expected(self, logits: Tensor) -> Tensor:
        """The mean of each row of logits under the answer's probabilities.

        One product serves all layers of a row. It covers few columns, because rounding errors grow
        with the number of terms that are added one by one.
        """
        n, total = self.n_rows, torch.zeros(len(logits), device=logits.device)
        for some, p in zip(logits.split(COLUMNS, 1), self._p.split(COLUMNS, 1), strict=True):
            total += torch.stack([some[row::n] @ p[row] for row in range(n)], 1).flatten()
        return total

    def track(self) -> LensReadings:
        """What was read, with the last layer at its end."""
        columns = (torch.cat(parts).roll(-1, 0).cpu() for parts in zip(*self._parts, strict=True))
        ids, probs, agrees, cross, surprisal = columns
        # A divergence is the cross-entropy beyond the entropy of the answer, which is that of the
        # answer with itself. Clamped because rounding can push it slightly below zero.
        return LensReadings(ids, probs, agrees, (cross - cross[-1]).clamp_min(0), surprisal)


def _log_norm(logits: Tensor, highest: Tensor) -> Tensor:
    """`logsumexp` of each row whose highest value is known, a few rows at a time."""
    few = max(1, CACHED // logits.shape[-1])
    pairs = zip(logits.split(few), highest[:, None].split(few), strict=True)
    return highest + torch.cat([(some - high).exp_().sum(-1) for some, high in pairs]).log()
