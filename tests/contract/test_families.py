"""The laws of the wrapper for every family; in float64, so that rounding hides nothing."""

from functools import cache, partial

import pytest
import torch
import transformers as hf
from torch import nn

from families import (
    ALL as LANGUAGE_AND_IMAGE,
    CLASS,
    CLASSIFIERS,
    MASKED_TOKEN,
    NEXT_TOKEN,
    POOLED_IMAGE,
    SEQ_TO_SEQ,
    TEXT_CLASS,
    TOKEN_CLASS,
    build,
)
from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.discovery.compare import row_gap as gap
from layerleap.models.discovery.laws import LAWS, parts_error, verdicts
from layerleap.models.discovery.probe import probe
from layerleap.models.discovery.sites import Anatomy
from layerleap.models.hooks.forward import Tap, tapped
from layerleap.models.transformer import Transformer

ALL = {**LANGUAGE_AND_IMAGE, **CLASSIFIERS}
BOTH_WAYS = ("bert", "roberta", "distilbert", "electra")
ENCODERS = {f"{name}_{kind}" for name in BOTH_WAYS for kind in ("text", "token")}
EXACT = 1e-9
PARALLEL = {"gptj", "gpt_neox", "phi", "falcon", "falcon_new", "cohere"}
POST_NORM = {"opt_350m", *MASKED_TOKEN, "bart", *ENCODERS}
NORMS_AFTER = {"gemma2", "gemma3", "olmo2"}  # sandwich norms, and norms after the parts alone
SCALED = {"dinov2", "dinov2_patches"}  # a learnt factor per coordinate after each part
# Measured: where Hugging Face's last entry is what leaves the last block. Post-norm families
# have no final norm; image models report the state before it. All others report it normed.
LAST_IS_RAW = {*MASKED_TOKEN, "bart", *CLASS, *ENCODERS, *POOLED_IMAGE}
NO_PARTS = {"beit"}  # its learnt factors are no modules
FIXED_SIZE = {*SEQ_TO_SEQ, *CLASS, *POOLED_IMAGE}  # the padding law does not apply


