"""Calibrated rules: the guarantee holds over many calibration sets."""

import math

import pytest
import torch
from scipy.stats import binom

from layerleap.act.exits.calibration import (
    Calibrated,
    calibrate,
    fixed_sequence,
    risk_control,
    rows_needed,
    upper_bound,
    verify,
)
from layerleap.act.exits.evidence import Evidence
from layerleap.act.exits.replay import replay, sweep
from layerleap.act.exits.rules import Entropy, TopProbability, family
from layerleap.errors import BadSettings, CannotFetch
from made_evidence import made

SPLITS, ROWS = 600, 250
KNOBS = torch.linspace(1, 0, 201, dtype=torch.float64).tolist()  # fine: risks on both sides


@pytest.fixture(scope="module")
def population() -> torch.Tensor:
    """(row, knob), safest first: whether a row of a large population is wrong at a knob."""
    evidence = made(40000, 6, seed=11)
    chosen = family(TopProbability)
    return ~sweep(chosen, evidence, KNOBS).agrees


def draws() -> torch.Tensor:
    generator = torch.Generator().manual_seed(12)
    return torch.randint(40000, (SPLITS, ROWS), generator=generator)


def risk_of(population: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    risk = population.double().mean(0)
    return torch.where(index >= 0, risk[index.clamp_min(0)], 0.0)


@pytest.mark.parametrize(("tolerance", "delta"), [(0.05, 0.1), (0.1, 0.05), (0.2, 0.2)])
def test_the_tolerance_is_exceeded_in_at_most_delta_of_calibration_sets(
    population, tolerance, delta
):
    errors = population[draws()].sum(1)  # (split, knob)
    risk = risk_of(population, fixed_sequence(errors, ROWS, tolerance, delta))
    # What chance would allow a procedure that fails exactly with probability delta.
    allowed = binom.ppf(0.999, SPLITS, delta) / SPLITS
    assert (risk > tolerance).double().mean() <= allowed
    assert risk.mean() > 0.3 * tolerance  # it is not safe by never exiting
    # The test can tell: taking the boldest knob that looks good enough breaks the guarantee.
    naive = (errors / ROWS <= tolerance).int().cumprod(-1).sum(-1) - 1
    assert (risk_of(population, naive) > tolerance).double().mean() > allowed


@pytest.mark.parametrize("tolerance", [0.05, 0.1, 0.2])
def test_risk_control_keeps_the_mean_risk_below_the_tolerance(population, tolerance):
    envelope = population.int().cummax(1).values
    risk = risk_of(population, risk_control(envelope[draws()].sum(1), ROWS, tolerance))
    slack = 3 * risk.std() / math.sqrt(SPLITS)
    assert risk.mean() <= tolerance + slack
    assert risk.mean() > 0.5 * tolerance


def test_the_rule_is_the_boldest_that_passed_every_test_before_it(population):
    evidence = made(40000, 6, seed=11).rows(draws()[0])
    calibrated = calibrate(family(TopProbability), evidence, 0.1, delta=0.05, knobs=KNOBS)
    index = int(fixed_sequence(population[draws()[0]].sum(0), ROWS, 0.1, 0.05))
    assert calibrated.rule == TopProbability(KNOBS[index])
    assert calibrated.observed == pytest.approx(1 - replay(calibrated.rule, evidence).agreement)
    assert calibrated.n == ROWS
    assert calibrated.observed < calibrated.bound <= 0.1


def test_a_bound_is_within_the_tolerance_exactly_when_the_test_passes():
    for errors in range(30):
        passes = binom.cdf(errors, 200, 0.08) <= 0.1
        assert (upper_bound(errors, 200, 0.1) <= 0.08) == passes
        assert fixed_sequence(torch.tensor([errors]), 200, 0.08, 0.1) == (0 if passes else -1)
    assert upper_bound(5, 5, 0.1) == 1


@pytest.mark.parametrize("method", ["ltt", "crc"])
@pytest.mark.parametrize("chosen", [family(TopProbability), family(Entropy)], ids=["top_prob", "H"])
def test_more_tolerance_never_gives_a_later_exit(method, chosen):
    evidence = made(400, seed=2)
    layers = []
    for tolerance in (0.02, 0.05, 0.1, 0.2, 0.4):
        calibrated = calibrate(chosen, evidence, tolerance, method=method)
        layers.append(
            6.0 if calibrated.rule is None else replay(calibrated.rule, evidence).mean_layer
        )
    assert layers == sorted(layers, reverse=True)
    assert layers[-1] < layers[0]


def test_risk_control_allows_at_least_as_much_as_the_test_with_confidence():
    evidence = made(400, seed=2)
    sure = calibrate(family(TopProbability), evidence, 0.1, delta=0.05)
    mean = calibrate(family(TopProbability), evidence, 0.1, method="crc")
    assert mean.delta is None
    assert mean.rule.threshold <= sure.rule.threshold
    assert mean.observed < mean.bound <= 0.1


def hopeless() -> Evidence:
    """Sure of the wrong token at every layer but the last."""
    evidence = made(300, documents=300)
    top = (evidence.final[:, None] + 1).expand(-1, 7).clone()
    top[:, -1] = evidence.final
    top_prob = torch.full((300, 7), 0.999999)
    return Evidence(
        **{**vars(evidence), "top": top, "top_prob": top_prob, "second_prob": 1 - top_prob}
    )


@pytest.mark.parametrize("method", ["ltt", "crc"])
def test_when_no_rule_is_good_enough_the_result_is_to_never_exit(method):
    calibrated = calibrate(family(TopProbability), hopeless(), 0.02, method=method)
    assert calibrated.rule is None
    assert "never exit" in calibrated.note
    verified = verify(calibrated, made(100))
    assert (verified.disagreement, verified.layers, verified.saved, verified.within) == (
        0,
        6,
        0,
        True,
    )


@pytest.mark.parametrize(
    ("tolerance", "delta", "method", "wanted"),
    [
        (0.05, 0.05, "ltt", 59),
        (0.01, 0.1, "ltt", 230),
        (0.5, 0.125, "ltt", 3),
        (0.05, None, "crc", 19),
        (0.03, None, "crc", 33),
        (0.5, None, "crc", 1),
    ],
)
def test_too_few_rows_are_refused_with_the_number_needed(tolerance, delta, method, wanted):
    assert rows_needed(tolerance, delta, method) == wanted
    settings = {"method": method} | ({} if delta is None else {"delta": delta})
    if wanted > 1:
        with pytest.raises(BadSettings, match=f"at least {wanted} are needed"):
            calibrate(family(TopProbability), made(wanted - 1), tolerance, **settings)
    enough = calibrate(family(TopProbability), made(wanted), tolerance, **settings)
    assert enough.n == wanted


def test_the_note_says_when_rows_are_not_independent():
    apart = calibrate(family(TopProbability), made(300), 0.2)
    together = calibrate(family(TopProbability), made(300, documents=10), 0.2)
    assert "not independent" not in apart.note
    assert "300 rows come from 10 documents and are not independent" in together.note
    assert apart.rule == together.rule


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tolerance": 0.0}, "tolerance 0.0"),
        ({"tolerance": 1.0}, "tolerance 1.0"),
        ({"delta": 0.0}, "delta 0.0"),
        ({"method": "hope"}, "method is 'hope'"),
    ],
)
def test_invalid_settings_are_refused(change, words):
    with pytest.raises(BadSettings, match=words):
        calibrate(family(TopProbability), made(100), **{"tolerance": 0.1, **change})


