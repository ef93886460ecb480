"""Documents turned into token batches, each with the positions to read.

In: documents, a wrapped model's tokenizer, and how to cut and choose (`Sampling`).
Out: `Batch`es in an order that depends only on text, settings and seed, so that a run can be
resumed, sharded or repeated.

Padding is always on the right and masked, whatever the tokenizer's default: with causal attention
and absolute positions counted from 0, it cannot affect a real token.
"""

import hashlib
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from layerleap.errors import BadSettings, BadText, check_choice
from layerleap.models.inputs import padded, without_padding
from layerleap.models.prompts import encode_pair
from layerleap.models.transformer import Transformer
from layerleap.short_repr import ShortRepr
from layerleap.stream.documents import Document, iter_documents
from layerleap.stream.sampling import (
    EveryNth,
    OnePerText,
    Sampling as Sampling,  # part of this module's names, too
    parse_positions,
)
from layerleap.stream.split import Side, fingerprint, is_held_out, iter_texts, on_side
from layerleap.stream.text_pairs import iter_pairs

POOL_DOCUMENTS, POOL_CHARACTERS = 1024, 2**24  # limits of the pool that texts alternate over
DENSEST_MASKS = 7  # masked models are trained with about one token in seven masked
# Config fields for the length of the position table; the last one is for speech decoders.
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
TOKENISED = 16  # texts of a document at a time, at most
WINDOW = 2048  # examples sorted by length at a time: little padding, constant memory


@dataclass(frozen=True)
class Example:
    """One text as token ids; `keep` lists the positions to read."""

    document: int
    ids: tuple[int, ...]
    keep: tuple[int, ...]
    ridge_rows: bool = False  # reserved for choosing the ridge
    gold: tuple[int, ...] = ()  # correct token at each kept position, -1 unknown; () if all are
    source: tuple[int, ...] = ()  # what the encoder reads, if `ids` are those of a decoder


@dataclass(frozen=True, repr=False)
class Batch(ShortRepr):
    """Right-padded inputs and, in row-major order, where each kept row comes from."""

    index: int
    inputs: dict[str, Tensor]
    keep: Tensor  # bool (batch, pos)
    documents: Tensor  # (row,)
    positions: Tensor  # (row,)
    ridge_rows: Tensor  # bool (row,)
    n_texts: int
    n_tokens: int
    gold: Tensor | None = None  # (row,): correct token or class; -1 unknown, None if all are

    def texts(self, chosen: Tensor) -> "Batch":
        """The texts selected by a mask, with unneeded padding removed."""
        mask = self.mask[chosen]
        width = int(mask.sum(1).max())
        inputs = {
            name: value[chosen] if isinstance(value, Tensor) else value
            for name, value in self.cut(width).items()
        }
        rows = chosen[self.text_of_row]
        return Batch(
            self.index,
            inputs,
            self.keep[chosen][:, :width],
            self.documents[rows],
            self.positions[rows],
            self.ridge_rows[rows],
            int(chosen.sum()),
            int(mask.sum()),
            None if self.gold is None else self.gold[rows],
        )

    def cut(self, width: int) -> dict[str, Any]:
        """The inputs truncated to `width` positions.

        Pixels, sound features and all inputs of an encoder stay whole, even if the encoder's
        input happens to be as long as the decoder's.
        """
        prefix = "decoder_" if any(name.startswith("decoder_") for name in self.inputs) else ""

        def has_positions(name: str, value: Any) -> bool:
            same_shape = isinstance(value, Tensor) and value.shape == self.keep.shape
            return same_shape and name.startswith(prefix)

        return {
            name: value[:, :width] if has_positions(name, value) else value
            for name, value in self.inputs.items()
        }

    @property
    def text_of_row(self) -> Tensor:
        """The text that each row comes from: (row,).

        A head that pools positions makes one row of all kept positions of a text.
        """
        texts = self.keep.nonzero()[:, 0]
        return texts if len(texts) == len(self.documents) else texts.unique()

    @property
    def mask(self) -> Tensor:
        """1 for real positions, 0 for padding: (batch, pos)."""
        for name in ("decoder_attention_mask", "attention_mask"):
            if name in self.inputs:
                return self.inputs[name]
        return torch.ones_like(self.keep, dtype=torch.long)  # images are never padded


