from functools import cache

import pytest
import torch

from families import build
from layerleap.errors import BadSettings, BadText
from layerleap.models.transformer import Transformer
from layerleap.stream.batches import batches_of
from layerleap.stream.documents import iter_documents
from layerleap.stream.examples import (
    Batch,
    Example,
    Sampling,
    TextCounts,
    collate,
    iter_batches,
    iter_examples,
)
from layerleap.stream.split import is_held_out
from tiny_models import WORDS, sentences, tiny, tokenizer

PAD, BOS, EOS, UNK, MASK = range(5)
TEXTS = sentences(60)


@cache
def model(name: str = "llama") -> Transformer:
    return tiny(name)


def examples(name="llama", texts=TEXTS, *, side="both", n_texts=None, text_counts=None, **sampling):
    return list(
        iter_examples(
            model(name),
            texts,
            Sampling(**sampling),
            side=side,
            n_texts=n_texts,
            text_counts=text_counts,
        )
    )


def ids_of(text: str, name: str = "llama") -> tuple[int, ...]:
    return tuple(model(name).tokenizer(text)["input_ids"])


def test_one_position_cuts_a_causal_text_right_after_it():
    whole = {ids_of(text) for text in TEXTS}
    encoded = examples(unit="document")
    assert len(encoded) == len(TEXTS)
    for example in encoded:
        assert example.keep == (len(example.ids) - 1,)
        assert any(ids[: len(example.ids)] == example.ids for ids in whole)
    assert len({len(example.ids) for example in encoded}) > 10


def test_cutting_after_the_position_leaves_its_state_as_it_was():
    example = next(e for e in examples(unit="document") if len(e.ids) < 5)
    whole = ids_of(TEXTS[example.document])
    assert len(whole) > len(example.ids)
    full = collate(model(), [Example(0, whole, example.keep)])
    cut = collate(model(), [example])
    ours, theirs = (model().capture(b.inputs, keep=b.keep).states[3] for b in (cut, full))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_all_positions_keep_the_whole_text():
    for example, text in zip(examples(unit="document", positions="all"), TEXTS, strict=True):
        assert example.ids == ids_of(text)
        assert example.keep == tuple(range(len(example.ids)))


def test_every_third_position_starts_with_the_first():
    for example in examples(positions="every:3"):
        assert example.keep == tuple(range(0, len(example.ids), 3))


def test_a_masked_model_sees_the_mask_in_place_of_the_token_and_the_rest_unchanged():
    for example, text in zip(examples("bert", unit="document"), TEXTS, strict=True):
        (position,) = example.keep
        whole = ids_of(text, "bert")
        assert example.ids[position] == MASK
        assert whole[position] != MASK
        assert example.ids[:position] == whole[:position]
        assert example.ids[position + 1 :] == whole[position + 1 :]


def test_special_tokens_are_never_masked_unless_asked_for():
    texts = [" ".join(WORDS[n : n + 2]) for n in range(30)]
    inner = {example.keep[0] for example in examples("bert", texts, unit="document")}
    assert inner == {1, 2}
    every = examples("bert", texts, unit="document", include_special=True)
    assert {example.keep[0] for example in every} == {0, 1, 2, 3}


def test_unknown_words_of_a_causal_text_are_read_like_any_other():
    (example,) = examples(texts=["xx yy zz"], unit="document", positions="all")
    assert example.ids == (UNK,) * 3
    assert example.keep == (0, 1, 2)


def test_examples_depend_only_on_text_settings_and_seed():
    assert examples(seed=3) == examples(seed=3)
    assert examples(seed=3) != examples(seed=4)
    forwards = {(example.ids, example.keep) for example in examples(unit="document")}
    backwards = examples(texts=list(reversed(TEXTS)), unit="document")
    assert {(example.ids, example.keep) for example in backwards} == forwards


@pytest.mark.parametrize("seed", [0, 1])
def test_no_document_is_on_both_sides(seed):
    fit, held_out = (examples(side=side, seed=seed) for side in ("fit", "held-out"))
    fitted, tested = ({example.document for example in side} for side in (fit, held_out))
    assert fitted
    assert tested
    assert not fitted & tested
    assert fitted | tested == set(range(len(TEXTS)))
    assert len(fit) + len(held_out) == len(examples(seed=seed))
    documents = list(iter_documents(TEXTS))
    assert tested == {
        n for n, document in enumerate(documents) if is_held_out(document, share=0.25, seed=seed)
    }


