"""The report of any study: one page that needs nothing else, and data beside it."""

import base64
import csv
import errno
import hashlib
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from markupsafe import escape

from layerleap.errors import BadArtifact, BadSettings, CannotFetch, CannotWrite
from layerleap.show.report.report import csv_files, report_html, result_html, write_report
from layerleap.study.result import StudyResult
from pages import HOSTILE, Page
from studies import make_study


@cache  # drawing the figures takes most of the time of these tests
def standard():
    return report_html(make_study())


@pytest.fixture
def undrawn(monkeypatch):
    """A report without figures, for what does not depend on them."""
    monkeypatch.setattr("layerleap.show.report.report.draw", lambda *_: None)
    monkeypatch.setattr("layerleap.show.report.report.draw_picture", lambda *_: None)


def test_the_report_and_its_data_are_written_and_other_files_kept(tmp_path):
    (tmp_path / "bank.json").write_text("mine")
    result = make_study()
    page = write_report(result, tmp_path)
    assert page == tmp_path / "report.html"
    names = {"report.html", "study.json", "findings.txt", "summary.png", "claims.csv", "bank.json"}
    names |= {f"{name}.csv" for name in result.tables}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert (tmp_path / "bank.json").read_text() == "mine"
    lines = (tmp_path / "findings.txt").read_text(encoding="utf8").splitlines()
    assert lines == [row["text"] for row in result.findings]


def test_the_page_needs_nothing_from_outside():
    html = standard()
    addresses = set(re.findall(r"https?://[^\"'\s<)]+", html))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    page = Page(html)
    assert [tag for tag, attributes in page.tags if "src" in attributes] == []
    links = {each["href"] for each in page.all("a") if not each["href"].startswith("#")}
    assert links == {"study.json", *csv_files(make_study())}
    assert not re.search(r"@import|@font-face|//cdn", html)


def test_the_pages_policy_knows_its_own_script_and_no_other():
    html = report_html(make_study(name=HOSTILE))
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html.replace("&#39;", "'")


def test_all_ids_of_the_page_differ_and_all_inner_links_have_a_target():
    page = Page(standard())
    assert len(page.ids) == len(set(page.ids))
    inner = {each["href"][1:] for each in page.all("a") if each["href"].startswith("#")}
    assert len(inner) >= 5
    assert inner <= set(page.ids)


@pytest.mark.parametrize("interval", [True, False])
def test_every_caption_has_its_n_and_its_uncertainty(interval):
    page = Page(report_html(make_study(interval=interval)))
    assert len(page.captions) == len(page.all("figure")) == 6
    assert all(re.search(r"n = [\d,]+( to [\d,]+)? states", caption) for caption in page.captions)
    assert all("interval" in caption or "bootstrap" in caption for caption in page.captions)
    assert ("n = 3,000 states from 26 documents" in page.captions[0]) == interval
    assert ("no interval" in page.captions[0]) != interval


def test_all_that_the_study_says_is_on_the_page():
    result = make_study()
    text = " ".join(Page(standard()).text.split())
    words = [row["text"] for row in result.findings] + result.notes
    words += [row[key] for row in result.claims for key in ("claim", "seen", "agrees", "why")]
    words += [row["fingerprint"] for row in result.data]
    words += [result.model["fingerprint"], *result.settings]
    assert [each for each in words if each not in text] == []


@pytest.mark.usefixtures("undrawn")
def test_a_finding_without_a_figure_to_stand_under_is_still_shown():
    result = make_study()
    rain = {"section": "readings", "text": "It rained all day.", "headline": False}
    result.findings.append({**rain, "under": "weather"})
    assert "It rained all day." in Page(report_html(result)).text


@pytest.mark.usefixtures("undrawn")
def test_sections_that_failed_and_quick_runs_say_so():
    result = make_study()
    assert "quick run" not in Page(report_html(result)).text
    entry = {"key": "exits", "title": "", "status": "failed", "reason": "no rows", "seconds": 0}
    result.sections.append(entry)
    result.run["quick"] = True
    text = Page(report_html(result)).text
    assert "quick run" in text
    assert "This section could not run: no rows." in text
    assert "\u201cexits\u201d could not run: no rows." in text


