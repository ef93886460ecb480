"""`layerleap study sparsity` through the runner."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from families import build
from layerleap.show.cli.app import app
from tiny_models import text_file, tiny

SMALL = ("--fit-texts", 3, "--read-texts", 8, "--held-out", 0.5, "--keys", "2,4", "--shares", "0.5")


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "120"})


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_file(tmp_path_factory.mktemp("text"), 40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build("llama", 1).save_pretrained(folder)
    tiny("llama").tokenizer.save_pretrained(folder)  # type: ignore[union-attr]
    return folder


def test_it_prints_tables_and_claims_and_writes_a_report(
    model: Path, text: Path, tmp_path: Path
) -> None:
    words = ("--text", text, "-o", tmp_path / "report", *SMALL, "--sections", "attention,ffn")
    result = run("study", "sparsity", model, *words)
    assert result.exit_code == 0, result.output
    printed = " ".join(result.stdout.split())
    assert "Attention with k keys" in printed
    assert "Claims, beside what this study measured" in printed
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert {"report.html", "claims.csv", "findings.txt", "attention.csv", "ffn.csv"} <= names


def test_bad_numbers_are_refused_in_one_line(model: Path, text: Path, tmp_path: Path) -> None:
    for option, value, message in (
        ("--keys", "2,x", "expected whole numbers"),
        ("--keys", "0", "numbers from 1 on"),
        ("--kl", "0", "a positive number of nats"),
        ("--sections", "heds", "no section 'heds'"),
    ):
        result = run("study", "sparsity", model, "--text", text, "-o", tmp_path, option, value)
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.output.split())
