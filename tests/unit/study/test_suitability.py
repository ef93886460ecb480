"""The whole study on tiny models: does early exit pay off?"""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import layerleap as ll
from families import build
from intervals import require_inside
from layerleap.act.exits.cost import measure_cost
from layerleap.errors import BadSettings, CannotFetch, WrongModel
from layerleap.models.transformer import Transformer
from layerleap.show.cli.suitability_table import suitability_table
from layerleap.show.html.suitability import suitability_html
from layerleap.study.suitability import study as module
from layerleap.study.suitability.settings import SuitabilitySettings
from layerleap.study.suitability.study import suitability
from pages import Page
from tiny_models import sentences, tiny, tokenizer


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    rows = [json.dumps({"text": t}) for t in sentences(200)]
    path.write_text("\n".join(rows), encoding="utf8")
    return str(path)


@pytest.fixture(scope="module", params=["llama", "bert"])
def found(request, text):
    transformer = tiny(request.param)
    asked = SuitabilitySettings(text=text, n_fit=300, n_read=160, tolerance=0.2, context=8)
    return transformer, suitability(transformer, asked)


def test_the_result_becomes_plain_json_with_all_tables(found):
    transformer, result = found
    plain = result.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["answer"] == result.answer in ("worth it", "not worth it", "cannot tell")
    assert plain["reasons"] == result.reasons
    assert len(plain["agreement"]) == 2 * (transformer.n_layers + 1)
    assert [(row["map"], row["rule"]) for row in plain["rules"]] == [
        ("id", "gap"),
        ("mat", "gap"),
        ("mat", "entropy"),
        ("mat", "learned"),
    ]
    assert {row["map"] for row in plain["ceilings"]} == {"id", "mat"}
    assert result.timing.context == result.costs["mat"].context == 8


def test_the_last_layer_agrees_and_no_ceiling_is_above_all_layers_but_one(found):
    transformer, result = found
    assert [own[transformer.n_layers].value for own in result.agreement.values()] == [1, 1]
    assert all(0 <= row.saved.value <= transformer.n_layers - 1 for row in result.ceilings)


def test_a_text_run_whole_pays_its_blocks_for_every_token(found):
    transformer, result = found
    per_token = measure_cost(transformer, tokens=8).blocks[0]
    times = 8 if transformer.kind == "masked-token" else 1
    assert result.costs["id"].blocks[0] == pytest.approx(times * per_token)
    assert result.timing.mode == ("whole" if times == 8 else "cached")


def test_documents_fitted_on_are_not_read(found):
    _, result = found
    fitted, read = (next(d for d in result.data if d["role"] == r) for r in ("fit", "read"))
    assert fitted["documents"] + read["documents"] <= 200
    assert result.splits["calibrate"]["rows"] + result.splits["verify"]["rows"] < read["rows"]


def test_the_terminal_shows_answer_and_reasons_within_80_columns(found):
    _, result = found
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(suitability_table(result))
    shown = console.export_text()
    assert f"early exit here: {result.answer}" in shown
    assert "learned" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    flat = " ".join(shown.split())
    assert all(reason in flat for reason in result.reasons)


def test_frames_have_the_rules_the_plans_and_the_agreement(found):
    transformer, result = found
    rules, plans, agreement = (result.to_pandas(t) for t in ("rules", "plans", "agreement"))
    assert len(rules) == len(result.rules) + (result.chosen is not None)
    assert rules["chosen"].sum() == (result.chosen is not None)
    assert len(plans) == len(result.plans)
    assert len(agreement) == 2 * (transformer.n_layers + 1)


def test_a_notebook_shows_answer_reasons_and_tables(found):
    _, result = found
    page = Page(suitability_html(result))
    assert result._repr_html_() == suitability_html(result)
    assert page.all("script") == []
    assert f"Early exit in {result.model['name']}: {result.answer}" in page.text
    assert all(reason in page.text for reason in result.reasons)
    assert len(page.all("table")) == 2


def test_a_plan_names_its_bank_and_decodes_with_it(text, tmp_path):
    transformer = tiny("llama")
    ll.fit(transformer, text, n_texts=200).save_pretrained(tmp_path / "bank")
    asked = {"text": text, "tolerance": 0.6, "context": 8}
    result = suitability(transformer, bank=tmp_path / "bank", **asked)
    chosen = result.chosen
    assert chosen is not None
    assert chosen.exits
    assert chosen.candidate.map == "mat"
    result.save_plan(tmp_path / "plan.json")
    plan = ll.exits.ExitPlan.load(tmp_path / "plan.json")
    assert plan.rule.to_dict() == chosen.calibrated.rule.to_dict()
    assert (plan.layers, plan.bank) == (chosen.candidate.layers, str(tmp_path / "bank"))
    generation = ll.generate(transformer, "the cat sat", plan=tmp_path / "plan.json")
    assert set(generation.exit_layers) <= {*plan.layers, transformer.n_layers}
    unnamed = replace(result, bank_name=None)
    with pytest.raises(BadSettings, match="pass bank=folder"):
        unnamed.save_plan(tmp_path / "other.json")
    assert unnamed.plan(bank="elsewhere").bank == "elsewhere"


