"""What a model does at the token that predicts the answer.

In: a wrapped model, and prompts whose last tokens are the query. Out: an `Observation` of each.

The observed position is the last token of the prompt: the model's output there is its answer. So a
prompt ends where the answer would begin, and never contains one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerleap.act.learning.lessons import require_readable
from layerleap.arguments import checked
from layerleap.errors import BadSettings, NotFinite
from layerleap.models.hooks.scores import scores_recorded
from layerleap.models.prefix import Prefix, shared_prefix
from layerleap.models.transformer import Transformer
from layerleap.short_repr import ShortRepr

CACHED = 4  # tokens of a cache take less memory than tokens that run


@dataclass(frozen=True)
class Prompt:
    """Token ids; the last `n_query` of them are the query, the others its context."""

    ids: tuple[int, ...]
    n_query: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(int(token) for token in self.ids))
        if not 1 <= self.n_query <= len(self.ids):
            raise BadSettings(
                f"n_query is {self.n_query}; expected 1 to {len(self.ids)}, the tokens of the "
                "prompt"
            )


@dataclass(frozen=True, eq=False, repr=False)
class Observation(ShortRepr):
    """One prompt, at its last token; everything is on the CPU."""

    states: Tensor  # (n_layers + 1, d_model): h[0] .. h[n_layers]
    attention: Tensor  # (n_layers, d_model): what attention of each block gives, after W_O
    scores: tuple[Tensor, ...]  # by block, (head, n_query): before the softmax; () if not recorded
    top: int  # the token with the highest probability
    labels: Tensor | None  # (label,) log-probabilities of the labels, if some were given

    @property
    def prediction(self) -> int:
        """The best label by number, or the best token if there are no labels."""
        return self.top if self.labels is None else int(self.labels.argmax())


@checked
@torch.no_grad()
def observe(
    transformer: Transformer,
    prompts: Sequence[Prompt],
    *,
    labels: Sequence[int] | None = None,
    scores: bool = True,
    tokens_per_batch: int = 2048,
) -> list[Observation]:
    """Run the prompts, with the edits in force, and keep what happens at their last tokens.

    Args:
        labels: token ids to choose an answer from; the whole vocabulary when None.
        scores: also record attention scores.
        tokens_per_batch: tokens of one pass; results do not depend on it beyond rounding.
    """
    require_readable(transformer, [len(prompt.ids) for prompt in prompts], "prompt")
    observations: dict[int, Observation] = {}
    prefix = shared_prefix(transformer, [p.ids for p in prompts], [p.n_query for p in prompts])
    for rows in _batches(prompts, tokens_per_batch, prefix.length):
        batch = _observe(transformer, [prompts[row] for row in rows], prefix, labels, scores)
        observations |= zip(rows, batch, strict=True)
    return [observations[row] for row in range(len(prompts))]


def _batches(prompts: Sequence[Prompt], tokens: int, shared: int) -> Iterator[list[int]]:
    """Numbers of prompts of the same length, at most `tokens` tokens at a time; never padded.

    The first `shared` tokens do not run again, but every prompt has its copy of their cache.
    """
    by_length: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt.ids), []).append(row)
    for length, rows in by_length.items():
        size = max(1, min(tokens // (length - shared), CACHED * tokens // length))
        yield from (rows[start : start + size] for start in range(0, len(rows), size))


def _observe(
    transformer: Transformer,
    prompts: list[Prompt],
    prefix: Prefix,
    labels: Sequence[int] | None,
    scores: bool,
) -> list[Observation]:
    inputs = prefix.inputs([prompt.ids[prefix.length :] for prompt in prompts])
    keep = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    last = len(prompts[0].ids) - prefix.length - 1  # all prompts have the same length
    keep[:, last] = True
    blocks = range(1, transformer.n_layers + 1)
    for block in blocks:
        transformer.known_anatomy(block, "the output of its attention cannot be observed")
    queries = [(last, range(len(p.ids) - p.n_query, len(p.ids))) for p in prompts]
    with scores_recorded(transformer, queries if scores else []) as recorder:
        captured = transformer.capture(
            inputs, sites=[(block, "attn.out") for block in blocks], keep=keep
        )
    for layer, h in captured.states.items():
        if not h.isfinite().all():
            raise NotFinite(
                f"the states at layer {layer} are NaN or infinite, so there is nothing to observe; "
                "if a delta is applied, learn it with a lower learning rate"
            )
    recorded = [recorder.of_block(block) for block in blocks] if scores else []
    tops: list[int] = []
    log_p: list[Tensor] = []
    for rows in captured.states[transformer.n_layers].split(64):
        logits = transformer.logits(rows).double()
        tops += logits.argmax(-1).tolist()
        if labels is not None:
            log_p += logits.log_softmax(-1)[:, list(labels)].cpu()
    return [
        Observation(
            torch.stack([h[row].cpu() for _, h in sorted(captured.states.items())]),
            torch.stack([captured.sites[block, "attn.out"][row].cpu() for block in blocks]),
            tuple(block_scores[row].cpu() for block_scores in recorded),
            tops[row],
            log_p[row] if log_p else None,
        )
        for row in range(len(prompts))
    ]
