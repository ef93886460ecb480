"""Early runners-up against late ones: the textbook test, and plain words if it cannot be made."""

import json

import pytest
import torch

from layerleap.errors import BadSettings, BadText
from layerleap.lens.saturation import Saturation
from layerleap_papers.beyond_the_top1.guesses import guesses, words

LAST = 12


def made(early_right, late_right, n=400, documents=40, top_right=50):
    """Rows of which half have an early rank 2, half a late one, right at the given rates."""
    generator = torch.Generator().manual_seed(0)
    total = 2 * n + top_right
    layer = torch.full((total, 4), LAST - 2)
    layer[:n, 1], layer[n : 2 * n, 1] = 3, LAST
    tokens = torch.arange(4).expand(total, -1).clone()
    gold = torch.full((total,), 9)
    right = torch.rand(n, generator=generator) < early_right
    gold[:n][right] = 1
    right = torch.rand(n, generator=generator) < late_right
    gold[n : 2 * n][right] = 1
    gold[2 * n :] = 0  # the top token is right: these are left out
    order = torch.randperm(total, generator=generator)
    found = Saturation(
        layer.to(torch.int16),
        tokens.int(),
        gold.int(),
        torch.arange(total) % documents,
        torch.arange(total),
        LAST,
        "logit",
    )
    return found.rows(order)


def test_a_difference_is_found_where_it_is():
    rows = guesses(made(0.3, 0.1))
    test = rows[0]
    assert (test["rows"], test["wrong"], test["documents"]) == (850, 800, 40)
    assert (test["lead"], test["early_until"]) == (7, 5)
    assert test["early_are"] == "right more often"
    assert test["low"] < 0.2 < test["high"]
    assert test["p"] < 1e-6
    assert words(test).endswith("early tokens are right more often.")
    json.dumps(rows, allow_nan=False)


def test_a_p_value_never_underflows_to_zero():
    test = guesses(made(0.95, 0.02, n=6000))[0]
    assert test["z"] > 40
    assert test["p"] == 1e-300
    assert "p < 1e-300" in words(test)
    clear = guesses(made(0.5, 0.1))[0]  # 1 - cdf was 0 here
    assert clear["z"] > 8.5
    assert 0 < clear["p"] < 1e-16


def test_the_other_way_round_is_said_as_well():
    assert guesses(made(0.1, 0.3))[0]["early_are"] == "right less often"


def test_equal_rates_are_not_clearly_different():
    test = guesses(made(0.2, 0.2))[0]
    assert test["early_are"] == "not clearly different"
    assert test["p"] > 0.05


def test_the_test_is_the_textbooks():
    """45 of 200 against 30 of 250; z and Wilson intervals worked out apart, by hand.

    Ours use Student's t instead of the normal distribution, so they are a little wider.
    """
    layer = torch.full((450, 2), LAST - 1)
    layer[:200, 1], layer[200:, 1] = 0, LAST
    gold = torch.full((450,), 5)
    gold[:45] = gold[200:230] = 1
    tokens = torch.tensor([0, 1]).expand(450, -1)
    rows = torch.arange(450)
    made_up = Saturation(layer, tokens, gold, rows, rows, LAST, "logit")
    test = guesses(made_up, ranks=(2,))[0]
    pooled = 75 / 450
    z = (45 / 200 - 30 / 250) / (pooled * (1 - pooled) * (1 / 200 + 1 / 250)) ** 0.5
    assert test["z"] == pytest.approx(z)
    assert test["z"] == pytest.approx(2.970, abs=1e-3)
    assert test["p"] == pytest.approx(0.00298, abs=1e-5)
    assert (test["early_low"], test["early_high"]) == pytest.approx((0.1726, 0.2877), abs=1e-3)
    assert (test["late_low"], test["late_high"]) == pytest.approx((0.0854, 0.1661), abs=1e-3)


def test_ranks_without_enough_guesses_say_how_many_are_needed():
    second, third, fourth = guesses(made(0.3, 0.1, n=20))
    assert second["p"] is None
    assert second["needed"] > 40
    needed = f"about {second['needed']} such rows are needed."
    assert f"Too few are right to test this; {needed}" in words(second)
    assert third["p"] is None
    assert third["needed"] is None  # none is early, so these rows cannot say
    assert "Too few are right to test this; more rows are needed." in words(fourth)
    assert fourth["rank"] == 4


def test_one_document_has_no_interval():
    test = guesses(made(0.3, 0.1, documents=1))[0]
    assert test["early_are"] is None
    assert "a single document cannot tell" in words(test)


def test_what_cannot_be_asked_is_refused():
    rows = made(0.3, 0.1)
    with pytest.raises(BadSettings, match="choose a lead of 1 to 12"):
        guesses(rows, lead=13)
    with pytest.raises(BadSettings, match="name ranks from 2 on"):
        guesses(rows, ranks=(1,))
    with pytest.raises(BadSettings, match="read more ranks"):
        guesses(rows, ranks=(5,))
    with pytest.raises(BadText, match="the top token is right in all 50 rows"):
        guesses(rows.rows(rows.gold == 0))
    unknown = Saturation(**{**vars(rows), "gold": torch.full_like(rows.gold, -1)})
    with pytest.raises(BadText, match="right answer is unknown in all 850 rows"):
        guesses(unknown)
