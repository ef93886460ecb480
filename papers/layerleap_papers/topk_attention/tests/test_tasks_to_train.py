"""Tasks for training from scratch: made by recipes, and learned by a small encoder."""

import json
import random
from dataclasses import replace

import pytest
import torch

from layerleap.act.topk.interface import topk_attention
from layerleap.errors import BadSettings, BadText
from layerleap.zoo.reviews import is_held_out
from layerleap_papers.topk_attention import runs
from layerleap_papers.topk_attention.runs import EncoderSettings, scores, train_encoder
from layerleap_papers.topk_attention.tasks import (
    PAD,
    START,
    ListOpsSettings,
    Rows,
    Task,
    byte_reviews,
    expression,
    listops,
    written,
)

SMALL = ListOpsSettings(n_fitted=300, n_held_out=60, shortest=5, longest=30, depth=3, arguments=4)
QUICK = EncoderSettings(layers=1, d_model=16, heads=2, steps=12, batch=8, points=3)


def value(text: str) -> int:
    """An expression evaluated by a stack, word by word."""
    stack: list = []
    for word in text.split():
        if word != "]":
            stack.append(word if word.startswith("[") else int(word))
            continue
        values: list[int] = []
        while isinstance(stack[-1], int):
            values.append(stack.pop())
        values.sort()
        n = len(values)
        middle = (values[(n - 1) // 2] + values[n // 2]) // 2
        results = {"[MIN": values[0], "[MAX": values[-1], "[MED": middle, "[SM": sum(values) % 10}
        stack.append(results[stack.pop()])
    (result,) = stack
    return result


def texts(rows: Rows) -> list[str]:
    return [written([s - 2 for s in row if s != PAD][1:]) for row in rows.ids.tolist()]


def test_the_class_of_an_expression_is_its_value():
    task = listops(SMALL)
    for rows in (task.fitted, task.held_out):
        assert [value(text) for text in texts(rows)] == rows.labels.tolist()
    assert value("[MAX 4 [SM 9 3 7 ] 2 ]") == 9
    assert value("[MED 1 2 8 9 ]") == 5


def test_expressions_are_different_bounded_and_nested():
    task = listops(SMALL)
    every = texts(task.fitted) + texts(task.held_out)
    assert len(set(every)) == len(every) == 360
    assert all(5 <= len(text.split()) <= 30 for text in every)
    assert max(text.count("[") for text in every) > 2
    assert (task.fitted.ids[:, 0] == START).all()
    assert int(task.fitted.ids.max()) < task.symbols == 17
    assert task.classes == 10
    assert {len(expression(random.Random(n), 1, 3)[0]) for n in range(50)} == {4, 5}


def test_the_same_settings_give_the_same_task_and_another_seed_does_not():
    again = listops(SMALL)
    assert torch.equal(listops(SMALL).fitted.ids, again.fitted.ids)
    other = listops(ListOpsSettings(**{**vars(SMALL), "seed": 1}))
    assert texts(other.fitted) != texts(again.fitted)


def test_too_few_different_expressions_are_refused():
    with pytest.raises(BadSettings, match="different expressions of 4 to 4 symbols"):
        listops(ListOpsSettings(n_fitted=500, n_held_out=5, shortest=4, longest=4, depth=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"depth": 0}, "depth is 0"), ({"longest": 3}, "longest is 3"), ({"n_fitted": 0}, "n_fitted")],
)
def test_sizes_that_make_no_sense_are_refused(change, message):
    with pytest.raises(BadSettings, match=message):
        ListOpsSettings(**change)


@pytest.fixture
def reviews(tmp_path):
    rng = random.Random(0)
    rows = [
        {"text": f"{n} \u00e9 {'good' if n % 2 else 'bad'} {rng.random()}", "label": n % 2}
        for n in range(120)
    ]
    path = tmp_path / "reviews.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), "utf8")
    return path


