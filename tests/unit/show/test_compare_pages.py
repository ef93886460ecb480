"""Pages of alignments and differences."""

from dataclasses import replace
from functools import cache

import torch

from layerleap.lens.compare.align import align
from layerleap.lens.compare.alignment import Alignment
from layerleap.lens.compare.diff import diff
from layerleap.lens.compare.difference import Difference
from layerleap.models.transformer import Transformer
from layerleap.results.page import write_page
from pages import Page
from tiny_models import tiny


@cache
def model(seed: int = 0, layers: int = 3) -> Transformer:
    return tiny("llama", seed=seed, num_hidden_layers=layers)


@cache
def alignment(layers: int = 3) -> Alignment:
    return align(model(), model(1, layers), kinds=["ffn.value"], progress=False)


@cache
def difference() -> Difference:
    tuned = tiny("llama")
    tuned.identity = replace(tuned.identity, name="<tuned>")
    with torch.no_grad():
        tuned.model.model.layers[2].mlp.down_proj.weight[:, 4] += 0.1
    return diff(model(), tuned, progress=False)


def test_an_alignment_is_a_heat_map_per_measure_and_space(tmp_path):
    text = write_page(tmp_path / "page.html", alignment().head(), alignment()).read_text()
    page = Page(text)
    assert len([tag for tag, _ in page.tags if tag == "svg"]) == 4
    one = alignment().matching("ffn.value")
    assert f"{one.hits} of 3" in page.text
    assert "Hungarian" in page.text
    assert "http" not in text.replace("http-equiv", "")


def test_models_of_different_depth_can_be_drawn(tmp_path):
    text = write_page(tmp_path / "page.html", alignment(5).head(), alignment(5)).read_text()
    assert text.count("<svg") == 4
    assert "3 and 5 blocks" in text


def test_notebooks_show_the_same_without_a_page():
    shown = alignment()._repr_html_()
    assert shown.startswith("<style>")
    assert "<svg" in shown


def test_a_difference_lists_blocks_neurons_and_what_did_not_move(tmp_path):
    text = write_page(tmp_path / "page.html", difference().head(), difference()).read_text()
    page = Page(text)
    assert "1 of 3 blocks moved" in page.text
    assert page.text.count("did not move") >= 2
    assert "L3.N4" in page.text
    assert "&lt;tuned&gt;" in text
    assert "<tuned>" not in text
    assert difference()._repr_html_() in text
