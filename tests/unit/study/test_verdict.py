"""The verdict: which answer, and whether its sentences say what the numbers say."""

from typing import Any

import pytest

from layerleap.study.suitability.verdict import answer_of, findings, verdict


def estimate(value: float, low: float | None, high: float | None) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, "rows": 300, "documents": 20}


def outcome(time: dict[str, Any], *, exits: bool = True, low: float = 0.01) -> dict[str, Any]:
    verified = {
        "disagreement": 0.03, "low": low, "high": 0.2, "saved": 4.0, "layers": 6.0,
        "tolerance": 0.05, "within": True, "rows": 300, "documents": 20,
    }  # fmt: skip
    even = {"heads": 1.5, "head_in_blocks": 2.0, "saved": 4.0, "saved_needed": 1.5}
    return {
        "map": "mat", "rule": "learned", "name": "layer 6", "layers": [6], "exits": exits,
        "time": time, "verified": verified, "flops": 0.8, "break_even": even,
    }  # fmt: skip


def result(chosen: dict[str, Any] | None, **clock: Any) -> dict[str, Any]:
    timed = {
        "blocks": [0.001] * 10, "head": 0.003, "n_layers": 10, "head_in_blocks": 3.0,
        "context": 32, "mode": "cached", "repeats": 20, "spread": 0.1, "threads": 1,
        "device": "cpu", "dtype": "float32",
    }  # fmt: skip
    part = {"rows": 90, "documents": 7}
    return {
        "model": {"n_layers": 10}, "settings": {"tolerance": 0.05, "delta": 0.05},
        "rows": {"judge": part, "calibrate": part}, "plans": [{}] * 44, "chosen": chosen,
        "clock": {**timed, **clock}, "flops": {"mat": {"head_in_blocks": 8.0}},
        "ceiling": [
            {"map": "mat", "saved": estimate(6.0, 5.5, 6.5), "time": estimate(0.6, 0.5, 0.7)}
        ],
        "agreement": [
            {"map": name, "layer": layer, **estimate(value, None, None)}
            for name in ("id", "mat")
            for layer, value in enumerate([0.1] * 5 + [0.5, 0.99, 0.9, 0.96, 0.97, 1.0])
        ],
        "rules": [outcome(estimate(2.0, 1.9, 2.1)), outcome(estimate(1, 1, 1), exits=False)],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "answer"),
    [(0.7, 0.9, "worth it"), (0.7, 1.0, "cannot tell"), (0.99, 1.2, "cannot tell"),
     (1.0, 1.2, "not worth it"), (1.1, 1.2, "not worth it"), (None, None, "cannot tell")],
)  # fmt: skip
def test_the_conservative_end_of_the_interval_decides(low, high, answer):
    assert answer_of(outcome(estimate(1.0, low, high))) == answer


def test_a_promise_that_broke_on_fresh_rows_leaves_it_open():
    broken = outcome(estimate(0.5, 0.4, 0.6), low=0.06)
    found = verdict(result(broken))
    assert found["answer"] == "cannot tell"
    assert any("did not hold" in reason and "6.0 %" in reason for reason in found["reasons"])


def test_reasons_carry_their_numbers_and_samples():
    found = verdict(result(outcome(estimate(0.8, 0.7, 0.9))))
    said = " ".join(found["reasons"])
    assert found["answer"] == "worth it"
    for part in (
        "0.80 of the full model's time (95 % interval 0.70 to 0.90, n = 300 rows of 20 documents)",
        "saves 4.0 of 10 layers", "3.0 blocks in measured time (3 ms; a block takes 1 ms)",
        "8.0 in FLOPs", "breaks even with a head of 2.0 blocks (this one: 3.0)",
        "by saving 1.5 blocks' worth", "6.0 of 10 layers (5.5 to 6.5)", "0.60 of the time",
        "one new token after 31 cached ones", "1 thread in", "keys and values",
    ):  # fmt: skip
        assert part in said


def test_what_is_lost_to_skipped_keys_is_not_told_where_nothing_is_gained_or_cached():
    slow = verdict(result(outcome(estimate(1.2, 1.1, 1.3))))
    whole = verdict(result(outcome(estimate(0.5, 0.4, 0.6)), mode="whole"))
    assert slow["answer"] == "not worth it"
    assert whole["answer"] == "worth it"
    assert not any("keys and values" in r for r in [*slow["reasons"], *whole["reasons"]])
    assert "a text of 32 tokens, run whole" in " ".join(whole["reasons"])


def test_without_a_plan_it_says_exit_nowhere_and_on_how_many_rows():
    none = verdict(result(None))
    assert none["answer"] == "not worth it"
    assert "None of 44 plans" in none["reasons"][0]
    assert none["reasons"][0].endswith("exit nowhere.")
    assert "n = 90 rows of 7 documents" in none["reasons"][0]
    failed = verdict(result(outcome(estimate(1, 1, 1), exits=False)))
    assert failed["answer"] == "not worth it"
    assert "a learned rule through mat, checked at layer 6, could not" in failed["reasons"][0]


@pytest.mark.parametrize(
    ("most", "said"), [(None, "price does not decide"), (0.0, "no head is cheap enough")]
)
def test_a_break_even_without_a_head_is_said_in_words(most, said):
    chosen = outcome(estimate(0.8, 0.7, 0.9))
    chosen["break_even"]["head_in_blocks"] = most
    assert said in " ".join(verdict(result(chosen))["reasons"])


def test_one_document_has_no_interval_and_the_words_say_so():
    found = verdict(result(outcome({**estimate(0.8, None, None), "documents": 1})))
    assert found["answer"] == "cannot tell"
    assert "300 rows of 1 document cannot say" in found["reasons"][0]


def test_findings_name_the_layer_from_which_agreement_lasts_and_every_rule():
    found = findings(result(None))
    agreement = [f["text"] for f in found if f["topic"] == "agreement"]
    rules = [f["text"] for f in found if f["topic"] == "rules"]
    assert "50.0 % of answers can be read at layer 5 of 10" in agreement[0]
    assert "95.0 % from layer 8 on" in agreement[0]  # a passing peak at 6 does not count
    assert "takes 2.00 of the time (1.90 to 2.10) and 0.80 of the FLOPs" in rules[0]
    assert rules[1].endswith("exit nowhere.")
