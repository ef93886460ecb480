"""The cost of fitting, compared with a plain forward pass over the same batches.

Ours: collect float64 moments of all layers, then solve the maps from every layer to the last.
Peer: `model(**batch)` in the same dtype. Our pass stops before the head and the plain pass does
not, so a pass without the head is timed as well, for information.

The batches are split into rounds of similar composition, and each round covers a part of the text.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from common import MODEL, Row, interleave, median, timed

from layerleap import Sampling, Transformer, load
from layerleap.maps.fit import solve_bank
from layerleap.stats.fit_statistics import FitStatistics, accumulate
from layerleap.stream.examples import Batch, iter_batches, iter_examples

ROUNDS = 5
BAR = 1.25
NOTE = (
    "ours = pass + products + solving all maps to the last layer; our pass stops before the head, "
    "the peer's plain model(**batch) does not; ratio_headless compares with a pass without the head"
)


def run(*, smoke: bool) -> list[Row]:
    """One row for all positions, one for one position per text."""
    transformer = load(MODEL, dtype=torch.float32)
    sizes = {"all": 40, "one": 80} if smoke else {"all": 1000, "one": 2000}
    return [_row(transformer, positions, n) for positions, n in sizes.items()]


def _row(transformer: Transformer, positions: str, n_texts: int) -> Row:
    sampling = Sampling(positions=positions)
    examples = iter_examples(transformer, "wikipedia", sampling, n_texts=n_texts)
    rounds = _deal(list(iter_batches(transformer, examples)))
    about = {
        "model": transformer.identity.to_dict(),
        "text": "wikipedia",
        "sampling": sampling.to_dict(),
    }
    stats = FitStatistics.empty(transformer, "final", about)

    sides = {
        "ours": lambda number: accumulate(transformer, rounds[number], stats),
        "peer": _passes(transformer.model, rounds),
        "headless": _passes(transformer.model.base_model, rounds),
    }
    warm = [[replace(rounds[0][0], index=0)]]
    accumulate(transformer, warm[0], FitStatistics.empty(transformer, "final", about))
    for module in (transformer.model, transformer.model.base_model):
        _passes(module, warm)(0)
    samples = interleave(sides, len(rounds))
    solving = [timed(lambda: solve_bank(stats)) for _ in range(3)]
    ours = median(samples["ours"]) * len(rounds) + median(solving)
    peer, headless = (median(samples[name]) * len(rounds) for name in ("peer", "headless"))
    detail = {
        "note": NOTE,
        "samples": samples,
        "solving": solving,
        "texts": n_texts,
        "n": stats.fit.n,
        "tokens": sum(b.n_tokens for part in rounds for b in part),
        "headless": headless,
        "ratio_headless": ours / headless,
    }
    return Row(f"fit_cost_{positions}", ours, peer, "seconds", at_most=BAR, detail=detail)


def _deal(batches: list[Batch]) -> list[list[Batch]]:
    """ROUNDS rounds of every ROUNDS-th batch, renumbered as one stream."""
    # Batches are sorted by length: neighbours are similar, so the rounds are too.
    whole = len(batches) // ROUNDS * ROUNDS or len(batches)
    rounds = [part for start in range(ROUNDS) if (part := batches[start:whole:ROUNDS])]
    index = iter(range(whole))
    return [[replace(batch, index=next(index)) for batch in part] for part in rounds]


def _passes(module: torch.nn.Module, rounds: list[list[Batch]]) -> Callable[[int], None]:
    @torch.inference_mode()
    def bare(number: int) -> None:
        for batch in rounds[number]:
            module(**batch.inputs)

    return bare
