"""`layerleap study icl` and `layerleap tasks` through the runner."""

import json
from pathlib import Path

import pytest
from icl_studies import task_file
from typer.testing import CliRunner, Result

from families import build
from layerleap.show.cli.app import app
from tiny_models import tiny

SIZES = "--seeds 1 --demonstrations 3 --most 4 --queries 6 --search 4"
SMALL = (*SIZES.split(), "--rates", "0.01,0.1", "--lenses", "logit")


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "120"})


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task_file(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build("llama", 1).save_pretrained(folder)
    tiny("llama").tokenizer.save_pretrained(folder)  # type: ignore[union-attr]
    return folder


def test_it_prints_claims_and_writes_a_report(task: Path, model: Path, tmp_path: Path) -> None:
    result = run("study", "icl", model, "--task", task, "-o", tmp_path / "report", *SMALL)
    assert result.exit_code == 0, result.output
    printed = " ".join(result.stdout.split())
    assert "Similarity to in-context learning, mean over layers" in printed
    assert "Claims, beside what this study measured" in printed
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert {"report.html", "claims.csv", "findings.txt", "similarity.csv", "rates.csv"} <= names
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Does in-context learning work here?" in page
    assert "bands and intervals: 95 %, over seeds and queries" in page
    assert "each query of all seeds is left out once" in page
    assert "interval over the means of seeds" in page


def test_a_masked_model_is_refused_in_one_line(task: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    build("bert", 1).save_pretrained(folder)
    tiny("bert").tokenizer.save_pretrained(folder)  # type: ignore[union-attr]
    result = run("study", "icl", folder, "--task", task, "-o", tmp_path / "report", *SMALL)
    assert result.exit_code == 2
    assert "is a masked model; learning in context needs a decoder" in " ".join(
        result.output.split()
    )


def test_help_names_every_option() -> None:
    printed = " ".join(run("study", "icl", "--help").output.split())
    options = ("task", "seeds", "demonstrations", "queries", "rates", "lenses", "bank", "tuned")
    assert all(f"--{name}" in printed for name in options)


def test_tasks_are_listed_and_measured(task: Path, model: Path) -> None:
    listed = run("tasks", "--task", "plurals", "--task", "kinds")
    assert listed.exit_code == 0, listed.output
    assert "a noun to its plural" in listed.stdout
    words = ("tasks", model, "--task", task, "--queries", 6, "--seeds", 1)
    measured = run(*words)
    assert measured.exit_code == 0, measured.output
    printed = " ".join(measured.stdout.split())
    assert "Right answers (%) by number of demonstrations" in printed
    assert "not clearly" in printed
    assert "6 queries per task, over seeds: 1." in printed
    rows = json.loads(run(*words, "--json").stdout)
    assert rows[0]["task"] == "sizes"
    assert {"works", "accuracy", "leads", "left_out"} <= rows[0].keys()
    assert (rows[0]["queries"], rows[0]["seeds"]) == (6, 1)


@pytest.mark.parametrize("joined", [True, False])
def test_every_task_given_is_measured(model: Path, tmp_path: Path, joined: bool) -> None:
    first, second = (task_file(tmp_path, name) for name in ("first.csv", "second.csv"))
    given = ("--task", f"{first},{second}") if joined else ("--task", first, "--task", second)
    words = ("study", "icl", model, *given, "-o", tmp_path / "report", *SMALL)
    result = run(*words, "--sections", "none", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["task"] for row in found["tables"]["tasks"]] == ["first", "second"]


def test_a_file_of_ones_own_has_its_own_fields_template_and_words(
    model: Path, tmp_path: Path
) -> None:
    source = task_file(tmp_path)
    text = source.read_text().replace("text,label", "line,size").replace(",big", ",0")
    source.write_text(text.replace(",small", ",1"))
    words = ["--field", "line", "--label", "size", "--labels", "0=big,1=small", "--template"]
    how = ("--task", source, *words, "{text} is")
    for command in (
        ("study", "icl", model, *how, "-o", tmp_path / "report", *SMALL, "--sections", "none"),
        ("tasks", *how),
    ):
        result = run(*command, "--json")
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        (row,) = found["tables"]["tasks"] if isinstance(found, dict) else found
        assert (row["template"], row["labels"]) == ("{text} is", 2)
    bad = run("tasks", "--task", source, "--labels", "big")
    assert "labels are 'big'; expected values and their words" in " ".join(bad.output.split())


def test_labels_of_several_tokens_have_advice_that_the_command_can_follow(
    model: Path, tmp_path: Path
) -> None:
    source = task_file(tmp_path)
    source.write_text(source.read_text().replace(",big", ",very big"))
    told = " ".join(run("tasks", model, "--task", source).output.split())
    assert "--answers sequence" in told
    few = ("--queries", 4, "--seeds", 1)
    assert run("tasks", model, "--task", source, "--answers", "sequence", *few).exit_code == 0
    study = run("study", "icl", model, "--task", source, "-o", tmp_path / "report", *SMALL)
    told = " ".join(study.output.split())
    assert "--labels 0=bad,1=good" in told
    assert "sequence" not in told
