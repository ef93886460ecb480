"""Top-k attention: memory and time of one layer, and decoding with a long context.

One layer is attention of 12 heads of 64, causal, forward and backward, float32, as transformers
calls it. Each measurement of memory runs in its own process
(`python benchmarks/topk_attention.py WAY LENGTH`): the peak while it runs, minus what the process
takes with its inputs. Eager attention is run only where its peak, four times that at half the
length, is expected to fit into 16 GiB and into the memory that is free.

Decoding reads an article token by token; at every step each way says which token it would choose.
"""

import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from common import MODEL, Row, child, fresh_peak, interleave, median, tiny

from layerleap.memory import peak_memory

HEADS, WIDTH, K, CHUNK = 12, 64, 128, 1024
LENGTHS, SMALL = (2048, 4096, 8192, 16384), (512, 1024)
WAYS = ("top-k", "recompute", "chunked", "sdpa", "eager")
LIMIT = 16 * 1024  # MiB for eager attention
SPARE = 2 * 1024  # MiB that stay free
CONTEXTS, SMALL_CONTEXTS = (1024, 4096, 8000), (96, 128, 160)
AGREEMENT = 0.99
ROUNDS = {16384: 1}  # which takes minutes
Step = tuple[float, bool, float]  # seconds, whether it agrees, KL


def run(*, smoke: bool) -> list[Row]:
    """Rows for memory, its growth, time, closeness at large k, and decoding."""
    lengths = SMALL if smoke else LENGTHS
    peaks = _peaks(("top-k", "eager") if smoke else WAYS, lengths)
    return [
        *_memory_rows(peaks),
        _time_row(lengths, smoke),
        _closeness(lengths[0]),
        *_decoding_rows(smoke),
    ]


def _peaks(ways: tuple[str, ...], lengths: tuple[int, ...]) -> dict[str, dict[int, float]]:
    """MiB by way and length; eager attention is left out where it would not fit."""
    peaks: dict[str, dict[int, float]] = {way: {} for way in ways}
    for way in ways:
        for length in lengths:
            if way == "eager" and not _fits(peaks[way], length):
                continue
            peaks[way][length] = child(__file__, way, length)
    return peaks


def _fits(known: dict[int, float], length: int) -> bool:
    """Scores are quadratic: twice the length takes four times the memory."""
    if not known:
        return True
    longest = max(known)
    expected = known[longest] * (length / longest) ** 2
    return expected <= min(LIMIT, _free() - SPARE)


