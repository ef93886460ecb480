import gzip
import io
import json
import sys
from pathlib import Path

import pytest

from layerleap.errors import BadSettings, BadText, CannotFetch
from layerleap.stream.documents import Document, iter_documents
from layerleap.stream.generated import bundled_reactions
from layerleap.stream.split import is_held_out, iter_texts


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch, request):
    if "real" not in request.keywords:
        monkeypatch.setenv("LAYERLEAP_CACHE", str(tmp_path / "cache"))


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf8")
    return path


def texts(source, **options):
    return [document.text for document in iter_documents(source, **options)]


def sentences(text, per_document=None, seed=0, unit="sentence"):
    return list(iter_texts(Document("d", text), unit, per_document=per_document, seed=seed))


def test_blank_lines_separate_the_documents_of_a_text_file(tmp_path):
    file = write(tmp_path / "a.txt", "one\ntwo\n\n \nthree\n")
    assert texts(file) == ["one\ntwo", "three"]


def test_a_text_file_without_blank_lines_has_one_document_per_line(tmp_path):
    assert texts(write(tmp_path / "a.log", "one\ntwo\n\n")) == ["one", "two"]


def test_a_byte_order_mark_and_windows_line_ends_are_not_text(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffone\r\n\r\ntwo\r\n".encode())
    assert texts(file) == ["one", "two"]


def test_json_lines_are_read_with_the_chosen_field_and_null_is_left_out(tmp_path):
    rows = [{"text": "x", "body": "one"}, {"body": None}, {"body": "two", "title": "T"}]
    file = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert texts(file, field="body") == ["one", "two"]


def test_gzipped_files_read_like_plain_ones(tmp_path):
    (tmp_path / "a.ndjson.gz").write_bytes(gzip.compress(b'{"text": "one"}\n'))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"two\n\nthree"))
    assert texts(tmp_path) == ["one", "two", "three"]


