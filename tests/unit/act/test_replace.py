"""Parts replaced by maps: exact where a part is linear, in force inside a `with` only."""

from functools import cache

import pytest
import torch
from torch import nn

from edit_cases import cascade
from families import build
from layerleap.act.edits.replace import PartMaps, ReplaceParts
from layerleap.errors import BadSettings, ModelRefused, WrongModel
from layerleap.maps.fit import solve_bank
from layerleap.models.discovery.compare import row_gap as gap
from layerleap.models.discovery.trace import shape_of
from layerleap.models.hooks.recording import record
from layerleap.models.transformer import Transformer
from layerleap.stats.collect import collect
from layerleap.stream.examples import Sampling, iter_batches, iter_examples
from tiny_models import sentences, tiny, tokenizer

TEXTS = sentences(80)
SAMPLING = Sampling(unit="document", held_out=0.0)


class ScaleNorm(nn.Module):
    """Named like a norm: an elementwise scale, perhaps with a shift."""

    def __init__(self, like: nn.Module, *, shift: bool) -> None:
        super().__init__()
        self.weight = like.weight
        self.shift = nn.Parameter(torch.randn(24)) if shift else None

    def forward(self, x):
        return x * self.weight if self.shift is None else x * self.weight + self.shift


def with_linear_ffn(model) -> None:
    for block in model.model.layers:
        block.mlp = nn.Linear(24, 24, bias=False)


def with_plain_norms(model, *, shift: bool = False) -> None:
    for block in model.model.layers:
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(block, name, ScaleNorm(getattr(block, name), shift=shift))


def toy(change) -> Transformer:
    torch.manual_seed(5)
    model = build("llama")
    change(model)
    with torch.no_grad():  # small, or three blocks without norms leave the range of tests
        for block in model.model.layers:
            for parameter in block.parameters():
                parameter.mul_(0.3)
    return Transformer.wrap(model.double(), tokenizer(), name="toy")


@cache
def fitted(name: str = "llama", *, intercept: bool = False) -> PartMaps:
    model = tiny(name)
    return PartMaps(
        model, solve_bank(collect(model, TEXTS, SAMPLING, parts=True), intercept=intercept)
    )


def first_batch(model: Transformer):
    return next(iter_batches(model, iter_examples(model, TEXTS[:4], SAMPLING)))


def errors(model: Transformer, kind: str, *, intercept: bool) -> list[float]:
    """How far the last states move when a kind is replaced, by start."""
    bank = solve_bank(collect(model, TEXTS, SAMPLING, parts=[kind]), intercept=intercept)
    batch = first_batch(model)
    found = record(model, batch.inputs)
    return [
        gap(cascade(PartMaps(model, bank), found, batch.keep, [kind], start), h[batch.keep])
        for start in range(model.n_layers)
        for h in (found.states[-1],)
    ]


def test_an_ffn_that_is_linear_is_replaced_without_a_difference():
    assert max(errors(toy(with_linear_ffn), "ffn", intercept=False)) < 1e-8


def test_norms_that_are_scales_are_replaced_without_a_difference():
    assert max(errors(toy(with_plain_norms), "norms", intercept=False)) < 1e-8


def test_a_shift_needs_an_intercept():
    model = toy(lambda model: with_plain_norms(model, shift=True))
    without, with_one = (errors(model, "norms", intercept=i) for i in (False, True))
    assert max(with_one) < 1e-8
    assert min(without) > 1e-3


def test_real_norms_with_bias_are_nearer_with_an_intercept():
    """On the training rows, where least squares guarantees it."""
    with_one, without = fitted("gpt2", intercept=True), fitted("gpt2")
    for key, fit in with_one.bank.part_fits.items():
        if "norm" in key[1]:
            assert fit.train_r2 > without.bank.part_fits[key].train_r2


@pytest.mark.parametrize("kind", ["attn", "ffn", "norms"])
def test_gpt2_with_a_part_replaced_is_the_equation_of_its_block(kind):
    """h' = h + attn(ln_1(h)), out = h' + ffn(ln_2(h')), with one part a matrix."""
    own = fitted("gpt2")
    model, part = own.transformer, own.bank.parts
    batch = first_batch(model)
    found = record(model, batch.inputs)
    h = found.states[1]
    with torch.no_grad():
        for number in (2, 3):
            block, call = model.model.transformer.h[number - 1], found.calls[number - 1]
            matrix = {name: part[number, name].weight for b, name in part if b == number}
            u = h @ matrix["attn_norm"] if kind == "norms" else block.ln_1(h)
            mask = call.kwargs.get("attention_mask", call.args[3] if len(call.args) > 3 else None)
            a = u @ matrix["attn"] if kind == "attn" else block.attn(u, attention_mask=mask)[0]
            h = h + a
            w = h @ matrix["ffn_norm"] if kind == "norms" else block.ln_2(h)
            h = h + (w @ matrix["ffn"] if kind == "ffn" else block.mlp(w))
    ours = cascade(own, found, batch.keep, [kind], 1)
    assert gap(ours, h[batch.keep]) < 1e-5
    assert gap(ours, found.rows(batch.keep)[3]) > 1e-3


