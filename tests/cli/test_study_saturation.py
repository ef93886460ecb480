"""`layerleap study saturation` through the runner."""

import json
from pathlib import Path

import pytest
from saturation_studies import text_file
from tiny_models import tiny
from typer.testing import CliRunner, Result

from layerleap.show.cli.app import app

SMALL = (
    "--fit-texts", 100, "--read-texts", 150, "-k", 3, "--permutations", 2, "--pairs", 20,
    "--held-out", 0.6, "--positions", "every:2", "--tolerance", 0.2,
)  # fmt: skip


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny saved model and a text."""
    place = tmp_path_factory.mktemp("place")
    model = tiny("llama", seed=1, num_hidden_layers=8)
    model.model.save_pretrained(place / "model")
    model.tokenizer.save_pretrained(place / "model")  # type: ignore[union-attr]
    text_file(place)
    return place


def test_it_prints_tables_and_writes_a_report(place: Path, tmp_path: Path) -> None:
    words = ("--text", place / "text.jsonl", "-o", tmp_path / "report", *SMALL)
    words += ("--sections", "guesses,intervention")
    result = run("study", "saturation", place / "model", *words)
    assert result.exit_code == 0, result.output
    assert "where each rank of the prediction settles" in result.stdout
    assert "what the paper says" in result.stdout
    assert (tmp_path / "report" / "report.html").exists()
    assert not (tmp_path / "report" / ".work").exists()


def test_json_is_for_programs_and_quick_is_said(place: Path, tmp_path: Path) -> None:
    words = ("--text", place / "text.jsonl", "-o", tmp_path, "--sections", "none", "--quick")
    result = run("study", "saturation", place / "model", *words, *SMALL, "--json")
    assert result.exit_code == 0, result.output
    study = json.loads(result.stdout)
    assert study["settings"]["quick"]
    assert study["exits"] is None
    assert "quick run" in (tmp_path / "report.html").read_text(encoding="utf8")


@pytest.mark.parametrize(
    ("more", "said"),
    [(("-k", 99), "cannot follow 99 ranks"), (("--sections", "magic"), "section 'magic'"),
     (("--text", "-"), "standard input"), (("--bank", "nowhere"), "nowhere"),
     (("--held-out", 0), "held_out 0")],
)  # fmt: skip
def test_what_cannot_be_studied_is_one_line_and_code_two(
    place: Path, tmp_path: Path, more: tuple[object, ...], said: str
) -> None:
    text = () if "--text" in more else ("--text", place / "text.jsonl")
    result = run("study", "saturation", place / "model", "-o", tmp_path, *text, *more)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_help_teaches_with_an_example() -> None:
    result = run("study", "saturation", "--help")
    assert result.exit_code == 0
    assert "layerleap study saturation smollm2" in " ".join(result.output.split())
