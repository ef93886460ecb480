"""Figures of any study: well-formed, self-contained, repeatable SVG."""

import re
import struct
from functools import cache
from xml.etree import ElementTree

import pytest

from layerleap.errors import CannotFetch
from layerleap.show.figures.draw import draw, draw_picture, in_words, sample_of
from layerleap.study.engine import Picture
from layerleap.study.figures import Axis, Figure, Line, short
from layerleap_papers.jump_to_conclusions import STUDY
from studies import make_study

FIGURES = {figure.key: figure for section in STUDY.sections for figure in section.figures}
each_figure = pytest.mark.parametrize("key", FIGURES)


@cache  # drawing takes most of the time of these tests
def drawn(key, n_layers=6):
    return draw(FIGURES[key], make_study(n_layers, full=True))


def texts_of(svg):
    return " ".join(element.text or "" for element in ElementTree.fromstring(svg).iter())


def ids_of(svg):
    return [each.attrib["id"] for each in ElementTree.fromstring(svg).iter() if "id" in each.attrib]


def figure_of(rows, kind="lines", **options):
    return Figure("made", "Made up", "How to read it.", lambda _: rows, kind, **options)


@pytest.mark.parametrize("n_layers", [1, 80])
@each_figure
def test_every_figure_is_drawn_without_nan_for_any_depth(key, n_layers):
    svg = drawn(key, n_layers)
    root = ElementTree.fromstring(svg)
    assert root.attrib["role"] == "img"
    assert len(root.attrib["aria-label"]) > 30
    assert not re.search(r"\bnan\b|\binf\b", svg, re.IGNORECASE)
    assert len(svg) < 400_000


def test_figures_of_one_page_share_no_id():
    ids = [name for key in FIGURES for name in ids_of(drawn(key))]
    assert len(ids) > 50
    assert len(ids) == len(set(ids))


@each_figure
def test_every_reference_inside_a_figure_has_its_target(key):
    svg = drawn(key)
    wanted = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', svg)
    assert wanted
    assert {one or other for one, other in wanted} <= set(ids_of(svg))


@each_figure
def test_a_figure_names_no_outside_address_and_no_style_for_the_page(key):
    svg = drawn(key)
    assert set(re.findall(r"https?://[^\"'\s<]+", svg)) == {"http://www.w3.org/2000/svg"}
    assert "<style" not in svg
    assert "<metadata" not in svg


@each_figure
def test_the_same_study_gives_the_same_bytes(key):
    assert draw(FIGURES[key], make_study(6, full=True)) == drawn(key)


def test_the_same_study_gives_the_same_picture():
    assert draw_picture(STUDY, make_study()) == draw_picture(STUDY, make_study())


def test_drawing_leaves_matplotlibs_settings_alone():
    import matplotlib

    before = dict(matplotlib.rcParams)
    draw(FIGURES["precision"], make_study())
    assert dict(matplotlib.rcParams) == before


@each_figure
def test_a_figure_without_data_is_none(key):
    result = make_study()
    result.tables.clear()
    assert draw(FIGURES[key], result) is None
    assert draw_picture(STUDY, result) is None


@each_figure
def test_rows_without_values_or_intervals_leave_gaps_and_not_errors(key):
    result = make_study(6, full=True)
    empty = {"value": None, "low": None, "r2": float("nan"), "agreement": None, "condition": None}
    for table in ("scores", "r2", "fits", "parts", "schedules", "sizes", "exits"):
        for row in result.tables[table][::3]:
            row |= {name: value for name, value in empty.items() if name in row}
    for row in result.tables["exits"][1::3]:
        row["low"] = row["high"] = row["flops"] = None
    for row in result.tables["calibrated"]:
        row["disagreement" if row["promised"] else "low"] = None
    for row in result.tables["tuned"][::2]:
        row["kl_tuned"] = row["agreement_closed"] = row["rows_needed"] = None
    svg = draw(FIGURES[key], result)
    assert svg is not None
    assert "nan" not in svg.lower()


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a $x^2$ b", "\u65e5\u672c\u8a9e"])
def test_a_strange_name_is_drawn_as_it_is(name):
    result = make_study(full=True)
    for row in result.tables["sizes"]:
        row["model"] = name
    svg = draw(FIGURES["sizes"], result)
    assert name in texts_of(svg)
    assert "<script" not in svg
    assert draw_picture(STUDY, make_study(name=name)) is not None


