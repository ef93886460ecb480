"""Parameters as HTML."""

from dataclasses import replace

import pytest

import layerleap as ll
from layerleap.lens.vocabulary.pairs import Pairs
from layerleap.lens.vocabulary.tokens import TokenLabel
from layerleap.show.html.weights import heads_html, pairs_html, reading_html
from pages import HOSTILE, Page
from tiny_models import tiny


@pytest.fixture(scope="module")
def weights():
    return ll.weights(tiny("llama"))


@pytest.fixture(scope="module")
def pairs(weights) -> Pairs:
    return weights.pairs("L2.H1", form="qk", offset=1, top=9, progress=False)


def test_pairs_are_a_grid_and_a_list(pairs):
    page = Page(pairs_html(pairs))
    assert "L2.H1 W_QK at offset 1: query token" in page.text
    cells = page.all("td")
    assert len(cells) == len(pairs.grid.rows) * len(pairs.grid.columns)
    framed = [cell for cell in cells if cell.get("class") == "strong"]
    shown = [
        pair
        for pair in pairs
        if pair.first in pairs.grid.rows and pair.second in pairs.grid.columns
    ]
    assert len(framed) == len(shown)
    assert len(page.all("li")) == 9
    assert pairs._repr_html_() == pairs_html(pairs)


def test_names_of_tokens_are_escaped(pairs):
    bad = TokenLabel(3, HOSTILE, HOSTILE, "text")
    hostile = replace(pairs, pairs=tuple(replace(pair, first=bad) for pair in pairs))
    assert "<script>" not in pairs_html(hostile)


def test_a_reading_has_two_columns_per_vector(weights):
    reading = weights.read("L2.N3", top=5)
    page = Page(reading_html(reading))
    assert len(page.all("td")) == 5 * 2 * len(reading.vectors)
    assert "ffn.value, writes" in page.text
    assert "Tokens read through E transposed (input matrix)" in page.text


def test_heads_are_a_map_and_lists(weights):
    table = weights.heads(sample=30, k=2, progress=False)
    page = Page(heads_html(table))
    titles = [cell["title"] for cell in page.all("td") if "copies" in cell.get("title", "")]
    assert len(titles) == len(table) == 12
    for words in ("Heads that copy", "Heads that suppress", "Heads that map"):
        assert words in page.text
