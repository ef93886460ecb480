"""The neurons of an FFN: found by structure, verified by their sum."""

import pytest
import torch
from torch import nn

from edit_cases import EXPERTS, inputs, wrapped
from families import ALL, build
from layerleap.act.edits import ZeroNeuron
from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.discovery.trace import state_taken
from layerleap.models.hooks.forward import Tap, tapped
from layerleap.models.transformer import Transformer
from layerleap.models.weights import feed_forward
from tiny_models import tiny


@pytest.mark.parametrize("name", [name for name in ALL if name not in EXPERTS])
def test_coefficients_times_values_add_up_to_the_ffn(name):
    """Of fresh inputs; and where a norm follows, to what that norm takes."""
    model = wrapped(name)
    for block in (1, 2, 3):
        ffn, sites, coefficients = feed_forward(model, block), [(block, "ffn.out")], []
        if "ffn_post.in" in model.sites(block) and model.anatomy[0].style != "post-norm":
            sites.append((block, "ffn_post.in"))
        tap = Tap(see_input=lambda *call, to=coefficients: to.append(state_taken(*call)))
        with tapped(model.model, {ffn.module(model): tap}):
            captured = model.capture(inputs(name), layers=[], sites=sites).sites
        bias = getattr(ffn.module(model), "bias", None)
        total = coefficients[-1] @ ffn.values(model) + (0 if bias is None else bias)
        assert ffn.values(model).shape == (ffn.n_neurons, model.d_model)
        for site in sites:
            torch.testing.assert_close(captured[site].reshape(total.shape), total)


def test_gemma_has_a_norm_after_its_ffn_and_so_do_others():
    for name in ("gemma2", "gemma3", "olmo2"):
        assert "ffn_post.in" in wrapped(name).sites(2)


def test_a_square_matrix_is_read_the_right_way_round():
    """With as many neurons as the model is wide, shapes do not tell rows from columns."""
    for name, change in (("llama", {"intermediate_size": 24}), ("gpt2", {"n_inner": 24})):
        model = Transformer.wrap(build(name, **change).double())
        ffn = feed_forward(model, 2)
        assert ffn.n_neurons == 24
        assert ffn.down.is_transposed == (name == "gpt2")


def test_weights_are_viewed_and_looked_up_once():
    model = tiny("llama")
    values = feed_forward(model, 2).values(model)
    assert values.data_ptr() == model.model.model.layers[1].mlp.down_proj.weight.data_ptr()
    assert feed_forward(model, 2) is feed_forward(model, 2)
    assert model.capture({"input_ids": torch.tensor([[5, 6]])}) is not None


def test_loading_does_not_look_for_neurons(monkeypatch):
    from layerleap.models.weights import neurons as weights

    looked: list[object] = []
    monkeypatch.setattr(weights, "_find", lambda *args: looked.append(args))
    assert tiny("llama").n_layers == 3
    assert not looked


@pytest.mark.parametrize("name", sorted(EXPERTS))
def test_experts_have_no_single_down_projection(name):
    with pytest.raises(ModelRefused, match="as in a mixture of experts"):
        feed_forward(wrapped(name), 1)


def test_blocks_that_do_not_exist_or_have_no_parts_are_refused():
    model = tiny("llama")
    for block in (0, 4):
        with pytest.raises(BadSettings, match=f"block {block} does not exist"):
            feed_forward(model, block)
    model.anatomy = (model.anatomy[0], "found 0 attention modules", model.anatomy[2])
    with pytest.raises(ModelRefused, match=r"parts of block 2 .* \(found 0 attention modules\)"):
        feed_forward(model, 2)


class Twisted(nn.Linear):
    """A down-projection whose weights are not what it multiplies by."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight * 2, self.bias)


def test_weights_that_do_not_give_the_output_are_refused():
    plain = build("llama")
    for block in plain.model.layers:
        down = block.mlp.down_proj
        twisted = Twisted(down.in_features, down.out_features, bias=False)
        twisted.weight = down.weight
        block.mlp.down_proj = twisted
    model = Transformer.wrap(plain)
    with (
        pytest.raises(ModelRefused, match="law 'neurons' failed for block 2"),
        model.edit(ZeroNeuron(2, 0)),
    ):
        pass
