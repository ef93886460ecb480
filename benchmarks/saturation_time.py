"""The cost of saturation layers compared with reading every layer once; memory must not grow.

Ours: `saturate`, 5 ranks, through the logit lens. Peer: the same forward passes, then the logits of
all layers for the same rows, with the same number of rows at a time, and nothing computed from
them. Ours follows a row down from the last layer only until all its ranks have changed, so it may
take less time. `read` is the share of the peer's readings that it makes.

The batches are split into rounds of similar composition, and each round covers a part of the text.
Peak memory is measured in a separate process: `python benchmarks/saturation_time.py N_TEXTS`.
"""

import sys
from collections.abc import Callable, Iterator

import torch
from common import MODEL, Row, child_peaks, interleave, median

from layerleap import Lens, Sampling, Transformer, load
from layerleap.lens.reader import RowQueue, StateRows
from layerleap.lens.saturation import saturate
from layerleap.memory import peak_memory
from layerleap.stream.examples import Batch, Example, iter_batches, iter_examples

POSITIONS, ROUNDS, TIMES = 10_000, 5, 10
SAMPLING = Sampling(positions="all")


def run(*, smoke: bool) -> list[Row]:
    """One row for time, one for memory."""
    return [_time(smoke), _memory(smoke)]


def _time(smoke: bool) -> Row:
    transformer = load(MODEL, dtype=torch.float32)
    batches = list(iter_batches(transformer, _examples(transformer, 60 if smoke else POSITIONS)))
    n_rounds = 1 if smoke else ROUNDS
    rounds = [batches[start::n_rounds] for start in range(n_rounds)]
    lens, counted = Lens(transformer), _Counted(transformer)
    warm = saturate(transformer, {"logit": counted}, rounds[0])["logit"]  # warms up, and counts

    def saturated(number: int) -> None:
        saturate(transformer, {"logit": lens}, rounds[number])

    sides = {"ours": saturated, "peer": _readings(transformer, lens, rounds)}
    samples = interleave(sides, n_rounds)
    n_rows = sum(len(batch.documents) for batch in batches)
    ours, peer = (median(samples[name]) * n_rounds for name in ("ours", "peer"))
    detail = {
        "note": "saturation layers of 5 ranks (ours) and reading every layer once (peer); same "
        "passes and rows, logit lens",
        "samples": samples,
        "n": n_rows,
        "texts": sum(batch.n_texts for batch in batches),
        "read": counted.rows / (len(warm) * transformer.n_layers),
    }
    return Row("saturation_time", ours, peer, "seconds", at_most=1.6, detail=detail)


def _examples(transformer: Transformer, positions: int) -> Iterator[Example]:
    """Texts with `positions` positions in total."""
    left = positions
    for example in iter_examples(transformer, "wikipedia", SAMPLING, side="held-out"):
        keep = example.keep[:left]
        left -= len(keep)
        yield Example(example.document, example.ids, keep, gold=example.gold[: len(keep)])
        if not left:
            return


class _Counted(Lens):
    """A logit lens that counts the rows it reads."""

    rows = 0

    def logits(self, h: torch.Tensor, layer: int) -> torch.Tensor:
        self.rows += len(h)
        return super().logits(h, layer)


def _readings(
    transformer: Transformer, lens: Lens, rounds: list[list[Batch]]
) -> Callable[[int], None]:
    def read(rows: StateRows) -> None:
        for layer in range(transformer.n_layers + 1):
            lens.logits(rows[layer], layer)

    def every(number: int) -> None:
        queue = RowQueue(transformer, read)
        for batch in rounds[number]:
            queue.add(transformer.capture(batch.inputs, keep=batch.keep).states)
        queue.flush()

    return every


def _memory(smoke: bool) -> Row:
    # Enough for the shorter text to fill every buffer and to contain long sentences.
    texts, rounds = (3, 1) if smoke else (300, 2)
    samples = child_peaks(__file__, texts, TIMES, rounds)
    short, long = map(median, samples.values())
    detail = {
        "note": f"peak resident memory of saturation layers of {TIMES} times the text (ours) "
        "and of the text (peer); every fourth position, model included",
        "samples": {str(size): peaks for size, peaks in samples.items()},
        "n": texts,
    }
    return Row("saturation_memory", long, short, "MiB", at_most=1.05, detail=detail)


def whole(n_texts: int) -> None:
    """Saturation layers at every fourth position of `n_texts` sentences."""
    transformer = load(MODEL, dtype=torch.float32)
    few = Sampling(positions="every:4")
    examples = iter_examples(transformer, "wikipedia", few, side="held-out", n_texts=n_texts)
    saturate(transformer, {"logit": Lens(transformer)}, iter_batches(transformer, examples))


if __name__ == "__main__":
    whole(int(sys.argv[1]))
    print(peak_memory())
