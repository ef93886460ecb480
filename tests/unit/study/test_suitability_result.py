"""The answer of a suitability study, and whether its sentences say what the numbers say."""

from typing import Any

import pytest

from layerleap.act.exits.calibration import Calibrated, Verified
from layerleap.act.exits.cost import Cost
from layerleap.act.exits.rules import Fixed
from layerleap.act.exits.timing import Timing
from layerleap.errors import BadSettings
from layerleap.lens.intervals import Estimate
from layerleap.study.suitability.candidates import BreakEven, Candidate, Ceiling, DryRun, Outcome
from layerleap.study.suitability.result import Suitability, answer_of

CANDIDATE = Candidate("mat", "learned", (6,), "layer 6")


def estimate(value: float, low: float | None, high: float | None, documents: int = 20) -> Estimate:
    return Estimate(value, low, high, 300, documents)


def outcome(
    time: Estimate, *, exits: bool = True, low: float = 0.01, most: float | None = 2.0
) -> Outcome:
    rule = Fixed(6) if exits else None
    calibrated = Calibrated(rule, 0.05, 0.05, "ltt", 90, 0.0, 0.0, "")
    verified = Verified(0.03, low, 0.2, 6.0, 4.0, 0.05, True, 300, 20)
    even = BreakEven(1.5, most, 4.0, 1.5)
    return Outcome(CANDIDATE, calibrated, verified, time, 0.8, even if exits else None)


def result(chosen: Outcome | None, **timing: Any) -> Suitability:
    part = {"rows": 90, "documents": 7}
    values = [0.1] * 5 + [0.5, 0.99, 0.9, 0.96, 0.97, 1.0]
    timed = {"context": 32, "mode": "cached", "repeats": 20, "spread": 0.1, **timing}
    return Suitability(
        model={"name": "made-up"},
        settings={"tolerance": 0.05, "delta": 0.05},
        data=[],
        made_by={},
        notes=[],
        splits={"choose": part, "calibrate": part},
        agreement={name: [estimate(v, None, None) for v in values] for name in ("id", "mat")},
        ceilings=[Ceiling("mat", estimate(6.0, 5.5, 6.5), estimate(0.6, 0.5, 0.7))],
        timing=Timing((0.001,) * 10, 0.003, 0.0, (0.0,) * 11, **timed),
        costs={"mat": Cost((1.0,) * 10, 8.0, (0.0,) * 11, 4, 32)},
        rules=[outcome(estimate(2.0, 1.9, 2.1)), outcome(estimate(1, 1, 1), exits=False)],
        plans=[DryRun(CANDIDATE, True, 0.8, 4.0)] * 44,
        chosen=chosen,
    )


@pytest.mark.parametrize(
    ("low", "high", "answer"),
    [
        (0.7, 0.9, "worth it"),
        (0.7, 1.0, "cannot tell"),
        (0.99, 1.2, "cannot tell"),
        (1.0, 1.2, "not worth it"),
        (1.1, 1.2, "not worth it"),
        (None, None, "cannot tell"),
    ],
)
def test_the_conservative_end_of_the_interval_decides(low, high, answer):
    assert answer_of(outcome(estimate(1.0, low, high))) == answer


def test_a_guarantee_that_broke_on_fresh_rows_leaves_it_open():
    broken = outcome(estimate(0.5, 0.4, 0.6), low=0.06)
    found = result(broken)
    assert found.answer == "cannot tell"
    assert any("did not hold" in reason and "6.0 %" in reason for reason in found.reasons)


def test_reasons_carry_their_numbers_and_samples():
    found = result(outcome(estimate(0.8, 0.7, 0.9)))
    said = " ".join(found.reasons)
    assert found.answer == "worth it"
    for part in (
        "0.80 of the full model's time (95 % interval 0.70 to 0.90, n = 300 rows of 20 documents)",
        "saves 4.0 of 10 layers",
        "as long as 3.0 blocks (3 ms; a block takes 1 ms)",
        "FLOPs as 8.0 blocks",
        "breaks even with a head of 2.0 blocks (this one: 3.0)",
        "by saving the time of 1.5 blocks",
        "6.0 of 10 layers (5.5 to 6.5)",
        "0.60 of the time",
        "one new token after 31 cached ones",
        "1 thread in",
        "keys and values",
    ):
        assert part in said


def test_the_cost_of_skipped_keys_is_mentioned_only_where_it_matters():
    slow = result(outcome(estimate(1.2, 1.1, 1.3)))
    whole = result(outcome(estimate(0.5, 0.4, 0.6)), mode="whole")
    assert slow.answer == "not worth it"
    assert whole.answer == "worth it"
    assert not any("keys and values" in r for r in [*slow.reasons, *whole.reasons])
    assert "a text of 32 tokens without a cache" in " ".join(whole.reasons)


def test_without_a_plan_it_says_never_exit_and_on_how_many_rows():
    none = result(None)
    assert none.answer == "not worth it"
    assert "None of 44 plans" in none.reasons[0]
    assert none.reasons[0].endswith("never exit.")
    assert "n = 90 rows of 7 documents" in none.reasons[0]
    failed = result(outcome(estimate(1, 1, 1), exits=False))
    assert failed.answer == "not worth it"
    assert "a learned rule through mat, checked at layer 6, could not" in failed.reasons[0]


@pytest.mark.parametrize(
    ("most", "said"),
    [(None, "the cost of the head does not matter"), (0.0, "no head is cheap enough")],
)
def test_a_break_even_without_a_head_is_put_in_words(most, said):
    chosen = outcome(estimate(0.8, 0.7, 0.9), most=most)
    assert said in " ".join(result(chosen).reasons)


def test_one_document_has_no_interval_and_the_reasons_say_so():
    found = result(outcome(estimate(0.8, None, None, documents=1)))
    assert found.answer == "cannot tell"
    assert "300 rows of 1 document are too few for an interval" in found.reasons[0]


def test_findings_name_the_layer_from_which_agreement_lasts_and_every_rule():
    found = result(None).findings
    agreement, rules = found[:2], found[2:]
    assert len(rules) == 2
    assert "50.0 % of answers can be read at layer 5 of 10" in agreement[0]
    assert "95.0 % from layer 8 on" in agreement[0]  # a passing peak at 6 does not count
    assert "takes 2.00 of the time (1.90 to 2.10) and 0.80 of the FLOPs" in rules[0]
    assert rules[1].endswith("never exit.")


def test_a_table_that_does_not_exist_is_refused_with_the_choices():
    pytest.importorskip("pandas")
    with pytest.raises(BadSettings, match="expected one of 'rules', 'plans', 'agreement'"):
        result(None).to_pandas("costs")
