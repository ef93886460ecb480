"""Candidate exit plans: where to check, what chooses, what is guaranteed and what it costs."""

import json
from collections.abc import Mapping

import pytest
import torch

from layerleap.act.exits.cost import Cost
from layerleap.act.exits.evidence import Evidence
from layerleap.act.exits.rules import Gap
from layerleap.act.exits.timing import Timing
from layerleap.errors import BadSettings
from layerleap.study.suitability.candidates import (
    Candidate,
    Prices,
    SplitRows,
    all_candidates,
    break_even,
    ceilings,
    checked_everywhere,
    divide,
    dry_run,
    family_of,
    fastest,
    layer_sets,
    outcome,
)
from layerleap.study.suitability.chosen_plan import answer_of
from made_evidence import made

LAST = 6


def prices(head: float, check: float = 0.0, n_layers: int = LAST) -> Prices:
    blocks, maps = (1.0,) * n_layers, (0.1,) * n_layers + (0.0,)
    cost = Cost(blocks, head, maps, d_model=4, context=8)
    return Prices(Timing(blocks, head, check, maps, context=8), {"logit": cost, "linear": cost})


def evidence(rows: int = 900, documents: int = 90, seed: int = 0) -> dict[str, Evidence]:
    """From layer 3 on the reading is the model's answer, and sure where it is."""
    base = made(rows, LAST, seed=seed, documents=documents)
    right = torch.arange(LAST + 1) >= 3
    top = torch.where(right, base.final[:, None], 9)
    sure = torch.where(right, 0.95, 0.3).expand(rows, -1)
    good = Evidence(
        **{
            **vars(base),
            "top": top,
            "top_prob": sure,
            "second_prob": sure / 20,
            "entropy": 1 - sure,
        }
    )
    return {"logit": base, "linear": good}


@pytest.fixture(scope="module")
def rows() -> SplitRows:
    return divide(evidence(), 0.05, 0.05)


def test_sets_of_layers_are_all_single_spaced_and_the_last_half():
    sets = layer_sets(9)
    assert sets["all layers"] == tuple(range(1, 9))
    assert sets["last half"] == (5, 6, 7, 8)
    assert sets["every 2nd layer"] == (2, 4, 6, 8)
    assert sets["every 4th layer"] == (4, 8)
    assert sets["layer 8"] == (8,)
    assert {f"layer {n}" for n in range(1, 9)} <= set(sets)
    assert "every 8th layer" not in sets  # it is layer 8, and is not compared twice
    assert len(set(sets.values())) == len(sets)


@pytest.mark.parametrize("n_layers", [2, 3, 30, 48])
def test_no_set_holds_the_first_or_the_last_layer(n_layers):
    assert all(1 <= x < n_layers for layers in layer_sets(n_layers).values() for x in layers)
    assert len(checked_everywhere(all_candidates(n_layers))) == 4


def test_a_model_of_one_layer_has_no_early_exit():
    with pytest.raises(BadSettings, match="a model with 1 layer cannot exit early"):
        layer_sets(1)


def ids(part: Mapping[str, Evidence]) -> set[int]:
    return set(part["linear"].position.tolist())


def test_rows_are_used_once_and_training_documents_are_never_tested_on():
    marked = {
        name: Evidence(**{**vars(e), "position": torch.arange(900)})
        for name, e in evidence().items()
    }
    found = divide(marked, 0.05, 0.05)
    assert ids(found.train_half) | ids(found.choose) == ids(found.train)
    assert not ids(found.train_half) & ids(found.choose)
    tested = ids(found.calibrate) | ids(found.verify)
    assert not ids(found.calibrate) & ids(found.verify)
    assert ids(found.train) | tested == set(range(900))
    trained = set(found.train["linear"].document.tolist())
    for part in (found.calibrate, found.verify):
        assert not trained & set(part["linear"].document.tolist())
    for part in vars(found).values():
        assert torch.equal(part["logit"].position, part["linear"].position)


def test_too_few_rows_say_how_many_are_needed():
    with pytest.raises(
        BadSettings, match=r"needs 59 to calibrate and 19 to choose, about 177 in total"
    ):
        divide(evidence(120, 30), 0.05, 0.05)
    assert len(divide(evidence(180, 30), 0.05, 0.05).calibrate["linear"]) >= 59


def test_too_few_documents_are_refused_whatever_the_rows():
    with pytest.raises(BadSettings, match="at least 5 held-out documents"):
        divide(evidence(900, 4), 0.05, 0.05)
    counts = {row["part"]: row for row in divide(evidence(900, 5), 0.05, 0.05).counts()}
    assert counts["choose"]["documents"] == 1


def test_the_gap_rule_takes_its_length_from_training_rows(rows):
    gap = family_of(Candidate("linear", "gap", (3,), "layer 3"), rows.train["linear"]).at(0.5)
    assert isinstance(gap, Gap)
    assert gap.length == 1 + rows.train["linear"].position.double().mean().item()


