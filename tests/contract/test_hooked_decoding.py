"""Decoders write what `generate` writes when somebody else has hooked the model."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from itertools import cycle

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import prune
from transformers import DynamicCache

import layerleap as ll
from contract_bank import bank_of
from families import build
from layerleap.act.decode.decoder import decoder
from layerleap.act.decode.pass_cost import PassCost
from layerleap.act.exits.rules import Fixed
from layerleap.errors import HookedModelWarning, ModelRefused
from layerleap.models.cursor.verify import find_axes
from layerleap.models.transformer import Transformer

FAMILIES = ("gpt2", "gpt_neox", "opt_350m", "bloom", "llama", "gemma2", "falcon", "mixtral")
CHEAP = PassCost((1, 2, 4, 8, 16), (1.0, 1.01, 1.02, 1.04, 1.08))  # so that trees are large
PROMPT = torch.tensor([[5, 9, 7, 5, 9, 7, 8, 5, 9]])
BATCH = {
    "inputs": torch.tensor([[5, 9, 7, 8, 5], [0, 0, 11, 12, 13]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]),
}
WAYS = {
    "exact": ({"cost": CHEAP}, {}),
    "not packed": ({"cost": CHEAP, "packed": False}, {}),
    "early exit": ({"rule": Fixed(1)}, {}),
    "early drafts": ({"drafts": ("early",), "draft_layer": 1}, {}),
    "texts together": ({"cost": CHEAP}, BATCH),
    "sampled": ({"cost": CHEAP}, {"do_sample": True, "top_k": 20, "temperature": 1.5}),
}


def shifted(value):
    """Anything that modules take or give, with its tensors changed."""
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point():
            return value.flip(-1)  # ids stay ids, and experts experts
        noise = torch.randn(value.shape[-1], generator=torch.Generator().manual_seed(1))
        return value + 2 * noise.to(value)
    if isinstance(value, Mapping):
        return type(value)({key: shifted(item) for key, item in value.items()})
    if isinstance(value, tuple):
        return tuple(shifted(item) for item in value)
    return value


def hook_after(module):
    return module.register_forward_hook(lambda _, args, output: shifted(output)).remove


def hook_before(module):
    def hook(_, args, kwargs):
        names = ("hidden_states", "input_ids", "inputs_embeds", "x", "input")
        return shifted(args), {k: shifted(v) if k in names else v for k, v in kwargs.items()}

    return module.register_forward_pre_hook(hook, with_kwargs=True).remove


def replace_forward(module):
    own = module.forward
    module.forward = lambda *args, **kwargs: shifted(own(*args, **kwargs))
    module.forward.__wrapped__ = own  # `generate` asks for its signature
    return lambda: delattr(module, "forward")


HOOKS: dict[str, Callable] = {
    "hook": hook_after,
    "pre-hook": hook_before,
    "replaced forward": replace_forward,
}


@contextmanager
def hooked(module, how="hook"):
    undo = HOOKS[how](module)
    try:
        yield
    finally:
        undo()


def ready(name):
    model = build(name)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.config.use_cache = model.generation_config.use_cache = True
    return Transformer.wrap(model)


def write(transformer, custom, **options):
    torch.manual_seed(3)
    options = {"inputs": PROMPT, "max_new_tokens": 3, "do_sample": False, **options}
    return transformer.model.generate(custom_generate=custom, **options)


@pytest.mark.filterwarnings("ignore::layerleap.errors.HookedModelWarning")
@pytest.mark.parametrize("name", FAMILIES)
def test_with_a_hook_on_any_module_every_way_of_decoding_writes_the_text_of_generate(name):
    """Ways and kinds of hooks take turns over the modules, and over those inside one block."""
    transformer = ready(name)
    bank, n_changed = bank_of(transformer), 0
    ways = cycle(WAYS.values())
    customs = {id(way): decoder(bank, transformer=transformer, **way[0]) for way in WAYS.values()}
    plain = {id(way): write(transformer, None, **way[1]) for way in WAYS.values()}
    others = tuple(f"{path}." for path in (transformer.blocks[0], transformer.blocks[2]))
    modules = [
        (path, module)
        for path, module in transformer.model.named_modules()
        if not path.startswith(others)
    ]
    for number, (path, module) in enumerate(modules):
        way = next(ways)
        how = list(HOOKS)[(number + number // len(WAYS)) % len(HOOKS)]
        with hooked(module, how):
            theirs = write(transformer, None, **way[1])
            ours = write(transformer, customs[id(way)], **way[1])
        assert torch.equal(ours, theirs), (path, how, way)
        assert {layer for s in customs[id(way)].stats for layer in s.layers} == {3}
        n_changed += not torch.equal(theirs, plain[id(way)])
    assert n_changed > len(modules) / 2  # the hooks matter


@pytest.mark.filterwarnings("ignore::layerleap.errors.HookedModelWarning")
@pytest.mark.parametrize("how", HOOKS)
@pytest.mark.parametrize("way", WAYS)
def test_a_hook_on_a_block_is_honoured_in_every_way_of_decoding(way, how):
    transformer, (settings, options) = ready("llama"), WAYS[way]
    custom = decoder(bank_of(transformer), transformer=transformer, **settings)
    plain = write(transformer, None, **options)
    with hooked(transformer.block(2), how):
        theirs = write(transformer, None, **options)
        assert torch.equal(write(transformer, custom, **options), theirs)
    assert not torch.equal(theirs, plain)
    if way != "early exit":
        assert torch.equal(write(transformer, custom, **options), plain)


@pytest.mark.filterwarnings("ignore::layerleap.errors.HookedModelWarning")
def test_a_hook_that_looks_at_shapes_or_counts_its_calls_is_honoured():
    transformer, calls = ready("llama"), []
    custom = decoder(bank_of(transformer), transformer=transformer, cost=CHEAP)
    write(transformer, custom)  # a draft is accepted without the hook

    def hook(_, args, output):
        calls.append(output.shape[1])
        return output + len(calls) if output.shape[1] == 1 else output

    handle = transformer.block(1).mlp.register_forward_hook(hook)
    theirs, calls[:] = write(transformer, None, max_new_tokens=12), []
    ours = write(transformer, custom, max_new_tokens=12)
    handle.remove()
    assert torch.equal(ours, theirs)
    assert calls == [9, *[1] * 11]  # and no pass was made beside those of `generate`


def test_a_decoder_warns_once_and_statistics_say_who_wrote_the_text():
    transformer = ready("llama")
    custom = decoder(None, transformer=transformer, rule=Fixed(1))
    write(transformer, custom)
    assert custom.stats[0].exactness == "approximate"
    with hooked(transformer.block(2)):
        with pytest.warns(HookedModelWarning, match=r"forward hook on model\.layers\.1.*ll\.edits"):
            write(transformer, custom)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            write(transformer, custom)  # once per decoder
    stats = custom.stats[0]
    assert (stats.exactness, stats.policy, stats.layers) == ("exact", None, [3] * 3)
    assert (stats.drafted, stats.drafts, stats.passes) == ([False] * 3, 0, 2)
    assert "transformers' own loop because of a forward hook on model.layers.1" in str(stats)
    assert stats.to_dict()["fallback"] == stats.fallback
    write(transformer, custom)
    assert custom.stats[0].fallback is None
    assert set(custom.stats[0].layers[1:]) == {1}


@pytest.mark.filterwarnings("ignore::layerleap.errors.HookedModelWarning")
def test_streams_dictionaries_caches_and_ends_are_those_of_generate_under_hooks():
    transformer = ready("llama")
    custom, streamed = decoder(None, transformer=transformer, cost=CHEAP), []

    class Stream:
        def put(self, value):
            streamed.extend(value.flatten().tolist())

        def end(self):
            streamed.append("end")

    options = {"return_dict_in_generate": True, "output_scores": True}
    with hooked(transformer.block(2)):
        caches = DynamicCache(), DynamicCache()
        theirs = write(transformer, None, past_key_values=caches[0], **options)
        ours = write(transformer, custom, past_key_values=caches[1], stream_to=Stream(), **options)
        eos = int(theirs.sequences[0, -2])
        ended = write(transformer, custom, eos_token_id=eos, max_new_tokens=8, **BATCH)
        assert torch.equal(
            ended, write(transformer, None, eos_token_id=eos, max_new_tokens=8, **BATCH)
        )
    assert torch.equal(ours.sequences, theirs.sequences)
    assert all(map(torch.equal, ours.scores, theirs.scores))
    assert caches[0].get_seq_length() == caches[1].get_seq_length()
    assert streamed == [*ours.sequences[0].tolist(), "end"]
    for text, stats in zip(ended[:, 5:].tolist(), custom.stats, strict=True):
        assert stats.tokens == (text.index(eos) + 1 if eos in text else 8)


@pytest.mark.filterwarnings("ignore::layerleap.errors.HookedModelWarning")
def test_edits_are_in_force_where_a_hooked_model_is_decoded():
    transformer = ready("llama")
    custom = decoder(None, transformer=transformer, cost=CHEAP)
    edit = ll.edits.SetNeuron(2, 3, 30.0)
    with hooked(transformer.block(1)), transformer.edit(edit) as report:
        ours, passes = write(transformer, custom), report[0].passes
        assert torch.equal(ours, write(transformer, None))
        assert passes == 3
        edited = write(transformer, None)
    with hooked(transformer.block(1)):
        assert not torch.equal(write(transformer, None), edited)


class Adapter(nn.Module):
    """A low-rank adapter around a module, as PEFT puts it there."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.down, self.up = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