@cache
def wrapped(name: str) -> Transformer:
    model = build(name)
    if hasattr(model.config, "_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped kernels know no float64
    return Transformer.wrap(model.double())


@cache
def look(name: str):
    """One pass over fresh inputs: every layer, every site, logits."""
    transformer = wrapped(name)
    inputs = probe(transformer.model, rows=3, seed=3)
    return inputs, transformer.capture(inputs, sites=all_sites(transformer), logits=True)


def all_sites(transformer: Transformer) -> list[tuple[int, str]]:
    blocks = range(1, transformer.n_layers + 1)
    return [(block, name) for block in blocks for name in transformer.sites(block)]


def hook_counts(model: nn.Module) -> list[int]:
    stores = (
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_backward_hooks",
        "_backward_pre_hooks",
    )
    return [sum(len(getattr(m, store)) for store in stores) for m in model.modules()]


@torch.inference_mode()
def logits_of(transformer: Transformer, inputs) -> torch.Tensor:
    return transformer.model(**inputs).logits


@torch.inference_mode()
def theirs(name: str):
    """Hugging Face's own hidden states, on a copy: asking may leave its hooks on a model."""
    model = build(name)
    if hasattr(model.config, "_experts_implementation"):
        model.set_experts_implementation("eager")
    output = model.double()(**look(name)[0], output_hidden_states=True)
    return getattr(output, "decoder_hidden_states", None) or output.hidden_states


@pytest.mark.parametrize("name", ALL)
def test_every_law_holds_or_says_why_it_does_not_apply(name):
    found = {verdict.law: verdict for verdict in verdicts(wrapped(name))}
    assert tuple(found) == LAWS
    expected_open = {"padding"} if name in FIXED_SIZE else set()
    expected_open |= {"parts"} if name in NO_PARTS else set()
    assert {law for law, v in found.items() if v.status == "not applicable"} == expected_open
    assert not [v for v in found.values() if v.status == "fails"]
    assert all(v.detail for v in found.values())


@pytest.mark.parametrize("name", ALL)
def test_every_family_wraps_in_float32_and_bfloat16_too(name):
    """Rounding must not change the discovered architecture."""
    exact = wrapped(name)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rough = Transformer.wrap(build(name).to(dtype), check=False)
        failed = [v for v in verdicts(rough) if v.status == "fails"]
        assert not failed, dtype
        assert (rough.kind, rough.blocks) == (exact.kind, exact.blocks)
        assert [(s.kind, s.path) for s in rough.tail] == [(s.kind, s.path) for s in exact.tail]
        for ours, theirs in zip(rough.anatomy, exact.anatomy, strict=True):
            if name in NO_PARTS:
                assert isinstance(ours, str)
                continue
            assert isinstance(ours, Anatomy), ours
            assert (ours.style, ours.adds, ours.sites) == (theirs.style, theirs.adds, theirs.sites)
            assert ours.scale == pytest.approx(theirs.scale, rel=1e-2)


@pytest.mark.parametrize("name", MASKED_TOKEN)
def test_an_untrained_bidirectional_model_is_not_a_next_token_model_even_in_bfloat16(name):
    config_name, model_name, settings = MASKED_TOKEN[name]
    torch.manual_seed(0)
    model = getattr(hf, model_name)(getattr(hf, config_name)(**settings)).eval()
    assert Transformer.wrap(model.to(torch.bfloat16), check=False).kind == "masked-token"


def test_a_soft_cap_far_above_the_logits_is_still_found():
    for dtype in (torch.float32, torch.bfloat16):
        model = build("gemma2", final_logit_softcapping=3000.0).to(dtype)
        assert [step.kind for step in Transformer.wrap(model).tail] == ["module", "module", "cap"]


def test_a_massive_activation_does_not_hide_what_the_blocks_do():
    model = build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 3] += 3000.0
    for dtype in (torch.float32, torch.bfloat16):
        wrapped_ = Transformer.wrap(model.to(dtype), check=False)
        assert {a.style for a in wrapped_.anatomy} == {"sequential"}
        assert {a.scale for a in wrapped_.anatomy} == {1.0}


@pytest.mark.parametrize("name", ALL)
def test_kind_is_found_by_behaviour(name):
    kinds = {
        "next-token": {**NEXT_TOKEN, **SEQ_TO_SEQ},
        "masked-token": MASKED_TOKEN,
        "token-class": TOKEN_CLASS,
        "text-class": TEXT_CLASS,
        "image-class": {**CLASS, **POOLED_IMAGE},
    }
    assert name in kinds[wrapped(name).kind]


@pytest.mark.parametrize("name", ALL)
def test_layers_below_the_last_are_bit_identical_to_hugging_face(name):
    """Guards against the off-by-one: h[0] enters the first block, h[l] leaves block l."""
    _, captured = look(name)
    reported = theirs(name)
    n_layers = wrapped(name).n_layers
    assert n_layers == 3
    assert len(reported) == n_layers + 1
    for layer in range(n_layers):
        assert torch.equal(captured.states[layer], reported[layer]), layer


@pytest.mark.parametrize("name", ALL)
def test_the_last_layer_is_never_the_already_normed_state(name):
    """Hugging Face's hidden_states[-1] is normed in most decoders; ours never is."""
    _, captured = look(name)
    last = theirs(name)[-1]
    raw = last.shape == captured.states[3].shape and torch.equal(last, captured.states[3])
    assert raw == (name in LAST_IS_RAW)


