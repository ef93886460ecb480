"""Tasks from saturation layers, folds, and the balanced choice of examples."""

from dataclasses import replace

import pytest
import torch

from layerleap.errors import BadSettings, BadText
from layerleap.lens.probes.cells import (
    FEWEST,
    CellSampling,
    ambiguous,
    cells_of,
    choose_cells,
    folds_of,
    task_labels,
)
from made_saturation import saturation


def with_layers(*rows: list[int], n_layers: int = 6):
    given = saturation(len(rows), n_layers, len(rows[0]))
    return replace(given, layer=torch.tensor(rows, dtype=torch.int16))


def test_a_task_reaches_from_behind_the_last_rank_to_its_own_saturation_layer():
    labels = task_labels(with_layers([1, 3, 5]))
    assert labels.tolist() == [[1, 1, 2, 2, 3, 3, 0]]


def test_ranks_that_saturate_at_once_or_never_are_handled():
    assert task_labels(with_layers([0, 0, 6])).tolist() == [[1, 3, 3, 3, 3, 3, 3]]
    assert task_labels(with_layers([6, 6, 6])).tolist() == [[1] * 7]


def test_out_of_order_the_best_rank_that_is_still_open_counts():
    # Task 2 (from behind layer 4 to 2) is empty; task 3 reaches from 3 to 5 and overlaps task 1.
    given = with_layers([4, 2, 5])
    assert task_labels(given).tolist() == [[1, 1, 1, 1, 1, 3, 0]]
    assert ambiguous(given, first_layer=0) == pytest.approx(2 / 6)  # layers 3 and 4


def test_later_tasks_can_be_put_together_with_all_that_follows():
    given = with_layers([1, 3, 5], [6, 6, 6])
    assert task_labels(given, 2).tolist() == [[1, 1, 2, 2, 2, 2, 2], [1] * 7]
    assert task_labels(given, 3).tolist() == [[1, 1, 2, 2, 3, 3, 3], [1] * 7]
    settled = torch.arange(7) > given.layer[:, :1]
    assert torch.equal(task_labels(given, 2) == 2, settled)
    cells = cells_of(saturation(300, 10, 3), CellSampling(tasks=2))
    assert cells.n_tasks == 2
    assert set(cells.task.tolist()) == {1, 2}
    with pytest.raises(BadSettings, match="cannot separate 4 tasks"):
        task_labels(given, 4)


@pytest.mark.parametrize("in_order", [True, False])
def test_every_label_is_one_of_the_papers(in_order):
    """Task i at l only if s_{i-1} < l <= s_i."""
    given = saturation(100, 9, 4, in_order=in_order)
    labels = task_labels(given)
    assert in_order == (ambiguous(given) == 0)
    for row, layer in (labels > 0).nonzero().tolist():
        task = int(labels[row, layer])
        s = given.layer[row].tolist()
        assert layer <= s[task - 1]
        assert task == 1 or s[task - 2] < layer


@pytest.mark.parametrize("by", ["document", "row", "cell"])
def test_folds_never_split_a_group_and_have_even_sizes(by):
    documents = torch.tensor([7] * 30 + [3] * 20 + list(range(100, 150)))
    folds = folds_of(documents, (100, 5), 4, by, seed=1)
    assert set(folds.flatten().tolist()) == {0, 1, 2, 3}
    sizes = torch.bincount(folds.flatten())
    assert sizes.max() - sizes.min() <= (40 if by == "document" else 5)
    if by != "cell":
        assert (folds == folds[:, :1]).all()
    if by == "document":
        for document in (3, 7):
            assert len(folds[documents == document].unique()) == 1
    assert not torch.equal(folds, folds_of(documents, (100, 5), 4, by, seed=2))
    assert torch.equal(folds, folds_of(documents, (100, 5), 4, by, seed=1))


