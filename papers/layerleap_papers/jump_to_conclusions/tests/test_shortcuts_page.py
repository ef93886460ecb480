"""The page of the shortcuts study: every section, figure and table, and nothing made up."""

import re
from functools import cache
from xml.etree import ElementTree

import pytest

from layerleap.results.cells import grid_of
from layerleap.show.figures.draw import draw
from layerleap.show.report.report import csv_files, report_html
from layerleap_papers.jump_to_conclusions import STUDY
from pages import Page
from studies import SECTIONS, make_study

FIGURES = {figure.key: figure for section in STUDY.sections for figure in section.figures}
TABLES = {table.key: table for section in STUDY.sections for table in section.tables}
OPTIONAL = {figure.key: s.key for s in STUDY.sections if not s.required for figure in s.figures}


@cache  # drawing the figures takes most of the time of these tests
def full():
    return report_html(make_study(6, full=True))


@pytest.fixture
def undrawn(monkeypatch):
    """A report without figures, for what does not depend on them."""
    monkeypatch.setattr("layerleap.show.report.report.draw", lambda *_: None)


def text_in(key, result):
    svg = draw(FIGURES[key], result)
    return " ".join(element.text or "" for element in ElementTree.fromstring(svg).iter())


def table(key, result):
    grid = grid_of(TABLES[key], result)
    return grid.heads, grid.rows


def test_every_section_figure_and_table_of_a_full_study_is_on_the_page():
    page = Page(full())
    assert {f"section-{key}" for key in SECTIONS} | {"claims"} <= set(page.ids)
    assert {f"figure-{key}" for key in FIGURES} <= set(page.ids)
    assert {"claims-table", "data-table", *TABLES} <= set(page.ids)
    assert len(page.captions) == len(page.all("figure")) == len(FIGURES)
    assert len(page.ids) == len(set(page.ids))
    links = {each["href"] for each in page.all("a") if not each["href"].startswith("#")}
    assert links == {"study.json", *csv_files(make_study(6, full=True))}


def test_every_caption_of_a_full_study_has_its_n_and_its_uncertainty():
    captions = Page(full()).captions
    assert all(re.search(r"n = [\d,]+( to [\d,]+)? states", caption) for caption in captions)
    assert all("interval" in caption or "bootstrap" in caption for caption in captions)


def test_all_that_a_full_study_finds_is_on_the_page():
    result = make_study(6, full=True)
    text = " ".join(Page(full()).text.split())
    words = [row["text"] for row in result.findings]
    words += [row[key] for row in result.claims for key in ("claim", "seen", "agrees", "why")]
    assert [each for each in words if each not in text] == []


@pytest.mark.parametrize("key", OPTIONAL)
def test_a_study_without_the_section_has_no_such_figure(key):
    others = tuple(section for section in SECTIONS if section != OPTIONAL[key])
    assert draw(FIGURES[key], make_study(full=True, sections=others)) is None


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("key", SECTIONS[1:])
def test_each_section_stands_alone(key):
    page = Page(report_html(make_study(6, full=True, sections=("readings", key))))
    shown = {name.removeprefix("section-") for name in page.ids if re.match(r"section-\w+$", name)}
    assert shown == {"readings", key}
    assert "was not run" in page.text


def test_the_title_names_model_and_text():
    html = report_html(make_study(name="some-model"))
    assert "<title>Shortcuts through some-model, read on wikipedia</title>" in html


@pytest.mark.usefixtures("undrawn")
def test_a_masked_model_is_described_as_one():
    text = Page(report_html(make_study(kind="masked-token"))).text
    assert "masked token" in text
    assert "next token" not in text
    assert "Next-token models of different size" not in text
    assert "Masked models of different size" in text


@pytest.mark.parametrize("n_layers", [1, 80])
def test_shallow_and_deep_models_have_one_row_per_layer(n_layers):
    result = make_study(n_layers, texts=("wikipedia",))
    for key in ("agreement-table", "scores-table"):
        assert len(table(key, result)[1]) == n_layers + 1
    assert table("transfer-table", result)[1] == []
    assert draw(FIGURES["transfer"], result) is None


@pytest.mark.usefixtures("undrawn")
def test_the_layer_from_which_half_agree_is_that_of_the_curves():
    result = make_study(30)
    for row in result.tables["scores"]:
        if row["metric"] == "precision@1" and row["read"] == "wikipedia" and row["fit"] != "news":
            first = {"mat": 13, "id": 29}[row["map"]]
            row["value"] = 0.6 if row["layer"] >= first else 0.4
    text = Page(report_html(result)).text
    assert re.search(r"Agreement of at least half from\s+mat\s*layer 13\s+id\s*layer 29", text)
    assert STUDY.picture.arrow(result) == (29, 13, 0.5, "half, 16 layers earlier")
    for row in result.tables["scores"]:
        if row["map"] == "id":
            row["value"] = 0.0
    assert "Agreement of at least half" not in Page(report_html(result)).text
    assert STUDY.picture.arrow(result) is None


@pytest.mark.usefixtures("undrawn")
def test_a_check_that_fails_is_said_to_fail():
    result = make_study()
    assert "FAILS" not in Page(report_html(result)).text
    result.tables["laws"][0]["holds"] = False
    assert Page(report_html(result)).text.count("FAILS") == 1


def test_the_picture_states_the_numbers_of_the_middle_layer():
    result = make_study(30)
    for row in result.tables["scores"]:
        if row["metric"] == "precision@1" and row["layer"] == 15 and row["read"] == "wikipedia":
            row["value"] = {"mat": 0.52, "id": 0.003}[row["map"]]
    title = STUDY.picture.title(result)
    assert "After 15 of 30 layers" in title
    assert "smollm2's next token" in title
    assert "52 % of the time, the logit lens 0.3 % of the time" in title.replace("\n", " ")
    assert "masked token" in STUDY.picture.title(make_study(kind="masked-token"))


