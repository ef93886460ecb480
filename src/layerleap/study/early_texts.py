"""Texts written by leaving early, to be looked at: which token left where.

In: a decoder, a bank or None by lens, rules by lens and name, and the beginning of a held-out text.
Out: one plain row per rule, with every token's layer; `show.sections` colours them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from layerleap.act.decode.generate import generate
from layerleap.act.exits.rules import Rule
from layerleap.maps.bank import ShortcutBank
from layerleap.models.transformer import Transformer
from layerleap.stream.batches import modality

Row = dict[str, Any]


def early_texts(
    transformer: Transformer,
    banks: Mapping[str, ShortcutBank | None],
    rules: Mapping[tuple[str, str], Rule],
    beginning: Sequence[int],
    *,
    tokens: int = 48,
) -> list[Row]:
    """What every rule writes from the same beginning; none if the model does not generate text.

    Args:
        transformer: any model.
        banks: by lens; None reads states as they are.
        rules: by lens and name.
        beginning: ids to go on from.
        tokens: to generate at most.
    """
    tokenizer: Any = transformer.tokenizer
    writes = transformer.kind == "next-token" and modality(transformer) == "text"
    if not writes or tokenizer is None or not beginning:
        return []
    prompt = tokenizer.decode(beginning, skip_special_tokens=True)
    found = []
    for (lens, name), rule in rules.items():
        written = generate(transformer, prompt, bank=banks[lens], rule=rule, max_new_tokens=tokens)
        written.stats.prompt_seconds = written.stats.seconds = 0.0  # the same again next time
        found.append({"map": lens, "rule": name, **written.to_dict()})
    return found