@dataclass
class TextCounts:
    """Counts what has been read so far, and a fingerprint of it."""

    documents: int = 0
    texts: int = 0
    tokens: int = 0
    rows: int = 0
    digest: Any = field(default_factory=hashlib.sha256, repr=False)
    leave_out: Collection[int] = ()  # fingerprints of documents that must not be read
    left_out: int = 0  # how many of them there were
    marks: dict[int, int] = field(default_factory=dict, repr=False)  # fingerprints, by document
    used: set[int] = field(default_factory=set, repr=False)  # those that were read

    def admits(self, document: int, content: str | bytes) -> bool:
        """True unless the document must be left out."""
        self.marks[document] = fingerprint(content)
        is_out = self.marks[document] in self.leave_out
        self.left_out += is_out
        return not is_out

    def use(self, document: int) -> None:
        """Count a document that is being read."""
        self.used.add(self.marks[document])

    def note(self, tokens: int, rows: int, content: bytes) -> None:
        """Count one text, image or clip."""
        self.texts += 1
        self.tokens += tokens
        self.rows += rows
        self.digest.update(content)

    def note_example(self, example: Example) -> None:
        """Count one example."""
        content = repr((example.ids, example.keep)).encode()
        self.note(len(example.ids), len(example.keep), content)

    def to_dict(self) -> dict[str, Any]:
        """The counts, and a fingerprint of ids and positions."""
        counts = {key: getattr(self, key) for key in ("documents", "texts", "tokens", "rows")}
        return {**counts, "fingerprint": self.digest.hexdigest()[:32]}


def iter_examples(
    transformer: Transformer,
    source: Any,
    sampling: Sampling,
    *,
    side: Side = "fit",
    n_texts: int | None = None,
    text_counts: TextCounts | None = None,
    ridge_share: float = 0.0,
) -> Iterator[Example]:
    """The examples of one side of a text; a hash of each document decides its side.

    Args:
        transformer: its tokenizer and kind decide how a text is encoded and masked.
        source: anything `iter_documents` accepts.
        sampling: how to cut texts and choose positions.
        side: use the documents to fit on, the held-out ones, or both.
        n_texts: stop after that many texts.
        text_counts: counts what is read.
        ridge_share: share of the fitting documents that is held back to choose a ridge.
    """
    check_choice(side, Side, "side")
    encoder = _Encoder(transformer, sampling)
    text_counts = text_counts if text_counts is not None else TextCounts()

    def documents_of_side() -> Iterator[tuple[Document, Iterator[Example]]]:
        iterate = iter_pairs if reads_pairs(transformer) else iter_documents
        for number, document in enumerate(iterate(source, field=sampling.field)):
            held_out = is_held_out(document, share=sampling.held_out, seed=sampling.seed)
            if not (on_side(side, held_out) and text_counts.admits(number, document.text)):
                continue
            ridge_rows = is_held_out(document, share=ridge_share, seed=sampling.seed + 1)
            yield document, encoder.examples(document, number, ridge_rows)

    numbers: set[int] = set()
    for example in islice(_alternate(documents_of_side()), n_texts):
        numbers.add(example.document)
        text_counts.use(example.document)
        text_counts.documents = len(numbers)
        text_counts.note_example(example)
        yield example


def _alternate(streams: Iterator[tuple[Document, Iterator[Example]]]) -> Iterator[Example]:
    """Examples from a bounded pool of documents, one document after the other.

    The first n texts then come from as many documents as possible, not from the first few.
    """
    pool: deque[tuple[int, Iterator[Example]]] = deque()
    size = 0
    for document, examples in streams:
        pool.append((len(document.text), examples))
        size += len(document.text)
        while len(pool) >= POOL_DOCUMENTS or size > POOL_CHARACTERS:
            size -= yield from _turn(pool)
    while pool:
        yield from _turn(pool)


