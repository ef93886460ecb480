"""The report: one page that needs nothing else, and data beside it that says the same."""

import base64
import copy
import csv
import errno
import hashlib
import json
import re
from functools import cache
from pathlib import Path

import pytest
from pages import HOSTILE, Page
from studies import make_study

from layerleap.errors import BadArtifact, CannotFetch, CannotWrite
from layerleap.show.report.report import report_html, write_report


@cache  # drawing the figures takes most of the time of these tests
def standard():
    return report_html(make_study())


@pytest.fixture
def undrawn(monkeypatch):
    """A report without figures, for what does not depend on them."""
    monkeypatch.setattr("layerleap.show.report.page.figures_of", lambda study: [])


@pytest.mark.usefixtures("undrawn")
def test_the_report_and_its_data_are_written_and_other_files_kept(tmp_path):
    (tmp_path / "bank.json").write_text("mine")
    page = write_report(make_study(), tmp_path)
    assert page == tmp_path / "report.html"
    names = {"report.html", "study.json", "r2.csv", "scores.csv", "fits.csv", "bank.json"}
    names |= {"findings.txt", "summary.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert (tmp_path / "bank.json").read_text() == "mine"


def test_the_page_needs_nothing_from_outside():
    html = standard()
    addresses = set(re.findall(r"https?://[^\"'\s<)]+", html))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    page = Page(html)
    assert [tag for tag, attributes in page.tags if "src" in attributes] == []
    links = {each["href"] for each in page.all("a") if not each["href"].startswith("#")}
    assert links == {"study.json", "scores.csv", "r2.csv", "fits.csv"}
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
    assert len(inner) > 5
    assert inner <= set(page.ids)


@pytest.mark.parametrize("interval", [True, False])
def test_every_caption_has_its_n_and_its_uncertainty(interval):
    page = Page(report_html(make_study(interval=interval)))
    assert len(page.captions) == len(page.all("figure")) == 6
    assert all(re.search(r"n = [\d,]+ states", caption) for caption in page.captions)
    assert all("interval" in caption or "bootstrap" in caption for caption in page.captions)
    assert ("n = 3,000 states from 26 documents" in page.captions[0]) == interval
    assert ("no interval" in page.captions[0]) != interval


def test_all_that_the_study_says_is_on_the_page():
    study = make_study()
    text = " ".join(Page(standard()).text.split())
    said = [row["text"] for row in study["findings"]] + study["notes"]
    said += [row["law"] for row in study["laws"]] + [row["fingerprint"] for row in study["data"]]
    said += [study["model"]["fingerprint"], *study["settings"]]
    assert [each for each in said if each not in text] == []


@pytest.mark.usefixtures("undrawn")
def test_a_law_that_fails_is_said_to_fail():
    study = make_study()
    assert "FAILS" not in Page(standard()).text
    study["laws"][0]["holds"] = False
    page = Page(report_html(study))
    assert "FAILS" in page.text
    assert "1 of 2 laws hold" in page.text


def test_nothing_from_the_study_becomes_markup():
    study = make_study(name=HOSTILE, texts=(HOSTILE, "b"))
    study["notes"] = [HOSTILE]
    study["settings"][HOSTILE] = HOSTILE
    study["findings"] = [
        {"topic": topic, "text": HOSTILE} for topic in ("headline", "r2", "precision", "fit")
    ]
    study["laws"] = [{"law": HOSTILE, "holds": True, "detail": HOSTILE}]
    page = Page(report_html(study))
    assert len(page.all("script")) == 1
    assert page.text.count("alert(") >= 8
    assert not [key for _, attributes in page.tags for key in attributes if key.startswith("on")]


def test_sortable_heads_are_buttons_and_tables_have_captions():
    page = Page(standard())
    sortable = [each for each in page.all("th") if "aria-sort" in each]
    assert len(sortable) == len(page.all("button")) > 20
    assert len(page.all("table")) == len(page.all("caption")) == 7
    assert all(each.get("aria-label") for each in page.all("svg"))


@pytest.mark.usefixtures("undrawn")
def test_the_json_is_the_study_and_the_csv_files_say_the_same(tmp_path):
    study = make_study()
    study["r2"][0]["low"] = None
    write_report(copy.deepcopy(study), tmp_path)
    assert json.loads((tmp_path / "study.json").read_text("utf8")) == study
    for name in ("r2", "scores", "fits"):
        with (tmp_path / f"{name}.csv").open(newline="", encoding="utf8") as stream:
            rows = list(csv.DictReader(stream))
        assert len(rows) == len(study[name])
        for written, row in zip(rows, study[name], strict=True):
            assert written == {
                key: "" if value is None else str(value) for key, value in row.items()
            }


@pytest.mark.usefixtures("undrawn")
def test_numbers_that_json_lacks_become_null(tmp_path):
    study = make_study()
    study["fits"][0]["condition"] = float("inf")
    write_report(study, tmp_path)
    assert json.loads((tmp_path / "study.json").read_text())["fits"][0]["condition"] is None
    assert study["fits"][0]["condition"] == float("inf")


@pytest.mark.parametrize("n_layers", [1, 80])
def test_shallow_and_deep_models_have_one_row_per_layer(n_layers):
    html = report_html(make_study(n_layers, texts=("wikipedia",), kl=False))
    table = html[html.index('id="scores-table"') :]
    body = table[table.index("<tbody>") : table.index("</tbody>")]
    assert body.count("<tr>") == n_layers + 1
    assert 'id="transfer-table"' not in html
    assert 'id="figure-kl"' not in html


@pytest.mark.usefixtures("undrawn")
def test_the_layer_of_half_the_answers_is_the_one_that_the_study_names():
    study = make_study(30)
    study["summary"]["half"] = {"mat": 13, "id": 29}
    text = Page(report_html(study)).text
    assert "layer 13" in text
    assert "layer 29" in text
    study["summary"]["half"]["id"] = None
    assert "Half of the answers" not in Page(report_html(study)).text


def test_a_masked_model_is_described_as_one():
    text = Page(report_html(make_study(kind="masked-token"))).text
    assert "masked token" in text
    assert "next token" not in text


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
    real = Path.write_text

    def full(self, *args, **kwargs):
        if "report.html" in self.name:  # the last one, when the others are already on the disk
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CannotWrite, match="No space left"):
        write_report(make_study(name="new"), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_another_format_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(BadArtifact, match="format 2"):
        write_report(make_study() | {"format": 2}, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_without_its_libraries_the_error_says_what_to_install(tmp_path, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(CannotFetch, match=r'pip install "layerleap\[report\]"'):
        write_report(make_study(), tmp_path / "new")
    assert not (tmp_path / "new").exists()
