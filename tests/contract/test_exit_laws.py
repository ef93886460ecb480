"""Laws of exit rules: causal, replayed exactly, monotone in their knob, the same after saving."""

import json
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from layerleap.act.exits.evidence import Evidence
from layerleap.act.exits.learned import Learned
from layerleap.act.exits.replay import replay, sweep
from layerleap.act.exits.rules import (
    LAMBDAS,
    MORE_LAMBDAS,
    RULES,
    Entropy,
    Fixed,
    Gap,
    Never,
    Oracle,
    Patience,
    Rule,
    Similarity,
    Task,
    TopProbability,
    family,
    rule_from_dict,
)
from made_evidence import made as plain, upto, with_task

LEARNED = Learned.train(plain(300, seed=9))
MEMBERS: list[Rule] = [
    Fixed(1),
    Fixed(3),
    Fixed(6),
    Gap(0.3, 12.0),
    Gap(-1.112, 12.0),
    Gap(1.112, 12.0),
    Gap(0.5, 3.0, 0.0),
    TopProbability(0.5),
    TopProbability(0.0),
    TopProbability(1.0),
    Entropy(1.0),
    Entropy(0.0),
    Similarity(0.25),
    Similarity(-1.0),
    Patience(1),
    Patience(2),
    Patience(4),
    Oracle(),
    Never(),
    LEARNED.at(0.5),
    LEARNED.at(0.9),
    Task(0.5),
    Task(0.0),
    Task(1.0),
]
FAMILIES = {
    "fixed": family(Fixed),
    "gap": family(Gap, length=12.0),
    "top": family(TopProbability),
    "entropy": family(Entropy),
    "similarity": family(Similarity),
    "patience": family(Patience),
    "learned": LEARNED,
    "task": family(Task),
}


def made(*size: int, seed: int = 0, coarse: bool = False) -> Evidence:
    """Evidence with everything that a rule may ask for."""
    return with_task(plain(*size, seed=seed, coarse=coarse), seed=seed, coarse=coarse)


def words(rule: Rule) -> str:
    return str(rule)


def naive(rule: Rule, evidence: Evidence, row: int) -> int:
    """The exit layer of one row by a loop over layers that stops as soon as the rule says so."""
    run = 0
    for column, layer in enumerate(evidence.layers):
        if layer == evidence.layers[-1]:
            break
        if layer == 0:
            continue
        top_prob, second_prob = (
            float(evidence.top_prob[row, column]),
            float(evidence.second_prob[row, column]),
        )
        top, i = int(evidence.top[row, column]), int(evidence.position[row])
        same = column > 0 and evidence.layers[column - 1] > 0
        run = run + 1 if same and top == int(evidence.top[row, column - 1]) else 1
        if isinstance(rule, Gap):
            bar = 0.9 * rule.lam + 0.1 * math.exp(-rule.temperature * i / rule.length)
            stop = top_prob - second_prob > bar
        elif isinstance(rule, Learned):  # its probability is compared with scikit-learn elsewhere
            known = upto(evidence, column).rows(torch.tensor([row]))
            stop = float(rule.models.probability(known)[0, -1]) > rule.threshold
        else:
            stop = {
                "fixed": lambda layer=layer: layer >= rule.layer,
                "top-probability": lambda top_prob=top_prob: top_prob > rule.threshold,
                "entropy": lambda c=column: float(evidence.entropy[row, c]) < rule.threshold,
                "similarity": lambda c=column: float(evidence.cosine[row, c]) > rule.threshold,
                "task": lambda c=column: float(evidence.extra["task"][row, c]) > rule.threshold,
                "patience": lambda run=run: run >= rule.k,
                "oracle": lambda top=top: top == int(evidence.final[row]),
                "never": lambda: False,
            }[rule.name]()
        if stop:
            return layer
    return evidence.layers[-1]


@pytest.mark.parametrize("rule", MEMBERS, ids=words)
def test_a_rule_does_not_look_ahead(rule):
    evidence = made(60, seed=1, coarse=True)
    whole = rule.stops(evidence)
    assert whole.dtype == torch.bool
    for column in range(len(evidence.layers)):
        assert torch.equal(rule.stops(upto(evidence, column)), whole[:, : column + 1])


@pytest.mark.parametrize("rule", MEMBERS, ids=words)
def test_a_row_does_not_depend_on_its_neighbours(rule):
    evidence = made(60, seed=1)
    some = torch.tensor([5, 41, 17])
    assert torch.equal(rule.stops(evidence.rows(some)), rule.stops(evidence)[some])


