"""One rule decides all claims: intervals, never point estimates."""

import pytest

from layerleap.study.claims import (
    above,
    all_of,
    below,
    difference,
    more_than_half,
    share_of,
    untested,
)


def row(value, low, high):
    return {"value": value, "low": low, "high": high}


@pytest.mark.parametrize(
    ("estimate", "answer"),
    [
        (row(2.0, 1.5, 2.5), "yes"),
        (row(0.5, 0.1, 0.9), "no"),
        (row(2.0, 0.5, 3.5), "cannot tell"),  # the point alone would say yes
        (row(2.0, None, None), "cannot tell"),
        (row(1.0, 1.0, 1.0), "no"),  # not above itself
        (None, "cannot tell"),
    ],
)
def test_above_is_yes_only_if_the_whole_interval_is(estimate, answer):
    assert above(estimate, 1.0) == answer


def test_below_mirrors_above():
    assert below(row(0.0, -1.0, 0.5), 1.0) == "yes"
    assert below(row(2.0, 1.5, 2.5), 1.0) == "no"
    assert below(row(1.0, 0.5, 1.5), 1.0) == "cannot tell"
    assert below(row(1.0, 1.0, 1.0), 1.0) == "no"


def test_the_interval_of_a_difference_spans_all_differences():
    found = difference(row(5.0, 4.0, 6.0), row(1.0, 0.0, 3.0))
    assert found == {"value": 4.0, "low": 1.0, "high": 6.0}
    assert difference(row(5.0, None, None), row(1.0, 0.0, 3.0))["low"] is None


@pytest.mark.parametrize(
    ("answers", "answer"),
    [
        (["yes", "yes"], "yes"),
        (["no", "no"], "no"),
        (["yes", "no"], "partly"),
        (["yes", "cannot tell"], "cannot tell"),
        (["yes", "no", "cannot tell"], "partly"),
        ([], "cannot tell"),
    ],
)
def test_parts_of_a_claim_add_up(answers, answer):
    assert all_of(answers) == answer


@pytest.mark.parametrize(
    ("answers", "needed", "answer"),
    [
        (["yes"] * 6 + ["no"] * 4, 0.5, "yes"),
        (["yes"] * 4 + ["no"] * 6, 0.5, "no"),
        (["yes"] * 4 + ["cannot tell"] * 3 + ["no"] * 3, 0.5, "cannot tell"),
        ([], 0.5, "cannot tell"),
        (["no"] * 3, 1.0, "no"),
    ],
)
def test_a_claim_about_many_cases_counts_answers(answers, needed, answer):
    assert share_of(answers, needed) == answer


def test_an_untested_claim_says_why():
    verdict = untested("only one text was given")
    assert (verdict.agrees, verdict.seen) == ("not tested", "only one text was given")


def test_half_is_not_more_than_half():
    assert more_than_half(["yes", "yes", "no"]) == "yes"
    assert more_than_half(["yes", "no"]) == "no"
    assert more_than_half(["yes", "cannot tell", "no"]) == "cannot tell"
    assert more_than_half(["yes", "yes", "cannot tell", "cannot tell"]) == "cannot tell"
    assert more_than_half([]) == "cannot tell"