def test_a_plan_to_never_exit_needs_no_bank(found):
    never = replace(found[1], chosen=None, bank_name=None)
    assert never.plan() == ll.exits.ExitPlan(None, (), None)
    assert never.answer == "not worth it"


def test_a_given_bank_is_used_and_nothing_is_fitted(text):
    transformer = tiny("llama")
    bank = ll.fit(transformer, text, n_texts=200)
    result = suitability(transformer, bank=bank, text=text, tolerance=0.2, context=8)
    assert [row["role"] for row in result.data] == ["read"]
    assert not any("better than it is" in note for note in result.notes)
    other = ll.fit(transformer, text, ll.Sampling(held_out=0.0), n_texts=200)
    result = suitability(transformer, bank=other, text=text, tolerance=0.2, context=8)
    assert any("better than it is" in note for note in result.notes)


def test_a_bank_of_another_model_is_refused(text):
    bank = ll.fit(tiny("gpt2"), text, n_texts=50)
    with pytest.raises(WrongModel):
        suitability(tiny("llama"), bank=bank, text=text)


def test_too_little_text_is_refused_with_what_is_needed(text, tmp_path):
    with pytest.raises(BadSettings, match=r"162 held-out rows are too few: .* about 177 in total"):
        suitability(tiny("llama"), text=text, context=8)
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(json.dumps({"text": t}) for t in sentences(8)), encoding="utf8")
    with pytest.raises(BadSettings, match="held-out documents"):
        suitability(tiny("llama"), text=str(few), context=8)


def test_too_little_text_is_refused_before_anything_is_fitted(text, monkeypatch):
    def fitted(*_, **__):
        raise AssertionError("a pass was run")

    monkeypatch.setattr(module.FitContext, "fit", fitted)
    with pytest.raises(BadSettings, match="30 held-out rows are too few"):
        suitability(tiny("llama"), text=text, n_read=30)
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(CannotFetch, match=r'pip install "layerleap\[learn\]"'):
        suitability(tiny("llama"), text=text)


def test_an_interrupted_run_resumes_and_cleans_up(text, tmp_path, monkeypatch):
    transformer = tiny("llama")
    asked = {"text": text, "tolerance": 0.2, "n_fit": 200, "context": 8, "work": tmp_path}

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module.FitContext, "scores", stop)
        with pytest.raises(KeyboardInterrupt):
            suitability(transformer, **asked)
    assert list(tmp_path.glob("*/fitted-*"))
    phases = []
    suitability(transformer, progress=lambda phase, *_: phases.append(phase), **asked)
    assert not any(phase.startswith("fitting") for phase in phases)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"tolerance": 0},
        {"tolerance": 1},
        {"delta": 0.0},
        {"delta": 1.5},
        {"n_fit": 0},
        {"n_read": 0},
        {"repeats": 0},
        {"context": 1},
    ],
)
def test_invalid_settings_are_refused(change):
    with pytest.raises(BadSettings, match=next(iter(change))):
        SuitabilitySettings(**change)


def test_unsupported_requests_are_refused_before_any_pass():
    llama = tiny("llama")
    with pytest.raises(BadSettings, match="unexpected keyword"):
        suitability(llama, mood=1)
    with pytest.raises(BadSettings, match="read only once"):
        suitability(llama, text="-")
    with pytest.raises(BadSettings, match="context 65 is too long; this model takes at most 64"):
        suitability(llama, context=65)
    speech = Transformer.wrap(build("whisper"), name="whisper")
    with pytest.raises(BadSettings, match="reads images"):
        suitability(speech)
    one = Transformer.wrap(build("llama", num_hidden_layers=1), tokenizer(), name="one")
    with pytest.raises(BadSettings, match="cannot exit early"):
        suitability(one, text=str(Path(__file__)))


def test_two_layers_are_enough(text):
    two = tiny("llama", num_hidden_layers=2)
    result = suitability(two, text=text, tolerance=0.2, n_fit=200, context=8)
    assert {row.candidate.layers for row in result.rules} == {(1,)}


def test_every_estimate_of_a_recommendation_lies_inside_its_interval(found):
    require_inside(found[1].to_dict(), 10)
