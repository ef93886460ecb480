"""Several texts at once: our exact decoder against the library's own batch, in turns.

Peer: `generate` on the same prompts, padded on the left. The library's other exact options (prompt
lookup, early-exit drafts) take one text at a time. Both write as many tokens for every text; that
ours writes what `generate` writes for each text alone is checked first, and an error if not so.
"""

from typing import Any

import torch
from common import MODEL, Row, interleave, median
from decoding import generate, prompts_of

from layerleap import Transformer, decoder, load
from layerleap.recipes import default_bank

SIZES, BAR = (2, 4, 8), 1.0
ROUNDS, TOKENS = 3, 64


def run(*, smoke: bool) -> list[Row]:
    """Every size of batch; the bar is on the largest."""
    sizes, rounds, tokens = ((2,), 1, 8) if smoke else (SIZES, ROUNDS, TOKENS)
    transformer = load(MODEL, dtype="float32")
    transformer.model.generation_config.eos_token_id = None
    exact = decoder(default_bank(transformer), transformer=transformer)
    prompts = [ids for _, ids in prompts_of(transformer, 3)]
    alone = [generate(transformer, ids, tokens, {}) for ids in prompts[: sizes[-1]]]
    found = {}
    for size in sizes:
        some = prompts[:size]
        for custom in (None, exact):  # what a first use sets up is not speed
            out = _together(transformer, some, tokens, custom)
        if out != alone[:size]:
            raise RuntimeError(f"a text of {size} at once differs from that of generate alone")
        samples = interleave(
            {
                "ours": lambda _, some=some: _together(transformer, some, tokens, exact),
                "peer": lambda _, some=some: _together(transformer, some, tokens, None),
            },
            rounds,
        )
        found[size] = {side: size * tokens / median(s) for side, s in samples.items()}
        found[size]["ratio"] = found[size]["ours"] / found[size]["peer"]
        found[size]["per_pass"] = median(account.per_pass for account in exact.accounts)
    largest = found[sizes[-1]]
    return [
        Row(
            "batch_over_generate", largest["ours"], largest["peer"], "tokens/s", BAR, ">=",
            detail={
                "by_size": {str(size): one for size, one in found.items()}, "n": sizes[-1],
                "note": f"texts at once, {tokens} tokens each, all texts counted; prompts read "
                "included; float32, greedy",
            },
        )
    ]  # fmt: skip


def _together(
    transformer: Transformer, prompts: list[torch.Tensor], tokens: int, custom: Any
) -> list[list[int]]:
    longest = max(ids.shape[1] for ids in prompts)
    pads = [longest - ids.shape[1] for ids in prompts]
    ids = torch.cat(
        [torch.nn.functional.pad(one, (n, 0)) for one, n in zip(prompts, pads, strict=True)]
    )
    mask = torch.stack([torch.arange(longest) >= n for n in pads]).long()
    model: Any = transformer.model
    out = model.generate(
        ids, attention_mask=mask, do_sample=False, temperature=None, top_p=None, pad_token_id=0,
        max_new_tokens=tokens, custom_generate=custom,
    )  # fmt: skip
    return [row.tolist() for row in out[:, longest:]]
