"""Parameters as HTML."""

from dataclasses import replace

import pytest

import layerleap as ll
from layerleap.lens.vocabulary.token_pairs import Pairs
from layerleap.lens.vocabulary.tokens import TokenLabel
from pages import HOSTILE, Page
from tiny_models import tiny


@pytest.fixture(scope="module")
def weights():
    return ll.weights(tiny("llama"))


@pytest.fixture(scope="module")
def pairs(weights) -> Pairs:
    return weights.pairs("L2.H1", form="qk", offset=1, top=9, progress=False)


def test_pairs_are_a_grid_and_a_list(pairs):
    page = Page(pairs._repr_html_())
    assert "L2.H1 W_QK at offset 1: query token" in page.text
    cells = [cell for cell in page.all("td") if "background" in cell.get("style", "")]
    assert len(cells) == len(pairs.grid.rows) * len(pairs.grid.columns)
    framed = [cell for cell in cells if "framed" in cell["class"]]
    shown = [
        pair
        for pair in pairs
        if pair.first in pairs.grid.rows and pair.second in pairs.grid.columns
    ]
    assert len(framed) == len(shown)
    listed = [cell for cell in page.all("td") if "," in cell.get("title", "")]
    assert len(listed) == 9


def test_names_of_tokens_are_escaped(pairs):
    bad = TokenLabel(3, HOSTILE, HOSTILE, "text")
    hostile = replace(pairs, pairs=tuple(replace(pair, first=bad) for pair in pairs))
    assert "<script>" not in hostile._repr_html_()


def test_a_reading_has_two_columns_per_vector(weights):
    reading = weights.read("L2.N3", top=5)
    page = Page(reading._repr_html_())
    assert len(page.all("td")) == 5 * 2 * len(reading.vectors)
    assert "ffn.value, writes" in page.text
    assert "Tokens read through E transposed (input matrix)" in page.text


def test_heads_are_a_map_and_lists(weights):
    table = weights.heads(sample=30, k=2, progress=False)
    page = Page(table._repr_html_())
    titles = [cell["title"] for cell in page.all("td") if "copies" in cell.get("title", "")]
    assert len(titles) == len(table) == 12
    for words in ("Heads that copy", "Heads that suppress", "Heads that map"):
        assert words in page.text
