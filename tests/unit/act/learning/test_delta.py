"""Deltas: values that are added, scaled, saved, applied and read, for one model only."""

import json
import threading

import pytest
import torch

import layerleap as ll
from families import build
from layerleap.act.edits import ApplyDelta
from layerleap.act.learning.delta import Delta
from layerleap.act.learning.descent import learn
from layerleap.act.learning.reading import read_delta
from layerleap.errors import BadArtifact, BadSettings, CannotWrite, ModelRefused, WrongModel
from layerleap.models.cursor.packed import Packed
from layerleap.models.transformer import Transformer
from layerleap.models.weights import heads
from learning_cases import demonstrations
from tiny_models import tiny, tokenizer


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.fixture(scope="module")
def delta(model):
    return learn(model, demonstrations(), how="layer-causal", learning_rate=0.3).delta


def logits(model, *edits):
    with torch.no_grad():
        if not edits:
            return model.model(torch.tensor([[7, 8, 9]])).logits
        with model.edit(*edits):
            return model.model(torch.tensor([[7, 8, 9]])).logits


def same(a: Delta, b: Delta) -> bool:
    return set(a.tensors) == set(b.tensors) and all(
        torch.equal(a.tensors[name], b.tensors[name]) for name in a.tensors
    )


def test_a_saved_delta_is_the_same_bits_and_says_how_it_was_learned(model, delta, tmp_path):
    loaded = Delta.from_pretrained(delta.save_pretrained(tmp_path / "delta"))
    assert same(delta, loaded)
    assert loaded.settings == delta.settings
    assert loaded.settings["how"] == "layer-causal"
    assert loaded.settings["learning_rate"] == 0.3
    assert torch.equal(logits(model, ApplyDelta(loaded)), logits(model, ApplyDelta(delta)))


