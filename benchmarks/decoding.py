"""Decoding one text at a time: ours against the options of transformers, in one interleaved run.

Sides: `generate`, prompt lookup of few and of many tokens, early-exit drafts of transformers, our
exact decoder, our loop without exits, and early exit with a rule of about 95 % agreement, which
chooses tokens that exit early from a shortlist (and the same rule with the whole head). Prompts
come from both bundled texts and a few instructions; other instructions, of other kinds, show how
far the result depends on the prompts. In bfloat16 the exact sides run again.

Out: rows for exact decoding against `generate` and against the fastest exact option of
transformers, in both dtypes and on both sets of prompts, for the loop, and for early exit; how
often a text departs from that of `generate`, per 1,000 tokens; tokens per second of all sides,
tokens per pass, layers, agreement, peak memory, the cost of passes over several tokens, and the
limit set by reading the weights once per token.
"""

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from common import MODEL, Row, generate, median
from early_rule import early_rule

from layerleap import ShortcutBank, Transformer, decoder, load
from layerleap.act.decode.decoder import Head
from layerleap.act.decode.pass_cost import cost_of_passes
from layerleap.act.decode.prepared import WORTH
from layerleap.act.exits.rules import Never
from layerleap.maps.fit import default_bank
from layerleap.memory import peak_memory
from layerleap.models.cursor.packed import Packed
from layerleap.stream.documents import iter_documents
from layerleap.stream.examples import Sampling
from layerleap.stream.source import resolve_text

EARLY_LAYER = 20  # for transformers' early-exit drafts: the best of 10, 15, 20, 25 when first tried
LOOKUPS = (2, 10)  # tokens per prompt lookup of transformers; few work better on this machine
EARLY: dict[str, Head] = {"early": "shortlist", "early, whole head": "whole"}
INSTRUCTIONS = (
    "List five fruits and say what colour each of them has.",
    "Explain in simple words how a bicycle works.",
    "Write a short letter to a friend about the weather.",
    "Count from one to twenty in words.",
    # The instructions above are decoded; those below are for choosing exit rules.
    "Describe a quiet morning in a small town by the sea.",
    "Give three reasons why people keep dogs.",
    "How do I boil an egg so that the yolk stays soft?",
    "Name the seasons and say what the weather is like in each.",
    "Tell me a short story about a lost key.",
    "What is the difference between a lake and a river?",
    "Write a recipe for tomato soup with five steps.",
    "Explain to a child why the sky is blue.",
    "Suggest a plan for a weekend in the mountains.",
    "What should I pack for a week of rain?",
    "Write four lines about a train at night.",
    "List the tools that a gardener needs and what each is for.",
)
OTHERS = (  # of other kinds than the instructions above, and used for nothing else
    "Write a polite email that asks a landlord to repair a broken window.",
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "What are the advantages and drawbacks of working from home?",
    "Correct this sentence: she don't likes apples and he go to school every days.",
    "Summarise in one sentence: The sea rises and falls twice a day. The moon pulls the water "
    "towards it, and as the earth turns, every coast passes through the bulge.",
    "Plan a trip of three days to Rome, with one museum on each day.",
)

Results = dict[str, dict[str, list[Any]]]  # by side and prompt set: (tokens per second, stats)
Texts = dict[tuple[str, int], list[int]]  # by side and prompt: new tokens


def run(*, smoke: bool) -> Iterator[Row]:
    """Decode every prompt with every side, in bfloat16 and float32; rows as they are measured."""
    yield from _run_narrow(smoke)
    yield from _run_wide(smoke)


def _run_wide(smoke: bool) -> Iterator[Row]:
    tokens, per_set = (8, 1) if smoke else (96, 4)
    transformer, bank = _load("float32")
    prompts = prompts_of(transformer, per_set)
    apart: dict[str, list[torch.Tensor]] = {}
    for name, ids in prompts_of(transformer, per_set + (11 if smoke else 30)):
        if not any(torch.equal(ids, known) for _, known in prompts):
            apart.setdefault(name, []).append(ids)
    decoders, setup = _decoders(transformer, bank, apart, len(prompts))
    results, texts = _decode(transformer, decoders, prompts, tokens, per_set)
    yield from _rows(transformer, results, texts, setup)
    exact = {"exact": decoders["exact"]}
    others = _others(transformer, 1 if smoke else len(OTHERS))
    yield from _exact_rows(*_decode(transformer, exact, others, tokens), "other_prompts", 1.5)


