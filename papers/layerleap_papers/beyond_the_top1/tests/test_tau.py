"""Strict tau, and nulls whose p-values are uniform when there is no order."""

import pytest
import torch

from layerleap.lens.readings import saturation_layers
from layerleap.lens.top import top_k
from layerleap_papers.beyond_the_top1.tau import (
    Cell,
    against_walk,
    exchangeable,
    p_value,
    strict_tau,
    taus,
)
from made_saturation import random_walk

LAST = 30


def tau_of(*layers, last=LAST):
    return float(strict_tau(torch.tensor([layers]), last))


def test_tau_is_1_in_order_and_minus_1_if_all_are_equal_or_reversed():
    assert tau_of(0, 1, 2, 3, 4) == 1
    assert tau_of(7, 7, 7, 7, 7) == -1
    assert tau_of(4, 3, 2, 1, 0) == -1


def test_ties_are_out_of_order():
    assert tau_of(1, 1, 2) == pytest.approx(1 / 3)


def test_ranks_after_the_last_that_saturates_are_cut_off():
    assert tau_of(1, 2, 3, LAST, LAST) == 1
    assert tau_of(LAST, 2, 3, LAST, LAST) == pytest.approx(-1 / 3)  # one before it is not
    assert tau_of(1, LAST, LAST, 2, LAST) == pytest.approx(2 * 4 / 6 - 1 - 2 / 6)


def test_a_row_with_fewer_than_three_ranks_to_compare_has_no_tau():
    assert torch.isnan(strict_tau(torch.tensor([[1, 2, LAST, LAST, LAST]]), LAST)).all()
    assert torch.isnan(strict_tau(torch.tensor([[LAST] * 5]), LAST)).all()


def test_tau_is_that_of_the_loops_that_define_it():
    generator = torch.Generator().manual_seed(0)
    layers = torch.randint(0, 7, (300, 5), generator=generator)
    found = strict_tau(layers, 6)
    for s, tau in zip(layers.tolist(), found.tolist(), strict=True):
        saturated = [i for i, layer in enumerate(s) if layer != 6]
        m = saturated[-1] + 1 if saturated else 0
        if m < 3:
            assert tau != tau
            continue
        pairs = [(i, j) for j in range(m) for i in range(j)]
        signs = [1 if s[i] < s[j] else -1 for i, j in pairs]
        assert tau == pytest.approx(sum(signs) / len(pairs))


def test_a_cell_leaves_out_the_top_token_and_filtered_rows():
    layers = torch.tensor([[9, 1, 2, 3], [2, 3, 2, 1]])
    assert taus(layers, LAST, Cell(first=1)).tolist() == [1, -1]
    cut = taus(layers, LAST, Cell(limit=8))
    assert cut[0].isnan()
    assert cut[1] == pytest.approx(2 / 6 - 1)


def test_p_values_count_what_was_seen_as_one_of_the_draws():
    assert p_value(torch.zeros(99), torch.tensor(1.0)) == pytest.approx(0.01)
    assert p_value(torch.zeros(19), torch.tensor(1.0)) <= 0.05  # in single precision it is above
    assert p_value(torch.ones(99), torch.tensor(1.0)) == 1.0
    assert p_value(torch.full((99,), torch.nan), torch.tensor(1.0)) == 1.0


def without_order(n_rows, generator):
    """Exchangeable layers of 5 ranks: each row has its own depth, and no order at all."""
    depth = torch.rand(n_rows, 1, generator=generator) * LAST
    spread = torch.rand(n_rows, 5, generator=generator) * 16 - 4
    return (depth + spread).round().clamp(0, LAST).to(torch.int16)


CELLS = {
    "all": Cell(),
    "filtered": Cell(limit=25),
    "ranks 2 to 5": Cell(first=1),
    "ranks 2 to 5, filtered": Cell(first=1, limit=25),
}


@pytest.mark.parametrize("cell", CELLS.values(), ids=list(CELLS))
def test_exchangeable_layers_give_uniform_p_values(cell):
    generator = torch.Generator().manual_seed(1)
    p = torch.tensor(
        [
            exchangeable(without_order(60, generator), LAST, cell, draws=99, seed=n)["p"]
            for n in range(300)
        ]
    )
    assert_uniform(p)


def assert_uniform(p):
    """Within three standard errors at every decile."""
    for level in torch.arange(1, 10) / 10:
        share = (p <= level + 1e-9).double().mean()
        error = (level * (1 - level) / len(p)).sqrt()
        assert abs(share - level) < 3 * error, (float(level), float(share))


