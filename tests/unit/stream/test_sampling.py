from collections import Counter

import pytest

from layerleap.errors import BadSettings
from layerleap.stream.sampling import EveryNth, OnePerText, parse_positions


def test_one_of_the_allowed_positions_is_chosen():
    allowed = [2, 3, 5, 7]
    for number in range(50):
        (chosen,) = OnePerText().choose(allowed, f"text {number}")
        assert chosen in allowed


def test_the_choice_depends_only_on_seed_and_text():
    allowed = list(range(100))
    assert OnePerText(3).choose(allowed, "a") == OnePerText(3).choose(allowed, "a")
    texts = [f"text {number}" for number in range(20)]
    draws = {seed: [OnePerText(seed).choose(allowed, text) for text in texts] for seed in (0, 1)}
    assert draws[0] != draws[1]
    backwards = [OnePerText(0).choose(allowed, text) for text in reversed(texts)]
    assert backwards[::-1] == draws[0]


def test_the_choice_is_the_same_on_every_machine():
    texts = ("a", "the cat sat", "\u00e9")
    assert [OnePerText(7).choose(range(1000), text)[0] for text in texts] == [733, 367, 664]


def test_the_choice_is_uniform():
    counts = Counter(OnePerText().choose(range(10), f"text {n}")[0] for n in range(5000))
    # Chi-squared with nine degrees of freedom: above 27.9 once in a thousand; the draw is fixed.
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 27.9
    assert len(counts) == 10


def test_a_text_without_allowed_positions_gives_none():
    assert OnePerText().choose([], "text") == []
    assert EveryNth(2).choose([], "text") == []


def test_every_nth_counts_among_those_allowed_and_starts_with_the_first():
    assert EveryNth(2).choose([1, 4, 5, 9, 11], "text") == [1, 5, 11]
    assert EveryNth(1).choose([1, 4], "text") == [1, 4]
    assert EveryNth(9).choose([1, 4], "text") == [1]


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("one", OnePerText(5)),
        ("all", EveryNth(1)),
        ("every:1", EveryNth(1)),
        ("every:3", EveryNth(3)),
    ],
)
def test_policies_are_parsed_and_written_alike(text, policy):
    assert parse_positions(text, 5) == policy
    assert parse_positions(str(policy), 5) == policy


@pytest.mark.parametrize(
    "text", ["", "two", "every", "every:", "every:x", "every:-1", "every:1.5", "One"]
)
def test_unknown_policies_are_refused_with_the_known_ones(text):
    with pytest.raises(BadSettings, match="expected 'one', 'all' or 'every:N'"):
        parse_positions(text)


def test_every_zeroth_position_is_refused():
    with pytest.raises(BadSettings, match="expected every:1 or more"):
        parse_positions("every:0")
