"""`layerleap study suitability` through the runner."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from layerleap.show.cli.app import app
from tiny_models import sentences, tiny


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and a text."""
    place = tmp_path_factory.mktemp("place")
    model = tiny("llama")
    model.model.save_pretrained(place / "model")
    model.tokenizer.save_pretrained(place / "model")  # type: ignore[union-attr]
    rows = [json.dumps({"text": t}) for t in sentences(200)]
    (place / "text.jsonl").write_text("\n".join(rows), encoding="utf8")
    return place


def asked(place: Path, *more: object) -> Result:
    words = ("--text", place / "text.jsonl", "--fit-texts", 200, "--context", 8, *more)
    return run("study", "suitability", place / "model", *words)


def test_it_prints_an_answer_and_leaves_no_checkpoint(place: Path, tmp_path: Path) -> None:
    result = asked(place, "--tolerance", 0.2, "-o", tmp_path / "report")
    assert result.exit_code == 0, result.output
    assert "Early exit here:" in result.stdout
    assert "fits maps on 200 texts, reads 1,000 others" in " ".join(result.stderr.split())
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert {"report.html", "plan.json", "bank", "rules.csv"} <= names
    assert ".work" not in names


def test_json_is_for_programs_and_a_bank_saves_the_fit(place: Path, tmp_path: Path) -> None:
    words = ("--text", place / "text.jsonl", "--texts", 200, "-o", place / "bank")
    fitted = run("fit", place / "model", *words)
    assert fitted.exit_code == 0, fitted.output
    more = ("--bank", place / "bank", "--json", "--repeats", 3, "-o", tmp_path / "report")
    result = asked(place, "--tolerance", 0.2, *more)
    assert result.exit_code == 0, result.output
    plain = json.loads(result.stdout)
    (verdict,) = plain["tables"]["verdict"]
    assert verdict["answer"] in ("worth it", "not worth it", "cannot tell")
    assert plain["settings"]["tolerance"] == 0.2
    assert plain["tables"]["timing"][0]["repeats"] == 3
    assert [row["role"] for row in plain["data"]] == ["read"]
    assert json.loads((tmp_path / "report" / "plan.json").read_text())["layers"] is not None


def test_a_bank_lets_the_text_come_from_standard_input(place: Path, tmp_path: Path) -> None:
    words = ("--text", place / "text.jsonl", "--texts", 200, "-o", tmp_path / "bank")
    assert run("fit", place / "model", *words).exit_code == 0
    more = ("--bank", tmp_path / "bank", "--tolerance", 0.3, "--context", 8, "--json")
    report = ("--text", "-", "-o", tmp_path / "report")
    arguments = ("study", "suitability", place / "model", *more, *report)
    text = "\n\n".join(sentences(300))
    result = CliRunner().invoke(app, [str(word) for word in arguments], input=text)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["settings"]["text"] == "-"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "about 177 in total"),
        (("--tolerance", 2), "tolerance is 2.0; expected a share between 0 and 1"),
        (("--text", "-"), "read only once"),
    ],
)
def test_an_error_is_one_line_and_exit_code_two(
    place: Path, tmp_path: Path, more: tuple[object, ...], message: str
) -> None:
    result = asked(place, *more, "-o", tmp_path / "report")
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_help_has_an_example() -> None:
    shown = run("study", "suitability", "--help").output
    assert "layerleap study suitability smollm2" in shown
