"""A beginning that is run once gives what running it with every text gives, in all families."""

import pytest
import torch

from families import MASKED_TOKEN, NEXT_TOKEN, build
from layerleap.act.learning.observe import Prompt, observe
from layerleap.models import prefix as prefixes
from layerleap.models.discovery.probe import prepare
from layerleap.models.prefix import Prefix, can_share, shared_prefix
from layerleap.models.transformer import Transformer

FIRST = [7, 9, 11, 13, 5, 17, 8, 21, 30]
RESTS = [[12, 14], [6, 40, 41], [19, 23]]


@pytest.mark.parametrize("family", NEXT_TOKEN)
def test_logits_after_a_shared_beginning_are_those_of_whole_texts(family):
    transformer = Transformer.wrap(build(family))
    assert can_share(transformer)
    inputs = Prefix(transformer, FIRST).inputs(RESTS)
    with torch.no_grad():
        ours = transformer.model(**prepare(transformer.model, inputs)).logits
        for row, rest in enumerate(RESTS):
            whole = transformer.model(input_ids=torch.tensor([FIRST + rest])).logits[0]
            torch.testing.assert_close(
                ours[row, : len(rest)], whole[len(FIRST) :], rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen2", "opt", "mistral"])
def test_observations_do_not_depend_on_a_shared_beginning(family, monkeypatch):
    transformer = Transformer.wrap(build(family).double())
    prompts = [Prompt((*FIRST, *rest), len(rest)) for rest in RESTS]
    shared = observe(transformer, prompts)
    monkeypatch.setattr(prefixes, "SHORTEST", 1000)
    alone = observe(transformer, prompts)
    for ours, theirs in zip(shared, alone, strict=True):
        torch.testing.assert_close(ours.states, theirs.states)
        torch.testing.assert_close(ours.attention, theirs.attention)
        torch.testing.assert_close(ours.scores, theirs.scores)
        assert ours.top == theirs.top


def test_only_what_all_texts_begin_with_is_shared():
    transformer = Transformer.wrap(build("llama"))
    texts = [[*FIRST, 1, 2, 3], [*FIRST, 1, 2, 4]]
    assert shared_prefix(transformer, texts, [1, 1]).length == len(FIRST) + 2
    assert shared_prefix(transformer, texts, [3, 1]).length == len(FIRST)
    assert shared_prefix(transformer, texts, [12, 1]).length == 0
    assert shared_prefix(transformer, texts[:1], [1]).length == 0
    assert shared_prefix(transformer, [[1, *FIRST], [2, *FIRST]], [1, 1]).length == 0


def test_a_masked_model_shares_nothing():
    transformer = Transformer.wrap(build(next(iter(MASKED_TOKEN))))
    assert not can_share(transformer)
    assert shared_prefix(transformer, [FIRST, FIRST], [1, 1]).length == 0
