"""Order of saturation: numbers by hand, words that follow from them, and refusals."""

import json
from types import SimpleNamespace

import pytest
import torch

from layerleap.errors import BadSettings, BadText
from layerleap.lens.lens import Lens
from layerleap.lens.random_walks import RandomWalk
from layerleap.lens.saturation import Saturation
from layerleap.stream.examples import Sampling, iter_batches, iter_examples
from layerleap_papers.beyond_the_top1.order import (
    SECTION,
    described,
    headline,
    in_order,
    saturation_places,
    steps_words,
    tau_tests,
    tau_words,
)
from made_saturation import walked
from tiny_models import sentences, tiny

LAST = 20


def made(layers, documents=20):
    layers = torch.as_tensor(layers)
    rows = torch.arange(len(layers))
    return Saturation(
        layers.to(torch.int16),
        torch.zeros_like(layers),
        rows,
        rows % documents,
        rows,
        LAST,
        "logit",
    )


def order(saturation, walk=None):
    """All tables on the order of saturation through one lens, and a verdict in words."""
    tables = {**described(saturation, walk), "tau": tau_tests(saturation, walk, draws=99)}
    words = [*map(tau_words, tables["tau"]), steps_words(tables["steps"])]
    return {**tables, "verdict": words}


def random_layers(n, seed=0, low=4):
    return torch.randint(low, LAST + 1, (n, 5), generator=torch.Generator().manual_seed(seed))


def ordered(n, seed=0):
    return random_layers(n, seed).sort(dim=1).values


def test_places_are_shared_by_equal_layers_and_unknown_without_saturation():
    places = saturation_places(torch.tensor([[3, 1, 3, LAST, 7], [LAST] * 5]), LAST)
    assert places[0, [0, 1, 2, 4]].tolist() == [2, 1, 2, 4]
    assert places[0, 3].isnan()
    assert places[1].isnan().all()


def test_means_count_the_rows_in_which_a_rank_saturates():
    layers = [[1, 2, 3, 4, 5]] * 30 + [[2, 1, 3, 4, LAST]] * 10
    found = order(made(layers))
    first, *_, last = (row for row in found["places"] if not row["filtered"])
    assert first["value"] == pytest.approx((30 * 1 + 10 * 2) / 40)
    assert (first["rows"], last["rows"], last["value"]) == (40, 30, 5)
    assert first["low"] <= first["value"] <= first["high"]
    never = {"lens": "logit", "rank": 5, "layer": LAST, "rows": 10}
    assert never in found["histogram"]
    assert sum(row["rows"] for row in found["histogram"] if row["rank"] == 5) == 40
    assert found["ranks"][4]["never"] == 0.25
    assert found["ranks"][4]["mean_layer"] == 5
    assert found["tau"][0]["value"] == pytest.approx((30 * 1 + 10 * 4 / 6) / 40)


def test_the_filter_keeps_rows_whose_top_token_settles_by_85_percent_of_the_depth():
    layers = [[17, 18, 19, LAST, LAST]] * 40 + [[18, 2, 3, 4, 5]] * 60
    found = order(made(layers))
    (about,) = found["order"]
    assert [about[f"filter_{key}"] for key in ("limit", "rows", "share")] == [17, 40, 0.4]
    tau = {(int(row["ranks"][0]), row["filtered"]): row for row in found["tau"]}
    assert {row["ranks"] for row in found["tau"]} == {"1 to 5", "2 to 5"}
    assert tau[1, True]["rows"] == 40
    assert tau[1, True]["value"] == 1
    assert tau[1, False]["rows"] == 100
    assert tau[2, False]["rows"] == 60  # ranks 2 to 5 of the others are too few to compare
    assert tau[2, True]["rows"] == 0
    assert tau[2, True]["value"] is None
    assert found["verdict"][3].endswith("0 positions can be compared and 30 are needed.")


def test_order_beats_both_nulls_only_if_it_is_more_than_a_walks():
    layers, rows = ordered(300), torch.arange(300)
    chance = RandomWalk(made(random_layers(300, seed=1)), rows)
    same = RandomWalk(made(ordered(300, seed=2)), rows)
    found = order(made(layers), chance)
    assert in_order(found["tau"][0]) == "yes"
    assert found["verdict"][0].endswith("more order than chance or random walks give.")
    assert found["tau"][0]["walk_difference"] > 0.5
    found = order(made(layers), same)
    assert found["tau"][0]["beats_exchangeable"] == "yes"
    assert in_order(found["tau"][0]) == "cannot tell"
    assert found["verdict"][0].endswith("but not clearly more than random walks.")
    strict = torch.arange(5, 10).expand(300, -1)
    found = order(made(layers), RandomWalk(made(strict), rows))
    assert in_order(found["tau"][0]) == "partly"
    assert found["verdict"][0].endswith("but no more than random walks.")
    found = order(made(layers), None)
    assert in_order(found["tau"][0]) == "cannot tell"
    assert "random walks were not made" in found["verdict"][0]
    assert found["walk_places"] == []


