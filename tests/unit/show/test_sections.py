"""The optional sections of the report: all there when the study has them, and nothing else."""

import csv
import io
import re
from functools import cache

import pytest
from layerleap.show.report.data_files import csv_files
from layerleap.show.report.page import claim_table
from layerleap.show.report.section_tables import calibrated_table, saved_table, schedule_table
from layerleap.show.report.sections import sections
from pages import HOSTILE, Page
from studies import make_study

from layerleap.show.report.report import report_html, write_report

KEYS = ("parts", "schedules", "exits", "calibrated", "tuned", "sizes")
FIGURES = {"parts", "alternation", "exit", "exit_rules", "exit_flops", "calibrated", "tuned"}
FIGURES |= {"sizes"}


@cache  # drawing the figures takes most of the time of these tests
def full():
    return report_html(make_study(6, full=True))


@pytest.fixture
def undrawn(monkeypatch):
    """A report without its main figures, for what does not depend on them."""
    monkeypatch.setattr("layerleap.show.report.page.figures_of", lambda study: [])


def test_every_section_figure_and_table_of_a_full_study_is_on_the_page():
    page = Page(full())
    assert {f"section-{key}" for key in KEYS} | {"claims"} <= set(page.ids)
    assert {f"figure-{key}" for key in FIGURES} <= set(page.ids)
    tables = ("claims", "parts", "schedules", "saved", "calibrated", "tuned", "sizes")
    assert {f"{key}-table" for key in tables} <= set(page.ids)
    assert len(page.captions) == len(page.all("figure")) == 6 + len(FIGURES)
    assert len(page.ids) == len(set(page.ids))
    inner = {each["href"][1:] for each in page.all("a") if each["href"].startswith("#")}
    assert inner <= set(page.ids)


def test_every_caption_of_a_full_study_has_its_n_and_its_uncertainty():
    captions = Page(full()).captions
    assert all(re.search(r"n = [\d,]+( to [\d,]+)? states", caption) for caption in captions)
    assert all("interval" in caption or "bootstrap" in caption for caption in captions)


def test_the_full_page_needs_nothing_from_outside():
    html = full()
    assert set(re.findall(r"https?://[^\"'\s<)]+", html)) <= {"http://www.w3.org/2000/svg"}
    page = Page(html)
    assert [tag for tag, attributes in page.tags if "src" in attributes] == []
    links = {each["href"] for each in page.all("a") if not each["href"].startswith("#")}
    assert links == {"study.json", *csv_files(make_study(6, full=True))}
    assert len(links) == 13


def test_all_that_a_full_study_finds_is_on_the_page():
    study = make_study(6, full=True)
    text = " ".join(Page(full()).text.split())
    said = [row["text"] for row in study["findings"]]
    said += [row[key] for row in study["claims"] for key in ("claim", "seen", "agrees", "why")]
    assert [each for each in said if each not in text] == []


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("empty", [None, "absent"])
def test_an_older_study_has_no_optional_section_and_no_optional_file(empty):
    study = make_study()
    if empty is None:
        study |= dict.fromkeys(KEYS) | {"claims": []}
    assert sections(study) == []
    assert set(csv_files(study)) == {"r2.csv", "scores.csv", "fits.csv"}
    html = report_html(study)
    assert 'id="section-' not in html
    assert 'id="claims"' not in html
    assert html == report_html(make_study())


@pytest.mark.parametrize("key", KEYS)
def test_each_section_stands_alone(key):
    study = make_study(6, full=True)
    alone = study | {other: None for other in KEYS if other != key}
    assert [section.key for section in sections(alone)] == [key]


def test_a_model_without_such_parts_is_given_the_reason_instead_of_a_figure():
    study = make_study(full=True) | dict.fromkeys(KEYS)
    study["parts"] = {"reason": "its blocks are not sums.", "intercept": False, "scores": []}
    (found,) = sections(study)
    assert found.figures == found.tables == ()
    assert found.lead[-1] == "Not done for this model: its blocks are not sums."
    assert found.seen == ("Replacing attention costs least: 55 % agreement from layer 0 on.",)


