"""The learned rule: its features, its requirements, and that it learns."""

import json
import subprocess
import sys

import pytest
import torch

from layerleap.act.exits.evidence import Evidence, split
from layerleap.act.exits.learned import FEATURES, Learned, features
from layerleap.act.exits.replay import replay
from layerleap.act.exits.rules import TopProbability, family, rule_from_dict
from layerleap.act.exits.savings import saved_at
from layerleap.errors import BadSettings, BadText, NotFinite
from made_evidence import made, upto


def with_extra(evidence: Evidence, **extra: torch.Tensor) -> Evidence:
    return Evidence(**{**vars(evidence), "extra": extra})


def from_one(evidence: Evidence) -> Evidence:
    """The same without the column of layer 0, as a live run has it."""
    names = ("top", "top_prob", "second_prob", "entropy", "cosine")
    cut = {name: getattr(evidence, name)[:, 1:] for name in names}
    return Evidence(**{**vars(evidence), **cut, "layers": evidence.layers[1:]})


def test_features_are_what_their_names_say():
    evidence = made(30)
    x = dict(zip(FEATURES, features(evidence).unbind(2), strict=True))
    top_prob, second_prob = evidence.top_prob.double(), evidence.second_prob.double()
    torch.testing.assert_close(
        x["logit of p1"][:, 3], (top_prob / (1 - top_prob)).log()[:, 3].clamp(-14, 13.9)
    )
    torch.testing.assert_close(x["log of gap"][:, 3], (top_prob - second_prob).log()[:, 3])
    assert torch.equal(x["logit of p1 before"][:, 2:], x["logit of p1"][:, 1:-1])
    assert (x["logit of p1 before"][:, :2] == 0).all()
    assert torch.equal(x["repeats"][:, 3], (evidence.top[:, 3] == evidence.top[:, 2]).double())
    assert torch.equal(x["streak"], evidence.streak.double())
    assert torch.equal(x["log of position"][:, 0], evidence.position.double().log1p())
    assert torch.equal(x["entropy"], evidence.entropy.double())
    assert torch.equal(x["cosine"][:, 1:], evidence.cosine[:, 1:].double())


def test_features_do_not_look_ahead():
    evidence = with_extra(made(30), norm=torch.rand(30, 7))
    whole = features(evidence)
    for column in range(7):
        assert torch.equal(features(upto(evidence, column)), whole[:, : column + 1])


def test_certain_readings_have_finite_features():
    evidence = made(10)
    sure = torch.ones(10, 7)
    evidence = Evidence(**{**vars(evidence), "top_prob": sure, "second_prob": torch.zeros(10, 7)})
    assert features(evidence).isfinite().all()
    level = Evidence(**{**vars(evidence), "second_prob": sure})
    assert features(level).isfinite().all()


def test_a_learned_rule_saves_more_than_one_number_can():
    evidence = made(4000, seed=1)
    # Agreement here depends on a hint besides top_prob that only a learned rule can weigh.
    hint = evidence.agrees.double() + 0.7 * torch.randn(
        4000, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    train, fresh = split(with_extra(evidence, hint=hint), (0.5, 0.5))
    learned = saved_at(Learned.train(train), fresh, [0.9], resamples=20)[0]
    plain = saved_at(family(TopProbability), fresh, [0.9], resamples=20)[0]
    assert learned.low > plain.high


def test_its_mean_probability_is_the_fraction_that_agreed():
    """The score equation of the intercept, which is not penalised."""
    train = made(2000, seed=4)
    p = Learned.train(train).at(0.5).models.probability(train)[:, 1:-1]
    shares = train.agrees[:, 1:-1].double().mean(0)
    torch.testing.assert_close(p.mean(0), shares, rtol=0, atol=1e-3)
    assert (shares[1:] > shares[:-1]).all()


def test_a_layer_that_always_agrees_gets_a_constant_model():
    chosen = Learned.train(made(100))
    models = chosen.at(0.5).models
    assert models.layers == (1, 2, 3, 4, 5, 6)
    assert (models.coefficients[-1] == 0).all()  # the last layer agrees by definition
    assert torch.allclose(models.probability(made(5))[:, -1], torch.tensor(101 / 102).double())
    assert (models.coefficients[2] != 0).any()


def test_a_live_run_without_layer_zero_gets_the_same_answers():
    evidence = made(50)
    rule = Learned.train(made(300, seed=5)).at(0.6)
    assert torch.equal(rule.stops(from_one(evidence)), rule.stops(evidence)[:, 1:])
    also = Learned.train(from_one(made(300, seed=5))).at(0.6)
    assert torch.equal(also.stops(evidence), rule.stops(evidence))


def test_extra_evidence_is_used_and_must_then_be_given():
    evidence = with_extra(made(300), norm=torch.rand(300, 7), age=torch.rand(300, 7))
    rule = Learned.train(evidence).at(0.6)
    assert rule.models.extra == ("age", "norm")
    assert rule.models.coefficients.shape == (6, len(FEATURES) + 2)
    with pytest.raises(BadSettings, match="extra evidence 'age'"):
        rule.stops(made(300))
    more = with_extra(made(300), **evidence.extra, mood=torch.rand(300, 7))
    assert torch.equal(rule.stops(more), rule.stops(evidence))


def test_other_layers_than_those_trained_on_are_refused():
    rule = Learned.train(made(300)).at(0.6)
    with pytest.raises(BadSettings, match="trained on layers"):
        rule.stops(made(20, 9))
    with pytest.raises(BadSettings, match="check the same layers"):
        rule.stops(from_one(from_one(made(20))))


def test_unread_layers_are_refused_in_training_and_in_use():
    evidence = made(100)
    top_prob = evidence.top_prob.clone()
    top_prob[7, 3] = torch.nan
    broken = Evidence(**{**vars(evidence), "top_prob": top_prob})
    with pytest.raises(BadText, match="NaN"):
        Learned.train(broken)
    with pytest.raises(NotFinite, match="layer 3"):
        Learned.train(evidence).at(0.5).stops(broken)


def test_invalid_settings_are_refused():
    with pytest.raises(BadSettings, match="strength"):
        Learned.train(made(100), strength=0.0)
    with pytest.raises(BadSettings, match="probability"):
        Learned.train(made(100)).at(1.5)


@pytest.mark.parametrize(
    "change",
    [{"mean": [[0.0]]}, {"intercepts": [1.0]}, {"scale": [[float("nan")] * 8] * 6}],
    ids=["shape", "intercepts", "nan"],
)
def test_damaged_numbers_are_refused(change):
    saved = Learned.train(made(100)).at(0.5).to_dict()
    with pytest.raises(BadSettings):
        rule_from_dict({**saved, **change})


def test_applying_a_saved_rule_needs_no_scikit_learn(tmp_path):
    rule = Learned.train(made(200)).at(0.7)
    (tmp_path / "rule.json").write_text(json.dumps(rule.to_dict()))
    evidence = made(3)
    code = (
        "import sys, json, torch\n"
        "from layerleap.act.exits.rules import rule_from_dict\n"
        "from layerleap.act.exits.evidence import Evidence\n"
        f"rule = rule_from_dict(json.load(open({str(tmp_path / 'rule.json')!r})))\n"
        "e = Evidence(torch.tensor([[1, 1]]), *[torch.full((1, 2), 0.4)] * 4, torch.zeros(1),\n"
        "    torch.zeros(1), layers=(1, 2))\n"
        "rule.stops(e)\n"
        "print([m for m in ('sklearn', 'scipy.stats') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert replay(rule, evidence).layer.min() >= 1