def test_a_documents_side_does_not_depend_on_the_documents_after_it():
    few, all_of_them = (
        {example.document for example in examples(texts=texts, side="held-out")}
        for texts in (TEXTS[:40], TEXTS)
    )
    assert few == {document for document in all_of_them if document < 40}


def test_nothing_is_held_out_at_share_zero():
    assert examples(side="held-out", held_out=0.0) == []
    assert len(examples(side="fit", held_out=0.0)) == len(examples())


def test_rows_for_the_ridge_come_from_whole_documents_of_the_fitting_side():
    encoded = list(iter_examples(model(), TEXTS, Sampling(), ridge_share=0.3))
    sides: dict[int, set[bool]] = {}
    for example in encoded:
        sides.setdefault(example.document, set()).add(example.ridge_rows)
    assert all(len(flags) == 1 for flags in sides.values())
    assert {True, False} == set().union(*sides.values())
    assert not any(example.ridge_rows for example in examples(side="fit"))


def test_reading_stops_after_n_texts():
    text_counts = TextCounts()
    encoded = examples(n_texts=7, text_counts=text_counts)
    assert len(encoded) == 7
    assert encoded == examples()[:7]
    assert text_counts.texts == 7
    assert text_counts.documents == len({example.document for example in encoded})


def test_per_document_limits_the_texts_of_one_document():
    assert {example.document for example in examples(per_document=1)} == set(range(len(TEXTS)))
    assert len(examples(per_document=1)) == len(TEXTS)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_texts_are_cut_at_max_tokens(name):
    encoded = examples(name, unit="document", max_tokens=5)
    assert max(len(example.ids) for example in encoded) == 5
    assert all(max(example.keep) < 5 for example in encoded)


@pytest.mark.parametrize("name", ["gpt2", "opt", "mpt", "roberta", "bert"])
def test_a_text_longer_than_the_position_table_is_cut_to_fit_it(name):
    long = " ".join(WORDS * 5)
    positions = "every:7" if name in ("roberta", "bert") else "all"
    (example,) = examples(name, [long], unit="document", max_tokens=500, positions=positions)
    # RoBERTa's table of 66 is used from after the padding id 0 on.
    assert len(example.ids) == (65 if name == "roberta" else 64)
    batch = collate(model(name), [example])
    assert len(model(name).capture(batch.inputs, keep=batch.keep).states[3]) == len(example.keep)


@pytest.mark.parametrize("tokens_per_batch", [1, 50, 300, 10**6])
def test_batches_contain_every_example_once_and_respect_their_size(tokens_per_batch, monkeypatch):
    monkeypatch.setattr("layerleap.stream.examples.WINDOW", 100)
    encoded = examples(positions="every:4")
    assert len(encoded) > 100  # more than one window
    batches = list(iter_batches(model(), encoded, tokens_per_batch=tokens_per_batch))
    assert [batch.index for batch in batches] == list(range(len(batches)))
    batched = []
    for batch in batches:
        ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
        assert ids.numel() <= tokens_per_batch or len(ids) == 1
        assert batch.n_texts == len(ids)
        assert batch.n_tokens == int(mask.sum())
        for row, real, keep in zip(ids, mask, batch.keep, strict=True):
            positions = tuple(keep.nonzero()[:, 0].tolist())
            batched.append((tuple(row[real.bool()].tolist()), positions))
    assert sorted(batched) == sorted((example.ids, example.keep) for example in encoded)


def test_padding_is_on_the_right_and_masked_whatever_the_tokenizers_default():
    for side in ("left", "right"):
        batch = collate(
            tiny("gpt2", side=side), [Example(4, (9, 8, 7), (0, 2)), Example(6, (5,), (0,))]
        )
        assert batch.inputs["input_ids"].tolist() == [[9, 8, 7], [5, PAD, PAD]]
        assert batch.inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
        assert batch.documents.tolist() == [4, 4, 6]
        assert batch.positions.tolist() == [0, 2, 0]