@pytest.mark.usefixtures("undrawn")
def test_a_finding_on_a_topic_without_a_figure_is_still_shown():
    study = make_study()
    study["findings"].append({"topic": "weather", "text": "It rained all day."})
    assert "It rained all day." in Page(report_html(study)).text


def test_csv_files_hold_every_row_of_every_part(tmp_path, monkeypatch):
    monkeypatch.setattr("layerleap.show.report.report.report_html", lambda study: "")
    study = make_study(6, full=True)
    write_report(study, tmp_path)
    wanted = {
        "claims": study["claims"],
        "parts": study["parts"]["scores"],
        "schedules": study["schedules"],
        "exits": study["exits"]["curves"],
        "exits_saved": study["exits"]["saved"],
        "tuned": study["tuned"]["summary"],
        "tuned_progress": study["tuned"]["progress"],
        "sizes": study["sizes"],
    }
    for name, rows in wanted.items():
        text = (tmp_path / f"{name}.csv").read_text("utf8")
        written = list(csv.DictReader(io.StringIO(text)))
        expected = [{k: "" if v is None else str(v) for k, v in row.items()} for row in rows]
        assert written == expected, name


def test_the_calibrated_file_has_a_row_per_rule_and_fresh_text():
    study = make_study(6, full=True)
    rows = list(csv.DictReader(io.StringIO(csv_files(study)["calibrated.csv"])))
    assert len(rows) == sum(len(row["fresh"]) for row in study["calibrated"]["rows"]) == 12
    assert {row["text"] for row in rows} == {"wikipedia", "news"}
    assert rows[0]["method"] == "learn-then-test"
    assert "fresh" not in rows[0]


def test_each_claim_has_a_word_and_a_colour_of_its_own():
    _, rows = claim_table(make_study(full=True))
    verdicts = [(row[1].text, row[1].verdict) for row in rows]
    colours = {"yes": "holds", "partly": "partly", "no": "fails", "not tested": "open"}
    assert verdicts == list(colours.items())
    assert all(f'<span class="verdict {name}">' in full() for name in colours.values())


def test_the_table_of_saved_layers_has_a_row_per_map_and_rule_and_dashes_where_not_reached():
    study = make_study(30, full=True)
    head, rows = saved_table(study)
    assert len(rows) == 18
    assert all(len(row) == len(head) == 9 for row in rows)
    cells = {row[0].text: row for row in rows}
    first = next(
        row for row in study["exits"]["saved"] if (row["map"], row["rule"]) == ("mat", "gap")
    )
    assert cells["mat, gap"][1].sort == first["saved"]
    assert cells["mat, gap"][1].small == f"{first['low']:.1f}\u2013{first['high']:.1f}"
    assert cells["mat, gap"][2].text.startswith("\u2212")
    assert cells["mat, similarity"][7].text == "\u2013"


def test_a_promise_is_broken_only_where_one_was_made():
    _, rows = calibrated_table(make_study(full=True))
    verdicts = {(row[2].text, row[4].text, row[4].verdict) for row in rows}
    assert verdicts == {
        ("wikipedia", "within", "holds"),
        ("wikipedia", "BROKEN", "fails"),
        ("news", "within", "holds"),
        ("news", "above", "partly"),
    }


def test_a_schedule_is_one_row_with_all_its_measures():
    head, rows = schedule_table(make_study(6, full=True))
    assert head == ["schedule", "kind", "blocks run", "precision@1 (%)", "surprisal"]
    assert rows[0][0].text == "0~6"
    assert all(cell.sort is not None for row in rows for cell in row[2:])


@pytest.mark.usefixtures("undrawn")
def test_nothing_from_the_optional_parts_becomes_markup():
    study = make_study(full=True)
    for row in study["claims"]:
        row |= dict.fromkeys(("claim", "seen", "agrees", "why"), HOSTILE)
    for row in study["schedules"][:4]:
        row["schedule"] = HOSTILE
    for row in study["sizes"]:
        row["model"] = HOSTILE
    for row in study["calibrated"]["rows"]:
        row["note"] = row["method"] = row["fresh"][0]["text"] = HOSTILE
    page = Page(report_html(study))
    assert len(page.all("script")) == 1
    assert page.text.count("alert(") >= 20
