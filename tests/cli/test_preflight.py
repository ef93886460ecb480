"""Mistakes that need no model to be found are found before one is loaded, and before torch is."""

import json
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import layerleap as ll
from families import ALL, build
from layerleap.models.facts import ModelFacts, facts_of
from layerleap.models.transformer import Transformer
from layerleap.models.weights import feed_forwards, heads
from layerleap.show.cli.app import app
from tiny_models import sentences, tiny


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny model, its bank, a bank of a wider one, a text, and files that are in the way."""
    place = tmp_path_factory.mktemp("made")
    paths = {
        name: str(place / name)
        for name in ("model", "bank", "wide", "text.jsonl", "full", "taken", "report", "plan.json")
    }
    model, wider = tiny("llama"), tiny("llama", hidden_size=32)
    model.model.save_pretrained(paths["model"])
    assert model.tokenizer is not None
    model.tokenizer.save_pretrained(paths["model"])
    Path(paths["text.jsonl"]).write_text("\n".join(json.dumps({"text": t}) for t in sentences(40)))
    for name, one in (("bank", model), ("wide", wider)):
        bank = ll.fit(one, sentences(40), n_texts=20, evaluate=False, ridge=0.1, progress=False)
        bank.save_pretrained(paths[name])
    for name, file in (
        ("full", "notes.txt"),
        ("taken", "layerleap.json"),
        ("report", "study.json"),
    ):
        (place / name).mkdir()
        (place / name / file).write_text("{}")
    plan = {"format": 1, "rule": {"name": "never"}, "layers": [99], "bank": None}
    Path(paths["plan.json"]).write_text(json.dumps(plan))
    return paths


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("a model was loaded")


# The command, and the value that the message must name. {names} are those of the fixture.
MISTAKES = [
    ("check {model}x", "{model}x"),
    ("check {model} --dtype float33", "float33"),
    ("read {model} hi --bank {full}", "{full}"),
    ("read {model} hi --bank {wide}", "layers of 32"),
    ("read {model} hi --top-k 0", "top_k is 0"),
    ("read {model} hi --html {full}", "{full}"),
    ("saturation {model} hi --bank {wide}", "layers of 32"),
    ("saturation {model} hi --html {full}", "{full}"),
    ("fit {model} --text {model}x.txt -o {model}-b", "{model}x.txt"),
    ("fit {model} --text {text.jsonl} --field body -o {model}-b", "'body'"),
    ("fit {model} --text {text.jsonl} -o {bank}", "{bank}"),
    ("fit {model} --text {text.jsonl} -o {full}", "{full}"),
    ("fit {model} --text {text.jsonl} -o {text.jsonl}", "{text.jsonl}"),
    ("fit {model} --text {text.jsonl} -o {model}-b --shard 4/4", "shard 4 of 4"),
    ("fit {model} --text {text.jsonl} -o {model}-b --shard half", "'half'"),
    ("fit {model} --text {text.jsonl} -o {text.jsonl} --shard 0/2", "{text.jsonl}"),
    ("fit {model} --text {text.jsonl} -o {model}-b --rank 25", "rank 25"),
    ("fit {model} --text {text.jsonl} -o {model}-b --ridge much", "'much'"),
    ("fit {model} --text {text.jsonl} -o {model}-b --pairs some", "'some'"),
    ("fit {model} --text {text.jsonl} -o {model}-b --positions every:0", "every:0"),
    ("fit {model} --text {text.jsonl} -o {model}-b --unit page", "'page'"),
    ("fit {model} --starts {model}x.txt -o {model}-b", "{model}x.txt"),
    ("merge {text.jsonl} -o {bank}", "{bank}"),
    ("import mat {full} --model {model}x", "{model}x"),
    ("import mat {full} --model {model} -o {bank}", "{bank}"),
    ("import tuned-lens {full} --model {model} -o {bank}", "{bank}"),
    ("evaluate {model} --bank {wide}", "layers of 32"),
    ("evaluate {model} --bank {bank} --text {model}x.txt", "{model}x.txt"),
    ("evaluate {model} --bank {bank} --side left", "'left'"),
    ("evaluate {model} --bank {bank} --unit page", "'page'"),
    ("evaluate {model} --bank {bank} --positions few", "'few'"),
    ("evaluate {model} --bank {bank} --texts 0", "texts is 0"),
    ("study suitability {model} --tolerance 2", "tolerance is 2.0"),
    ("study suitability {model} --text {model}x.txt", "{model}x.txt"),
    ("study suitability {model} --bank {wide}", "layers of 32"),
    ("study suitability {model} --bank {bank} -o {report}", "{report}"),
    ("tune {model} --bank {full}", "{full}"),
    ("tune {model} --bank {bank} -o {bank}", "{bank}"),
    ("tune {model} --bank {bank} -o {model}-b --lr 0", "lr 0.0"),
    ("tune {model} --bank {bank} -o {model}-b --start here", "'here'"),
    ("tune {model} --bank {bank} -o {model}-b --text {model}x.txt", "{model}x.txt"),
    ("finetune {model} -o {taken}", "{taken}"),
    ("finetune {model} -o {full}", "{full}"),
    ("finetune {model} -o {model}-f --share 2", "share is 2.0"),
    ("finetune {model} -o {model}-f --learning-rate -1", "learning_rate is -1.0"),
    ("finetune {model} -o {model}-f --how fast", "'fast'"),
    ("finetune {model} -o {model}-f --steps 0", "steps is 0"),
    ("finetune {model} -o {model}-f --text {model}x.txt", "{model}x.txt"),
    ("finetune {model} -o {model}-f --bank {wide}", "layers of 32"),
    ("generate {model} hi --exit simlarity:0.9", "did you mean 'similarity'?"),
    ("generate {model} hi --exit similarity", "similarity:0.98"),
    ("generate {model} hi --exit top-probability:7", "threshold 7.0"),
    ("generate {model} hi --exit {model}x.json", "{model}x.json"),
    ("generate {model} hi --exit {plan.json}", "layer 99"),
    ("generate {model} hi --exit never --checks 1,99", "layer 99"),
    ("generate {model} hi --exit never --checks last", "'last'"),
    ("generate {model} hi --exit never --policy none", "'none'"),
    ("generate {model} hi --edit L9.N1=5", "block 9"),
    ("generate {model} hi --edit L1.N40=5", "neuron 40"),
    ("generate {model} hi --edit L1=5", "'L1=5'"),
    ("generate {model} hi --bank {wide}", "layers of 32"),
    ("generate {model} hi --html {full}", "{full}"),
    ("generate {model} hi --tokens 0", "--tokens is 0"),
    ("tasks {model} --task plurls", "did you mean 'plurals'?"),
    ("tasks {model} --task {text.jsonl}", "'label'"),
    ("tasks {model} --task plurals --answers word", "'word'"),
    ("tasks {model} --task plurals --queries 0", "queries is 0"),
    ("index {model} --top 999", "top is 999"),
    ("index {model} --text {model}x.txt", "{model}x.txt"),
    ("index {model} -o {full}", "{full}"),
    ("search {model} word --index {text.jsonl}", "{text.jsonl}"),
    ("search {model} word --index {model}x.sqlite", "{model}x.sqlite"),
    ("search {model} word --side top", "'top'"),
    ("search {model} word --space no", "'no'"),
    (f"search {{model}} {'a' * 65}", "65 characters"),
    ("weights {model} L1.H4", "head 4"),
    ("weights {model} L4.N1", "block 4"),
    ("weights {model} L1", "'L1'"),
    ("weights {model} L1.H1 --inverse none", "'none'"),
    ("weights {model} L1.H1 --norms none", "'none'"),
    ("weights {model} L1.H1 --largest none", "'none'"),
    ("weights {model} L1.H1 --html {full}", "{full}"),
    ("align {model} {model}x", "{model}x"),
    ("align {model} {model} --kind ffn", "'ffn'"),
    ("diff {model} {model}x", "{model}x"),
    ("diff {model} {model} --kind ffn", "'ffn'"),
    ("diff {model} {model} --inverse none", "'none'"),
    ("debug {model} --port 99999", "port 99999"),
    ("debug {model} --bank {full}", "{full}"),
    ("debug {model} --index-file {text.jsonl}", "{text.jsonl}"),
    ("study saturation {model} --text {model}x.txt", "{model}x.txt"),
    ("study saturation {model} -o {report}", "{report}"),
    ("study saturation {model} --bank {wide}", "layers of 32"),
    ("study sparsity {model} --text {model}x.txt", "{model}x.txt"),
    ("study sparsity {model}x", "{model}x"),
]


def words(line: str, made: dict[str, str]) -> list[str]:
    return [fill(word, made) for word in line.split()]


def fill(text: str, made: dict[str, str]) -> str:
    for name, path in made.items():
        text = text.replace(f"{{{name}}}", path)
    return text


@pytest.mark.parametrize(("line", "value"), MISTAKES, ids=lambda text: text[:60])
def test_a_mistake_is_refused_in_one_line_before_a_model_is_loaded(
    made: dict[str, str], monkeypatch: pytest.MonkeyPatch, line: str, value: str
) -> None:
    monkeypatch.setattr("layerleap.models.load._load_model", refuse)
    result = CliRunner().invoke(app, words(line, made))
    assert result.exit_code == 2, result.output
    shown = result.stderr.strip()
    assert fill(value, made) in shown
    assert shown.startswith("error:")
    assert "\n" not in shown


def test_these_mistakes_are_found_without_torch(made: dict[str, str]) -> None:
    """In one process: what is imported for one of them is there for the next."""
    lines = [words(line, made) for line, _ in MISTAKES]
    code = (
        "import json, sys\n"
        "from typer.testing import CliRunner\n"
        "from layerleap.show.cli.app import app\n"
        "for words in json.loads(sys.stdin.read()):\n"
        "    assert CliRunner().invoke(app, words).exit_code == 2, words\n"
        "    assert 'torch' not in sys.modules, words\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(lines),
        text=True,
        capture_output=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_every_command_that_takes_a_model_looks_for_it_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("layerleap.models.load._load_model", refuse)
    missing = str(tmp_path / "missing")
    root: Any = typer.main.get_command(app)
    seen = 0
    for name, command in root.commands.items():
        arguments = [p.name for p in command.params if p.param_type_name == "argument"]
        models = [one for one in arguments if one in ("model", "a", "b", "base", "tuned")]
        if not models:
            continue
        given = [missing if one in models else "word" for one in arguments]
        more = {"finetune": ["-o", str(tmp_path / "f")], "tune": ["--bank", missing]}
        more["direction"] = ["--positive", missing, "--negative", missing]
        result = CliRunner().invoke(app, [name, *given, *more.get(name, [])])
        assert result.exit_code == 2, (name, result.output)
        assert f"no file or folder {missing}" in result.output.replace("\n", ""), name
        seen += 1
    assert seen >= 15


def test_a_port_that_is_taken_is_found_before_a_model_is_loaded(
    made: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layerleap.models.load._load_model", refuse)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["debug", made["model"], "--port", port])
    assert result.exit_code == 2
    assert f"port {port}" in result.stderr


def test_an_index_that_another_process_builds_is_found_before_a_model_is_loaded(
    made: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from layerleap.lens.vocabulary.store import Building

    monkeypatch.setattr("layerleap.models.load._load_model", refuse)
    target = tmp_path / "index.sqlite"
    with Building(target, {"top": 5}):
        result = CliRunner().invoke(app, ["index", made["model"], "-o", str(target)])
    assert result.exit_code == 2
    assert "another process is building" in result.stderr


@pytest.mark.parametrize("name", ALL)
def test_what_a_configuration_says_is_what_the_model_is(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.config.save_pretrained(tmp_path)
    facts, wrapped = facts_of(str(tmp_path)), Transformer.wrap(model)
    assert facts.n_layers in (wrapped.n_layers, None)
    assert facts.d_model in (wrapped.d_model, None)
    own = feed_forwards(wrapped)[1]
    assert facts.n_neurons is None or isinstance(own, str) or own.n_neurons == facts.n_neurons
    if facts.n_heads is not None:
        with suppress(ll.LayerleapError):  # heads that are not verified
            assert heads(wrapped, 1).n_heads == facts.n_heads
    kind = {"pixel_values": "images", "input_features": "sound"}.get(model.main_input_name, "text")
    pair = kind == "text" and model.config.is_encoder_decoder
    assert facts.reads == ("pairs" if pair else kind)


def test_facts_that_are_not_known_refuse_nothing_that_may_exist() -> None:
    facts = ModelFacts("unknown")
    facts.check_layer(1000)
    facts.check_part(1000, neuron=10**6, head=1000)
    with pytest.raises(ll.LayerleapError, match="block 0 does not exist"):
        facts.check_block(0)


def test_a_mistyped_name_of_a_model_brings_the_one_that_was_meant() -> None:
    result = CliRunner().invoke(app, ["check", "smolm2"])
    assert result.exit_code == 2
    assert "did you mean 'smollm2'?" in result.stderr


def commands(group: Any, *path: str) -> list[tuple[str, ...]]:
    """The words of every command, the groups themselves included."""
    inside = getattr(group, "commands", {}).items()
    return [path, *(words for name, one in inside for words in commands(one, *path, name))]


@pytest.mark.parametrize("path", commands(typer.main.get_command(app)), ids=" ".join)
def test_examples_in_the_help_of_a_command_do_not_wrap_at_80_columns(
    path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    root: Any = typer.main.get_command(app)
    for name in path:
        root = root.commands[name]
    shown = [
        " ".join(line.split())
        for line in CliRunner().invoke(app, [*path, "--help"]).output.splitlines()
    ]
    indented = [line for line in (root.help or "").splitlines() if line.startswith("  ")]
    assert not [line for line in indented if " ".join(line.split()) not in shown]


@pytest.mark.parametrize(
    ("line", "plan"),
    [
        ("fit {model} --text {text.jsonl} --texts 20 -o {model}-b", "over 20 texts of"),
        ("evaluate {model} --bank {bank} --texts 30", "reads 30 texts of"),
        (
            "study suitability {model} --fit-texts 20 --read-texts 10",
            "on 20 texts, reads 10 others",
        ),
        ("tune {model} --bank {bank} --texts 20 -o {model}-b", "over 20 texts"),
        ("finetune {model} --steps 7 -o {model}-f", "7 steps of 4 x 128 tokens"),
        ("index {model} --texts 20", "20 sentences"),
        ("tasks {model} --task plurals --queries 5", "1 tasks, 3 draws of 5 queries"),
        ("align {model} {model}", "every block"),
    ],
)
def test_a_long_command_says_what_it_will_do_before_the_model_is_loaded(
    made: dict[str, str], monkeypatch: pytest.MonkeyPatch, line: str, plan: str
) -> None:
    monkeypatch.setattr("layerleap.models.load._load_model", refuse)
    result = CliRunner().invoke(app, words(line, made))
    assert isinstance(result.exception, AssertionError)  # it came as far as loading the model
    assert plan in " ".join(result.stderr.split())
