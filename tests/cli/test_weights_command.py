"""`layerleap weights` through the runner."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from layerleap.show.cli.app import app
from pages import Page
from tiny_models import sentences, tiny


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["weights", *(str(word) for word in words)])


def squeezed(result: Result) -> str:
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny random models and a text."""
    place = tmp_path_factory.mktemp("place")
    for name in ("llama", "bert"):
        model = tiny(name)
        model.model.save_pretrained(place / name)
        model.tokenizer.save_pretrained(place / name)  # type: ignore[union-attr]
    (place / "text.txt").write_text("\n\n".join(sentences(20)), encoding="utf8")
    return place


def test_help_teaches_with_examples() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "layerleap weights smollm2 L12.H3 --form qk --offset 1" in squeezed(result)


@pytest.mark.parametrize("model", ["llama", "bert"])
def test_without_a_name_all_heads_are_listed_by_what_they_do(place: Path, model: str) -> None:
    result = run(place / model, "--sample", 40)
    assert result.exit_code == 0, result.output
    told = squeezed(result)
    assert "Heads that copy the token they attend to" in told
    assert "shares of 40 tokens whose own score is among the 10 highest" in told
    assert "no mappings tested: only 0 of 40 pairs" in told


def test_heads_for_programs_are_json(place: Path) -> None:
    result = run(place / "llama", "--json", "--sample", 30)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert len(told["heads"]) == 12
    assert told["heads"][0]["copies"]["n"] == 30


@pytest.mark.parametrize("model", ["llama", "bert"])
def test_a_head_shows_the_pairs_of_both_forms(place: Path, model: str) -> None:
    result = run(place / model, "L2.H1", "--top", 9, "--offset", 1 if model == "llama" else 0)
    assert result.exit_code == 0, result.output
    told = squeezed(result)
    assert "L2.H1 W_VO: source token \u2192 written token" in told
    assert ("L2.H1 W_QK at offset 1: query" in told) == (model == "llama")
    assert told.count(" \u2192 ") == 2 + 18
    assert "largest scores between all 61 tokens" in told


def test_pairs_for_programs_are_json(place: Path) -> None:
    given = (
        "--form",
        "qk",
        "--top",
        5,
        "--tokens",
        20,
        "-t",
        place / "text.txt",
        "--json",
        "--different",
        "--raw",
        "--largest",
        "magnitude",
        "--norms",
        "fold",
    )
    result = run(place / "llama", "L1.H0", *given)
    assert result.exit_code == 0, result.output
    (told,) = json.loads(result.stdout)
    assert (told["form"], told["n_tokens"], told["offset"]) == ("qk", 20, 0)
    assert (told["centred"], told["identical"], told["norms"]) == (False, False, "fold")
    sizes = [abs(pair["score"]) for pair in told["pairs"]]
    assert sizes == sorted(sizes, reverse=True)
    assert all(pair["first"]["id"] != pair["second"]["id"] for pair in told["pairs"])


def test_a_neuron_shows_both_ends_of_keys_and_value(place: Path) -> None:
    result = run(place / "llama", "L2.N3", "--top", 4)
    assert result.exit_code == 0, result.output
    told = squeezed(result)
    for word in ("ffn.gate", "ffn.up", "ffn.value", "responds to", "promotes", "suppresses"):
        assert word in told


def test_a_column_shows_both_ends(place: Path) -> None:
    result = run(place / "llama", "L2.H1.V3", "--json", "--inverse", "pseudo", "--top", 4)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["name"] == "L2.H1.V3"
    assert [len(one["promotes"]) for one in told["vectors"]] == [4]


@pytest.mark.parametrize("name", ["L2.H1", "L2.N3", None])
def test_results_can_be_written_as_a_page(place: Path, tmp_path: Path, name: str | None) -> None:
    target = tmp_path / "page.html"
    result = run(place / "llama", *([name] if name else []), "--html", target)
    assert result.exit_code == 0, result.output
    page = Page(target.read_text(encoding="utf8"))
    assert (name or "all heads") in page.text
    assert "says in its weights" in page.text
    assert page.all("table")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("L9.N0",), "block 9"),
        (("L1.H7",), "head 7 does not exist: block 1 has heads 0 to 3"),
        (("L1.X7",), "is not the name of a parameter"),
        (("L1.H0", "--form", "ov"), "form is 'ov'; expected one of 'vo', 'qk', 'both'"),
        (("L1.H0", "--norms", "no"), "norms is 'no'; expected one of"),
        (("L1.H0", "--top", "0"), "top is 0; expected 1 or more"),
        (("L1.H0", "--form", "vo", "--offset", "1"), "W_VO does not depend on positions"),
    ],
)
def test_mistakes_are_one_line(place: Path, words: tuple, message: str) -> None:
    result = run(place / "llama", *words)
    assert result.exit_code == 2
    assert message in squeezed(result)
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--form", "qk"), "choose the pairs of a head"),
        (("L1.N2", "--offset", "1"), "choose the pairs of a head"),
        (("--top", "3"), "--top is for a named head"),
    ],
)
def test_options_that_would_do_nothing_are_refused(place: Path, words, message: str) -> None:
    result = run(place / "llama", *words)
    assert result.exit_code != 0
    assert message in squeezed(result)
