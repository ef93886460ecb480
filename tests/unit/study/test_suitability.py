"""The whole question on tiny models: is early exit worth it?"""

import io
import json
import sys
from pathlib import Path

import pytest
from families import build
from rich.console import Console
from tiny_models import sentences, tiny, tokenizer

import layerleap as ll
from layerleap.act.exits.cost import measure
from layerleap.errors import BadSettings, CannotFetch, WrongModel
from layerleap.models.transformer import Transformer
from layerleap.show.cli.suitability_table import suitability_table
from layerleap.study.suitability import study as module
from layerleap.study.suitability.study import SuitabilitySettings, suitability


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


def test_the_result_is_plain_json_with_everything_asked_for(found):
    transformer, result = found
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result["verdict"]["answer"] in ("worth it", "not worth it", "cannot tell")
    assert len(result["agreement"]) == 2 * (transformer.n_layers + 1)
    assert [(row["map"], row["rule"]) for row in result["rules"]] == [
        ("id", "gap"), ("mat", "gap"), ("mat", "entropy"), ("mat", "learned"),
    ]  # fmt: skip
    assert {row["map"] for row in result["ceiling"]} == {"id", "mat"}
    assert result["clock"]["context"] == result["flops"]["mat"]["context"] == 8


def test_the_last_layer_agrees_and_no_ceiling_is_above_all_layers_but_one(found):
    transformer, result = found
    last = [row for row in result["agreement"] if row["layer"] == transformer.n_layers]
    assert [row["value"] for row in last] == [1, 1]
    assert all(0 <= row["saved"]["value"] <= transformer.n_layers - 1 for row in result["ceiling"])


def test_a_text_run_whole_pays_its_blocks_for_every_token(found):
    transformer, result = found
    per_token = measure(transformer, tokens=8).blocks[0]
    times = 8 if transformer.kind == "masked-token" else 1
    assert result["flops"]["id"]["blocks"][0] == pytest.approx(times * per_token)
    assert result["clock"]["way"] == ("whole" if times == 8 else "cached")


def test_documents_fitted_on_are_not_read(found):
    _, result = found
    fitted, read = (next(d for d in result["data"] if d["role"] == r) for r in ("fit", "read"))
    assert fitted["documents"] + read["documents"] <= 200
    assert result["rows"]["calibrate"]["rows"] + result["rows"]["verify"]["rows"] < read["rows"]


def test_the_terminal_shows_verdict_and_reasons_within_80_columns(found):
    _, result = found
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(suitability_table(result))
    shown = console.export_text()
    assert f"early exit here: {result['verdict']['answer']}" in shown
    assert "learned" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    flat = " ".join(shown.split())
    assert all(reason in flat for reason in result["verdict"]["reasons"])


def test_a_given_bank_is_used_and_nothing_is_fitted(text):
    transformer = tiny("llama")
    bank = ll.fit_bank(transformer, text, n_texts=200)
    result = suitability(transformer, bank=bank, text=text, tolerance=0.2, context=8)
    assert [row["role"] for row in result["data"]] == ["read"]
    assert not any("flatters" in note for note in result["notes"])
    other = ll.fit_bank(transformer, text, ll.Sampling(held_out=0.0), n_texts=200)
    result = suitability(transformer, bank=other, text=text, tolerance=0.2, context=8)
    assert any("flatters" in note for note in result["notes"])


def test_a_bank_of_another_model_is_refused(text):
    bank = ll.fit_bank(tiny("gpt2"), text, n_texts=50)
    with pytest.raises(WrongModel):
        suitability(tiny("llama"), bank=bank, text=text)


def test_little_text_is_said_and_too_little_is_refused_with_what_is_needed(text, tmp_path):
    with pytest.raises(BadSettings, match=r"162 held-out rows are too few: .* about 177 in all"):
        suitability(tiny("llama"), text=text, context=8)
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(json.dumps({"text": t}) for t in sentences(8)), encoding="utf8")
    with pytest.raises(BadSettings, match="held-out documents"):
        suitability(tiny("llama"), text=str(few), context=8)


def test_text_that_cannot_do_is_refused_before_anything_is_fitted(text, monkeypatch):
    def fitted(*_, **__):
        raise AssertionError("a pass was spent")

    monkeypatch.setattr(module.FitContext, "fit", fitted)
    with pytest.raises(BadSettings, match="30 held-out rows are too few"):
        suitability(tiny("llama"), text=text, n_read=30)
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(CannotFetch, match=r'pip install "layerleap\[learn\]"'):
        suitability(tiny("llama"), text=text)


def test_an_interrupted_run_goes_on_and_leaves_nothing_in_the_end(text, tmp_path, monkeypatch):
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
    [{"tolerance": 0}, {"tolerance": 1}, {"delta": 0.0}, {"delta": 1.5}, {"n_fit": 0},
     {"n_read": 0}, {"repeats": 0}, {"context": 1}],
)  # fmt: skip
def test_settings_outside_their_meaning_are_refused(change):
    with pytest.raises(BadSettings, match=next(iter(change))):
        SuitabilitySettings(**change)


def test_what_cannot_work_is_refused_before_a_pass_is_spent():
    llama = tiny("llama")
    with pytest.raises(BadSettings, match="no such setting"):
        suitability(llama, mood=1)
    with pytest.raises(BadSettings, match="read only once"):
        suitability(llama, text="-")
    with pytest.raises(BadSettings, match="context 65 is above 64"):
        suitability(llama, context=65)
    image = Transformer.wrap(build("vit"), name="vit")
    with pytest.raises(BadSettings, match="reads images"):
        suitability(image)
    one = Transformer.wrap(build("llama", num_hidden_layers=1), tokenizer(), name="one")
    with pytest.raises(BadSettings, match="none to leave early"):
        suitability(one, text=str(Path(__file__)))


def test_two_layers_are_enough(text):
    two = tiny("llama", num_hidden_layers=2)
    result = suitability(two, text=text, tolerance=0.2, n_fit=200, context=8)
    assert {tuple(row["layers"]) for row in result["rules"]} == {(1,)}
