"""Labels of tokens: nothing invisible, nothing ambiguous."""

from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models as token_models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from families import build
from layerleap.lens.vocabulary.tokens import output_label, token_label, visible
from layerleap.models.transformer import Transformer
from tiny_models import tiny


def with_tokenizer(backend: Tokenizer, **special) -> SimpleNamespace:
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, **special)

    class Model(SimpleNamespace):
        __hash__ = object.__hash__

    return Model(tokenizer=fast, kind="next-token")


def byte_level() -> SimpleNamespace:
    words = [
        "<eos>",
        "a",
        "\u0120a",
        "\u0120",
        "\u010a",
        "\u0109",
        "\u00e2\u0124",
        "\u00ac",
        "\u0120\u00f0",
    ]
    backend = Tokenizer(token_models.BPE({w: n for n, w in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return with_tokenizer(backend, eos_token="<eos>")


def test_spaces_newlines_and_tabs_have_signs():
    model = byte_level()
    labels = [token_label(model, index) for index in range(1, 6)]
    assert [label.label for label in labels] == ["a", "␣a", "␣", "⏎", "⇥"]
    assert [label.text for label in labels] == ["a", " a", " ", "\n", "\t"]
    assert [label.kind for label in labels] == ["text", "text", "space", "space", "space"]


def test_parts_of_a_character_are_bytes():
    model = byte_level()
    assert [token_label(model, index).label for index in (6, 7, 8)] == [
        "<E2 82>",
        "<AC>",
        "<20 F0>",
    ]
    assert {token_label(model, index).kind for index in (6, 7, 8)} == {"bytes"}


def test_byte_tokens_of_sentencepiece_are_bytes():
    words = ["<unk>", "\u2581a", "b", "<0xE2>", "a"]
    backend = Tokenizer(
        token_models.BPE({w: n for n, w in enumerate(words)}, [], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    model = with_tokenizer(backend, unk_token="<unk>")
    assert token_label(model, 3).label == "<E2>"
    # Decoded alone both are "a": only after another token does the space show.
    assert token_label(model, 1).label == "␣a"
    assert token_label(model, 4).label == "a"


def test_special_tokens_say_so():
    label = token_label(byte_level(), 0)
    assert (label.label, label.kind) == ("<eos>", "special")
    assert label.to_dict() == {"id": 0, "text": "<eos>", "label": "<eos>", "kind": "special"}


def test_a_model_without_a_tokenizer_shows_ids():
    model = Transformer.wrap(build("llama"), check=False)
    assert token_label(model, 17).label == "17"


def test_outputs_of_classifiers_are_classes():
    model = Transformer.wrap(build("bert_text"), check=False)
    label = output_label(model, 1)
    assert (label.label, label.kind) == (model.output_name(1), "class")
    tokens = tiny("llama")
    assert output_label(tokens, 7) == token_label(tokens, 7)


@pytest.mark.parametrize(
    ("text", "shown"), [("a b", "a␣b"), ("\u200b", "\\u200b"), ("\x07", "\\x07"), ("é", "é")]
)
def test_no_character_is_invisible(text, shown):
    assert visible(text) == shown


def test_labels_do_not_keep_models_alive():
    import gc
    import weakref

    model = tiny("llama")
    token_label(model, 5)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    assert torch.is_grad_enabled()
