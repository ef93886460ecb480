"""Layers matched one to one, with margins and what chance would give."""

from itertools import permutations

import pytest
import torch

from layerleap.lens.compare.alignment import Matching, chance_of_hits, match_layers


def matching(rows: list[list[float]], a: list[int] | None = None, b: list[int] | None = None):
    similarity = torch.tensor(rows, dtype=torch.float64)
    a, b = a or list(range(1, len(rows) + 1)), b or list(range(1, len(rows[0]) + 1))
    return match_layers(similarity, a, b, kind="ffn.value", space="vocabulary", measure="best")


def pairs(one: Matching) -> list[tuple[int, int]]:
    return [(match.a, match.b) for match in one.matches]


def test_the_sum_of_similarities_is_the_largest():
    one = matching([[0.9, 0.8, 0.0], [0.9, 0.1, 0.0], [0.0, 0.0, 0.5]])
    assert pairs(one) == [(1, 2), (2, 1), (3, 3)]
    assert one.hits == 1


def test_a_match_by_a_hair_and_a_match_against_the_odds_show_in_the_margin():
    one = matching([[0.9, 0.8, 0.0], [0.9, 0.1, 0.0], [0.499, 0.0, 0.5]])
    margins = [match.margin for match in one.matches]
    assert margins == pytest.approx([-0.1, 0.8, 0.001])
    assert one.smallest_margin == pytest.approx(-0.1)


def test_a_single_block_has_no_margin():
    one = matching([[0.4]])
    assert one.matches[0].margin is None
    assert one.smallest_margin is None
    assert (one.expected_hits, one.chance) == (1.0, 1.0)


@pytest.mark.parametrize("shape", [(2, 4), (4, 2)])
def test_models_of_different_depth_match_as_many_blocks_as_the_smaller_has(shape):
    similarity = torch.rand(shape, generator=torch.Generator().manual_seed(0)).tolist()
    one = matching(similarity)
    assert len(one.matches) == 2
    assert one.expected_hits == 0.5


def test_blocks_keep_their_numbers_where_some_could_not_be_compared():
    one = matching([[1.0, 0.0], [0.0, 1.0]], a=[2, 3], b=[3, 5])
    assert pairs(one) == [(2, 3), (3, 5)]
    assert one.hits == 0
    assert one.expected_hits == 0.5


@pytest.mark.parametrize(("smaller", "larger"), [(1, 1), (4, 4), (5, 5), (3, 5), (2, 6)])
def test_chance_counts_all_assignments(smaller, larger):
    ways = [
        sum(place == target for place, target in enumerate(order))
        for order in permutations(range(larger), smaller)
    ]
    for hits in range(smaller + 1):
        expected = sum(way >= hits for way in ways) / len(ways)
        assert chance_of_hits(hits, smaller, larger) == pytest.approx(expected)


def test_thirty_hits_of_thirty_are_no_accident():
    one = matching(torch.eye(30).tolist())
    assert one.hits == 30
    assert one.expected_hits == 1.0
    assert 0 < one.chance < 1e-30


def test_a_matching_says_what_it_found():
    one = matching([[0.0, 1.0], [1.0, 0.0]])
    assert repr(one) == (
        "Matching(ffn.value, vocabulary, best: 0 of 2 blocks at their own number, 1.0 by chance)"
    )
    told = one.to_dict()
    assert told["similarity"] == ((0.0, 1.0), (1.0, 0.0))
    assert told["matches"][0] == {"a": 1, "b": 2, "similarity": 1.0, "margin": 1.0}
    assert told["hits"] == 0
