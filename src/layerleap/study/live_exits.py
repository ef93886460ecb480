"""Exit rules asked live, against the clock: what replay says they save, in seconds.

In: a model, rules by lens, and texts to go on from. Out: plain rows: tokens a second beside those
of the same decoder that never exits, layers run, agreement with the full model.

Every rule writes its own text from the same prompts, right after the decoder that never exits has;
keys and values of skipped layers are computed later (`recompute`), checks and all. The first run of
all warms up and does not count.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerleap.act.account import Account
from layerleap.act.decoder import decoder
from layerleap.act.rules import Never, Rule
from layerleap.errors import BadSettings, BadText
from layerleap.maps.bank import ShortcutBank
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.read.metrics import finite, mean_interval
from layerleap.stream.examples import Batch, require_text

Row = dict[str, Any]
SHORTEST = 4  # tokens of a prompt


def prompts_of(batches: Iterable[Batch], n: int, length: int) -> list[Tensor]:
    """The beginnings of some texts, each of another document: (1, token) each."""
    found: dict[int, Tensor] = {}
    for batch in batches:
        texts = batch.keep.nonzero()[:, 0].tolist()
        for text, document in zip(texts, batch.documents.tolist(), strict=True):
            real = int(batch.mask[text].sum())
            if real >= max(SHORTEST, length):
                found.setdefault(document, batch.inputs["input_ids"][text : text + 1, :length])
        if len(found) >= n:
            break
    if not found:
        raise BadText(f"no text has {max(SHORTEST, length)} tokens to go on from; read longer ones")
    return list(found.values())[:n]


def live_exits(
    transformer: Transformer,
    bank: ShortcutBank,
    rules: Mapping[tuple[str, str], Rule],
    prompts: list[Tensor],
    *,
    tokens: int = 24,
    progress: Progress = silent,
) -> list[Row]:
    """One row per lens and rule, after one for the model that never exits.

    Args:
        transformer: a decoder.
        bank: of the lens "mat".
        rules: by lens and name.
        prompts: what to go on from.
        tokens: to write after each.
        progress: told the number of rules.
    """
    require_text(transformer)
    if transformer.kind != "next-token":
        raise BadSettings(f"{transformer.identity.name} does not write text token by token")
    _write(transformer, None, Never(), prompts[:1], tokens)
    rows, never = [], []
    for number, ((lens, name), rule) in enumerate(rules.items(), 1):
        maps = bank if lens == "mat" else None
        full = _write(transformer, None, Never(), prompts, tokens)  # anew: a machine has its moods
        rows.append(_row(lens, name, _write(transformer, maps, rule, prompts, tokens), full))
        never += full
        progress("decoding", number, len(rules), "rules")
    return [_row("-", "never", never, never), *rows] if rows else []


def _write(
    transformer: Transformer,
    bank: ShortcutBank | None,
    rule: Rule,
    prompts: list[Tensor],
    tokens: int,
) -> list[Account]:
    decoding = decoder(bank, rule=rule, transformer=transformer, compare=True)
    model, accounts = transformer.model, []
    for ids in prompts:
        entry = ids.to(model.device)
        model.generate(
            entry, attention_mask=torch.ones_like(entry), custom_generate=decoding,
            do_sample=False, temperature=None, top_p=None, top_k=None, min_new_tokens=tokens,
            max_new_tokens=tokens, pad_token_id=0,
        )  # fmt: skip
        accounts += decoding.accounts
    return accounts


def _row(lens: str, name: str, found: list[Account], full: list[Account]) -> Row:
    """Speed relative to the full model, text by text: their mean with an interval over texts."""
    pairs = zip(found, full, strict=True)
    ratio = [(a.per_second or 0.0) / (b.per_second or 1.0) for a, b in pairs]
    speed = mean_interval(torch.tensor(ratio)[:, None], torch.arange(len(ratio)))[0]
    agreed = [a.agreement for a in found if a.agreement is not None]
    return {
        "map": lens, "rule": name, "speed": speed.value, "low": finite(speed.low),
        "high": finite(speed.high), "texts": len(found), "tokens": sum(a.tokens for a in found),
        "tokens_per_second": sum(a.tokens - 1 for a in found) / sum(a.seconds for a in found),
        "layers": sum(sum(a.layers) for a in found) / sum(a.tokens for a in found),
        "agreement": sum(agreed) / len(agreed) if agreed else None,
    }  # fmt: skip