@pytest.mark.parametrize("name", ALL)
@torch.inference_mode()
def test_the_tail_of_the_last_state_is_the_models_logits(name):
    transformer, (_, captured) = wrapped(name), look(name)
    h = captured.states[transformer.n_layers]
    rows = transformer.rows(h, transformer.pooled(torch.ones(h.shape[:2])))
    assert gap(transformer.logits(rows), captured.logits.reshape(len(rows), -1)) < EXACT
    pools = {**CLASS, **TEXT_CLASS, **POOLED_IMAGE}
    assert (transformer.pooling is not None) == (name in pools)
    special = {"beit": "mean", "dinov2_patches": "sequence"}
    assert transformer.row_kind == special.get(name, "position")


@pytest.mark.parametrize("name", ALL)
@torch.inference_mode()
def test_a_lens_norms_each_state_by_its_own_statistics(name):
    """A row's reading depends only on that row, not on statistics of the full pass."""
    transformer, (_, captured) = wrapped(name), look(name)
    h = captured.states[1]
    rows = transformer.rows(h, transformer.pooled(torch.ones(h.shape[:2])))[:4]
    together = transformer.logits(rows)
    logits_of(transformer, look(name)[0])  # a full pass in between must change nothing
    alone = torch.cat([transformer.logits(row[None]) for row in rows])
    assert gap(together, alone) < EXACT
    assert gap(together, captured.logits.reshape(-1, transformer.d_vocab)[: len(rows)]) > 1e-3


@pytest.mark.parametrize("name", ALL)
def test_parts_add_up_to_their_block(name):
    if name in NO_PARTS:
        assert all(isinstance(anatomy, str) for anatomy in wrapped(name).anatomy)
        return
    transformer, (_, captured) = wrapped(name), look(name)
    for block in range(1, transformer.n_layers + 1):
        assert parts_error(transformer, block, captured.states, captured.sites) <= 1
        changed = {key: 1.001 * value for key, value in captured.sites.items()}
        assert parts_error(transformer, block, captured.states, changed) > 1


@pytest.mark.parametrize("name", ALL)
def test_sites_have_the_names_of_their_style(name):
    anatomy = wrapped(name).anatomy[0]
    if name in NO_PARTS:
        assert wrapped(name).sites(1) == {}
        return
    assert isinstance(anatomy, Anatomy), anatomy
    style = "parallel" if name in PARALLEL else "post-norm" if name in POST_NORM else "sequential"
    assert anatomy.style == style
    parts = ("attn", "cross", "ffn") if name in SEQ_TO_SEQ else ("attn", "ffn")
    assert anatomy.parts == parts
    ends = {""} | ({"_post"} if name in POST_NORM | NORMS_AFTER else set())
    ends |= set() if name in POST_NORM | {"olmo2"} else {"_norm"}
    ends |= {"_scale"} if name in SCALED else set()
    assert set(anatomy.sites) == {
        f"{p}{end}.{side}" for p in parts for end in ends for side in ("in", "out")
    }
    assert anatomy.scale == pytest.approx(0.3 if name == "granite" else 1.0)


@pytest.mark.parametrize("name", ALL)
def test_reading_leaves_no_hook_and_bit_identical_logits(name):
    transformer, (inputs, _) = wrapped(name), look(name)
    before, hooks = logits_of(transformer, inputs), hook_counts(transformer.model)
    transformer.capture(inputs, sites=all_sites(transformer))
    transformer.capture(inputs, layers=[1])  # ends early, by an exception of its own
    assert hook_counts(transformer.model) == hooks
    assert torch.equal(logits_of(transformer, inputs), before)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ALL)
def test_an_interrupted_pass_leaves_no_hook(name, error):
    transformer, (inputs, _) = wrapped(name), look(name)
    before, hooks = logits_of(transformer, inputs), hook_counts(transformer.model)

    def stop(*_):
        raise error("stop")

    block = transformer.block(2)
    handle = block.register_forward_hook(stop)
    try:
        with pytest.raises(error, match="stop"):
            transformer.capture(inputs, sites=all_sites(transformer))
    finally:
        handle.remove()
    # Loading leaves hooks of others out.
    with tapped(transformer.model, {block: Tap(see_input=stop)}):
        refusal = ModelRefused if error is RuntimeError else error
        with pytest.raises(refusal, match="stop"):
            Transformer.wrap(transformer.model)
    assert hook_counts(transformer.model) == hooks
    assert torch.equal(logits_of(transformer, inputs), before)