@pytest.mark.parametrize("by", ["document", "row", "cell"])
def test_every_layer_of_every_fold_has_as_many_of_each_task(by):
    given = saturation(300, 10, 3)
    cells = cells_of(given, CellSampling(folds=3), by)
    assert len(cells) > 300
    counts = torch.zeros(3, 11, 3)
    counts.index_put_((cells.fold, cells.layer, cells.task - 1), torch.ones(()), accumulate=True)
    assert (counts == counts[:, :, :1]).all()
    assert cells.layers == tuple(counts.sum((0, 2)).nonzero()[:, 0].tolist())
    labels = task_labels(given)
    assert torch.equal(cells.task, labels[cells.row, cells.layer].long())


def test_the_sample_is_as_large_as_balance_allows_and_has_no_duplicates():
    given = saturation(300, 10, 3)
    cells = cells_of(given, CellSampling(folds=3, min_cells=1))
    labels, folds = (
        task_labels(given),
        folds_of(given.documents, (300, 11), 3, "document", 0),
    )
    expected = 0
    for fold in range(3):
        for layer in range(1, 11):
            here = labels[folds[:, layer] == fold, layer]
            expected += 3 * min(int((here == task).sum()) for task in (1, 2, 3))
    assert len(cells) == expected
    assert len((cells.row * 11 + cells.layer).unique()) == expected


def test_the_choice_is_random_and_seeded():
    given = saturation(300, 10, 3)
    one, same, other = (cells_of(given, CellSampling(limit=300, seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(one.row, same.row)
    assert not torch.equal(one.row, other.row)
    later = (one.row > 150).double().mean()  # the first to come would be rows below
    assert 0.3 < later < 0.7


def test_a_limit_is_kept_and_nearly_used():
    given = saturation(400, 10, 3)
    for limit in (400, 777):
        assert 0.8 * limit < len(cells_of(given, CellSampling(limit=limit))) <= limit


def test_early_and_thin_layers_are_left_out():
    given = saturation(300, 10, 3)
    assert min(cells_of(given, CellSampling(first_layer=4)).layers) == 4
    thick = cells_of(given, CellSampling(min_cells=50))
    assert set(thick.layers) < set(cells_of(given, CellSampling(min_cells=1)).layers)
    assert (torch.bincount(thick.layer)[list(thick.layers)] >= 150).all()


def test_too_few_rows_are_refused_with_the_number_that_is_needed():
    with pytest.raises(
        BadText, match=r"40 rows give \d balanced .* needs 10: give about \d+ rows"
    ) as caught:
        cells_of(saturation(40, 10, 3), CellSampling())
    needed = int(str(caught.value).split("about ")[1].split()[0])
    assert needed > 40
    enough = cells_of(saturation(2 * needed, 10, 3), CellSampling())
    assert int(torch.bincount(enough.fold).min()) >= 3 * FEWEST


def test_a_task_that_never_occurs_is_named():
    given = with_layers(*([6, 6, 6] for _ in range(60)))
    with pytest.raises(BadText, match="task 2 is the rarest, with 0"):
        cells_of(given, CellSampling())


def test_too_few_documents_for_the_folds_are_refused():
    with pytest.raises(BadText, match="2 documents are too few for 5 folds; expected at least 5"):
        cells_of(saturation(100, per_document=50), CellSampling())


def test_settings_without_meaning_are_refused():
    with pytest.raises(BadSettings, match="tasks 1"):
        CellSampling(tasks=1)
    with pytest.raises(BadSettings, match="folds 1"):
        CellSampling(folds=1)
    with pytest.raises(BadSettings, match="limit of 20 cells"):
        cells_of(saturation(300), CellSampling(limit=20))
    with pytest.raises(BadSettings, match="by is 'text'"):
        cells_of(saturation(300), CellSampling(), by="text")
    labels = torch.ones(10, 5, dtype=torch.int8)
    with pytest.raises(BadSettings, match="first_layer 5 does not exist"):
        choose_cells(labels, torch.zeros(10, 5, dtype=torch.int64), 3, CellSampling(first_layer=5))
