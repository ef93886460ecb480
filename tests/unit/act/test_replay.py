"""Replay, curves and savings, against brute force."""

import time

import pytest
import torch

from layerleap.act.exits.cost import Cost
from layerleap.act.exits.evidence import Evidence
from layerleap.act.exits.learned import Learned
from layerleap.act.exits.replay import curve, replay, sweep
from layerleap.act.exits.rules import (
    LAMBDAS,
    MORE_LAMBDAS,
    Entropy,
    Fixed,
    Gap,
    Never,
    Oracle,
    Patience,
    Similarity,
    TopProbability,
    family,
)
from layerleap.act.exits.savings import interpolated, saved_at
from layerleap.errors import BadSettings
from made_evidence import made, upto

FAMILIES = [
    family(Fixed),
    family(Gap, length=12.0),
    family(TopProbability),
    family(Entropy),
    family(Similarity),
    family(Patience),
    Learned.train(made(300, seed=9)),
]
COST = Cost((10.0,) * 6, 80.0, (1.0,) * 6 + (0.0,), d_model=4, context=8)


def test_evidence_that_does_not_reach_the_last_layer_is_not_replayed():
    with pytest.raises(BadSettings, match="layer 5"):
        replay(Never(), upto(made(50), 5))
    with pytest.raises(BadSettings, match="no rows"):
        replay(Never(), made(50).rows(torch.zeros(50, dtype=torch.bool)))


def test_evidence_of_some_layers_is_enough():
    evidence = made(50)
    some = [0, 2, 5, 6]
    cut = {
        k: getattr(evidence, k)[:, some]
        for k in ("top", "top_prob", "second_prob", "entropy", "cosine")
    }
    part = Evidence(**{**vars(evidence), **cut, "layers": (0, 2, 5, 6)})
    found = replay(TopProbability(0.6), part).layer
    sure = evidence.top_prob > 0.6
    assert found.tolist() == [2 if s[2] else 5 if s[5] else 6 for s in sure]


def test_a_curve_has_a_row_per_rule_with_its_intervals():
    evidence = made(200, documents=40)
    rules = [Gap(0.4, 12.0), Patience(2), Oracle(), Never()]
    rows = curve(rules, evidence, COST)
    for rule, row in zip(rules, rows, strict=True):
        exits = replay(rule, evidence)
        assert row["rule"] == rule.name
        assert row["layers"] == pytest.approx(exits.mean_layer)
        assert row["saved"] == pytest.approx(6 - exits.mean_layer)
        assert row["agreement"] == pytest.approx(exits.agreement)
        assert row["flops"] == COST.of(exits, rule)
        assert row["low"] <= row["agreement"] <= row["high"]
        assert row["saved_low"] <= row["saved"] <= row["saved_high"]
        assert (row["rows"], row["documents"]) == (200, 40)
    assert [row["knob"] for row in rows] == [0.4, 2, None, None]
    assert rows[0]["low"] < rows[0]["high"]
    assert rows[3]["low"] == rows[3]["high"] == 1


def test_a_curve_without_costs_or_documents_has_none():
    row = curve([Gap(0.4, 12.0)], made(30, documents=1))[0]
    assert row["flops"] is row["low"] is row["high"] is None
    with pytest.raises(BadSettings, match="no rule"):
        curve([], made(30))


def test_no_rule_that_always_agrees_saves_more_than_the_oracle():
    evidence = made(200)
    best = replay(Oracle(), evidence)
    assert best.agreement == 1
    for chosen in FAMILIES:
        assert saved_at(chosen, evidence, [1.0], resamples=5)[0].saved <= best.saved


def tried(chosen, evidence: Evidence) -> list[tuple[float, float]]:
    """(saved, agreement) of knobs on both sides of all scores there are, by replaying each."""
    scores, offset = chosen.parts(evidence)
    at = ((scores - offset[:, None]) / chosen.kind.slope).flatten()
    at = at[at.isfinite()].unique()
    knobs = at - 1 if chosen.kind.is_integer else torch.cat([at - 1e-7, at + 1e-7])
    fit = knobs[(knobs >= chosen.kind.least) & (knobs <= chosen.kind.most)].tolist()
    exits = [replay(chosen.at(knob), evidence) for knob in fit]
    return [(0.0, 1.0), *((e.saved, e.agreement) for e in exits)]


@pytest.mark.parametrize("chosen", FAMILIES, ids=lambda f: f.name)
@pytest.mark.parametrize("coarse", [False, True])
def test_the_exact_saving_is_the_best_of_all_knobs(chosen, coarse):
    evidence = made(40, seed=6, coarse=coarse)
    targets = (0.0, 0.6, 0.8, 0.9, 1.0)
    points = tried(chosen, evidence)
    for found, target in zip(
        saved_at(chosen, evidence, targets, resamples=5), targets, strict=True
    ):
        best = max(saved for saved, agreement in points if agreement >= target)
        assert found.saved == pytest.approx(best, abs=1e-12)
        if found.knob is not None:
            exits = replay(chosen.at(found.knob), evidence)
            assert exits.saved == pytest.approx(found.saved, abs=1e-12)
            assert exits.agreement == pytest.approx(found.agreement, abs=1e-12)
            assert exits.agreement >= target
        else:
            assert found.saved == 0