def test_a_line_without_a_look_of_its_own_is_drawn_under_its_name():
    rows = [{"x": x, "y": 0.5, "line": name} for x in (0, 1) for name in ("linear", "coin toss")]
    text = texts_of(draw(figure_of(rows), make_study()))
    assert "coin toss" in text
    assert "linear shortcuts" in text


def test_a_line_that_only_the_data_know_may_bring_its_colour():
    rows = [{"x": x, "y": 0.5, "line": "a", "colour": "purple"} for x in (0, 1)]
    assert "#4b2e83" in draw(figure_of(rows), make_study())


def test_bars_that_are_all_muted_keep_their_colour_in_the_legend():
    rows = [{"x": 0, "y": 1.0, "line": "a", "muted": True}]
    lines = {"a": Line("all muted", "purple")}
    svg = draw(figure_of(rows, "bars", lines=lines), make_study())
    assert "#4b2e83" in svg
    assert "#c9d1d9" in svg


def test_a_share_with_one_limit_is_scaled_to_its_values():
    rows = [{"x": 0.02, "y": name, "low": 0.01, "high": 0.03} for name in "ab"]
    axis = Axis("share", "share", 0, None)
    svg = draw(figure_of(rows, "dots", x=axis, y=Axis("", "category")), make_study())
    assert "100%" not in texts_of(svg)


def test_a_sample_is_a_count_or_a_range_and_says_if_there_is_no_interval():
    rows = [{"rows": 3000, "documents": 26, "low": 0.1}, {"rows": 1000, "documents": 26}]
    figure = figure_of([], sample="95 % bands")
    assert sample_of(figure, rows) == "n = 1,000 to 3,000 states from 26 documents; 95 % bands"
    alone = [{"rows": 7, "documents": 1, "low": None}]
    assert sample_of(figure, alone) == (
        "n = 7 states from 1 document; no interval, which needs two documents or more"
    )


def test_a_figure_is_described_for_those_who_hear_it():
    rows = [{"x": 0, "y": 0.25, "line": "linear"}, {"x": 4, "y": 1.0, "line": "linear"}]
    assert in_words(figure_of(rows), {"left": rows}) == (
        "Made up. left, linear: 0.25 at 0 to 1 at 4."
    )


def test_long_names_are_cut_in_the_middle_and_stay_apart():
    long = "/somewhere/far/away/in/a/deep/folder/wikipedia.jsonl"
    labels = [short(name, 36) for name in (long, f"{long}, 2,021 rows")]
    assert len(set(labels)) == 2
    assert all(len(label) == 36 for label in labels)
    assert labels[0].endswith("wikipedia.jsonl")
    assert short("news") == "news"


def test_the_summary_picture_is_wide_and_shows_only_the_lines_it_names():
    picture = draw_picture(STUDY, make_study(30))
    width, height = struct.unpack(">II", picture[16:24])
    assert width > 2 * height
    assert draw_picture(STUDY, make_study(full=True)) == draw_picture(STUDY, make_study())


def test_a_study_without_a_picture_has_none():
    from dataclasses import replace

    assert draw_picture(replace(STUDY, picture=None), make_study()) is None
    empty = Picture(lambda _: "", ("precision",), panels=("nowhere",))
    assert draw_picture(replace(STUDY, picture=empty), make_study()) is None


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(CannotFetch, match=r'matplotlib .* pip install "layerleap\[report\]"'):
        draw(FIGURES["precision"], make_study())


def test_ticks_of_a_log_axis_over_many_powers_of_ten_are_the_powers_alone():
    rows = [{"x": 10.0**power, "y": 1.0, "line": "a"} for power in (-5, -4, -3, -2)]
    words = texts_of(draw(figure_of(rows, x=Axis("rate", "log")), make_study(2)))
    assert "10\u207b\u2075" in words
    assert "2e-05" not in words
    near = [{"x": float(k), "y": 1.0, "line": "a"} for k in (4, 16, 64)]
    words = texts_of(draw(figure_of(near, x=Axis("k", "log")), make_study(2)))
    assert {"5", "10", "20", "50"} <= set(words.split())


def test_a_long_title_of_a_panel_is_broken_into_lines():
    name = "a name of a panel that is far too long for a single line above it"
    rows = [{"x": x, "y": 1.0, "line": "a", "panel": name} for x in (1, 2)]
    svg = draw(figure_of(rows, size=(3.7, 3.3)), make_study(2))
    lines = [e.text for e in ElementTree.fromstring(svg).iter() if (e.text or "").strip()]
    assert name not in lines
    assert "a name of a panel that is far" in lines