def test_no_order_is_said_to_be_none():
    rows = torch.arange(300)
    found = order(made(random_layers(300)), RandomWalk(made(random_layers(300, seed=1)), rows))
    assert found["tau"][0]["beats_exchangeable"] == "cannot tell"
    assert found["verdict"][0].endswith("not clearly more order than chance gives.")
    found = order(made(ordered(300).flip(1)), RandomWalk(made(ordered(300)), rows))
    assert in_order(found["tau"][0]) == "no"
    assert found["verdict"][0].endswith(": no more order than chance gives.")


def test_the_headline_counts_every_selection():
    def tau(ranks, filtered, walk):
        return {
            "ranks": ranks,
            "filtered": filtered,
            "limit": 17,
            "value": 0.2,
            "documents": 20,
            "exchangeable_mean": -0.1,
            "walk_mean": 0.1,
            "needed": 30,
            "walk_doubles": 99,
            "beats_exchangeable": "yes",
            "beats_walk": walk,
        }

    cases = [("1 to 5", False), ("1 to 5", True), ("2 to 5", False), ("2 to 5", True)]
    agreed = headline([tau(*case, "yes") for case in cases])
    assert "more order than chance gives in 4 of 4 selections" in agreed
    assert agreed.endswith("more order than random walks in 4")
    mixed = headline([tau(*case, "no" if n else "yes") for n, case in enumerate(cases)])
    assert mixed.endswith("more order than random walks in 1")
    few = {**tau("2 to 5", True, "cannot tell"), "value": None}
    assert headline([tau(*cases[0], "yes"), few]).endswith("in 1 (1 more had too few positions)")
    assert headline([]).startswith("too few positions")


def test_the_claim_of_order_holds_only_if_all_selections_agree():
    rows = torch.arange(300)
    found = order(made(ordered(300)), RandomWalk(made(random_layers(300, seed=1)), rows))
    claim = SECTION.claims[0].test
    result = SimpleNamespace(rows=lambda *_, **__: found["tau"])
    assert claim(result).agrees == "yes"
    found["tau"][1]["beats_walk"] = found["tau"][1]["beats_exchangeable"] = "no"
    assert claim(result).agrees == "partly"


def test_how_far_the_order_goes_is_said():
    layers = ordered(300)
    layers[:, 3:] = layers[:, 3:].gather(
        1, torch.rand(300, 2, generator=torch.Generator().manual_seed(0)).argsort(1)
    )
    found = order(made(layers))
    assert found["verdict"][-1].startswith("Up to rank 4, each rank saturates later")
    backwards = order(made(ordered(300).flip(1)))
    assert backwards["verdict"][-1] == "Rank 2 does not clearly saturate after rank 1."


def test_few_documents_cannot_tell():
    found = order(made(ordered(300), documents=3))
    assert in_order(found["tau"][0]) == "cannot tell"
    assert "3 documents cannot tell, 5 or more are needed" in found["verdict"][0]


def test_too_few_positions_are_an_error_that_says_how_many_are_needed():
    with pytest.raises(BadText, match=r"10 of 40 positions; .* needs 30: about 120 positions"):
        order(made([[1, 2, 3, 4, 5]] * 10 + [[1, 2, LAST, LAST, LAST]] * 30))
    with pytest.raises(BadText, match="0 of 40 positions"):
        order(made([[LAST] * 5] * 40))
    with pytest.raises(BadSettings, match=r"order of 2 ranks .* expected 3 or more"):
        order(made([[1, 2]] * 40))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_model_from_text_to_verdict_in_plain_json_types(name, monkeypatch):
    monkeypatch.setattr("layerleap_papers.beyond_the_top1.order.NEEDED", 10)
    transformer = tiny(name, num_hidden_layers=6)
    lenses = {"logit": Lens(transformer)}
    sampling = Sampling(positions="every:7" if name == "bert" else "all")
    examples = iter_examples(transformer, sentences(60), sampling, side="both")
    real, walks = walked(transformer, lenses, iter_batches(transformer, examples), share=0.5)
    found = real["logit"]
    result = order(found, walks["logit"])
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result["order"][0]["rows"] == len(found)
    assert result["tau"][0]["walk_rows"] < result["tau"][0]["rows"]
    assert len(result["verdict"]) == 5
