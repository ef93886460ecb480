"""The top k of each row: the same as from a stable sort, ties included."""

import pytest
import torch

from layerleap.lens.top import top_k


def sorted_whole(values, k):
    best = values.sort(dim=-1, descending=True, stable=True)
    return best.values[:, :k], best.indices[:, :k]


@pytest.mark.parametrize("columns", [1, 7, 511, 513, 4095, 4096, 5003, 49_152])
@pytest.mark.parametrize("levels", [2, 50, 10**6])
def test_the_k_best_are_those_of_a_stable_sort(columns, levels):
    generator = torch.Generator().manual_seed(columns + levels)
    values = torch.randint(levels, (9, columns), generator=generator).float()
    for k in {1, min(5, columns), min(40, columns), min(300, columns)}:
        for ours, expected in zip(top_k(values, k), sorted_whole(values, k), strict=True):
            assert torch.equal(ours, expected), (columns, levels, k)


def test_half_precision_has_many_ties_and_the_same_order():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(20, 8000, generator=generator).bfloat16()
    ours, expected = top_k(values, 5), sorted_whole(values, 5)
    assert (expected[0][:, 1:] == expected[0][:, :-1]).any()  # ties there are
    assert torch.equal(ours[1], expected[1])


@pytest.mark.parametrize("place", [0, 700, 4999])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_comes_first(place, value):
    values = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0))
    values[1, place] = value
    best, ids = top_k(values, 3)
    assert best[0].isfinite().all()
    assert not best[1, 0].isfinite()
    assert ids[1, 0] == place
