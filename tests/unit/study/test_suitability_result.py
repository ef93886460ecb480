"""The answer of a suitability study, and whether its sentences say what the numbers say."""

from typing import Any

import pytest

from layerleap.act.exits.cost import Cost
from layerleap.act.exits.timing import Timing
from layerleap.errors import BadSettings
from layerleap.study.result import Row, StudyResult
from layerleap.study.suitability import STUDY, answer_of, plan_of
from layerleap.study.suitability.candidates import Candidate

CANDIDATE = Candidate("linear", "learned", (6,), "layer 6")
PART = {"rows": 90, "documents": 7}


def outcome(
    time: float,
    time_low: float | None,
    time_high: float | None,
    *,
    exits: bool = True,
    low: float = 0.01,
    most: float | None = 2.0,
    documents: int = 20,
) -> Row:
    """A rule that was tested, as a row of the table "rules"."""
    even = {"heads": 1.5, "head_in_blocks": most, "saved": 4.0, "saved_needed": 1.5}
    fixed = {"name": "fixed", "layer": 6}
    return {
        **CANDIDATE.to_dict(),
        "exits": exits,
        "threshold": 6 if exits else None,
        "disagreement": 0.03,
        "low": low,
        "high": 0.2,
        "saved": 4.0,
        "tolerance": 0.05,
        "within": True,
        "rows": 300,
        "documents": documents,
        "time": time,
        "time_low": time_low,
        "time_high": time_high,
        "flops": 0.8,
        "break_even": even if exits else None,
        "calibrated": {"rule": fixed if exits else None},
    }


def result(chosen: Row | None, **timing: Any) -> StudyResult:
    values = [0.1] * 5 + [0.5, 0.99, 0.9, 0.96, 0.97, 1.0]
    timed = {"context": 32, "mode": "cached", "repeats": 20, "spread": 0.1, **timing}
    rules = [outcome(2.0, 1.9, 2.1), outcome(1, 1, 1, exits=False)]
    bound = {"saved": 6.0, "saved_low": 5.5, "saved_high": 6.5}
    bound |= {"time": 0.6, "time_low": 0.5, "time_high": 0.7}
    sample = {"rows": 300, "documents": 20}
    made = StudyResult(
        study="suitability",
        version="",
        made="",
        model={"name": "made-up", "n_layers": 10},
        settings={"tolerance": 0.05, "delta": 0.05, "bank": None},
        tables={
            "splits": [{"part": part, **PART} for part in ("choose", "calibrate")],
            "agreement": [
                {"map": name, "layer": layer, "value": v, "low": None, "high": None, **sample}
                for name in ("logit", "linear")
                for layer, v in enumerate(values)
            ],
            "ceilings": [{"map": "linear", **bound, **sample}],
            "timing": [Timing((0.001,) * 10, 0.003, 0.0, (0.0,) * 11, **timed).to_dict()],
            "costs": [{"map": "linear", **Cost((1.0,) * 10, 8.0, (0.0,) * 11, 4, 32).to_dict()}],
            "rules": [
                *({**row, "chosen": False} for row in rules),
                *([] if chosen is None else [{**chosen, "chosen": True}]),
            ],
            "plans": [{**CANDIDATE.to_dict(), "exits": True, "time": 0.8, "saved": 4.0}] * 44,
            "verdict": [{"answer": answer_of(chosen), "bank": None}],
        },
        sections=[
            {"key": section.key, "title": "", "status": "done", "reason": ""}
            for section in STUDY.sections
        ],
    )
    return STUDY.conclude(made)


def reasons(found: StudyResult) -> list[str]:
    return found.headlines[1:]


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
    assert answer_of(outcome(1.0, low, high)) == answer
    assert result(outcome(1.0, low, high)).headlines[0] == f"Early exit here: {answer}."


def test_a_guarantee_that_broke_on_fresh_rows_leaves_it_open():
    broken = outcome(0.5, 0.4, 0.6, low=0.06)
    assert answer_of(broken) == "cannot tell"
    said = reasons(result(broken))
    assert any("did not hold" in reason and "6.0 %" in reason for reason in said)


