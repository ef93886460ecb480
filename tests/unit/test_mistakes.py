"""Natural mistakes of a Python user end in one clear line of a typed error, never in nonsense."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import layerleap as ll
from contract_bank import bank_of
from families import build
from layerleap.errors import LayerleapError
from layerleap.maps.bank import ShortcutBank
from layerleap.models.transformer import Transformer
from tiny_models import sentences, tiny

TEXTS = sentences(12)
IDS = torch.tensor([[5, 6, 7]])


@cache
def model() -> Transformer:
    return tiny("llama")


@cache
def bank() -> ShortcutBank:
    return bank_of(model())


@cache
def without_tokenizer() -> Transformer:
    return Transformer.wrap(build("llama"))


def read(text: Any = "the cat sat", by: Any = None, **options: Any) -> object:
    return ll.read(by or model(), text, **{"bank": bank(), **options})


def fit(text: Any = TEXTS, by: Any = None, **options: Any) -> object:
    return ll.fit(by or model(), text, ll.Sampling(unit="document"), **options)


def generate(prompt: Any = "the cat", **options: Any) -> object:
    return ll.generate(model(), prompt, **{"bank": bank(), "max_new_tokens": 2, **options})


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "a number for a text": (lambda: read(5), "cannot read 5; expected a text"),
    "nothing for a text": (lambda: read(None), "cannot read None; expected a text"),
    "an empty text": (lambda: read(""), "the text is empty"),
    "a name for a model": (lambda: read(by="smollm2"), "'smollm2'; expected a model from ll.load"),
    "a bare model": (lambda: read(by=model().model), "a LlamaForCausalLM; expected a model from"),
    "a model without tokenizer": (lambda: read(by=without_tokenizer()), "has no tokenizer"),
    "a text longer than the model": (lambda: read("cat " * 999), "at most 64"),
    "a number for a bank": (lambda: read(bank=3), "bank is 3; expected a ShortcutBank or"),
    "a bank of another model": (lambda: read(by=tiny("gpt2")), "this bank belongs to tiny-llama"),
    "no token": (lambda: read(top_k=0), "top_k 0 is out of range; expected 1 to 61"),
    "fewer than no token": (lambda: read(top_k=-1), "top_k -1 is out of range"),
    "more tokens than there are": (lambda: read(top_k=10**6), "top_k 1000000 is out of range"),
    "half a token": (lambda: read(top_k=2.5), "top_k is 2.5; expected a whole number"),
    "a number as a string": (lambda: read(top_k="5"), "top_k is '5'; expected a whole number"),
    "a position beyond the text": (lambda: read(positions=[99]), "position 99 does not exist"),
    "a position without a list": (lambda: read(positions=1), "positions is 1; expected a list"),
    "a named position": (lambda: read(positions="last"), "positions is 'last'; expected a list"),
    "half a position": (lambda: read(positions=[1.5]), "expected a list of whole numbers"),
    "no text to fit on": (lambda: fit([]), "contains no text"),
    "a sentence as the name of a text": (lambda: fit("The cat sat on."), "no file or folder"),
    "a number as a text to fit on": (lambda: fit(3), "cannot be read from a int"),
    "a record as a text": (lambda: fit({"text": "the cat"}), "cannot be read from a dict"),
    "records without the field": (lambda: fit([{"body": "the cat"}]), "has no field 'text'"),
    "no texts": (lambda: fit(n_texts=0), "n_texts is 0; expected 1 or more"),
    "texts as a string": (lambda: fit(n_texts="5"), "n_texts is '5'; expected a whole number"),
    "a sampling that is none": (lambda: ll.fit(model(), TEXTS, "document"), "expected a Sampling"),
    "a rank of none": (lambda: fit(rank=0), "rank 0 is out of range; expected 1 to 24"),
    "an unknown ridge": (lambda: fit(ridge="best"), "ridge 'best' is invalid"),
    "an empty batch": (
        lambda: fit(tokens_per_batch=0),
        "tokens_per_batch is 0; expected 1 or more",
    ),
    "a bare model to fit": (lambda: fit(by=model().model), "expected a model from ll.load"),
    "swapped arguments": (lambda: ll.evaluate(bank(), model()), "is a ShortcutBank; expected a m"),
    "no bank": (lambda: ll.evaluate(model(), None, TEXTS), "bank is None; expected a ShortcutBank"),
    "no texts to evaluate": (lambda: ll.evaluate(model(), bank(), TEXTS, n_texts=0), "n_texts is"),
    "an empty prompt": (lambda: generate(""), "the prompt is empty"),
    "no new token": (lambda: generate(max_new_tokens=0), "max_new_tokens is 0"),
    "a rule by name": (lambda: generate(rule="patience"), "rule is 'patience'; expected an exit"),
    "a typo in an option": (lambda: generate(max_tokens=3), "refuses its options.*max_tokens"),
    "a negative temperature": (lambda: generate(do_sample=True, temperature=-1.0), "temperature"),
    "an empty tensor": (lambda: model().capture(IDS[:, :0]), "the tensor is empty"),
    "ids out of range": (lambda: model().capture(IDS + 10**6), "out of range"),
    "a layer that does not exist": (lambda: model().capture(IDS, layers=[99]), "layer 99 does not"),
    "states of another width": (lambda: model().logits(torch.zeros(2, 3)), r"of \(2, 3\); expect"),
    "states as a list": (lambda: model().logits([1.0]), "type list; expected a tensor"),
    "states too narrow": (lambda: ll.Lens(model(), bank()).logits(torch.zeros(2, 3), 1), "expect"),
    "a block that does not exist": (lambda: model().sites(99), "block 99 does not exist"),
    "a lens of a bare model": (lambda: bank().lens(model().model), "LlamaForCausalLM"),
    "a check of a name": (lambda: ll.check("smollm2"), "model is 'smollm2'; expected"),
    "nothing to load": (lambda: ll.load(None), "cannot be loaded from None"),
    "an empty name": (lambda: ll.load(""), "cannot be loaded from ''"),
    "a missing bank": (lambda: ShortcutBank.from_pretrained("no/such/folder"), "neither a folder"),
    "a tokenizer by name": (lambda: ll.load(build("llama"), tokenizer="x"), "AutoTokenizer"),
    "a typo in the zoo": (lambda: ll.zoo.fetch("wikipeda"), "no entry 'wikipeda'"),
    "nothing as documents": (lambda: list(ll.iter_documents(None)), "from a NoneType"),
    "a bare model to reset": (lambda: ll.untrained(model().model), "expected a model from ll.load"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_in_one_clear_line(name):
    call, message = MISTAKES[name]
    with pytest.raises(LayerleapError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights_is_refused(tmp_path: Path):
    model().model.config.save_pretrained(tmp_path)
    with pytest.raises(LayerleapError, match="cannot load a model from"):
        ll.load(tmp_path)


def test_an_option_or_device_that_does_not_exist_is_refused(tmp_path: Path):
    build("llama").save_pretrained(tmp_path)
    with pytest.raises(LayerleapError, match="cannot be loaded with foo"):
        ll.load(tmp_path, foo=3)
    with pytest.raises(LayerleapError, match="dtype"):
        ll.load(tmp_path, dtype="floot16")


def test_an_unknown_argument_is_named_with_its_function():
    with pytest.raises(
        TypeError, match="fit got an unexpected keyword argument 'layers'; expected"
    ):
        fit(layers=[1])
