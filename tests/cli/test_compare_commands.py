"""`layerleap align` and `diff` through the runner."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from layerleap.show.cli.app import app
from tiny_models import tiny


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama, another one, one with more tokens, and a tuned copy of the first."""
    place = tmp_path_factory.mktemp("place")
    for name, seed, changes in (
        ("model", 0, {}),
        ("other", 1, {}),
        ("larger", 1, {"vocab_size": 70}),
        ("tuned", 0, {}),
    ):
        model = tiny("llama", seed=seed, **changes)
        if name == "tuned":
            with torch.no_grad():
                block = model.model.model.layers[1]
                block.mlp.down_proj.weight[:, 7] += torch.randn(24)
                block.self_attn.o_proj.weight[:, 6:12] += torch.randn(24, 6)
        model.model.save_pretrained(place / name)
        words = model.need_tokenizer()
        if name == "larger":
            words.add_tokens(["unheard"])
        words.save_pretrained(place / name)
    return place


@pytest.mark.parametrize(
    ("command", "example"),
    [
        ("align", "layerleap align small-lm small-lm-2 --kind ffn.value"),
        ("diff", "layerleap diff smollm2 smollm2-reviews --kind ffn.value --top 10"),
    ],
)
def test_help_teaches_with_an_example(command: str, example: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert example in " ".join(result.output.split())


def test_align_prints_a_line_per_kind_space_and_measure(place: Path) -> None:
    result = run("align", place / "model", place / "model")
    assert result.exit_code == 0, result.output
    rows = [line for line in result.stdout.splitlines() if "3 of 3" in line]
    assert len(rows) == 7 * 2 * 2
    assert "Blocks matched to their own number" in " ".join(result.stdout.split())
    assert "correlations over all 61 tokens" in " ".join(result.stdout.split())


def test_align_by_one_kind_lists_every_match(place: Path) -> None:
    given = ("--kind", "ffn.value", "--rows", 9, "--seed", 2, "--no-control", "--fold")
    result = run("align", place / "model", place / "other", *given)
    assert result.exit_code == 0, result.output
    told = " ".join(result.stdout.split())
    assert "ffn.value, vocabulary, best" in told
    assert "matched to" in told
    assert "drawn with seed 2" in told
    assert "norms folded in" in told
    assert " raw " not in told


def test_align_for_programs_is_json_and_writes_a_page(place: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    given = ("--kind", "attn.o", "--kind", "ffn.up", "--json", "--html", page)
    result = run("align", place / "model", place / "other", *given)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert {one["kind"] for one in told["matchings"]} == {"attn.o", "ffn.up"}
    assert page.read_text().count("<svg") == 8


def test_diff_prints_blocks_heads_and_neurons(place: Path) -> None:
    result = run("diff", place / "model", place / "tuned")
    assert result.exit_code == 0, result.output
    told = " ".join(result.stdout.split())
    assert told.count("did not move") >= 2
    assert "L2.H1" in told
    assert "L2.N7" in told
    assert "did not move (bit-identical): blocks 1, 3" in told
    assert "read from safetensors files" in told


def test_diff_for_programs_is_json_and_writes_a_page(place: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    given = ("--kind", "ffn.value", "--top", 1, "--tokens", 3, "--json", "--html", page)
    result = run("diff", place / "model", place / "tuned", *given)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert [one["name"] for one in told["neurons"]] == ["L2.N7"]
    assert len(told["neurons"][0]["promotes"]) == 3
    assert told["unmoved"] == [1, 3]
    assert "L2.N7" in page.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("align", "model", "larger"),
            "different vocabularies: only one of them has 'unheard'",
        ),
        (("align", "model", "other", "--kind", "ffn"), "kind is 'ffn'; expected one of"),
        (("align", "model", "other", "--rows", "0"), "rows is 0; expected 1 or more"),
        (("diff", "model", "nothing"), "there is no file or folder"),
        (("diff", "model", "tuned", "--kind", "ffn"), "kind is 'ffn'; expected one of"),
        (("diff", "model", "tuned", "--tokens", "0"), "tokens=0; expected at least 0 and 1"),
    ],
)
def test_mistakes_are_one_line(place: Path, words: tuple[str, ...], message: str) -> None:
    command, first, second, *options = words
    result = run(command, place / first, place / second, *options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
