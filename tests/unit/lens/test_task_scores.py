"""Scores of task probes: what leaks, what chance gives, and that nothing is found in nothing."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from layerleap.errors import BadSettings, BadText
from layerleap.lens.probes.cells import CellSampling
from layerleap.lens.probes.scores import HeldOut, ProbeScores, RandomStates, held_out, score_probe
from made_saturation import Knowing, ignorant, saturation


@cache
def nothing_found(by: str) -> HeldOut:
    of = saturation(600, 24, 5)
    return held_out(of, ignorant(of, 128), by=by)


def test_folds_of_single_cells_leak_and_folds_of_documents_do_not():
    """Law E8: the states hold no information, so anything beyond chance is a leak."""
    chance = 1 / 5
    leaked, rows, documents = (
        float(nothing_found(by).measures()[0]) for by in ("cell", "row", "document")
    )
    assert leaked > 2 * chance
    low, high = nothing_found("document").intervals()[:, 0].tolist()
    assert low < chance < high
    assert abs(documents - chance) < 0.06
    assert abs(rows - chance) < 0.06


def test_no_row_is_on_both_sides_unless_folds_are_by_cell():
    for by, whole in (("document", True), ("row", True), ("cell", False)):
        cells = nothing_found(by).cells
        folds = [len(cells.fold[cells.row == row].unique()) for row in cells.row.unique()]
        assert (max(folds) == 1) == whole


def test_measures_are_those_of_scikit_learn():
    of = saturation(300)
    held = held_out(of, Knowing(of), CellSampling(folds=2))
    actual = held.measures()
    task, p = held.cells.task.numpy(), held.p.numpy()
    assert float(actual[0]) == pytest.approx(balanced_accuracy_score(task, held.predicted.numpy()))
    for k in (1, 2, 3):
        aucs, pairs = [], []
        for fold in (0, 1):
            here = (held.cells.fold == fold).numpy()
            aucs.append(roc_auc_score(task[here] == k, p[here, k - 1]))
            mine = int((task[here] == k).sum())
            pairs.append(mine * (int(here.sum()) - mine))
        expected = sum(a * n for a, n in zip(aucs, pairs, strict=True)) / sum(pairs)
        assert float(actual[k]) == pytest.approx(expected)


def test_equal_scores_count_half():
    of = saturation(300)
    held = held_out(of, Knowing(of))
    same = replace(held, p=torch.full_like(held.p, 0.2))
    assert same.measures()[1:].tolist() == pytest.approx([0.5] * 3)


def test_intervals_leave_out_whole_documents():
    of = saturation(240, per_document=4)
    held = held_out(of, Knowing(of))
    low, high = held.intervals()
    value = held.measures()
    assert (low < value).all()
    assert (value < high).all()
    # Were every document there three times under new names, its rows would say no more.
    names, thrice = held.documents, ("row", "layer", "task", "fold")
    cells = replace(held.cells, **{key: getattr(held.cells, key).repeat(3) for key in thrice})
    copies = HeldOut(cells, held.p.repeat(3, 1), names.repeat(3))
    torch.testing.assert_close(copies.intervals(), torch.stack([low, high]))
    apart = replace(copies, documents=torch.cat([names, names + 1000, names + 2000]))
    narrow = apart.intervals()
    assert (narrow[1] - narrow[0] < 0.8 * (high - low)).all()


@cache
def scored(kind: str) -> ProbeScores:
    of = saturation(300)
    states = Knowing(of, loudness=0.7) if kind == "knowing" else ignorant(of, seed=3)
    return score_probe(of, states, permutations=19)


def test_what_is_there_is_found_with_the_smallest_p_value():
    first, *tasks = scored("knowing").rows
    assert first["measure"] == "balanced accuracy"
    assert first["low"] > first["chance"] == pytest.approx(1 / 3)
    assert first["p"] == pytest.approx(1 / 20)
    assert first["null_low"] < first["null"] < first["null_high"] < first["low"]
    assert [row["task"] for row in tasks] == [1, 2, 3]
    for row in tasks:
        assert (row["measure"], row["chance"]) == ("AUC", 0.5)
        assert 0.5 < row["low"] < row["value"] < row["high"] < 1
        assert row["p"] == pytest.approx(1 / 20)
        assert abs(row["null"] - 0.5) < 0.05


def test_what_is_not_there_is_not_found():
    first = scored("ignorant").rows[0]
    assert first["p"] > 0.05
    assert first["null_low"] <= first["value"] <= first["null_high"]


@pytest.mark.parametrize("kind", ["knowing", "ignorant"])
def test_the_control_is_at_chance_whatever_the_states_know(kind):
    actual = scored(kind)
    assert actual.control_at_chance
    assert abs(actual.rows[0]["control"] - 1 / 3) < 0.08
    assert "at chance, as it must be" in actual.summary()


def test_a_control_away_from_chance_is_reported_loudly():
    actual = scored("knowing")
    leaked = {**actual.rows[0], "control": 0.7, "control_low": 0.6, "control_high": 0.8}
    broken = replace(actual, rows=(leaked, *actual.rows[1:]))
    assert not broken.control_at_chance
    assert "do not trust" in broken.summary()
    unknown = replace(actual, rows=({**leaked, "control_low": None}, *actual.rows[1:]))
    assert not unknown.control_at_chance


def test_scores_are_plain_values_and_count_what_they_rest_on():
    import json

    actual = scored("knowing")
    values = json.loads(json.dumps(actual.to_dict()))
    assert values["control_at_chance"] is True
    assert sum(map(sum, values["confusion"])) == values["cells"] == actual.cells > 300
    assert all(sum(row) == actual.cells / 3 for row in actual.confusion)
    right = sum(actual.confusion[task][task] for task in range(3)) / actual.cells
    assert right == pytest.approx(actual.rows[0]["value"])
    assert values["documents"] <= 75
    assert values["ambiguous"] == 0
    assert (values["settings"]["space"], values["settings"]["folds"]) == ("raw", 5)


def test_permuted_labels_keep_the_spread_of_chance_and_single_labels_do_not():
    """The layers of a row are correlated, so permuting single labels narrows the null."""
    choice = CellSampling(folds=3)
    own, permuted, single = [], [], []
    of = saturation(120, 24, 3)
    states = ignorant(of, 24)
    generator = torch.Generator().manual_seed(0)
    for seed in range(24):
        fresh = saturation(120, 24, 3, seed=seed + 1)
        own.append(float(held_out(fresh, ignorant(of, 24, seed=seed + 1), choice).measures()[0]))
        order = torch.randperm(120, generator=generator)
        other = replace(of, layer=of.layer[order])
        permuted.append(float(held_out(other, states, choice).measures()[0]))
        single.append(_with_single_labels_permuted(of, states, choice, generator))
    spread = {
        name: torch.tensor(values).std().item()
        for name, values in {"own": own, "permuted": permuted, "single": single}.items()
    }
    assert 0.6 < spread["permuted"] / spread["own"] < 1.7
    assert spread["single"] < 0.85 * min(spread["own"], spread["permuted"])


def _with_single_labels_permuted(of, states, choice, generator) -> float:
    from layerleap.lens.probes.cells import cells_of
    from layerleap.lens.probes.task import Softmax, features

    cells = cells_of(of, choice)
    task = cells.task.clone()
    for layer in cells.layers:
        for fold in range(3):
            here = ((cells.layer == layer) & (cells.fold == fold)).nonzero()[:, 0]
            task[here] = task[here[torch.randperm(len(here), generator=generator)]]
    cells = replace(cells, task=task)
    x = features(states, cells, "raw")
    p = torch.empty(len(cells), 3, dtype=torch.float64)
    for fold in range(3):
        out = cells.fold == fold
        p[out] = Softmax.fit(x[~out], task[~out], 3, 1.0).probabilities(x[out])
    return float(HeldOut(cells, p, of.documents[cells.row]).measures()[0])


def test_progress_counts_the_permutations():
    of = saturation(200)
    reported = []
    score_probe(
        of,
        Knowing(of),
        permutations=2,
        progress=lambda *step: reported.append(step),
    )
    assert reported == [("permuting labels", 1, 2, "times"), ("permuting labels", 2, 2, "times")]


def test_what_cannot_be_scored_is_refused():
    of = saturation(200)
    with pytest.raises(BadSettings, match="0 permutations"):
        score_probe(of, Knowing(of), permutations=0)
    with pytest.raises(BadSettings, match="strength"):
        held_out(of, Knowing(of), strength=float("nan"))
    few = saturation(20)
    with pytest.raises(BadText, match="balanced examples"):
        score_probe(few, Knowing(few))


def test_random_states_take_steps_as_long_as_the_models():
    of = saturation(200)
    states = Knowing(of, 64)
    walks = RandomStates.like(states)
    rows = torch.arange(200)
    sizes = {}
    for name, actual in {"walks": walks, "states": states}.items():
        every = [actual.cells(rows, torch.full_like(rows, layer)) for layer in range(13)]
        sizes[name] = [float((b - a).norm()) for a, b in pairwise(every)]
    assert sizes["walks"] == pytest.approx(sizes["states"], rel=0.05)
    some = torch.tensor([5, 3, 5])
    again = walks.cells(some, torch.tensor([1, 2, 3]))
    assert torch.equal(again[1], walks.cells(rows, torch.full_like(rows, 2))[3])
    assert not torch.equal(again, RandomStates.like(states, seed=1).cells(some, some))
    assert torch.equal(walks.documents, of.documents)