def test_a_damaged_delta_or_a_full_folder_is_refused(delta, tmp_path):
    folder = delta.save_pretrained(tmp_path / "delta")
    config = json.loads((folder / "delta.json").read_text())
    (folder / "delta.json").write_text(json.dumps({**config, "n_layers": 5}))
    with pytest.raises(BadArtifact, match="changed after it was saved"):
        Delta.from_pretrained(folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years")
    with pytest.raises(CannotWrite, match="holds other files than a delta"):
        delta.save_pretrained(tmp_path / "other")


def test_deltas_add_up_and_scale(model, delta):
    double, none = delta + delta, delta - delta
    assert same(double, 2 * delta)
    assert none.norm() == 0
    assert (-delta).norm() == pytest.approx(delta.norm())
    assert torch.equal(logits(model, ApplyDelta(none)), logits(model))
    assert torch.equal(
        logits(model, ApplyDelta(double)), logits(model, ApplyDelta(delta, factor=2.0))
    )
    torch.testing.assert_close(
        logits(model, ApplyDelta(delta), ApplyDelta(delta)), logits(model, ApplyDelta(double))
    )
    with model.edit(ApplyDelta(delta)):
        nested = logits(model, ApplyDelta(delta))
    torch.testing.assert_close(nested, logits(model, ApplyDelta(double)))
    assert sum(norm**2 for norm in delta.norms().values()) == pytest.approx(delta.norm() ** 2)


def test_deltas_of_other_parameters_are_joined(model):
    keys = learn(model, demonstrations(), learning_rate=0.1, parameters="keys").delta
    values = learn(model, demonstrations(), learning_rate=0.1, parameters="values").delta
    assert set((keys + values).tensors) == set(keys.tensors) | set(values.tensors)


def test_a_delta_belongs_to_one_model(model, delta):
    other = tiny("llama", seed=1)
    with pytest.raises(WrongModel, match="belongs to tiny-llama"), other.edit(ApplyDelta(delta)):
        pass
    foreign = learn(other, demonstrations(), learning_rate=0.1).delta
    with pytest.raises(WrongModel, match="their weights differ"):
        _ = delta + foreign
    with pytest.raises(WrongModel):
        delta.merged(other)
    with pytest.raises(BadSettings, match="does not fit"):
        Delta.of(model, {"model.norm.weight": torch.zeros(3)})
    with pytest.raises(BadSettings, match="is not a Delta"), model.edit(ApplyDelta("delta")):
        pass


def test_a_tied_matrix_changes_at_both_of_its_ends():
    model = Transformer.wrap(build("gpt2"))
    name = "transformer.wte.weight"
    delta = Delta.of(model, {name: torch.randn(61, 24) * 0.1})
    assert model.model.lm_head.weight is model.model.transformer.wte.weight
    assert torch.equal(
        logits(model, ApplyDelta(delta)), delta.merged(model)(torch.tensor([[7, 8, 9]])).logits
    )
    h = torch.randn(2, 24)
    with model.edit(ApplyDelta(delta)):  # the head alone, outside a pass
        read = model.logits(h)
    merged = Transformer.wrap(delta.merged(model), model.tokenizer)
    assert torch.equal(read, merged.logits(h))


def test_other_threads_never_see_a_delta(model, delta):
    before, seen = logits(model), []
    with model.edit(ApplyDelta(delta)):
        thread = threading.Thread(
            target=lambda: seen.append(model.model(torch.tensor([[7, 8, 9]])).logits)
        )
        thread.start()
        thread.join()
        assert not torch.equal(model.model(torch.tensor([[7, 8, 9]])).logits, before)
    assert torch.equal(seen[0], before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generation_with_a_delta_is_that_of_the_merged_model(dtype):
    model = Transformer.wrap(build("llama").to(dtype), tokenizer())
    delta = Delta.of(
        model, {n: torch.randn(p.shape) * 0.1 for n, p in model.model.named_parameters()}
    )
    merged = Transformer.wrap(delta.merged(model), model.tokenizer)
    prompt = torch.tensor([[7, 8, 9, 10]])
    plain = merged.model.generate(prompt, max_new_tokens=12, do_sample=False)
    assert not torch.equal(plain, model.model.generate(prompt, max_new_tokens=12, do_sample=False))
    with model.edit(ApplyDelta(delta)):
        ours = model.model.generate(prompt, max_new_tokens=12, do_sample=False)
        fast = ll.generate(model, [7, 8, 9, 10], bank=None, max_new_tokens=12)
    assert torch.equal(ours, plain)
    assert fast.tokens == ll.generate(merged, [7, 8, 9, 10], bank=None, max_new_tokens=12).tokens


def test_packed_copies_of_the_weights_do_not_hide_a_delta(model, delta):
    packed = Packed.of(model.model, sizes=[3])
    if packed is None:
        pytest.skip("no layout of packed weights on this machine")
    with torch.no_grad(), model.edit(ApplyDelta(delta)), packed.in_use(model.model):
        ours = model.model(torch.tensor([[7, 8, 9]]), use_cache=False).logits
    torch.testing.assert_close(ours, logits(model, ApplyDelta(delta)))


def test_small_steps_in_half_precision_are_not_lost():
    model = Transformer.wrap(build("llama").to(torch.bfloat16))
    many = learn(model, demonstrations(8), learning_rate=1e-4).delta
    assert all(value.dtype == torch.float32 for value in many.tensors.values())
    weight = many.tensors["model.layers.0.self_attn.v_proj.weight"]
    assert (weight != weight.to(torch.bfloat16).float()).any()
    assert many.norm() > learn(model, demonstrations(1), learning_rate=1e-4).delta.norm()


def test_training_applied_is_training_merged_bit_for_bit(model, delta):
    merged = Transformer.wrap(delta.merged(model), model.tokenizer)
    for name, value in delta.values(model).items():
        assert torch.equal(merged.model.get_parameter(name), value)
    further = learn(model, demonstrations(5)[3:], learning_rate=0.2, start=delta)
    again = learn(merged, demonstrations(5)[3:], learning_rate=0.2)
    assert further.losses[0] == again.losses[0]
    whole = learn(model, demonstrations(5), learning_rate=0.2)
    first = learn(model, demonstrations(5)[:3], learning_rate=0.2).delta
    assert same(
        whole.delta, learn(model, demonstrations(5)[3:], learning_rate=0.2, start=first).delta
    )


def test_a_change_of_one_direction_is_read_as_its_tokens(model):
    own = heads(model, 2)
    embedding = model.model.get_input_embeddings().weight.detach()
    values = torch.randn(own.n_kv_heads * own.d_value)
    tensor = torch.outer(values, embedding[17])
    delta = Delta.of(model, {f"{own.values.path}.weight": tensor})
    (direction,) = read_delta(model, delta, 2, "attn.v", top=3)
    assert direction.share == pytest.approx(1.0)
    assert direction.size == pytest.approx(float(values.norm() * embedding[17].norm()), rel=1e-5)
    reads, writes = direction.vectors
    assert (reads.role, writes.role) == ("reads", "writes")
    ends = {reads.promotes[0].token.id, reads.suppresses[0].token.id}
    scores = embedding @ embedding[17]
    assert int(scores.argmax()) in ends
    assert "L2 attn.v, 100%" in repr(direction)
    json.dumps(direction.to_dict())


@pytest.mark.parametrize(
    "kind", ["attn.q", "attn.k", "attn.v", "attn.o", "ffn.gate", "ffn.up", "ffn.value"]
)
def test_every_kind_of_change_can_be_read(model, kind):
    delta = learn(model, demonstrations(), learning_rate=0.1, parameters="blocks").delta
    found = read_delta(model, delta, 1, kind, directions=2)
    assert len(found) == 2
    assert found[0].size >= found[1].size
    assert 0 < found[1].share <= found[0].share < 1


def test_what_cannot_be_read_is_said(model, delta):
    with pytest.raises(BadSettings, match=r"does not change ffn\.value of block 1"):
        read_delta(model, delta, 1, "ffn.value")
    with pytest.raises(BadSettings, match="kind is 'values'"):
        read_delta(model, delta, 1, "values")
    with pytest.raises(ModelRefused, match=r"has no ffn\.key"):
        read_delta(model, delta, 1, "ffn.key")
    with pytest.raises(BadSettings, match="expected 1 or more"):
        read_delta(model, delta, 1, top=0)
