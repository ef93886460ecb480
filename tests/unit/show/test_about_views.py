"""What notebooks show of a model, a bank and a check, and how wide printed scores are."""

import re
from dataclasses import replace

import pytest

import layerleap as ll
from pages import HOSTILE
from tiny_models import sentences, tiny


@pytest.fixture(scope="module")
def fitted():
    model = tiny()
    sampling = ll.Sampling(unit="document", positions="all")
    bank = ll.fit(model, sentences(40), sampling, progress=False)
    return model, bank, ll.evaluate(model, bank, sentences(20, 1), progress=False)


def test_a_model_shows_what_was_found_in_it(fitted):
    page = fitted[0]._repr_html_()
    for said in ("tiny-llama", "LlamaForCausalLM", "next-token", "model.layers.0", "ffn.in"):
        assert said in page


def test_a_bank_shows_what_it_was_fitted_on_and_its_scores(fitted):
    bank = fitted[1]
    page = bank._repr_html_()
    assert "bank of tiny-llama" in page
    assert f"<td>rows_fitted</td><td>{bank.data['rows_fitted']}</td>" in page
    assert page.count("<table") == 2
    hostile = bank.changed(data={"text": HOSTILE})._repr_html_()
    assert HOSTILE not in hostile


def test_a_check_shows_every_law(fitted):
    results = ll.check(fitted[0])
    page = results._repr_html_()
    failed = sum(one.status == "fails" for one in results)
    assert f"{failed} fail" in page
    for one in results:
        assert re.search(f"<td>{one.law}</td><td><span [^>]*>{one.status}</span></td>", page)


def large(row):
    """Scores as wide as they get: surprisal and KL of early layers, R2 of states far off."""
    value = {"kl": 17.25, "surprisal": 12.75, "r2": -143.5}.get(row["metric"], 1.0)
    return {**row, "value": value, "low": 1.2 * min(value, 0) + 0.8 * max(value, 0), "high": value}


@pytest.mark.parametrize("scores", [lambda row: row, large], ids=["small", "large"])
def test_printed_scores_fit_80_columns_and_columns_do_not_collide(fitted, scores):
    evaluation = replace(fitted[2], scores=[scores(row) for row in fitted[2].scores])
    lines = str(evaluation).splitlines()
    assert max(map(len, lines)) <= 80
    heads = next(line for line in lines if line.startswith("layer"))
    ends = [heads.index(name) + len(name) for name in ("P@1, %", "surprisal", "KL", "R2")]
    rows = [line for line in lines if line[:6].strip().isdigit()]
    assert len(rows) > 4
    assert all(row[end - 1] != " " == row.ljust(81)[end] for row in rows for end in ends)
    assert "\u2026" not in "".join(rows)


def test_dominant_neurons_are_seen_without_opening_anything(fitted):
    found = ll.neurons(fitted[0]).dominant("the cat sat", top=3)
    before_blocks = found._repr_html_().split("<details>")[0]
    strongest = max((u for block in found for u in block.updates), key=lambda u: u.strength)
    assert strongest.name in before_blocks


def test_printed_neurons_are_the_strongest_ones_and_fit_80_columns(fitted):
    neurons = ll.neurons(fitted[0]).dominant(sentences(1)[0])
    lines = str(neurons).splitlines()
    header = next(line for line in lines if line.startswith("neuron"))
    assert header.split() == ["neuron", "coefficient", "share", "adds", "to"]
    names = [line.split()[0] for line in lines if re.match(r"L\d+\.N", line)]
    assert names == [one.name for one in neurons.strongest()]
    strengths = [one.strength for block in neurons for one in block.updates]
    assert neurons.strongest()[0].strength == max(strengths)
    assert max(map(len, str(neurons).splitlines())) <= 80
