"""The search of the benchmark for training with the same memory."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("target", "blocks"),
    [
        (100.0, 10),  # exactly
        (104.0, 10),  # 110 would be 6 % more
        (106.0, 11),  # 110 is within 5 %, and nearer than 100
        (5.0, 1),  # one block takes more than that
        (1000.0, 29),
    ],
)
def test_plain_training_of_the_blocks_with_the_nearest_peak_is_found(target, blocks, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import layer_causal

    found, peaks = layer_causal.nearest_blocks(target, lambda n: 10.0 * n, 29)
    assert found == blocks
    assert len(peaks) <= 5
    for name in ("layer_causal", "common"):
        monkeypatch.delitem(sys.modules, name)
