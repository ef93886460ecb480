"""Top-k attention: memory and time of one layer, and decoding with a long context.

One layer is attention of 12 heads of 64, causal, forward and backward, float32, as transformers
calls it. Each measurement of memory runs in its own process
(`python benchmarks/topk_attention.py WAY LENGTH`): the peak while it runs, minus what the process
takes with its inputs. Eager attention is run only where its peak, four times that at half the
length, is expected to fit into 16 GiB and into the memory that is free.

Decoding is greedy and exact; at every step the other ways choose a token for the same text, too.
"""

import math
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

from common import MODEL, Row, interleave, median

from layerleap.memory import peak_memory

HEADS, WIDTH, K, CHUNK = 12, 64, 128, 1024
LENGTHS, SMALL = (2048, 4096, 8192, 16384), (512, 1024)
WAYS = ("top-k", "recompute", "chunked", "sdpa", "eager")
LIMIT = 16 * 1024  # MiB for eager attention
SPARE = 2 * 1024  # MiB that stay free
CONTEXTS, SMALL_CONTEXTS = (1024, 4096, 8000), (96, 128, 160)
AGREEMENT = 0.99


def run(*, smoke: bool) -> list[Row]:
    """Rows for memory, its growth, time, closeness at large k, and decoding."""
    lengths = SMALL if smoke else LENGTHS
    peaks = _peaks(("top-k", "eager") if smoke else WAYS, lengths)
    return [*_memory_rows(peaks), _time_row(lengths[-2], smoke), _closeness(lengths[0]),
            *_decoding_rows(smoke)]  # fmt: skip


def _peaks(ways: tuple[str, ...], lengths: tuple[int, ...]) -> dict[str, dict[int, float]]:
    """MiB by way and length; eager attention is left out where it would not fit."""
    peaks: dict[str, dict[int, float]] = {way: {} for way in ways}
    for way in ways:
        for length in lengths:
            if way == "eager" and not _fits(peaks[way], length):
                continue
            peaks[way][length] = _peak_of_child(way, length)
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


def _peak_of_child(way: str, length: int) -> float:
    command = [sys.executable, __file__, way, str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{way} attention over {length} tokens failed: {last}")
    return float(done.stdout.strip().splitlines()[-1])


def _memory_rows(peaks: dict[str, dict[int, float]]) -> list[Row]:
    longest = max(peaks["eager"])
    ours = peaks["top-k"]
    detail = {
        "k": K, "chunk": CHUNK, "peaks_mib": peaks, "length": longest,
        "exponents": {way: _exponent(own) for way, own in peaks.items() if len(own) > 1},
    }  # fmt: skip
    note = f"forward and backward of one layer, {HEADS} heads of {WIDTH}, causal"
    return [
        Row(
            "topk_memory", ours[longest], peaks["eager"][longest], "MiB", 20, ">=",
            over="peer/ours",
            detail={**detail, "note": f"{note}; eager (peer) at the longest length it can run"},
        ),
        Row(
            "topk_memory_growth", _exponent(ours), None, "exponent of length", 1.1, "<=", "ours",
            detail={**detail, "note": f"{note}; memory grows as length to this power"},
        ),
    ]  # fmt: skip


def _exponent(peaks: dict[int, float]) -> float:
    """The slope of log memory over log length, by least squares."""
    import numpy as np

    return float(np.polyfit(np.log(list(peaks)), np.log(list(peaks.values())), 1)[0])


def _time_row(length: int, smoke: bool) -> Row:
    inputs = _inputs(length)
    ways = {way: _layer(way) for way in ("top-k", "chunked", "checkpointed", "sdpa")}
    sides = {way: lambda _, run=run: run(*inputs) for way, run in ways.items()}
    times = interleave(sides, 1 if smoke else 3)
    best = min(("chunked", "checkpointed"), key=lambda way: median(times[way]))
    return Row(
        "topk_time", median(times["top-k"]), median(times[best]), "seconds", 1.5, "<=",
        detail={
            "note": f"forward and backward of one layer over {length} tokens; exact attention in "
            "chunks (peer) is the faster of ours and of eager attention that is checkpointed "
            "chunk by chunk",
            "peer_is": best, "samples": times, "k": K, "chunk": CHUNK,
        },
    )  # fmt: skip


def _closeness(length: int) -> Row:
    """The largest difference to exact attention where k is the length, gradients included."""
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
    return Row(
        "topk_closeness", gaps[0], None, "largest difference", 1e-5, "<=", "ours",
        detail={
            "note": f"k at the length ({length}) against sdpa, float32",
            "gradients": dict(zip(("query", "key", "value"), gaps[1:], strict=True)),
        },
    )  # fmt: skip


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
        seen = query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop]
        chunks.append(checkpoint(attend, *seen, start, use_reentrant=False))
    return torch.cat(chunks, 2).transpose(1, 2)


