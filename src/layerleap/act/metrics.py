"""Metrics of an answer, as small frozen values (`ll.metrics`): one number per text, from logits.

    logit(" John")                        the logit of a token
    logit_difference(" John", " Mary")    logit of the first minus logit of the second
    probability(" John")                  and its probability
    log_probability(" John Smith")        of an answer of any number of tokens, in nats
    loss(" John Smith")                   the same with the other sign
    kl()                                  KL(clean run || this run), in nats; for `ll.patch`

A token is its text, with the space in front of it, or its id; for a classifier, a class. Wherever a
metric is taken, a function from logits (text, d_vocab) to a number per text may stand for one.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from layerleap.arguments import check_fields
from layerleap.errors import BadSettings
from layerleap.lens.attribution.target import Token, output_id, output_ids, spaced
from layerleap.lens.vocabulary.tokens import output_label
from layerleap.models.metric import Bound
from layerleap.models.transformer import Transformer

__all__ = ["Metric", "kl", "log_probability", "logit", "logit_difference", "loss", "probability"]


class Metric(ABC):
    """A number per text, made of the logits that predict its answer."""

    @abstractmethod
    def bound(self, transformer: Transformer, reference: Tensor | None = None) -> Bound:
        """The metric for one model; `reference` are the logits of the clean run."""

    def hints(self, transformer: Transformer, logits: Tensor) -> list[str]:
        """Sentences about words that are likelier with a space in front, by logits (d_vocab,)."""
        return [hint for word in vars(self).values() if (hint := spaced(transformer, word, logits))]


@dataclass(frozen=True)
class _OfTokens(Metric):
    """The base of metrics of one token, or of two."""

    token: Token

    def __post_init__(self) -> None:
        check_fields(self)

    def bound(self, transformer: Transformer, reference: Tensor | None = None) -> Bound:
        """The metric for one model."""
        ids = [output_id(transformer, token) for token in vars(self).values()]
        if len({*ids}) < len(ids):
            raise BadSettings(f"{self} compares a token with itself; give two")
        names = ", ".join(repr(output_label(transformer, one).text) for one in ids)
        name = f"{type(self).__name__}({names})"
        return Bound(transformer, lambda logits: self._of(logits[:, -1], *ids), name=name)

    @abstractmethod
    def _of(self, logits: Tensor, *ids: int) -> Tensor:
        """(text, d_vocab) -> (text,)."""


@dataclass(frozen=True)
class logit(_OfTokens):
    """The logit of a token."""

    def _of(self, logits: Tensor, *ids: int) -> Tensor:
        return logits[:, ids[0]]


@dataclass(frozen=True)
class logit_difference(_OfTokens):
    """The logit of a token minus that of another one."""

    other: Token

    def _of(self, logits: Tensor, *ids: int) -> Tensor:
        return logits[:, ids[0]] - logits[:, ids[1]]


@dataclass(frozen=True)
class probability(_OfTokens):
    """The probability of a token."""

    def _of(self, logits: Tensor, *ids: int) -> Tensor:
        return logits.softmax(-1)[:, ids[0]]


@dataclass(frozen=True)
class log_probability(Metric):
    """The log-probability of an answer of one or more tokens that continues the prompt, in nats."""

    answer: str
    sign = 1

    def __post_init__(self) -> None:
        check_fields(self)

    def bound(self, transformer: Transformer, reference: Tensor | None = None) -> Bound:
        """The metric for one model; the prompt is continued by all tokens but the last."""
        ids = output_ids(transformer, self.answer)
        if len(ids) > 1 and transformer.kind != "next-token":
            raise BadSettings(
                f"{self.answer!r} has {len(ids)} tokens; {transformer.identity.name} does not "
                "continue texts, so expected one"
            )
        right = torch.tensor(ids)

        def numbers(logits: Tensor) -> Tensor:
            wanted = right.to(logits.device).expand(len(logits), -1)[..., None]
            return self.sign * logits.log_softmax(-1).gather(-1, wanted)[..., 0].sum(1)

        name = f"{type(self).__name__}({self.answer!r})"
        return Bound(transformer, numbers, len(ids), tuple(ids[:-1]), name)


@dataclass(frozen=True)
class loss(log_probability):
    """The cross-entropy of an answer of one or more tokens that continues the prompt, in nats."""

    sign = -1


@dataclass(frozen=True)
class kl(Metric):
    """KL(clean run || this run) of the next token, in nats."""

    def bound(self, transformer: Transformer, reference: Tensor | None = None) -> Bound:
        """The metric for one model and one clean run."""
        if reference is None:
            return Bound(transformer, lambda logits: logits.new_zeros(len(logits)), name="kl()")
        clean = reference[:, -1].log_softmax(-1)

        def numbers(logits: Tensor) -> Tensor:
            own = logits[:, -1].log_softmax(-1)
            return (clean.exp() * (clean - own)).sum(-1)

        return Bound(transformer, numbers, name="kl()")
