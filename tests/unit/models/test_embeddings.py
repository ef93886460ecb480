"""Embeddings, and reading with the pseudo-inverse."""

import pytest
import torch

from edit_cases import wrapped
from families import build
from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.transformer import Transformer
from layerleap.models.weights import dual, embedding, gram, known_tokens, unembedding


def test_the_input_embedding_is_a_view_and_need_not_be_the_output_matrix():
    model = wrapped("llama")
    assert embedding(model).data_ptr() == model.model.model.embed_tokens.weight.data_ptr()
    assert not torch.equal(embedding(model), unembedding(model))


def test_an_embedding_narrower_than_the_stream_is_refused():
    with pytest.raises(ModelRefused, match=r"embedding of .* is 12 wide and its stream 24"):
        embedding(wrapped("electra"))


def test_dual_vectors_read_as_the_pseudo_inverse_and_keep_inner_products():
    matrix = unembedding(wrapped("llama"))
    torch.testing.assert_close(gram(matrix, rows=7), matrix.T @ matrix)
    w = torch.randn(5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    h = torch.randn(3, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    scores = dual(w, matrix) @ matrix.T
    torch.testing.assert_close(scores, w @ torch.linalg.pinv(matrix))
    torch.testing.assert_close((h @ matrix.T) @ scores.T, h @ w.T)


def test_no_right_inverse_is_said_so():
    with pytest.raises(BadSettings, match="vocabulary of 10 tokens is smaller than the width"):
        dual(torch.ones(1, 24), torch.ones(10, 24))
    flat = torch.randn(50, 24)
    flat[:, 3] = flat[:, 5]
    with pytest.raises(BadSettings, match="has not full rank 24"):
        dual(torch.ones(1, 24), flat)


def test_the_output_matrix_follows_a_model_that_is_changed():
    for name in ("llama", "bert"):
        model = Transformer.wrap(build(name), check=False)
        before = unembedding(model).clone()
        with torch.no_grad():
            for parameter in model.model.parameters():
                parameter.mul_(2)
        assert not torch.equal(unembedding(model), before)
        model.model.double()
        assert unembedding(model).dtype == torch.float64
        assert unembedding(model).data_ptr() == unembedding(model).data_ptr()


def test_tokens_without_an_embedding_are_not_known():
    a, b = torch.ones(6, 3), torch.ones(5, 3)
    a[1], b[3] = 0, 0
    a[2, 0] = 0
    assert known_tokens(a, b, rows=2).tolist() == [0, 2, 4]