def test_with_an_expensive_head_one_check_at_the_right_layer_is_fastest(rows):
    candidates = all_candidates(LAST)
    best = fastest(candidates, dry_run(candidates, rows, prices(2.0), 0.05))
    assert best is not None
    assert (best.map, best.layers) == ("linear", (3,))


def test_the_time_of_a_candidate_is_added_up_from_its_parts(rows):
    plan = Candidate("linear", "gap", (3,), "layer 3")
    found = outcome(plan, rows, prices(2.0, check=0.5), 0.05, 0.05)
    assert found["exits"]
    assert found["saved"] == 3
    assert found["time"] == pytest.approx((3 + 0.1 + 2 + 0.5) / (6 + 2))
    assert found["flops"] == pytest.approx((3 + 0.1 + 2) / 8)
    assert found["rows"] == len(rows.verify["linear"])
    json.dumps(found, allow_nan=False)


def test_a_free_head_is_worth_it_and_a_huge_one_is_not(rows):
    plan = Candidate("linear", "gap", tuple(range(1, LAST)), "all layers")
    answers = {
        head: answer_of(outcome(plan, rows, prices(head), 0.05, 0.05)) for head in (0.0, 100.0)
    }
    assert answers == {0.0: "worth it", 100.0: "not worth it"}


def test_a_candidate_that_cannot_keep_the_guarantee_never_exits(rows):
    wrong = {}
    for part, by in vars(rows).items():
        top = torch.where(torch.arange(LAST + 1) < LAST, 9, by["linear"].final[:, None])
        bad = Evidence(**{**vars(by["linear"]), "top": top})
        wrong[part] = {"logit": bad, "linear": bad}
    hopeless, candidates = SplitRows(**wrong), all_candidates(LAST)
    runs = dry_run(candidates, hopeless, prices(0.0), 0.05)
    assert not any(run["exits"] for run in runs)
    assert {run["time"] for run in runs} == {1.0}
    assert fastest(candidates, runs) is None
    found = outcome(candidates[1], hopeless, prices(0.0), 0.05, 0.05)
    assert (found["threshold"], found["time"]) == (None, 1)
    assert found["saved"] == 0
    assert found["break_even"] is None
    assert answer_of(found) == answer_of(None) == "not worth it"


def test_the_candidate_is_chosen_without_calibration_or_verification_rows(rows):
    candidates = all_candidates(LAST)
    blind = SplitRows(rows.train, rows.train_half, rows.choose, {}, {})
    expected = dry_run(candidates, rows, prices(2.0), 0.05)
    assert dry_run(candidates, blind, prices(2.0), 0.05) == expected


def test_at_the_break_even_head_the_time_is_the_full_models():
    exits = torch.tensor([2, 2, 4, 6, 6])
    plan = Candidate("linear", "gap", (2, 4), "every 2nd layer")
    found = break_even(plan, prices(3.0, check=0.2).timing, exits)
    assert found.heads == pytest.approx((1 + 1 + 2 + 3 + 3) / 5)
    again = prices(found.head_in_blocks, check=0.2)
    share = again.seconds(plan, exits).mean().item() / again.timing.full
    assert share == pytest.approx(1)
    assert found.saved == pytest.approx((4 + 4 + 2) / 5)
    assert found.saved_needed == pytest.approx(1 * 3.0 + 1.6 * 0.3)


def test_where_no_head_is_extra_its_price_does_not_matter():
    plan = Candidate("logit", "gap", (2,), "layer 2")
    assert break_even(plan, prices(3.0).timing, torch.tensor([2, 2])).head_in_blocks is None


def test_where_checks_cost_more_than_they_save_no_head_is_cheap_enough():
    plan = Candidate("logit", "gap", (2,), "layer 2")
    found = break_even(plan, prices(3.0, check=9.0).timing, torch.tensor([2, 6]))
    assert found.head_in_blocks == 0


def test_the_ceiling_is_the_first_layer_that_agrees_and_pays_one_reading():
    found = {row["map"]: row for row in ceilings(evidence(), prices(2.0, check=0.5).timing)}
    assert found["linear"]["saved"] == 3
    assert found["linear"]["time"] == pytest.approx((3 + 0.1 + 2 + 0.5) / 8)
    assert found["logit"]["saved_low"] < found["logit"]["saved"]


def test_the_oracle_does_not_exit_where_it_does_not_pay_off():
    found = ceilings(evidence(), prices(2.0, check=50.0).timing)
    assert all(row["time"] == 1 for row in found)


def test_a_candidate_of_an_unknown_rule_or_map_is_refused_with_the_choices():
    for map_, rule in (("linear", "oracle"), ("tuned", "gap")):
        with pytest.raises(
            BadSettings, match=r"expected one of \('logit', 'gap'\), \('linear', 'gap'\)"
        ):
            Candidate(map_, rule, (1,), "layer 1")
