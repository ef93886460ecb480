"""Is the answer right? Predictions of a task's queries, after any context.

In: a wrapped decoder, a task in its tokens, and the tokens that come before every query.
Out: whether each query is answered correctly.

With answers of one token the prediction is the best label, or of a mapping the best token. With
answers of several tokens, labels are compared by the probability of the whole sequence, and an
answer of a mapping is right if each of its tokens is the best one after those before it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from layerleap.models.prefix import shared_prefix
from layerleap.models.transformer import Transformer
from layerleap.stream.tasks import EncodedTask, Piece

TOKENS = 2048  # of one pass
CACHED = 4  # times as many tokens may be in its cache


def right_answers(
    transformer: Transformer, encoded: EncodedTask, context: Sequence[int], queries: Sequence[Piece]
) -> Tensor:
    """Whether each query is answered correctly: (query,) booleans."""
    if encoded.task.kind == "mapping":
        return _scored(transformer, context, queries, [piece.answer for piece in queries])[1]
    labels = list(encoded.labels)
    if all(len(tokens) == 1 for tokens in encoded.labels.values()):
        ids = [encoded.labels[label][0] for label in labels]
        texts = [(*context, *piece.prompt) for piece in queries]
        scores = torch.empty(len(texts), len(labels))
        for row, logits in last_logits(transformer, texts, [1] * len(texts)):
            scores[row] = logits[0, ids]
    else:
        answers = [[encoded.labels[label]] * len(queries) for label in labels]
        columns = [_scored(transformer, context, queries, answer)[0] for answer in answers]
        scores = torch.stack(columns, 1)
    truth = torch.tensor([labels.index(piece.label) for piece in queries])
    return scores.argmax(1) == truth


def _scored(
    transformer: Transformer,
    context: Sequence[int],
    queries: Sequence[Piece],
    answers: Sequence[Sequence[int]],
) -> tuple[Tensor, Tensor]:
    """By query: the log-probability of its answer, and whether all its tokens are the best ones."""
    pairs = zip(queries, answers, strict=True)
    texts = [(*context, *piece.prompt, *answer[:-1]) for piece, answer in pairs]
    log_p, is_best = torch.empty(len(texts)), torch.empty(len(texts), dtype=torch.bool)
    for row, logits in last_logits(transformer, texts, [len(answer) for answer in answers]):
        target = torch.tensor(list(answers[row]))
        log_p[row] = logits.log_softmax(-1).gather(1, target[:, None]).sum()
        is_best[row] = (logits.argmax(-1) == target).all()
    return log_p, is_best


@torch.no_grad()
def last_logits(
    transformer: Transformer, texts: Sequence[Sequence[int]], last: Sequence[int]
) -> Iterator[tuple[int, Tensor]]:
    """The number of each text and the logits at its last positions, (last, d_vocab), on the CPU.

    What all texts begin with is run once, if the model allows it.
    """
    prefix = shared_prefix(transformer, texts, last)
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    start = 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and _fits(len(texts[order[stop]]), prefix.length, stop - start + 1):
            stop += 1
        rows = order[start:stop]
        inputs = prefix.inputs([texts[row][prefix.length :] for row in rows])
        keep = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
        for place, row in enumerate(rows):
            end = len(texts[row]) - prefix.length
            keep[place, end - last[row] : end] = True
        layer = transformer.n_layers
        states = transformer.capture(inputs, layers=[layer], keep=keep).states[layer]
        for row, h in zip(rows, states.split([last[row] for row in rows]), strict=True):
            yield row, transformer.logits(h).float().cpu()
        start = stop


def _fits(length: int, shared: int, texts: int) -> bool:
    return texts * (length - shared) <= TOKENS and texts * length <= CACHED * TOKENS