def _turn(pool: deque[tuple[int, Iterator[Example]]]) -> Generator[Example, None, int]:
    """Yield the next example of the first document; returns the length that left the pool."""
    length, examples = pool.popleft()
    for example in examples:
        pool.append((length, examples))
        yield example
        return 0
    return length


def require_text(transformer: Transformer) -> None:
    """Raise an error if the model's input is not a single text."""
    if transformer.model.main_input_name != "input_ids" or reads_pairs(transformer):
        raise BadSettings(
            f"{transformer.identity.name} reads images, sound or two texts at once; expected a "
            "language model or text classifier, which reads one text"
        )


def reads_pairs(transformer: Transformer) -> bool:
    """True for an encoder-decoder of texts."""
    model = transformer.model
    return model.main_input_name == "input_ids" and bool(model.config.is_encoder_decoder)


class _Encoder:
    """Documents as examples of one model, which can read them and mask them as asked for."""

    def __init__(self, transformer: Transformer, sampling: Sampling) -> None:
        self.transformer, self.sampling = transformer, sampling
        self.tokenizer: Any = transformer.need_tokenizer()
        self.policy = parse_positions(sampling.positions, sampling.seed)
        self.is_masked = transformer.kind == "masked-token"
        if not reads_pairs(transformer):
            require_text(transformer)
        if self.is_masked:
            self._require_masks()
        special = self.tokenizer.num_special_tokens_to_add()
        if sampling.max_tokens <= special:  # the tokenizer would then not cut at all
            raise BadSettings(
                f"max_tokens is {sampling.max_tokens}, but the tokenizer adds {special} special "
                f"tokens; expected at least {special + 1}"
            )
        self.limit = min(sampling.max_tokens, longest_input(transformer))

    def _require_masks(self) -> None:
        policy = self.policy
        if self.tokenizer.mask_token_id is None:
            name = self.transformer.identity.name
            raise BadText(f"the tokenizer of {name} has no mask token; pass tokenizer=...")
        # All are masked at once, and the rest must leave some context.
        if isinstance(policy, EveryNth) and policy.n < DENSEST_MASKS:
            raise BadSettings(
                f"positions '{policy}' would mask {1 / policy.n:.0%} of a text at once, but masked "
                "models are trained with about 15 %; use 'one', or "
                f"'every:{DENSEST_MASKS}' and above"
            )

    def examples(self, document: Document, number: int, ridge_rows: bool) -> Iterator[Example]:
        """The examples of a document, each made when it is asked for."""
        for text, ids, source in self._tokenized(document):
            ids, keep, gold = self._chosen(text, ids)
            if keep:
                yield Example(number, tuple(ids), tuple(keep), ridge_rows, tuple(gold), source)

    def _tokenized(self, document: Document) -> Iterator[tuple[str, list[int], tuple[int, ...]]]:
        """Each text of a document, its ids, and what the encoder reads if it is one of a pair."""
        if document.target:
            pair = document.text, document.target
            source, ids = (part[: self.limit] for part in encode_pair(self.transformer, *pair))
            yield "\t".join(pair), ids, tuple(source)
            return
        how = self.sampling
        texts = iter_texts(document, how.unit, per_document=how.per_document, seed=how.seed)
        size = 1  # often only the first text is read, so tokenise more only as more are asked for
        # Tokenizers reject lone surrogates, which come from escaped JSON; they become "?".
        while chunk := [t.encode("utf8", "replace").decode("utf8") for t in islice(texts, size)]:
            size = min(2 * size, TOKENISED)
            encoded = self.tokenizer(
                chunk, truncation=True, max_length=self.limit, return_attention_mask=False
            )
            for text, ids in zip(chunk, encoded["input_ids"], strict=True):
                yield text, list(ids), ()

    def _chosen(self, text: str, ids: list[int]) -> tuple[list[int], list[int], list[int]]:
        """The ids that the model reads, the positions to read, and the right answers if known."""
        transformer, policy = self.transformer, self.policy
        if transformer.pooling is not None:  # the head decides which positions it reads
            ids = without_padding(transformer, ids)
            keep = transformer.pooled(torch.ones(1, len(ids)))[0].nonzero()[:, 0].tolist()
            return ids, keep, []
        is_token_class = transformer.kind == "token-class"
        skips = (self.is_masked or is_token_class) and not self.sampling.include_special
        special = set(self.tokenizer.all_special_ids) if skips else set()
        keep = policy.choose([p for p, token in enumerate(ids) if token not in special], text)
        if not keep or is_token_class:
            return ids, keep, []
        if self.is_masked:
            gold = [ids[position] for position in keep]
            for position in keep:
                ids[position] = self.tokenizer.mask_token_id
        else:  # the next token, read before the ids are truncated
            gold = [ids[p + 1] if p + 1 < len(ids) else -1 for p in keep]
            if isinstance(policy, OnePerText):
                ids = ids[: keep[0] + 1]  # later tokens do not affect a causal state
        return ids, keep, gold


