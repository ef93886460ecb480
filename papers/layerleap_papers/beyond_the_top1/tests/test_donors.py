"""Donors, recipients and controls: who is chosen, against loops over all pairs."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from layerleap.act.exits.evidence import Evidence
from layerleap.errors import BadSettings, BadText
from layerleap.lens.readings import saturation_layers
from layerleap.lens.saturation import Saturation
from layerleap_papers.beyond_the_top1.donors import (
    KINDS,
    Pairs,
    PairSettings,
    Trials,
    find_pairs,
    make_trials,
)
from made_evidence import partial_evidence
from made_saturation import saturation

PLAN = PairSettings((-1, 0, 1), 2, 2, limit=500)


@cache
def made(rows: int = 300, n_layers: int = 9, seed: int = 0) -> tuple[Saturation, Evidence]:
    """Readings that wander and then settle, and where they do."""
    g = torch.Generator().manual_seed(seed)
    shape = (rows, n_layers + 1)
    top = torch.randint(4, shape, generator=g)
    final = torch.randint(4, (rows,), generator=g)
    start = torch.randint(n_layers + 1, (rows,), generator=g)
    top = torch.where(torch.arange(n_layers + 1) >= start[:, None], final[:, None], top)
    top_prob = 0.5 + 0.5 * torch.rand(shape, generator=g)
    second_prob = (1 - top_prob) * torch.rand(shape, generator=g)
    documents, positions = torch.arange(rows) // 10, torch.arange(rows) % 10
    evidence = partial_evidence(
        tuple(range(n_layers + 1)),
        positions,
        documents,
        final=final,
        top=top,
        top_prob=top_prob,
        second_prob=second_prob,
    )
    found = replace(
        saturation(rows, n_layers, 1, per_document=10),
        layer=saturation_layers(top[:, :, None]),
        tokens=final[:, None].int(),
    )
    return found, evidence


def is_pair(of: Saturation, plan: PairSettings, donor: int, recipient: int) -> bool:
    s, token = of.layer[:, 0].tolist(), of.tokens[:, 0].tolist()
    near = plan.near is None or (
        of.documents[donor] == of.documents[recipient]
        and abs(int(of.positions[donor]) - int(of.positions[recipient])) <= plan.near
    )
    return bool(
        token[donor] == token[recipient]
        and s[donor] >= plan.first
        and s[recipient] - s[donor] >= plan.gap
        and near
    )


@pytest.mark.parametrize("plan", [PLAN, replace(PLAN, gap=4), replace(PLAN, near=5)], ids=str)
def test_pairs_are_those_that_a_loop_over_all_rows_would_take(plan):
    of, _ = made()
    pairs = find_pairs(of, plan)
    possible = {r for r in range(300) if any(is_pair(of, plan, d, r) for d in range(300))}
    assert all(
        is_pair(of, plan, *both)
        for both in zip(pairs.donor.tolist(), pairs.recipient.tolist(), strict=True)
    )
    found = pairs.recipient.tolist()
    assert len(found) == len(set(found))
    if plan.near is None:
        assert set(found) == possible
    else:
        assert set(found) <= possible
        assert len(found) > 0.9 * len(possible)
    assert torch.equal(pairs.start, of.layer[pairs.donor, 0].long())
    assert torch.equal(pairs.token, of.tokens[pairs.recipient, 0].long())


def test_every_donor_of_a_recipient_has_its_chance():
    of, _ = made()
    met = {}
    for seed in range(60):
        pairs = find_pairs(of, replace(PLAN, seed=seed))
        for donor, recipient in zip(pairs.donor.tolist(), pairs.recipient.tolist(), strict=True):
            met.setdefault(recipient, set()).add(donor)
    few = [
        (r, {d for d in range(300) if is_pair(of, PLAN, d, r)})
        for r in met
        if sum(is_pair(of, PLAN, d, r) for d in range(300)) <= 5
    ]
    assert few
    assert all(met[r] == donors for r, donors in few)


def test_a_limit_takes_some_recipients_at_random_and_a_seed_the_same():
    of, _ = made()
    some = find_pairs(of, replace(PLAN, limit=40))
    assert len(some.donor) == 40
    assert torch.equal(some.donor, find_pairs(of, replace(PLAN, limit=40)).donor)
    other = find_pairs(of, replace(PLAN, limit=40, seed=1))
    assert not torch.equal(some.recipient, other.recipient)
    assert some.recipient.max() > 200


def trials() -> tuple[Saturation, Evidence, Pairs, Trials]:
    of, evidence = made()
    pairs = find_pairs(of, PLAN)
    return of, evidence, pairs, make_trials(of, evidence, pairs, PLAN)


def test_donors_are_tried_at_every_offset_and_controls_from_zero_on():
    _, _, pairs, found = trials()
    for number, kind in enumerate(KINDS):
        offsets = set(found.offset[found.kind == number].tolist())
        assert offsets == ({-1, 0, 1} if kind == "donor" else {0, 1})
    assert int((found.kind == 0).sum()) == 3 * len(pairs.donor)
    assert torch.equal(found.layer, pairs.start[found.pair] + found.offset)
    own = found.kind == KINDS.index("no-op")
    assert torch.equal(found.source[own], pairs.recipient[found.pair[own]])
    random = found.kind == KINDS.index("random")
    assert torch.equal(found.source[random], pairs.donor[found.pair[random]])


def test_an_unsaturated_control_reads_the_same_is_not_settled_and_is_the_closest_in_margin():
    of, evidence, pairs, found = trials()
    here = (found.kind == KINDS.index("unsaturated")).nonzero()[:, 0].tolist()
    assert len(here) > len(pairs.donor)
    for trial in here:
        pair, layer, source = (
            int(getattr(found, name)[trial]) for name in ("pair", "layer", "source")
        )
        token, donor = int(pairs.token[pair]), int(pairs.donor[pair])
        candidates = [
            row
            for row in range(300)
            if int(evidence.top[row, layer]) == token
            and int(of.layer[row, 0]) > layer
            and row != int(pairs.recipient[pair])
        ]
        assert source in candidates
        wanted = float(evidence.gap[donor, layer])
        distance = [abs(float(evidence.gap[row, layer]) - wanted) for row in candidates]
        assert abs(float(evidence.gap[source, layer]) - wanted) == min(distance)


def test_a_pair_without_such_a_state_has_no_such_control():
    of, evidence, pairs, found = trials()
    here = found.kind == KINDS.index("unsaturated")
    had = {*zip(found.pair[here].tolist(), found.offset[here].tolist(), strict=True)}
    for pair in range(len(pairs.donor)):
        for offset in (0, 1):
            layer = int(pairs.start[pair]) + offset
            exists = any(
                int(evidence.top[row, layer]) == int(pairs.token[pair])
                and int(of.layer[row, 0]) > layer
                and row != int(pairs.recipient[pair])
                for row in range(300)
            )
            assert ((pair, offset) in had) == exists


def test_a_copy_is_of_a_row_that_ends_with_another_token():
    of, _, pairs, found = trials()
    here = found.kind == KINDS.index("copy")
    assert int(here.sum()) == 2 * len(pairs.donor)
    token = of.tokens[:, 0].long()
    assert (token[found.source[here]] != pairs.token[found.pair[here]]).all()


def test_too_few_pairs_are_refused_with_the_number_of_rows_that_is_needed():
    of, _ = made()
    few = of.rows(torch.arange(30))
    with pytest.raises(BadText, match=r"\d+ pairs among 30 rows .* expected 20: about \d+"):
        find_pairs(few, replace(PLAN, gap=5))
    apart = replace(of, tokens=torch.arange(300).int()[:, None])
    with pytest.raises(BadText, match=r"0 pairs .* far more rows"):
        find_pairs(apart, PLAN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": (-1, 1)}, "expected 0 among them"),
        ({"gap": 1}, "reaches the recipient's own"),
        ({"first": 1}, "first is 1.* expected 2 or more"),
        ({"limit": 0}, "expected 1 pair or more"),
    ],
)
def test_plans_without_meaning_are_refused(change, message):
    with pytest.raises(BadSettings, match=message):
        replace(PLAN, **change)


@pytest.mark.parametrize("n_layers", [2, 6, 12, 24, 30, 48])
def test_the_plan_for_a_depth_has_meaning_and_reaches_five_layers_in_deep_models(n_layers):
    plan = PairSettings.of(n_layers)
    assert (
        max(plan.offsets)
        == -min(plan.offsets)
        == (5 if n_layers >= 24 else 3 if n_layers >= 12 else 1)
    )


def test_a_shorter_reach_keeps_the_gap_of_the_depth():
    whole, near = PairSettings.of(30), PairSettings.of(30, reach=1)
    assert (near.offsets, near.gap) == ((-1, 0, 1), whole.gap)
    assert PairSettings.of(6, reach=5).offsets == (-1, 0, 1)  # a shallow model has no more
