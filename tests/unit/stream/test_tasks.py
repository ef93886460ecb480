"""Tasks: labelled examples from anywhere, in the tokens of a model, drawn by a seed."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

import layerleap as ll
from layerleap.errors import BadSettings, BadText, ModelRefused
from layerleap.stream.tasks import draw, encode, load, names
from layerleap.stream.tasks.draw import shuffled, still_right
from layerleap.stream.tasks.prompts import Piece
from layerleap.stream.tasks.task import Task, make_task
from layerleap.zoo.reviews import is_held_out
from tiny_models import WORDS, tiny

PAIRS = [
    (f"{a} {b}", "big" if n % 3 else "small")
    for n, (a, b) in enumerate((a, b) for a in WORDS[:6] for b in WORDS[6:14])
]
MAPPING = list(zip(WORDS, WORDS[::-1], strict=True))


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf8")
    return path


@pytest.fixture
def classes() -> Task:
    return make_task("sizes", PAIRS)


@pytest.mark.parametrize("name", [name for name in names() if name != "reviews"])
def test_bundled_tasks_have_many_examples_each_once(name):
    task = load(name)
    assert len(task.examples) >= 45
    assert len({example.text for example in task.examples}) == len(task.examples)
    assert all(example.text and example.answer for example in task.examples)
    assert task.kind == ("classes" if name == "kinds" else "mapping")


def test_bundled_facts_are_right_where_a_rule_makes_them():
    assert {e.text: e.answer for e in load("first-letter").examples}["house"] == "h"
    assert {e.text: e.answer for e in load("upper-case").examples}["house"] == "HOUSE"
    assert {e.text: e.answer for e in load("capitals").examples}["South Korea"] == "Seoul"


def test_bundled_reviews_are_short_ones_that_no_bundled_model_was_trained_on(tmp_path, monkeypatch):
    texts = [f"film number {n} is {'good' if n % 2 else 'bad'}" for n in range(200)]
    long = [f"{text} {'and so on ' * 20}" for text in texts]
    rows = [{"text": text, "label": n % 2} for n, text in enumerate(texts + long)]
    file = write(tmp_path / "reviews.jsonl", "\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(sys.modules[load.__module__], "fetch", lambda _: file)
    found = [example.text for example in load("reviews").examples]
    assert found == [text for text in texts if is_held_out(text)]
    assert 20 < len(found) < 100


def test_files_of_all_formats_give_the_same_task(tmp_path):
    rows = [{"text": text, "label": label} for text, label in PAIRS]
    jsonl = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    csv = write(tmp_path / "b.csv", "text,label\n" + "\n".join(f"{t},{a}" for t, a in PAIRS))
    tsv = write(tmp_path / "c.tsv", "text\tlabel\n" + "\n".join(f"{t}\t{a}" for t, a in PAIRS))
    tasks = [load(jsonl), load(csv), load(tsv), load(PAIRS)]
    assert len({task.digest for task in tasks}) == 1
    assert tasks[0].name == "a"
    assert tasks[0].kind == "classes"


def test_a_parquet_file_is_a_task_too(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"text": [t for t, _ in PAIRS], "label": [a for _, a in PAIRS]})
    parquet.write_table(table, tmp_path / "d.parquet")
    assert load(tmp_path / "d.parquet").digest == load(PAIRS).digest


def test_columns_and_the_words_for_labels_can_be_named(tmp_path):
    file = write(tmp_path / "a.csv", "body,class\na cat,0\na dog,1\nthe sun,0\n")
    task = load(file, field="body", label="class", labels={"0": "small", "1": "big"})
    assert [e.answer for e in task.examples] == ["small", "big", "small"]
    with pytest.raises(BadText, match="label '1', for which labels= has no word"):
        load(file, field="body", label="class", labels={"0": "small"})


def test_words_for_labels_are_for_every_source():
    pairs = [("fine", "0"), ("dull", "1"), ("so moving", "0"), ("so flat", "1")]
    words = {"0": "good", "1": "bad"}
    assert {e.answer for e in load(pairs, labels=words).examples} == {"good", "bad"}
    numbers = {int(value): word for value, word in words.items()}
    assert load(pairs, labels=numbers).examples == load(pairs, labels=words).examples
    kinds = {e.answer for e in load("kinds").examples}
    upper = load("kinds", labels={kind: kind.upper() for kind in kinds})
    assert {e.answer for e in upper.examples} == {kind.upper() for kind in kinds}
    with pytest.raises(BadText, match="labels= has no word"):
        load(pairs, labels={"0": "good"})


def test_a_task_that_is_made_already_takes_no_other_template():
    task = load([("a", "b"), ("c", "d")])
    assert load(task) is task
    with pytest.raises(BadSettings, match="template is given for a task that is made already"):
        load(task, template="{text} is")


def test_many_different_answers_make_a_mapping_unless_it_says_otherwise():
    assert load(MAPPING).kind == "mapping"
    assert load(PAIRS, kind="mapping").kind == "mapping"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text,other\na,b\n", "row 2 of .* has no label: there is no field 'label'"),
        ("text,label\na,\n", "row 2 of .* has no label .'label' is empty"),
        ("text,label\na,x\nb,x\nc,x\n", "all 3 examples of task 'a' have the answer 'x'"),
        ("text,label\n", "task 'a' has no labelled example"),
        ("text,label\na,b,c\n", "row 2 of .* has 3 fields; expected the 2"),
        ("label\nx\n", "row 2 of .* has no field 'text'"),
        ("text,label,label\na,b,c\n", "a.csv has two columns of the name 'label'; expected each"),
    ],
)
def test_a_file_without_labels_or_with_one_class_is_refused(tmp_path, text, message):
    with pytest.raises(BadText, match=message) as caught:
        load(write(tmp_path / "a.csv", text))
    assert "\n" not in str(caught.value)


def test_a_label_that_is_not_a_number_is_no_label(tmp_path):
    file = write(tmp_path / "a.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": NaN}\n')
    with pytest.raises(BadText, match=r"line 2 of .* has no label .'label' is NaN"):
        load(file)


def test_what_is_no_task_says_what_there_is(tmp_path):
    with pytest.raises(BadText, match="bundled tasks are capitals, "):
        load("./nothing")
    with pytest.raises(BadText, match="not a file of labelled examples"):
        load(write(tmp_path / "a.txt", "text"))
    with pytest.raises(BadText, match=r"item 1 is .* expected a text and its answer"):
        load([("a",)])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("template", "message"),
    [("no place", "0 places"), ("{text} {text}", "2 places"), ("{text} ", "ends with a space")],
)
def test_a_template_has_one_place_and_ends_where_the_answer_begins(template, message):
    with pytest.raises(BadSettings, match=message):
        load(PAIRS, template=template)


def test_a_query_has_the_same_tokens_alone_and_after_demonstrations(classes):
    encoded = encode(tiny("llama"), classes)
    drawn = draw(encoded, demonstrations=4, queries=5)
    for piece in drawn.queries:
        alone, after = (
            encoded.start + piece.prompt,
            encoded.context(drawn.demonstrations) + piece.prompt,
        )
        assert after[-len(piece.prompt) :] == alone[1:] == piece.prompt
        assert alone[0] == after[0] == encoded.demonstration(piece)[0] == 1  # the first token
        assert encoded.demonstration(piece)[-1:] == piece.answer


def test_the_first_token_is_left_out_if_asked(classes):
    assert encode(tiny("llama"), classes, bos=False).start == ()


def test_a_label_of_several_tokens_is_an_error_unless_sequences_are_scored():
    task = load([(text, "very big" if answer == "big" else answer) for text, answer in PAIRS])
    with pytest.raises(BadText, match="label 'very big' of task 'pairs' has 2 tokens") as caught:
        encode(tiny("llama"), task)
    assert "answers='sequence'" in str(caught.value)
    assert len(encode(tiny("llama"), task, answers="sequence").labels["very big"]) == 2


def test_a_mapping_leaves_out_answers_of_several_tokens():
    pairs = [(a, f"{b} {b}" if n % 2 else b) for n, (a, b) in enumerate(MAPPING)]
    encoded = encode(tiny("llama"), load(pairs))
    assert all(len(piece.answer) == 1 for piece in encoded.pieces)
    assert encoded.left_out == len(pairs) // 2
    with pytest.raises(BadText, match=r"0 of .* answers of task 'pairs' are one token"):
        encode(tiny("llama"), load([(a, f"{b} {b}") for a, b in MAPPING]))


def test_demonstrations_that_do_not_fit_say_how_many_do(classes):
    model = tiny("llama")  # reads 64 tokens
    encoded = encode(model, classes)
    drawn = draw(encoded, demonstrations=20, queries=5)
    fit = encoded.fitting(drawn.demonstrations, drawn.queries)
    length = len(encoded.context(drawn.demonstrations[:fit])) + len(drawn.queries[0].prompt) + 1
    assert length <= 64 < length + 4
    with pytest.raises(BadText, match=f"more than the 64 tokens .* at most {fit} fit"):
        encoded.require_fit(drawn.demonstrations, drawn.queries)
    encoded.require_fit(drawn.demonstrations[:fit], drawn.queries)


def test_the_longest_label_has_to_fit_after_every_query():
    """All labels of a class are scored, also those that are not the answer."""
    words = [f"{a} {b}" for a in WORDS[:6] for b in WORDS[6:10]]
    pairs = [(text, "big" if n % 2 else "big " * 20) for n, text in enumerate(words)]
    encoded = encode(tiny("llama"), load(pairs, kind="classes"), answers="sequence")
    short = [piece for piece in encoded.pieces if len(piece.answer) == 1]
    room = 64 - len(short[0].prompt) - 20
    fit = encoded.fitting(short[:12], short[:1])
    assert len(encoded.context(short[:fit])) <= room < len(encoded.context(short[: fit + 1]))


def test_a_masked_model_is_refused(classes):
    with pytest.raises(ModelRefused, match="is a masked model; learning in context needs a dec"):
        encode(tiny("bert"), classes)


def test_draws_are_disjoint_and_decided_by_the_seed(classes):
    encoded = encode(tiny("llama"), classes)
    one = draw(encoded, 3, demonstrations=6, queries=10, search=5)
    assert one == draw(encoded, 3, demonstrations=6, queries=10, search=5)
    assert one != draw(encoded, 4, demonstrations=6, queries=10, search=5)
    numbers = [p.number for role in (one.demonstrations, one.queries, one.search) for p in role]
    assert len(set(numbers)) == len(numbers) == 21


def test_no_seed_measures_queries_that_settings_were_chosen_on(classes):
    encoded = encode(tiny("llama"), classes)
    drawn = [draw(encoded, seed, demonstrations=6, queries=30, search=8) for seed in range(5)]
    assert len({one.search for one in drawn}) == 1
    chosen_on = {piece.number for piece in drawn[0].search}
    for one in drawn:
        assert chosen_on.isdisjoint(p.number for p in (*one.demonstrations, *one.queries))


def test_fewer_demonstrations_are_the_first_of_more(classes):
    encoded = encode(tiny("llama"), classes)
    more, fewer = (draw(encoded, 1, demonstrations=n, queries=4) for n in (8, 3))
    assert more.demonstrations[:3] == fewer.demonstrations


def test_demonstrations_of_classes_are_balanced(classes):
    encoded = encode(tiny("llama"), classes)
    drawn = draw(encoded, 0, demonstrations=6, queries=4)
    assert set(Counter(p.label for p in drawn.demonstrations).values()) == {3}


def test_shuffled_answers_are_the_same_answers_for_the_same_texts():
    encoded = encode(tiny("llama"), load(MAPPING))
    drawn = draw(encoded, 0, demonstrations=8, queries=4)
    for n in (None, 5):
        shown, dealt = drawn.demonstrations[:n], drawn.shuffled(n)
        assert [p.prompt for p in dealt] == [p.prompt for p in shown]
        assert Counter(p.answer for p in dealt) == Counter(p.answer for p in shown)
        assert dealt == drawn.shuffled(n)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 12])
def test_no_answer_of_a_mapping_stays_right_after_shuffling_any_number_of_demonstrations(n):
    encoded = encode(tiny("llama"), load(MAPPING))
    for seed in range(10):
        drawn = draw(encoded, seed, demonstrations=12, queries=4)
        assert still_right(drawn.demonstrations[:n], drawn.shuffled(n)) == 0


@pytest.mark.parametrize(
    ("labels", "least"), [("aabc", 0), ("aaab", 2), ("aab", 1), ("aabbccc", 0)]
)
def test_answers_that_occur_often_stay_right_as_seldom_as_possible(labels, least):
    pieces = [Piece(n, (n,), (ord(label),), label) for n, label in enumerate(labels)]
    for seed in range(5):
        assert still_right(pieces, shuffled(pieces, seed, "mapping")) == least / len(labels)


@pytest.mark.parametrize(("n", "right"), [(2, 0), (3, 1), (4, 2), (6, 2), (8, 4), (16, 8)])
def test_as_many_classes_stay_right_after_shuffling_as_by_chance(classes, n, right):
    encoded = encode(tiny("llama"), classes)
    for seed in range(10):
        drawn = draw(encoded, seed, demonstrations=16, queries=4)
        assert still_right(drawn.demonstrations[:n], drawn.shuffled(n)) == right / n


def test_more_demonstrations_follow_the_same_ones_and_are_no_queries(classes):
    drawn = draw(encode(tiny("llama"), classes), 2, demonstrations=4, queries=20, search=4)
    more = drawn.extended(queries=8, demonstrations=10)
    assert more.demonstrations[:4] == drawn.demonstrations
    assert (len(more.demonstrations), more.queries) == (10, drawn.queries[:8])
    numbers = [p.number for p in (*more.demonstrations, *more.queries, *more.search)]
    assert len(numbers) == len(set(numbers))


def test_a_small_task_gives_fewer_queries_and_too_small_a_one_is_refused(classes):
    encoded = encode(tiny("llama"), classes)
    drawn = draw(encoded, 0, demonstrations=30, queries=100, search=20)
    assert len(drawn.queries) + len(drawn.search) == len(PAIRS) - 30
    assert len(drawn.queries) > len(drawn.search) >= 2
    with pytest.raises(BadText, match=r"48 examples .* 47 demonstrations and queries need 49"):
        draw(encoded, 0, demonstrations=47, queries=4)


def test_tasks_are_a_namespace():
    assert ll.tasks.load("plurals").name == "plurals"
    assert "reviews" in ll.tasks.names()
    assert repr(ll.tasks.load("kinds")) == "Task(kinds: 160 examples, 5 classes, '{text} ->')"
