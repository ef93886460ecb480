"""`layerleap saturation` through the runner."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from layerleap.maps.fit import fit
from layerleap.show.cli.app import app
from tiny_models import sentences, tiny

TEXT = "the cat sat on the mat"


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and its bank."""
    place = tmp_path_factory.mktemp("place")
    model = tiny("llama")
    model.model.save_pretrained(place / "model")
    model.tokenizer.save_pretrained(place / "model")  # type: ignore[union-attr]
    fit(model, sentences(40)).save_pretrained(place / "bank")
    return place


def test_it_prints_a_strip_and_writes_a_page(place: Path, tmp_path: Path) -> None:
    result = run("saturation", place / "model", TEXT, "--html", tmp_path / "strip.html")
    assert result.exit_code == 0, result.output
    assert "rank 5" in result.stdout
    assert "logit lens" in result.stdout
    page = (tmp_path / "strip.html").read_text(encoding="utf8")
    assert TEXT in page
    assert page.count('title="rank ') == 6 * 5


def test_json_is_for_programs_and_a_bank_adds_its_own_strip(place: Path) -> None:
    words = ("--bank", place / "bank", "-k", 2, "--position", 0, "--position", -1, "--json")
    result = run("saturation", place / "model", TEXT, *words)
    assert result.exit_code == 0, result.output
    plain = json.loads(result.stdout)
    kinds = [(row["map"], row["position"], len(row["ranks"])) for row in plain["saturation"]]
    assert kinds == [(name, position, 2) for name in ("logit", "linear") for position in (0, 5)]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("-k", 99), "cannot follow 99 ranks"),
        (("-k", 0), "choose 1 to 61"),
        (("--position", 9), "position 9 does not exist"),
        (("--bank", "nowhere"), "nowhere"),
    ],
)
def test_an_error_is_one_line_and_exit_code_two(
    place: Path, more: tuple[object, ...], message: str
) -> None:
    result = run("saturation", place / "model", TEXT, *more)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_help_has_an_example() -> None:
    result = run("saturation", "--help")
    assert result.exit_code == 0
    assert "layerleap saturation smollm2" in " ".join(result.output.split())
