"""Correlations over a vocabulary from small matrices."""

import numpy as np
import pytest
import torch

from layerleap.lens.compare import similarity
from layerleap.lens.compare.similarity import Raw, Vocabulary


def case(tokens: int = 90, d_a: int = 12, d_b: int = 7, seed: int = 0):
    """Matrices with a large common direction, as real ones have, and a few vectors."""
    torch.manual_seed(seed)
    e_a = torch.randn(tokens, d_a) + 30 * torch.randn(d_a)
    e_b = torch.randn(tokens, d_b) + 30 * torch.randn(d_b)
    return e_a, e_b, torch.randn(5, d_a), torch.randn(8, d_b)


def pearson(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.tensor(np.corrcoef(x.double().numpy(), y.double().numpy())[: len(x), len(x) :])


def correlations(space, x, y) -> torch.Tensor:
    return (space.left(x) @ space.right(y).T).double()


@pytest.mark.parametrize("tokens", [90, 9, 5])  # fewer than either width, too
def test_models_of_different_widths_are_compared_exactly(tokens):
    e_a, e_b, x, y = case(tokens)
    space = Vocabulary.of(e_a, e_b)
    expected = pearson(x.double() @ e_a.double().T, y.double() @ e_b.double().T)
    torch.testing.assert_close(correlations(space, x, y), expected, rtol=0, atol=1e-6)
    assert space.n_tokens == tokens
    assert space.width == min(tokens - 1, 7)


def test_only_the_chosen_tokens_count():
    e_a, e_b, x, y = case()
    chosen = torch.arange(0, 90, 4)
    space = Vocabulary.of(e_a, e_b, chosen)
    expected = pearson(x.double() @ e_a[chosen].double().T, y.double() @ e_b[chosen].double().T)
    torch.testing.assert_close(correlations(space, x, y), expected, rtol=0, atol=1e-6)
    assert space.n_tokens == len(chosen)


def test_small_pieces_give_the_same(monkeypatch):
    e_a, e_b, x, y = case()
    whole = correlations(Vocabulary.of(e_a, e_b), x, y)
    monkeypatch.setattr(similarity, "PIECE_BYTES", 1000)
    torch.testing.assert_close(correlations(Vocabulary.of(e_a, e_b), x, y), whole)


def test_rows_never_exceed_unit_length():
    e_a, e_b, x, y = case()
    space = Vocabulary.of(e_a, e_b)
    assert space.left(x).norm(dim=1).max() <= 1 + 1e-6
    torch.testing.assert_close(space.right(y).norm(dim=1), torch.ones(8))


def test_a_vector_of_zeros_correlates_with_nothing():
    e_a, e_b, x, y = case()
    x[2], y[3] = 0, 0
    for space in (Vocabulary.of(e_a, e_b), Raw(12)):
        other = y if isinstance(space, Vocabulary) else torch.cat([x, torch.zeros(1, 12)])
        found = correlations(space, x, other)
        assert found.isfinite().all()
        assert (found[2] == 0).all()


def test_bfloat16_weights_are_widened_first():
    e_a, e_b, x, y = (part.bfloat16() for part in case())
    found = correlations(Vocabulary.of(e_a, e_b), x, y)
    expected = pearson(x.double() @ e_a.double().T, y.double() @ e_b.double().T)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_the_control_correlates_coordinates():
    torch.manual_seed(1)
    x, y = torch.randn(4, 30), torch.randn(6, 30)
    torch.testing.assert_close(correlations(Raw(30), x, y), pearson(x, y), rtol=0, atol=1e-6)