@pytest.mark.parametrize("name", ALL)
def test_kept_positions_equal_the_full_states_sliced(name):
    transformer, (inputs, full) = wrapped(name), look(name)
    generator = torch.Generator().manual_seed(1)
    keep = torch.rand(full.states[0].shape[:2], generator=generator) < 0.4
    sliced = transformer.capture(inputs, sites=all_sites(transformer), keep=keep)
    assert sliced.logits is None
    for layer, h in sliced.states.items():
        assert torch.equal(h, transformer.rows(full.states[layer], keep))
        if transformer.row_kind == "position":
            assert torch.equal(h, full.states[layer][keep])
    assert sliced.sites.keys() == full.sites.keys()
    for key, value in sliced.sites.items():
        assert torch.equal(value, transformer.rows(full.sites[key], keep))


def _note(ran: list[int], *_) -> None:
    ran.append(1)


@pytest.mark.parametrize("name", ALL)
def test_ending_early_gives_the_states_of_a_full_pass_and_runs_no_further_block(name):
    transformer, (inputs, full) = wrapped(name), look(name)
    for layer in range(transformer.n_layers + 1):
        ran: list[int] = []
        count = partial(_note, ran)
        handles = [
            transformer.model.get_submodule(path).register_forward_hook(count)
            for path in dict.fromkeys(transformer.blocks)
        ]
        captured = transformer.capture(inputs, layers=[layer])
        for handle in handles:
            handle.remove()
        assert list(captured.states) == [layer]
        assert torch.equal(captured.states[layer], full.states[layer])
        assert len(ran) == layer


@pytest.mark.parametrize("name", ALL)
def test_states_are_copies_that_a_block_adding_in_place_cannot_change(name):
    transformer, (inputs, full) = wrapped(name), look(name)
    again = transformer.capture(inputs)
    for layer, h in full.states.items():
        assert torch.equal(h, again.states[layer])
        assert h.untyped_storage().size() == h.numel() * h.element_size()


def test_a_shared_block_counts_one_layer_per_call():
    transformer, (inputs, captured) = wrapped("albert"), look("albert")
    assert len(set(transformer.blocks)) == 1
    assert transformer.n_layers == 3
    values = [captured.sites[block, "attn.out"] for block in (1, 2, 3)]
    assert not torch.equal(values[0], values[1])
    assert not torch.equal(values[1], values[2])
    only_second = transformer.capture(inputs, layers=[], sites=[(2, "attn.out")])
    assert list(only_second.sites) == [(2, "attn.out")]
    assert torch.equal(only_second.sites[2, "attn.out"], values[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [4]}, "layers 0 to 3"),
        ({"layers": [-1]}, "layers 0 to 3"),
        ({"sites": [(0, "attn.in")]}, "blocks 1 to 3"),
        ({"sites": [(1, "nothing")]}, "no site 'nothing' in block 1"),
    ],
)
def test_a_layer_or_site_that_does_not_exist_is_an_error_not_a_guess(options, message):
    with pytest.raises(BadSettings, match=message):
        wrapped("llama").capture(look("llama")[0], **options)


@pytest.mark.parametrize("name", ALL)
def test_a_model_of_one_layer_is_found(name):
    names = (
        "num_hidden_layers",
        "n_layer",
        "num_layers",
        "n_layers",
        "decoder_layers",
        "num_decoder_layers",
    )
    one = {key: 1 for key in names if key in ALL[name][2]}
    if name == "gpt_neo":
        one["attention_types"] = [[["global"], 1]]
    assert Transformer.wrap(build(name, **one)).n_layers == 1