def test_reasons_carry_their_numbers_and_samples():
    found = result(outcome(0.8, 0.7, 0.9))
    said = " ".join(reasons(found))
    assert found.tables["verdict"][0]["answer"] == "worth it"
    for part in (
        "0.80 of the full model's time (95 % interval 0.70 to 0.90, n = 300 rows of 20 documents)",
        "saves 4.0 of 10 layers",
        "as long as 3.0 blocks (3 ms; a block takes 1 ms)",
        "FLOPs as 8.0 blocks",
        "breaks even with a head of 2.0 blocks (this one: 3.0)",
        "by saving the time of 1.5 blocks",
        "keys and values",
    ):
        assert part in said
    more = " ".join(row["text"] for row in found.findings if not row["headline"])
    for part in (
        "6.0 of 10 layers (5.5 to 6.5)",
        "0.60 of the time",
        "one new token after 31 cached ones",
        "1 thread in",
    ):
        assert part in more


def test_the_cost_of_skipped_keys_is_mentioned_only_where_it_matters():
    slow = result(outcome(1.2, 1.1, 1.3))
    whole = result(outcome(0.5, 0.4, 0.6), mode="whole")
    assert slow.tables["verdict"][0]["answer"] == "not worth it"
    assert whole.tables["verdict"][0]["answer"] == "worth it"
    assert not any("keys and values" in r for r in [*reasons(slow), *reasons(whole)])
    said = " ".join(row["text"] for row in whole.findings)
    assert "a text of 32 tokens without a cache" in said


def test_without_a_plan_it_says_never_exit_and_on_how_many_rows():
    none = result(None)
    assert none.tables["verdict"][0]["answer"] == "not worth it"
    first = reasons(none)[0]
    assert "None of 44 plans" in first
    assert first.endswith("never exit.")
    assert "n = 90 rows of 7 documents" in first
    limit = "No rule through linear can save more than 6.0"
    assert any(limit in reason for reason in reasons(none))
    failed = result(outcome(1, 1, 1, exits=False))
    assert failed.tables["verdict"][0]["answer"] == "not worth it"
    assert "a learned rule through linear, checked at layer 6, could not" in reasons(failed)[0]


@pytest.mark.parametrize(
    ("most", "said"),
    [(None, "the cost of the head does not matter"), (0.0, "no head is cheap enough")],
)
def test_a_break_even_without_a_head_is_put_in_words(most, said):
    assert said in " ".join(reasons(result(outcome(0.8, 0.7, 0.9, most=most))))


def test_one_document_has_no_interval_and_the_reasons_say_so():
    found = result(outcome(0.8, None, None, documents=1))
    assert found.tables["verdict"][0]["answer"] == "cannot tell"
    assert "300 rows of 1 document are too few for an interval" in reasons(found)[0]


def test_findings_name_the_layer_from_which_agreement_lasts():
    agreement = [row["text"] for row in result(None).findings if row["section"] == "agreement"]
    assert "50.0 % of answers can be read at layer 5 of 10" in agreement[0]
    assert "95.0 % from layer 8 on" in agreement[0]  # a passing peak at 6 does not count


def test_a_plan_is_the_chosen_rule_and_needs_its_bank():
    found = result(outcome(0.8, 0.7, 0.9))
    plan = plan_of(found, bank="elsewhere")
    assert (plan.rule.to_dict(), plan.layers, plan.bank) == (
        {"name": "fixed", "layer": 6},
        (6,),
        "elsewhere",
    )
    with pytest.raises(BadSettings, match="pass bank=folder"):
        plan_of(found)
    assert plan_of(result(None)).rule is None
    other = StudyResult("norms", "", "", {}, {}, {})
    with pytest.raises(BadSettings, match="a study of norms has no plan"):
        plan_of(other)


def test_a_table_that_does_not_exist_is_refused_with_the_choices():
    pytest.importorskip("pandas")
    with pytest.raises(BadSettings, match=r"no table 'cost'; choose one of .*plans, verdict"):
        result(None).to_pandas("cost")
