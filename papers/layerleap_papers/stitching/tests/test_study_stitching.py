"""`layerleap study stitching` through the runner."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from layerleap.show.cli.app import app
from tiny_models import text_file, tiny

SMALL = ("--fit-texts", 40, "--read-texts", 30, "--layers", 2, "--classifier", "none")


def run(*words: object) -> Result:
    wide = {"COLUMNS": "120"}
    return CliRunner().invoke(app, [str(word) for word in words], env=wide)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny saved models and a text."""
    place = tmp_path_factory.mktemp("place")
    for seed, name in enumerate(("a", "b")):
        model = tiny("llama", seed=seed)
        model.model.save_pretrained(place / name)
        model.tokenizer.save_pretrained(place / name)  # type: ignore[union-attr]
    text_file(place)
    return place


def test_it_prints_tables_and_writes_a_report(place: Path, tmp_path: Path) -> None:
    words = ("--other", place / "b", "--text", place / "text.jsonl", "-o", tmp_path, *SMALL)
    result = run("study", "stitching", place / "a", *words)
    assert result.exit_code == 0, result.output
    assert "Cost in nats a token at the best partner of each layer" in result.stdout
    assert "embedding kernel" in result.stdout
    assert (tmp_path / "report.html").exists()


def test_a_model_with_other_tokens_is_one_clear_line(place: Path, tmp_path: Path) -> None:
    other = tiny("llama", vocab_size=70)
    other.model.save_pretrained(tmp_path / "other")
    tokenizer = other.need_tokenizer()
    tokenizer.add_tokens(["whale"])
    tokenizer.save_pretrained(tmp_path / "other")
    words = ("--other", tmp_path / "other", "--text", place / "text.jsonl", "-o", tmp_path, *SMALL)
    result = run("study", "stitching", place / "a", *words)
    assert result.exit_code == 2
    assert "different vocabularies" in result.output


def test_the_help_names_the_other_model() -> None:
    result = run("study", "stitching", "--help")
    assert result.exit_code == 0
    assert "--other" in result.output
    assert "--classifier" in result.output