def test_the_interval_of_a_saving_is_that_of_resampled_documents():
    from layerleap.lens.intervals import resample_in_parts, resampled

    evidence, chosen = made(60, documents=12, seed=3), family(TopProbability)
    found = saved_at(chosen, evidence, [0.85], resamples=30, seed=4)[0]
    savings = []
    for counts in torch.cat(list(resample_in_parts(12, 30, 4))).int().tolist():
        index = [
            r
            for d, times in enumerate(counts)
            for _ in range(times)
            for r in range(60)
            if r % 12 == d
        ]
        drawn = evidence.rows(torch.tensor(index))
        savings.append(saved_at(chosen, drawn, [0.85], resamples=2)[0].saved)
    value = torch.tensor([found.saved], dtype=torch.float64)
    low, high = resampled(value, torch.tensor(savings, dtype=torch.float64)[:, None])
    assert [found.low, found.high] == pytest.approx([float(low), float(high)], abs=1e-12)
    assert found.low <= found.saved <= found.high


def test_one_document_gives_no_interval():
    found = saved_at(family(Entropy), made(60, documents=1), [0.9], resamples=10)[0]
    assert found.low is found.high is None
    assert found.to_dict()["documents"] == 1


@pytest.mark.parametrize("method", ["exact", "curve"])
def test_a_lower_target_never_saves_less(method):
    found = saved_at(FAMILIES[1], made(300), (0.7, 0.8, 0.9, 0.99, 1.0), method=method)
    saved = [s.saved for s in found]
    assert saved == sorted(saved, reverse=True)
    assert saved[0] > saved[-1]


def test_interpolation_is_linear_between_the_two_knobs_around_the_target():
    saved = torch.tensor([[0.0, 2.0, 4.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    agreement = torch.tensor([[1.0, 0.96, 0.92], [0.5, 0.4, 0.3], [1.0, 0.99, 0.98]])
    found = interpolated(saved.double(), agreement.double(), 0.95)
    # The second falls below at once, from (0, 1) to (1, 0.5); the third never does.
    assert found.tolist() == pytest.approx([2.5, 0.1, 3.0], abs=1e-6)


def test_interpolation_takes_the_boldest_crossing():
    saved = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    agreement = torch.tensor([[0.94, 0.96, 0.94, 0.9]], dtype=torch.float64)
    assert interpolated(saved, agreement, 0.95).item() == pytest.approx(2.5)


def test_the_paper_way_is_close_to_the_exact_one():
    evidence = made(500, seed=8)
    exact = saved_at(FAMILIES[1], evidence, resamples=20)
    grid = [lam / 50 for lam in range(-10, 56)]
    drawn = saved_at(FAMILIES[1], evidence, method="curve", knobs=grid, resamples=20)
    for one, other in zip(exact, drawn, strict=True):
        assert abs(one.saved - other.saved) < 0.15
        assert other.low <= other.saved <= other.high


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"targets": [1.5]}, "target 1.5"),
        ({"method": "guess"}, "method is 'guess'"),
        ({"knobs": [0.5]}, "knobs are for method 'curve'"),
    ],
)
def test_savings_refuse_invalid_settings(change, words):
    with pytest.raises(BadSettings, match=words):
        saved_at(family(Entropy), made(20), **change)


def test_a_sweep_refuses_an_invalid_knob():
    with pytest.raises(BadSettings, match="a probability"):
        sweep(family(TopProbability), made(20), [0.5, 1.5])


def test_thirty_five_thresholds_of_three_thousand_rows_take_less_than_a_second():
    evidence = made(3000, 30)
    chosen, knobs = family(Gap, length=12.0), [*LAMBDAS, *LAMBDAS, *MORE_LAMBDAS]
    start = time.perf_counter()
    swept = sweep(chosen, evidence, knobs)
    rows = curve([chosen.at(knob) for knob in knobs], evidence)
    assert time.perf_counter() - start < 1
    assert [row["layers"] for row in rows] == pytest.approx(swept.layer.double().mean(0).tolist())


def test_two_hundred_resamples_of_an_exact_saving_take_seconds_not_minutes():
    evidence = made(3000, 30, documents=600)
    start = time.perf_counter()
    found = saved_at(family(Gap, length=12.0), evidence, resamples=200)
    assert time.perf_counter() - start < 10
    assert all(s.low <= s.saved <= s.high for s in found)
