"""The figures of what a study may have besides: drawn when it does, absent when it does not."""

import re
from functools import cache
from xml.etree import ElementTree

import pytest
from layerleap.show.figures.calibrated_figure import calibrated_figure
from layerleap.show.figures.exit_figures import exit_figure, exit_flops_figure, exit_rule_figure
from layerleap.show.figures.hero import hero
from layerleap.show.figures.lens_figures import size_figure, tuned_figure
from layerleap.show.figures.part_figures import alternation_figure, part_figure
from studies import make_study

from layerleap.show.figures import curves as figures

DRAWN = {
    part_figure: "parts",
    alternation_figure: "schedules",
    exit_figure: "exits",
    exit_rule_figure: "exits",
    exit_flops_figure: "exits",
    calibrated_figure: "calibrated",
    tuned_figure: "tuned",
    size_figure: "sizes",
}
each_figure = pytest.mark.parametrize("draw", DRAWN, ids=lambda draw: draw.__name__)


@cache  # drawing takes most of the time of these tests
def drawn(draw, n_layers=6):
    return draw(make_study(n_layers, full=True))


def texts_of(svg):
    return " ".join(element.text or "" for element in ElementTree.fromstring(svg).iter())


@pytest.mark.parametrize("n_layers", [1, 80])
@each_figure
def test_every_optional_figure_is_drawn_without_nan_for_any_depth(draw, n_layers):
    svg = drawn(draw, n_layers)
    root = ElementTree.fromstring(svg)
    assert root.attrib["role"] == "img"
    assert len(root.attrib["aria-label"]) > 30
    assert not re.search(r"\bnan\b|\binf\b", svg, re.IGNORECASE)
    assert len(svg) < 400_000


@each_figure
def test_a_study_without_the_part_has_no_such_figure(draw):
    study = make_study(full=True)
    assert draw(study | {DRAWN[draw]: None}) is None
    study.pop(DRAWN[draw])
    assert draw(study) is None


def test_optional_figures_share_no_id_with_each_other_or_with_the_rest():
    every = [*DRAWN, figures.precision_curves, figures.kl_curves, figures.transfer_curves]
    ids = [
        each.attrib["id"]
        for draw in every
        for each in ElementTree.fromstring(drawn(draw)).iter()
        if "id" in each.attrib
    ]
    assert len(ids) > 20
    assert len(ids) == len(set(ids))


@each_figure
def test_the_same_study_gives_the_same_bytes(draw):
    assert draw(make_study(6, full=True)) == drawn(draw)


@each_figure
def test_rows_without_values_or_intervals_leave_gaps_and_not_errors(draw):
    study = make_study(6, full=True)
    parts, exits, tuned = study["parts"]["scores"], study["exits"], study["tuned"]
    for row in [*parts[::3], *study["schedules"][::3], *study["sizes"][::3]]:
        row["value"] = row["low"] = None
    for row in exits["curves"][::3]:
        row["agreement"] = None
    for row in exits["curves"][1::3]:
        row["low"] = row["high"] = row["flops"] = None
    for row in study["calibrated"]["rows"]:
        row["fresh"][0]["disagreement"] = None
        row["fresh"][1]["low"] = None
    for row in tuned["summary"][::2]:
        row["kl_tuned"] = row["agreement_closed"] = row["rows_needed"] = None
    assert "nan" not in draw(study).lower()


def test_parts_are_drawn_beside_whole_shortcuts_and_intercepts_only_where_present():
    text = texts_of(drawn(part_figure))
    wanted = ["attention replaced", "feed-forward replaced", "norms replaced", "logit lens"]
    assert [each for each in wanted if each not in text] == []
    assert "same, intercept" in text
    study = make_study(6, full=True)
    study["parts"]["scores"] = [row for row in study["parts"]["scores"] if not row["bias"]]
    assert "same, intercept" not in texts_of(part_figure(study))


def test_the_exit_figure_shows_the_papers_rule_and_leaves_others_to_the_next():
    assert "gap rule" in texts_of(drawn(exit_figure))
    assert "patience" not in texts_of(drawn(exit_figure))
    rules = texts_of(drawn(exit_rule_figure))
    names = ["gap (the paper's)", "top probability", "entropy", "similarity", "patience"]
    names += ["learned", "fixed layer", "oracle", "Through mat", "Through tuned"]
    assert [each for each in names if each not in rules] == []
    assert "dearer than" in texts_of(drawn(exit_flops_figure))


def test_a_rule_that_the_figure_does_not_know_is_drawn_under_its_name():
    study = make_study(6, full=True)
    for row in study["exits"]["curves"]:
        row["rule"] = {"learned": "coin toss"}.get(row["rule"], row["rule"])
    assert "coin toss" in texts_of(exit_rule_figure(study))


def test_a_broken_promise_is_said_in_words_and_not_only_in_colour():
    text = texts_of(drawn(calibrated_figure))
    assert text.count("BROKEN") == 1
    assert "above, not promised" in text
    assert "exits nowhere" in text
    assert "tolerance 5 %" in text


def test_training_that_never_got_ahead_is_marked():
    assert "never ahead" in texts_of(drawn(tuned_figure, 30))
    study = make_study(30, full=True)
    for row in study["tuned"]["summary"]:
        row["rows_needed"] = 1000
    assert "never ahead" not in texts_of(tuned_figure(study))


def test_every_model_has_its_size_in_the_legend():
    text = texts_of(drawn(size_figure))
    assert "smollm2-360m, 32 layers, 362 M parameters" in text
    assert "gpt2, 12 layers, 124 M parameters" in text


def test_a_tuned_lens_joins_the_curves_but_not_transfer_and_not_the_hero():
    study = make_study(full=True)
    for draw in (figures.precision_curves, figures.surprisal_curves, figures.kl_curves):
        assert "tuned (trained lens)" in texts_of(draw(study))
    assert "tuned" not in texts_of(figures.transfer_curves(study))
    assert hero(study) == hero(make_study())


def test_a_tuned_lens_is_not_taken_for_a_fit_on_another_text():
    study = make_study(full=True, texts=("wikipedia",))
    assert figures.transfer_curves(study) is None
