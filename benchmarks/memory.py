"""Peak memory of a fit, which must not grow with the length of the text.

Each fit runs in its own process: `python benchmarks/memory.py N_TEXTS` prints its peak.
"""

import sys

from common import MODEL, Row, child_peaks, median

from layerleap.memory import peak_memory

TIMES = 10  # length of the longer text, relative to the shorter one


def run(*, smoke: bool) -> list[Row]:
    """Peak memory of a fit on ten times the text, relative to the text itself."""
    texts, rounds = (20, 1) if smoke else (300, 2)
    samples = child_peaks(__file__, texts, TIMES, rounds)
    short, long = map(median, samples.values())
    detail = {
        "note": f"peak resident memory of a fit on {TIMES} times the text (ours) and on "
        "the text (peer); all positions, maps to the last layer, model included",
        "samples": {str(size): peaks for size, peaks in samples.items()},
        "n": texts,
        "positions": "all",
    }
    return [Row("memory", long, short, "MiB", at_most=1.05, detail=detail)]


def fit(n_texts: int) -> None:
    """Fit maps to the last layer on that many sentences, every position of them."""
    from layerleap import Sampling, fit as fit_bank, load

    fit_bank(load(MODEL), "wikipedia", Sampling(positions="all"), n_texts=n_texts)


if __name__ == "__main__":
    fit(int(sys.argv[1]))
    print(peak_memory())
