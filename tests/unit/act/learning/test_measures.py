"""Measures of likeness, by hand; and what they are at their known points."""

import math

import pytest
import torch

from families import build
from layerleap.act.edits import ApplyDelta
from layerleap.act.learning.descent import learn
from layerleap.act.learning.measures import (
    change_jaccard,
    cosine,
    noise_am,
    noise_aou,
    reading_agreement,
    readings,
    recall_by_chance,
    recall_to_fine_tuned,
    saturation_layer,
    score_similarity,
    score_update,
    shuffled,
    sim_am,
    sim_am_delta,
    sim_aou,
)
from layerleap.act.learning.observe import Observation, Prompt, observe
from layerleap.errors import BadSettings, BadText, ModelRefused
from layerleap.lens.lens import Lens
from layerleap.models.transformer import Transformer
from layerleap.models.untrained import untrained_blocks
from learning_cases import demonstrations, ids
from tiny_models import tiny


def made(attention, scores=((1.0, 0.0),)) -> Observation:
    """One block, one head."""
    vector = torch.tensor([attention])
    return Observation(torch.zeros(2, 2), vector, (torch.tensor(scores),), 3, None)


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture(scope="module")
def conditions(model):
    """In context, trained and zero-shot observations of one query."""
    query, context = ids(4, 1), ids(9, 2)
    delta = learn(model, demonstrations(), how="layer-causal", learning_rate=0.5).delta
    zero, context = observe(model, [Prompt(query, 4), Prompt(context + query, 4)])
    with model.edit(ApplyDelta(delta)):
        (trained,) = observe(model, [Prompt(query, 4)])
    return context, trained, zero


def test_attention_updates_are_compared_after_normalising():
    zero, context, trained = made([2.0, 0.0]), made([0.0, 5.0]), made([3.0, 3.0])
    # Updates: (-1, 1) and (1/sqrt 2 - 1, 1/sqrt 2).
    half = math.sqrt(0.5)
    expected = (1 - half + half) / (math.sqrt(2) * math.hypot(half - 1, half))
    assert sim_aou(context, trained, zero).tolist() == [pytest.approx(expected)]
    assert sim_aou(context, made([0.0, 7.0]), zero).tolist() == [pytest.approx(1.0)]


def test_scores_are_compared_head_by_head():
    heads = ((1.0, 0.0), (0.0, 2.0))
    zero = made([1.0, 0.0], heads)
    context = made([1.0, 0.0], ((2.0, 0.0), (0.0, 1.0)))  # changes (1, 0) and (0, -1)
    trained = made([1.0, 0.0], ((1.0, 1.0), (0.0, 1.5)))  # changes (0, 1) and (0, -0.5)
    assert sim_am(zero, context).tolist() == [1.0]
    assert sim_am_delta(context, trained, zero).tolist() == [pytest.approx(0.5)]


def test_a_change_of_nothing_has_no_direction(model, conditions):
    context, trained, zero = conditions
    assert sim_aou(context, zero, zero).isnan().all()
    assert sim_am_delta(context, zero, zero).isnan().all()
    # Scores of the first block depend on embeddings and offsets alone: context changes none.
    assert sim_am_delta(context, trained, zero).isnan().tolist() == [True, False, False]
    assert sim_am(context, zero)[0] == pytest.approx(1.0)
    with pytest.raises(BadSettings, match="different queries"):
        score_update(context, observe(model, [Prompt(ids(6, 3), 6)])[0])


