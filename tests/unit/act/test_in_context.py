"""Accuracy in context: the same as asking one query at a time, with controls."""

import pytest
import torch

from layerleap.act.learning.accuracy import in_context
from layerleap.act.learning.answers import right_answers
from layerleap.errors import BadSettings, BadText, ModelRefused
from layerleap.stream.tasks import draw, encode, load
from tiny_models import WORDS, tiny

CLASSES = [
    (f"{a} {b}", "big" if n % 2 else "small")
    for n, (a, b) in enumerate((a, b) for a in WORDS[:6] for b in WORDS[6:14])
]
MAPPING = list(zip(WORDS, WORDS[::-1], strict=True))
LONG = [(text, "very big" if answer == "big" else answer) for text, answer in CLASSES]


def log_p(model, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)


def answered_one_by_one(model, encoded, context, piece) -> bool:
    """Without batches, caches or a shared beginning."""
    start = [*context, *piece.prompt]

    def score(answer: tuple[int, ...]) -> float:
        rows = log_p(model, [*start, *answer])[len(start) - 1 :]
        return float(sum(rows[n, token] for n, token in enumerate(answer)))

    if encoded.task.kind == "classes":
        return max(encoded.labels, key=lambda label: score(encoded.labels[label])) == piece.label
    tops = log_p(model, [*start, *piece.answer])[len(start) - 1 :].argmax(-1).tolist()
    return tuple(tops[: len(piece.answer)]) == piece.answer


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("pairs", "answers"), [(CLASSES, "token"), (MAPPING, "token"), (LONG, "sequence")]
)
def test_answers_are_those_of_one_query_at_a_time(family, pairs, answers):
    model = tiny(family, seed=3)
    encoded = encode(model, load(pairs), answers=answers)
    drawn = draw(encoded, 1, demonstrations=4, queries=15)
    for context in (encoded.start, encoded.context(drawn.demonstrations)):
        right = right_answers(model, encoded, context, drawn.queries).tolist()
        naive = [answered_one_by_one(model, encoded, context, one) for one in drawn.queries]
        assert right == naive


def test_a_mapping_of_several_tokens_is_right_if_all_of_them_are():
    model = tiny("llama", seed=3)
    encoded = encode(model, load([(a, f"{b} {a}") for a, b in MAPPING]), answers="sequence")
    piece = encoded.pieces[0]
    start = [*encoded.start, *piece.prompt]
    first = int(log_p(model, start)[-1].argmax())
    second = int(log_p(model, [*start, first])[-1].argmax())
    from dataclasses import replace

    queries = [replace(piece, answer=(first, second)), replace(piece, answer=(first, second + 1))]
    assert right_answers(model, encoded, encoded.start, queries).tolist() == [True, False]


def test_the_table_has_all_conditions_and_intervals():
    result = in_context(tiny("llama"), CLASSES, seeds=(0, 1), queries=10, progress=False)
    assert result.shots == (0, 1, 2, 4, 8)  # 16 do not fit into 64 tokens
    rows = {(row["answers"], row["shots"]): row for row in result.table}
    assert {("true", 0), ("shuffled", 2), ("majority", None), ("copy", None)} <= rows.keys()
    assert ("shuffled", 1) not in rows  # one answer cannot be shuffled
    for row in rows.values():
        assert row["low"] <= row["value"] <= row["high"]
        assert (row["rows"], row["seeds"]) == (20, 2)
    assert result.to_dict()["works"] == result.works()
    assert len(result.to_pandas()) == len(rows)


def test_learning_needs_a_lead_over_every_baseline():
    result = in_context(tiny("llama"), CLASSES, shots=[0, 2], seeds=[0], queries=20, progress=False)
    always, never = [torch.ones(20, dtype=torch.bool)], [torch.zeros(20, dtype=torch.bool)]
    result.right["true", 2] = always
    result.right["true", 0] = result.baselines["majority"] = result.baselines["copy"] = never
    assert result.works()
    assert result.lead("zero-shot")["value"] == 1
    result.baselines["majority"] = always
    assert not result.works()


def test_learning_is_not_shown_without_a_measurement_of_no_demonstrations():
    result = in_context(tiny("llama"), CLASSES, shots=[2], seeds=[0], queries=20, progress=False)
    assert result.shots == (0, 2)
    assert result.lead("zero-shot") is not None
    result.right["true", 2] = [torch.ones(20, dtype=torch.bool)]
    never = [torch.zeros(20, dtype=torch.bool)]
    result.right["true", 0] = result.baselines["majority"] = result.baselines["copy"] = never
    assert result.works()
    del result.right["true", 0]
    assert not result.works()


def test_it_uses_the_same_demonstrations_each_time():
    one, two = (in_context(tiny("llama"), MAPPING, shots=[3], progress=False) for _ in range(2))
    assert all(
        torch.equal(a, b) for a, b in zip(one.right["true", 3], two.right["true", 3], strict=True)
    )


def test_what_cannot_be_asked_is_one_sentence():
    with pytest.raises(BadText, match=r"20 demonstrations .* at most \d+ fit"):
        in_context(tiny("llama"), CLASSES, shots=[20], progress=False)
    with pytest.raises(ModelRefused, match="is a masked model"):
        in_context(tiny("bert"), CLASSES, progress=False)
    with pytest.raises(BadSettings, match="expected one or more numbers from 0 on"):
        in_context(tiny("llama"), CLASSES, shots=[-1], progress=False)
    with pytest.raises(BadSettings, match="no seeds given"):
        in_context(tiny("llama"), CLASSES, seeds=(), progress=False)
    with pytest.raises(BadSettings, match="queries is 0; expected 2 or more"):
        in_context(tiny("llama"), CLASSES, queries=0, progress=False)


def test_what_was_not_measured_is_an_error_that_lists_what_was():
    result = in_context(tiny("llama"), CLASSES, shots=[2, 4], seeds=[0], queries=8, progress=False)
    with pytest.raises(BadSettings, match="shots is 5; with true answers, 0, 2, 4 were measured"):
        result.works(5)
    with pytest.raises(BadSettings, match="shots is 5; with true answers, 0, 2, 4 were measured"):
        result.accuracy("true", 5)
    with pytest.raises(BadSettings, match="shots is 0; with shuffled answers, 2, 4 were measured"):
        result.accuracy("shuffled", 0)
    with pytest.raises(BadSettings, match="over is 'chance'; expected one of 'zero-shot', 'maj"):
        result.lead("chance")
    with pytest.raises(BadSettings, match="answers is 'false'; expected one of 'true', 'shuffled'"):
        result.accuracy("false", 2)


def test_the_table_says_how_many_shuffled_answers_are_still_right():
    for task, share in ((CLASSES, 0.5), (MAPPING, 0.0)):
        result = in_context(tiny("llama"), task, shots=[4], queries=8, progress=False)
        (row,) = [row for row in result.table if row["answers"] == "shuffled"]
        assert row["still_right"] == share
