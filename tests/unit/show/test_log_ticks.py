"""Ticks of a log axis: every one is labelled with its own value."""

import pytest

from layerleap.show.figures.axes import _log_tick


@pytest.mark.parametrize(
    ("value", "label"),
    [
        (0.5, "0.5"),
        (1000, "1000"),
        (2000, "2k"),
        (50_000, "50k"),
        (1e4, "10\u2074"),
        (1e-5, "10\u207b\u2075"),
        (2e-5, "2e-05"),
        (2e6, "2e+06"),
    ],
)
def test_a_tick_between_powers_of_ten_is_not_rounded_to_one(value, label):
    assert _log_tick(value, 0) == label
