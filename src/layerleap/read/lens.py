"""Lens: a map to the last layer, then the model's own tail; what each layer would say.

In: a wrapped model, and a bank of shortcuts or nothing (the logit lens).
Out: logits for states of any layer, and `Readings` of texts.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerleap.errors import BadSettings, BadText, NotFinite
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.linear import IdentityMap, LinearMap
from layerleap.models.transformer import Transformer
from layerleap.read.metrics import Answer, Comparison
from layerleap.read.readings import Readings, Track
from layerleap.read.top import top_k
from layerleap.stream.examples import Batch, Example, collate, longest_input, require_text

if TYPE_CHECKING:
    from layerleap.read.strip import Strip

ENTRIES = 2**23  # logits held at a time: 32 MB in float32


class Lens:
    """Reads states of a model through a bank, or as they are when there is none."""

    def __init__(self, transformer: Transformer, bank: ShortcutBank | None = None) -> None:
        if bank is not None:
            bank.check_model(transformer)
        # Each map lives where its layer lives, so that reading never moves a matrix.
        self.transformer, self.bank = transformer, bank.to(transformer.device) if bank else None

    @property
    def name(self) -> str:
        """`mat` with a bank, `tuned` if its maps were trained, `id` without."""
        if self.bank is None:
            return "id"
        return "tuned" if self.bank.settings.get("lens") == "tuned" else "mat"

    def map(self, layer: int) -> LinearMap | IdentityMap:
        """The map from `layer` to the last."""
        last = self.transformer.n_layers
        return IdentityMap(layer, last) if self.bank is None else self.bank[layer, last]

    @torch.no_grad()  # not inference mode: a probe may be trained on what comes out
    def logits(self, h: Tensor, layer: int) -> Tensor:
        """What rows of h[layer] would say: (row, d_model) -> (row, d_vocab)."""
        return self.transformer.logits(self.map(layer)(h))

    def read(
        self,
        text: str | Sequence[int],
        *,
        positions: Sequence[int] | None = None,
        top_k: int = 5,
    ) -> Readings:
        """Every layer's reading of `text`, through this lens and through the logit lens.

        Args:
            text: a string, or token ids. For masked models it should contain the mask token.
            positions: which tokens to read, negative ones from the end; when None, all of them,
                or just the masked ones if there are any.
            top_k: how many tokens to keep per reading.
        """
        return self.read_batch([text], positions=positions, top_k=top_k)[0]

    def read_batch(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        positions: Sequence[int] | None = None,
        top_k: int = 5,
    ) -> list[Readings]:
        """Readings of several texts in one forward pass; each is as if it were read alone."""
        if not 1 <= top_k <= self.transformer.d_vocab:
            raise BadSettings(f"top_k {top_k} is not in 1 to {self.transformer.d_vocab}")
        encoded, kept, batch = self._batch(texts, positions)
        seen = self.transformer.capture(batch.inputs, keep=batch.keep)
        tracks = {name: track(lens, seen.states, top_k) for name, lens in self._and_plain().items()}
        found = []
        for number, (ids, keep) in enumerate(zip(encoded, kept, strict=True)):
            rows = batch.documents == number
            cut = {name: value.rows(rows) for name, value in tracks.items()}
            found.append(
                Readings(self._tokens(ids), keep, self.transformer.n_layers, cut, self._token)
            )
        return found

    def saturation(
        self, text: str | Sequence[int], *, positions: Sequence[int] | None = None, k: int = 5
    ) -> "Strip":
        """From which layer on each of the k best tokens of a position stands where it ends.

        Args:
            text: a string, or token ids. For masked models it should contain the mask token.
            positions: which tokens to read, as in `read`.
            k: how many ranks.
        """
        from layerleap.read.saturation import saturate  # both read with lenses themselves
        from layerleap.read.strip import Strip

        encoded, kept, batch = self._batch([text], positions)
        tracks = saturate(self.transformer, self._and_plain(), [batch], k=k)
        tokens, last = self._tokens(encoded[0]), self.transformer.n_layers
        return Strip(tokens, kept[0], last, k, tracks, self._token)

    def _and_plain(self) -> dict[str, "Lens"]:
        """The logit lens, and this lens if it is another."""
        return {"id": Lens(self.transformer)} | ({self.name: self} if self.bank is not None else {})

    def _batch(
        self, texts: Sequence[str | Sequence[int]], positions: Sequence[int] | None
    ) -> tuple[list[list[int]], list[list[int]], Batch]:
        """The ids of texts, the positions to read in each, and both as one batch."""
        require_text(self.transformer)
        if not texts:
            raise BadText("there is no text to read; at least one was wanted")
        encoded = [self._encode(text) for text in texts]
        kept = [self._positions(ids, positions) for ids in encoded]
        examples = [
            Example(n, tuple(ids), tuple(keep))
            for n, (ids, keep) in enumerate(zip(encoded, kept, strict=True))
        ]
        return encoded, kept, collate(self.transformer, examples)

    def last_position(self, text: str | Sequence[int]) -> int:
        """The last position that `read` would read by itself: the last token, or the last mask."""
        require_text(self.transformer)
        return self._positions(self._encode(text), None)[-1]

    def _encode(self, text: str | Sequence[int]) -> list[int]:
        tokenizer = self.transformer.tokenizer
        if isinstance(text, str):
            if tokenizer is None:
                raise BadText(f"{self.transformer.identity.name} has no tokenizer; give token ids")
            _require_characters(text)
            text = tokenizer(text)["input_ids"] if text else []  # not the special tokens alone
        ids = [int(token) for token in text]
        if not ids:
            raise BadText("the text is empty; at least one token was wanted")
        if len(ids) > (limit := longest_input(self.transformer)):
            raise BadText(f"the text has {len(ids)} tokens; this model reads at most {limit}")
        known = getattr(self.transformer.model.get_input_embeddings(), "num_embeddings", None)
        if known and not all(0 <= token < known for token in ids):
            raise BadText(f"a token id is not in 0 to {known - 1}, the ids that this model knows")
        return ids

    def _positions(self, ids: list[int], wanted: Sequence[int] | None) -> list[int]:
        if wanted is None:
            mask = getattr(self.transformer.tokenizer, "mask_token_id", None)
            is_masked = self.transformer.kind == "masked-token" and mask is not None
            masked = [p for p, token in enumerate(ids) if is_masked and token == mask]
            return masked or list(range(len(ids)))
        if not wanted:
            raise BadSettings("no position to read; name at least one, or leave them out for all")
        for position in wanted:
            if not -len(ids) <= position < len(ids):
                raise BadSettings(
                    f"position {position} does not exist: the text has {len(ids)} tokens"
                )
        return sorted({position % len(ids) for position in wanted})

    def _tokens(self, ids: list[int]) -> list[str]:
        return [self._token(token) for token in ids]

    def _token(self, token: int) -> str:
        tokenizer: Any = self.transformer.tokenizer
        return str(token) if tokenizer is None else tokenizer.decode([token])


def _require_characters(text: str) -> None:
    """Refuse half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode("utf8")
    except UnicodeEncodeError as error:
        raise BadText(
            f"character {error.start} of the text is half a surrogate pair "
            f"(U+{ord(text[error.start]):04X}), as wrongly decoded bytes give; give valid Unicode"
        ) from error


