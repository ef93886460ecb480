"""The whole study on tiny models: does early exit pay off?"""

import io
import json
import sys
from dataclasses import replace
from importlib.metadata import EntryPoints
from pathlib import Path

import pytest
from rich.console import Console

import layerleap as ll
from families import build
from intervals import require_inside
from layerleap.act.exits.cost import measure_cost
from layerleap.errors import BadSettings, CannotFetch, WrongModel
from layerleap.models.transformer import Transformer
from layerleap.show.cli.tables import study_table
from layerleap.study import studies
from layerleap.study.fits import FitContext
from layerleap.study.suitability import STUDY, SuitabilitySettings, plan_of
from pages import Page
from tiny_models import sentences, tiny, tokenizer

suitability = STUDY


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


def answer(result):
    return result.tables["verdict"][0]["answer"]


def test_the_result_becomes_plain_json_with_all_tables(found):
    transformer, result = found
    plain = result.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert answer(result) in ("worth it", "not worth it", "cannot tell")
    assert result.headlines[0] == f"Early exit here: {answer(result)}."
    assert len(result.headlines) > 3
    assert len(result.rows("agreement")) == 2 * (transformer.n_layers + 1)
    assert [(row["map"], row["rule"]) for row in result.rows("rules")][:4] == [
        ("logit", "gap"),
        ("linear", "gap"),
        ("linear", "entropy"),
        ("linear", "learned"),
    ]
    assert {row["map"] for row in result.rows("ceilings")} == {"logit", "linear"}
    assert result.rows("timing")[0]["context"] == result.row("costs", map="linear")["context"] == 8


def test_the_last_layer_agrees_and_no_ceiling_is_above_all_layers_but_one(found):
    transformer, result = found
    last = transformer.n_layers
    assert [row["value"] for row in result.rows("agreement", layer=last)] == [1, 1]
    assert all(0 <= row["saved"] <= last - 1 for row in result.rows("ceilings"))


def test_a_text_run_whole_pays_its_blocks_for_every_token(found):
    transformer, result = found
    per_token = measure_cost(transformer, tokens=8).blocks[0]
    times = 8 if transformer.kind == "masked-token" else 1
    assert result.row("costs", map="logit")["blocks"][0] == pytest.approx(times * per_token)
    assert result.rows("timing")[0]["mode"] == ("whole" if times == 8 else "cached")


def test_documents_fitted_on_are_not_read(found):
    _, result = found
    fitted, read = (next(d for d in result.data if d["role"] == r) for r in ("fit", "read"))
    assert fitted["documents"] + read["documents"] <= 200
    used = {row["part"]: row["rows"] for row in result.rows("splits")}
    assert used["calibrate"] + used["verify"] < read["rows"]


def test_the_terminal_shows_all_rules_and_layers_within_80_columns(found):
    transformer, result = found
    console = Console(width=80, record=True, file=io.StringIO())
    tables = [t for s in STUDY.sections for t in s.tables if t.terminal]
    for table in tables:
        console.print(study_table(table, result))
    shown = console.export_text()
    assert "learned" in shown
    heads = [line.split()[0] for line in shown.splitlines() if line.strip()]
    assert all(str(layer) in heads for layer in range(transformer.n_layers + 1))
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_frames_have_the_rules_the_plans_and_the_agreement(found):
    transformer, result = found
    rules, plans, agreement = (result.to_pandas(t) for t in ("rules", "plans", "agreement"))
    has_plan = any(row["exits"] for row in result.rows("plans"))
    assert len(rules) == len({str(row) for row in rules["words"]}) in (4, 5)
    assert rules["chosen"].sum() == has_plan
    assert len(plans) == len(result.rows("plans"))
    assert len(agreement) == 2 * (transformer.n_layers + 1)


def test_a_notebook_shows_the_answer_and_a_page_has_the_tables(found, tmp_path):
    _, result = found
    shown = Page(result._repr_html_())
    assert shown.all("script") == []
    page = Page(result.report(tmp_path).read_text(encoding="utf8"))
    for each in (shown, page):
        assert f"Early exit here: {answer(result)}." in each.text
        assert all(reason in each.text for reason in result.headlines)
    for section in STUDY.sections:
        for table in section.tables:
            assert table.caption in page.text
        for figure in section.figures:
            assert figure.title in page.text


