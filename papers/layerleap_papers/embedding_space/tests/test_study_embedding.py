"""`layerleap study embedding` through the runner."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from families import build
from layerleap.show.cli.app import app
from tiny_models import text_file, tiny

SMALL = ("--fit-texts", 40, "--read-texts", 20, "--held-out", 0.5, "--kept-rows", 16)


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "120"})


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_file(tmp_path_factory.mktemp("text"), 40)


def saved(folder: Path, model: object) -> Path:
    model.save_pretrained(folder)  # type: ignore[attr-defined]
    tiny("llama").tokenizer.save_pretrained(folder)  # type: ignore[union-attr]
    return folder


def test_it_prints_claims_and_writes_a_report(text: Path, tmp_path: Path) -> None:
    model = saved(tmp_path / "model", build("llama", 1))
    words = ("--text", text, "-o", tmp_path / "report", *SMALL, "--quick")
    words += ("--sections", "neurons,kept")
    result = run("study", "embedding", model, *words)
    assert result.exit_code == 0, result.output
    printed = " ".join(result.stdout.split())
    assert "Tokens kept at which the pseudo-inverse becomes better" in printed
    assert "Claims, beside what this study measured" in printed
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert {"report.html", "claims.csv", "findings.txt"} <= names


def test_a_section_that_cannot_run_says_so_and_ends_with_code_three(
    text: Path, tmp_path: Path
) -> None:
    model = saved(tmp_path / "wide", build("llama", 1, hidden_size=64))
    words = ("--text", text, "-o", tmp_path / "report", *SMALL, "--sections", "kept,columns")
    result = run("study", "embedding", model, *words)
    assert result.exit_code == 3, result.output
    printed = " ".join(result.stdout.split())
    assert "section kept could not run: a vocabulary of 61 tokens is smaller" in printed


def test_a_classifier_is_refused_in_one_line(text: Path, tmp_path: Path) -> None:
    model = saved(tmp_path / "classifier", build("llama_text", 1))
    result = run("study", "embedding", model, "--text", text, "-o", tmp_path / "report")
    assert result.exit_code == 2
    assert "gives classes, not tokens" in " ".join(result.output.split())


def test_help_names_every_option() -> None:
    printed = " ".join(run("study", "embedding", "--help").output.split())
    options = ("text", "bank", "top", "state-k", "active", "vectors", "no-fold", "kept-rows")
    assert all(f"--{name}" in printed for name in options)