@pytest.mark.parametrize("rule", MEMBERS, ids=words)
def test_no_rule_exits_at_layer_zero(rule):
    evidence = made(60, seed=1)
    assert not rule.stops(evidence)[:, 0].any()
    assert replay(rule, evidence).layer.min() >= 1


@pytest.mark.parametrize("rule", MEMBERS, ids=words)
@given(seed=st.integers(0, 10**6), n_layers=st.integers(1, 6), coarse=st.booleans())
@settings(max_examples=10, deadline=None, derandomize=True)
def test_replay_is_the_loop_over_rows_and_layers(rule, seed, n_layers, coarse):
    evidence = made(25, 6, seed=seed, coarse=coarse)
    if not isinstance(rule, Learned):  # that one knows the depth it was trained for
        evidence = made(25, n_layers, seed=seed, coarse=coarse)
    exits = replay(rule, evidence)
    expected = [naive(rule, evidence, row) for row in range(len(evidence))]
    assert exits.layer.tolist() == expected
    agrees = [bool(evidence.top[r, e] == evidence.final[r]) for r, e in enumerate(expected)]
    assert exits.agrees.tolist() == agrees


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("coarse", [False, True])
def test_a_sweep_is_the_replay_of_each_of_its_rules(name, coarse):
    evidence = made(150, seed=2, coarse=coarse)
    swept = sweep(FAMILIES[name], evidence, n=25)
    for index, knob in enumerate(swept.knobs):
        alone = replay(FAMILIES[name].at(knob), evidence)
        assert torch.equal(swept.exits(index).layer, alone.layer)
        assert torch.equal(swept.exits(index).agrees, alone.agrees)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_stricter_rule_never_exits_earlier(name):
    evidence = made(150, seed=3, coarse=True)
    chosen = FAMILIES[name]
    knobs = sorted(chosen.grid(30, 6), reverse=chosen.direction == "later")
    layers = sweep(chosen, evidence, knobs).layer
    assert (layers[:, :-1] >= layers[:, 1:]).all()
    assert layers[:, 0].float().mean() > layers[:, -1].float().mean()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_grid_goes_from_never_to_always(name):
    evidence = made(150, seed=4)
    grid = FAMILIES[name].grid(20, 6)
    assert len(grid) >= min(20, 6)
    assert grid == sorted(grid, reverse=FAMILIES[name].direction == "later")
    safest, boldest = (replay(FAMILIES[name].at(k), evidence) for k in (grid[0], grid[-1]))
    assert (safest.layer == 6).all()
    assert (boldest.layer == 1).all()


@pytest.mark.parametrize("rule", MEMBERS, ids=words)
def test_a_saved_rule_is_the_same_rule(rule):
    again = rule_from_dict(json.loads(json.dumps(rule.to_dict())))
    assert isinstance(again, Rule)
    assert (type(again), again.needs, str(again)) == (type(rule), rule.needs, str(rule))
    evidence = made(60, seed=5)
    assert torch.equal(again.stops(evidence), rule.stops(evidence))


def test_every_rule_is_under_these_laws():
    assert {rule.name for rule in MEMBERS} == {*RULES, "learned"}


@given(seed=st.integers(0, 10**6))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_the_ends_of_the_papers_lambdas_are_exit_at_one_and_never(seed):
    """Law E5 of early exit."""
    evidence = made(40, seed=seed, coarse=seed % 2 == 0)
    length = float(evidence.position.double().mean()) + 1
    first, last = replay(Gap(-1.112, length), evidence), replay(Gap(1.112, length), evidence)
    assert first.mean_layer == 1
    assert first.agreement == replay(Fixed(1), evidence).agreement
    assert (last.mean_layer, last.agreement) == (6, 1)
    swept = sweep(family(Gap, length=length), evidence, sorted([*LAMBDAS, *MORE_LAMBDAS]))
    layers = swept.layer.double().mean(0)
    assert (layers[1:] >= layers[:-1]).all()


def test_the_papers_grid_has_its_values():
    assert len(LAMBDAS) == 13
    assert len(MORE_LAMBDAS) == 9
    assert (MORE_LAMBDAS[0], MORE_LAMBDAS[-1]) == (1.0112, 1.1008)
    assert LAMBDAS[1:12] == tuple(n / 10 for n in range(11))