def test_reviews_become_their_last_bytes_and_keep_their_side(reviews):
    task = byte_reviews(reviews, n_fitted=40, n_held_out=10, longest=14)
    assert (len(task.fitted), len(task.held_out), task.longest) == (40, 10, 15)
    by_end = {}
    for line in reviews.read_text("utf8").splitlines():
        record = json.loads(line)
        end = record["text"].encode()[-14:]
        by_end[end] = (is_held_out(record["text"]), record["label"])
    for is_held, rows in ((False, task.fitted), (True, task.held_out)):
        for row, label in zip(rows.ids.tolist(), rows.labels.tolist(), strict=True):
            end = bytes(symbol - 2 for symbol in row[1:] if symbol != PAD)
            assert by_end[end] == (is_held, label)


def test_reviews_with_the_same_end_are_on_one_side_and_count_once(tmp_path):
    rows = [{"text": f"{n} in short: bad.", "label": 0} for n in range(60)]
    rows += [{"text": f"number {n}", "label": 1} for n in range(60)]
    path = tmp_path / "reviews.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), "utf8")
    task = byte_reviews(path, n_fitted=99, n_held_out=99, longest=9)
    sides = [[tuple(row) for row in side.ids.tolist()] for side in (task.fitted, task.held_out)]
    assert len(set(sides[0] + sides[1])) == len(sides[0]) + len(sides[1]) == 61
    assert task.fitted.labels.tolist().count(0) == 1
    assert 0 not in task.held_out.labels.tolist()


def test_a_file_without_a_held_out_review_is_refused(tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"text": "only one", "label": 0}), "utf8")
    with pytest.raises(BadText, match="has no reviews to"):
        byte_reviews(path)


def made_task() -> Task:
    """Is the second symbol 5 or 6?"""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 9, (240, 6), generator=generator)
    ids[:, 0], labels = START, torch.arange(240) % 2
    ids[:, 1] = 5 + labels
    return Task("made", 9, 2, Rows(ids[:200], labels[:200]), Rows(ids[200:], labels[200:]))


def test_an_encoder_learns_and_its_curve_is_the_same_again():
    settings = EncoderSettings(layers=1, d_model=16, heads=2, steps=80, batch=16, rate=1e-2)
    task, state = made_task(), torch.get_rng_state()
    model, curve = train_encoder(task, "sdpa", settings, seed=0)
    assert [point["step"] for point in curve] == [13, 26, 39, 52, 65, 78, 80]
    assert curve[-1]["accuracy"] > 0.9 > task.chance
    assert scores(model, task.held_out) == {k: curve[-1][k] for k in ("loss", "accuracy")}
    assert train_encoder(task, "sdpa", settings, seed=0)[1] == curve
    assert train_encoder(task, "sdpa", settings, seed=1)[1] != curve
    assert torch.equal(torch.get_rng_state(), state)


def test_with_k_at_the_length_training_is_that_of_exact_attention():
    task = listops(SMALL)
    exact = train_encoder(task, "sdpa", QUICK, seed=3)[1]
    top = train_encoder(task, topk_attention(k=task.longest), QUICK, seed=3)[1]
    for one, other in zip(exact, top, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-4)
    sparse = train_encoder(task, topk_attention(k=2), QUICK, seed=3)[1]
    assert sparse != exact


def test_both_kinds_of_attention_start_from_the_same_weights_and_see_the_same_batches(monkeypatch):
    seen, batches = [], runs._batches

    def watched(rows, settings, seed):
        seen.append([])
        for batch in batches(rows, settings, seed):
            seen[-1].append(batch.tolist())
            yield batch

    monkeypatch.setattr(runs, "_batches", watched)
    still = replace(QUICK, rate=0.0)  # so that the weights at the end are those at the beginning
    exact, sparse = (
        train_encoder(made_task(), name, still, seed=5)[0].state_dict()
        for name in ("sdpa", topk_attention(k=2))
    )
    assert all(torch.equal(exact[name], sparse[name]) for name in exact)
    assert seen[0] == seen[1]
    assert len(seen[0]) == still.steps
