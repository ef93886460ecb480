"""Edits of sites, heads and vectors, and what capture reads for them: laws over every family."""

from contextlib import contextmanager

import pytest
import torch

from edit_cases import EXPERTS, OWN_ATTENTION, average, inputs, logits, recording, traces, wrapped
from families import ALL, NEXT_TOKEN
from layerleap.act.edits import (
    AddVector,
    ClampAlong,
    MeanHead,
    PatchHead,
    PatchNeuron,
    PatchSite,
    PatchState,
    ProjectOut,
    ReplaceAttention,
    ScaleHead,
    ScaleSite,
    SetHead,
    SetNeuron,
    TopKAttention,
    ZeroHead,
    ZeroSite,
)
from layerleap.act.metrics import kl, logit
from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.discovery.compare import row_gap as gap
from layerleap.models.transformer import Transformer
from layerleap.models.weights import all_heads, feed_forward, heads
from tiny_models import tiny

WITH_HEADS = [
    name
    for name in ALL
    if all(not isinstance(one, str) for one in all_heads(wrapped(name)).values())
]


def with_parts(name: str) -> list[tuple[int, str]]:
    return [(block, part) for block in (1, 3) for part in wrapped(name).anatomy[block - 1].parts]


def adds(model: Transformer, block: int, part: str):
    """The module that gives what a part adds, found without the code under test."""
    anatomy = model.anatomy[block - 1]
    return model.site_module(block, anatomy.adds[anatomy.parts.index(part)])


@contextmanager
def hooked(module, change, *, on_input=False):
    """A plain PyTorch hook that changes what a module takes or gives."""

    def after(_, args, output):
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    handle = (
        module.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))
        if on_input
        else module.register_forward_hook(after)
    )
    try:
        yield
    finally:
        handle.remove()


def plain(name: str) -> torch.Tensor:
    with torch.no_grad():
        return wrapped(name).model(**inputs(name)).logits


@pytest.mark.parametrize("name", ALL)
def test_patching_in_what_is_there_changes_nothing_bit_for_bit(name):
    model, clean = wrapped(name), recording(name).logits
    for block, part in with_parts(name):
        site = (block, model.anatomy[block - 1].adds[model.anatomy[block - 1].parts.index(part)])
        own = model.capture(inputs(name), layers=[], sites=[site]).sites[site]
        with model.edit(PatchSite(block, part, own[[0, 1], [1, 0]], [1, 0], [0, 1])) as report:
            assert torch.equal(logits(name), clean)
        assert report[0].positions == 2
    if name in WITH_HEADS:
        own = model.capture(inputs(name), layers=[], heads=[2]).heads[2]
        with model.edit(PatchHead(2, 1, own[0, :3, 1], [0, 1, 2], [0] * 3)) as report:
            assert torch.equal(logits(name), clean)
        assert report[0].positions == 3
    if name not in EXPERTS:
        site = (2, feed_forward(model, 2).site)
        own = model.capture(inputs(name), layers=[], sites=[site]).sites[site]
        with model.edit(PatchNeuron(2, 5, own[0, :3, 5:6], [0, 1, 2], [0] * 3)) as report:
            assert torch.equal(logits(name), clean)
        assert report[0].positions == 3


