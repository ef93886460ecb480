"""Contributions of every family add up: parts to the logit, heads and neurons to parts."""

from functools import cache

import pytest
import torch
import transformers as hf

from edit_cases import EXPERTS, part_bank, wrapped
from families import ALL, BASE, CLASSIFIERS
from layerleap.errors import ModelRefused
from layerleap.lens.attribution.attribute import attribute
from layerleap.lens.lens import Lens
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.linear import LinearMap
from layerleap.models.discovery.probe import probe
from layerleap.models.transformer import Transformer

POST_NORM = {"opt_350m", "bert", "roberta", "distilbert", "albert", "electra", "bart"}
OTHERS = {"beit", "dinov2_patches"}  # parts not known; normed before positions are averaged
FAMILIES = [
    name
    for name in (*ALL, *CLASSIFIERS)
    if name not in POST_NORM | OTHERS and name.rpartition("_")[0] not in POST_NORM
]
IMAGES = {"vit", "deit", "dinov2"}
# Norms and softmaxes of the others compute in float32, whatever the model's dtype.
EXACT = {"gpt2", "gptj", "gpt_neo", "opt", "bloom", "phi", "falcon", "mpt", "t5", "whisper", "vit"}


@cache
def given(name):
    return probe(wrapped(name).model, rows=1, seed=4)


@cache
def made(name, by):
    return attribute(wrapped(name), given(name), by=by, top=10)


def logits(name):
    """The model's own logits at the position that is attributed."""
    with torch.no_grad():
        own = wrapped(name).model(**given(name)).logits[0]
    return own if own.dim() == 1 else own[-1]


def allowed(name):
    return 1e-12 if name in EXACT else 1e-6


@pytest.mark.parametrize("by", ["part", "head", "neuron", "source"])
@pytest.mark.parametrize("name", FAMILIES)
def test_contributions_add_up_to_the_models_own_logit(name, by):
    if (name in IMAGES and by in ("head", "source")) or (name in EXPERTS and by == "neuron"):
        with pytest.raises(ModelRefused, match="cannot be told apart"):
            made(name, by)
        return
    result, exact = made(name, by), logits(name)
    if name == "gemma2":  # before its soft-cap
        exact = 30 * torch.atanh(exact / 30)
        assert "soft-cap" in result.notes[0]
    assert result.value == pytest.approx(float(exact.max()), abs=1e-9)
    assert result.total == pytest.approx(result.value, abs=allowed(name))
    assert result.residue == result.total - result.value


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in IMAGES])
def test_heads_add_up_to_attention_and_sources_to_heads(name):
    parts, heads, sources = (_by_name(made(name, by)) for by in ("part", "head", "source"))
    for block in (1, 2, 3):
        own = [value for key, value in heads.items() if key.startswith(f"L{block}.H")]
        assert len(own) in (3, 4)
        bias = heads.get(f"L{block}.attn bias", 0.0)
        assert sum(own) + bias == pytest.approx(parts[f"L{block}.attn"], abs=allowed(name))
        assert heads[f"L{block}.ffn"] == parts[f"L{block}.ffn"]
    for key in heads:
        assert sources[key] == pytest.approx(heads[key], abs=allowed(name))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in EXPERTS])
def test_neurons_add_up_to_the_ffn(name):
    parts, neurons = _by_name(made(name, "part")), _by_name(made(name, "neuron"))
    for block in (1, 2, 3):
        own = [value for key, value in neurons.items() if key.startswith(f"L{block}.")]
        whole = sum(value for key, value in parts.items() if key.startswith(f"L{block}."))
        assert sum(own) == pytest.approx(whole, abs=allowed(name))
    assert sum(".N" in key for key in neurons) == 10


