"""What the user did to a model holds in every pass: states, readings, recordings, facts, banks."""

import contextlib
import threading
import warnings
from functools import partial

import pytest
import torch

import layerleap as ll
from families import build
from layerleap.act.debug.debugger import Debugger
from layerleap.act.edits.places import site_named
from layerleap.errors import HookedModelWarning, ModelRefused
from layerleap.lens.lens import Lens
from layerleap.maps import fit as fit_module
from layerleap.maps.fit import default_bank, find_bank
from layerleap.models.hooks.foreign import foreign_code, unhooked
from layerleap.models.hooks.recording import record
from layerleap.models.metric import Bound
from layerleap.models.prefix import shared_prefix
from layerleap.models.transformer import Transformer
from layerleap.models.weights import feed_forward
from tiny_models import sentences, tiny, tokenizer

FAMILIES = ("gpt2", "gpt_neox", "opt_350m", "bloom", "llama", "gemma2", "falcon", "bert")
IDS = torch.tensor([[5, 9, 7, 8, 11]])
TEXT = "the cat sat on the mat"


def shift(_, args, output, by=1.5):
    """A forward hook that adds a fixed direction to the state."""
    if isinstance(output, tuple):
        return (shift(_, args, output[0], by), *output[1:])
    return output + by * torch.linspace(-1, 1, output.shape[-1]).to(output)


def double(_, args, output):
    return output * 2


def halve(_, args, output):
    return (output[0] * 0.5, *output[1:]) if isinstance(output, tuple) else output * 0.5


def only_the_last(_, args, output):
    if isinstance(output, tuple):
        return (only_the_last(_, args, output[0]), *output[1:])
    steered = output.clone()
    steered[:, -1] += torch.linspace(-9, 9, output.shape[-1]).to(output)
    return steered


def logits(model, **inputs):
    with torch.no_grad():
        return model(**{"input_ids": IDS, **inputs}).logits


def norm_of(transformer):
    return transformer.model.get_submodule(
        next(step.path for step in transformer.tail if step.kind == "module")
    )


@pytest.mark.parametrize("when", ["before loading", "after"])
@pytest.mark.parametrize("name", FAMILIES)
def test_states_and_the_tail_include_hooks_on_blocks_norm_and_head(name, when):
    model = build(name)
    bare = Transformer.wrap(model)
    expected = bare.capture({"input_ids": IDS}).states
    seen, last = [], bare.n_layers
    hooked = [bare.block(2), bare.block(last), norm_of(bare), model.get_output_embeddings()]
    handles = [module.register_forward_hook(shift) for module in hooked]
    transformer = Transformer.wrap(model) if when == "before loading" else bare
    # Theirs, after the hook: what leaves each block.
    handles += [
        transformer.block(b).register_forward_hook(
            lambda _, args, output: seen.append(output[0] if isinstance(output, tuple) else output)
        )
        for b in range(1, last + 1)
    ]
    theirs = logits(model)
    captured = transformer.capture({"input_ids": IDS}, logits=True)
    assert torch.equal(captured.states[0], expected[0])
    assert torch.equal(captured.states[1], expected[1])
    for layer in range(1, last + 1):
        assert torch.equal(captured.states[layer], seen[layer - 1])
    assert not torch.allclose(captured.states[2], expected[2])
    assert torch.equal(captured.logits, theirs)
    torch.testing.assert_close(
        transformer.logits(captured.states[last][0]), theirs[0], rtol=1e-4, atol=1e-4
    )
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(
        transformer.logits(expected[last][0]), logits(model)[0], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("path", ["model", ""])
def test_a_tail_that_a_hook_around_it_makes_wrong_is_refused_until_it_is_gone(path):
    transformer = tiny("llama")
    module = transformer.model.get_submodule(path)
    seen = []
    watching = module.register_forward_hook(lambda *call: seen.append(call))
    Lens(transformer).read(TEXT)  # a hook that changes nothing

    def change(_, args, output):
        key = "logits" if "logits" in output else "last_hidden_state"
        output[key] = double(_, args, output[key]) + 1 * torch.linspace(0, 9, output[key].shape[-1])
        return output

    handle = module.register_forward_hook(change)
    named = path or "the model"
    with pytest.raises(ModelRefused, match=f"forward hook on {named}.*no longer.*remove it"):
        Lens(transformer).read(TEXT)
    handle.remove()
    assert Lens(transformer).read(TEXT)
    watching.remove()
    assert seen


def test_a_hook_on_the_norm_that_treats_positions_differently_is_refused():
    transformer = tiny("llama")
    norm_of(transformer).register_forward_hook(only_the_last)
    with pytest.raises(ModelRefused, match=r"a forward hook on model\.norm"):
        Lens(transformer).read(TEXT)


def test_a_model_that_works_only_with_a_hook_is_verified_with_it_and_refused_without():
    model = build("llama")
    model.lm_head.weight.data[3] = torch.nan
    handle = model.lm_head.register_forward_hook(lambda _, args, output: output.nan_to_num(-9.0))
    transformer = Transformer.wrap(model, tokenizer())
    Lens(transformer).read(TEXT)
    handle.remove()
    with pytest.raises(ModelRefused, match="was verified with a forward hook on lm_head"):
        Lens(transformer).read(TEXT)


def test_a_class_that_is_changed_after_loading_is_noticed(monkeypatch):
    transformer = tiny("llama")
    norm = type(norm_of(transformer))
    own = norm.forward
    monkeypatch.setattr(norm, "forward", lambda self, h: own(self, h) * torch.linspace(0, 1, 24))
    paths = [one.path for one in foreign_code(transformer.model)]
    assert "model.norm" in paths
    theirs = transformer.model(input_ids=torch.tensor([[7, 8, 9]])).logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HookedModelWarning)
        written = ll.generate(transformer, [7, 8, 9], bank=None, max_new_tokens=1)
    assert written.ids[0] == theirs[0, -1].argmax()