def _run_narrow(smoke: bool) -> Iterator[Row]:
    tokens, per_set = (8, 1) if smoke else (96, 4)
    transformer, bank = _load("bfloat16")
    exact = {
        "exact": decoder(bank, transformer=transformer),
        "fast": decoder(bank, transformer=transformer, strict=False),
    }
    texts = Texts()
    for prompts, suffix, bar in (
        (prompts_of(transformer, per_set), "bfloat16", 1.8),
        (_others(transformer, 1 if smoke else len(OTHERS)), "other_prompts_bfloat16", 1.5),
    ):
        results, new = _decode(transformer, exact, prompts, tokens)
        yield from _exact_rows(results, new, suffix, bar)
        texts |= new
    sides = {side for side, _ in texts}
    peers = {side: departures(texts, side) for side in sorted(sides - {"generate"})}
    ours, fast, unit = peers.pop("exact"), peers.pop("fast"), "per 1,000 tokens"
    detail = {"fast": fast, "peers": peers, "texts": len(texts) // len(sides)}
    bar = min(peers.values())
    yield Row("departures_bfloat16", ours, None, unit, at_most=bar, detail=detail)


def _load(dtype: str) -> tuple[Transformer, ShortcutBank]:
    transformer = load(MODEL, dtype=dtype)
    # All sides then generate the same number of tokens; `min_new_tokens` would add a processor.
    transformer.model.generation_config.eos_token_id = None
    return transformer, default_bank(transformer)


def _decode(
    transformer: Transformer,
    decoders: dict[str, Any],
    prompts: list[tuple[str, torch.Tensor]],
    tokens: int,
    slow_every: int | None = None,
) -> tuple[Results, Texts]:
    """Time every side on every prompt; the order of sides alternates."""
    for _, options in _sides(decoders, with_slow=False):
        # Warm-up: what is prepared once per process is not timed.
        generate(
            transformer, [prompts[0][1]], WORTH if "custom_generate" in options else 1, options
        )
    results, texts = Results(), Texts()
    for number, (name, ids) in enumerate(prompts):
        sides = _sides(decoders, with_slow=slow_every is not None and number % slow_every == 0)
        for side, options in sides if number % 2 == 0 else reversed(sides):
            started = time.perf_counter()
            [out] = generate(transformer, [ids], tokens, options)
            seconds = time.perf_counter() - started
            account = options["custom_generate"].stats[0] if side in decoders else None
            if side in EARLY:  # holding it against the full model is not part of it
                seconds = account.prompt_seconds + account.seconds
            if side == "loop":
                inside = tokens / (account.prompt_seconds + account.seconds)
                results.setdefault("loop inside", {}).setdefault(name, []).append((inside, None))
            results.setdefault(side, {}).setdefault(name, []).append((tokens / seconds, account))
            texts[side, id(ids)] = out
    return results, texts


def departures(texts: Texts, side: str) -> float:
    """How often a side departs from the text of `generate`, per 1,000 tokens up to there."""
    departed = tokens = 0
    for (one, prompt), new in texts.items():
        if one == side:
            both = enumerate(zip(new, texts["generate", prompt], strict=True))
            place = next((n for n, (ours, theirs) in both if ours != theirs), None)
            departed += place is not None
            tokens += len(new) if place is None else place + 1
    return 1000 * departed / tokens


def _speeds(results: Results) -> dict[str, float]:
    """Tokens per second of each side: the mean over prompt sets of medians."""
    return {
        side: sum(median(rate for rate, _ in by) for by in sets.values()) / len(sets)
        for side, sets in results.items()
    }


def _exact_rows(results: Results, texts: Texts, suffix: str, bar: float) -> list[Row]:
    """Exact decoding against `generate` and against the fastest peer."""
    speed = _speeds(results)
    peers = {side: rate for side, rate in speed.items() if side not in ("exact", "fast")}
    accounts = [account for by in results["exact"].values() for _, account in by]
    detail = {
        "computed_in": "bfloat16" if "bfloat16" in suffix else "float32",
        "speeds": speed,
        "by_set": {
            s: {n: median(r for r, _ in by) for n, by in sets.items()}
            for s, sets in results.items()
        },
        "departures_per_1000": {s: departures(texts, s) for s in speed if s != "generate"},
        "tokens_per_pass": median(account.tokens_per_pass for account in accounts),
        "exactness": sorted({account.exactness for account in accounts}),
    }
    unit, about = "tokens/s", {"peers": peers}
    ours, peer, best = speed["exact"], speed["generate"], max(peers.values())
    return [
        Row(f"exact_over_generate_{suffix}", ours, peer, unit, at_least=bar, detail=detail),
        Row(f"exact_over_fastest_{suffix}", ours, best, unit, at_least=1.15, detail=about),
    ]


def prompts_of(transformer: Transformer, per_set: int) -> list[tuple[str, torch.Tensor]]:
    """The first words of documents of both texts, and instructions: (set, ids of (1, token))."""
    tokenizer: Any = transformer.tokenizer
    prompts = []
    for text in ("wikipedia", "news"):
        source, _ = resolve_text(transformer, text, Sampling())
        for _, document in zip(range(per_set), iter_documents(source), strict=False):
            words = " ".join(getattr(document, "text", document).split()[:40])
            prompts.append((text, torch.tensor([tokenizer(words)["input_ids"]])))
    prompts += [("instructions", _chat(tokenizer, words)) for words in INSTRUCTIONS[:per_set]]
    return prompts


def _others(transformer: Transformer, n: int) -> list[tuple[str, torch.Tensor]]:
    return [("others", _chat(transformer.tokenizer, words)) for words in OTHERS[:n]]


def _chat(tokenizer: Any, words: str) -> torch.Tensor:
    turn = [{"role": "user", "content": words}]
    prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)
    return torch.tensor([prompt["input_ids"]])


