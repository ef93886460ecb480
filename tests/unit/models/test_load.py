import inspect
import json
from pathlib import Path

import pytest
import torch

from families import build
from layerleap.errors import BadSettings, BadText, ModelRefused, UnknownModel
from layerleap.lens.lens import Lens
from layerleap.maps.fit import fit
from layerleap.models.discovery.laws import check
from layerleap.models.identity import fingerprint, identify
from layerleap.models.load import load, load_bare
from layerleap.models.transformer import Transformer
from layerleap.zoo.catalog import MODEL_NAMES
from tiny_models import tiny, tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A llama and its tokenizer, as save_pretrained writes them."""
    folder = tmp_path_factory.mktemp("saved")
    build("llama").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@torch.inference_mode()
def logits_of(model, ids=((9, 8, 7, 6, 5),)) -> torch.Tensor:
    return model(input_ids=torch.tensor(ids), use_cache=False).logits


def one_line(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("as_type", [str, Path])
def test_a_saved_folder_loads_with_its_tokenizer(saved, as_type):
    transformer = load(as_type(saved))
    assert transformer.identity.name == str(saved)
    assert transformer.identity.fingerprint == fingerprint(build("llama"))
    assert not transformer.model.training
    assert torch.equal(logits_of(transformer.model), logits_of(build("llama")))
    assert Lens(transformer).read("the cat sat").tokens == ["the", "cat", "sat"]


@pytest.mark.parametrize(
    "name", ["gpt2", "gpt_neox", "gemma", "bert", "albert", "t5", "whisper", "vit"]
)
def test_each_kind_of_model_loads_as_saved_and_no_tokenizer_is_invented(name, tmp_path):
    """Many tokenizer classes can be built without any file and then have only special tokens."""
    build(name).save_pretrained(tmp_path)
    transformer = load(tmp_path)
    assert type(transformer.model) is type(build(name))
    assert transformer.tokenizer is None


def test_a_bare_folder_can_be_checked_and_read_by_ids_but_not_by_text(tmp_path):
    build("gpt2").save_pretrained(tmp_path)
    transformer = load(tmp_path)
    assert len(Lens(transformer).read([9, 8, 7]).tokens) == 3
    with pytest.raises(Exception, match="has no tokenizer"):
        Lens(transformer).read("the cat")


def test_a_tokenizer_argument_wins(saved):
    mine = tokenizer(side="left")
    assert load(saved, tokenizer=mine).tokenizer is mine


def test_the_bare_model_is_not_checked(tmp_path):
    model = build("gpt2")
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    model.save_pretrained(tmp_path)
    assert load_bare(str(tmp_path)).config.n_layer == 3
    with pytest.raises(ModelRefused, match="'finite'"):
        load(tmp_path)


@pytest.mark.parametrize("trainable", [False, True])
def test_a_loaded_model_is_used_as_it_is(trainable):
    model = build("llama").bfloat16()
    model.requires_grad_(trainable)
    before, text = weights(model), tokenizer()
    transformer = load(model, tokenizer=text)
    assert transformer.model is model
    assert transformer.tokenizer is text
    assert all(p.requires_grad is trainable for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert transformer.identity.dtype == "bfloat16"


def test_a_model_in_training_mode_is_refused_and_left_in_it():
    model = build("llama").train()  # it has no dropout, and could pass unnoticed
    with pytest.raises(ModelRefused, match=r"training mode; call model.eval\(\)"):
        load(model)
    assert model.training


def test_a_probe_can_be_trained_on_captured_states():
    transformer = tiny("llama")
    h = transformer.capture({"input_ids": torch.tensor([[7, 8, 9]])}).states[2][0]
    probe = torch.nn.Linear(h.shape[1], 2)
    probe(h).sum().backward()
    assert probe.weight.grad is not None


def test_a_local_edit_of_one_weight_changes_the_fingerprint():
    model = build("llama")
    before = fingerprint(model)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[5, 7] += 0.5
    assert fingerprint(model) != before


def test_options_go_to_from_pretrained_unchanged(saved):
    transformer = load(saved, dtype=torch.bfloat16)
    assert transformer.model.dtype == torch.bfloat16
    placed = load(saved, device_map={"": "cpu"})
    assert placed.model.device.type == "cpu"
    assert torch.equal(logits_of(placed.model), logits_of(build("llama")))


def test_a_model_offloaded_by_accelerate_reads_as_one_in_memory():
    from accelerate import cpu_offload

    model, ids = build("llama"), [9, 8, 7, 6, 5]
    whole = Lens(Transformer.wrap(model)).read(ids)
    expected = logits_of(model)
    cpu_offload(model, execution_device="cpu")
    transformer = Transformer.wrap(model)
    ours, theirs = Lens(transformer).read(ids).tracks["logit"], whole.tracks["logit"]
    assert torch.equal(ours.ids, theirs.ids)
    torch.testing.assert_close(ours.probs, theirs.probs)
    transformer.capture(
        {"input_ids": torch.tensor([ids])}, layers=[1]
    )  # ends early, amid its hooks
    assert torch.equal(logits_of(model), expected)
    assert transformer.identity.fingerprint == fingerprint(build("llama"))


def test_a_model_offloaded_to_disk_reads_as_one_in_memory(saved, tmp_path):
    layers = {f"model.layers.{n}": "disk" if n else "cpu" for n in range(3)}
    placement = {
        "model.embed_tokens": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    transformer = load(saved, device_map={**layers, **placement}, offload_folder=str(tmp_path))
    assert transformer.model.hf_device_map["model.layers.2"] == "disk"
    assert transformer.identity.fingerprint == fingerprint(build("llama"))
    text = "the cat sat on the mat"
    ours, theirs = (Lens(t).read(text).tracks["logit"] for t in (transformer, tiny("llama")))
    assert torch.equal(ours.ids, theirs.ids)
    torch.testing.assert_close(ours.probs, theirs.probs)


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(UnknownModel, match=r"folder without config\.json") as caught:
        load(tmp_path)
    one_line(caught.value)


@pytest.mark.parametrize("name", ["gpt2", "no-such-org/no-such-model"])
def test_an_unknown_name_is_answered_in_one_line_with_the_bundled_models(name):
    with pytest.raises(UnknownModel, match=f"no model '{name}'") as caught:
        load(name)
    for bundled in MODEL_NAMES:
        assert bundled in one_line(caught.value)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c", "weights.gguf"])
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(name):
    with pytest.raises(UnknownModel, match="no file or folder"):
        load(name)


def test_a_file_of_another_kind_is_refused(tmp_path):
    file = tmp_path / "weights.bin"
    file.write_bytes(b"abc")
    with pytest.raises(UnknownModel, match=r"not \.gguf; expected a folder or a GGUF file"):
        load(file)


def test_a_file_that_is_gguf_only_by_name_is_refused(tmp_path):
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"this is no GGUF file" * 10)
    with pytest.raises(UnknownModel, match="cannot load") as caught:
        load(file)
    one_line(caught.value)


@pytest.mark.parametrize("size", [0, 100, -1000])
def test_truncated_weights_are_refused(saved, size, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((saved / name).read_bytes())
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:size])
    with pytest.raises(UnknownModel, match="cannot load a model from") as caught:
        load(tmp_path)
    one_line(caught.value)


def test_a_configuration_of_an_unknown_kind_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    with pytest.raises(UnknownModel, match="abacus"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["bert", "llama", "vit", "t5"])
def test_a_checkpoint_without_its_head_is_refused_because_the_head_would_be_random(name, tmp_path):
    model = build(name, tie_word_embeddings=False)
    body = model.base_model if name != "t5" else model.encoder
    body.save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="they would be random") as caught:
        load(tmp_path)
    one_line(caught.value)


def test_a_checkpoint_whose_head_is_the_embedding_needs_no_head(tmp_path):
    model = build("gpt2")
    model.base_model.save_pretrained(tmp_path)
    assert torch.equal(logits_of(load(tmp_path).model), logits_of(model))


@pytest.mark.parametrize("name", ["gpt2", "bert", "mixtral", "vit"])
def test_a_cast_keeps_the_fingerprint(name):
    marks = {
        fingerprint(build(name).to(dtype))
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
    }
    assert len(marks) == 1


def test_other_weights_have_another_fingerprint():
    assert fingerprint(build("llama", seed=1)) != fingerprint(build("llama", seed=2))
    touched = build("llama")
    with torch.no_grad():
        touched.model.norm.weight[0] += 0.5
    assert fingerprint(touched) != fingerprint(build("llama"))


def test_another_shape_changes_the_fingerprint():
    model = build("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    wider = build("llama", intermediate_size=44)
    with torch.no_grad():
        for parameter in wider.parameters():
            parameter.zero_()
    assert fingerprint(model) != fingerprint(wider)


def test_the_identity_is_plain_json_and_remembers_name_and_revision():
    identity = identify(build("gpt2"), "gpt2", "607a30d")
    assert json.loads(json.dumps(identity.to_dict())) == identity.to_dict()
    assert (identity.name, identity.revision) == ("gpt2", "607a30d")
    assert identity.architecture == "GPT2LMHeadModel"
    assert identity.parameters == sum(p.numel() for p in build("gpt2").parameters())


def test_loading_is_silent(saved, capfd):
    load(saved)
    with pytest.raises(UnknownModel):
        load("no-such-org/no-such-model")
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""


def _write_gguf(path: Path) -> dict[str, torch.Tensor]:
    """A llama of two layers in GGUF, written with the public library."""
    import gguf

    torch.manual_seed(0)
    width, heads, inner, words = 32, 4, 64, 12
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(2)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(width // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(words)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(chr(97 + n) for n in range(words - 1)), "ab"])
    writer.add_token_merges(["a b"])  # makes the last token
    writer.add_token_types([1] * words)
    shapes = {"token_embd": (words, width), "output_norm": (width,), "output": (words, width)}
    for block in range(2):
        shapes |= {
            f"blk.{block}.{n}": (width, width)
            for n in ("attn_q", "attn_k", "attn_v", "attn_output")
        }
        shapes |= {f"blk.{block}.{n}": (width,) for n in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{block}.{n}": (inner, width) for n in ("ffn_gate", "ffn_up")}
        shapes |= {f"blk.{block}.ffn_down": (width, inner)}
    tensors = {f"{name}.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    for name, value in tensors.items():
        writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_gguf_file_loads_with_its_weights(tmp_path):
    pytest.importorskip("gguf")
    tensors = _write_gguf(tmp_path / "small.gguf")
    transformer = load(tmp_path / "small.gguf")
    assert transformer.identity.name == "small"
    assert transformer.n_layers == 2
    head = transformer.model.get_output_embeddings().weight
    torch.testing.assert_close(head.detach().float(), tensors["output.weight"])
    assert Lens(transformer).read("abd").tokens == ["ab", "d"]


def test_every_option_of_load_is_documented():
    for name in inspect.signature(load).parameters:
        assert f"{name}:" in (load.__doc__ or "")


@pytest.mark.real
def test_the_bundled_decoder_reads_text(smollm2):
    assert smollm2.kind == "next-token"
    assert smollm2.n_layers == 30
    track = Lens(smollm2).read("The capital of France is").tracks["logit"]
    assert smollm2.tokenizer.decode(track.ids[-1, -1, :1]).strip() == "Paris"


class Int8Linear(torch.nn.Module):
    """Weights as eight-bit integers in buffers, as most quantisers keep them."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale[:, 0])
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.qweight.to(x.dtype) * self.scale[:, None]
        return torch.nn.functional.linear(x, weight, self.bias)


