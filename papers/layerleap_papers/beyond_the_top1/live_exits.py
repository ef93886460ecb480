"""Exit rules timed: what a replay says they save, in seconds.

In: a model, rules by lens, and prompts. Out: plain rows: tokens a second beside those of the same
decoder that never exits, mean exit layers, agreement with the full model.

Every rule continues the same prompts, next to the decoder that never exits. Checks are included,
and keys and values of skipped layers are computed later (`recompute`). The first run warms up and
does not count.
"""

import math
import random
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from layerleap import ShortcutBank, Transformer, decoder
from layerleap.act.decode import DecodingStats
from layerleap.act.exits import Never, Rule
from layerleap.errors import BadSettings, BadText
from layerleap.extras import learn_library
from layerleap.progress import Progress, silent
from layerleap.stream import Batch
from layerleap.study import Row, generates_text

SHORTEST = 4  # tokens of a prompt
GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "pad_token_id": 0}


def prompts_of(
    batches: Iterable[Batch], n: int, length: int, *, without: Collection[int] = (), seed: int = 0
) -> list[Tensor]:
    """The beginnings of up to n texts, each from another document: (1, length) each.

    They are drawn from all batches, because these may be sorted by length.
    """
    beginnings: dict[int, list[Tensor]] = {}
    for batch in batches:
        texts = batch.keep.nonzero()[:, 0].tolist()
        for text, document in zip(texts, batch.documents.tolist(), strict=True):
            real = int(batch.mask[text].sum())
            if real >= max(SHORTEST, length) and document not in without:
                beginning = batch.inputs["input_ids"][text : text + 1, :length]
                beginnings.setdefault(document, []).append(beginning)
    if not beginnings:
        raise BadText(f"no text has {max(SHORTEST, length)} tokens to continue; read longer ones")
    draw = random.Random(seed)
    chosen = draw.sample(sorted(beginnings), min(n, len(beginnings)))
    return [draw.choice(beginnings[document]) for document in chosen]


def live_exits(
    transformer: Transformer,
    bank: ShortcutBank | None,
    rules: Mapping[tuple[str, str], Rule],
    prompts: list[Tensor],
    *,
    tokens: int = 24,
    progress: Progress = silent,
) -> list[Row]:
    """One row per lens and rule, after one for the model that never exits."""
    if not generates_text(transformer):
        raise BadSettings(f"{transformer.identity.name} does not generate text token by token")
    _decode(transformer, None, Never(), prompts[:1], tokens)
    rows: list[Row] = []
    for number, ((lens, name), rule) in enumerate(rules.items(), 1):
        sides = {"full": (None, Never()), "rule": (bank if lens == "linear" else None, rule)}
        order = list(sides) if number % 2 else list(reversed(sides))
        # The full model runs again each time, and the order alternates, to cancel timing drift.
        timed = {side: _decode(transformer, *sides[side], prompts, tokens) for side in order}
        full = timed["full"]
        rows.append(_row(lens, name, timed["rule"], full, len(rules)))
        progress("decoding", number, len(rules), "rules")
    return [_row("-", "never", full, full, 1), *rows] if rows else []


def _decode(
    transformer: Transformer,
    bank: ShortcutBank | None,
    rule: Rule,
    prompts: list[Tensor],
    tokens: int,
) -> list[DecodingStats]:
    decoding = decoder(bank, rule=rule, transformer=transformer, compare=True)
    model, stats = transformer.model, []
    for ids in prompts:
        entry = ids.to(model.device)
        mask, lengths = torch.ones_like(entry), {"min_new_tokens": tokens, "max_new_tokens": tokens}
        model.generate(entry, attention_mask=mask, custom_generate=decoding, **GREEDY, **lengths)
        stats += decoding.stats
    return stats


def _row(
    lens: str, name: str, texts: list[DecodingStats], full: list[DecodingStats], rules: int
) -> Row:
    """Speed relative to the full model: the geometric mean over texts, with its t interval.

    There are few texts, so nothing is resampled. `is_faster` is corrected for the number of rules,
    because chance favours the fastest of many.
    """
    ratios = torch.tensor(
        [b.seconds / a.seconds for a, b in zip(texts, full, strict=True)], dtype=torch.float64
    ).log()
    mean, n = float(ratios.mean()), len(ratios)
    low = high = None
    is_faster = False
    if n > 1:
        student = learn_library("scipy.stats").t
        error = float(ratios.std()) / math.sqrt(n)
        reach = float(student.ppf(0.975, n - 1)) * error
        low, high = math.exp(mean - reach), math.exp(mean + reach)
        is_faster = mean > float(student.ppf(1 - 0.025 / rules, n - 1)) * error
    # The first token of each text comes from the prompt's pass, which is always run to the end.
    after = sum(one.tokens - 1 for one in texts)
    wrong = sum(one.compared - one.agreed for one in texts)
    known = all(one.agreement is not None for one in texts)
    return {
        "map": lens,
        "rule": name,
        "speed": math.exp(mean),
        "low": low,
        "high": high,
        "is_faster": is_faster,
        "texts": n,
        "tokens": after,
        "tokens_per_second": after / sum(one.seconds for one in texts),
        "layers": sum(sum(one.layers[1:]) for one in texts) / after,
        "agreement": 1 - wrong / after if known else None,
    }
