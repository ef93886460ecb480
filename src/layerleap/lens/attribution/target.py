"""The logits that are attributed: one token's, a difference, or above the vocabulary's mean.

In: tokens as a user writes them. Out: a weight for every logit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerleap.errors import BadSettings, check_choice
from layerleap.lens.vocabulary.tokens import output_label
from layerleap.models.facts import check_number
from layerleap.models.transformer import Transformer

Token = str | int
VOCABULARY = "vocabulary"  # the mean of all logits


@dataclass(frozen=True, eq=False)
class Target:
    """A combination of logits."""

    token: int
    against: tuple[int, ...] | str | None
    weights: Tensor  # (d_vocab,)

    @classmethod
    def of(
        cls,
        transformer: Transformer,
        logits: Tensor,
        token: Token | None,
        against: Token | Sequence[Token] | None,
    ) -> "Target":
        """The logit of `token` (by default the largest), less the mean of those it is held against.

        What shifts all logits alike changes no probability; `against` leaves it out.
        """
        chosen = int(logits.argmax()) if token is None else output_id(transformer, token)
        weights = torch.zeros_like(logits)
        weights[chosen] = 1.0
        if against is None:
            return cls(chosen, None, weights)
        if against == VOCABULARY:
            return cls(chosen, VOCABULARY, weights - 1 / len(logits))
        given = [against] if isinstance(against, str | int) else list(against)
        others = tuple(dict.fromkeys(output_id(transformer, one) for one in given))
        if not others or chosen in others:
            name = output_label(transformer, chosen).label
            raise BadSettings(
                f"against is {against!r}; expected one or more tokens other than {name!r}, or "
                f"{VOCABULARY!r} for the mean of all logits"
            )
        weights[list(others)] -= 1 / len(others)
        return cls(chosen, others, weights)

    def words(self, transformer: Transformer) -> str:
        """What is attributed, such as "logit of Paris - London"."""
        name = output_label(transformer, self.token).label
        if self.against is None:
            return f"logit of {name}"
        if isinstance(self.against, str):
            return f"logit of {name} \u2212 mean logit of the vocabulary"
        others = ", ".join(output_label(transformer, one).label for one in self.against)
        mean = "mean of " if len(self.against) > 1 else ""
        return f"logit of {name} \u2212 {mean}{others}"


def output_id(transformer: Transformer, token: Token) -> int:
    """The output that a token (or the name of a class) stands for."""
    ids = output_ids(transformer, token)
    if len(ids) != 1:
        pieces = ", ".join(repr(output_label(transformer, one).text) for one in ids)
        raise BadSettings(
            f"{token!r} is {len(ids)} tokens of this model ({pieces}); expected one token, written "
            "as in a text (often with a space in front), or its id; ll.metrics.log_probability "
            "scores an answer of several"
        )
    return ids[0]


def output_ids(transformer: Transformer, token: Token) -> list[int]:
    """The outputs that a text (or an id, or the name of a class) stands for."""
    if isinstance(token, str) and transformer.kind.endswith("-class"):
        names = {transformer.output_name(n): n for n in range(transformer.d_vocab)}
        check_choice(token, names, "token")
        return [names[token]]
    if isinstance(token, str):
        ids = transformer.need_tokenizer()(token, add_special_tokens=False)["input_ids"]
    else:
        ids = [token]
    if not ids:
        raise BadSettings(f"{token!r} has no tokens; expected one or more")
    for one in ids:
        check_number("output", one, 0, transformer.d_vocab - 1)
    return [int(one) for one in ids]


def spaced(transformer: Transformer, token: Token | None, logits: Tensor) -> str:
    """A hint where a word was named without the space that the likelier token has; else ""."""
    if not isinstance(token, str) or transformer.kind.endswith("-class") or token.startswith(" "):
        return ""
    given, better = (output_ids(transformer, text) for text in (token, f" {token}"))
    if len(better) > len(given) or logits[better[0]] <= logits[given[0]]:
        return ""
    return f"{token!r} has no space in front; {' ' + token!r} is another token, and likelier here"
