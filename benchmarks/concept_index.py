"""The concept index of the bundled model: time and memory to build it, and how long a query takes.

The build runs in its own process (`python benchmarks/concept_index.py FILE`), from the first block
to the finished file with natural ranges and clusters. Its extra memory is the peak of the process
while it builds, minus what it takes with the loaded model.
"""

import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import MODEL, Row, median

from layerleap.memory import peak_memory

QUERIES = (
    "guitar music band",
    "king queen",
    "python code",
    "Paris",
    "the",
    "red green blue",
    "run*",
    "electroencephalogram",
    "happy sad angry",
    "2024",
)


def run(*, smoke: bool) -> list[Row]:
    """One row each for seconds, memory and the median query."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index.sqlite"
        built = _built_by_child(path, smoke)
        samples = _queries(path, rounds=1 if smoke else 20)
    detail = {"note": "all value vectors, natural ranges on 200 sentences, clusters", **built}
    detail = {
        "note": "index.search of ten results, through a fresh connection each time",
        "queries": QUERIES,
        "n": len(samples),
        "slowest": max(samples),
        "vectors": built["vectors"],
    }
    return [
        Row("index_seconds", built["seconds"], None, "seconds", at_most=60, detail=detail),
        Row("index_memory", built["extra_mib"], None, "MiB", at_most=1024, detail=detail),
        Row("search_latency", median(samples), None, "ms", at_most=10, detail=detail),
    ]


def _built_by_child(path: Path, smoke: bool) -> dict[str, float]:
    command = [sys.executable, __file__, str(path), *(["smoke"] if smoke else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"building the index failed ({done.returncode}): {last}")
    told: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return told


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

    from layerleap import index, load

    transformer = _tiny() if smoke else load(MODEL, dtype=torch.float32)
    with suppress(OSError):  # the peak starts anew, from what is in use
        Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory() or 0.0
    started = time.perf_counter()
    found = index(transformer, path, progress=False, n_texts=8 if smoke else 200)
    seconds = time.perf_counter() - started
    told = {
        "seconds": seconds,
        "extra_mib": (peak_memory() or 0.0) - before,
        "model_mib": before,
        "vectors": found.n_vectors,
        "file_mb": path.stat().st_size / 1e6,
    }
    print(json.dumps(told))


def _tiny() -> Any:
    """A small random model with the tokens of the bundled one."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from layerleap import Transformer, zoo

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    tokenizer = AutoTokenizer.from_pretrained(zoo.fetch(MODEL))
    return Transformer.wrap(LlamaForCausalLM(config).eval(), tokenizer, name="tiny")


if __name__ == "__main__":
    build(Path(sys.argv[1]), smoke="smoke" in sys.argv[2:])