def _decoding_rows(smoke: bool) -> list[Row]:
    contexts, tokens, texts = (SMALL_CONTEXTS, 4, 1) if smoke else (CONTEXTS, 64, 3)
    found = {context: _decoded(context, tokens, texts, smoke) for context in contexts}
    last = found[contexts[-1]]
    paged = {way: own for way, own in last.items() if way.startswith("pages")}
    good = {way: own for way, own in paged.items() if own["agreement"] >= AGREEMENT}
    # The fastest that agrees well enough; if there is none, the one that agrees most.
    way = (
        max(good, key=lambda one: good[one]["tokens_per_second"])
        if good
        else max(paged, key=lambda one: paged[one]["agreement"])
    )
    detail = {
        "way": way, "context": contexts[-1], "steps": tokens * texts, "texts": texts,
        "by_context": {str(context): own for context, own in found.items()},
    }  # fmt: skip
    note = "greedy decoding over a DynamicCache, the model's own text behind the prompt; "
    return [
        Row(
            "topk_decoding_speed", last[way]["tokens_per_second"],
            last["sdpa"]["tokens_per_second"], "tokens/s", 1, ">=",
            detail={**detail, "note": note + "page selection (ours) and sdpa (peer)"},
        ),
        Row(
            "topk_decoding_agreement", last[way]["agreement"], None, "agreement", AGREEMENT, ">=",
            "ours", detail={**detail, "note": note + "steps at which both choose the same token"},
        ),
    ]  # fmt: skip


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


def _decoded(context: int, tokens: int, n_texts: int, smoke: bool) -> dict[str, dict[str, float]]:
    """Tokens per second, agreement and KL of every way, over the same steps."""
    import torch

    transformer, ways = _decoder(smoke), _ways(smoke)
    steps: dict[str, list[tuple[float, bool, float]]] = {way: [] for way in ways}
    for number, prompt in enumerate(_prompts(transformer, context, n_texts, smoke)):
        with torch.no_grad():
            cache, exact = _exact(transformer, prompt, tokens)
            for way in ways if number % 2 == 0 else reversed(ways):
                steps[way] += _steps(transformer, ways[way], cache, *exact)
    return {
        way: {
            "tokens_per_second": 1 / median(seconds for seconds, _, _ in own),
            "agreement": sum(agrees for _, agrees, _ in own) / len(own),
            "kl": sum(kl for _, _, kl in own) / len(own),
        }
        for way, own in steps.items()
    }


def _exact(transformer: Any, prompt: Any, tokens: int) -> tuple[Any, tuple[list[Any], list[Any]]]:
    """The cache of a prompt without its last token, the tokens of each step, and what they say."""
    import copy

    from transformers import DynamicCache

    model, cache = transformer.model, DynamicCache()
    for part in prompt[:, :-1].split(CHUNK, 1):
        model(part, past_key_values=cache)
    given, said, own = [prompt[:, -1:]], [], copy.deepcopy(cache)
    for _ in range(tokens):
        said.append(model(given[-1], past_key_values=own).logits[0, -1].log_softmax(-1))
        given.append(said[-1].argmax().view(1, 1))
    return cache, (given[:-1], said)


def _steps(
    transformer: Any, edit: Any, cache: Any, given: list[Any], said: list[Any]
) -> list[tuple[float, bool, float]]:
    """Seconds, agreement and KL of every step but the first, which summarises the cache."""
    import copy

    own, steps = copy.deepcopy(cache), []
    with nullcontext() if edit is None else transformer.edit(edit):
        for token, exact in zip(given, said, strict=True):
            started = time.perf_counter()
            logits = transformer.model(token, past_key_values=own).logits[0, -1]
            seconds = time.perf_counter() - started
            kl = (exact.exp() * (exact - logits.log_softmax(-1))).sum()
            steps.append((seconds, bool(logits.argmax() == exact.argmax()), float(kl)))
    return steps[1:]


@cache
def _decoder(smoke: bool) -> Any:
    import torch

    from layerleap import load

    if not smoke:
        return load(MODEL, dtype=torch.float32)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=64,
    )  # fmt: skip
    return load(LlamaForCausalLM(config).eval())


def _prompts(transformer: Any, context: int, n_texts: int, smoke: bool) -> list[Any]:
    """Prompts of so many tokens, each from different articles."""
    import torch

    from layerleap import iter_documents

    if smoke:
        return [torch.randint(3, 200, (1, context)) for _ in range(n_texts)]
    prompts, ids = [], []
    for document in iter_documents("wikipedia"):
        ids += transformer.tokenizer(document.text, verbose=False).input_ids
        if len(ids) >= context:
            prompts.append(torch.tensor([ids[:context]]))
            ids = []
        if len(prompts) == n_texts:
            break
    return prompts


def layer(way: str, length: int) -> None:
    """Run one layer and print its peak memory, in MiB, beyond that of its inputs."""
    run, inputs = _layer(way), _inputs(length)
    _layer("sdpa")(*_inputs(CHUNK // 8))  # what a library allocates at its first use
    with suppress(OSError):  # the peak starts anew, from what is in use
        Path("/proc/self/clear_refs").write_text("5")
    base = peak_memory() or 0.0
    run(*inputs)
    print((peak_memory() or 0.0) - base)


if __name__ == "__main__":
    layer(sys.argv[1], int(sys.argv[2]))
