"""Models that must not be trusted: each is refused with the law it broke and what to do."""

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import BertForMaskedLM, GPT2LMHeadModel, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from families import build
from layerleap.errors import ModelRefused
from layerleap.models.discovery.laws import check
from layerleap.models.load import load
from layerleap.models.transformer import Transformer

PATHS_HINT = r"blocks='path.of.the.list', tail=\['path.of.final.norm', 'path.of.head'\]"


def refused(law: str, *, with_hint: bool = True):
    return pytest.raises(
        ModelRefused, match=rf"law '{law}' failed.*{PATHS_HINT if with_hint else ''}"
    )


class ToyConfig(PretrainedConfig):
    model_type = "toy"

    def __init__(self, vocab_size=23, hidden_size=8, num_hidden_layers=3, **more):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = (
            vocab_size,
            hidden_size,
            num_hidden_layers,
        )
        super().__init__(**more)


class Mixer(nn.Module):
    """A small block: each position adds the mean of those before it, then an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        x = x + self.attn(x.cumsum(1) / counts)
        return x + self.mlp(x).tanh()


class Toy(PreTrainedModel):
    """A causal model outside transformers' own; subclasses break it in one place each."""

    config_class = ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embed = nn.Embedding(config.vocab_size, width)
        self.layers = nn.ModuleList(Mixer(width) for _ in range(config.num_hidden_layers))
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, config.vocab_size)
        self.polish = nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def between(self, x: Tensor) -> Tensor:
        return x

    def finish(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(x))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> CausalLMOutput:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = self.between(layer(x))
        return CausalLMOutput(logits=self.finish(x))