@torch.no_grad()
def track(lens: Lens, states: dict[int, Tensor], top_k: int) -> Track:
    """The readings of every layer at the given rows, reduced to what is kept."""
    last = lens.transformer.n_layers
    parts = []
    for rows in chunks(len(states[last]), lens.transformer.d_vocab):
        answer = Answer(lens.transformer.logits(states[last][rows]))
        layers = []
        for layer in range(last + 1):
            logits = lens.logits(states[layer][rows], layer).float()
            compared = answer.compare(logits.to(answer.p.device))
            require_finite(compared, f"lens {lens.name!r}", layer)
            best = _top(logits, top_k)
            layers.append((*best, compared.rank == 0, compared.kl, compared.surprisal))
        parts.append(
            [torch.stack([values.cpu() for values in kind]) for kind in zip(*layers, strict=True)]
        )
    return Track(*(torch.cat(kind, dim=1) for kind in zip(*parts, strict=True)))


def require_finite(compared: Comparison, reader: str, layer: int) -> None:
    """Raise `NotFinite` if a reading was; its measures tell, so the logits need no second look."""
    bad = ~(compared.kl.isfinite() & compared.surprisal.isfinite())
    if bad.any():
        raise NotFinite(
            f"NaN or infinite logits of {reader} at layer {layer} in {int(bad.sum())} of "
            f"{len(bad)} rows; look for a dtype too narrow, or a map fitted on too few rows"
        )


def _top(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids and probabilities of the k best; equal logits in order of id."""
    values, ids = top_k(logits, k)
    return ids, (values - logits.logsumexp(-1, keepdim=True)).exp()


def chunks(n_rows: int, d_vocab: int) -> Iterator[slice]:
    """Slices of rows whose logits fit the budget; results do not depend on the cut."""
    size = max(1, ENTRIES // d_vocab)
    for start in range(0, n_rows, size):
        yield slice(start, min(start + size, n_rows))
