"""Choices in studies: a wrong one is refused with the list of right ones."""

import pytest

from layerleap.errors import BadSettings
from layerleap.study.figures import Axis, Figure, Line, Mark
from layerleap.study.fits import FitContext, FitSettings
from layerleap_papers.beyond_the_top1 import SaturationSettings
from tiny_models import tiny


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Axis(scale="logarithmic"), "scale is 'logarithmic'; .*'number', 'layer', 'share'"),
        (lambda: Line(style="dotted"), "style is 'dotted'; .*'solid', 'dashed'"),
        (lambda: Mark("z", 1.0), "axis is 'z'; expected one of 'x', 'y'"),
        (lambda: Figure("a", "A", "", list, kind="pie"), "kind is 'pie'; .*'lines', 'dots'"),
        (lambda: FitSettings(ridge="some"), "ridge 'some' is invalid; expected 'auto'"),
        (lambda: FitSettings(ridge=-1.0), "expected 'auto'"),
        (lambda: SaturationSettings(unit="page"), "unit is 'page'; .*'sentence', 'paragraph'"),
        (lambda: SaturationSettings(positions="some"), "positions"),
    ],
)
def test_a_wrong_choice_is_refused_with_the_right_ones(make, words):
    with pytest.raises(BadSettings, match=words):
        make()


def test_pairs_of_layers_are_final_or_all(tmp_path):
    settings = FitSettings(text="wikipedia", n_fit=1, n_read=1)
    context = FitContext(tiny("llama"), settings, tmp_path, lambda *_: None)
    with pytest.raises(BadSettings, match="pairs is 'every'; expected one of 'final', 'all'"):
        context.fit("wikipedia", "every")
