"""Plans of early exit: where to check, who chooses, what is promised and what it takes."""

import json
from collections.abc import Mapping

import pytest
import torch
from made_evidence import made

from layerleap.act.exits.cost import Cost
from layerleap.act.exits.evidence import Evidence
from layerleap.act.exits.rules import Gap
from layerleap.act.exits.timing import Timing
from layerleap.errors import BadSettings
from layerleap.study.suitability.plans import (
    Costs,
    ExitPlan,
    SplitRows,
    all_plans,
    break_even,
    ceiling,
    compare,
    divide,
    everywhere,
    family_of,
    layer_sets,
    outcome,
    quickest,
)
from layerleap.study.suitability.verdict import answer_of

LAST = 6


def prices(head: float, check: float = 0.0, n_layers: int = LAST) -> Costs:
    blocks, maps = (1.0,) * n_layers, (0.1,) * n_layers + (0.0,)
    cost = Cost(blocks, head, maps, d_model=4, context=8)
    return Costs(Timing(blocks, head, check, maps, context=8), {"id": cost, "mat": cost})


def evidence(rows: int = 900, documents: int = 90, seed: int = 0) -> dict[str, Evidence]:
    """From layer 3 on the reading is the model's answer, and sure where it is."""
    base = made(rows, LAST, seed=seed, documents=documents)
    right = torch.arange(LAST + 1) >= 3
    top = torch.where(right, base.final[:, None], 9)
    sure = torch.where(right, 0.95, 0.3).expand(rows, -1)
    good = Evidence(**{**vars(base), "top": top, "p1": sure, "p2": sure / 20,
                       "entropy": 1 - sure})  # fmt: skip
    return {"id": base, "mat": good}


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
    assert len(everywhere(all_plans(n_layers))) == 4


def test_a_model_of_one_layer_has_no_early_exit():
    with pytest.raises(BadSettings, match="none to leave early"):
        layer_sets(1)


def ids(part: Mapping[str, Evidence]) -> set[int]:
    return set(part["mat"].position.tolist())


def test_rows_are_used_once_and_training_documents_are_never_tested_on():
    marked = {
        name: Evidence(**{**vars(e), "position": torch.arange(900)})
        for name, e in evidence().items()
    }
    found = divide(marked, 0.05, 0.05)
    assert ids(found.half) | ids(found.judge) == ids(found.train)
    assert not ids(found.half) & ids(found.judge)
    tested = ids(found.calibrate) | ids(found.verify)
    assert not ids(found.calibrate) & ids(found.verify)
    assert ids(found.train) | tested == set(range(900))
    trained = set(found.train["mat"].document.tolist())
    for part in (found.calibrate, found.verify):
        assert not trained & set(part["mat"].document.tolist())
    for part in vars(found).values():
        assert torch.equal(part["id"].position, part["mat"].position)


def test_too_few_rows_say_how_many_are_needed():
    with pytest.raises(
        BadSettings, match=r"needs 59 to calibrate on and 19 to choose with, so about 177 in all"
    ):
        divide(evidence(120, 30), 0.05, 0.05)
    assert len(divide(evidence(180, 30), 0.05, 0.05).calibrate["mat"]) >= 59


def test_too_few_documents_are_refused_whatever_the_rows():
    with pytest.raises(BadSettings, match="at least 5 held-out documents"):
        divide(evidence(900, 4), 0.05, 0.05)
    assert divide(evidence(900, 5), 0.05, 0.05).counts()["judge"]["documents"] == 1


def test_the_gap_rule_takes_its_length_from_training_rows(rows):
    gap = family_of(ExitPlan("mat", "gap", (3,), "layer 3"), rows.train["mat"]).at(0.5)
    assert isinstance(gap, Gap)
    assert gap.length == 1 + rows.train["mat"].position.double().mean().item()


def test_with_a_dear_head_one_check_at_the_right_layer_is_quickest(rows):
    plans = all_plans(LAST)
    best = quickest(plans, compare(plans, rows, prices(2.0), 0.05))
    assert best is not None
    assert (best.map, best.layers) == ("mat", (3,))


