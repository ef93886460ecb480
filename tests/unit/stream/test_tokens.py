"""Counting the tokens of a text."""

import pytest

from layerleap.errors import BadSettings, BadText
from layerleap.stream import tokens
from layerleap.stream.tokens import frequent_tokens
from tiny_models import tiny

TEXTS = ["cat dog cat", "dog cat river", "moon"]


def words(model, ids: list[int]) -> list[str]:
    return [model.tokenizer.decode([id_]) for id_ in ids]


@pytest.mark.parametrize("together", [1, 32])
def test_the_most_frequent_come_first_and_ties_are_ordered_by_id(together, monkeypatch):
    monkeypatch.setattr(tokens, "DOCUMENTS", together)
    model = tiny("llama")
    assert words(model, frequent_tokens(model, 2, TEXTS)) == ["cat", "dog"]
    assert words(model, frequent_tokens(model, 99, TEXTS)) == ["cat", "dog", "river", "moon"]


def test_special_tokens_that_a_masked_model_adds_are_not_counted():
    model = tiny("bert")
    assert words(model, frequent_tokens(model, 9, ["cat cat dog"])) == ["cat", "dog"]


def test_a_long_text_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(tokens, "MOST_TOKENS", 3)
    monkeypatch.setattr(tokens, "DOCUMENTS", 1)
    model = tiny("llama")
    assert words(model, frequent_tokens(model, 9, TEXTS)) == ["cat", "dog"]


def test_mistakes_are_named():
    with pytest.raises(BadSettings, match="number of tokens is 0"):
        frequent_tokens(tiny("llama"), 0, TEXTS)
    with pytest.raises(BadText, match="contains no text"):
        frequent_tokens(tiny("llama"), 5, [])
