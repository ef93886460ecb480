"""Exit rules asked live, against the clock: what replay says they save, in seconds.

In: a model, rules by lens, and texts to go on from. Out: plain rows: tokens a second beside those
of the same decoder that never exits, layers that tokens are read at, agreement with the full model.

Every rule writes its own text from the same prompts, next to the decoder that never exits; keys and
values of skipped layers are computed later (`recompute`), checks and all. The first run of all
warms up and does not count.
"""

import math
import random
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerleap.act.decode.decoder import decoder
from layerleap.act.decode.decoding_stats import DecodingStats
from layerleap.act.exits.rules import Never, Rule
from layerleap.errors import BadSettings, BadText
from layerleap.extras import learn_library
from layerleap.maps.bank import ShortcutBank
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.stream.examples import Batch, require_text

Row = dict[str, Any]
SHORTEST = 4  # tokens of a prompt


def prompts_of(
    batches: Iterable[Batch], n: int, length: int, *, without: Collection[int] = (), seed: int = 0
) -> list[Tensor]:
    """The beginnings of some texts, each of another document: (1, token) each.

    Args:
        batches: sorted by length or not: texts are drawn from all of them.
        n: beginnings at most.
        length: tokens of each.
        without: documents to leave out.
        seed: of the draw.
    """
    found: dict[int, list[Tensor]] = {}
    for batch in batches:
        texts = batch.keep.nonzero()[:, 0].tolist()
        for text, document in zip(texts, batch.documents.tolist(), strict=True):
            real = int(batch.mask[text].sum())
            if real >= max(SHORTEST, length) and document not in without:
                beginning = batch.inputs["input_ids"][text : text + 1, :length]
                found.setdefault(document, []).append(beginning)
    if not found:
        raise BadText(f"no text has {max(SHORTEST, length)} tokens to go on from; read longer ones")
    draw = random.Random(seed)
    chosen = draw.sample(sorted(found), min(n, len(found)))
    return [draw.choice(found[document]) for document in chosen]


def live_exits(
    transformer: Transformer,
    bank: ShortcutBank | None,
    rules: Mapping[tuple[str, str], Rule],
    prompts: list[Tensor],
    *,
    tokens: int = 24,
    progress: Progress = silent,
) -> list[Row]:
    """One row per lens and rule, after one for the model that never exits.

    Args:
        transformer: a decoder.
        bank: of the lens "mat", if rules read through it.
        rules: by lens and name.
        prompts: what to go on from.
        tokens: to write after each.
        progress: told the number of rules.
    """
    require_text(transformer)
    if transformer.kind != "next-token":
        raise BadSettings(f"{transformer.identity.name} does not write text token by token")
    _write(transformer, None, Never(), prompts[:1], tokens)
    rows: list[Row] = []
    for number, ((lens, name), rule) in enumerate(rules.items(), 1):
        sides = {"full": (None, Never()), "rule": (bank if lens == "mat" else None, rule)}
        order = list(sides) if number % 2 else list(reversed(sides))
        # The full model anew each time, and who goes first in turn: a machine has its moods.
        made = {side: _write(transformer, *sides[side], prompts, tokens) for side in order}
        full = made["full"]
        rows.append(_row(lens, name, made["rule"], full, len(rules)))
        progress("decoding", number, len(rules), "rules")
    return [_row("-", "never", full, full, 1), *rows] if rows else []


def _write(
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
        model.generate(
            entry, attention_mask=torch.ones_like(entry), custom_generate=decoding,
            do_sample=False, temperature=None, top_p=None, top_k=None, min_new_tokens=tokens,
            max_new_tokens=tokens, pad_token_id=0,
        )  # fmt: skip
        stats += decoding.stats
    return stats


def _row(
    lens: str, name: str, found: list[DecodingStats], full: list[DecodingStats], rules: int
) -> Row:
    """Speed relative to the full model: the geometric mean over texts, with its t interval.

    Texts are few, so nothing is resampled. `is_faster` is about the fastest of so many rules: the
    one that chance favours is among them, so it has to be clear at a level that many times smaller.
    """
    ratios = torch.tensor(
        [b.seconds / a.seconds for a, b in zip(found, full, strict=True)], dtype=torch.float64
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
    # The first token of each text is the prompt's, and always read at the end.
    after = sum(one.tokens - 1 for one in found)
    wrong = sum(one.compared - one.agreed for one in found)
    known = all(one.agreement is not None for one in found)
    return {
        "map": lens, "rule": name, "speed": math.exp(mean), "low": low, "high": high,
        "is_faster": is_faster, "texts": n, "tokens": after,
        "tokens_per_second": after / sum(one.seconds for one in found),
        "layers": sum(sum(one.layers[1:]) for one in found) / after,
        "agreement": 1 - wrong / after if known else None,
    }  # fmt: skip
