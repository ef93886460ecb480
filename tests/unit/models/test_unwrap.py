"""Models inside of what other libraries wrap around them: adapters, compiled code, devices."""

import warnings
from functools import partial

import pytest
import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import nn
from torch._dynamo.testing import CompileCounter

import layerleap as ll
from families import build
from layerleap.errors import BadSettings, ModelRefused, OtherModelWarning, UnknownModel, WrongModel
from layerleap.models.load import load
from tiny_models import sentences, tiny, tokenizer

IDS = torch.tensor([[7, 8, 9, 10]])
TEXT = "the cat sat on the mat and"
LORA = partial(LoraConfig, init_lora_weights=False, target_modules=["q_proj", "up_proj"])
IA3 = partial(
    IA3Config,
    init_ia3_weights=False,
    target_modules=["k_proj", "down_proj"],
    feedforward_modules=["down_proj"],
)


@pytest.fixture(scope="module")
def base():
    return tiny()


@pytest.fixture(scope="module")
def bank(base):
    return ll.fit(base, sentences(60), ridge=0.1, evaluate=False, progress=False)


def with_adapter(config):
    return get_peft_model(build("llama", 0), config(task_type="CAUSAL_LM")).eval()


@pytest.mark.parametrize("config", [LORA, IA3], ids=["lora", "ia3"])
@torch.no_grad()
def test_a_model_with_adapters_inside_is_read_with_them_in_force(base, config):
    outer = with_adapter(config)
    model = load(outer, tokenizer=tokenizer())
    last = model.capture(IDS, layers=[3]).states[3]
    theirs = outer(input_ids=IDS).logits
    assert torch.allclose(model.logits(last[0]), theirs[0], atol=1e-5)
    assert not torch.allclose(theirs, base.model(input_ids=IDS).logits, atol=0.01)
    assert model.identity.fingerprint != base.identity.fingerprint
    assert "read inside of its PeftModelForCausalLM" in str(model)


OUTSIDE = {"prompt": PromptTuningConfig, "prefix": PrefixTuningConfig}


@pytest.mark.parametrize("kind", OUTSIDE)
def test_an_adapter_outside_of_the_model_is_refused_by_reason(kind):
    with pytest.raises(ModelRefused, match=r"does more than the model inside.*get_base_model"):
        load(with_adapter(partial(OUTSIDE[kind], num_virtual_tokens=3)))


def test_adapters_that_are_switched_off_merged_or_changed_make_another_model(bank):
    outer = with_adapter(LORA)
    outer.add_adapter("second", LORA(task_type="CAUSAL_LM"))
    model = load(outer, tokenizer=tokenizer())
    own = ll.fit(model, sentences(60), ridge=0.1, evaluate=False, progress=False)
    with pytest.raises(WrongModel):
        bank.lens(model)
    with outer.disable_adapter(), pytest.raises(WrongModel, match="changed since"):
        own.lens(model)
    own.lens(model).read(TEXT)  # on again
    outer.set_adapter("second")
    with pytest.raises(WrongModel):
        own.lens(model)
    outer.set_adapter("default")
    own.lens(model).read(TEXT)
    outer.merge_adapter()
    with pytest.raises(WrongModel):
        own.lens(model)