def test_the_heat_map_says_how_many_pairs_lie_below_zero():
    result = make_study(6)
    below = sum(row["map"] == "id" and row["r2"] < 0 for row in result.tables["r2"])
    text = text_in("r2", result)
    assert below > 0
    assert f"{below} of 21 pairs" in text
    assert "below 0 shown as 0" in text


def test_the_floor_of_surprisal_is_the_value_at_the_last_layer():
    result = make_study(6)
    for row in result.tables["scores"]:
        if row["metric"] == "surprisal" and row["layer"] == 6:
            row["value"] = 1.23
    assert "own top token, 1.23" in text_in("surprisal", result)


def test_transfer_has_one_panel_per_text_and_one_line_per_fit():
    long = "/somewhere/far/away/in/a/deep/folder/wikipedia.jsonl"
    result = make_study(texts=(long, "news"))
    smaller = [
        row | {"fit": f"{long}, 2,021 rows"}
        for row in result.tables["scores"]
        if row["fit"] == long
    ]
    result.tables["scores"] += smaller
    text = text_in("transfer", result)
    assert "read on news" in text
    assert "dia.jsonl, 2,021 rows" in text
    assert text.count("mat fitted on") == 3


def test_a_tuned_lens_joins_the_curves_but_not_transfer():
    result = make_study(full=True)
    for key in ("precision", "surprisal", "kl"):
        assert "tuned (tuned lens)" in text_in(key, result)
    assert "tuned" not in text_in("transfer", result)
    assert draw(FIGURES["transfer"], make_study(full=True, texts=("wikipedia",))) is None


def test_parts_are_drawn_beside_whole_shortcuts_and_intercepts_only_where_present():
    result = make_study(6, full=True)
    text = text_in("parts", result)
    wanted = ["attention replaced", "feed-forward replaced", "norms replaced", "logit lens"]
    assert [each for each in wanted if each not in text] == []
    assert text.count("same, intercept") == 1
    result.tables["parts"] = [row for row in result.tables["parts"] if not row["bias"]]
    assert "same, intercept" not in text_in("parts", result)


def test_the_exit_figure_shows_the_papers_rule_and_leaves_others_to_the_next():
    result = make_study(6, full=True)
    assert "gap rule" in text_in("exit", result)
    assert "patience" not in text_in("exit", result)
    rules = text_in("exit_rules", result)
    names = ["gap (the paper's)", "top probability", "entropy", "similarity", "patience"]
    names += ["learned", "fixed layer", "oracle", "Through mat", "Through tuned"]
    assert [each for each in names if each not in rules] == []
    assert "costs more than" in text_in("exit_flops", result)


def test_a_broken_promise_is_said_in_words_and_not_only_in_colour():
    text = text_in("calibrated", make_study(6, full=True))
    assert text.count("BROKEN") == 1
    assert "not promised" in text
    assert "never exits" in text
    assert "tolerance 5 %" in text


def test_training_that_never_got_ahead_is_marked():
    result = make_study(30, full=True)
    assert "never ahead" in text_in("tuned_rows", result)
    for row in result.tables["tuned"]:
        row["rows_needed"] = 1000
    assert "never ahead" not in text_in("tuned_rows", result)


def test_every_model_has_its_size_in_the_legend():
    text = text_in("sizes", make_study(full=True))
    assert "smollm2-360m, 32 layers, 362 M parameters" in text
    assert "gpt2, 12 layers, 124 M parameters" in text


def test_the_table_of_saved_layers_has_a_row_per_map_and_rule_and_dashes_where_not_reached():
    result = make_study(30, full=True)
    head, rows = table("saved-table", result)
    assert len(rows) == 18
    assert all(len(row) == len(head) == 10 for row in rows)
    cells = {(row[0].text, row[1].text): row for row in rows}
    first = result.row("exits_saved", map="mat", rule="gap")
    assert cells["mat", "gap"][2].sort == first["saved"]
    assert cells["mat", "gap"][2].small == f"{first['low']:.1f} to {first['high']:.1f}"
    assert cells["mat", "gap"][3].text.startswith("\u2212")
    assert cells["mat", "similarity"][8].text == "\u2013"


def test_a_promise_is_broken_only_where_one_was_made():
    head, rows = table("calibrated-table", make_study(full=True))
    read, outcome = head.index("read on"), head.index("tolerance")
    verdicts = {(row[read].text, row[outcome].text, row[outcome].verdict) for row in rows}
    assert verdicts == {
        ("wikipedia", "within", "good"),
        ("wikipedia", "BROKEN", "bad"),
        ("news", "within", "good"),
        ("news", "above, not promised", "partly"),
    }


def test_a_schedule_is_one_row_with_all_its_measures():
    head, rows = table("schedules-table", make_study(6, full=True))
    assert head == ["schedule", "kind", "blocks run", "precision@1 (%)", "surprisal"]
    assert rows[0][0].text == "0~6"
    assert all(cell.sort is not None for row in rows for cell in row[2:])


def test_rules_are_compared_with_the_papers_on_the_same_rows():
    result = make_study(30, full=True)
    _, rows = table("same-rows-table", result)
    times = {(row[0].text, row[1].text): row[3].sort for row in rows}
    assert times["mat", "gap"] == 1
    base, other = (result.row("same_rows", map=m, rule="gap")["saved"] for m in ("mat", "id"))
    assert times["id", "gap"] == other / base