def test_knobs_may_be_given_in_any_order():
    evidence, knobs = made(300), [0.2, 0.9, 0.6, 1.0, 0.8]
    given = calibrate(family(TopProbability), evidence, 0.2, knobs=knobs)
    assert given == calibrate(family(TopProbability), evidence, 0.2, knobs=sorted(knobs))
    assert given.rule.threshold in knobs


def test_verify_reports_disagreement_and_savings_on_fresh_rows():
    calibrated = calibrate(family(TopProbability), made(500, seed=1), 0.1)
    fresh = made(400, seed=2, documents=80)
    verified = verify(calibrated, fresh)
    exits = replay(calibrated.rule, fresh)
    assert verified.disagreement == pytest.approx(1 - exits.agreement)
    assert verified.low <= verified.disagreement <= verified.high
    assert (verified.layers, verified.saved) == (exits.mean_layer, exits.saved)
    assert (verified.rows, verified.documents) == (400, 80)
    assert verified.within == (verified.disagreement <= 0.1)
    assert not verify(calibrated, hopeless()).within


def test_no_error_among_few_rows_is_not_taken_for_certainty():
    nothing = Calibrated(None, 0.1, 0.05, "ltt", 100, 0.0, 0.0, "never exit")
    verified = verify(nothing, made(20))
    assert (verified.disagreement, verified.low) == (0, 0)
    exact = 1 - 0.025 ** (1 / 20)
    assert exact <= verified.high < exact + 0.02  # Wilson's, by Student's t, is a little wider