def _by_name(result):
    found = {}
    for component, value in result.components:
        found[component.name] = found.get(component.name, 0.0) + value
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_differences_and_the_mean_of_the_vocabulary_are_attributed_alike(name):
    model, exact = wrapped(name), logits(name)
    exact = 30 * torch.atanh(exact / 30) if name == "gemma2" else exact
    for against, other in (
        (1, exact[1]),
        ([1, 2], exact[1:3].mean()),
        ("vocabulary", exact.mean()),
    ):
        result = attribute(model, given(name), 3, against)
        assert result.value == pytest.approx(float(exact[3] - other), abs=1e-9)
        assert abs(result.residue) < allowed(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_inner_layer_is_attributed_through_any_lens(name):
    model = wrapped(name)
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(24, 24, generator=generator, dtype=torch.float64)
    shift = torch.randn(24, generator=generator, dtype=torch.float64)
    maps = [LinearMap(layer, 3, weight=weight, bias=shift) for layer in range(3)]
    bank = ShortcutBank(maps, model=model.identity.to_dict(), n_layers=3, d_model=24)
    for lens in (Lens(model), Lens(model, bank)):
        for layer in (0, 2):
            result = attribute(model, given(name), layer=layer, bank=lens.bank)
            states = model.capture(given(name), layers=[layer]).states[layer]
            pooled = model.pooled(torch.ones(states.shape[:2]))
            rows = model.rows(states, pooled)[-1:]
            exact = lens.logits(rows, layer)[0].double()
            exact = 30 * torch.atanh(exact / 30) if name == "gemma2" else exact
            assert result.value == pytest.approx(float(exact.max()), abs=1e-6)
            assert abs(result.residue) < 1e-6
            assert {one.block for one, _ in result.components} <= {None, *range(1, layer + 1)}


@pytest.mark.parametrize("name", sorted(POST_NORM))
def test_post_norm_models_are_refused_with_the_reason(name):
    with pytest.raises(ModelRefused, match="norms its whole stream after every part"):
        attribute(wrapped(name), given(name))


def test_models_without_known_parts_or_with_normed_means_are_refused():
    with pytest.raises(ModelRefused, match="the parts of block 1"):
        attribute(wrapped("beit"), given("beit"))
    with pytest.raises(ModelRefused, match="averages normed states"):
        attribute(wrapped("dinov2_patches"), given("dinov2_patches"))


def test_heads_that_are_not_linear_are_refused():
    """Encoders without post-norms exist, but their head for masked tokens has an activation."""
    config = hf.RobertaPreLayerNormConfig(**{**BASE, "max_position_embeddings": 66})
    torch.manual_seed(0)
    model = Transformer.wrap(hf.RobertaPreLayerNormForMaskedLM(config).eval(), check=False)
    with pytest.raises(ModelRefused, match="has a part that is not linear"):
        attribute(model, [5, 9, 33])


def test_states_that_are_changed_between_parts_are_refused():
    model = wrapped("llama")
    hook = model.block(2).register_forward_hook(lambda module, args, output: output + 1.0)
    try:
        with pytest.raises(ModelRefused, match="more than rounding explains"):
            attribute(model, given("llama"))
    finally:
        hook.remove()


def test_replaced_parts_are_attributed_as_they_are():
    from layerleap.act.edits import ReplaceParts

    model = wrapped("gpt2")
    with model.edit(ReplaceParts(part_bank("gpt2"), ["ffn"])):
        result = attribute(model, given("gpt2"))
        exact = model.model(**given("gpt2")).logits[0, -1].detach()
    assert result.value == pytest.approx(float(exact.max()), abs=1e-9)
    assert abs(result.residue) < 1e-9


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "gptj", "t5", "granite", "llama_text"])
@pytest.mark.parametrize("by", ["part", "head", "neuron"])
def test_what_removing_does_is_what_plain_hooks_measure(name, by, monkeypatch):
    """Means are random here: the law holds for any."""
    model = wrapped(name)
    result = _removed(name, by, monkeypatch)
    assert result.removed is not None
    places, seen = RECORDED["places"], 0
    for (one, _), lost in zip(result.components, result.removed, strict=True):
        if lost is None:
            assert one.part not in ("attn", "cross", "ffn") or one.rest
            continue
        site, columns = RECORDED["slots"][one]
        mean = RECORDED["means"][one.block, site][columns]
        module = model.site_module(one.block, site)

        def put(value, mean=mean, columns=columns):
            value = value.clone()
            value.reshape(1, -1, value.shape[-1])[0, -1, columns] = mean
            return value

        def before(module, args, put=put):
            return (put(args[0]), *args[1:])

        def after(module, args, output, put=put):
            return (put(output[0]), *output[1:]) if isinstance(output, tuple) else put(output)

        hook = (
            module.register_forward_pre_hook(before)
            if site.side == "in"
            else module.register_forward_hook(after)
        )
        with hook:
            exact = logits(name)
        exact = 30 * torch.atanh(exact / 30) if name == "gemma2" else exact
        assert lost == pytest.approx(result.value - float(exact[3]), abs=1e-6)
        seen += 1
    assert seen >= {"part": 6, "head": 15, "neuron": 13}[by]
    assert len(places.blocks) == 3


RECORDED = {}


def _removed(name, by, monkeypatch):
    def measure(self, *_):
        generator = torch.Generator().manual_seed(5)
        for one, (site, _) in self.slots.items():
            place = one.block, site
            value = self.transformer.capture(given(name), layers=(), sites=[place]).sites[place]
            mean = torch.randn(value.shape[-1], generator=generator, dtype=torch.float64)
            self.means[place] = mean
        RECORDED.update(slots=self.slots, means=self.means, places=self.places)
        return "means are random"

    monkeypatch.setattr("layerleap.lens.attribution.removal.Removal.measure", measure)
    return attribute(wrapped(name), given(name), 3, by=by, top=10, total=True, progress=False)
