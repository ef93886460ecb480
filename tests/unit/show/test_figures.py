"""The figures: well-formed, self-contained, repeatable SVG for any study."""

import re
import struct
from functools import cache
from xml.etree import ElementTree

import pytest
from layerleap.show.figures.hero import hero_title
from layerleap.show.figures.words import short
from studies import make_study

from layerleap.errors import CannotFetch
from layerleap.show.figures import curves as figures

DRAWN = (
    figures.r2_heatmaps,
    figures.precision_curves,
    figures.surprisal_curves,
    figures.kl_curves,
    figures.transfer_curves,
    figures.condition_plot,
)


@cache  # drawing takes most of the time of these tests
def drawn(draw, n_layers=4):
    return draw(make_study(n_layers))


def texts_of(svg):
    return " ".join(element.text or "" for element in ElementTree.fromstring(svg).iter())


def ids_of(svg):
    return [each.attrib["id"] for each in ElementTree.fromstring(svg).iter() if "id" in each.attrib]


@pytest.mark.parametrize("n_layers", [1, 80])
@pytest.mark.parametrize("draw", DRAWN, ids=lambda draw: draw.__name__)
def test_every_figure_is_drawn_without_nan_for_any_depth(draw, n_layers):
    svg = drawn(draw, n_layers)
    root = ElementTree.fromstring(svg)
    assert root.attrib["role"] == "img"
    assert len(root.attrib["aria-label"]) > 30
    assert not re.search(r"\bnan\b|\binf\b", svg, re.IGNORECASE)
    assert len(svg) < 400_000


def test_figures_of_one_page_share_no_id():
    ids = [name for draw in DRAWN for name in ids_of(drawn(draw))]
    ids += ids_of(drawn(figures.hero).svg)
    assert len(ids) > 30
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("draw", DRAWN, ids=lambda draw: draw.__name__)
def test_every_reference_inside_a_figure_has_its_target(draw):
    svg = drawn(draw)
    wanted = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', svg)
    assert wanted
    assert {one or other for one, other in wanted} <= set(ids_of(svg))


@pytest.mark.parametrize("draw", DRAWN, ids=lambda draw: draw.__name__)
def test_a_figure_names_no_outside_address_and_no_style_for_the_page(draw):
    svg = drawn(draw)
    assert set(re.findall(r"https?://[^\"'\s<]+", svg)) == {"http://www.w3.org/2000/svg"}
    assert "<style" not in svg
    assert "<metadata" not in svg


def test_the_same_study_gives_the_same_bytes():
    study = make_study()
    assert [draw(study) for draw in DRAWN] == [drawn(draw) for draw in DRAWN]
    assert figures.hero(study) == drawn(figures.hero)


def test_drawing_leaves_matplotlibs_settings_alone():
    import matplotlib

    before = dict(matplotlib.rcParams)
    figures.precision_curves(make_study())
    assert dict(matplotlib.rcParams) == before


def test_a_figure_without_data_is_none():
    study = make_study(texts=("wikipedia",), kl=False)
    assert figures.transfer_curves(study) is None
    assert figures.kl_curves(study) is None
    empty = study | {"scores": [], "r2": [], "fits": []}
    assert all(draw(empty) is None for draw in DRAWN)
    assert figures.hero(empty) is None


def test_missing_values_leave_gaps_and_not_errors():
    study = make_study()
    for row in study["scores"][::3]:
        row["value"] = row["low"] = None
    for row in study["r2"][::3]:
        row["r2"] = float("nan")
    study["fits"][0]["condition"] = None
    for draw in DRAWN:
        assert "nan" not in draw(study).lower()


def test_the_heat_map_says_how_many_pairs_lie_below_zero():
    study = make_study(6)
    below = sum(row["map"] == "id" and row["r2"] < 0 for row in study["r2"])
    text = texts_of(figures.r2_heatmaps(study))
    assert below > 0
    assert f"{below} of 21 pairs" in text
    assert "below 0 shown as 0" in text


def test_the_floor_of_surprisal_is_the_value_at_the_last_layer():
    study = make_study(6)
    for row in study["scores"]:
        if row["metric"] == "surprisal" and row["layer"] == 6:
            row["value"] = 1.23
    assert "own top token, 1.23" in texts_of(figures.surprisal_curves(study))


def test_transfer_has_one_panel_per_text():
    text = texts_of(figures.transfer_curves(make_study(texts=("a", "b", "c", "d"))))
    assert [f"read on {name}" in text for name in "abcd"] == [True] * 4


def test_a_third_fit_of_a_text_has_a_line_and_a_legible_name_of_its_own():
    long = "/somewhere/far/away/in/a/deep/folder/wikipedia.jsonl"
    study = make_study(texts=(long, "news"))
    smaller = [
        row | {"fit": f"{long}, 2,021 texts"} for row in study["scores"] if row["fit"] == long
    ]
    study["scores"] += smaller
    text = texts_of(figures.transfer_curves(study))
    assert "dia.jsonl, 2,021 texts" in text
    labels = [short(name, 36) for name in (long, f"{long}, 2,021 texts")]
    assert len(set(labels)) == 2
    assert all(len(label) == 36 for label in labels)
    assert labels[0].endswith("wikipedia.jsonl")


def test_the_hero_marks_the_lead_that_the_study_found_and_not_one_of_its_own():
    study = make_study(30)
    study["summary"]["half"] = {"mat": 11, "id": 24}
    assert "13 layers" in texts_of(figures.hero(study).svg)
    study["summary"]["half"] = {"mat": 11, "id": None}
    assert "layers earlier" not in texts_of(figures.hero(study).svg).replace("\n", " ")


def test_the_hero_states_the_numbers_of_the_middle_layer():
    study = make_study(30)
    for row in study["scores"]:
        if row["metric"] == "precision@1" and row["layer"] == 15 and row["read"] == "wikipedia":
            row["value"] = {"mat": 0.52, "id": 0.03}[row["map"]]
    title = hero_title(study)
    assert "After 15 of 30 layers" in title
    assert "52 % of the time" in title
    assert "3 % of the time" in title
    picture = figures.hero(study)
    width, height = struct.unpack(">II", picture.png[16:24])
    assert width > 2 * height
    assert "n = 3,000 states from 26 documents" in texts_of(picture.svg)


def test_the_hero_of_a_masked_model_speaks_of_the_masked_token():
    assert "masked token" in hero_title(make_study(kind="masked-token"))


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a $x^2$ b", "\u65e5\u672c\u8a9e"])
def test_a_strange_name_is_drawn_as_it_is(name):
    svg = figures.hero(make_study(name=name)).svg
    assert name in texts_of(svg)
    assert "<script" not in svg


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(CannotFetch, match=r'matplotlib .* pip install "layerleap\[report\]"'):
        figures.precision_curves(make_study())
