"""Both ends of vectors, against sorting the whole product."""

import numpy as np
import pytest
import torch
from torch import Tensor

from layerleap.lens.vocabulary import ends
from layerleap.lens.vocabulary.build import _half
from layerleap.lens.vocabulary.ends import both_ends


def sorted_ends(values: Tensor, matrix: Tensor, top: int) -> list[Tensor]:
    scores = values @ matrix.float().T
    high = scores.sort(dim=1, descending=True, stable=True).indices[:, :top]
    low = scores.sort(dim=1, stable=True).indices[:, :top]
    return [high, scores.gather(1, high), low, scores.gather(1, low)]


@pytest.fixture
def case() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(37, 12), torch.randn(301, 12)


@pytest.mark.parametrize("top", [1, 7, 301, 400])
@pytest.mark.parametrize("piece", [2**27, 4 * 12 * 50, 1])
def test_ends_are_those_of_the_sorted_product(case, top, piece, monkeypatch):
    monkeypatch.setattr(ends, "PIECE_BYTES", piece)
    values, matrix = case
    promoted, suppressed = both_ends(values, matrix, top)
    expected = sorted_ends(values, matrix, top)
    assert promoted.ids.dtype == torch.int32
    assert promoted.scores.dtype == torch.float32
    assert torch.equal(promoted.ids.long(), expected[0])
    assert torch.equal(suppressed.ids.long(), expected[2])
    torch.testing.assert_close(promoted.scores, expected[1])
    torch.testing.assert_close(suppressed.scores, expected[3])


@pytest.mark.parametrize("piece", [2**27, 4 * 4 * 7])
def test_equal_scores_are_ordered_by_id_even_where_the_list_is_cut(piece, monkeypatch):
    monkeypatch.setattr(ends, "PIECE_BYTES", piece)
    matrix = torch.eye(4).repeat(10, 1)  # every row ten times
    values = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0], [0, 2.0, -1.0, 0]])
    promoted, suppressed = both_ends(values, matrix, 5)
    assert promoted.ids.tolist() == [[0, 4, 8, 12, 16], [0, 1, 2, 3, 4], [1, 5, 9, 13, 17]]
    assert suppressed.ids.tolist() == [[1, 2, 3, 5, 6], [0, 1, 2, 3, 4], [2, 6, 10, 14, 18]]
    assert suppressed.scores[2].tolist() == [-1.0] * 5


def test_a_bfloat16_matrix_is_multiplied_in_float32(case):
    values, matrix = case
    matrix = matrix.bfloat16()
    promoted, suppressed = both_ends(values, matrix, 9)
    expected = sorted_ends(values, matrix, 9)
    assert torch.equal(promoted.ids.long(), expected[0])
    assert torch.equal(suppressed.ids.long(), expected[2])


def test_scores_keep_the_precision_of_the_product():
    promoted, suppressed = both_ends(torch.tensor([[100_001.0]]), torch.tensor([[1.0], [-1.0]]), 1)
    assert (promoted.scores.item(), suppressed.scores.item()) == (100_001, -100_001)
    assert (promoted.ids.item(), suppressed.ids.item()) == (0, 1)


def test_scores_beyond_float16_stay_finite_in_an_index():
    assert np.isfinite(_half(torch.tensor([1e6, -1e6]))).all()
