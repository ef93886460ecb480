"""Speeds of rules tried live: fair to chance, with few texts and several rules."""

import torch

from layerleap.act.decode.decoding_stats import DecodingStats
from layerleap_papers.beyond_the_top1.live_exits import _row


def stats(seconds: float) -> DecodingStats:
    made = DecodingStats(4, "approximate", 3)
    made.seconds, made.layers, made.compared, made.agreed = seconds, [4, 4, 4], 2, 2
    return made


def sides(n: int, generator: torch.Generator) -> list[list[DecodingStats]]:
    noise = 1 + 0.05 * torch.randn(2, n, generator=generator)
    return [[stats(float(value)) for value in row] for row in noise]


def test_the_fastest_of_ten_equal_rules_is_seldom_called_faster():
    generator = torch.Generator().manual_seed(0)
    called = 0
    for _ in range(200):
        rows = [_row("linear", "rule", *sides(4, generator), 10) for _ in range(10)]
        called += any(row["is_faster"] for row in rows)
    assert called <= 20  # one in forty is what is promised


def test_intervals_of_four_texts_hold_the_truth():
    generator = torch.Generator().manual_seed(1)
    rows = [_row("linear", "rule", *sides(4, generator), 1) for _ in range(400)]
    inside = sum(row["low"] <= 1 <= row["high"] for row in rows)
    assert 0.92 <= inside / 400 <= 0.98


def test_a_rule_twice_as_fast_is_called_faster_and_one_text_says_nothing():
    fast, slow = (
        [stats(1.0 + n / 99) for n in range(4)],
        [stats(2.0 - n / 99) for n in range(4)],
    )
    row = _row("linear", "rule", fast, slow, 10)
    assert row["is_faster"]
    assert 1.8 < row["low"] < row["speed"] < row["high"] < 2.2
    alone = _row("linear", "rule", fast[:1], slow[:1], 10)
    assert (alone["low"], alone["high"], alone["is_faster"]) == (None, None, False)
