"""Texts drawn from the model itself, for models of which no corpus is at hand.

In: a wrapped model; for masked models, a few dozen real sequences to start from.
Out: a .jsonl file in the cache, one document per chain, the same for the same seed.

A masked model resamples: a fifth of the tokens of each sequence is masked, and new ones are
drawn from its own distribution; each round gives one more text, and every so often a chain
starts again from its real sequence, so that texts stay near it. A next-token model simply
writes. Results on such texts speak about the model's own idea of its data, and reports say so.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerleap.errors import BadSettings, BadText
from layerleap.files import cache_root, whole_file
from layerleap.models.discovery.probe import ready
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.stream.examples import longest_input
from layerleap.stream.texts import iter_documents
from layerleap.zoo.reactions import REACTIONS

METHOD = 2  # raised when the same settings would draw other texts
NOTE = (
    "The texts were drawn from the model itself (masked resampling from real sequences, or free "
    "writing), because no corpus for it is at hand: the figures say how well layers foretell the "
    "model on its own idea of the data."
)


@dataclass(frozen=True)
class Drawing:
    """How texts are drawn; plain values, part of the cache key."""

    n_texts: int = 12_000
    share: float = 0.2  # of a sequence's tokens, resampled per round
    rounds: int = 16  # after which a chain starts again from its real sequence
    max_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.n_texts, self.rounds, self.max_tokens) < 1:
            raise BadSettings(f"n_texts, rounds and max_tokens must be 1 or more: {self}")
        if not 0 < self.share <= 1:
            raise BadSettings(f"share {self.share} is not a share; above 0 and up to 1 was wanted")


def drawn(
    transformer: Transformer,
    drawing: Drawing | None = None,
    *,
    starts: str | Path | None = None,
    progress: Progress = silent,
) -> Path:
    """The file of drawn texts, made now unless it is in the cache.

    Args:
        transformer: the model to draw from.
        drawing: how many texts, and how.
        starts: real sequences for a masked model; reactions when None, if it can read them.
        progress: told about every round.
    """
    drawing = drawing or Drawing()
    if transformer.tokenizer is None:
        raise BadText(f"{transformer.identity.name} has no tokenizer, so no text can be drawn")
    if transformer.kind == "class" or transformer.model.config.is_encoder_decoder:
        raise BadSettings(f"{transformer.identity.name} cannot write texts of its own")
    real = _starts(transformer, starts) if transformer.kind == "masked-token" else []
    key = json.dumps([METHOD, transformer.identity.fingerprint, asdict(drawing), real])
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    path = cache_root() / "drawn" / f"{name}.jsonl"
    if not path.exists():
        rounds = (
            _resampled(transformer, drawing, real, progress)
            if transformer.kind == "masked-token"
            else _written(transformer, drawing, progress)
        )
        _write(path, rounds)
    return path


def _starts(transformer: Transformer, starts: str | Path | None) -> list[str]:
    if starts is not None:
        return [document.text for document in iter_documents(starts)]
    tokenizer: Any = transformer.tokenizer
    texts = [smiles for _, smiles in REACTIONS]
    unknown = sum(tokenizer.unk_token_id in ids for ids in tokenizer(texts)["input_ids"])
    if unknown > len(texts) // 10 or tokenizer.vocab_size > 5000:
        raise BadText(
            f"{transformer.identity.name} needs real sequences to start from: name a text of your "
            "own, or a file of a few dozen sequences with --starts"
        )
    return texts


def _write(path: Path, rounds: Iterable[Sequence[str]]) -> None:
    """One document per chain, texts as paragraphs."""
    chains: dict[int, list[str]] = {}
    for texts in rounds:
        for chain, text in enumerate(texts):
            if text.strip():
                chains.setdefault(chain, []).append(text.strip())
    with whole_file(path) as temporary, temporary.open("w", encoding="utf8") as out:
        for chain, texts in chains.items():
            record = {"name": f"chain {chain}", "text": "\n\n".join(texts)}
            out.write(json.dumps(record, ensure_ascii=False) + "\n")


@torch.inference_mode()
def _resampled(
    transformer: Transformer, drawing: Drawing, starts: list[str], progress: Progress
) -> Iterator[list[str]]:
    tokenizer: Any = transformer.tokenizer
    encoded = tokenizer(
        starts, padding=True, truncation=True, max_length=_length(transformer, drawing),
        padding_side="right", return_tensors="pt",
    )  # fmt: skip
    real, mask = encoded["input_ids"], encoded["attention_mask"]
    special = torch.tensor(tokenizer.all_special_ids)
    fixed = torch.isin(real, special) | (mask == 0)
    generator = torch.Generator().manual_seed(drawing.seed)
    ids = real
    for done in range(-(-drawing.n_texts // len(starts))):
        if done % drawing.rounds == 0:
            ids = real.clone()
        chosen = (torch.rand(ids.shape, generator=generator) < drawing.share) & ~fixed
        hidden = ids.masked_fill(chosen, tokenizer.mask_token_id)
        inputs = ready(transformer.model, {"input_ids": hidden, "attention_mask": mask})
        logits = transformer.model(**inputs).logits[chosen.to(transformer.model.device)]
        logits = logits.float().cpu().index_fill(1, special, -torch.inf)
        ids = ids.clone()
        ids[chosen] = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        progress("drawing texts", (done + 1) * len(starts), drawing.n_texts)
        yield _decoded(tokenizer, ids, mask)


def _length(transformer: Transformer, drawing: Drawing) -> int:
    return min(drawing.max_tokens, longest_input(transformer))


def _decoded(tokenizer: Any, ids: Tensor, mask: Tensor) -> list[str]:
    rows = [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


@torch.inference_mode()
def _written(transformer: Transformer, drawing: Drawing, progress: Progress) -> Iterator[list[str]]:
    """Free writing from the first token of a text, plain sampling from the whole distribution."""
    tokenizer: Any = transformer.tokenizer
    model: Any = transformer.model
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if first is None:
        raise BadText("the tokenizer knows no first token of a text, so nothing can be drawn")
    end = tokenizer.eos_token_id
    how = _plain_sampling(_length(transformer, drawing), end)
    size = 64
    with torch.random.fork_rng(devices=[]), _own_defaults(model):
        torch.manual_seed(drawing.seed)
        for done in range(-(-drawing.n_texts // size)):
            start = torch.full((size, 1), first, device=model.device)
            ids = model.generate(
                start, attention_mask=torch.ones_like(start), generation_config=how
            )
            progress("drawing texts", (done + 1) * size, drawing.n_texts)
            rows = [_until(row[1:], end) for row in ids.tolist()]
            yield tokenizer.batch_decode(rows, skip_special_tokens=True)


def _plain_sampling(length: int, end: int | None) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, temperature=1.0, max_length=length,
        eos_token_id=end, pad_token_id=0 if end is None else end,
    )  # fmt: skip


@contextmanager
def _own_defaults(model: Any) -> Iterator[None]:
    """Set aside what the checkpoint says about generation: it fills in whatever we leave open."""
    from transformers import GenerationConfig

    before = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before


def _until(ids: list[int], end: int | None) -> list[int]:
    """What stands before the first `end`; after it there is only padding."""
    return ids[: ids.index(end)] if end in ids else ids
