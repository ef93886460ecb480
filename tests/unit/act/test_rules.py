"""Exit rules computed by hand, and what they refuse."""

import pytest
import torch

from layerleap.act.exits.evidence import Evidence
from layerleap.act.exits.rules import (
    Entropy,
    Fixed,
    Gap,
    Never,
    Oracle,
    Patience,
    Similarity,
    TopProbability,
    family,
    rule_from_dict,
)
from layerleap.errors import BadSettings, NotFinite
from made_evidence import partial_evidence


def one_row(layers: tuple[int, ...] | None = None, position: int = 0, **columns) -> Evidence:
    values = {name: torch.tensor([value]) for name, value in columns.items()}
    n = next(iter(values.values())).shape[1]
    where = torch.tensor([position])
    final = values.pop("final", None)
    found = partial_evidence(layers or tuple(range(n)), where, torch.zeros(1), **values)
    return found if final is None else Evidence(**{**vars(found), "final": final[:, 0]})


def first(rule, evidence: Evidence) -> int | None:
    stops = rule.stops(evidence)[0]
    return evidence.layers[int(stops.int().argmax())] if stops.any() else None


def test_the_gap_must_pass_the_papers_threshold_strictly():
    # At position 0 the bar is 0.9 * 0.5 + 0.1 = 0.55, far into the text 0.45.
    second_prob = [0.0, 0.0, 0.0]
    assert first(Gap(0.5, 8.0), one_row(top_prob=[0.9, 0.5, 0.56], second_prob=second_prob)) == 2
    assert (
        first(
            Gap(0.5, 8.0), one_row(top_prob=[0.9, 0.5, 0.56], second_prob=second_prob, position=800)
        )
        == 1
    )
    # 0.9 * 0 + 0.1 exp(0): a gap of exactly 0.1 is not above it.
    double = {"top_prob": [[0.0, 0.1, 0.2]], "second_prob": [[0.0, 0.0, 0.0]]}
    exact = {name: torch.tensor(value, dtype=torch.float64) for name, value in double.items()}
    evidence = partial_evidence((0, 1, 2), torch.zeros(1), torch.zeros(1), **exact)
    assert first(Gap(0.0, 8.0), evidence) == 2


def test_the_temperature_decides_how_fast_the_bar_falls():
    evidence = one_row(top_prob=[0.0, 0.05], second_prob=[0.0, 0.0], position=8)
    assert first(Gap(0.0, 8.0, 4.0), evidence) == 1  # 0.1 exp(-4) = 0.002
    assert first(Gap(0.0, 8.0, 0.5), evidence) is None  # 0.1 exp(-0.5) = 0.06


def test_thresholds_are_strict():
    assert first(TopProbability(0.5), one_row(top_prob=[0.9, 0.5, 0.75])) == 2
    assert first(Entropy(0.5), one_row(entropy=[0.0, 0.5, 0.25])) == 2
    assert first(Similarity(0.5), one_row(cosine=[torch.nan, 0.5, 0.75])) == 2


def test_the_safest_thresholds_never_exit_even_when_rounding_oversteps():
    assert first(TopProbability(1.0), one_row(top_prob=[0.0, 1.00001])) is None
    assert first(Entropy(0.0), one_row(entropy=[0.0, -1e-6])) is None
    assert first(Similarity(1.0), one_row(cosine=[torch.nan, 1.00001])) is None


def test_patience_counts_layers_in_a_row_and_not_layer_zero():
    top = [5, 5, 5, 6, 6, 6]
    assert [first(Patience(k), one_row(top=top)) for k in (1, 2, 3, 4)] == [1, 2, 5, None]


def test_a_fixed_exit_takes_the_next_checked_layer():
    assert first(Fixed(3), one_row(top=[1, 1, 1], layers=(2, 4, 8))) == 4
    assert first(Fixed(9), one_row(top=[1, 1, 1], layers=(2, 4, 8))) is None


def test_the_oracle_takes_the_first_layer_that_agrees_but_not_layer_zero():
    assert first(Oracle(), one_row(top=[7, 3, 7, 3, 7], final=[7])) == 2
    with pytest.raises(BadSettings, match="model's own answer"):
        Oracle().stops(one_row(top=[1, 2]))


@pytest.mark.parametrize(
    ("rule", "need"),
    [
        (Gap(0.5, 4.0), "reading"),
        (TopProbability(0.5), "reading"),
        (Entropy(0.5), "reading"),
        (Patience(2), "reading"),
        (Similarity(0.5), "state"),
    ],
)
def test_a_rule_refuses_evidence_without_what_it_needs(rule, need):
    assert rule.needs == need
    blank = partial_evidence((0, 1, 2), torch.zeros(2), torch.zeros(2))
    with pytest.raises(NotFinite, match=f"needs a {need} at layer 1"):
        rule.stops(blank)


def test_rules_that_need_nothing_work_without_readings():
    blank = partial_evidence((0, 1, 2), torch.zeros(2), torch.zeros(2))
    assert Fixed(2).stops(blank).tolist() == [[False, False, True]] * 2
    assert not Never().stops(blank).any()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Fixed(0), "rule 'fixed' got layer 0; expected a layer from 1 on"),
        (lambda: Fixed(1.5), "layer 1.5"),
        (lambda: Fixed(True), "layer True"),
        (lambda: Gap(float("nan"), 3.0), "any finite number"),
        (lambda: Gap(float("inf"), 3.0), "any finite number"),
        (lambda: Gap(0.5, 0.0), "length"),
        (lambda: Gap(0.5, 3.0, -1.0), "temperature"),
        (lambda: TopProbability(1.1), "a probability from 0 to 1"),
        (lambda: TopProbability("0.5"), "a probability from 0 to 1"),
        (lambda: Entropy(-0.1), "an entropy in nats"),
        (lambda: Similarity(1.2), "a cosine from -1 to 1"),
        (lambda: Patience(0), "a number of layers from 1 on"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_range(make, words):
    with pytest.raises(BadSettings, match=words):
        make()


def test_the_papers_lambdas_may_be_any_finite_number():
    assert [Gap(lam, 3.0).lam for lam in (-1.112, 1.112, 7)] == [-1.112, 1.112, 7]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"name": "psychic"}, "unknown rule 'psychic'; expected one of: fixed"),
        ({}, "unknown rule None"),
        ({"name": "fixed"}, "wrong fields for rule 'fixed'"),
        ({"name": "fixed", "layer": 2, "mood": 1}, "wrong fields for rule 'fixed'"),
        ({"name": "fixed", "layer": 0}, "a layer from 1 on"),
        ({"name": "learned", "threshold": 0.5}, "wrong fields for rule 'learned'"),
    ],
)
def test_an_invalid_description_is_refused(data, words):
    with pytest.raises(BadSettings, match=words):
        rule_from_dict(data)


def test_a_family_turns_its_knob_and_knows_the_direction():
    assert family(Gap, length=9.0).at(0.25) == Gap(0.25, 9.0)
    assert family(Patience).at(3.0) == Patience(3)
    assert family(TopProbability).direction == "later"
    assert family(Entropy).direction == "earlier"


def test_an_invalid_family_is_refused():
    with pytest.raises(BadSettings, match="has no knob"):
        family(Never)
    with pytest.raises(BadSettings, match="leave it out"):
        family(Fixed, layer=2)
    with pytest.raises(BadSettings, match="wrong fields for rule 'gap'"):
        family(Gap)
    with pytest.raises(BadSettings, match="a grid of 1 knobs is too small"):
        family(Entropy).grid(1, 5)
    with pytest.raises(BadSettings, match="a number of layers"):
        family(Patience).at(2.5)
