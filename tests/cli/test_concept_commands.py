"""`layerleap index` and `search` through the runner."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from layerleap.lens.vocabulary import build
from layerleap.show.cli.app import app
from tiny_models import sentences, tiny


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama, a text, and an index of it."""
    place = tmp_path_factory.mktemp("place")
    for name, seed in (("model", 0), ("other", 1)):
        model = tiny("llama", seed=seed)
        model.model.save_pretrained(place / name)
        model.tokenizer.save_pretrained(place / name)  # type: ignore[union-attr]
    (place / "text.txt").write_text("\n\n".join(sentences(20)), encoding="utf8")
    result = index(place, place / "index", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["vectors"] == 120
    return place


def index(place: Path, target: Path, *words: object) -> Result:
    given = ("-o", target, "-t", place / "text.txt", "--top", 9, "--clusters", 6)
    return run("index", place / "model", *given, *words)


@pytest.mark.parametrize(
    ("command", "example"),
    [("index", "layerleap index smollm2"), ("search", 'smollm2 "guitar music band"')],
)
def test_help_teaches_with_an_example(command: str, example: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert example in " ".join(result.output.split())


def test_index_says_what_it_holds_and_where(place: Path, tmp_path: Path) -> None:
    result = index(place, tmp_path / "index")
    assert result.exit_code == 0, result.output
    told = " ".join(result.output.split())
    assert "120 value vectors of 3 blocks" in told
    assert "9 tokens at both ends" in told
    assert "positions of" in told
    assert "MB)" in told
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_index_says_what_it_lacks(place: Path, tmp_path: Path) -> None:
    result = run("index", place / "model", "-o", tmp_path / "i", "--texts", 0, "--clusters", 0)
    assert result.exit_code == 0, result.output
    assert "no natural ranges: they were not asked for" in result.output
    assert "no clusters: they were not asked for" in result.output


def test_search_prints_neurons_with_both_ends(place: Path) -> None:
    result = run("search", place / "model", "cat dog", "--index", place / "index", "-k", 4)
    assert result.exit_code == 0, result.output
    assert "neurons for 'cat dog'" in result.output
    assert result.output.count(".N") == 4
    assert "\u2423cat" in result.output


def test_search_for_programs_is_json(place: Path) -> None:
    given = ("-i", place / "index", "--json", "--side", "suppressed", "--space", "with")
    result = run("search", place / "model", "cat xylophone", *given)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["missing"] == ["xylophone"]
    assert len(told["results"]) == 10
    assert {one["side"] for one in told["results"]} == {"suppressed"}
    assert {token["text"] for one in told["results"] for token in one["matched"]} == {" cat"}


def test_search_names_words_without_a_token(place: Path) -> None:
    result = run("search", place / "model", "xylophone", "--index", place / "index")
    assert result.exit_code == 0
    assert "no token of this model begins a word with 'xylophone'" in " ".join(
        result.output.split()
    )
    assert "no neuron has these words" in result.output


def test_search_builds_the_index_if_there_is_none(
    place: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "reference_text", lambda _: (None, "none here"))
    assert run("search", place / "model", "cat").exit_code == 0
    assert len(list((empty_cache / "indexes").iterdir())) == 1


@pytest.mark.parametrize(
    ("model", "words", "message"),
    [
        ("other", ("cat",), "is an index of other weights"),
        ("model", ("",), "the query is empty"),
        ("model", ("cat", "--side", "up"), "side is 'up'; expected one of"),
        ("model", ("cat", "--space", "no"), "space is 'no'; expected one of"),
        ("model", ("cat", "--top", 0), "top is 0; expected 1 or more"),
    ],
)
def test_mistakes_are_one_line(place: Path, model: str, words: tuple, message: str) -> None:
    result = run("search", place / model, *words, "--index", place / "index")
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_a_missing_index_is_one_line(place: Path, tmp_path: Path) -> None:
    result = run("search", place / "model", "cat", "--index", tmp_path / "nothing")
    assert result.exit_code == 2
    assert "there is no concept index" in " ".join(result.output.split())


def test_ctrl_c_keeps_what_was_read(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, calls = build.both_ends, []

    def stop(*given: object) -> object:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return own(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "both_ends", stop)
    result = index(place, tmp_path / "index")
    assert result.exit_code == 130
    assert "run the same command again to continue" in " ".join(result.output.split())
    assert index(place, tmp_path / "index").exit_code == 0
    assert len(calls) == 4  # the third block only
