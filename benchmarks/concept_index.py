"""The concept index of the bundled model: time and memory to build it, and how long a query takes.

The build runs in its own process (`python benchmarks/concept_index.py FILE`), from the first block
to the finished file with natural ranges and clusters. Its extra memory is the peak of the process
while it builds, minus what it takes with the loaded model.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from common import MODEL, Row, child, fresh_peak, median, tiny

from layerleap.memory import peak_memory

QUERIES = (
    *("guitar music band", "king queen", "python code", "Paris", "the", "red green blue"),
    *("run*", "electroencephalogram", "happy sad angry", "2024"),
)


def run(*, smoke: bool) -> list[Row]:
    """One row each for seconds, memory and the median query."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index.sqlite"
        built = child(__file__, path, *(["smoke"] if smoke else []))
        samples = _queries(path, rounds=1 if smoke else 20)
    building = {"note": "all value vectors, natural ranges on 200 sentences, clusters", **built}
    searching = {
        "note": "index.search of ten results, through a fresh connection each time",
        "queries": QUERIES,
        "n": len(samples),
        "slowest": max(samples),
        "vectors": built["vectors"],
    }
    return [
        Row("index_seconds", built["seconds"], None, "seconds", at_most=60, detail=building),
        Row("index_memory", built["extra_mib"], None, "MiB", at_most=1024, detail=building),
        Row("search_latency", median(samples), None, "ms", at_most=10, detail=searching),
    ]


def _queries(path: Path, rounds: int) -> list[float]:
    from layerleap.lens.vocabulary.lookup import IndexFile
    from layerleap.lens.vocabulary.search import search

    index, samples = IndexFile(path), []
    for _ in range(rounds):
        for query in QUERIES:
            started = time.perf_counter()
            search(index, query, top=10)
            samples.append(1000 * (time.perf_counter() - started))
    return samples


def build(path: Path, smoke: bool) -> None:
    """Build the index and print what it took."""
    import torch

    from layerleap import index, load, zoo

    if smoke:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(zoo.fetch(MODEL))
        transformer = tiny(vocabulary=49152, tokenizer=tokenizer)
    else:
        transformer = load(MODEL, dtype=torch.float32)
    before, started = fresh_peak(), time.perf_counter()
    concepts = index(transformer, path, progress=False, n_texts=8 if smoke else 200)
    result = {
        "seconds": time.perf_counter() - started,
        "extra_mib": (peak_memory() or 0.0) - before,
        "model_mib": before,
        "vectors": concepts.n_vectors,
        "file_mb": path.stat().st_size / 1e6,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    build(Path(sys.argv[1]), smoke="smoke" in sys.argv[2:])
