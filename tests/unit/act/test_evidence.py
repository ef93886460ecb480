"""Evidence: validation, derived values and splits."""

import pytest
import torch

from layerleap.act.exits.evidence import Evidence, split
from layerleap.errors import BadSettings
from made_evidence import made, partial_evidence


def tops(*rows: list[int], layers: tuple[int, ...] | None = None) -> Evidence:
    top = torch.tensor(rows)
    layers = tuple(range(top.shape[1])) if layers is None else layers
    zero = torch.zeros(len(rows), dtype=torch.long)
    return partial_evidence(layers, zero, zero, top=top, final=top[:, -1])


def test_a_streak_counts_from_layer_one_and_starts_again_with_another_token():
    assert tops([7, 7, 7, 8, 8, 7]).streak.tolist() == [[1, 1, 2, 1, 2, 1]]
    assert tops([7, 7, 8], layers=(2, 5, 9)).streak.tolist() == [[1, 2, 1]]


def test_agreement_is_with_the_models_own_token():
    assert tops([7, 8, 7], [1, 2, 3]).agrees.tolist() == [[True, False, True], [False, False, True]]


def test_agreement_that_is_not_known_yet_is_an_error():
    live = partial_evidence((1, 2), torch.zeros(1), torch.zeros(1), top=torch.tensor([[3, 3]]))
    with pytest.raises(BadSettings, match="model's own answer"):
        _ = live.agrees


def test_the_gap_is_the_difference_of_the_two_best():
    evidence = made(20)
    expected = evidence.top_prob.double() - evidence.second_prob.double()
    assert torch.equal(evidence.gap, expected)
    assert evidence.gap.dtype == torch.float64


def test_rows_can_be_taken_by_number_or_mask():
    evidence = made(10)
    mask = evidence.position > 10
    assert torch.equal(evidence.rows(mask).top_prob, evidence.top_prob[mask])
    assert torch.equal(evidence.rows(torch.tensor([3, 1])).final, evidence.final[[3, 1]])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_prob": torch.zeros(10, 3)}, "'top_prob' has shape"),
        ({"position": torch.zeros(9)}, "for 9 rows"),
        ({"final": torch.zeros(4)}, "'final' has shape"),
        ({"layers": (0, 2, 1, 3, 4, 5, 6)}, "expected ascending layers"),
        ({"layers": (-1, 0, 1, 2, 3, 4, 5)}, "expected ascending layers"),
        ({"top_prob": torch.full((10, 7), 1.5)}, "expected values from 0 to 1"),
        ({"second_prob": torch.ones(10, 7)}, "second_prob is above top_prob"),
        ({"cosine": torch.full((10, 7), -2.0)}, "expected values from -1 to 1"),
        ({"entropy": torch.full((10, 7), -1.0)}, "'entropy'"),
        ({"extra": {"norm": torch.zeros(10)}}, "'norm' has shape"),
        ({"extra": {"top_prob": torch.zeros(10, 7)}}, "the name 'top_prob' is taken"),
    ],
)
def test_evidence_of_a_wrong_shape_or_range_is_refused(change, words):
    with pytest.raises(BadSettings, match=words):
        Evidence(**{**vars(made(10)), **change})


@pytest.mark.parametrize("by", ["document", "row"])
def test_parts_of_a_split_are_disjoint_and_of_the_fractions_asked_for(by):
    evidence = made(120, documents=40)
    marked = Evidence(**{**vars(evidence), "position": torch.arange(120)})
    parts = split(marked, (0.5, 0.25, 0.25), by=by, seed=3)
    rows = torch.cat([part.position for part in parts])
    assert sorted(rows.tolist()) == list(range(120))
    assert [len(part) for part in parts] == [60, 30, 30]
    if by == "document":
        documents = [set(part.document.tolist()) for part in parts]
        assert not documents[0] & documents[1]
        assert not documents[1] & documents[2]


def test_a_split_depends_on_its_seed_only():
    evidence = made(50)
    first, again, other = (split(evidence, (0.5,), seed=s)[0].document for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("fractions", [(), (0.5, 0.6), (0.5, 0.0), (1.2,)])
def test_invalid_fractions_are_refused(fractions):
    with pytest.raises(BadSettings, match="fractions"):
        split(made(10), fractions)


def test_too_few_documents_for_a_split_are_refused():
    with pytest.raises(BadSettings, match="too few"):
        split(made(10, documents=1), (0.5, 0.5))
    with pytest.raises(BadSettings, match="by is 'text'; expected one of 'document', 'row'"):
        split(made(10), (0.5,), by="text")


def test_some_layers_keep_their_columns_and_the_last():
    evidence = made(30, 6)
    extra = {"size": torch.arange(7.0).expand(30, 7)}
    kept = Evidence(**{**vars(evidence), "extra": extra}).at((4, 2))
    assert kept.layers == (2, 4, 6)
    assert torch.equal(kept.top, evidence.top[:, [2, 4, 6]])
    assert torch.equal(kept.top_prob, evidence.top_prob[:, [2, 4, 6]])
    assert kept.extra["size"][0].tolist() == [2, 4, 6]
    assert torch.equal(kept.final, evidence.final)


def test_streaks_at_some_layers_count_columns():
    evidence = made(1, 4)
    top = torch.tensor([[9, 1, 7, 1, 1]])
    again = Evidence(**{**vars(evidence), "top": top, "final": torch.tensor([1])})
    assert again.streak.tolist() == [[1, 1, 1, 1, 2]]
    assert again.at((1, 3)).streak.tolist() == [[1, 2, 3]]


def test_every_layer_is_the_whole_evidence_and_none_the_last_alone():
    evidence = made(10, 3)
    assert evidence.at(range(4)).layers == evidence.layers
    assert evidence.at(()).layers == (3,)


def test_a_layer_that_was_not_read_cannot_be_kept():
    with pytest.raises(BadSettings, match="layer 9 is not among"):
        made(10, 3).at((2, 9))