def test_a_tokenizer_without_a_padding_token_works():
    bare = tokenizer()
    bare.pad_token = None
    transformer = Transformer.wrap(build("gpt2"), bare)
    batch = collate(transformer, [Example(0, (9, 8, 7), (2,)), Example(1, (5,), (0,))])
    alone = collate(transformer, [Example(1, (5,), (0,))])
    ours, theirs = (
        transformer.capture(b.inputs, keep=b.keep).states[3][-1] for b in (batch, alone)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_padding_token_that_the_model_does_not_know_is_not_fed_to_it():
    bare = tokenizer()
    bare.add_special_tokens({"pad_token": "<fill>"})
    bare.add_tokens([f"more{n}" for n in range(40)])
    bare.pad_token = "more39"
    transformer = Transformer.wrap(build("gpt2"), bare)
    assert bare.pad_token_id >= 61
    batch = collate(transformer, [Example(0, (9, 8, 7), (2,)), Example(1, (5,), (0,))])
    alone = collate(transformer, [Example(1, (5,), (0,))])
    ours, theirs = (
        transformer.capture(b.inputs, keep=b.keep).states[3][-1] for b in (batch, alone)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_census_counts_what_was_read_and_its_fingerprint_follows_the_seed():
    marks = {}
    for seed in (0, 0, 1):
        text_counts = TextCounts()
        encoded = examples(seed=seed, text_counts=text_counts)
        counts = text_counts.to_dict()
        assert counts["texts"] == counts["rows"] == len(encoded)
        assert counts["tokens"] == sum(len(example.ids) for example in encoded)
        assert counts["documents"] == len(TEXTS)
        assert marks.setdefault(seed, counts["fingerprint"]) == counts["fingerprint"]
    assert marks[0] != marks[1]


def test_the_census_tells_other_positions_of_the_same_texts_apart():
    marks = set()
    for positions in ("all", "every:2"):
        text_counts = TextCounts()
        examples(positions=positions, text_counts=text_counts)
        marks.add(text_counts.to_dict()["fingerprint"])
    assert len(marks) == 2


def test_a_lone_surrogate_from_escaped_json_does_not_stop_a_run(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "the cat \\ud83d sat"}\n')
    (example,) = examples(texts=file, unit="document", positions="all")
    assert example.ids == ids_of("the cat ? sat")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens 0 is too small; expected 1 or more"),
        ({"held_out": 1.0}, "held_out is 1.0; expected at least 0 and below 1"),
        ({"held_out": -0.1}, "held_out is -0.1; expected at least 0 and below 1"),
        ({"unit": "word"}, "unit is 'word'; expected one of 'sentence', 'paragraph', 'd"),
        ({"positions": "some"}, "positions 'some' are unknown"),
        ({"positions": 4}, "positions is 4; expected a string"),
        ({"max_tokens": "12"}, "max_tokens is '12'; expected a whole number"),
        ({"held_out": "0.25"}, r"held_out is '0\.25'; expected a number"),
        ({"per_document": 0}, "per_document is 0; expected at least 1, or None for all"),
        ({"seed": "a"}, "seed is 'a'; expected a whole number"),
        ({"positions": "every:0"}, "expected every:1 or more"),
    ],
)
def test_settings_out_of_range_are_refused_at_once(settings, message):
    with pytest.raises(BadSettings, match=message):
        Sampling(**settings)


def test_a_mistyped_side_is_refused_and_never_reads_the_fitting_side():
    message = (
        "side is 'heldout'; expected one of 'fit', 'held-out', 'both'; did you mean 'held-out'"
    )
    with pytest.raises(BadSettings, match=message):
        examples(side="heldout")
    with pytest.raises(BadSettings, match=message):
        batches_of(model(), TEXTS, Sampling(), side="heldout")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"n_texts": 0}, "n_texts is 0; expected 1 or more, or None for all"),
        ({"n_texts": -1}, "n_texts is -1; expected 1 or more"),
        ({"tokens_per_batch": 0}, "tokens_per_batch is 0; expected 1 or more"),
    ],
)
def test_sizes_that_leave_nothing_to_read_are_refused(setting, message):
    with pytest.raises(BadSettings, match=message):
        batches_of(model(), TEXTS, Sampling(), **setting)


@pytest.mark.parametrize("positions", ["all", "every:1"])
def test_masking_every_position_is_refused(positions):
    with pytest.raises(BadSettings, match="would mask 100% of a text"):
        examples("bert", positions=positions)


@pytest.mark.parametrize("n", [2, 6])
def test_masking_far_more_than_in_training_is_refused(n):
    with pytest.raises(BadSettings, match=f"'every:{n}' would mask .* about 15 %; use 'one'"):
        examples("bert", positions=f"every:{n}")
    assert examples("llama", positions=f"every:{n}")


def test_one_position_in_seven_may_be_masked():
    encoded = examples("bert", unit="document", positions="every:7")
    assert max(len(example.keep) for example in encoded) > 1
    assert all(example.ids.count(MASK) == len(example.keep) for example in encoded)


