"""Two 30-layer models aligned, and two checkpoints compared with the memory of one block.

`python benchmarks/alignment.py FOLDER DEPTH` compares two random checkpoints of that depth in its
own process and prints its peak memory. The depth must hardly matter.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import MODEL, Row, child, timed, tiny

from layerleap.memory import peak_memory

DEPTHS = (4, 16)


def run(*, smoke: bool) -> list[Row]:
    """One row each for the seconds of an alignment and the memory of a difference."""
    return [_seconds(smoke), _memory(smoke)]


def _seconds(smoke: bool) -> Row:
    """The bundled model against a copy of itself with noise in every weight."""
    import torch

    from layerleap import Transformer, align, load

    torch.manual_seed(0)
    a, b = (
        tiny(f"tiny {number}", vocabulary=300, layers=3)
        if smoke
        else load(MODEL, dtype=torch.float32)
        for number in (0, 1)
    )
    if not smoke:
        with torch.no_grad():
            for parameter in b.model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1 * float(parameter.std()))
        b = Transformer.wrap(b.model, b.tokenizer, name=f"{MODEL}, with noise")
    results: list[Any] = []
    seconds = timed(lambda: results.append(align(a, b, progress=False)))
    matchings = {
        f"{matching.kind}, {matching.space}, {matching.measure}": [
            matching.hits,
            matching.smallest_margin,
        ]
        for matching in results[0].matchings
    }
    detail = {
        "note": "all kinds of vectors, both measures, with the control in raw coordinates; the "
        "second model is the first with noise of a tenth of each weight's spread",
        "layers": a.n_layers,
        "notes": results[0].notes,
        "hits and smallest margin": matchings,
    }
    return Row("align_seconds", seconds, None, "seconds", at_most=120, detail=detail)


def _memory(smoke: bool) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        peaks = {}
        for depth in (2, 3) if smoke else DEPTHS:
            peaks[depth] = child(__file__, folder, depth, *(["smoke"] if smoke else []))
    shallow, deep = peaks.values()
    detail = {
        "note": "peak resident memory of comparing two checkpoints of 16 blocks (ours) and of "
        "4 (peer), libraries included; 1,024 wide, float32",
        "peaks": {str(depth): peak for depth, peak in peaks.items()},
    }
    return Row("diff_memory", deep, shallow, "MiB", at_most=1.1, detail=detail)


def compare(folder: Path, depth: int, smoke: bool) -> None:
    """Make two random checkpoints in a process of their own, compare them, print the peak."""
    source, *_ = folders = [folder / f"{depth}-{seed}" for seed in (0, 1)]
    if not source.exists():
        for seed, target in enumerate(folders):
            command = [sys.executable, __file__, str(target), str(depth), f"seed={seed}"]
            subprocess.run([*command, *(["smoke"] if smoke else [])], check=True)
    from layerleap import diff

    diff(*folders, progress=False)
    print(peak_memory())


def make(target: Path, depth: int, seed: int, smoke: bool) -> None:
    """Save a random model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    width = 32 if smoke else 1024
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=depth,
        num_attention_heads=8,
    )
    LlamaForCausalLM(config).save_pretrained(target)


if __name__ == "__main__":
    path, layers, *words = sys.argv[1:]
    seeds = [word.partition("=")[2] for word in words if word.startswith("seed=")]
    if seeds:
        make(Path(path), int(layers), int(seeds[0]), smoke="smoke" in words)
    else:
        compare(Path(path), int(layers), smoke="smoke" in words)