def test_the_knob_is_the_last_before_the_first_that_fails():
    # Among 99 rows 1 error has probability 0.038 at a risk of 0.05, and 2 have 0.122.
    assert fixed_sequence(torch.tensor([0, 1, 2, 1]), 99, 0.05, 0.05) == 1
    # One error and one row more are counted than were verified: 5 / 101 will do, 6 / 101 will not.
    assert risk_control(torch.tensor([0, 4, 5, 5]), 100, 0.05) == 1


def test_risk_control_does_not_count_on_lucky_returns():
    """Four rows in a hundred are wrong at the safer knob, four others at the bolder one."""
    evidence = made(300, 3)
    top = evidence.final[:, None].expand(-1, 4).clone()
    top_prob = torch.full((300, 4), 0.1)
    top_prob[:, 2], top_prob[:, 1] = (
        0.9,
        0.5,
    )  # a threshold of 0.8 exits at layer 2, one of 0.3 at layer 1
    top[:12, 2] += 1
    top[12:24, 1] += 1
    made_up = Evidence(
        **{**vars(evidence), "top": top, "top_prob": top_prob, "second_prob": top_prob / 10}
    )
    calibrated = calibrate(family(TopProbability), made_up, 0.05, method="crc", knobs=[0.8, 0.3])
    assert calibrated.rule == TopProbability(0.8)
    assert calibrated.bound == 13 / 301
    loose = calibrate(family(TopProbability), made_up, 0.09, method="crc", knobs=[0.8, 0.3])
    assert loose.rule == TopProbability(0.3)
    assert (loose.observed, loose.bound) == (12 / 300, 25 / 301)


def test_a_saved_calibration_is_the_same_calibration():
    import json

    calibrated = calibrate(family(TopProbability), made(300, seed=4), 0.2)
    never = calibrate(family(TopProbability), hopeless(), 0.2)
    assert never.rule is None
    assert Calibrated.from_dict(json.loads(json.dumps(never.to_dict()))) == never
    assert calibrated.rule is not None
    assert Calibrated.from_dict(json.loads(json.dumps(calibrated.to_dict()))) == calibrated
    with pytest.raises(BadSettings, match="not a calibrated rule"):
        Calibrated.from_dict({"rule": None, "mood": 1})
    with pytest.raises(BadSettings, match="not a calibrated rule"):
        Calibrated.from_dict({})


def test_results_are_plain_json():
    import json

    calibrated = calibrate(family(TopProbability), made(300), 0.2)
    plain = json.loads(json.dumps(calibrated.to_dict()))
    assert plain["rule"] == {"name": "top-probability", "threshold": calibrated.rule.threshold}
    assert json.loads(json.dumps(verify(calibrated, made(50)).to_dict()))["rows"] == 50


def test_a_missing_library_is_one_clear_line(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(CannotFetch, match=r'pip install "layerleap\[learn\]"'):
        calibrate(family(TopProbability), made(300), 0.2)