def test_the_time_of_a_plan_is_added_up_from_its_parts(rows):
    plan = ExitPlan("mat", "gap", (3,), "layer 3")
    found = outcome(plan, rows, prices(2.0, check=0.5), 0.05, 0.05)
    assert found["exits"]
    assert found["verified"]["saved"] == 3
    assert found["time"]["value"] == pytest.approx((3 + 0.1 + 2 + 0.5) / (6 + 2))
    assert found["flops"] == pytest.approx((3 + 0.1 + 2) / 8)
    assert found["time"]["rows"] == len(rows.verify["mat"])
    json.dumps(found, allow_nan=False)


def test_a_free_head_is_worth_it_and_a_huge_one_is_not(rows):
    plan = ExitPlan("mat", "gap", tuple(range(1, LAST)), "all layers")
    answers = {
        head: answer_of(outcome(plan, rows, prices(head), 0.05, 0.05)) for head in (0.0, 100.0)
    }
    assert answers == {0.0: "worth it", 100.0: "not worth it"}


def test_a_plan_that_cannot_keep_the_promise_exits_nowhere(rows):
    wrong = {}
    for part, by in vars(rows).items():
        top = torch.where(torch.arange(LAST + 1) < LAST, 9, by["mat"].final[:, None])
        bad = Evidence(**{**vars(by["mat"]), "top": top})
        wrong[part] = {"id": bad, "mat": bad}
    hopeless, plans = SplitRows(**wrong), all_plans(LAST)
    compared = compare(plans, hopeless, prices(0.0), 0.05)
    assert not any(row["exits"] for row in compared)
    assert {row["time"] for row in compared} == {1.0}
    assert quickest(plans, compared) is None
    found = outcome(plans[1], hopeless, prices(0.0), 0.05, 0.05)
    assert (found["says"], found["time"]["value"]) == ("exit nowhere", 1)
    assert found["verified"]["saved"] == 0
    assert answer_of(found) == answer_of(None) == "not worth it"


def test_the_plan_is_chosen_without_a_look_at_calibration_or_verification_rows(rows):
    plans = all_plans(LAST)
    blind = SplitRows(rows.train, rows.half, rows.judge, {}, {})
    assert compare(plans, blind, prices(2.0), 0.05) == compare(plans, rows, prices(2.0), 0.05)


def test_at_the_break_even_head_the_time_is_the_full_models():
    exits = torch.tensor([2, 2, 4, 6, 6])
    plan = ExitPlan("mat", "gap", (2, 4), "every 2nd layer")
    found = break_even(plan, prices(3.0, check=0.2).clock, exits)
    assert found["heads"] == pytest.approx((1 + 1 + 2 + 3 + 3) / 5)
    again = prices(found["head_in_blocks"], check=0.2)
    share = again.seconds(plan, exits).mean().item() / again.clock.full
    assert share == pytest.approx(1)
    assert found["saved"] == pytest.approx((4 + 4 + 2) / 5)
    assert found["saved_needed"] == pytest.approx(1 * 3.0 + 1.6 * 0.3)


def test_where_no_head_is_extra_its_price_does_not_matter():
    plan = ExitPlan("id", "gap", (2,), "layer 2")
    assert break_even(plan, prices(3.0).clock, torch.tensor([2, 2]))["head_in_blocks"] is None


def test_where_looks_eat_the_saving_no_head_is_cheap_enough():
    plan = ExitPlan("id", "gap", (2,), "layer 2")
    found = break_even(plan, prices(3.0, check=9.0).clock, torch.tensor([2, 6]))
    assert found["head_in_blocks"] == 0


def test_the_ceiling_is_the_first_layer_that_agrees_and_pays_one_reading():
    found = {row["map"]: row for row in ceiling(evidence(), prices(2.0, check=0.5).clock)}
    assert found["mat"]["saved"]["value"] == 3
    assert found["mat"]["time"]["value"] == pytest.approx((3 + 0.1 + 2 + 0.5) / 8)
    assert found["id"]["saved"]["low"] < found["id"]["saved"]["value"]


def test_a_rule_that_knows_all_does_not_leave_where_it_does_not_pay():
    found = ceiling(evidence(), prices(2.0, check=50.0).clock)
    assert all(row["time"]["value"] == 1 for row in found)
