"""Batched decoding: our exact decoder against a batch of `generate`, in alternation.

Peer: `generate` on the same prompts, padded on the left. The other exact options of transformers
(prompt lookup, early-exit drafts) take one text at a time. Both sides generate the same number of
tokens for every text. Ours never gets a prompt twice, because it remembers the model's predictions.
The timed texts are compared with those of `generate` for each text alone; a difference is an error.
"""

from typing import Any

from common import MODEL, Row, generate, interleave, median
from decoding import prompts_of

from layerleap import decoder, load
from layerleap.act.decode.prepared import WORTH
from layerleap.maps.fit import default_bank

SIZES, BAR = (2, 4, 8), 1.0
ROUNDS, TOKENS = 3, 64


def run(*, smoke: bool) -> list[Row]:
    """Measure every batch size; the threshold applies to the largest."""
    sizes, rounds, tokens = ((2,), 1, 8) if smoke else (SIZES, ROUNDS, TOKENS)
    transformer = load(MODEL, dtype="float32")
    transformer.model.generation_config.eos_token_id = None
    bank = default_bank(transformer)
    exact = decoder(bank, transformer=transformer)
    per_set = 1 + sum(sizes) * rounds // 3 + 1
    by_set = [ids for _, ids in prompts_of(transformer, per_set)]
    prompts = iter(
        [by_set[n] for start in range(per_set) for n in range(start, len(by_set), per_set)]
    )
    first = [next(prompts), next(prompts)]  # warm-up: the set-up of a first call is not timed
    for options in ({}, {"custom_generate": exact}):
        generate(transformer, first, WORTH, options)
    by_size = {
        str(size): _size(transformer, exact, prompts, size, rounds, tokens) for size in sizes
    }
    largest = by_size[str(sizes[-1])]
    detail = {
        "by_size": by_size,
        "n": sizes[-1],
        "rounds": rounds,
        "note": f"n texts in one batch, {tokens} tokens each, all texts counted, prompt "
        "processing included; float32, greedy; medians over rounds, each round with new "
        "prompts",
    }
    sides = largest["ours"], largest["peer"]
    return [Row("batch_over_generate", *sides, "tokens/s", at_least=BAR, detail=detail)]


def _size(
    transformer: Any, exact: Any, prompts: Any, size: int, rounds: int, tokens: int
) -> dict[str, Any]:
    """Tokens per second of both sides for one batch size."""
    some = [[next(prompts) for _ in range(size)] for _ in range(rounds)]
    written, per_pass = list[list[list[int]]](), list[float]()

    def ours(number: int) -> None:
        written.append(generate(transformer, some[number], tokens, {"custom_generate": exact}))
        per_pass.extend(stats.tokens_per_pass for stats in exact.stats)

    samples = interleave(
        {"ours": ours, "peer": lambda number: generate(transformer, some[number], tokens)}, rounds
    )
    for texts, prompts_of_round in zip(written, some, strict=True):
        for text, ids in zip(texts, prompts_of_round, strict=True):
            if [text] != generate(transformer, [ids], tokens):
                raise RuntimeError(
                    f"a text in a batch of {size} differs from what generate gives for it alone"
                )
    rates = {side: size * tokens / median(seconds) for side, seconds in samples.items()}
    return {
        **rates,
        "ratio": rates["ours"] / rates["peer"],
        "tokens_per_pass": median(per_pass),
        "samples": samples,
    }
