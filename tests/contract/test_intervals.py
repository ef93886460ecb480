"""Laws of intervals: an estimate lies inside its own, and no certainty comes from few cases."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from intervals import require_inside
from layerleap.act.exits.calibration import Calibrated, verify
from layerleap.act.exits.replay import curve
from layerleap.act.exits.rules import Entropy, Gap, Oracle, TopProbability, family
from layerleap.act.exits.savings import saved_at
from layerleap.lens.evaluate import evaluate
from layerleap.lens.intervals import (
    DIFFERENCE,
    POSITIVE,
    SHARE,
    Documents,
    freedom,
    mean_interval,
    nested_means,
    nested_ratios,
    resampled,
)
from layerleap.lens.map_errors import MapErrors
from layerleap.lens.probes.scores import score_probe
from layerleap.lens.reader import score_table
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.fit import fit
from layerleap.maps.linear import LinearMap
from layerleap.stream.examples import Sampling
from layerleap_papers.beyond_the_top1.guesses import guesses
from layerleap_papers.beyond_the_top1.tau import Cell, against_walk
from layerleap_papers.embedding_space.inner_products import keep_best
from layerleap_papers.embedding_space.overlaps import Depth
from made_evidence import made
from made_saturation import ignorant, saturation
from tiny_models import sentences, tiny


def some_documents(rng, most=30):
    """Two or more documents of unequal, heavy-tailed sizes."""
    sizes = np.minimum(40, rng.pareto(1.0, rng.integers(2, most)).astype(int) + 1)
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def scores(rng):
    documents = some_documents(rng)
    n, d = len(documents), 6
    likely = rng.beta(0.3, 0.3)
    rank = torch.tensor(rng.binomial(10, likely, (n, 4)))
    heavy = torch.tensor(rng.lognormal(0, 2, (n, 4)))
    columns = {"rank": rank, "surprisal": heavy, "kl": heavy}
    table = score_table(documents, {name: {"logit": v} for name, v in columns.items()}, {})
    bank = ShortcutBank(
        [LinearMap(0, 1, weight=torch.tensor(rng.normal(size=(d, d))).float() / 3)],
        model={"name": "made up"},
        n_layers=1,
        d_model=d,
    )
    errors = MapErrors(bank)
    h = torch.tensor(rng.standard_t(3, (n, d))).float()
    states = {0: h, 1: h @ bank[0, 1].weight + torch.tensor(rng.normal(size=(n, d))).float()}
    errors.add(states, SimpleNamespace(documents=documents, positions=torch.zeros(n)))
    return [table, errors.table(), errors.leads()]


def exits(rng):
    evidence = made(
        int(rng.integers(20, 90)), documents=int(rng.integers(2, 15)), seed=int(rng.integers(2**31))
    )
    chosen = [Gap(float(rng.random()), 9.0), TopProbability(float(rng.random())), Oracle()]
    rule = Calibrated(chosen[1], 0.1, 0.05, "ltt", 100, 0.0, 0.0, "")
    savings = saved_at(family(Entropy), evidence, (0.7, 0.9, 0.98), resamples=40)
    grid = saved_at(family(Entropy), evidence, (0.7, 0.9), method="curve", resamples=40)
    return [
        curve(chosen, evidence),
        [s.to_dict() for s in savings + grid],
        verify(rule, evidence).to_dict(),
    ]


def saturations(rng):
    seed = int(rng.integers(2**31))
    real, walk = (
        saturation(120, per_document=int(rng.integers(2, 9)), seed=seed + n, in_order=not n)
        for n in (0, 1)
    )
    gold = torch.tensor(rng.integers(0, 50, 120)).int()
    early = guesses(type(real)(real.layer, real.tokens, gold, *_rest(real)), lead=6)
    test = against_walk(real.layer, walk.layer, real.documents, 12, Cell(), draws=40)
    return [early, test]


def _rest(one):
    return one.documents, one.positions, one.n_layers, one.lens


def nested(rng):
    groups = [
        torch.tensor(rng.binomial(1, rng.beta(0.5, 0.5), (int(rng.integers(2, 30)), 2))).double()
        for _ in range(rng.integers(1, 5))
    ]
    counted = [torch.tensor(rng.integers(0, 3, group.shape)) for group in groups]
    hits = [torch.minimum(a, b) for a, b in zip(groups, counted, strict=True)]
    found = [*nested_means(groups, bounds=SHARE), *nested_ratios(hits, counted, bounds=SHARE)]
    return [one.to_dict() for one in found]


def vectors(rng):
    depth = Depth()
    for block in range(1, 4):
        values = torch.tensor(rng.beta(0.2, 2, (int(rng.integers(3, 40)), 2)))
        depth.add(block, "plain", {("a", "own"): values[:, 0], ("a", "lead"): values[:, 1]})
    rows = torch.tensor(rng.normal(size=(int(rng.integers(4, 12)), 5))).float()
    kept = keep_best(rows, torch.tensor(rng.normal(size=(40, 5))).float(), [2, 4, 16, 40])
    return [depth.rows, depth.over_all(), list(kept.rows()), kept.crossing()]


def probes(rng):
    of = saturation(160, per_document=4, seed=int(rng.integers(2**31)))
    return score_probe(of, ignorant(of, 8), permutations=1).to_dict()["rows"]


MADE = {
    "scores": (scores, 60),
    "exits": (exits, 50),
    "saturation": (saturations, 30),
    "nested": (nested, 35),
    "vectors": (vectors, 20),
    "probes": (probes, 2),
}


@pytest.mark.parametrize("name", MADE)
def test_an_estimate_lies_inside_its_own_interval_on_random_data(name):
    make, times = MADE[name]
    for seed in range(times):
        require_inside(make(np.random.default_rng(seed)))


def test_every_printed_interval_of_an_evaluation_contains_its_estimate():
    model = tiny("llama")
    bank = fit(model, sentences(60), Sampling(positions="all"), evaluate=False, progress=False)
    for seed in range(5):
        texts = sentences(8, seed=seed)
        require_inside(evaluate(model, bank, texts, Sampling(), side="both").to_dict(), 40)


@pytest.mark.parametrize(("hits", "low", "high"), [(0, 0, 0.2), (30, 0.8, 1), (1, 0, 0.35)])
def test_a_share_of_none_or_all_or_one_is_not_certain(hits, low, high):
    values = (torch.arange(30) < hits).double()[:, None]
    (one,) = mean_interval(values, torch.arange(30), SHARE)
    assert low <= one.low <= one.value <= one.high <= high
    assert one.high - one.low > 0.1
    (gap,) = mean_interval(values * 0, torch.arange(30), DIFFERENCE)
    assert -0.2 < gap.low < 0 < gap.high < 0.2


def test_rows_that_are_all_alike_in_few_documents_prove_less_than_in_many():
    widths = []
    for documents in (2, 20, 400):
        (one,) = mean_interval(torch.zeros(400, 1), torch.arange(400) % documents, SHARE)
        widths.append(one.high)
    assert widths[0] > 2 * widths[1] > 4 * widths[2] > 0


def test_documents_of_one_size_give_students_interval():
    values = torch.randn(12, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (one,) = mean_interval(values, torch.arange(12))
    reach = stats.t.ppf(0.975, 11) * float(values.std()) / math.sqrt(12)
    assert (one.low, one.high) == pytest.approx((one.value - reach, one.value + reach), rel=1e-5)


def test_few_large_documents_leave_fewer_degrees_of_freedom():
    assert freedom(torch.ones(20)) == pytest.approx(19)
    assert freedom(torch.tensor([100.0] * 3 + [1.0] * 17)) < 4
    assert freedom(torch.tensor([100.0, 1.0])) == 1


def test_a_positive_mean_has_a_positive_low_end_and_more_room_above():
    values = torch.tensor([[0.01], [0.02], [0.03], [9.0]])
    (one,) = mean_interval(values, torch.arange(4), POSITIVE)
    assert 0 < one.low < one.value
    assert one.high - one.value > one.value - one.low


def test_what_is_the_same_in_all_documents_and_has_no_end_has_no_width():
    (one,) = mean_interval(torch.full((9, 1), 0.3), torch.arange(9) % 3, POSITIVE)
    assert (one.low, one.value, one.high) == pytest.approx((0.3, 0.3, 0.3))


def test_a_mean_that_is_not_known_has_no_interval():
    (one,) = mean_interval(torch.tensor([[1.0], [math.nan], [2.0]]), torch.arange(3), POSITIVE)
    assert one.to_dict()["low"] is one.to_dict()["high"] is None


def test_intervals_of_means_are_those_of_the_function_that_divides_sums():
    rng = np.random.default_rng(3)
    documents = some_documents(rng)
    values = torch.tensor(rng.normal(size=(len(documents), 1)))
    (one,) = mean_interval(values, documents)
    both = torch.cat([values, torch.ones_like(values)], dim=1)
    _, low, high = Documents(documents).of(lambda sums: sums[..., 0] / sums[..., 1], both)
    assert (one.low, one.high) == pytest.approx((float(low), float(high)))


def test_percentiles_that_miss_their_value_are_moved_to_contain_it():
    samples = torch.linspace(0, 1, 201, dtype=torch.float64)[:, None]
    for value in (-0.5, 0.01, 0.5, 0.99, 1.5):
        low, high = resampled(torch.tensor([value], dtype=torch.float64), samples)
        assert float(low) <= value <= float(high)
    low, high = resampled(torch.tensor([0.5], dtype=torch.float64), samples)
    assert (float(low), float(high)) == pytest.approx((0.025, 0.975), abs=0.01)


def test_r2_of_few_documents_is_covered_as_often_as_said():
    """Percentiles of resampled documents cover it in one of five sets; truth from many rows."""
    rng = np.random.default_rng(0)
    d, hits, times = 16, 0, 60
    bank = ShortcutBank(
        [LinearMap(0, 1, weight=torch.eye(d))], model={"name": "made up"}, n_layers=1, d_model=d
    )
    for _ in range(times):
        documents = torch.arange(10).repeat_interleave(2)
        h = torch.tensor(rng.normal(size=(20, d)))
        y = (h + torch.tensor(rng.normal(size=(20, d))) * 0.5).float()
        errors = MapErrors(bank)
        errors.add({0: h.float(), 1: y}, SimpleNamespace(documents=documents, positions=documents))
        row = errors.table()[0]
        hits += row["low"] <= 1 - 0.25 / 1.25 <= row["high"]
    # With 95 %, fewer than 51 of 60 happen once in a thousand times.
    assert hits >= 51
