"""Models whose rows depend on their neighbours, as where activations are quantised per batch."""

import json
import warnings

import pytest
import torch

import layerleap as ll
from families import build
from layerleap.errors import BadSettings, ModelRefused
from layerleap.maps.bank import ShortcutBank
from layerleap.models.discovery.laws import check
from layerleap.models.load import load
from tiny_models import sentences, tokenizer

TEXT = "the cat sat on the mat and"


def int8(*names):
    """A model with dynamic int8 weights: activations are quantised by the range of a batch."""
    from torch.ao.quantization import quantize_dynamic

    model = build("llama", 0)
    chosen = {torch.nn.Linear} if not names else set(names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch names torchao as its successor
        return quantize_dynamic(model, chosen, dtype=torch.qint8)


@pytest.fixture(scope="module")
def model():
    return load(int8(), tokenizer=tokenizer(), laws="loose")


def test_rows_that_depend_on_their_neighbours_are_refused_with_the_way_to_read_them_all_the_same():
    with pytest.raises(
        ModelRefused, match=r"quantised by the range of a whole batch.*laws='loose'"
    ):
        load(int8())


def test_a_head_whose_logits_depend_on_other_rows_breaks_a_law_of_its_own():
    results = {one.law: one.status for one in check(int8("lm_head"))}
    assert results["rows"] == "fails"
    assert results["padding"] == "holds"


def test_loosened_laws_are_written_on_the_model_and_on_every_result(model, tmp_path):
    loosened = dict(model.identity.loosened)
    assert loosened
    assert set(loosened) <= {"padding", "rows"}
    assert "laws='loose'" in str(model)
    assert model.kind == "next-token"
    statuses = {one.law: one.status for one in ll.check(model)}
    assert {law for law, status in statuses.items() if status == "loosened"} == set(loosened)
    bank = ll.fit(model, sentences(60), ridge=0.1, evaluate=False, progress=False)
    bank = ShortcutBank.from_pretrained(bank.save_pretrained(tmp_path / "bank"))
    assert bank.model["loosened"] == loosened
    assert "loosened" in bank.card()
    readings = bank.lens(model).read(TEXT)
    assert "laws='loose'" in repr(readings)
    assert "laws='loose'" in json.dumps(readings.to_dict())
    scores = ll.evaluate(model, bank, sentences(9), progress=False)
    assert "laws='loose'" in str(scores)
    assert scores.to_dict()["model"]["loosened"] == loosened
    text = ll.generate(model, TEXT, bank=None, max_new_tokens=2)
    assert "laws='loose'" in text.how["note"]
    head_only = load(int8("lm_head"), tokenizer=tokenizer(), laws="loose")  # neurons are known
    for result in (
        bank.lens(model).saturation(TEXT),
        ll.neurons(head_only).dominant(TEXT),
        ll.effect(head_only, TEXT, ["L2.N3=1"]),
    ):
        for shown in (str(result), result._repr_html_(), json.dumps(result.to_dict())):
            assert "loose" in shown, type(result).__name__


def test_a_model_that_keeps_every_law_has_nothing_loosened():
    model = load(build("llama", 0), laws="loose")
    assert model.identity.loosened == ()
    assert "loosened" not in model.identity.to_dict()


@pytest.mark.parametrize("laws", ["strict", "loose"])
def test_laws_of_structure_are_never_loosened(laws):
    broken = build("llama", 0).train()
    broken.config.attention_dropout = 0.5
    for block in broken.model.layers:
        block.self_attn.attention_dropout = 0.5
    with pytest.raises(ModelRefused, match="'deterministic' failed"):
        load(broken, laws=laws)


def test_a_mistyped_word_for_laws_is_refused():
    with pytest.raises(BadSettings, match="did you mean 'loose'"):
        load(build("llama", 0), laws="lose")
