"""A small language model with the tokenizer of another one, trained from scratch.

In: a tokenizer, texts and settings. Out: a model with tied embeddings and rotary positions, in eval
mode: Llama, whose FFNs are gated, or GPT-NeoX with plain ReLU FFNs.

A small text has a fraction of a large vocabulary, and the softmax over all of it would take most of
the time. So only tokens that occur often enough have an embedding; the rows of all others stay 0,
and so do their logits. The softmax over the whole vocabulary is then that over the known tokens and
one more class of constant size, computed exactly:

    log p(token) = logit - log(sum over known tokens of exp(logit) + number of unknown tokens)

Rare tokens of the text are unknown, too, so the model learns how likely an unknown token is. Sums
over tokens, such as E^T E, skip unknown ones by themselves.

The same settings, machine and number of threads give the same weights. Held-out texts are not used.
"""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from layerleap.zoo.reviews import HELD_OUT, SHORT, is_held_out
from layerleap.zoo.training_loop import optimize

logger = logging.getLogger(__name__)

FFN = Literal["gated", "relu"]
TELL_STEPS = 100  # steps between two messages


@dataclass(frozen=True)
class LMSettings:
    """Model shape and training; plain values, written into the model card."""

    layers: int = 6
    d_model: int = 128
    heads: int = 4
    ffn: FFN = "gated"  # Llama's gated FFNs with SiLU, or plain ones with ReLU
    context: int = 128  # tokens of a training window
    review_length: int = SHORT  # characters; shorter film reviews are trained on, too
    least_count: int = 5  # rarer tokens of the texts are unknown
    epochs: int = 2
    batch: int = 8
    rate: float = 2e-3  # peak learning rate; warmed up, then a cosine decay
    decay: float = 0.05  # weight decay
    tested_tokens: int = 20_000  # held-out tokens that the loss in the card is measured on
    seed: int = 0


def small_lm(
    sources: Mapping[str, Path], folder: Path, settings: LMSettings | None = None
) -> dict[str, Any]:
    """Train a small language model on articles and reviews; returns what goes into its card.

    The loss in the card is that on held-out articles.
    """
    from transformers import AutoConfig, AutoTokenizer

    settings = settings or LMSettings()
    tokenizer = AutoTokenizer.from_pretrained(sources["smollm2"])
    n_vocabulary = int(AutoConfig.from_pretrained(sources["smollm2"]).vocab_size)
    fitted, held_out = (token_stream(tokenizer, texts) for texts in sides_of(sources["wikipedia"]))
    reviews, _ = sides_of(sources["reviews"])
    short = [text for text in reviews if len(text) <= settings.review_length]
    fitted = torch.cat([fitted, token_stream(tokenizer, short)])
    known = known_tokens(fitted, settings.least_count)
    logger.info(
        f"training on {len(fitted):,} tokens for {settings.epochs} epochs; {len(known):,} of "
        f"{n_vocabulary:,} tokens are known"
    )
    model = train_lm(fitted, known, n_vocabulary, tokenizer, settings)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return {
        "held_out": lm_loss(model, held_out[: settings.tested_tokens], settings.context),
        "held_out_share": HELD_OUT,
        "known_tokens": len(known),
        "settings": asdict(settings),
    }


def sides_of(path: Path) -> tuple[list[str], list[str]]:
    """The texts to train on and the held-out ones, split as documents are for a fit."""
    sides: tuple[list[str], list[str]] = ([], [])
    with path.open(encoding="utf8") as lines:
        for line in lines:
            text = json.loads(line)["text"]
            sides[is_held_out(text)].append(text)
    return sides


