"""Peak memory of a fit, which must not grow with the length of the text.

Each fit runs in its own process: `python benchmarks/memory.py N_TEXTS` prints its peak.
"""

import subprocess
import sys

from common import MODEL, Row, median

from layerleap.memory import peak_memory

TIMES = 10  # length of the longer text, relative to the shorter one


def run(*, smoke: bool) -> list[Row]:
    """Peak memory of a fit on ten times the text, relative to the text itself."""
    texts, rounds = (20, 1) if smoke else (300, 2)
    samples: dict[int, list[float]] = {texts: [], texts * TIMES: []}
    for number in range(rounds):
        for size in sorted(samples, reverse=bool(number % 2)):
            samples[size].append(_peak_of_child(size))
    short, long = (median(samples[size]) for size in (texts, texts * TIMES))
    detail = {
        "note": f"peak resident memory of a fit on {TIMES} times the text (ours) and on "
        "the text (peer); all positions, maps to the last layer, model included",
        "samples": {str(size): peaks for size, peaks in samples.items()},
        "n": texts,
        "positions": "all",
    }
    return [Row("memory", long, short, "MiB", at_most=1.05, detail=detail)]


def _peak_of_child(n_texts: int) -> float:
    command = [sys.executable, __file__, str(n_texts)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"the fit on {n_texts} texts failed: {last}")
    return float(done.stdout.strip().splitlines()[-1])


def fit(n_texts: int) -> None:
    """Fit maps to the last layer on that many sentences, every position of them."""
    from layerleap import Sampling, fit as fit_bank, load

    fit_bank(load(MODEL), "wikipedia", Sampling(positions="all"), n_texts=n_texts)


if __name__ == "__main__":
    fit(int(sys.argv[1]))
    print(peak_memory())