def test_the_bank_of_the_base_reads_a_fine_tuned_model_if_asked_for_and_says_so(base, bank):
    model = load(with_adapter(LORA), tokenizer=tokenizer())
    both = rf"fitted on {base.identity.name} .*not on {model.identity.name} "
    with pytest.raises(WrongModel, match="other_model=True"):
        ll.read(model, TEXT, bank=bank)
    options = {"bank": bank, "other_model": True}
    plain = model.model.generate(IDS, max_new_tokens=8, do_sample=False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", OtherModelWarning)
        readings = ll.read(model, TEXT, **options)
        scores = ll.evaluate(model, bank, sentences(9), other_model=True, progress=False)
        text = ll.generate(model, IDS[0].tolist(), max_new_tokens=8, **options)
        neurons = ll.neurons(model, **options)
        effect = ll.effect(model, TEXT, ["L1.N3=0"], **options)
        lens = bank.lens(model, other_model=True)
        decoder = ll.decoder(bank, other_model=True)
        drafted = model.model.generate(IDS, max_new_tokens=8, custom_generate=decoder)
    assert len([one for one in seen if one.category is OtherModelWarning]) == 7
    assert "linear" in readings.tracks
    assert any("was fitted on" in note for note in [*readings.notes, repr(readings)])
    assert any("was fitted on" in note for note in scores.notes)
    assert "was fitted on" in text.how["note"]
    assert text.ids == plain[0, 4:].tolist()  # drafts are verified, so decoding stays exact
    assert torch.equal(drafted, plain)
    assert neurons.lens.name == lens.name == "linear"
    assert effect.tokens
    with pytest.warns(OtherModelWarning, match=both):
        lent = bank.lent_to(model)
    assert lent.model["fitted_on"]["fingerprint"] == base.identity.fingerprint
    assert "fitted_on" in lent.card()
    assert bank.lent_to(base) is bank  # nothing to allow, so nothing to warn of


def test_a_bank_is_lent_only_to_a_model_of_its_class_and_shape(bank):
    for other in (tiny("mistral", seed=1), tiny("llama", num_hidden_layers=2)):
        with pytest.raises(WrongModel, match="same class, number of layers and width"):
            bank.lens(other, other_model=True)


COMPILED = {
    "outside": lambda model, backend: torch.compile(model, backend=backend),
    "in place": lambda model, backend: (model.compile(backend=backend), model)[1],
    "forward": lambda model, backend: (
        setattr(model, "forward", torch.compile(model.forward, backend=backend)),
        model,
    )[1],
    "blocks": lambda model, backend: (
        [block.compile(backend=backend) for block in model.model.layers],
        model,
    )[1],
}


@pytest.mark.parametrize("how", COMPILED)
@torch.no_grad()
def test_a_compiled_model_is_read_and_edited_and_never_compiled_again(how):
    counter = CompileCounter()
    base = tiny(num_hidden_layers=1)
    outer = COMPILED[how](build("llama", 0, num_hidden_layers=1), counter)
    outer(input_ids=IDS)
    compiled = counter.frame_count
    assert compiled
    model = load(outer, tokenizer=tokenizer())
    assert model.identity.fingerprint == base.identity.fingerprint
    for _ in range(2):
        own, theirs = (one.capture(IDS, logits=True) for one in (model, base))
        assert all(torch.equal(own.states[layer], h) for layer, h in theirs.states.items())
        edit = ll.edits.ZeroNeuron(1, 3)
        with model.edit(edit), base.edit(edit):
            assert torch.equal(model.model(input_ids=IDS).logits, base.model(input_ids=IDS).logits)
    assert counter.frame_count == compiled
    outer(input_ids=IDS)
    assert counter.frame_count == compiled, "what was compiled before is still in use"
    torch._dynamo.reset()


@pytest.mark.parametrize("wrap", [with_adapter, nn.DataParallel], ids=["adapter", "devices"])
def test_a_hook_on_the_wrapper_which_the_model_inside_never_runs_is_refused(wrap):
    outer = wrap(LORA if wrap is with_adapter else build("llama", 0))
    handle = outer.register_forward_hook(lambda *call: None)
    with pytest.raises(ModelRefused, match=f"its {type(outer).__name__} has a forward hook"):
        load(outer)
    handle.remove()
    assert load(outer, tokenizer=tokenizer())


def test_no_refusal_shows_the_whole_module():
    stranger = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    for use in (load, ll.check):
        with pytest.raises((UnknownModel, BadSettings)) as refused:
            use(stranger) if use is load else _raise(use(stranger))
        assert "in_features" not in str(refused.value)
        assert "Sequential" in str(refused.value)
    with pytest.raises(BadSettings) as refused:
        ll.read(build("llama", 0), TEXT)
    assert "Embedding(" not in str(refused.value)


def _raise(results):
    raise BadSettings(results[0].detail)


def test_a_data_parallel_model_is_read_inside():
    model = load(nn.DataParallel(build("llama", 0)))
    assert "read inside of its DataParallel" in str(model)