def adapted(model):
    mlp = model.model.layers[1].mlp
    mlp.down_proj = Adapter(mlp.down_proj)


def dispatched(model):
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            add_hook_to_module(module, AlignDevicesHook("cpu"), append=True)


def with_hidden_states(model):
    model(PROMPT, output_hidden_states=True, output_attentions=True)
    model.enable_input_require_grads()


@pytest.mark.parametrize("prepare", [adapted, dispatched, with_hidden_states])
def test_adapters_and_hooks_of_libraries_do_not_slow_decoding_down(prepare):
    transformer = ready("llama")
    prepare(transformer.model)
    custom = decoder(None, transformer=transformer, cost=CHEAP)
    with torch.no_grad():
        ours = write(transformer, custom, max_new_tokens=20)
    assert torch.equal(ours, write(transformer, None, max_new_tokens=20))
    assert custom.stats[0].fallback is None
    assert custom.stats[0].drafts > 0


def everywhere(model):
    return register_module_forward_hook(lambda module, args, output: None).remove


def pruned(model):
    prune.l1_unstructured(model.model.layers[1].mlp.down_proj, "weight", 0.5)


def user_hook_of_accelerate(model):
    class Scale(ModelHook):
        def post_forward(self, module, output):
            return output * 2

    add_hook_to_module(model.model.layers[1].mlp, Scale())


