"""Intervals over seeds and queries."""

import math

import pytest
import torch

from layerleap.lens.intervals import mean_interval, nested_means, nested_ratios, t_quantile


def test_with_one_seed_the_interval_is_that_over_queries():
    values = torch.randn(60, 1, generator=torch.Generator().manual_seed(0))
    ours = nested_means([values])[0]
    theirs = mean_interval(values, torch.arange(60))[0]
    assert ours.value == pytest.approx(theirs.value)
    assert ours.low == pytest.approx(theirs.low)
    assert ours.high == pytest.approx(theirs.high)


def test_values_that_are_not_known_are_not_counted_and_one_alone_has_no_interval():
    nan = math.nan
    values = torch.tensor([[0.5, 0.1], [nan, 0.2], [nan, nan], [nan, 0.6]])
    one, three = nested_means([values])
    assert (one.value, one.low, one.high, one.rows) == (0.5, None, None, 1)
    assert (three.rows, three.value) == (3, pytest.approx(0.3))
    assert three.low < 0.3 < three.high


def test_seeds_that_differ_widen_the_interval():
    groups = [torch.full((50, 1), float(level)) for level in (0, 1, 2)]
    estimate = nested_means(groups)[0]
    assert estimate.value == 1
    margin = 4.302653 / math.sqrt(3)  # Student's t with two degrees of freedom
    assert estimate.low == pytest.approx(1 - margin)
    assert estimate.high == pytest.approx(1 + margin)
    bounded = nested_means(groups, bounds=(0, 2))[0]
    assert (bounded.low, bounded.high) == (0, 2)
    assert (estimate.rows, estimate.seeds) == (150, 3)


def test_what_was_not_measured_is_left_out():
    values = torch.tensor([[1.0, math.nan], [3.0, 5.0], [math.nan, math.nan]])
    first, second = nested_means([values])
    assert (first.value, second.value) == (2, 5)
    assert nested_means([torch.full((3, 1), math.nan)])[0].to_dict()["value"] is None


def test_a_ratio_is_of_sums_over_all_seeds():
    hits = [torch.tensor([[1], [0]]), torch.tensor([[1], [1]])]
    counted = [torch.tensor([[1], [1]]), torch.tensor([[1], [5]])]
    assert nested_ratios(hits, counted)[0].value == 3 / 8


@pytest.mark.parametrize(
    ("freedom", "t"),
    [
        (1, 12.706205),
        (1.5, 6.016659),
        (2, 4.302653),
        (3, 3.182446),
        (4, 2.776445),
        (9, 2.262157),
        (30, 2.042272),
    ],
)
def test_quantiles_are_those_of_students_t(freedom, t):
    assert t_quantile(freedom) == pytest.approx(t, abs=1e-5)


def test_seeds_that_agree_leave_the_interval_over_queries_as_it_is():
    values = torch.randn(60, 1, generator=torch.Generator().manual_seed(0))
    three = nested_means([values, values, values])[0]
    assert three.high - three.low < nested_means([values])[0].high - nested_means([values])[0].low


def test_a_seed_that_counts_nothing_does_not_widen_the_interval():
    hits, counted = torch.ones(20, 1), torch.ones(20, 1)
    nothing = torch.zeros(20, 1)
    estimate = nested_ratios([hits, nothing], [counted, nothing])[0]
    assert (estimate.low, estimate.value, estimate.high) == (1, 1, 1)


def test_one_query_has_no_interval():
    assert nested_means([torch.ones(1, 1)])[0].low is None
