"""`layerleap study saturation` through the runner."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from contract_bank import bank_of
from layerleap.errors import CannotFetch
from layerleap.show.cli.app import app
from tiny_models import text_file, tiny

SMALL = (
    "--fit-texts",
    100,
    "--read-texts",
    150,
    "-k",
    3,
    "--permutations",
    2,
    "--pairs",
    20,
    "--held-out",
    0.6,
    "--positions",
    "every:2",
    "--tolerance",
    0.2,
)


def run(*words: object) -> Result:
    wide = {"COLUMNS": "120"}
    return CliRunner().invoke(app, [str(word) for word in words], env=wide)


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
    assert "Where each rank of the prediction saturates" in result.stdout
    assert "Claims, beside what this study measured" in result.stdout
    assert "Through the logit lens, " in " ".join(result.stdout.split())
    assert (tmp_path / "report" / "report.html").exists()
    assert not (tmp_path / "report" / ".work").exists()


def test_a_section_without_its_library_ends_with_code_3(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str, *_: object) -> None:
        raise CannotFetch(f"{name} is not installed; run: pip install")

    monkeypatch.setattr("layerleap.act.exits.calibration.learn_library", missing)
    words = ("--text", place / "text.jsonl", "-o", tmp_path, *SMALL, "--sections", "exits")
    result = run("study", "saturation", place / "model", *words)
    assert result.exit_code == 3, result.output
    assert "section exits could not run: scipy.stats is not installed" in result.stdout


def test_json_is_for_programs_and_quick_is_said(place: Path, tmp_path: Path) -> None:
    words = ("--text", place / "text.jsonl", "-o", tmp_path, "--sections", "none", "--quick")
    result = run("study", "saturation", place / "model", *words, *SMALL, "--json")
    assert result.exit_code == 0, result.output
    study = json.loads(result.stdout)
    assert study["run"]["quick"]
    assert "exits" not in study["tables"]
    assert "quick run" in (tmp_path / "report.html").read_text(encoding="utf8")


def test_a_bank_is_given_by_its_folder(place: Path, tmp_path: Path) -> None:
    from layerleap import load

    bank_of(load(place / "model")).save_pretrained(tmp_path / "bank")
    words = ("--text", place / "text.jsonl", "-o", tmp_path / "out", "--sections", "none", "--json")
    words += (*SMALL, "--bank", tmp_path / "bank")
    result = run("study", "saturation", place / "model", *words)
    assert result.exit_code == 0, result.output
    study = json.loads(result.stdout)
    assert [row["role"] for row in study["data"]] == ["read"]
    assert "The bank was given" in study["notes"][0]


def test_sections_that_could_not_run_give_code_three(place: Path, tmp_path: Path) -> None:
    words = ("--text", place / "text.jsonl", "-o", tmp_path, *SMALL, "--read-texts", 3)
    result = run("study", "saturation", place / "model", *words, "--sections", "probe")
    assert result.exit_code == 3, result.output
    assert "section probe could not run: 3 documents" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("-k", 99), "cannot follow 99 ranks"),
        (("--sections", "magic"), "no section 'magic'"),
        (("--text", "-"), "standard input"),
        (("--bank", "nowhere"), "nowhere"),
        (("--held-out", 0), "held_out is 0"),
    ],
)
def test_what_cannot_be_studied_is_one_line_and_code_two(
    place: Path, tmp_path: Path, more: tuple[object, ...], message: str
) -> None:
    text = () if "--text" in more else ("--text", place / "text.jsonl")
    result = run("study", "saturation", place / "model", "-o", tmp_path, *text, *more)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_help_teaches_with_an_example_and_names_every_option() -> None:
    result = run("study", "saturation", "--help")
    assert result.exit_code == 0
    help_text = " ".join(result.output.split())
    assert "layerleap study saturation smollm2" in help_text
    options = (
        "text",
        "out",
        "bank",
        "fit-texts",
        "read-texts",
        "ranks",
        "sections",
        "permutations",
        "pairs",
        "tolerance",
        "delta",
        "unit",
        "positions",
        "max-tokens",
        "field",
        "starts",
        "held-out",
        "seed",
        "quick",
        "blocks",
        "tail",
        "revision",
        "dtype",
        "json",
    )
    assert all(f"--{name}" in help_text for name in options)