def test_a_model_that_fails_a_law_because_of_a_replaced_forward_is_refused_with_its_place():
    model = build("llama")
    own = model.model.layers[1].forward
    noisy = lambda *args, **kwargs: own(*args, **kwargs) + torch.randn(24)  # noqa: E731
    model.model.layers[1].forward = noisy
    with pytest.raises(ModelRefused, match=r"a replaced forward on model\.layers\.1: remove it"):
        Transformer.wrap(model)


@pytest.mark.parametrize("first", ["hook", "load"])
def test_neurons_are_those_of_the_model_whenever_the_hook_came(first):
    model = build("llama")
    transformer = Transformer.wrap(model) if first == "load" else None
    model.model.layers[1].mlp.register_forward_hook(double)
    model.model.layers[1].register_forward_hook(shift)
    transformer = transformer or Transformer.wrap(model)
    ffn = feed_forward(transformer, 2)
    assert ffn.down.path == feed_forward(Transformer.wrap(build("llama")), 2).down.path


def test_edits_act_inside_a_module_and_hooks_around_it():
    transformer = tiny("llama")
    block = transformer.block(2)
    order = []

    def before(_, args):
        order.append("pre-hook")
        return (args[0] + 1, *args[1:])

    block.register_forward_pre_hook(before)
    block.register_forward_hook(double)
    clamp = ll.edits.ClampAlong(2, torch.eye(24)[0], low=3.0, high=3.0)
    patch = ll.edits.PatchState(2, torch.full((24,), 5.0), 1)
    with transformer.edit(clamp, patch):
        h = transformer.capture({"input_ids": IDS}).states[2]
    assert order == ["pre-hook"]
    torch.testing.assert_close(h[0, 0, 0], torch.tensor(6.0))  # clamped, then doubled
    assert torch.equal(h[0, 1], torch.full((24,), 5.0))  # doubled, then patched


@pytest.mark.parametrize("name", FAMILIES[:-1])  # BERT's metric looks at a mask token
def test_patches_and_gradients_are_those_of_what_is_captured_when_a_part_is_hooked(name):
    transformer = Transformer.wrap(build(name).double(), tokenizer(), check=False)
    site, keep = site_named(transformer, 2, "attn"), range(IDS.shape[1])
    with contextlib.ExitStack() as undo:
        for module in (transformer.block(2), transformer.site_module(2, site)):
            undo.callback(module.register_forward_hook(halve).remove)
        read = transformer.capture(
            {"input_ids": IDS},
            sites=[(2, site)],
            gradients=Bound(transformer, lambda logits: logits[:, -1, 4]),
        )
        values, grads = read.sites[2, site][0], read.gradients.sites[2, site][0]
        plain = transformer.capture({"input_ids": IDS}, sites=[(2, site)])
        assert torch.allclose(plain.states[2], read.states[2])
        for state, patch in (
            (plain.states[2][0], partial(ll.edits.PatchState, 2)),
            (plain.sites[2, site][0], partial(ll.edits.PatchSite, 2, "attn")),
        ):
            with transformer.edit(patch(state, keep)):
                again = transformer.capture({"input_ids": IDS})
            assert all(torch.equal(again.states[n], plain.states[n]) for n in range(4))
        along = torch.linspace(-1, 1, 24, dtype=torch.float64)
        at = IDS.shape[1] - 2
        for patch, own, grad in (
            (partial(ll.edits.PatchState, 2), read.states[2][0], read.gradients.states[2][0]),
            (partial(ll.edits.PatchSite, 2, "attn"), values, grads),
        ):
            ends = []
            for sign in (1, -1):
                with transformer.edit(patch(own[at] + sign * 1e-3 * along, at)):
                    ends.append(logits(transformer.model)[0, -1])
            slope = (ends[0] - ends[1])[4] / 2e-3
            torch.testing.assert_close(grad[at] @ along, slope, rtol=2e-2, atol=2e-3)


