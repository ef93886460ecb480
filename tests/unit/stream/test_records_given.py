"""Texts as users have them at hand: data sets and other iterables of records."""

from collections.abc import Iterator

import datasets
import pandas
import pytest

import layerleap as ll
from layerleap.errors import BadText, WrongModel
from layerleap.stream.documents import iter_documents
from layerleap.stream.text_pairs import iter_pairs
from tiny_models import sentences, tiny

TEXTS = sentences(24)
RECORDS = [{"title": f"T{n}", "body": text, "label": n} for n, text in enumerate(TEXTS)]
SAMPLING = ll.Sampling(unit="document", positions="all", field="body")


def in_every_form() -> dict[str, object]:
    whole = datasets.Dataset.from_list(RECORDS)
    return {
        "a data set": whole,
        "a streamed data set": whole.to_iterable_dataset(),
        "a list of records": RECORDS,
        "a generator of records": iter(RECORDS),
        "rows of a data frame": pandas.DataFrame(RECORDS).to_dict("records"),
        "a column": whole["body"],
        "a list of strings": TEXTS,
        "a series": pandas.Series(TEXTS),
    }


def test_every_iterable_of_texts_or_records_gives_the_same_documents():
    for form, source in in_every_form().items():
        assert [one.text for one in iter_documents(source, field="body")] == TEXTS, form
    assert next(iter_documents(RECORDS, field="body")).name == "T0 [text#1]"


def test_a_bank_is_the_same_whatever_its_text_came_as(recwarn):
    model = tiny()
    forms = in_every_form()
    wanted = ll.fit(model, forms.pop("a list of strings"), SAMPLING, progress=False)
    for form in ("a data set", "a streamed data set", "a generator of records"):
        bank = ll.fit(model, forms[form], SAMPLING, progress=False)
        assert bank.data["fingerprint"] == wanted.data["fingerprint"], form
    scores = ll.evaluate(model, wanted, forms["a data set"], SAMPLING, progress=False)
    assert scores.n_documents > 1


def test_what_is_no_text_is_refused_in_words():
    both = datasets.DatasetDict(train=datasets.Dataset.from_list(RECORDS))
    for source, said in (
        (both, r"from a DatasetDict as a whole; choose one of its parts \('train'\)"),
        (
            pandas.DataFrame(RECORDS),
            r"a DataFrame is read column by column; .*to_dict\('records'\)",
        ),
        ([{"body": 3}], r"item 1: 'body' has type int; expected a string"),
        ([*RECORDS, {"text": "the cat"}], r"item 25 has no field 'body'; it has text"),
        ([5], r"item 1 has type int; expected a string or a dictionary"),
        (7, r"cannot be read from a int"),
    ):
        with pytest.raises(BadText, match=said):
            list(iter_documents(source, field="body"))


def test_an_iterator_is_read_once_and_a_second_pass_says_so():
    once = iter(RECORDS)
    assert len(list(iter_documents(once, field="body"))) == len(RECORDS)
    with pytest.raises(BadText, match=r"the list_iterator .which can be read only once. contains"):
        list(iter_documents(once, field="body"))


def test_a_fit_on_an_iterator_resumes_only_on_the_same_text(tmp_path, recwarn):
    model, file = tiny(), tmp_path / "fit.safetensors"

    def broken() -> Iterator[dict[str, object]]:
        yield from RECORDS[:20]
        raise KeyboardInterrupt

    options = {"progress": False, "tokens_per_batch": 64, "checkpoint": file}
    whole = ll.stats.collect(model, RECORDS, SAMPLING, tokens_per_batch=64)
    partial = ll.stats.collect(model, RECORDS[:12], SAMPLING, tokens_per_batch=64)
    assert partial.digest != whole.digest
    with pytest.raises(KeyboardInterrupt):
        ll.fit(model, broken(), SAMPLING, **options)
    resumed = ll.fit(model, iter(RECORDS), SAMPLING, **options)  # again from the beginning
    assert resumed.data["fingerprint"] == whole.about["data"]["fingerprint"]
    with pytest.raises(WrongModel, match="the text has changed since the checkpoint"):
        ll.fit(model, iter(RECORDS[1:]), SAMPLING, **options)
    with pytest.raises(BadText, match="which can be read only once"):
        ll.fit(model, iter([]), SAMPLING, **options)


def test_pairs_may_be_records():
    records = [{"question": "the cat", "answer": "a dog"}]
    (pair,) = iter_pairs(records, field="question:answer")
    assert (pair.text, pair.target) == ("the cat", "a dog")
    with pytest.raises(BadText, match="item 1 has no field 'source'; it has question, answer"):
        list(iter_pairs(records))