def replaced_before_dispatch(model):
    replace_forward(model.model.layers[1])
    dispatched(model)
    add_hook_to_module(model.model.layers[1], AlignDevicesHook("cpu"))


@pytest.mark.parametrize(
    "change", [everywhere, pruned, user_hook_of_accelerate, replaced_before_dispatch]
)
def test_other_ways_to_change_a_forward_pass_are_noticed(change):
    transformer = ready("llama")
    undo = change(transformer.model)
    custom = decoder(None, transformer=transformer, cost=CHEAP)
    try:
        with pytest.warns(HookedModelWarning):
            ours = write(transformer, custom)
        assert torch.equal(ours, write(transformer, None))
    finally:
        if undo is not None:
            undo()


def test_a_cursor_refuses_a_hooked_model_and_runs_it_once_the_hook_is_gone():
    transformer = ready("llama")
    with (
        hooked(transformer.block(2)),
        pytest.raises(ModelRefused, match=r"a forward hook on model\.layers\.1.*remove it"),
    ):
        find_axes(transformer)
    assert find_axes(transformer).branches


@pytest.mark.real
def test_a_real_model_steered_by_a_hook_on_a_block_writes_and_reads_as_it_is_steered(smollm2):
    model, prompt = smollm2.model, "I think that you are"
    ids = smollm2.tokenizer(prompt, return_tensors="pt").input_ids
    options = {"max_new_tokens": 8, "do_sample": False}
    plain = model.generate(ids, **options)
    states = [smollm2.capture(text, layers=[14]).states[14][0, -1] for text in ("Love", "Hate")]
    direction = 6 * (states[0] - states[1])
    handle = smollm2.block(14).register_forward_hook(lambda _, args, output: output + direction)
    try:
        theirs = model.generate(ids, **options)
        with pytest.warns(HookedModelWarning, match=r"model\.layers\.13"):
            ours = ll.generate(smollm2, prompt, max_new_tokens=8)
        with torch.no_grad():
            logits = model(ids).logits[0]
        last = ll.read(smollm2, prompt, bank=None).tracks["logit"].ids[-1, :, 0]
    finally:
        handle.remove()
    assert ours.ids == theirs[0, ids.shape[1] :].tolist()
    assert ours.ids != plain[0, ids.shape[1] :].tolist()
    assert "a forward hook on model.layers.13" in ours.how["decoding"]
    assert last.tolist() == logits.argmax(-1).tolist()
