"""A study in a few lines gets a command, a resumable run, a page and CSV files."""

from dataclasses import dataclass

import pytest
from typer.testing import CliRunner

from layerleap.errors import BadText
from layerleap.show.cli.app import app
from layerleap.study import studies
from layerleap.study.claims import Claim, Each, Verdict
from layerleap.study.engine import Section, Study, option
from layerleap.study.figures import Axis, Figure
from layerleap.study.picks import pick, points
from layerleap.study.result import Headline, StudyResult
from layerleap.study.tables import Column, Table, estimate
from layerleap.study.texts import TextContext, TextSettings
from tiny_models import sentences, tiny

RAN = []  # sections, as they run


# --- the study: 40 lines -----------------------------------------------------------------------
@dataclass(frozen=True)
class NormSettings(TextSettings):
    power: float = option(2.0, "Which norm.")

    def resolved(self, model):
        from dataclasses import replace

        return replace(self, text=self.main_text(model), n_fit=1, n_read=self.n_read or 4)


def norms(context):
    RAN.append("norms")
    batch = next(context.batches())
    captured = context.model.capture(batch.inputs, keep=batch.keep)
    rows = []
    for layer, h in captured.states.items():
        length = h.norm(p=context.settings.power, dim=-1)
        ends = {"low": float(length.min()), "high": float(length.max())}
        rows.append({"layer": layer, "value": float(length.mean()), **ends, "rows": len(h)})
    return {"norms": rows}


def fails(context):
    RAN.append("fails")
    raise BadText("there is nothing to see here")


STUDY = Study(
    name="norms",
    title="Norms of {model}",
    help="How long are states?",
    settings=NormSettings,
    context=TextContext,
    sections=(
        Section(
            "norms",
            "How long are states?",
            norms,
            required=True,
            findings=lambda r: [Headline(f"Norms of {len(r.rows('norms'))} layers.")],
            shows=(
                Claim("States have length.", Each(pick("norms"), "{yes} of {n} layers", "")),
                Figure("norms", "Norms", "Longer is longer.", points("norms"), y=Axis("norm")),
                Table(
                    "norm-table",
                    "Norms by layer",
                    pick("norms"),
                    (Column("layer"), estimate("value", "norm")),
                    terminal=True,
                ),
            ),
        ),
        Section(
            "fails",
            "What cannot be done",
            fails,
            shows=(Claim("All can be done.", lambda r: Verdict("yes", "")),),
        ),
    ),
)
# ----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def registered():
    RAN.clear()
    studies.register(STUDY)
    yield
    studies._ADDED.pop(STUDY.name)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(sentences(60)))
    return str(path)


def saved_llama(tmp_path):
    model = tiny("llama")
    model.model.save_pretrained(tmp_path / "model")
    model.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def run(*words):
    return CliRunner().invoke(app, ["study", "norms", *words])


def test_it_has_a_command_whose_options_are_its_settings():
    listed = CliRunner().invoke(app, ["study", "--help"]).stdout
    assert "How long are states?" in listed
    help_text = CliRunner().invoke(app, ["study", "norms", "--help"], env={"COLUMNS": "200"}).stdout
    assert all(f"--{name}" in help_text for name in ("power", "read-texts", "seed", "out", "json"))
    assert "Which norm." in help_text


def test_it_writes_a_page_and_csv_files_and_says_what_could_not_run(tmp_path, text):
    out = tmp_path / "out"
    done = run(str(saved_llama(tmp_path)), "--text", text, "-o", str(out))
    assert done.exit_code == 3, done.output
    page = (out / "report.html").read_text()
    for part in ("Norms of", "figure-norms", "norm-table", "could not run", "nothing to see here"):
        assert part in page
    assert (out / "norms.csv").read_text().startswith("layer,value,low,high,rows\n0,")
    assert "not tested" in (out / "claims.csv").read_text()
    assert "States have length.,yes" in (out / "claims.csv").read_text()
    result = StudyResult.load(out / "study.json")
    assert result.failed == {"fails": "there is nothing to see here"}
    assert list(result.to_pandas("norms").columns) == ["layer", "value", "low", "high", "rows"]
    assert not (out / ".work").exists()


def test_it_resumes_with_the_sections_that_were_not_finished(tmp_path, text):
    model, work = saved_llama(tmp_path), tmp_path / "work"
    first = STUDY(str(model), text=text, folder=work)
    second = STUDY(str(model), text=text, folder=work)
    assert RAN == ["norms", "fails", "fails"]
    assert second.tables == first.tables
    assert second.run["whole"] is False
    STUDY(str(model), text=text, folder=work, power=1.0)
    assert RAN.count("norms") == 2  # other settings: run again


def test_an_interrupted_run_continues(tmp_path, text, monkeypatch):
    model, work = saved_llama(tmp_path), tmp_path / "work"

    def stop(context):
        raise KeyboardInterrupt

    broken = Study(
        **{
            **STUDY.__dict__,
            "sections": (STUDY.sections[0], Section("fails", "What cannot be done", stop)),
        }
    )
    with pytest.raises(KeyboardInterrupt):
        broken(str(model), text=text, folder=work)
    STUDY(str(model), text=text, folder=work)
    assert RAN == ["norms", "fails"]
