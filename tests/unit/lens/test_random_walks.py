"""Random walks: steps as large as the model's, on other tokens."""

import pytest
import torch

from layerleap.errors import BadSettings, BadText
from layerleap.lens.lens import Lens
from layerleap.lens.random_walks import RandomWalks
from layerleap.stream.examples import Sampling, iter_batches, iter_examples
from made_saturation import random_walk, walked
from tiny_models import sentences, tiny


def centred(z):
    return z - z.mean(-1, keepdim=True)


def correlation(a, b):
    return torch.cosine_similarity(centred(a), centred(b), dim=-1)


def readings(n_layers=6, n_rows=40, d_vocab=4000, seed=0):
    """Logits whose spread, step size and tails differ from layer to layer."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n_rows, d_vocab, generator=generator) * 3 + 5
    actual = [z]
    for layer in range(n_layers):
        step = torch.randn(n_rows, d_vocab, generator=generator) ** 3  # heavy tails
        z = (0.5 + 0.1 * layer) * z + (1 + layer) * 0.3 * step + layer
        actual.append(z)
    return actual


def test_a_walk_starts_at_the_row_and_takes_steps_of_the_same_size():
    z = readings()
    w = random_walk(z, torch.Generator().manual_seed(1))
    assert torch.equal(w[0], centred(z[0]))
    for layer in range(1, len(z)):
        assert w[layer].std(-1).mean() == pytest.approx(float(z[layer].std(-1).mean()), rel=0.03)
        ours, theirs = (float(correlation(x[layer], x[layer - 1]).mean()) for x in (w, z))
        assert ours == pytest.approx(theirs, abs=0.01)
        assert not torch.equal(w[layer].argmax(-1), z[layer].argmax(-1))


def test_a_row_that_does_not_change_has_a_walk_that_does_not_change():
    z = [torch.randn(3, 50, generator=torch.Generator().manual_seed(0))] * 4
    for w in random_walk(z, torch.Generator().manual_seed(1)):
        assert torch.allclose(w, centred(z[0]), atol=1e-5)


def test_logits_that_are_all_equal_at_first_are_handled():
    z = [torch.ones(2, 9), torch.randn(2, 9, generator=torch.Generator().manual_seed(0))]
    w = random_walk(z, torch.Generator().manual_seed(1))
    assert torch.allclose(w[1].sort(-1).values, centred(z[1]).sort(-1).values, atol=1e-6)


def test_each_row_is_shuffled_in_its_own_way():
    z = [torch.zeros(30, 200), torch.arange(200.0).expand(30, -1)]
    null = random_walk(z, torch.Generator().manual_seed(1))[1]
    assert len(null.argmax(-1).unique()) > 20


def read_both(transformer, share=0.4, seed=0, tokens=60):
    """Rows of some sentences and their random walks, through the logit lens."""
    examples = iter_examples(transformer, sentences(20), Sampling(positions="all"), side="both")
    batches = iter_batches(transformer, examples, tokens_per_batch=tokens)
    actual, walks = walked(
        transformer, {"logit": Lens(transformer)}, batches, share=share, seed=seed
    )
    return actual["logit"], walks["logit"]


def test_walks_name_their_rows():
    actual, walk = read_both(tiny("llama"))
    assert 0.3 < len(walk.rows) / len(actual) < 0.5
    real, null = actual.rows(walk.rows), walk.saturation
    assert torch.equal(real.documents, null.documents)
    assert torch.equal(real.positions, null.positions)
    assert null.layer.dtype == torch.int16
    assert (null.gold == -1).all()
    assert (null.n_layers, null.lens, null.k) == (3, "logit", 5)
    assert not torch.equal(real.tokens, null.tokens)


def test_walks_are_the_same_for_the_same_seed(monkeypatch):
    transformer = tiny("llama")
    first, again, other = (read_both(transformer, seed=s)[1] for s in (3, 3, 4))
    assert torch.equal(first.rows, again.rows)
    assert torch.equal(first.saturation.layer, again.saturation.layer)
    assert not torch.equal(first.rows, other.rows)
    monkeypatch.setattr("layerleap.memory.LOGITS", 61)  # a row at a time
    alone = read_both(transformer, seed=3)[1]
    assert torch.equal(alone.rows, first.rows)  # which rows does not depend on how they are cut
    assert torch.equal(read_both(transformer, seed=3, tokens=10**6)[1].rows, first.rows)


def test_a_share_must_be_one_and_leave_rows():
    transformer = tiny("llama")
    for share in (0, 1.5):
        with pytest.raises(BadSettings, match="above 0 and at most 1"):
            RandomWalks(transformer, {"logit": Lens(transformer)}, share=share)
    with pytest.raises(BadText, match="rows are too few to sample a share"):
        read_both(transformer, share=1e-9)