def test_claims_that_were_not_tested_are_folded(undrawn):
    result = make_study(full=True)
    result.claims[0] |= {"agrees": "not tested", "seen": "section 'x' was not run"}
    page = report_html(result)
    n = sum(row["agrees"] == "not tested" for row in result.claims)
    table, folded = page.split('id="claims"')[1].split("</section>")[0].split("<details>")
    assert f"{n} more claim" in folded
    assert str(escape(result.claims[0]["claim"])) in folded
    assert "not tested" not in table
    assert all(
        str(escape(row["claim"])) in table for row in result.claims if row["agrees"] != "not tested"
    )


def test_nothing_from_the_study_becomes_markup():
    result = make_study(name=HOSTILE, texts=(HOSTILE, "b"), full=True)
    result.notes[:] = [HOSTILE]
    result.settings[HOSTILE] = HOSTILE
    for row in result.findings:
        row["text"] = HOSTILE
    for row in result.claims:
        row |= dict.fromkeys(("claim", "seen", "agrees", "why"), HOSTILE)
    for row in result.tables["laws"]:
        row |= {"law": HOSTILE, "detail": HOSTILE}
    for row in result.tables["schedules"][:4]:
        row["schedule"] = HOSTILE
    for row in result.tables["sizes"]:
        row["model"] = HOSTILE
    for row in result.tables["calibrated"]:
        row["note"] = row["method"] = row["text"] = HOSTILE
    page = Page(report_html(result))
    assert len(page.all("script")) == 1
    assert page.text.count("alert(") >= 30
    assert not [key for _, attributes in page.tags for key in attributes if key.startswith("on")]
    assert HOSTILE not in result_html(result)


def test_sortable_heads_are_buttons_and_tables_have_captions():
    page = Page(standard())
    sortable = [each for each in page.all("th") if "aria-sort" in each]
    assert len(sortable) == len(page.all("button")) > 20
    assert len(page.all("table")) == len(page.all("caption")) == 10
    assert all(each.get("aria-label") for each in page.all("svg"))


@pytest.mark.usefixtures("undrawn")
def test_the_json_is_the_study_and_the_csv_files_say_the_same(tmp_path):
    result = make_study(6, full=True)
    result.tables["r2"][0]["low"] = None
    write_report(result, tmp_path)
    assert StudyResult.load(tmp_path / "study.json").to_dict() == result.to_dict()
    for name, expected in {**result.tables, "claims": result.claims}.items():
        if not expected:
            assert not (tmp_path / f"{name}.csv").exists()
            continue
        with (tmp_path / f"{name}.csv").open(newline="", encoding="utf8") as stream:
            rows = list(csv.DictReader(stream))
        assert len(rows) == len(expected)
        for written, row in zip(rows, expected, strict=True):
            assert written == {
                key: "" if value is None else str(value) for key, value in row.items()
            }, name


def test_the_same_study_gives_the_same_page():
    assert report_html(make_study()) == standard()


@pytest.mark.usefixtures("undrawn")
def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(CannotWrite, match="cannot write"):
        write_report(make_study(), tmp_path / "taken" / "report")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    assert (tmp_path / "taken").read_text() == "a file"


@pytest.mark.usefixtures("undrawn")
def test_a_full_disk_leaves_the_old_report_whole(tmp_path, monkeypatch):
    write_report(make_study(name="old"), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    real = Path.write_bytes

    def full(self, *args, **kwargs):
        if "report.html" in self.name:  # the last one, when the others are already on the disk
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(CannotWrite, match="No space left"):
        write_report(make_study(name="new"), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_another_format_or_study_is_refused_and_nothing_is_written(tmp_path):
    path = make_study().save(tmp_path / "study.json")
    content = json.loads(path.read_text(encoding="utf8"))
    path.write_text(json.dumps(content | {"format": 1}))
    with pytest.raises(BadArtifact, match="format 2"):
        StudyResult.load(path)
    with pytest.raises(BadSettings, match="no study is called 'weather'"):
        write_report(replace(make_study(), study="weather"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_without_its_libraries_the_error_says_what_to_install(tmp_path, monkeypatch):
    import importlib

    real = importlib.import_module

    def missing(name, *more):
        if name.startswith("layerleap"):
            return real(name, *more)
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(CannotFetch, match=r'pip install "layerleap\[report\]"'):
        write_report(make_study(), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_notebook_shows_headlines_and_verdicts():
    html = make_study()._repr_html_()
    assert make_study().headlines[0].split(",")[0] in html
    assert '<span class="verdict good">yes</span>' in html