def test_every_condition_is_most_like_itself(conditions):
    context, trained, zero = conditions
    torch.testing.assert_close(sim_aou(trained, trained, zero), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(sim_am(trained, trained), torch.ones(3, dtype=torch.float64))
    assert (sim_aou(context, trained, zero).abs() < 1).all()


def test_noise_is_isotropic(conditions):
    context, _, zero = conditions
    drawn = torch.stack([noise_aou(context, zero, seed) for seed in range(400)])
    assert (drawn.mean(0).abs() < 4 / math.sqrt(24 * 400)).all()  # 0 on average; d_model is 24
    assert drawn.std(0).tolist() == pytest.approx([1 / math.sqrt(24)] * 3, rel=0.15)
    assert torch.equal(drawn[7], noise_aou(context, zero, 7))
    scores = torch.stack([noise_am(context, zero, seed) for seed in range(300)])
    assert scores[:, 0].isnan().all()
    assert (scores[:, 1:].mean(0).abs() < 0.08).all()


def test_shuffled_queries_meet_another_query_each():
    for n in (2, 3, 10, 101):
        partners = shuffled(n, seed=n)
        assert sorted(partners) == list(range(n))
        assert all(partner != query for query, partner in enumerate(partners))
    assert shuffled(10, 1) != shuffled(10, 2)
    assert shuffled(10, 1) == shuffled(10, 1)
    with pytest.raises(BadSettings, match="1 queries cannot be shuffled"):
        shuffled(1, 0)


def test_queries_of_different_lengths_are_compared_at_their_ends(model):
    first, second = observe(model, [Prompt(ids(4, 1), 4), Prompt(ids(9, 2), 9)])
    assert sim_am(first, second).isfinite().all()
    changes = [[s.double() for s in one.scores] for one in (first, second)]
    ends = [s[:, -4:] for s in changes[1]]
    assert torch.equal(score_similarity(*changes), score_similarity(changes[0], ends))


def test_changed_predictions_are_counted_as_sets_of_changes():
    zero = torch.tensor([1, 1, 1, 1, 1, 1])
    context = torch.tensor([1, 2, 2, 2, 1, 3])
    trained = torch.tensor([1, 2, 3, 1, 2, 3])
    jaccard = change_jaccard(zero, context, trained)
    # The same change twice; one query changed differently; one each by context and training.
    assert (int(jaccard.hits.sum()), jaccard.denominator) == (2, 6)
    assert jaccard.value == pytest.approx(1 / 3)
    assert jaccard.counted.tolist() == [0, 1, 2, 1, 1, 1]
    assert math.isnan(change_jaccard(zero, zero, zero).value)
    assert change_jaccard(zero, context, context).value == 1.0


def test_changes_of_other_queries_are_a_control():
    zero, shown, own = (torch.tensor(x) for x in ([0, 0, 0], [1, 0, 2], [1, 0, 2]))
    assert change_jaccard(zero, shown, own).value == 1
    other = change_jaccard(zero, shown, own, [2, 0, 1])  # of training: 2, 1 and no change
    assert (other.value, other.denominator) == (0, 4)
    same = change_jaccard(zero, torch.tensor([1, 1, 0]), torch.tensor([1, 1, 0]), [1, 0, 2])
    assert same.value == 1


def test_recall_by_chance_is_the_share_of_wrong_queries_that_context_makes_right():
    zero, shown = (torch.tensor(x, dtype=torch.bool) for x in ([1, 0, 0, 0], [1, 1, 0, 0]))
    chance = recall_by_chance(zero, shown)
    assert (chance.value, chance.denominator) == (pytest.approx(1 / 3), 3)


def test_recall_shows_how_few_it_is_a_share_of():
    zero = torch.tensor([True, False, False, False])
    trained = torch.tensor([True, True, True, False])
    context = torch.tensor([False, True, False, True])
    recall = recall_to_fine_tuned(zero, context, trained)
    assert (recall.value, recall.denominator) == (0.5, 2)
    assert math.isnan(recall_to_fine_tuned(zero, context, zero).value)


def test_readings_of_layers_and_their_saturation(model, conditions):
    context, _, _ = conditions
    lens = Lens(model)
    tops = readings(lens, context)
    assert tops.shape == (4,)
    assert int(tops[-1]) == context.top
    for layer, h in enumerate(context.states):
        assert int(tops[layer]) == int(lens.logits(h[None], layer).argmax())
    assert reading_agreement(tops, tops).all()
    assert saturation_layer(torch.tensor([5, 7, 5, 5])) == 2
    assert saturation_layer(torch.tensor([5, 5, 5, 5])) == 0
    assert saturation_layer(torch.tensor([5, 5, 5, 7])) == 3


def test_observing_refuses_what_it_cannot_observe(model):
    with pytest.raises(BadText, match="there are no prompts"):
        observe(model, [])
    with pytest.raises(BadSettings, match="n_query is 5; expected 1 to 3"):
        Prompt((5, 6, 7), 5)
    with pytest.raises(BadText, match="a prompt has 70 tokens"):
        observe(model, [Prompt(ids(70, 0), 3)])
    own = Transformer.wrap(build("bloom"))
    with pytest.raises(ModelRefused, match="scores cannot be recorded"):
        observe(own, [Prompt(ids(5, 0), 3)])
    (without,) = observe(own, [Prompt(ids(5, 0), 3)], scores=False)
    with pytest.raises(BadSettings, match="no scores were recorded"):
        sim_am(without, without)
    assert sim_aou(without, without, without).isnan().all()
    with pytest.raises(ModelRefused, match="masked-token model"):
        observe(Transformer.wrap(build("bert")), [Prompt(ids(5, 0), 3)])


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "gpt_neox"])
def test_a_twin_with_untrained_blocks_keeps_embeddings_norms_and_head(name):
    model = Transformer.wrap(build(name), name=name)
    twin = untrained_blocks(model, seed=2)
    assert twin.identity.name == f"{name}, untrained blocks (seed 2)"
    ours = dict(model.model.named_parameters())
    for parameter, weight in twin.model.named_parameters():
        is_inside = parameter.startswith(tuple(f"{path}." for path in model.blocks))
        is_norm = "norm" in parameter.lower() or ".ln_" in parameter
        kept = torch.equal(weight, ours[parameter])
        assert kept == (not is_inside or is_norm), parameter
    h = torch.randn(3, model.d_model)
    assert torch.equal(twin.logits(h), model.logits(h))
    again = untrained_blocks(model, seed=2)
    assert again.identity.fingerprint == twin.identity.fingerprint


def test_a_cosine_is_exact_at_its_ends():
    a = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]])
    b = torch.tensor([[6.0, 8.0], [1.0, 0.0], [0.0, 2.0]])
    assert cosine(a, b)[[0, 2]].tolist() == [1.0, 0.0]
    assert cosine(a, b)[1].isnan()