def longest_input(transformer: Transformer) -> int:
    """The longest input that the model's position table allows, in tokens."""
    config = transformer.model.config.get_text_config()
    limits = [getattr(config, name, None) for name in LENGTHS]
    known = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    # Models like RoBERTa count positions from after the padding id, which their table knows.
    tables = (
        module
        for path, module in transformer.model.named_modules()
        if path.endswith("position_embeddings") and hasattr(module, "padding_idx")
    )
    offset = next((t.padding_idx + 1 for t in tables if t.padding_idx is not None), 0)
    return min(known, default=10**9) - offset


def require_length(transformer: Transformer, n: int, what: str = "the text has") -> None:
    """Refuse an input of more tokens than the model reads."""
    if n > (limit := longest_input(transformer)):
        raise BadText(f"{what} {n} tokens; this model reads at most {limit}")


def iter_batches(
    transformer: Transformer, examples: Iterable[Example], *, tokens_per_batch: int = 1024
) -> Iterator[Batch]:
    """Batches of at most `tokens_per_batch` padded tokens; texts of similar length go together."""
    stream, index = iter(examples), 0
    while window := list(islice(stream, WINDOW)):
        window.sort(key=lambda example: len(example.ids))  # stable, so the order is reproducible
        start = 0
        while start < len(window):
            stop = start + 1
            while stop < len(window) and _padded(window, start, stop) <= tokens_per_batch:
                stop += 1
            yield collate(transformer, window[start:stop], index)
            index, start = index + 1, stop


def _padded(window: list[Example], start: int, stop: int) -> int:
    return len(window[stop].ids) * (stop + 1 - start)


def collate(transformer: Transformer, examples: list[Example], index: int = 0) -> Batch:
    """A batch of these examples, padded on the right, with the padding masked."""
    inputs = padded(transformer, [example.ids for example in examples])
    mask = inputs["attention_mask"]
    if examples[0].source:
        sources = padded(transformer, [example.source for example in examples])
        inputs = {**sources, **{f"decoder_{name}": value for name, value in inputs.items()}}
    keep = torch.zeros_like(mask, dtype=torch.bool)
    for row, example in enumerate(examples):
        keep[row, list(example.keep)] = True
    rows, positions = keep.nonzero(as_tuple=True)
    if transformer.row_kind != "position":  # one row per text
        rows, positions = torch.arange(len(examples)), keep.int().argmax(1)
    gold = None
    if any(example.gold for example in examples):
        gold = torch.tensor([g for e in examples for g in e.gold or (-1,) * len(e.keep)])
    return Batch(
        index,
        inputs,
        keep,
        torch.tensor([example.document for example in examples])[rows],
        positions,
        torch.tensor([example.ridge_rows for example in examples])[rows],
        len(examples),
        int(mask.sum()),
        gold,
    )
