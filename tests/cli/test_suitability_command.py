"""`layerleap suitability` through the runner."""

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
    return run("suitability", place / "model", *words)


def test_it_prints_an_answer_and_leaves_no_checkpoint(place: Path, empty_cache: Path) -> None:
    result = asked(place, "--tolerance", 0.2)
    assert result.exit_code == 0, result.output
    assert "early exit here:" in result.stdout
    assert list((empty_cache / "suitability").iterdir()) == []


def test_json_is_for_programs_and_a_bank_saves_the_fit(place: Path, empty_cache: Path) -> None:
    words = ("--text", place / "text.jsonl", "--texts", 200, "-o", place / "bank")
    fitted = run("fit", place / "model", *words)
    assert fitted.exit_code == 0, fitted.output
    result = asked(place, "--tolerance", 0.2, "--bank", place / "bank", "--json", "--repeats", 3)
    assert result.exit_code == 0, result.output
    plain = json.loads(result.stdout)
    assert plain["answer"] in ("worth it", "not worth it", "cannot tell")
    assert plain["settings"]["tolerance"] == 0.2
    assert plain["timing"]["repeats"] == 3
    assert [row["role"] for row in plain["data"]] == ["read"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "about 177 in total"),
        (("--tolerance", 2), "tolerance 2.0 is out of range"),
        (("--text", "-"), "read only once"),
    ],
)
def test_an_error_is_one_line_and_exit_code_two(
    place: Path, empty_cache: Path, more: tuple[object, ...], message: str
) -> None:
    result = asked(place, *more)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_help_has_an_example() -> None:
    assert "layerleap suitability smollm2" in run("suitability", "--help").output
