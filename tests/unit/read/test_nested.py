"""Intervals over seeds and queries."""

import math

import pytest
import torch

from layerleap.read.metrics import mean_interval
from layerleap.read.nested import nested_means, nested_ratios


def test_with_one_seed_the_interval_is_the_bootstrap_over_queries():
    values = torch.randn(60, 1, generator=torch.Generator().manual_seed(0))
    ours = nested_means([values])[0]
    theirs = mean_interval(values, torch.arange(60))[0]
    assert ours.value == pytest.approx(theirs.value)
    assert ours.low == pytest.approx(theirs.low, abs=0.03)
    assert ours.high == pytest.approx(theirs.high, abs=0.03)


def test_seeds_that_differ_widen_the_interval():
    groups = [torch.full((50, 1), float(level)) for level in (0, 1, 2)]
    estimate = nested_means(groups)[0]
    assert estimate.value == 1
    assert (estimate.low, estimate.high) == (0, 2)  # all three draws may be the same seed
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


def test_one_query_has_no_interval():
    assert nested_means([torch.ones(1, 1)])[0].low is None
