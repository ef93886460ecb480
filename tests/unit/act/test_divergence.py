"""Divergence: the first token that differs, and how close to a tie it was."""

import torch

from families import build
from layerleap.act.decode.divergence import divergence
from layerleap.models.transformer import Transformer


def test_equal_texts_do_not_diverge():
    transformer = Transformer.wrap(build("llama"))
    assert divergence(transformer, [5, 6], [7, 8], [7, 8]) is None


def test_the_gap_is_that_of_the_two_candidates():
    transformer = Transformer.wrap(build("llama"))
    first = divergence(transformer, [5, 6], [7, 8, 9], [7, 11, 9])
    with torch.no_grad():
        logits = transformer.model(torch.tensor([[5, 6, 7]])).logits[0, -1]
    assert (first.place, first.ours, first.theirs) == (1, 8, 11)
    torch.testing.assert_close(
        first.gap, float((logits[8] - logits[11]).abs()), rtol=1e-4, atol=1e-6
    )
    assert "new token 2" in str(first)
