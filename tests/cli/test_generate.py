"""`layerleap generate` through its runner, on a tiny model in a folder."""

import json

import pytest
from typer.testing import CliRunner

import layerleap
from contract_bank import bank_of
from layerleap.act.decode import divergence as divergence_module
from layerleap.act.decode.divergence import Divergence
from layerleap.files import write_json
from layerleap.show.cli.app import app
from tiny_models import spelling, tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("generate")
    made = tiny("llama", num_hidden_layers=4)
    made.model.save_pretrained(root / "model")
    made.tokenizer.save_pretrained(root / "model")
    loaded = layerleap.load(root / "model")
    bank_of(loaded).save_pretrained(root / "bank")
    return str(root / "model"), str(root / "bank")


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["generate", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_the_text_is_the_models_own_and_the_stats_say_so(folders):
    model, bank = folders
    result = json.loads(run(model, "the cat sat", "--bank", bank, "-n", 9, "--json").stdout)
    loaded = layerleap.load(model)
    ids = loaded.tokenizer("the cat sat", return_tensors="pt").input_ids
    expected = loaded.model.generate(ids, max_new_tokens=9, do_sample=False)
    assert result["ids"] == expected[0, ids.shape[1] :].tolist()
    assert result["stats"]["exactness"] == "exact"
    assert len(result["tokens"]) == len(result["ids"]) == len(result["stats"]["layers"])


def test_early_exit_colours_tokens_and_prints_the_agreement(folders, tmp_path):
    model, bank = folders
    page = tmp_path / "text.html"
    result = run(model, "the cat sat", "--bank", bank, "-n", 9, "--exit", "fixed:2", "--html", page)
    assert "agreement" in result.output
    assert "2.2 of 4 layers per token" in result.output  # the first token waits for the prompt
    assert page.read_text().count("layer 2 of 4") == 8


def test_generation_stops_at_strings(tmp_path):
    made = spelling()
    made.model.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    options = (tmp_path, "abc", "--no-bank", "-n", 12, "--json")
    whole = json.loads(run(*options).stdout)["continuation"]
    stopped = json.loads(run(*options, "--stop", "000", "--stop", whole[5:7]).stdout)
    assert stopped["continuation"] == whole[: whole.index(whole[5:7]) + 2]


def test_a_plan_file_has_rule_layers_and_bank(folders, tmp_path):
    model, bank = folders
    plan = {"rule": {"name": "fixed", "layer": 1}, "layers": [3], "bank": bank}
    write_json(tmp_path / "plan.json", plan)
    result = json.loads(
        run(model, "the cat", "-n", 5, "--exit", tmp_path / "plan.json", "--json").stdout
    )
    assert result["stats"]["layers"][1:] == [3] * 4


def test_a_plan_to_never_exit_is_refused(folders, tmp_path):
    write_json(tmp_path / "plan.json", {"rule": None, "layers": [], "bank": None})
    result = run(folders[0], "the cat", "--exit", tmp_path / "plan.json", code=2)
    assert "this plan is to never exit" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["the cat", "--exit", "guess:1"], "unknown rule 'guess'"),
        (["the cat", "--exit", "patience"], "as in patience:3"),
        (["the cat", "--exit", "similarity"], "as in similarity:0.98"),
        (["the cat", "--temperature", "0.5"], "--temperature needs --sample"),
        (["the cat", "--checks", "2"], "pass one with --exit"),
        (
            ["the cat", "--exit", "patience:2", "--checks", "first"],
            "'first' is not a list of layers",
        ),
        (["the cat", "--exit", "patience:2", "--policy", "forget"], "expected one of 'recompute'"),
        ([" "], "the prompt is empty"),
        (["the cat", "-n", "0"], "expected at least 1"),
        (["the cat", "--chat"], "no chat template"),
        (["the cat", "--edit", "L2=5"], "cannot read the edit 'L2=5'"),
        (["the cat", "--edit", "L2.N99=5"], "neuron 99 does not exist: block 2 has neurons 0 to"),
        (["the cat", "--edit", "L9.N1=5"], "block 9 does not exist"),
    ],
)
def test_bad_input_is_one_clear_line(folders, options, message):
    model, bank = folders
    result = run(model, *options, "--bank", bank, code=2)
    assert message in " ".join(result.output.split())
    assert not result.stdout.strip()  # nor is the prompt printed before an error


def test_where_rounding_decides_the_tokens_and_the_remedy_are_named(folders, monkeypatch):
    parted = Divergence(2, 5, 7, gap=0.1, rounding=0.05)
    monkeypatch.setattr(divergence_module, "divergence", lambda *_: parted)
    model, bank = folders
    options = ["--bank", bank, "-n", 9, "--dtype", "bfloat16", "--fast", "--against-generate"]
    message = " ".join(run(model, "the cat sat", *options).output.split())
    assert "first differs at new token 3" in message
    assert "2.0 rounding steps" in message
    tokenizer = layerleap.load(model).tokenizer
    assert f"ours {tokenizer.decode([5])!r}, generate's {tokenizer.decode([7])!r}" in message
    assert "--strict keeps the bits of generate" in message


def test_the_same_seed_draws_the_same_text(folders):
    model, bank = folders
    texts = [
        run(model, "the cat", "--bank", bank, "-n", 8, "--sample", "--seed", 4, "--json").stdout
        for _ in range(2)
    ]
    assert json.loads(texts[0])["ids"] == json.loads(texts[1])["ids"]


def test_edits_hold_while_the_command_generates(folders):
    model, bank = folders
    options = ("--bank", bank, "-n", 6, "--json", "--edit", "L2.N5=40", "--edit", "L3.N7+30@last")
    result = json.loads(run(model, "the cat sat", *options).stdout)
    loaded = layerleap.load(model)
    ids = loaded.tokenizer("the cat sat", return_tensors="pt").input_ids
    with loaded.edit(*map(layerleap.edits.parse_edit, ("L2.N5=40", "L3.N7+30@last"))):
        expected = loaded.model.generate(ids, max_new_tokens=6, do_sample=False)
    assert result["ids"] == expected[0, ids.shape[1] :].tolist()
    plain = json.loads(run(model, "the cat sat", "--bank", bank, "-n", 6, "--json").stdout)
    assert plain["ids"] != result["ids"]
    assert "SetNeuron" in result["how"]["edits"]
    shown = run(model, "the cat sat", "--bank", bank, "-n", 3, "--edit", "L2.N5=40").output
    assert "with an edit: Set neuron 5 of block 2 to 40" in shown


def test_it_can_be_compared_with_the_library(folders):
    model, bank = folders
    result = run(model, "the cat sat", "--bank", bank, "-n", 9, "--against-generate")
    assert "against generate: identical" in result.output
    result = run(
        model, "the cat sat", "--bank", bank, "-n", 9, "--exit", "fixed:1", "--against-generate"
    )
    assert "first differs at new token" in " ".join(result.output.split())
