"""`layerleap patch` and `layerleap direction` through the runner."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from layerleap.show.cli.app import app
from pages import Page
from tiny_models import WORDS, tiny


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def squeezed(result: Result) -> str:
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model, pairs and prompts."""
    place = tmp_path_factory.mktemp("place")
    model = tiny("llama")
    model.model.save_pretrained(place / "llama")
    model.tokenizer.save_pretrained(place / "llama")  # type: ignore[union-attr]
    pair = {"clean": "the cat sat", "corrupt": "the dog sat", "answer": "moon", "other": "sun"}
    other = {**pair, "clean": "a cat sat", "corrupt": "a dog sat"}
    (place / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n{json.dumps(other)}\n")
    for name, word in (("glad", "big"), ("sad", "small")):
        (place / f"{name}.txt").write_text("\n".join(f"the {one} was {word}" for one in WORDS[:8]))
    return place


PATCH = ("the cat sat", "the dog sat", "--answer", "moon", "--other", "sun")


@pytest.mark.parametrize("command", ["patch", "direction"])
def test_help_teaches_with_examples(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"layerleap {command} smollm2" in squeezed(result)


def test_a_grid_is_a_table_and_a_page(place: Path, empty_cache: Path) -> None:
    page = place / "grid.html"
    result = run("patch", place / "llama", *PATCH, "--html", page)
    assert result.exit_code == 0, result.output
    assert "strongest of 12 cells" in squeezed(result)
    text = page.read_text(encoding="utf8")
    assert "<svg" in text
    Page(text)


@pytest.mark.parametrize("at", ["attn", "ffn", "head", "neuron"])
def test_every_place_is_json_for_programs(place: Path, empty_cache: Path, at: str) -> None:
    result = run("patch", place / "llama", *PATCH, "--at", at, "--method", "gradient", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["at"] == at
    assert told["passes"] > 4  # those of the exact cells count
    assert told["cells"]


def test_many_pairs_have_intervals(place: Path, empty_cache: Path) -> None:
    words = ("patch", place / "llama", "--pairs", place / "pairs.jsonl", "--at", "head", "--json")
    told = json.loads(run(*words, "--layers", "1,3", "--how", "noise").stdout)
    assert told["pairs"] == 2
    assert {cell["block"] for cell in told["cells"]} == {1, 3}
    assert all(cell["low"] <= cell["share"] <= cell["high"] for cell in told["cells"])
    told = json.loads(run(*words[:4], "--positions", "-1,0", "--json").stdout)
    assert {cell["position"] for cell in told["cells"]} == {-1, 0}


def test_a_direction_is_found_saved_and_steered_with(
    place: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    find = ("direction", place / "llama", "--positive", "glad.txt", "--negative", "sad.txt")
    result = run(*find, "-o", "glad.safetensors", "--html", "glad.html")
    assert result.exit_code == 0, result.output
    assert "AUC" in result.output
    Page(Path("glad.html").read_text(encoding="utf8"))
    again = run(*find, "-o", "glad.safetensors")
    assert again.exit_code == 2
    assert "--force replaces it" in squeezed(again)
    told = json.loads(run(*find, "--layer", 2, "--method", "pca", "--json").stdout)
    assert (told["layer"], told["method"]) == (2, "pca")
    edit = ("--edit", "h2+glad.safetensors*3", "--tokens", 3)
    steered = run("generate", place / "llama", "the cat", *edit)
    assert steered.exit_code == 0, steered.output
    assert "Add 3 times glad.safetensors to h[2]" in squeezed(steered)
    missing = run("generate", place / "llama", "the cat", "--edit", "h2+none.safetensors")
    assert missing.exit_code == 2
    assert "none.safetensors is not a file" in squeezed(missing)


def test_what_is_wrong_is_one_line(place: Path, empty_cache: Path) -> None:
    for words, message in (
        (("the cat sat", "the dog sat"), "give --answer"),
        ((), "give CLEAN and CORRUPT, or --pairs"),
        (("the cat sat", "the dog", "--answer", "moon"), "3 and 2 tokens"),
        ((*PATCH, "--at", "heads"), "at is 'heads'"),
        ((*PATCH, "--positions", "first"), "--positions is 'first'; expected each, all, or"),
        ((*PATCH[:3], "moon star", "--other", "sun"), "leave out --other to score all tokens"),
        ((*PATCH[:3], ""), "--answer or --other is empty"),
        ((*PATCH[:2], "--other", "sun"), "--other 'sun' needs --answer"),
        (("--pairs", place / "pairs.jsonl", "--answer", "moon"), "has an answer of its own"),
        (("--pairs", "none.jsonl"), "there is no file none.jsonl"),
    ):
        result = run("patch", place / "llama", *words)
        assert result.exit_code == 2, result.output
        assert message in squeezed(result)