def toy(kind: type[Toy] = Toy, **settings) -> Toy:
    torch.manual_seed(0)
    model = kind(ToyConfig(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def test_a_sound_model_outside_transformers_is_accepted():
    transformer = Transformer.wrap(toy())
    assert transformer.blocks == ("layers.0", "layers.1", "layers.2")
    assert [step.path for step in transformer.tail] == ["norm", "lm_head"]


class SecondHead(GPT2LMHeadModel):
    def __init__(self, config):
        super().__init__(config)
        self.second = nn.Linear(config.n_embd, config.vocab_size)

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs, output_hidden_states=True)
        output.logits = output.logits + self.second(output.hidden_states[-1])
        return output


class Pooled(GPT2LMHeadModel):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + output.logits.mean(1, keepdim=True)
        return output


class ScaledByData(GPT2LMHeadModel):
    """On any one batch a plain scale explains the logits; on the next it is another one."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits / output.logits.abs().amax()
        return output


@pytest.mark.parametrize("kind", [SecondHead, Pooled, ScaledByData])
def test_logits_that_do_not_follow_from_the_last_state_are_refused(kind):
    model = kind(build("gpt2").config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    with refused("tail"):
        Transformer.wrap(model)


def test_a_head_that_ignores_the_mean_of_the_positions_is_read_at_one_of_them():
    model = build("dinov2")
    assert [str(step) for step in Transformer.wrap(model).tail] == [
        "dinov2.layernorm",
        "pick(0)",
        "pad(48)",
        "classifier",
    ]
    with torch.no_grad():
        model.classifier.weight[3, -1] = 1e-3
    assert [str(step) for step in Transformer.wrap(model).tail] == [
        "dinov2.layernorm",
        "join(1)",
        "classifier",
    ]


class Raising(GPT2LMHeadModel):
    def forward(self, *args, **kwargs):
        raise IndexError("index 7 is out of bounds")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Raising(build("gpt2").config), "IndexError.*index 7 is out of bounds"),
        (lambda: hf.CLIPModel(hf.CLIPConfig()), "CLIPModel is refused"),
        (
            lambda: hf.Speech2TextForConditionalGeneration(
                hf.Speech2TextConfig(
                    vocab_size=61,
                    d_model=24,
                    encoder_layers=1,
                    decoder_layers=1,
                    encoder_ffn_dim=40,
                    decoder_ffn_dim=40,
                )
            ),
            "Speech2TextConfig names no num_mel_bins",
        ),
        (
            lambda: build("gpt2_text", pad_token_id=None),
            "Cannot handle batch sizes > 1 if no padding token is defined",
        ),
        (lambda: build("bert_text", num_labels=1), "a single number, not a class"),
    ],
)
def test_whatever_a_model_raises_on_a_probe_is_a_refusal_with_its_reason(make, reason):
    model = make().eval()
    with pytest.raises(ModelRefused, match=reason):
        Transformer.wrap(model)
    (only,) = check(model)
    assert (only.law, only.status) == ("discovery", "fails")


class FixedPosition(hf.GPT2ForTokenClassification):
    """Reads position 6 of every text: the last one of discovery's probe, and of no other."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits[:, 6]
        return output


def test_a_head_that_fits_the_length_of_one_probe_only_is_refused():
    model = FixedPosition(build("gpt2_token").config).eval()
    with refused("tail"):
        Transformer.wrap(model)


@pytest.mark.parametrize(
    ("name", "dropout"),
    [("gpt2", {"resid_pdrop": 0.1}), ("llama", {"attention_dropout": 0.1}), ("bert", {})],
)
def test_a_model_left_in_training_mode_is_refused_and_not_switched(name, dropout):
    model = build(name, **dropout).train()
    with refused("deterministic") as caught:
        Transformer.wrap(model)
    assert "call model.eval()" in str(caught.value)
    assert model.training


def test_dropout_left_on_in_a_speech_encoder_is_refused():
    model = build("whisper", dropout=0.3)
    Transformer.wrap(model)
    model.model.encoder.train()
    with refused("deterministic", with_hint=False):
        Transformer.wrap(model)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "bert", "vit"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_weights_are_named_as_such(name, value):
    model = build(name)
    head = model.get_output_embeddings() if name != "vit" else model.classifier
    with torch.no_grad():
        head.weight[3, 1] = value
    with refused("finite", with_hint=False) as caught:
        Transformer.wrap(model)
    assert "weights" in str(caught.value)


class Between(Toy):
    def between(self, x: Tensor) -> Tensor:
        return 1.5 * x  # so no block takes what the block before it gave


def test_a_list_of_blocks_that_does_not_chain_is_refused():
    with refused("chain") as caught:
        Transformer.wrap(toy(Between))
    assert "layers" in str(caught.value)


class Skipping(Toy):
    """Runs two of its three blocks."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> CausalLMOutput:
        x = self.embed(input_ids)
        for layer in self.layers[:2]:
            x = layer(x)
        return CausalLMOutput(logits=self.finish(x))


def test_a_block_that_never_runs_is_refused():
    with refused("chain"):
        Transformer.wrap(toy(Skipping))


def test_a_count_of_blocks_other_than_the_configurations_is_refused():
    model = toy()
    model.config.num_hidden_layers = 5
    with refused("blocks") as caught:
        Transformer.wrap(model)
    assert "config says 5" in str(caught.value)


class Polished(Toy):
    """After the blocks comes another chain of modules, which discovery takes for the blocks."""

    def finish(self, x: Tensor) -> Tensor:
        return self.lm_head(self.polish(self.norm(x)))


def test_paths_given_with_hint_help_where_discovery_fails():
    model = toy(Polished)
    with refused("blocks"):
        Transformer.wrap(model)
    transformer = load(model, blocks="layers")
    assert transformer.blocks == ("layers.0", "layers.1", "layers.2")
    loaded = load(model, blocks="layers", tail=["norm", "polish", "lm_head"])
    assert loaded.tail == transformer.tail
    h = torch.randn(4, 8)
    with torch.inference_mode():
        assert torch.equal(loaded.logits(h), model.finish(h))


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ({"blocks": "transformer.nowhere"}, "no list of blocks at 'transformer.nowhere'"),
        ({"blocks": "transformer.h.0"}, "no list of blocks at 'transformer.h.0'"),
        ({"tail": ["transformer.nowhere", "lm_head"]}, "law 'tail' failed: 'transformer.nowhere'"),
        ({"tail": ["transformer.wte", "lm_head"]}, "law 'tail' failed: 'transformer.wte'"),
        ({"tail": ["lm_head"]}, "law 'tail' failed: the input of 'lm_head' is not the output"),
        (
            {"tail": ["lm_head", "transformer.ln_f"]},
            "law 'tail' failed: the input of 'lm_head' is not the output",
        ),
        ({"tail": ["transformer.ln_f"]}, "law 'tail' failed"),
        ({"tail": []}, "law 'tail' failed"),
    ],
)
def test_wrong_paths_given_with_hint_are_refused(paths, message):
    model = build("gpt2")
    with pytest.raises(ModelRefused, match=rf"{message}.*{PATHS_HINT}"):
        load(model, **paths)
    assert Transformer.wrap(model).n_layers == 3  # the attempt left no trace


def test_a_model_without_logits_is_refused_with_the_advice_to_load_its_head():
    with pytest.raises(ModelRefused, match="GPT2Model gives no logits; load it with its head"):
        Transformer.wrap(build("gpt2").base_model)


class MaskDropper(BertForMaskedLM):
    def forward(self, input_ids, attention_mask=None, **kwargs):
        return super().forward(input_ids, **kwargs)


def test_a_model_that_drops_the_attention_mask_is_refused():
    model = MaskDropper(build("bert").config).eval()
    model.load_state_dict(build("bert").state_dict())
    with refused("padding", with_hint=False):
        Transformer.wrap(model)


def _attention_without_mask(module, query, key, value, attention_mask, scaling=None, **_):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    output = nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling)
    return output.transpose(1, 2), None


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_custom_attention_that_ignores_the_mask_is_refused(name):
    ALL_ATTENTION_FUNCTIONS.register("no_mask", _attention_without_mask)
    model = build(name)
    model.set_attn_implementation("no_mask")
    with refused("padding", with_hint=False):
        Transformer.wrap(model)


def test_check_model_returns_results_and_never_raises():
    sound = check(build("gpt2"))
    assert {verdict.status for verdict in sound} == {"holds"}
    training = {v.law: v for v in check(build("gpt2").train())}
    assert training["deterministic"].status == "fails"
    assert training["blocks"].status == "holds"
    assert training["deterministic"].to_dict()["detail"] == training["deterministic"].detail
    for model in (toy(Between), build("gpt2").base_model):
        (only,) = check(model)
        assert (only.law, only.status) == ("discovery", "fails")
    assert "no list of blocks" in check(build("gpt2"), blocks="nowhere")[0].detail


def small(config: str, model: str, **changes):
    torch.manual_seed(0)
    return getattr(hf, model)(getattr(hf, config)(**changes)).eval()


WAVES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "conv_dim": (8, 8),
    "conv_stride": (2, 2),
    "conv_kernel": (3, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
NO_INPUT = {
    "speech as a wave": ("Wav2Vec2Config", "Wav2Vec2ForCTC", WAVES, "reads input_values"),
    "images of any size": (
        "ResNetConfig",
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]},
        "names no image_size",
    ),
}


@pytest.mark.parametrize("case", NO_INPUT)
def test_a_model_for_which_no_input_can_be_made_is_refused_with_what_is_missing(case):
    config, model, changes, reason = NO_INPUT[case]
    with pytest.raises(ModelRefused, match=reason) as refused:
        load(small(config, model, **changes))
    assert "AttributeError" not in str(refused.value)


def test_a_model_without_known_parts_says_so_when_printed_and_checked():
    changes = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "state_size": 4}
    model = load(small("MambaConfig", "MambaForCausalLM", **changes))
    assert "no block has known parts (found 0 attention modules" in str(model)
    results = {one.law: one for one in check(model.model)}
    assert results["parts"].status == "not applicable"
    assert "no sites in 2 blocks" in results["parts"].detail


BART = {
    "vocab_size": 61,
    "d_model": 24,
    "encoder_layers": 1,
    "decoder_layers": 3,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "decoder_attention_heads": 4,
}
BERT = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FNET = {**BERT, "tpu_short_seq_length": 64}
CAPPED = {
    **BERT,
    "logits_soft_cap": 0.5,
    "lru_width": 24,
    "attention_window_size": 8,
    "head_dim": 6,
}
LAWFUL = {
    "a decoder taken out of an encoder-decoder": ("BartConfig", "BartForCausalLM", BART),
    "a pooled state beside the tail": ("FNetConfig", "FNetForMaskedLM", FNET),
    "a soft-cap of another name": ("RecurrentGemmaConfig", "RecurrentGemmaForCausalLM", CAPPED),
}


@pytest.mark.parametrize("case", LAWFUL)
def test_no_lawful_model_is_refused_for_what_lies_beside_its_tail_or_in_its_configuration(case):
    config, model, changes = LAWFUL[case]
    found = {one.law: one.status for one in check(small(config, model, **changes))}
    assert found.get("tail") == found.get("blocks") == "holds"
