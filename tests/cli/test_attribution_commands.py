"""`layerleap attribute`, `attention` and `heads` through the runner."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from layerleap.show.cli.app import app
from pages import Page
from tiny_models import sentences, tiny

TEXT = "the cat sat on the mat"


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    for name in ("llama", "bert", "t5"):
        model = tiny(name)
        model.model.save_pretrained(place / name)
        model.tokenizer.save_pretrained(place / name)  # type: ignore[union-attr]
    (place / "text.txt").write_text("\n\n".join(sentences(20)), encoding="utf8")
    return place


@pytest.mark.parametrize("command", ["attribute", "attention", "heads"])
def test_help_teaches_with_an_example(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"layerleap {command} smollm2" in " ".join(result.output.split())


@pytest.mark.parametrize("by", ["part", "head", "neuron", "source"])
def test_contributions_are_shown_and_add_up(place: Path, by: str) -> None:
    words = ["attribute", place / "llama", TEXT, "--by", by, "--token", "dog", "--against", "cat"]
    result = run(*words, "--against", "tree")
    assert result.exit_code == 0, result.output
    assert "dog \u2212 mean of \u2423cat, \u2423tree =" in result.output
    told = json.loads(run(*words, "--json").stdout)
    total = sum(row["direct"] for row in told["contributions"])
    assert total == pytest.approx(told["value"], abs=1e-4)


def test_an_inner_layer_and_removal_have_their_options(place: Path) -> None:
    words = ["attribute", place / "llama", TEXT, "--layer", 2, "--against", "vocabulary"]
    result = run(*words, "--total", "--text", place / "text.txt", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["layer"], told["lens"]) == (2, "logit")
    assert all(row["block"] in (None, 1, 2) for row in told["contributions"])
    assert any(row["if_removed"] for row in told["contributions"])


@pytest.mark.parametrize(
    "words",
    [("attribute", TEXT), ("attention", TEXT, "--block", 2), ("heads",)],
    ids=lambda w: w[0],
)
def test_pages_have_pictures_and_no_script(place: Path, words: tuple[str, ...]) -> None:
    file = place / f"{words[0]}.html"
    result = run(words[0], place / "llama", *words[1:], "--html", file)
    assert result.exit_code == 0, result.output
    page = Page(file.read_text(encoding="utf8"))
    assert page.all("svg")
    assert not page.all("script")
    assert ("Hover over a bar" in page.text) == (words[0] == "attribute")


def test_attention_and_heads_are_json_for_programs(place: Path) -> None:
    for model in ("llama", "bert"):
        told = json.loads(run("attention", place / model, TEXT, "--json").stdout)
        assert len(told["heads"]) == 12
        told = json.loads(run("heads", place / model, "--json").stdout)
        assert set(told["chance"]) == {"previous", "first", "duplicate", "induction"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("attribute", TEXT, "--token", "the cat"), "'the cat' is 2 tokens of this model"),
        (("attribute", TEXT, "--layer", 4), "layer 4 does not exist: this model has layers 0 to 3"),
        (("attribute", TEXT, "--by", "heads"), "did you mean 'head'?"),
        (("attention", TEXT, "--head", 4), "head 4 does not exist: this model has heads 0 to 3"),
        (("attention", TEXT, "--head", 4, "--block", 2), "block 2 has heads 0 to 3"),
        (("attribute", TEXT, "--bank", "default"), "a bank reads an inner layer"),
        (("attribute", TEXT, "--target", "dog"), "is not an encoder-decoder"),
        (("attention", TEXT, "--block", 0), "block 0 does not exist"),
    ],
)
def test_mistakes_are_one_red_line(place: Path, words: tuple[str, ...], message: str) -> None:
    result = run(words[0], place / "llama", *words[1:])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_post_norm_models_are_refused_in_words(place: Path) -> None:
    result = run("attribute", place / "bert", "the <mask> sat")
    assert result.exit_code == 2
    assert "norms its whole stream after every part" in " ".join(result.output.split())


@pytest.mark.parametrize("command", ["attribute", "attention"])
def test_encoder_decoders_are_told_of_the_option_for_what_they_write(
    place: Path, command: str
) -> None:
    result = run(command, place / "t5", TEXT)
    assert result.exit_code == 2
    assert "say what it writes for TEXT by --target" in " ".join(result.output.split())
    result = run(command, place / "t5", TEXT, "--target", "the dog")
    assert result.exit_code == 0, result.output