def released(layers, limit, draws, seed):
    """The null of the paper's code: what filter and cut have left is permuted."""
    generator = torch.Generator().manual_seed(seed)
    kept = layers[layers[:, 0] <= limit]
    m = torch.where(kept != LAST, torch.arange(1, 6), 0).amax(-1)
    kept, m = kept[m >= 3], m[m >= 3]
    first, second = torch.triu_indices(5, 5, 1)

    def mean_tau(s):
        rising = ((s[:, first] < s[:, second]) & (second < m[:, None])).sum(-1)
        return (2 * rising / (m * (m - 1) / 2) - 1).mean()

    null = torch.stack(
        [
            mean_tau(kept.gather(1, torch.rand(kept.shape, generator=generator).argsort(1)))
            for _ in range(draws)
        ]
    )
    return float(mean_tau(kept)), float(null.mean()), p_value(null, mean_tau(kept))


def test_the_released_null_finds_order_where_there_is_none():
    """Independent layers, half of the rows kept: the case for which the gap was once measured."""
    layers = torch.randint(20, LAST + 1, (2000, 5), generator=torch.Generator().manual_seed(2))
    assert 0.5 < (layers[:, 0] <= 25).double().mean() < 0.6
    seen, null, p = released(layers, 25, 99, 0)
    assert seen > 0 > null
    assert seen > null + 0.1
    assert p == pytest.approx(0.01)  # the least that 99 draws can give
    ours = exchangeable(layers, LAST, Cell(limit=25), draws=99)
    assert ours["p"] > 0.05
    assert ours["mean"] == pytest.approx(seen, abs=0.03)


def test_order_is_found_where_it_is():
    generator = torch.Generator().manual_seed(3)
    layers = without_order(200, generator).sort(dim=1).values
    for cell in CELLS.values():
        found = exchangeable(layers, LAST, cell, draws=99)
        assert found["p"] == pytest.approx(0.01)
        assert found["low"] <= found["mean"] <= found["high"]


def walking(n_rows, generator, d_vocab=80, n_layers=8):
    """Logits of a structureless walk: (layer, row, d_vocab)."""
    steps = torch.randn(n_layers + 1, n_rows, d_vocab, generator=generator)
    return steps.cumsum(0)


def layers_of(logits):
    return saturation_layers(torch.stack([top_k(z, 5)[1] for z in logits], dim=1))


def test_a_random_walk_gives_uniform_p_values_against_its_doubles():
    generator = torch.Generator().manual_seed(4)
    documents = torch.arange(60) // 2
    p = []
    for seed in range(200):
        logits = walking(60, generator)
        double = layers_of(random_walk(logits, generator))
        found = against_walk(layers_of(logits), double, documents, 8, Cell(), draws=99, seed=seed)
        p.append(found["p"])
    assert_uniform(torch.tensor(p))


def test_a_random_walk_beats_exchangeable_ranks_but_not_its_doubles():
    """Why the second null is needed: a walk has order of its own."""
    generator = torch.Generator().manual_seed(5)
    logits = walking(800, generator, d_vocab=500, n_layers=20)
    layers, documents = layers_of(logits), torch.arange(800) // 10
    chance = exchangeable(layers, 20, Cell(), draws=99)
    found = against_walk(
        layers, layers_of(random_walk(logits, generator)), documents, 20, Cell(), draws=99
    )
    assert found["value"] > chance["mean"] + 0.1
    assert chance["p"] == pytest.approx(0.01)
    assert found["p"] > 0.05
    assert found["difference_low"] < 0 < found["difference_high"]


def test_ranks_that_settle_one_by_one_beat_their_doubles():
    generator = torch.Generator().manual_seed(6)
    logits = walking(100, generator, d_vocab=200, n_layers=12)
    for layer in range(13):
        for rank in range(5):
            # Token `rank` takes its place and keeps it, and was nowhere near before.
            logits[layer, :, rank] = 100.0 - rank if layer >= 2 * rank + 1 else -100.0
    layers = layers_of(logits)
    assert layers.tolist() == [[1, 3, 5, 7, 9]] * 100
    double = layers_of(random_walk(logits, generator))
    found = against_walk(layers, double, torch.arange(100) // 5, 12, Cell(), draws=99)
    assert found["value"] == 1
    assert found["p"] == pytest.approx(0.01)
    assert found["difference_low"] > 0
    assert (found["rows"], found["documents"]) == (100, 20)