def _free() -> float:
    """MiB of memory that can be used without swapping."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return math.inf
    line = next(one for one in info.read_text().splitlines() if one.startswith("MemAvailable"))
    return int(line.split()[1]) / 1024


def _memory_rows(peaks: dict[str, dict[int, float]]) -> list[Row]:
    longest = max(peaks["eager"])
    ours = peaks["top-k"]
    detail = {
        "k": K,
        "chunk": CHUNK,
        "peaks_mib": peaks,
        "length": longest,
        "exponents": {way: _exponent(by) for way, by in peaks.items() if len(by) > 1},
    }
    note = f"forward and backward of one layer, {HEADS} heads of {WIDTH}, causal"
    size = {**detail, "note": f"{note}; eager (peer) at the longest length it can run"}
    growth = {**detail, "note": f"{note}; memory grows as length to this power"}
    sides, unit = (ours[longest], peaks["eager"][longest]), "exponent of length"
    return [
        Row("topk_memory", *sides, "MiB", at_least=20, over="peer/ours", detail=size),
        Row("topk_memory_growth", _exponent(ours), None, unit, at_most=1.1, detail=growth),
    ]


def _exponent(peaks: dict[int, float]) -> float:
    """The slope of log memory over log length, by least squares."""
    import numpy as np

    return float(np.polyfit(np.log(list(peaks)), np.log(list(peaks.values())), 1)[0])


def _time_row(lengths: tuple[int, ...], smoke: bool) -> Row:
    """The length at which top-k attention is slowest, compared with exact attention in chunks."""
    times = {length: _times(length, 1 if smoke else ROUNDS.get(length, 3)) for length in lengths}
    medians = {length: {way: median(by[way]) for way in by} for length, by in times.items()}
    peers = {
        length: min(("chunked", "checkpointed"), key=lambda way, by=by: by.get(way, math.inf))
        for length, by in medians.items()
    }
    worst = max(lengths, key=lambda n: medians[n]["top-k"] / medians[n][peers[n]])
    detail = {
        "note": f"forward and backward of one layer over {worst} tokens, the length at which "
        "the ratio is worst; exact attention in chunks (peer) is the faster of ours and of "
        "eager attention that is checkpointed chunk by chunk",
        "peers": peers,
        "seconds": medians,
        "samples": times,
        "k": K,
        "chunk": CHUNK,
    }
    sides = (medians[worst][way] for way in ("top-k", peers[worst]))
    return Row("topk_time", *sides, "seconds", at_most=1.5, detail=detail)


def _times(length: int, rounds: int) -> dict[str, list[float]]:
    inputs = _inputs(length)
    # Checkpointing is as slow at any length, and the longest takes minutes.
    names = ("top-k", "chunked", *(("checkpointed",) if length < LENGTHS[-1] else ()), "sdpa")

    def side(run: Callable[..., Any]) -> Callable[[int], None]:
        def once(_: int) -> None:
            for tensor in inputs:
                tensor.grad = None
            run(*inputs)

        return once

    sides = {name: side(_layer(name)) for name in names}
    sides["top-k"](0)  # warm-up
    return interleave(sides, rounds)


def _closeness(length: int) -> Row:
    """The largest difference to exact attention where k is the length; gradients are listed."""
    import torch

    inputs = _inputs(length)
    results = []
    for way in ("all keys", "sdpa"):
        for tensor in inputs:
            tensor.grad = None
        output = _layer(way)(*inputs)
        results.append([output, *(tensor.grad for tensor in inputs)])
    gaps = [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]
    assert all(torch.isfinite(tensor).all() for tensor in results[0])
    detail = {
        "note": f"k at the length ({length}) against sdpa, float32",
        "gradients": dict(zip(("query", "key", "value"), gaps[1:], strict=True)),
    }
    return Row("topk_closeness", gaps[0], None, "largest difference", at_most=1e-5, detail=detail)


def _inputs(length: int) -> list[Any]:
    import torch

    torch.manual_seed(0)
    return [torch.randn(1, HEADS, length, WIDTH).requires_grad_() for _ in range(3)]


def _layer(way: str) -> Callable[..., Any]:
    """One layer, forward and backward, as transformers calls its implementations."""
    import torch
    from transformers import AttentionInterface
    from transformers.models.llama.modeling_llama import eager_attention_forward

    from layerleap import topk_attention

    module = torch.nn.Module().eval()
    module.num_key_value_groups = 1

    def attend(query: Any, key: Any, value: Any) -> Any:
        length, call = query.shape[2], {"scaling": WIDTH**-0.5, "dropout": 0.0}
        if way == "checkpointed":
            return _checkpointed(query, key, value)
        if way == "eager":
            lowest = torch.finfo(torch.float32).min
            mask = torch.full((1, 1, length, length), lowest).triu_(1)
            return eager_attention_forward(module, query, key, value, mask, **call)[0]
        name = {
            "sdpa": "sdpa",
            "top-k": topk_attention(min(K, length // 8), CHUNK),
            "recompute": topk_attention(min(K, length // 8), CHUNK, recompute=True),
            "chunked": topk_attention(2**30, CHUNK),
            "all keys": topk_attention(length, CHUNK),
        }[way]
        return AttentionInterface()[name](module, query, key, value, None, **call)[0]

    def both(*inputs: Any) -> Any:
        output = attend(*inputs)
        output.backward(torch.ones_like(output))
        return output.detach()

    return both


def _checkpointed(query: Any, key: Any, value: Any) -> Any:
    """Exact attention that keeps nothing: each chunk is computed again for its gradients."""
    import torch
    from torch.utils.checkpoint import checkpoint

    def attend(rows: Any, key: Any, value: Any, start: int) -> Any:
        scores = rows @ key.mT * WIDTH**-0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(start + 1)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value

    chunks = []
    for start in range(0, query.shape[2], CHUNK):
        stop = min(start + CHUNK, query.shape[2])
        visible = query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop]
        chunks.append(checkpoint(attend, *visible, start, use_reentrant=False))
    return torch.cat(chunks, 2).transpose(1, 2)


def _decoding_rows(smoke: bool) -> list[Row]:
    contexts, tokens, texts = (SMALL_CONTEXTS, 4, 2) if smoke else (CONTEXTS, 64, 4)
    by_context = {context: _decoded(context, tokens, texts, smoke) for context in contexts}
    last = by_context[contexts[-1]]
    paged = {way: parts["tried"] for way, parts in last.items() if way.startswith("pages")}
    good = [way for way, tried in paged.items() if tried["agreement"] >= AGREEMENT]
    # Chosen on some texts and reported on others: the fastest that agrees well enough; if there is
    # none, the one that agrees most.
    measure = "tokens_per_second" if good else "agreement"
    way = max(good or paged, key=lambda name: paged[name][measure])
    ours, peer = last[way]["reported"], last["sdpa"]["reported"]
    alone = _attention_alone(contexts[-1], _decoder(smoke))
    step = 1 / peer["tokens_per_second"]
    detail = {
        "way": way,
        "context": contexts[-1],
        "texts": texts,
        "steps": ours["steps"],
        "sdpa_seconds_per_step": step,
        "sdpa_seconds_in_attention": alone,
        "ratio_if_attention_were_free": step / (step - alone) if alone < step else None,
        "by_context": {str(context): ways for context, ways in by_context.items()},
    }
    note = "articles read token by token over a DynamicCache; "
    speed = {**detail, "note": note + "page selection (ours) and sdpa (peer)"}
    agreement = {**detail, "note": note + "steps at which both choose the same token"}
    rates, same = (side["tokens_per_second"] for side in (ours, peer)), ours["agreement"]
    return [
        Row("topk_decoding_speed", *rates, "tokens/s", at_least=1, detail=speed),
        Row(
            "topk_decoding_agreement", same, None, "agreement", at_least=AGREEMENT, detail=agreement
        ),
    ]


def _attention_alone(context: int, transformer: Any) -> float:
    """Seconds of one step that all layers together spend in sdpa, with keys and values at hand."""
    import torch

    config = transformer.model.config
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    width = config.hidden_size // heads
    query = torch.randn(1, heads, 1, width)
    layers = torch.randn(config.num_hidden_layers, 2, 1, keys, context, width)

    def once(_: int) -> None:
        for key, value in layers:
            torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    once(0)
    return median(interleave({"sdpa": once}, 15)["sdpa"])


def _ways(smoke: bool) -> dict[str, Any]:
    from layerleap.act.edits import Pages, TopKAttention

    if smoke:
        paged = TopKAttention(8, pages=Pages(4, 8))
        return {"sdpa": None, "top 8": TopKAttention(8), "pages 4x8 top 8": paged}
    ways: dict[str, Any] = {"sdpa": None}
    ways |= {f"top {k}": TopKAttention(k) for k in (64, 256, 1024)}
    for size, keep, k in ((16, 64, 256), (8, 256, 1024), (4, 512, 1024), (8, 512, 2048)):
        ways[f"pages {size}x{keep} top {k}"] = TopKAttention(k, pages=Pages(size, keep))
    return ways


def _decoded(context: int, tokens: int, n_texts: int, smoke: bool) -> dict[str, dict[str, Any]]:
    """Tokens per second, agreement and KL of every way: on texts to choose by, and on others."""
    import torch

    transformer, ways = _decoder(smoke), _ways(smoke)
    steps: dict[str, dict[str, list[Step]]] = {way: {"tried": [], "reported": []} for way in ways}
    for number, text in enumerate(_texts(transformer, context + tokens, n_texts, smoke)):
        with torch.no_grad():
            cache, exact = _exact(transformer, text, tokens)
            for way in ways if number % 4 < 2 else reversed(ways):
                part = steps[way]["reported" if number % 2 else "tried"]
                part += _steps(transformer, ways[way], cache, *exact)
    return {way: {part: _summary(parts[part]) for part in parts} for way, parts in steps.items()}


def _summary(steps: list[Step]) -> dict[str, Any]:
    from layerleap.lens.intervals import wilson

    same = sum(agrees for _, agrees, _ in steps)
    low, high = wilson(same, len(steps))
    return {
        "tokens_per_second": 1 / median(seconds for seconds, _, _ in steps),
        "agreement": same / len(steps),
        "agreement_interval": [low, high],
        "kl": sum(kl for _, _, kl in steps) / len(steps),
        "steps": len(steps),
    }


def _exact(transformer: Any, text: Any, tokens: int) -> tuple[Any, tuple[list[Any], list[Any]]]:
    """The cache of all but the last tokens, those tokens one by one, and what each step says."""
    import copy

    from transformers import DynamicCache

    model, cache = transformer.model, DynamicCache()
    for part in text[:, :-tokens].split(CHUNK, 1):
        model(part, past_key_values=cache)
    steps, own_cache = list(text[:, -tokens:].split(1, 1)), copy.deepcopy(cache)
    logits = [model(token, past_key_values=own_cache).logits[0, -1] for token in steps]
    return cache, (steps, [row.log_softmax(-1) for row in logits])


def _steps(
    transformer: Any, edit: Any, cache: Any, tokens: list[Any], expected: list[Any]
) -> list[Step]:
    """Seconds, agreement and KL of every step but the first, which summarises the cache."""
    import copy

    own_cache, steps = copy.deepcopy(cache), []
    with nullcontext() if edit is None else transformer.edit(edit):
        for token, exact in zip(tokens, expected, strict=True):
            started = time.perf_counter()
            logits = transformer.model(token, past_key_values=own_cache).logits[0, -1]
            seconds = time.perf_counter() - started
            kl = (exact.exp() * (exact - logits.log_softmax(-1))).sum()
            steps.append((seconds, bool(logits.argmax() == exact.argmax()), float(kl)))
    return steps[1:]


@cache
def _decoder(smoke: bool) -> Any:
    import torch

    from layerleap import load

    torch.manual_seed(0)
    return tiny(vocabulary=200) if smoke else load(MODEL, dtype=torch.float32)


def _texts(transformer: Any, length: int, n_texts: int, smoke: bool) -> list[Any]:
    """Texts of so many tokens, each from different articles."""
    import torch

    from layerleap import iter_documents

    if smoke:
        return [torch.randint(3, 200, (1, length)) for _ in range(n_texts)]
    texts, ids = [], []
    for document in iter_documents("wikipedia"):
        ids += transformer.tokenizer(document.text, verbose=False).input_ids
        if len(ids) >= length:
            texts.append(torch.tensor([ids[:length]]))
            ids = []
        if len(texts) == n_texts:
            break
    return texts


def layer(way: str, length: int) -> None:
    """Run one layer and print its peak memory, in MiB, beyond that of its inputs."""
    run, inputs = _layer(way), _inputs(length)
    _layer("sdpa")(*_inputs(CHUNK // 8))  # what a library allocates at its first use
    base = fresh_peak()
    run(*inputs)
    print((peak_memory() or 0.0) - base)


if __name__ == "__main__":
    layer(sys.argv[1], int(sys.argv[2]))
