"""The report of a study of saturation: one page with every figure, and data beside it."""

import csv
import json
import re
from dataclasses import replace
from functools import cache

from saturation_studies import made

from layerleap.results.cells import grid_of
from layerleap.show.figures.draw import figure_rows
from layerleap.show.report.report import report_html, write_report
from layerleap_papers.beyond_the_top1 import STUDY
from pages import HOSTILE, Page

FIGURES = {
    "places",
    "histogram",
    "tau",
    "probe",
    "auc",
    "intervention",
    "exits",
    "flops",
    "calibrated",
}
TABLES = {
    "ranks-table",
    "tau-table",
    "guesses-table",
    "contrasts-table",
    "saved-table",
    "calibrated-table",
    "live-table",
    "twin-table",
    "claims-table",
    "data-table",
}


@cache
def standard() -> str:
    return report_html(made())


def words_of(html: str) -> str:
    return " ".join(Page(html).text.split())


def figure(key: str):
    (found,) = (f for section in STUDY.sections for f in section.figures if f.key == key)
    return figure_rows(found, made())


def table(key: str):
    (found,) = (t for section in STUDY.sections for t in section.tables if t.key == key)
    grid = grid_of(found, made())
    return grid.heads, grid.rows


def test_every_figure_and_table_is_on_the_page_with_its_sample():
    page = Page(standard())
    assert {f"figure-{key}" for key in FIGURES} <= set(page.ids)
    assert set(page.ids) >= TABLES
    assert len(page.ids) == len(set(page.ids))
    assert len(page.captions) == len(FIGURES)
    assert all("n = " in caption for caption in page.captions)


def test_claims_findings_and_notes_are_on_the_page():
    result, text = made(), words_of(standard())
    for row in result.claims:
        assert row["claim"] in text
    for row in result.findings:
        assert " ".join(row["text"].split()) in text
    for note in result.notes:
        assert " ".join(note.split()) in text


def test_the_lenses_and_what_the_model_reads_are_explained():
    assert "the logit lens" in words_of(standard())
    assert "the linear shortcut" in words_of(standard())
    sees = replace(made(), model={**made().model, "reads": "images"})
    assert "Ranks are those of the 61 classes" in words_of(report_html(sees))
    hears = replace(made(), model={**made().model, "reads": "sound"})
    assert "The model hears a recording" in words_of(report_html(hears))


def test_speeds_say_where_and_over_what_they_were_taken():
    assert "on this machine; 95 % t intervals over texts" in words_of(standard())


def test_generated_texts_are_shown_token_by_token():
    text = words_of(standard())
    for row in made().rows("texts"):
        assert f"{row['rule']}, read through {row['map']}" in text
        assert row["rule"] in ("task", "similarity")


def test_the_twin_is_drawn_beside_the_model():
    assert {row["panel"].split(",")[0] for row in figure("intervention")} == {
        "This model",
        "Untrained twin",
    }
    assert any(row["y"].startswith("untrained twin, logit") for row in figure("tau"))


def test_the_last_layer_of_the_histogram_is_muted_and_named():
    result = made()
    muted = [row for row in figure("histogram") if row["muted"]]
    assert {row["x"] for row in muted} == {8}
    for row, about in zip(
        muted, sorted(result.rows("ranks"), key=lambda r: r["rank"]), strict=True
    ):
        assert row["y"] == about["never"]
        assert row["note"] == f"{about['never']:.0%} never"


def test_confusion_rows_sum_to_one_and_the_last_of_fewer_tasks_is_open():
    result = made()
    for about in result.rows("probes"):
        assert about["tasks"] == result.settings["k"] == 3
    shares: dict = {}
    for row in figure("probe"):
        key = (row["panel"], row["y"])
        shares[key] = shares.get(key, 0) + row["value"]
    assert all(abs(total - 1) < 1e-9 for total in shares.values())
    assert {y for _, y in shares} == {"1", "2", "3"}
    (spec,) = (f for s in STUDY.sections for f in s.figures if f.key == "probe")
    more = replace(result, settings={**result.settings, "k": 5})
    assert {row["y"] for row in figure_rows(spec, more)} == {"1", "2", "3+"}


