"""Texts generated with early exit, to see which token exits where.

In: a model, banks by lens, rules by lens and name, and the beginning of a held-out text.
Out: one plain row per rule, with the exit layer of every token; the report colours them.
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
    """A text per rule, all continuing the same prompt; none if the model does not generate text.

    Args:
        transformer: any model.
        banks: by lens; None for the logit lens.
        rules: by lens and name.
        beginning: token ids of the prompt.
        tokens: to generate, at most.
    """
    tokenizer: Any = transformer.tokenizer
    generates = transformer.kind == "next-token" and modality(transformer) == "text"
    if not generates or tokenizer is None or not beginning:
        return []
    prompt = tokenizer.decode(beginning, skip_special_tokens=True)
    texts = []
    for (lens, name), rule in rules.items():
        text = generate(transformer, prompt, bank=banks[lens], rule=rule, max_new_tokens=tokens)
        text.stats.prompt_seconds = text.stats.seconds = 0.0  # results must be reproducible
        texts.append({"map": lens, "rule": name, **text.to_dict()})
    return texts