def _decoders(
    transformer: Transformer,
    bank: ShortcutBank,
    apart: Mapping[str, list[torch.Tensor]],
    measured: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    cost, _ = cost_of_passes(transformer, Packed.of(transformer.model))
    early = early_rule(transformer, bank, apart, cost.of(1), measured)
    new = partial(decoder, bank, transformer=transformer)
    how = {key: getattr(early, key) for key in ("rule", "checks", "shortlist")}
    decoders = {"exact": new(cost=cost), "loop": new(rule=Never())}
    decoders |= {name: new(head=head, compare=True, **how) for name, head in EARLY.items()}
    about = {**vars(early), "rule": early.rule.to_dict(), "shortlist": len(early.shortlist)}
    return decoders, {"sides": list(decoders), "pass_cost": cost.to_dict(), "early": about}


def _sides(decoders: dict[str, Any], *, with_slow: bool) -> list[tuple[str, dict[str, Any]]]:
    """The sides to compare; early-exit drafts, by far the slowest, only now and then."""
    slow = [("early-exit drafts", {"assistant_early_exit": EARLY_LAYER})] if with_slow else []
    return [
        ("generate", {}),
        *((f"prompt lookup {n}", {"prompt_lookup_num_tokens": n}) for n in LOOKUPS),
        *slow,
        *((name, {"custom_generate": custom}) for name, custom in decoders.items()),
    ]


def _bandwidth(n_bytes: int) -> float:
    """Seconds to read `n_bytes` from memory once: the best of a few tries."""
    block = torch.ones(n_bytes // 4)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        block.sum()
        best = min(best, time.perf_counter() - started)
    return best


def _rows(
    transformer: Transformer, results: Results, texts: Texts, setup: dict[str, Any]
) -> list[Row]:
    speed = _speeds(results)
    weights = sum(p.numel() * p.element_size() for p in transformer.model.parameters())
    limit = 1 / _bandwidth(weights)
    same = {
        side: all(out == texts["generate", key] for (s, key), out in texts.items() if s == side)
        for side in results
        if side != "loop inside"
    }
    if not same["exact"] or not same["loop"]:
        raise RuntimeError(f"exact decoding gave another text than generate: {same}")
    accounts = [account for by in results["exact"].values() for _, account in by]
    detail = {
        "speeds": speed,
        "same_text_as_generate": same,
        "by_set": {
            s: {n: median(r for r, _ in by) for n, by in sets.items()}
            for s, sets in results.items()
        },
        "departures_per_1000": {side: departures(texts, side) for side in same},
        "tokens_per_pass": median(account.tokens_per_pass for account in accounts),
        "acceptance": median(account.acceptance_rate or 0.0 for account in accounts),
        "limit_tokens_per_second": limit,
        "weight_bytes": weights,
        "peak_mib": peak_memory(),
        **setup,
        "note": "tokens per second, mean over prompt sets of medians; float32, batch 1, greedy; "
        "the limit is one token per reading of all weights from memory; exact decoding remembers "
        "the model's predictions from prompt to prompt, as it would in use; the peers do not",
    }
    ours = {*setup["sides"], "loop inside"}
    peers = {side: rate for side, rate in speed.items() if side not in ours}
    best = max(peers.values())
    unit = "tokens/s"
    detail["needed_per_pass"] = _needed(setup["pass_cost"], speed)
    left = [account for by in results["early"].values() for _, account in by]
    # How many layers would have to be saved to break even, at the present cost of exits.
    saved = transformer.n_layers - sum(account.mean_layer for account in left) / len(left)
    lost = transformer.n_layers * (speed["loop inside"] / speed["early"] - 1)
    agreement = sum(account.agreement for account in left) / len(left)
    agreed = {
        "layers_saved": saved,
        "layers_needed": saved + lost,
        "agreement": agreement,
        "mean_layer": sum(account.mean_layer for account in left) / len(left),
        "whole_head": speed["early, whole head"],
        **setup["early"],
    }
    # A rule that never exits does not count: two equal loops differ only by noise.
    early = 0.0 if setup["early"]["rule"]["name"] == "never" else speed["early"]
    return [
        Row(
            "exact_over_generate",
            speed["exact"],
            speed["generate"],
            unit,
            at_least=1.5,
            detail=detail,
        ),
        Row(
            "exact_over_fastest", speed["exact"], best, unit, at_least=1.15, detail={"peers": peers}
        ),
        Row("loop_over_generate", speed["loop"], speed["generate"], unit, at_least=1.0),
        Row("early_over_loop", early, speed["loop inside"], unit, at_least=1.0, detail=agreed),
        Row("early_agreement", agreement, None, "share of tokens", at_least=0.95),
    ]


def _needed(cost: dict[str, Any], speed: dict[str, float]) -> dict[str, float]:
    """Tokens per pass of each size that would give 1.5 times the speed of `generate`."""
    loop = speed["loop"] / speed["generate"]
    one = cost["seconds"][0]
    both = zip(cost["sizes"], cost["seconds"], strict=True)
    return {str(n): 1.5 / loop * seconds / one for n, seconds in both}
