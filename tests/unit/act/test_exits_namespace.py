"""`ll.exits`: what is exported, and evidence in one call."""

import pytest
import torch

import layerleap as ll
from layerleap.act.exits.rules import RULES
from layerleap.errors import BadText
from layerleap.lens.scores import score
from layerleap.stream.examples import iter_batches, iter_examples
from tiny_models import sentences, tiny

TEXTS = sentences(60)


@pytest.fixture(scope="module")
def llama():
    transformer = tiny("llama")
    return transformer, ll.fit(transformer, TEXTS, n_texts=80)


def test_every_export_is_there_and_documented():
    for name in ll.exits.__all__:
        assert (getattr(ll.exits, name).__doc__ or "").strip(), name


def test_every_rule_is_exported():
    exported = {getattr(ll.exits, name) for name in ll.exits.__all__}
    assert {*RULES.values(), ll.exits.Learned} <= exported


@pytest.mark.parametrize("lens", ["logit", "linear"])
def test_evidence_in_one_call_is_that_of_the_scores_of_held_out_text(llama, lens):
    transformer, bank = llama
    used = bank if lens == "linear" else None
    found = ll.exits.evidence(transformer, used, TEXTS, n_texts=20)
    texts = iter_examples(transformer, TEXTS, ll.Sampling(), side="held-out", n_texts=20)
    lenses = {lens: ll.Lens(transformer, used)}
    scores = score(transformer, lenses, iter_batches(transformer, texts))
    expected = ll.exits.Evidence.from_scores(scores, lens)
    assert len(found) == 20
    for name in (
        "top",
        "top_prob",
        "second_prob",
        "entropy",
        "cosine",
        "position",
        "document",
        "final",
    ):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=0, atol=0, equal_nan=True
        )


def test_where_would_tokens_leave_early_takes_two_lines(llama):
    transformer, bank = llama
    evidence = ll.exits.evidence(transformer, bank, TEXTS, n_texts=20)
    exits = ll.exits.replay(ll.exits.Gap(-1.112, length=15), evidence)
    assert exits.layer.tolist() == [1] * 20
    assert repr(exits).startswith("Exits(20 rows: 2.0 of 3 layers saved, ")


def test_text_without_held_out_documents_is_refused(llama):
    transformer, bank = llama
    with pytest.raises(BadText):
        ll.exits.evidence(transformer, bank, TEXTS, ll.Sampling(held_out=0.0))