def test_the_full_models_accuracy_is_marked_where_accuracy_is_drawn():
    result = made()
    (spec,) = (f for s in STUDY.sections for f in s.figures if f.key == "exits")
    marks = list(spec.marks(result))
    assert {mark.at for mark in marks} == {result.row("exits_about")["accuracy"]}
    assert {mark.panel for mark in marks} < {row["panel"] for row in figure("exits")}


def test_timed_rules_show_the_accuracy_of_their_replay():
    result = made()
    head, rows = table("live-table")
    right = head.index("right, replayed (%)")
    full = result.row("exits_about")["accuracy"]
    assert rows[0][right].sort == full
    for row in rows[1:]:
        saved = result.row("exits_saved", map=row[0].text, rule=row[1].text, target=0.95)
        assert row[right].sort == saved["accuracy"]


def test_the_page_needs_nothing_from_outside():
    addresses = set(re.findall(r"https?://[^\"'\s<)]+", standard()))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert [tag for tag, attributes in Page(standard()).tags if "src" in attributes] == []


def test_names_cannot_write_html():
    result = made()
    hostile = replace(
        result,
        model={**result.model, "name": HOSTILE},
        settings={**result.settings, "text": HOSTILE},
    )
    assert HOSTILE not in report_html(hostile)


def test_data_files_say_what_the_study_says(tmp_path):
    result, page = made(), write_report(made(), tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"report.html", "study.json", "findings.txt", "tau.csv", "probe.csv"}
    assert names >= {"exits.csv", "intervention.csv", "histogram.csv", "claims.csv", "places.csv"}
    assert names >= {"steps.csv", "guesses.csv", "contrasts.csv", "exits_saved.csv", "live.csv"}
    assert names >= {"calibrated.csv", "twin_tau.csv"}
    assert json.loads((tmp_path / "study.json").read_text())["tables"] == result.tables
    with (tmp_path / "histogram.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    of_rank_1 = [row for row in rows if (row["lens"], row["rank"]) == ("logit", "1")]
    counts = [row["rows"] for row in result.rows("histogram", lens="logit", rank=1)]
    assert [int(row["rows"]) for row in of_rank_1] == counts
    with (tmp_path / "tau.csv").open(newline="") as file:
        columns = set(csv.DictReader(file).fieldnames)
    assert columns >= {"ranks", "exchangeable_mean", "walk_mean", "walk_p", "beats_walk"}
    with (tmp_path / "guesses.csv").open(newline="") as file:
        assert set(csv.DictReader(file).fieldnames) >= {"early_value", "late_rows", "early_are"}
    links = {each["href"] for each in Page(page.read_text()).all("a")}
    assert {link for link in links if not link.startswith("#")} <= names


def test_a_study_without_optional_sections_still_has_a_page():
    result = made()
    (first,) = (row for row in result.sections if row["key"] == "order")
    kept = ("order", "places", "walk_places", "steps", "ranks", "histogram", "tau")
    few = replace(
        result,
        sections=[first],
        tables={name: result.tables[name] for name in kept},
        findings=[row for row in result.findings if row["section"] == "order"],
    )
    page = Page(report_html(few))
    assert {"figure-places", "figure-tau"} <= set(page.ids)
    assert "figure-exits" not in page.ids


def test_a_section_that_could_not_run_says_so():
    result = made()
    sections = [
        {**row, "status": "failed", "reason": "too few rows"} if row["key"] == "probe" else row
        for row in result.sections
    ]
    tables = {k: v for k, v in result.tables.items() if k not in ("probe", "probes", "confusion")}
    page = Page(report_html(replace(result, sections=sections, tables=tables)))
    assert "figure-probe" not in page.ids
    assert "This section could not run: too few rows." in page.text
