"""`layerleap tune` through the runner."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from layerleap.maps.bank import ShortcutBank
from layerleap.maps.translator import Translator
from layerleap.show.cli.app import app
from tiny_models import sentences, tiny

HOW = (
    "--positions",
    "all",
    "--unit",
    "document",
    "--rows-per-step",
    64,
    "--check-every",
    4,
    "--max-rows",
    1600,
)


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama, a text and a bank of it."""
    place = tmp_path_factory.mktemp("place")
    model = tiny("llama")
    model.model.save_pretrained(place / "model")
    model.tokenizer.save_pretrained(place / "model")  # type: ignore[union-attr]
    rows = [json.dumps({"text": t}) for t in sentences(160)]
    (place / "text.jsonl").write_text("\n".join(rows), encoding="utf8")
    fitted = run("fit", place / "model", "-t", place / "text.jsonl", "-o", place / "bank", *HOW[:4])
    assert fitted.exit_code == 0, fitted.output
    return place


def tune(place: Path, out: Path, *words: object) -> Result:
    given = ("--bank", place / "bank", "-t", place / "text.jsonl", "-o", out, *HOW)
    return run("tune", place / "model", *given, *words)


def test_help_teaches_with_an_example() -> None:
    result = run("tune", "--help")
    assert result.exit_code == 0
    assert "layerleap tune smollm2 --bank bank" in " ".join(result.output.split())


def test_tune_writes_a_bank_that_read_uses_and_leaves_no_work_behind(
    place: Path, tmp_path: Path
) -> None:
    result = tune(place, tmp_path / "tuned", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert [row["layer"] for row in told["summary"]] == [0, 1, 2]
    assert all(row["kl_tuned"] < row["kl_closed"] for row in told["summary"])
    assert [path.name for path in tmp_path.iterdir()] == ["tuned"]
    read = run("read", place / "model", "the cat sat", "--bank", tmp_path / "tuned", "--json")
    readings = json.loads(read.stdout)["readings"]
    assert {row["map"] for row in readings} == {"logit", "tuned"}


def test_tune_prints_a_line_per_layer(place: Path, tmp_path: Path) -> None:
    result = tune(place, tmp_path / "tuned", "--start", "logit")
    assert result.exit_code == 0, result.output
    assert all(word in result.output for word in ("rows until", "ahead"))  # a wrapped head
    assert "tuned: " in result.output


@pytest.mark.parametrize("calls", [2, 20])
def test_an_interrupted_run_goes_on_and_ends_with_the_same_bank(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    assert tune(place, tmp_path / "whole").exit_code == 0
    update, seen = Translator.update, 0
    monkeypatch.setattr("layerleap.stats.fit_statistics.pause_after", lambda _: -1.0)

    def stopped(self: Translator, *rest: object) -> None:
        nonlocal seen
        seen += 1
        if seen == calls:
            raise KeyboardInterrupt
        update(self, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Translator, "update", stopped)
    assert tune(place, tmp_path / "tuned").exit_code == 130
    monkeypatch.undo()
    assert tune(place, tmp_path / "tuned").exit_code == 0
    ours, theirs = (
        (tmp_path / name / "maps.safetensors").read_bytes() for name in ("tuned", "whole")
    )
    assert ours == theirs
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tuned", "whole"]


def test_what_cannot_be_tuned_is_one_clear_line(place: Path, tmp_path: Path) -> None:
    for words, said in (
        (("--start", "nothing"), "start is 'nothing'"),
        (("--stop-share", 0), "share 0"),
        (("--max-states", 0), "saves nothing"),
        (("--lr", -1), "not a valid step size"),
    ):
        result = tune(place, tmp_path / "tuned", *words)
        assert result.exit_code == 2
        assert said in " ".join(result.output.split())
    assert not (tmp_path / "tuned").exists()


def test_a_bank_of_another_model_is_refused_before_the_pass(place: Path, tmp_path: Path) -> None:
    bank = ShortcutBank.from_pretrained(place / "bank")
    other = bank.changed(model={**bank.model, "fingerprint": "0" * 32})
    other.save_pretrained(tmp_path / "other")
    result = tune(place, tmp_path / "tuned", "--bank", tmp_path / "other")
    assert result.exit_code == 2
    assert "this bank belongs to" in " ".join(result.output.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]