@pytest.mark.parametrize("name", [name for name in ALL if name not in EXPERTS])
def test_patched_and_scaled_parts_are_those_of_a_plain_hook(name):
    if name == "albert":  # a hook of a shared block runs in every layer
        return
    model = wrapped(name)
    value = torch.randn(
        model.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    mask = inputs(name).get("decoder_attention_mask", inputs(name).get("attention_mask"))
    for block, part in with_parts(name):
        shape = recording(name).states[0].shape
        real = torch.ones(shape[:2]) if mask is None else mask

        def put(h, shape=shape):  # OPT hands over rows without the batch axis
            own = h.reshape(shape).clone()
            own[1, 1] = value
            return own.view_as(h)

        def halved(h, shape=shape, real=real):
            return (h.reshape(shape) * (1 - 0.5 * real[..., None].double())).view_as(h)

        edits = {put: PatchSite(block, part, value, 1, 1), halved: ScaleSite(block, part, 0.5)}
        for change, edit in edits.items():
            with hooked(adds(model, block, part), change):
                theirs = plain(name)
            with model.edit(edit):
                assert torch.equal(logits(name), theirs)
            if block < 3:  # after the last one, some heads look at one position only
                assert not torch.equal(theirs, recording(name).logits)


@pytest.mark.parametrize("name", WITH_HEADS)
def test_a_head_that_is_off_adds_what_its_output_matrix_made_of_it_no_more(name):
    model = wrapped(name)
    before = model.capture(inputs(name), layers=[], sites=[(2, "attn.out")], heads=True)
    assert sorted(before.heads) == [1, 2, 3]
    own = heads(model, 2)
    assert before.heads[2].shape[2:] == (own.n_heads, own.d_value)
    gives = before.heads[2][:, :, 1]
    weight = own.outputs.of(model).T[own.d_value : 2 * own.d_value]
    mask = inputs(name).get("decoder_attention_mask", inputs(name).get("attention_mask"))
    real = torch.ones(gives.shape[:2]) if mask is None else mask
    cases = {
        0.0: ZeroHead(2, 1),
        -1.5: ScaleHead(2, 1, -1.5),
        None: SetHead(2, 1, torch.ones(own.d_value)),
    }
    for factor, edit in cases.items():
        with model.edit(edit):
            after = model.capture(inputs(name), layers=[], sites=[(2, "attn.out")])
        new = torch.ones_like(gives) if factor is None else factor * gives
        change = (new - gives) @ weight * real[..., None]
        ours = after.sites[2, "attn.out"] - before.sites[2, "attn.out"]
        torch.testing.assert_close(ours, change, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NEXT_TOKEN)
def test_edits_stay_in_their_causal_cone(name):
    model, clean = wrapped(name), recording(name)
    vector = torch.randn(model.d_model, generator=torch.Generator().manual_seed(5))
    at = {"positions": [3]}
    edits = [ScaleSite(2, "attn", -2.0, **at), ZeroSite(2, "ffn", **at)]
    edits += [AddVector(2, vector, 3.0, **at), ProjectOut(2, vector, **at)]
    edits += [ClampAlong(2, vector, low=5.0, **at)]
    edits += [ZeroHead(2, 1, **at)] if name in WITH_HEADS else []
    for edit in edits:
        with model.edit(edit):
            captured = model.capture(inputs(name), logits=True)
        for layer in range(4):
            ours, theirs = captured.states[layer], clean.states[layer]
            still = ours[:, :3], theirs[:, :3]
            assert torch.equal(*still) or (name in EXPERTS and gap(*still) < 1e-9)
            assert torch.equal(ours, theirs) == (layer < 2)
        assert not torch.equal(captured.logits, clean.logits)


@pytest.mark.parametrize("name", ALL)
def test_states_move_along_a_vector_as_the_edit_says(name):
    model, clean = wrapped(name), recording(name).states
    vector = torch.randn(model.d_model, generator=torch.Generator().manual_seed(6)).double()
    unit = vector / vector.norm()
    for layer in (0, 2, 3):
        before = clean[layer][:2]
        wanted = {
            AddVector(layer, vector, -0.5): before - 0.5 * vector,
            ProjectOut(layer, vector): before - (before @ unit)[..., None] * unit,
            ClampAlong(layer, vector, low=-0.1, high=0.2): before
            + ((before @ unit).clamp(-0.1, 0.2) - before @ unit)[..., None] * unit,
        }
        for edit, after in wanted.items():
            with model.edit(edit):
                ours = model.capture(inputs(name), layers=[layer]).states[layer][:2]
            torch.testing.assert_close(ours, after, rtol=1e-6, atol=1e-6)


def test_the_mean_head_gives_its_mean_over_real_positions_of_the_prompts():
    model = tiny("llama")
    prompts = ["the cat sat", "a dog ran on the mat"]
    alone = [model.capture(one, layers=[], heads=[2]).heads[2][0, :, 1] for one in prompts]
    mean = torch.cat(alone).double().mean(0).float()
    with model.edit(MeanHead(2, 1, over=prompts)):
        after = model.capture("the moon slept", layers=[], heads=[2]).heads[2][0]
    torch.testing.assert_close(after[:, 1], mean.expand(3, -1))
    with model.edit("L2.H1=mean") as report:
        model.capture("the moon slept")
    assert report[0].positions == 3


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_the_mask_of_an_encoder_says_nothing_of_the_positions_of_its_decoder(name):
    model = wrapped(name)
    ids = torch.tensor([[5, 9, 7, 8, 11], [6, 4, 12, 0, 0]])
    over = {"input_ids": ids, "attention_mask": ids.ne(0).long(), "decoder_input_ids": ids[:, :3]}
    mean = model.capture(over, layers=[], heads=[2]).heads[2][:, :, 1].mean((0, 1))
    with model.edit(MeanHead(2, 1, over=over)):
        after = model.capture(inputs(name), layers=[], heads=[2]).heads[2][:, :, 1]
    torch.testing.assert_close(after, mean.expand_as(after))


@pytest.mark.parametrize("name", [name for name in ALL if name not in OWN_ATTENTION])
def test_attention_weights_sum_to_one_and_make_what_the_heads_give(name):
    model = wrapped(name)
    captured = model.capture(inputs(name), layers=[], attention=True)
    assert sorted(captured.attention) == [1, 2, 3]
    mask = inputs(name).get("decoder_attention_mask", inputs(name).get("attention_mask"))
    for weights in captured.attention.values():
        n = weights.shape[-1]
        real = torch.ones(len(weights), n) if mask is None else mask
        of_real = weights.transpose(1, 2)[real.bool()]
        total = of_real.sum(-1)
        if name == "gpt_oss":  # a sink takes the rest
            assert (total < 1).all()
        else:
            torch.testing.assert_close(total, torch.ones_like(total))
        if model.kind == "next-token":
            assert not weights[0].triu(1).any()
        assert not (
            of_real * (1 - real.double()).repeat_interleave(real.sum(1).long(), 0)[:, None]
        ).any()


def test_attention_of_a_shared_block_is_told_apart_by_layer():
    model = wrapped("albert")
    every = model.capture(inputs("albert"), layers=[], attention=True).attention
    assert not torch.equal(every[1], every[3])
    for blocks in ([3], [2], [1, 3]):
        some = model.capture(inputs("albert"), layers=[], attention=blocks).attention
        assert all(torch.equal(some[block], every[block]) for block in blocks)


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert", "t5"])
def test_attention_weights_times_values_are_what_the_heads_give(name):
    model = wrapped(name)
    own = heads(model, 2)
    read = model.capture(inputs(name), layers=[1], sites=[(2, "attn.in")], heads=[2], attention=[2])
    root = model.model.get_submodule(own.values.path)
    with torch.no_grad():
        values = root(read.sites[2, "attn.in"])
    values = values[..., list(own.values.chosen)] if own.values.chosen else values
    values = values.unflatten(-1, (own.n_kv_heads, own.d_value))
    values = values.repeat_interleave(own.n_heads // own.n_kv_heads, 2).transpose(1, 2)
    gives = (read.attention[2] @ values).transpose(1, 2)
    torch.testing.assert_close(gives[:2], read.heads[2][:2], rtol=1e-9, atol=1e-9)
    keep = torch.zeros(3, 7, dtype=torch.bool)
    keep[1, 2] = keep[0, 5] = True
    rows = model.capture(inputs(name), layers=[], attention=[2], heads=[2], keep=keep)
    assert torch.equal(rows.attention[2], read.attention[2].transpose(1, 2)[keep])
    assert torch.equal(rows.heads[2], read.heads[2][keep])


@pytest.mark.parametrize("name", ALL)
def test_gradients_are_those_of_finite_differences(name):
    model = wrapped(name)
    if model.kind == "masked-token":
        return  # the next test
    chosen = {"heads": [2]} if name in WITH_HEADS else {}
    first = 0 if model.kind.endswith("class") else 4
    read = model.capture(
        inputs(name),
        sites=[(2, "ffn.out")],
        gradients=lambda logits: logits[:, first] - logits[:, 1],
        logits=True,
        **chosen,
    )
    torch.testing.assert_close(read.states[2], recording(name).states[2])  # other kernels
    torch.testing.assert_close(read.logits, recording(name).logits)
    text, position = 1, read.states[2].shape[1] - 2
    generator = torch.Generator().manual_seed(1)
    along = torch.randn(model.d_model, dtype=torch.float64, generator=generator)
    step = 2e-3  # many norms compute in float32 whatever the dtype
    patches = {
        "state": lambda value: PatchState(2, value, position, text),
        "site": lambda value: PatchSite(2, "ffn.out", value, position, text),
    }
    found = {
        "state": (read.states[2], read.gradients.states[2]),
        "site": (read.sites[2, "ffn.out"], read.gradients.sites[2, "ffn.out"]),
    }
    for kind, (values, grads) in found.items():
        ends = []
        for sign in (1, -1):
            with model.edit(patches[kind](values[text, position] + sign * step * along)):
                own = logits(name)[text].reshape(-1, model.d_vocab)[-1]
            ends.append(own[first] - own[1])
        slope = (ends[0] - ends[1]) / (2 * step)
        torch.testing.assert_close(grads[text, position] @ along, slope, rtol=2e-2, atol=2e-3)
    if chosen:
        assert read.gradients.heads[2].shape == read.heads[2].shape
    assert not any(parameter.grad is not None for parameter in model.model.parameters())


def test_gradients_are_the_same_in_inference_mode():
    model, prompt = tiny("gpt2"), "the cat sat"
    outside = model.capture(prompt, heads=True, gradients=logit("sat"))
    with torch.inference_mode():
        inside = model.capture(prompt, heads=True, gradients=logit("sat"))
    for layer, gradient in outside.gradients.states.items():
        assert torch.equal(inside.gradients.states[layer], gradient)
        assert not inside.states[layer].is_inference()


def test_masked_models_are_differentiated_at_their_mask():
    model = tiny("bert")
    prompt = "the cat <mask> on the mat"
    read = model.capture(prompt, layers=[3], gradients=logit("sat"))
    grad = read.gradients.states[3][0]
    assert grad[3].any()  # after <bos>
    assert not grad[[0, 1, 2, 4, 5, 6, 7]].any()
    with pytest.raises(Exception, match="0 mask tokens; expected 1"):
        model.capture("the cat sat", gradients=logit("sat"))


def test_edits_of_all_kinds_compose_in_the_order_given():
    model, name = wrapped("llama"), "llama"
    vector = torch.ones(24)
    edits = [
        SetNeuron(1, 3, 2.0),
        ZeroHead(2, 1),
        AddVector(2, vector, 0.5),
        TopKAttention(k=2),
        ScaleSite(3, "attn", 2.0),
        ReplaceAttention(average, [1]),
    ]
    before = traces(model.model)
    with model.edit(*edits) as together:
        all_at_once = logits(name)
    assert not together.unused
    with model.edit(*edits[:3]), model.edit(*edits[3:]):
        assert torch.equal(logits(name), all_at_once)
    assert traces(model.model) == before
    assert torch.equal(logits(name), recording(name).logits)


def test_what_does_not_exist_is_refused_in_one_sentence():
    model = wrapped("llama")
    vector = torch.ones(24)
    for edit, message in (
        (ZeroHead(2, 4), "head 4 does not exist: block 2 has heads 0 to 3"),
        (ZeroHead(4, 0), "block 4 does not exist"),
        (ScaleSite(2, "cross", 2.0), "no site 'cross' in block 2; expected one of: attn, ffn"),
        (PatchHead(2, 0, torch.ones(5), 0), "width 5 .* expected its width, 6"),
        (PatchSite(2, "attn", torch.ones(5), 0), "width 5 .* expected its width, 24"),
        (PatchNeuron(2, 40, torch.ones(1, 1), 0), "neuron 40 does not exist"),
        (SetHead(2, 0, torch.ones(5)), "expected 6 finite numbers"),
        (AddVector(4, vector), "layer 4 does not exist"),
        (AddVector(2, torch.ones(23)), "width 23 .* expected its width, 24"),
    ):
        with pytest.raises(BadSettings, match=message), model.edit(edit):
            pass
    for make, message in (
        (lambda: AddVector(2, vector * 0), "not all 0"),
        (lambda: AddVector(2, vector, float("nan")), "factor is nan"),
        (lambda: AddVector(2, vector, 1.0, "state"), "needs a Direction"),
        (lambda: ClampAlong(2, vector), "neither low nor high"),
        (lambda: ClampAlong(2, vector, low=2.0, high=1.0), "expected low <= high"),
        (lambda: ScaleHead(2, 1, float("inf")), "factor is inf"),
    ):
        with pytest.raises(BadSettings, match=message):
            make()
    with pytest.raises(ModelRefused, match="reads images"), wrapped("vit").edit(ZeroHead(1, 0)):
        pass
    with pytest.raises(BadSettings, match="has no gradient"):
        model.capture(inputs("llama"), gradients=kl())
    with pytest.raises(ModelRefused, match="attention interface"):
        wrapped("gptj").capture(inputs("gptj"), attention=[1])