def test_a_quantised_model_is_used_as_it_is_and_can_be_read():
    quantised = build("gpt_neox")
    for path, module in list(quantised.gpt_neox.layers.named_modules()):
        if isinstance(module, torch.nn.Linear):
            quantised.gpt_neox.layers.set_submodule(path, Int8Linear(module))
    wrapped = load(quantised)
    assert wrapped.model is quantised
    assert "ffn.out" in wrapped.sites(1)
    ids = {"input_ids": torch.tensor([[7, 8, 9]])}
    captured = wrapped.capture(ids)
    with torch.inference_mode():
        ours, theirs = wrapped.logits(captured.states[3][0]), quantised(**ids).logits[0]
    torch.testing.assert_close(ours, theirs)
    assert wrapped.identity.fingerprint != load(build("gpt_neox")).identity.fingerprint


@pytest.mark.filterwarnings("ignore:.*quantiz.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_model_quantised_so_that_rows_depend_on_their_batch_is_refused():
    # One scale for all activations of a batch: a longer neighbour changes what a row says.
    quantised = torch.ao.quantization.quantize_dynamic(build("gpt_neox"), {torch.nn.Linear})
    assert fingerprint(quantised) != fingerprint(build("gpt_neox"))
    with pytest.raises(ModelRefused, match="'padding'"):
        load(quantised)


def test_options_for_a_model_that_is_already_loaded_are_refused():
    with pytest.raises(BadSettings, match="never moved or cast"):
        load(build("llama"), dtype="float16")


def test_a_tokenizer_that_cannot_be_loaded_is_reported_and_the_model_still_loads(
    tmp_path, messages
):
    tiny("llama").model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    model = load(str(tmp_path))
    assert model.tokenizer is None
    assert len(messages) == 1
    assert "cannot be loaded" in messages[0]
    # Told or not, the reason is given when text is first needed.
    for use in (model.capture, Lens(model).read, lambda text: list(fit(model, [text]).maps)):
        with pytest.raises(
            BadText, match=r"has no tokenizer \(.*JSONDecodeError: Expecting property name"
        ):
            use("the cat sat")


def test_a_wrapped_model_can_be_checked_again():
    verdicts = check(tiny("llama"))
    assert {verdict.status for verdict in verdicts} == {"holds"}
    assert verdicts == check(tiny("llama").model)
