"""The report of a study of saturation: one page with every figure, and data beside it."""

import copy
import csv
import json
import re
from functools import cache

import pytest
from pages import HOSTILE, Page
from saturation_studies import made

from layerleap.errors import BadArtifact
from layerleap.show.report.report import report_html, write_report

FIGURES = {"places", "histogram", "tau", "probe", "auc", "intervention", "exits", "flops"}


@cache
def standard() -> str:
    return report_html(made())


def test_every_figure_is_on_the_page_with_its_sample():
    page = Page(standard())
    assert {f"figure-{key}" for key in FIGURES} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert len(page.captions) == len(FIGURES)
    assert all("n = " in caption for caption in page.captions)


def test_claims_findings_and_notes_are_on_the_page():
    study, text = made(), " ".join(Page(standard()).text.split())
    for row in study["claims"]:
        assert row["claim"] in text
    for row in study["findings"]:
        assert " ".join(row["text"].split()) in text
    for note in study["notes"]:
        assert " ".join(note.split()) in text


def test_speeds_say_where_and_over_what_they_were_taken():
    text = " ".join(Page(standard()).text.split())
    assert "on this machine; 95 % t intervals over texts" in text


def test_the_page_needs_nothing_from_outside():
    addresses = set(re.findall(r"https?://[^\"'\s<)]+", standard()))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert [tag for tag, attributes in Page(standard()).tags if "src" in attributes] == []


def test_names_cannot_write_html():
    study = copy.deepcopy(made())
    study["model"]["name"] = study["settings"]["text"] = HOSTILE
    assert HOSTILE not in report_html(study)


def test_data_files_say_what_the_study_says(tmp_path):
    page = write_report(made(), tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"report.html", "study.json", "findings.txt", "tau.csv", "probe.csv"}
    assert names >= {"exits.csv", "intervention.csv", "histogram.csv", "claims.csv", "places.csv"}
    assert json.loads((tmp_path / "study.json").read_text())["order"] == made()["order"]
    with (tmp_path / "histogram.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    order = made()["order"]["id"]
    of_rank_1 = [row for row in rows if (row["lens"], row["rank"]) == ("id", "1")]
    assert [int(row["rows"]) for row in of_rank_1] == order["histogram"][0]["counts"]
    links = {each["href"] for each in Page(page.read_text()).all("a")}
    assert {link for link in links if not link.startswith("#")} <= names


def test_a_study_without_optional_sections_still_has_a_page():
    study = copy.deepcopy(made())
    study |= {"guesses": {}, "probe": {}, "intervention": None, "exits": None, "twin": None}
    page = Page(report_html(study))
    assert {"figure-places", "figure-tau"} <= set(page.ids)
    assert "figure-exits" not in page.ids


def test_a_study_of_another_kind_is_refused():
    with pytest.raises(BadArtifact, match="shortcuts or saturation"):
        report_html({"kind": "weather", "format": 1})