def token_stream(tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """The ids of all texts in a row, each ended by the end-of-text token."""
    ids: list[int] = []
    for text in texts:
        # A whole article is longer than the limit that the tokenizer would warn about.
        ids += tokenizer(text, verbose=False)["input_ids"]
        ids.append(tokenizer.eos_token_id)
    return torch.tensor(ids, dtype=torch.long)


def known_tokens(stream: Tensor, least_count: int) -> Tensor:
    """The ids that occur at least so often, in order."""
    return (stream.bincount() >= least_count).nonzero()[:, 0]


def train_lm(
    stream: Tensor,
    known: Tensor,
    n_vocabulary: int,
    tokenizer: Any,
    settings: LMSettings,
) -> Any:
    """A causal language model trained on a stream of tokens."""
    # Trained with the known tokens alone: number len(known) stands for all others.
    number = torch.full((n_vocabulary,), len(known))
    number[known] = torch.arange(len(known))
    compact = number[stream]
    n_unknown = n_vocabulary - len(known)
    steps = settings.epochs * math.ceil(len(stream) // settings.context / settings.batch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = _new(len(known) + 1, len(known), tokenizer, settings)

        def losses() -> Iterator[Tensor]:
            for step, window in enumerate(_windows(compact, settings), start=1):
                yield (loss := token_losses(model, window, n_unknown).mean())
                if step % TELL_STEPS == 0:
                    logger.info(f"step {step:,} of about {steps:,}, loss {loss.item():.3f}")

        optimize(model, losses(), settings, steps, max(1, steps // 20), betas=(0.9, 0.95))
        return _whole(model, known, n_vocabulary, tokenizer, settings)


def token_losses(model: Any, window: Tensor, n_unknown: int) -> Tensor:
    """-log p of every token of (row, pos) after the first, over the whole vocabulary.

    The last number of the model's vocabulary stands for `n_unknown` tokens whose logits are 0.
    """
    h = model.base_model(input_ids=window[:, :-1], use_cache=False).last_hidden_state
    table = model.get_input_embeddings().weight[:-1]
    logits = h.reshape(-1, h.shape[-1]) @ table.T
    targets = window[:, 1:].reshape(-1, 1)
    is_known = targets[:, 0] < len(table)
    chosen = logits.gather(1, targets.clamp_max(len(table) - 1))[:, 0]
    rest = torch.full_like(chosen, math.log(max(n_unknown, 1e-30)))
    return torch.logaddexp(logits.logsumexp(-1), rest) - torch.where(is_known, chosen, 0.0)


def _windows(stream: Tensor, settings: LMSettings) -> Iterator[Tensor]:
    """Batches of windows in random order, cut at another place in each epoch."""
    n, width = len(stream), settings.context
    for _ in range(settings.epochs):
        start = int(torch.randint(0, width, ()))
        count = (n - start - 1) // width
        starts = start + width * torch.randperm(count)
        for chosen in starts.split(settings.batch):
            yield stream[chosen[:, None] + torch.arange(width + 1)]


def _new(n_vocabulary: int, pad: int, tokenizer: Any, settings: LMSettings) -> Any:
    """An untrained model; the row of the padding token is 0 and gets no gradient."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

    shared: dict[str, Any] = {
        "vocab_size": n_vocabulary,
        "hidden_size": settings.d_model,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "pad_token_id": pad,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    model: Any
    if settings.ffn == "relu":
        config = GPTNeoXConfig(
            **shared,
            intermediate_size=4 * settings.d_model,
            hidden_act="relu",
            use_parallel_residual=False,
            rotary_pct=1.0,
        )
        model = GPTNeoXForCausalLM(config)
    else:
        gated = {"num_key_value_heads": settings.heads, "intermediate_size": 3 * settings.d_model}
        model = LlamaForCausalLM(LlamaConfig(**shared, **gated, attention_dropout=0.0))
    with torch.no_grad():
        model.get_input_embeddings().weight[pad] = 0
    return model


@torch.no_grad()
def _whole(
    model: Any, known: Tensor, n_vocabulary: int, tokenizer: Any, settings: LMSettings
) -> Any:
    """The same model with the whole vocabulary: zero rows for unknown tokens."""
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    whole = _new(n_vocabulary, pad, tokenizer, settings)
    table = torch.zeros(n_vocabulary, settings.d_model)
    table[known] = model.get_input_embeddings().weight[:-1]
    # Tied: the same matrix under two names.
    wide = {name for name, value in whole.state_dict().items() if value.shape == table.shape}
    weights = model.state_dict()
    whole.load_state_dict({name: table if name in wide else weights[name] for name in weights})
    return whole.eval()


@torch.inference_mode()
def lm_loss(model: Any, stream: Tensor, context: int) -> dict[str, Any]:
    """The mean of -log p over a stream of tokens cut into windows, in nats."""
    total, count = 0.0, 0
    device = next(model.parameters()).device  # of the embeddings, which come first
    for window in stream.split(context):
        if len(window) > 1:
            logits = model(input_ids=window[None].to(device), use_cache=False).logits[0, :-1]
            targets = window[1:].to(logits.device)
            # In half precision the sum would have two or three digits.
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            total += float(nn.functional.cross_entropy(wide, targets, reduction="sum"))
            count += len(window) - 1
    return {"tokens": count, "loss": total / max(count, 1)}
