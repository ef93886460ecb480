"""Pages of single results, and what the page of a study folds or says about its samples."""

import re

import pytest
import torch

from layerleap.act.decode.decoding_stats import DecodingStats
from layerleap.act.decode.generate import Generation
from layerleap.lens.readings import LensReadings, Readings
from layerleap.results.page import write_page
from layerleap.show.figures.draw import draw, figure_rows, sample_of
from layerleap.show.report.report import report_html
from layerleap_papers.jump_to_conclusions import STUDY
from pages import Page
from studies import make_study

FIGURES = {figure.key: figure for section in STUDY.sections for figure in section.figures}


def generation(layers, drafted=(False, False, False), **how):
    stats = DecodingStats(
        n_layers=30, exactness="exact", max_tokens=3, layers=layers, drafted=list(drafted)
    )
    return Generation("Once", [" upon", " a", " time"], [1, 2, 3], stats, how=how)


def test_a_page_of_early_exits_names_the_rule_its_threshold_and_the_bank(tmp_path):
    early = generation([12, 20, 30], rule="exit if p1 > 0.9", bank="shortcuts fitted on news")
    page = Page(write_page(tmp_path / "page.html", early.head("tiny"), early).read_text())
    assert "rule: exit if p1 > 0.9" in page.text
    assert "bank: shortcuts fitted on news" in page.text
    assert "The warmer a token" in page.text
    assert "Underlined" not in page.text
    assert 'class="scale"' in early._repr_html_()


def test_a_page_of_exact_decoding_has_no_legend_of_layers(tmp_path):
    exact = generation([30, 30, 30], [False, True, False], decoding="exact, without exits")
    page = Page(write_page(tmp_path / "page.html", exact.head("tiny"), exact).read_text())
    assert "decoding: exact, without exits" in page.text
    assert "Every token ran through all layers" in page.text
    assert "Underlined tokens were drafted" in page.text
    assert "warmer" not in page.text
    assert 'class="scale"' not in exact._repr_html_()


def test_columns_of_all_grids_of_readings_have_the_same_width():
    ids, one = torch.zeros(3, 2, 1, dtype=torch.long), torch.zeros(3, 2)
    tracks = dict.fromkeys(("logit", "linear"), LensReadings(ids, ids.float(), one > 0, one, one))
    page = Readings(["a", " much longer"], [0, 1], 2, tracks, lambda _: " word")._repr_html_()
    widths = re.findall(r'<table style="width:([\d.]+em)">', page)
    assert len(widths) == 2
    assert len(set(widths)) == 1
    assert ".layerleap-readings table{table-layout:fixed}" in page


def test_claims_that_were_not_tested_are_folded_away_and_said_why(monkeypatch):
    monkeypatch.setattr("layerleap.show.report.report.draw", lambda *_: None)
    result = make_study()
    html = report_html(result)
    tested, _, rest = html.partition("<details")
    folded = rest.partition("</details>")[0]
    not_tested = [row for row in result.claims if row["agrees"] == "not tested"]
    assert 0 < len(not_tested) < len(result.claims)
    for row in result.claims:
        claim = row["claim"].replace("'", "&#39;")
        assert (claim in folded) == (row in not_tested)
        assert (claim in tested) == (row not in not_tested)
    assert f"{len(not_tested)} more claims could not be tested in this run" in folded


@pytest.mark.parametrize("key", ["kl", "tuned"])
def test_kl_is_drawn_on_a_log_scale_without_the_zero_of_the_last_layer(key):
    result, figure = make_study(12, full=True), FIGURES[key]
    for row in result.rows("scores", metric="kl", layer=12):
        row["value"] = 0.0
    rows = figure_rows(figure, result)
    assert figure.y.scale == "log"
    assert rows
    assert all(row["y"] > 0 for row in rows)
    assert "nan" not in (draw(figure, result) or "")


def test_the_intervals_of_r2_are_said_to_be_over_groups_of_documents():
    result = make_study(4)
    sample = sample_of(FIGURES["r2"], figure_rows(FIGURES["r2"], result))
    assert "over 32 groups of them if there are more than 32" in sample


def test_rows_that_decide_when_training_stops_are_not_called_held_out():
    result = make_study(4, full=True)
    sample = sample_of(FIGURES["tuned"], figure_rows(FIGURES["tuned"], result))
    assert "decide when training stops" in sample
    assert "not held out" in sample
    (finding, *_) = [row["text"] for row in result.findings if row["section"] == "tuned"]
    assert "rows that decided when training stops" in finding


def test_a_study_of_a_classifier_speaks_of_classes_and_lists_no_claims_about_tokens():
    result = make_study(12, kind="text-class")
    assert "predicts the model's class" in result.headlines[0]
    claims = " ".join(row["claim"] for row in result.claims)
    assert claims
    assert "next-token model's" not in claims
    assert "a masked model" not in claims
