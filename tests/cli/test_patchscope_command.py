"""`layerleap patchscope` through the runner."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from layerleap.show.cli.app import app
from tiny_models import tiny

TEXT = "the cat sat on the mat"


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model = tiny("llama")
    tiny_model.model.save_pretrained(folder)
    tiny_model.tokenizer.save_pretrained(folder)  # type: ignore[union-attr]
    return folder


def test_it_prints_a_line_per_layer_and_writes_a_page(model: Path, tmp_path: Path) -> None:
    page = tmp_path / "scope.html"
    result = run("patchscope", model, TEXT, "--target", "the dog {} on", "--html", page)
    assert result.exit_code == 0, result.output
    assert "what the model writes" in result.stdout
    assert [f"    {layer}  " in result.stdout for layer in range(4)] == [True] * 3 + [False]
    assert TEXT in page.read_text(encoding="utf8")


def test_json_holds_the_layers_asked_for(model: Path) -> None:
    result = run("patchscope", model, TEXT, "--layer", 0, "--layer", 2, "-n", 2, "--json")
    rows = json.loads(result.stdout)["layers"]
    assert [row["layer"] for row in rows] == [0, 2]
    assert all(len(row["ids"]) <= 2 for row in rows)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--layer", 99), "layer 99 does not exist"),
        (("--target-layer", 99), "layer 99 does not exist"),
        (("--map", "tuned"), "expected one of"),
        (("--map", "linear"), "needs --bank and --target-layer"),
        (("-n", 0), "tokens"),
    ],
)
def test_bad_options_are_refused_before_the_model_is_loaded(
    model: Path, options: tuple[object, ...], words: str
) -> None:
    result = run("patchscope", model, TEXT, *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "loading" not in result.stderr