def test_the_field_with_the_text_can_be_chosen(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "a red bird", "body": "the cat sat"}\n')
    (example,) = examples(texts=file, unit="document", positions="all", field="body")
    assert example.ids == ids_of("the cat sat")
    assert Sampling(field="body").to_dict()["field"] == "body"


def test_the_first_texts_are_not_lead_sentences():
    texts = [
        "\n\n".join(f"{WORDS[n % 30]} {WORDS[i]} cat sat" for i in range(30)) for n in range(40)
    ]
    encoded = examples(texts=texts, n_texts=40, positions="all")
    assert len({example.document for example in encoded}) == 40
    assert len({example.ids[1] for example in encoded}) > 10


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_length_with_room_only_for_special_tokens_is_refused(max_tokens):
    with pytest.raises(
        BadSettings, match="the tokenizer adds 2 special tokens; expected at least 3"
    ):
        examples("bert", max_tokens=max_tokens)
    assert all(len(example.ids) == 1 for example in examples("llama", max_tokens=1))


def test_a_model_without_a_tokenizer_cannot_read_text():
    with pytest.raises(BadText, match="has no tokenizer"):
        next(iter_examples(Transformer.wrap(build("gpt2")), TEXTS, Sampling()))


def test_a_masked_model_needs_a_mask_token():
    bare = tokenizer("masked-token")
    bare.mask_token = None
    with pytest.raises(BadText, match="has no mask token"):
        next(iter_examples(Transformer.wrap(build("bert"), bare), TEXTS, Sampling()))


@pytest.mark.parametrize("name", ["whisper", "vit"])
def test_models_that_do_not_read_text_are_refused(name):
    transformer = Transformer.wrap(build(name), tokenizer())
    with pytest.raises(BadSettings, match="images, sound or two texts"):
        next(iter_examples(transformer, TEXTS, Sampling()))


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_models_that_read_pairs_refuse_single_texts(name):
    transformer = Transformer.wrap(build(name), tokenizer())
    with pytest.raises(BadText, match="expected a source text and a target text"):
        next(iter_examples(transformer, TEXTS, Sampling()))


def test_an_empty_source_is_an_error_not_an_empty_run():
    with pytest.raises(BadText, match="no text"):
        examples(texts=["", "  "])


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_selected_texts_of_a_batch_equal_a_batch_of_their_own(name):
    transformer = tiny(name)
    examples = iter_examples(transformer, sentences(50), Sampling(), n_texts=20)
    batch = next(iter_batches(transformer, examples))
    chosen = torch.zeros(batch.n_texts, dtype=torch.bool)
    chosen[[0, 2]] = True  # sorted by length: the longest are left out
    some = batch.texts(chosen)
    assert some.inputs["input_ids"].shape[1] < batch.inputs["input_ids"].shape[1]
    rows = chosen[batch.keep.nonzero()[:, 0]]
    for name in ("documents", "positions", "ridge_rows"):
        assert torch.equal(getattr(some, name), getattr(batch, name)[rows])
    whole = transformer.capture(batch.inputs, keep=batch.keep).states
    alone = transformer.capture(some.inputs, keep=some.keep).states
    for layer, h in alone.items():
        torch.testing.assert_close(h, whole[layer][rows], rtol=1e-4, atol=1e-5)
    assert (some.n_texts, some.n_tokens) == (2, int(some.inputs["attention_mask"].sum()))


def test_encoder_inputs_are_never_cut_however_long_the_decoders_text_is():
    ids = torch.arange(12).view(2, 6)
    keep = torch.zeros(2, 6, dtype=torch.bool)
    keep[:, 1] = True
    inputs = {"input_ids": ids, "attention_mask": ids * 0 + 1, "decoder_input_ids": ids + 1}
    inputs["decoder_attention_mask"] = torch.tensor([[1, 1, 1, 0, 0, 0]] * 2)
    rows = torch.arange(2)
    batch = Batch(0, inputs, keep, rows, rows, keep[:, 0], 2, 6)
    cut = {name: value.shape[1] for name, value in batch.cut(3).items()}
    assert cut == {
        "input_ids": 6,
        "attention_mask": 6,
        "decoder_input_ids": 3,
        "decoder_attention_mask": 3,
    }
    some = batch.texts(torch.tensor([True, False]))
    assert some.inputs["input_ids"].shape == (1, 6)
    assert some.inputs["decoder_input_ids"].tolist() == [[1, 2, 3]]