def test_several_texts_are_read_as_each_alone_when_a_hook_looks_for_the_last_position():
    transformer = tiny("llama")
    transformer.block(2).register_forward_hook(only_the_last)
    lens, texts = Lens(transformer), ["the cat", TEXT]
    for text, together in zip(texts, lens.read(texts), strict=True):
        alone = lens.read(text)
        assert [row["top"] for row in together.rows()] == [row["top"] for row in alone.rows()]


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
def test_texts_padded_on_the_left_run_as_given_when_the_model_is_hooked(name):
    transformer = Transformer.wrap(build(name))
    transformer.block(2).register_forward_hook(only_the_last)
    inputs = {
        "input_ids": torch.tensor([[0, 0, 5, 9, 7]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1]]),
    }
    padded = transformer.capture(inputs).states
    alone = transformer.capture({"input_ids": inputs["input_ids"][:, 2:]}).states
    for layer, h in alone.items():
        torch.testing.assert_close(padded[layer][:, 2:], h, rtol=1e-4, atol=1e-4)


def test_a_hooked_model_shares_no_prefix_pass():
    transformer = tiny("llama")
    texts = [[5, 9, 7, 8, 11, 12, 13, 14, 15, n] for n in (16, 17)]
    assert shared_prefix(transformer, texts, [1, 1]).length == 9
    handle = transformer.block(1).register_forward_hook(only_the_last)
    assert shared_prefix(transformer, texts, [1, 1]).length == 0
    handle.remove()
    assert shared_prefix(transformer, texts, [1, 1]).length == 9


def test_recorded_blocks_run_again_with_the_hooks_on_them():
    transformer = tiny("llama")
    transformer.block(2).register_forward_hook(shift)
    recording = record(transformer, IDS)
    for start in range(transformer.n_layers):
        assert torch.equal(recording.run(recording.states[start], start), recording.states[-1])


def test_a_recording_is_refused_where_a_pre_hook_would_act_twice():
    transformer = tiny("llama")
    handle = transformer.block(1).register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    with pytest.raises(ModelRefused, match=r"forward pre-hook on model\.layers\.0.*ll\.edits"):
        record(transformer, IDS)
    handle.remove()
    assert record(transformer, IDS).states


def test_the_debugger_traces_again_once_a_hook_comes_or_goes():
    transformer = tiny("llama")
    debugger = Debugger(transformer)

    def last():
        frames = debugger.trace(TEXT)
        cells = [cell for f in frames if f["frame"] == "cells" for cell in f["cells"]]
        return {cell["position"]: cell["top"] for cell in cells if cell["layer"] == 3}

    before = last()
    handle = transformer.block(2).register_forward_hook(partial(shift, by=9.0))
    hooked = last()
    assert hooked != before
    ids = torch.tensor([transformer.tokenizer(TEXT)["input_ids"]])
    theirs = logits(transformer.model, input_ids=ids)[0].argmax(-1).tolist()
    assert [hooked[position][0][0] for position in sorted(hooked)] == theirs
    handle.remove()
    assert last() == before


def test_the_default_bank_is_that_of_the_model_itself(monkeypatch, tmp_path):
    """It is kept for these weights, so hooks and edits must not go into it."""
    monkeypatch.setenv("LAYERLEAP_CACHE", str(tmp_path))
    texts = sentences(30)
    monkeypatch.setattr(fit_module, "default_text", lambda _: texts)
    transformer = tiny("llama")
    options = {"progress": False, "ridge": 0.0, "evaluate": False}
    plan = {**fit_module._default_plan(transformer), "ridge": 0.0}
    monkeypatch.setattr(fit_module, "_default_plan", lambda _: plan)
    plain = ll.fit(transformer, texts, plan["sampling"], n_texts=plan["n_texts"], **options)
    transformer.block(2).register_forward_hook(shift)
    with transformer.edit(ll.edits.ZeroNeuron(2, 3)):
        bank = default_bank(transformer, progress=False)
    assert torch.equal(bank[1, 3].weight, plain[1, 3].weight)
    assert torch.equal(find_bank(transformer, "default")[1, 3].weight, plain[1, 3].weight)
    hooked = ll.fit(transformer, texts, plan["sampling"], n_texts=plan["n_texts"], **options)
    assert not torch.equal(hooked[1, 3].weight, plain[1, 3].weight)
    assert hooked.data["hooks"] == "a forward hook on model.layers.1"
    assert "hooks" not in plain.data


def test_hooks_are_silent_on_one_thread_only_and_leave_no_trace():
    transformer, calls = tiny("llama"), []
    block = transformer.block(2)
    handle = block.register_forward_hook(lambda *_: calls.append(threading.get_ident()))
    hooks, code = dict(block._forward_hooks), []

    def work():
        code.extend(foreign_code(transformer.model))
        logits(transformer.model)

    with unhooked(transformer.model):
        assert not foreign_code(transformer.model)
        logits(transformer.model)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert calls == [thread.ident]
    assert [str(one) for one in code] == ["a forward hook on model.layers.1"]
    assert dict(block._forward_hooks) == hooks
    with unhooked(transformer.model):
        handle.remove()
    assert not block._forward_hooks
