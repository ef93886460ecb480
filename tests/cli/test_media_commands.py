"""Image classifiers on the command line, on tiny saved models."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from layerleap.maps.bank import ShortcutBank
from layerleap.show.cli.app import app
from media import seeing, sets


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny image classifier with its processor, as `save_pretrained` leaves them."""
    model = seeing("dinov2")
    model.model.save_pretrained(tmp_path / "model")
    model.processor.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_classifier_is_checked(folder: Path) -> None:
    result = run("check", folder, "--json")
    assert result.exit_code == 0, result.output
    statuses = {verdict["law"]: verdict["status"] for verdict in json.loads(result.stdout)["laws"]}
    assert statuses.pop("padding") == "not applicable"
    assert set(statuses.values()) == {"holds"}


def test_shortcuts_are_fitted_on_images(folder: Path, tmp_path: Path) -> None:
    result = run("fit", folder, "--text", sets(tmp_path, 90), "-o", tmp_path / "bank", "--json")
    assert result.exit_code == 0, result.output
    assert ShortcutBank.from_pretrained(tmp_path / "bank").data["rows_fitted"] > 40


def test_images_that_do_not_exist_are_one_line(folder: Path, tmp_path: Path) -> None:
    result = run("fit", folder, "--text", tmp_path / "nothing.npz", "-o", tmp_path / "bank")
    assert result.exit_code == 2
    assert "there is no file or folder" in " ".join(result.output.split())


def test_the_list_of_models_says_that_some_are_made(empty_cache: Path) -> None:
    rows = {row["name"]: row for row in json.loads(run("models", "--json").stdout)}
    assert rows["dinov2-mnist"]["source"] == "trained here from dinov2 and mnist"
    assert rows["dinov2-mnist"]["size"].endswith(" min")
    assert {rows[name]["kind"] for name in ("mnist", "beckett")} == {"images", "sound"}
    assert "trained on this machine" in " ".join(run("models", "--help").output.split())