def test_parquet_gives_its_text_column(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"id": list(range(600)), "text": [f"row {i}" for i in range(600)]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == [f"row {i}" for i in range(600)]
    with pytest.raises(BadText, match="has no field 'body'; it has id, text"):
        texts(tmp_path / "a.parquet", field="body")


def test_a_broken_parquet_file_is_one_clear_line(tmp_path):
    pytest.importorskip("pyarrow")
    with pytest.raises(BadText, match="not a readable parquet file") as caught:
        texts(write(tmp_path / "a.parquet", "no parquet at all"))
    assert "\n" not in str(caught.value)


def test_a_folder_is_read_in_sorted_order_without_hidden_and_foreign_files(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "b.md", "two")
    write(tmp_path / "a.TXT", "one")
    write(tmp_path / ".hidden.txt", "no")
    write(tmp_path / "picture.png", "no")
    assert texts(tmp_path) == ["one", "two"]


def test_documents_of_a_folder_are_named_uniquely_and_independently_of_its_location(tmp_path):
    names = []
    for place in ("here", "there"):
        folder = tmp_path / place
        folder.mkdir()
        for file in ("a.jsonl", "b.jsonl"):
            write(folder / file, '{"text": "x", "title": "same"}\n' * 2)
        names.append([document.name for document in iter_documents(folder)])
    assert names[0] == names[1]
    assert len(set(names[0])) == 4


def test_strings_are_documents_and_other_things_are_refused():
    assert texts(["one", " ", "two "]) == ["one", "two"]
    with pytest.raises(BadText, match="item 2 has type int"):
        texts(["one", 2])


def test_a_dash_is_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\n\ntwo\n")))
    assert texts("-") == ["one", "two"]


def test_strings_are_read_one_at_a_time():
    def endless():
        while True:
            yield "again"

    documents = iter_documents(endless())
    assert [next(documents).name for _ in range(3)] == ["text#1", "text#2", "text#3"]


def test_a_long_file_is_read_as_a_stream(tmp_path):
    file = write(tmp_path / "a.txt", "word " * 20_000 + "\n\n" + "second\n\n" + "\x00")
    documents = iter_documents(file)
    next(documents)
    assert next(documents).text == "second"  # the broken end has not been met yet
    with pytest.raises(BadText, match="binary"):
        next(documents)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b" \n \n", "contains no text"),
        ("a.txt", b"caf\xe9 au lait", "not UTF-8 text .it contains the byte 0xe9"),
        ("a.bin", b"ab\0cd", "looks like a binary file"),
        ("a.jsonl", b'{"text": "x"}\n{"text"\n', "line 2 of .* is not valid JSON"),
        ("a.jsonl", b'["x"]\n', "line 1 of .* is not a JSON object"),
        (
            "a.jsonl",
            b'{"body": "x", "id": 1}\n',
            "has no field 'text'; it has body, id: choose one of them .--field",
        ),
        ("a.jsonl", b'{"text": 3}\n', "'text' has type int"),
        ("a.txt.gz", b"not gzip", "cannot be read"),
        ("a.txt.gz", gzip.compress(b"x" * 999, mtime=0)[:-9], "cannot be read"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadText, match=message) as caught:
        texts(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused_at_once_with_the_names_that_exist(tmp_path):
    for source in (tmp_path / "no", str(tmp_path / "no.txt"), "no.jsonl", "two words"):
        with pytest.raises(BadText, match="bundled texts are wikipedia, news"):
            iter_documents(source)


def test_a_folder_without_texts_is_refused_at_once(tmp_path):
    with pytest.raises(BadText, match="contains no text file"):
        iter_documents(tmp_path)


def test_an_unreachable_data_set_is_one_clear_line(monkeypatch):
    pytest.importorskip("datasets")
    import huggingface_hub

    def unreachable(self, *args, **options):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    with pytest.raises(CannotFetch, match="neither a file nor one of wikipedia, news") as caught:
        texts("some/name:config:train")
    assert "no route" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_data_set_is_streamed_with_its_config_and_split(monkeypatch):
    datasets = pytest.importorskip("datasets")
    import huggingface_hub

    calls = []

    def load(*args, **options):
        calls.append((args, options))
        return iter([{"text": "one"}, {"text": "two"}])

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert texts("org/name:en:test") == ["one", "two"]
    assert texts("org/name") == ["one", "two"]
    assert calls == [
        (("org/name", "en"), {"split": "test", "streaming": True}),
        (("org/name", None), {"split": "train", "streaming": True}),
    ]


def test_a_missing_library_is_named_with_the_extra_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CannotFetch, match=r'pip install "layerleap\[data\]"'):
        texts("org/name")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(CannotFetch, match="pyarrow"):
        texts(write(tmp_path / "a.parquet", "x"))


def test_sentences_end_at_marks_and_not_at_abbreviations_or_initials():
    text = (
        'Dr. A. N. Smith met Gen. Lee in the U.S. Senate. He said: "That is all." The vote was '
        "no. 5 of 10. It cost 3.5 million! Was it so? 1945 was the year. Yes.\n\nA new paragraph "
        "without a mark\n\nThey lived in the U.S. The end came soon."
    )
    assert sorted(sentences(text), key=text.index) == [
        "Dr. A. N. Smith met Gen. Lee in the U.S. Senate.",
        'He said: "That is all."',
        "The vote was no. 5 of 10.",
        "It cost 3.5 million!",
        "Was it so?",
        "1945 was the year.",
        "A new paragraph without a mark",
        "They lived in the U.S.",
        "The end came soon.",
    ]


def test_texts_can_be_paragraphs_or_documents():
    assert sorted(sentences("one\nline\n \ntwo\n\n\n", unit="paragraph")) == ["one\nline", "two"]
    assert sentences("one\n\ntwo", unit="document") == ["one\n\ntwo"]


