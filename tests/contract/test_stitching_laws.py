"""Laws of stitching: to itself nothing changes, to a rotated copy nothing but the basis."""

import pytest
import torch

import layerleap as ll
from families import NEXT_TOKEN, build
from layerleap.act.stitch.translation import translate
from layerleap.maps.kernel import embedding_kernel
from layerleap.models.transformer import Transformer
from rotated import plain_llama, rotated, rotation

IDS = torch.tensor([[9, 17, 33, 8, 51, 20], [12, 40, 7, 0, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
BATCH = {"input_ids": IDS, "attention_mask": MASK}
# Both blocks and tails of many kinds: pre-norm, norms after the parts, parallel, fused matrices.
TRANSLATED = ("llama", "gpt2", "qwen2", "gemma", "gemma2", "olmo2", "phi", "gpt_neox", "opt")


def wrap(name: str, seed: int = 0) -> Transformer:
    model = build(name, seed)
    if hasattr(model.config, "_experts_implementation"):
        model.set_experts_implementation("eager")
    return Transformer.wrap(model, check=False)


@pytest.mark.parametrize("name", NEXT_TOKEN)
def test_a_model_stitched_to_itself_gives_the_same_bits(name):
    model = wrap(name)
    own = model.capture(BATCH, layers=(), logits=True).logits
    for layer in (0, 1, model.n_layers):
        stitched = ll.stitch(model, layer, model, layer, "identity")
        assert torch.equal(stitched(BATCH)[MASK.bool()], own[MASK.bool()]), layer


def test_a_seam_between_different_layers_is_a_different_model():
    model = wrap("llama")
    own = model.capture(BATCH, layers=(), logits=True).logits
    skipping = ll.stitch(model, 0, model, 2, "identity")
    assert not torch.allclose(skipping(BATCH)[0], own[0], atol=1e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_the_kernel_to_a_rotated_copy_is_the_rotation_and_costs_nothing(tied):
    model = plain_llama(tie_word_embeddings=tied)
    turn = rotation(model.config.hidden_size)
    a, b = (Transformer.wrap(one) for one in (model, rotated(model, turn)))
    torch.testing.assert_close(embedding_kernel(a, b), turn, rtol=1e-9, atol=1e-9)
    own = a.capture(BATCH, layers=(), logits=True).logits[MASK.bool()]
    theirs = b.capture(BATCH, layers=(), logits=True).logits[MASK.bool()]
    # Llama's norms compute in float32 whatever the dtype.
    torch.testing.assert_close(theirs, own, rtol=1e-4, atol=1e-4)
    for layer in range(a.n_layers + 1):
        stitched = ll.stitch(a, layer, b, layer)
        torch.testing.assert_close(stitched(BATCH)[MASK.bool()], own, rtol=1e-4, atol=1e-4)
        folded = ll.stitch(a, layer, b, layer, "folded")
        torch.testing.assert_close(folded(BATCH)[MASK.bool()], own, rtol=1e-4, atol=1e-4)
        plain = ll.stitch(a, layer, b, layer, "identity")
        assert not torch.allclose(plain(BATCH)[MASK.bool()], own, atol=1e-2)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
def test_padding_on_either_side_is_alike(name):
    a, b = wrap(name), wrap(name, seed=1)
    stitched = ll.stitch(a, 1, b, 2)
    left = {"input_ids": IDS.clone(), "attention_mask": MASK.flip(1)}
    left["input_ids"][1] = IDS[1].roll(3)
    left["attention_mask"][0] = 1
    right = stitched(BATCH)
    other = stitched(left)
    alone = stitched(IDS[1:, :3])
    torch.testing.assert_close(other[0], right[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(other[1, 3:], right[1, :3], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(alone[0], right[1, :3], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TRANSLATED)
def test_translated_parameters_say_what_the_splice_says(name):
    a = Transformer.wrap(build("llama", 3, hidden_size=32).double(), check=False)
    b = Transformer.wrap(build(name, 1).double(), check=False)
    for layer in (0, 2, b.n_layers):
        stitched = ll.stitch(a, 2, b, layer)
        spliced = stitched(BATCH)[MASK.bool()]
        # Gemma 2 and others compute norms in float32 whatever their dtype.
        torch.testing.assert_close(
            translate(stitched)(BATCH).double(), spliced.double(), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("name", ["llama_text", "gpt2_text"])
def test_a_translated_classifier_says_what_the_splice_says(name):
    a = Transformer.wrap(build("llama", 3, hidden_size=32).double(), check=False)
    c = Transformer.wrap(build(name, 1).double(), check=False)
    for side in ("right", "left"):
        mask = MASK if side == "right" else torch.stack([MASK[0], MASK[1].flip(0)])
        ids = IDS if side == "right" else torch.stack([IDS[0], IDS[1].roll(3)])
        stitched = ll.stitch(a, 1, c, 2)
        inputs = {"input_ids": ids, "attention_mask": mask}
        assert stitched(inputs).shape == (2, 4)
        torch.testing.assert_close(
            translate(stitched)(inputs), stitched(inputs), rtol=1e-6, atol=1e-6
        )


def test_b_is_not_changed_by_a_translation():
    a, b = wrap("llama"), wrap("llama", seed=1)
    before = {name: value.clone() for name, value in b.model.state_dict().items()}
    own = b.capture(BATCH, layers=(), logits=True).logits
    translate(ll.stitch(a, 1, b, 1))(BATCH)
    assert all(torch.equal(value, before[name]) for name, value in b.model.state_dict().items())
    assert torch.equal(b.capture(BATCH, layers=(), logits=True).logits, own)


def test_tokens_that_one_model_does_not_know_do_not_count_in_the_kernel():
    model = plain_llama()
    turn = rotation(24)
    other = rotated(model, turn)
    with torch.no_grad():  # the output matrix, which logits and kernels are made of
        model.get_output_embeddings().weight[40:] = 0
    kernel = embedding_kernel(*(Transformer.wrap(one, check=False) for one in (model, other)))
    torch.testing.assert_close(kernel, turn, rtol=0, atol=1e-8)