def test_a_plan_names_its_bank_and_decodes_with_it(text, tmp_path):
    transformer = tiny("llama")
    ll.fit(transformer, text, n_texts=200).save_pretrained(tmp_path / "bank")
    asked = {"text": text, "tolerance": 0.6, "context": 8}
    result = suitability(transformer, bank=tmp_path / "bank", **asked)
    chosen = result.row("rules", chosen=True)
    assert chosen["exits"]
    assert chosen["map"] == "linear"
    result.report(tmp_path / "report")
    plan = ll.exits.ExitPlan.load(tmp_path / "report" / "plan.json")
    assert plan.to_dict() == plan_of(result).to_dict()
    assert plan.rule.to_dict() == chosen["calibrated"]["rule"]
    assert (plan.layers, plan.bank) == (tuple(chosen["layers"]), str(tmp_path / "bank"))
    assert not (tmp_path / "report" / "bank").exists()
    generation = ll.generate(transformer, "the cat sat", plan=tmp_path / "report" / "plan.json")
    assert set(generation.exit_layers) <= {*plan.layers, transformer.n_layers}


def test_a_report_has_the_plan_beside_the_bank_that_was_fitted(text, tmp_path):
    transformer = tiny("llama")
    result = suitability(transformer, text=text, n_fit=200, tolerance=0.6, context=8)
    result.report(tmp_path / "report")
    plan = ll.exits.ExitPlan.load(tmp_path / "report" / "plan.json")
    assert plan.to_dict() == plan_of(result, bank=tmp_path / "report" / "bank").to_dict()
    assert plan.rule is not None
    assert ll.generate(transformer, "the cat sat", plan=tmp_path / "report" / "plan.json").text
    with pytest.raises(BadSettings, match="pass bank=folder"):
        plan_of(result)
    loaded = ll.StudyResult.load(result.save(tmp_path / "study.json"))
    assert plan_of(loaded, bank="elsewhere").to_dict() == {**plan.to_dict(), "bank": "elsewhere"}


def test_a_plan_to_never_exit_needs_no_bank(found):
    rules = [{**row, "chosen": False} for row in found[1].rows("rules")]
    tables = {**found[1].tables, "rules": rules}
    never = STUDY.conclude(replace(found[1], tables=tables, findings=[]))
    assert plan_of(never) == ll.exits.ExitPlan(None, (), None)
    assert "never exit" in never.headlines[1]


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

    monkeypatch.setattr(FitContext, "fit", fitted)
    with pytest.raises(BadSettings, match="30 held-out rows are too few"):
        suitability(tiny("llama"), text=text, n_read=30)
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(CannotFetch, match=r'pip install "layerleap\[learn\]"'):
        suitability(tiny("llama"), text=text)


def test_an_interrupted_run_resumes(text, tmp_path, monkeypatch):
    transformer = tiny("llama")
    asked = {"text": text, "tolerance": 0.2, "n_fit": 200, "context": 8, "folder": tmp_path}

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FitContext, "scores", stop)
        with pytest.raises(KeyboardInterrupt):
            suitability(transformer, **asked)
    assert list(tmp_path.glob("fitted-*"))
    timed = json.loads((tmp_path / "section-times.json").read_text())["tables"]
    phases = []
    result = suitability(transformer, progress=lambda phase, *_: phases.append(phase), **asked)
    assert not any(phase.startswith(("fitting", "timing")) for phase in phases)
    assert {key: result.tables[key] for key in timed} == timed
    assert [row["role"] for row in result.data] == ["fit", "read"]
    again = suitability(transformer, **asked)
    assert (again.tables, again.headlines) == (result.tables, result.headlines)


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
    with pytest.raises(BadSettings, match="no setting 'mood'"):
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
    assert {tuple(row["layers"]) for row in result.rows("rules")} == {(1,)}


def test_every_estimate_of_a_recommendation_lies_inside_its_interval(found):
    require_inside(found[1].to_dict(), 10)


def test_it_is_found_where_no_papers_are_installed(monkeypatch):
    studies._installed.cache_clear()
    monkeypatch.setattr(studies, "entry_points", lambda group: EntryPoints())
    try:
        assert studies.names() == ["suitability"]
        assert studies.find("suitability") is STUDY
        assert studies.summary("suitability").startswith("Is early exit worth it")
        with pytest.raises(BadSettings, match=r"choose from suitability; .*layerleap\[papers\]"):
            studies.find("shortcuts")
    finally:
        studies._installed.cache_clear()


def test_the_outlook_says_what_a_run_does_at_full_size_and_quickly():
    usual, banked = SuitabilitySettings(), SuitabilitySettings(bank="bank")
    assert STUDY.outlook(usual).startswith("fits maps on 2,000 texts, reads 1,000 others, times 20")
    assert STUDY.outlook(usual, quick=True).startswith("fits maps on 300 texts, reads 240 others")
    assert STUDY.outlook(banked).startswith("reads 1,000 others")