def test_texts_come_in_a_random_order_that_is_fixed_by_seed_and_text():
    text = "\n\n".join(f"This is sentence {i:03d}." for i in range(100))
    shuffled = sentences(text, seed=1)
    assert shuffled == sentences(text, seed=1) != sentences(text, seed=2)
    assert sorted(shuffled) == [f"This is sentence {i:03d}." for i in range(100)]
    assert shuffled != sorted(shuffled)


def test_the_first_texts_are_a_sample_of_the_whole_document_and_not_its_lead():
    firsts = []
    for number in range(200):
        text = "\n\n".join(f"This is sentence {i} of {number}." for i in range(50))
        (first,) = sentences(text, per_document=1)
        firsts.append(int(first.split()[3]))
    assert 20 < sum(firsts) / len(firsts) < 29  # the middle is 24.5
    assert len(set(firsts)) > 40


def test_fewer_texts_per_document_are_the_first_of_more():
    text = "\n\n".join(f"This is sentence {i:03d}." for i in range(100))
    assert sentences(text, per_document=10, seed=1) == sentences(text, seed=1)[:10]
    assert sentences(text, per_document=200) == sentences(text)


def test_bad_settings_of_texts_and_sides_are_refused():
    for options in ({"unit": "word"}, {"per_document": 0}):
        with pytest.raises(BadSettings):
            sentences("Some text is here.", **options)
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(BadSettings):
            is_held_out(Document("a", "b"), share=share, seed=0)


def test_the_held_out_side_is_a_property_of_the_document_and_the_seed():
    documents = [Document(f"d{i}", f"text {i}") for i in range(2000)]
    sides = [is_held_out(d, share=0.25, seed=3) for d in documents]
    assert sides == [is_held_out(d, share=0.25, seed=3) for d in reversed(documents)][::-1]
    assert 0.22 < sum(sides) / len(sides) < 0.28
    assert sides != [is_held_out(d, share=0.25, seed=4) for d in documents]
    assert not any(is_held_out(d, share=0.0, seed=3) for d in documents)


def test_a_larger_held_out_share_keeps_what_the_smaller_held_out():
    documents = [Document(f"d{i}", "x") for i in range(300)]
    for document in documents:
        if is_held_out(document, share=0.1, seed=0):
            assert is_held_out(document, share=0.3, seed=0)


def test_unpaired_surrogates_do_not_stop_the_split():
    assert isinstance(is_held_out(Document("a", "\ud800"), share=0.5, seed=0), bool)


def test_reactions_are_distinct_and_closed():
    smiles = bundled_reactions()
    assert len(set(smiles)) == len(smiles) >= 45
    for text in smiles:
        assert text.count(">>") == 1
        assert text.count("(") == text.count(")")


@pytest.mark.real
@pytest.mark.parametrize(("name", "fewest"), [("wikipedia", 90), ("news", 290), ("enwik8", 4000)])
def test_bundled_texts_are_clean_prose_with_unique_names(name, fewest):
    documents = list(iter_documents(name))
    assert len(documents) >= fewest
    assert len({d.name for d in documents}) == len(documents) == len({d.text for d in documents})
    for document in documents:
        for leftover in ("{{", "}}", "[[", "]]", "<ref", "()", "''", "|", "http://"):
            assert leftover not in document.text, (document.name, leftover)


@pytest.mark.real
def test_reactions_are_known_to_the_masked_model_token_by_token():
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    from layerleap.zoo import fetch

    folder = fetch("rxnmapper")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    right = total = 0
    for smiles in bundled_reactions()[:8]:
        ids = tokenizer(smiles, return_tensors="pt")["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids[0], skip_special_tokens=True) == smiles
        place = torch.arange(ids.shape[1] - 2)
        masked = ids.repeat(len(place), 1)
        masked[place, place + 1] = tokenizer.mask_token_id
        with torch.inference_mode():
            guess = model(input_ids=masked).logits[place, place + 1].argmax(-1)
        right += int((guess == ids[0, 1:-1]).sum())
        total += len(place)
    assert right / total > 0.9