def test_a_replaced_part_is_not_computed():
    own, ran = fitted(), []
    assert own.is_local  # tried once, with passes of its own
    batch = first_batch(own.transformer)
    found = record(own.transformer, batch.inputs)
    handles = [
        module.register_forward_hook(lambda *_, path=path: ran.append(path))
        for path, module in own.transformer.model.named_modules()
        if path.endswith(("q_proj", "down_proj"))
    ]
    cascade(own, found, batch.keep, ["attn", "ffn"], 1)
    assert ran == []
    cascade(own, found, batch.keep, ["ffn"], 1)
    for handle in handles:
        handle.remove()
    assert ran == [f"model.layers.{block}.self_attn.q_proj" for block in (1, 2)]


def test_a_forward_that_another_library_set_comes_back():
    own = fitted()
    model = own.transformer
    module = model.model.model.layers[2].mlp
    plain = module.forward

    def theirs(*args, **kwargs):
        return plain(*args, **kwargs)

    module.forward = theirs
    try:
        with model.edit(own.replacing(["ffn"])):
            assert module.__dict__["forward"] is not theirs
            with model.edit(own.replacing(["ffn"], 2)):  # one inside another
                pass
            assert module.__dict__["forward"] is not theirs
        assert module.__dict__["forward"] is theirs
    finally:
        del module.forward
    with model.edit(own.replacing(["ffn"])):
        assert "forward" in module.__dict__
    assert "forward" not in module.__dict__


def test_other_hooks_of_a_replaced_module_still_run():
    own, seen = fitted(), []
    batch = first_batch(own.transformer)
    module = own.transformer.model.model.layers[2].mlp
    handle = module.register_forward_hook(lambda _, args, output: seen.append((args[0], output)))
    with own.transformer.edit(own.replacing(["ffn"])):
        own.transformer.capture(batch.inputs)
    handle.remove()
    [(taken, given)] = seen
    torch.testing.assert_close(given, own.bank.parts[3, "ffn"](taken))


def test_what_cannot_be_replaced_is_refused_with_the_reason():
    model = fitted().transformer
    bare = solve_bank(collect(model, TEXTS, SAMPLING))
    with pytest.raises(BadSettings, match="has no maps of parts: fit it with parts=True"):
        PartMaps(model, bare)
    some = solve_bank(collect(model, TEXTS, SAMPLING, parts=["ffn"]))
    with (
        pytest.raises(BadSettings, match="no maps of attn, only of ffn"),
        model.edit(ReplaceParts(some, ["attn"])),
    ):
        pass
    holes = some.changed(parts={key: m for key, m in some.parts.items() if key[0] != 2})
    with pytest.raises(BadSettings, match="maps of ffn, but none of ffn of block 2"):
        PartMaps(model, holes)
    with pytest.raises(WrongModel, match="fit a bank for"):
        PartMaps(tiny("llama", seed=1), some)
    with (
        pytest.raises(BadSettings, match="the kind of parts is 'heads'; expected one of 'attn'"),
        model.edit(ReplaceParts(fitted().bank, ["heads"])),
    ):
        pass
    with (
        pytest.raises(BadSettings, match="layer 4 does not exist"),
        model.edit(ReplaceParts(fitted().bank, [], 4)),
    ):
        pass


def test_a_module_that_returns_a_dictionary_has_no_shape_to_copy():
    with pytest.raises(ModelRefused, match="returns a dict"):
        shape_of({"state": torch.zeros(1)})
    shape = shape_of((None, torch.zeros(1), torch.ones(2)))
    state = torch.ones(3)
    assert shape(state) == (None, state, None)


def test_blocks_that_do_not_exist_cannot_be_run():
    found = record(fitted().transformer, first_batch(fitted().transformer).inputs)
    for start, stop in ((-1, 2), (2, 1), (0, 4)):
        with pytest.raises(BadSettings, match="layers 0 to 3"):
            found.run(found.states[0], start, stop)


def test_rows_of_a_recording_are_those_that_capture_gathers():
    model = fitted().transformer
    batch = first_batch(model)
    found, seen = record(model, batch.inputs), model.capture(batch.inputs, keep=batch.keep)
    assert found.logits is None
    for layer, rows in found.rows(batch.keep).items():
        assert torch.equal(rows, seen.states[layer])


def test_a_pass_of_another_number_of_blocks_is_refused(monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr(type(model), "n_layers", 4)
    with pytest.raises(ModelRefused, match=r"layers \[4\] were never reached"):
        record(model, {"input_ids": torch.tensor([[5, 6, 7]])})
