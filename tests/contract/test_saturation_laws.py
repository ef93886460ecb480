"""Saturation layers over every family: what a sort of the whole vocabulary at every layer says."""

import pytest
import torch
import transformers as hf

from families import ALL, CLASS, SEQ_TO_SEQ, build
from layerleap.errors import BadSettings
from layerleap.lens.lens import Lens
from layerleap.lens.saturation import saturate
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.linear import LinearMap
from layerleap.models.discovery.probe import probe
from layerleap.models.transformer import Transformer
from layerleap.stream.examples import Batch
from made_saturation import walked


def batch_of(transformer, rows=6, seed=5):
    """Random inputs of any kind; every position that speaks is kept."""
    inputs = probe(transformer.model, rows=rows, seed=seed)
    n_positions = transformer.capture(inputs, layers=[0]).states[0].shape[1]
    keep = transformer.pooled(torch.ones(rows, n_positions))
    document, position = keep.nonzero(as_tuple=True)
    back = torch.zeros(len(document), dtype=torch.bool)
    return Batch(0, inputs, keep, document, position, back, rows, rows * n_positions)


def random_bank(transformer):
    """Maps that are neither the identity nor fitted: a lens of its own."""
    generator = torch.Generator().manual_seed(3)
    last, d = transformer.n_layers, transformer.d_model
    maps = []
    for src in range(last):
        weight = torch.eye(d) + 0.3 * torch.randn(d, d, generator=generator)
        bias = 0.1 * torch.randn(d, generator=generator)
        maps.append(LinearMap(src, last, weight=weight, bias=bias))
    model = transformer.identity.to_dict()
    return ShortcutBank(maps, model=model, n_layers=last, d_model=d)


def by_sorting(transformer, lens, batch, k):
    """The definition word for word: (row, k) layers and the final tokens."""
    states = transformer.capture(batch.inputs, keep=batch.keep).states
    orders = [
        lens.logits(states[layer], layer).sort(dim=-1, descending=True, stable=True).indices[:, :k]
        for layer in range(transformer.n_layers + 1)
    ]
    actual = []
    for row in range(len(orders[-1])):
        actual.append([])
        for rank in range(k):
            final = orders[-1][row, rank]
            layer = transformer.n_layers
            while layer > 0 and orders[layer - 1][row, rank] == final:
                layer -= 1
            actual[-1].append(layer)
    return torch.tensor(actual), orders[-1]


@pytest.mark.parametrize("name", ALL)
def test_saturation_layers_are_those_of_sorting_everything_at_every_layer(name):
    transformer = Transformer.wrap(build(name))
    batch = batch_of(transformer)
    lenses = {"logit": Lens(transformer), "linear": Lens(transformer, random_bank(transformer))}
    actual = saturate(transformer, lenses, [batch])
    for lens_name, lens in lenses.items():
        layers, tokens = by_sorting(transformer, lens, batch, 5)
        assert torch.equal(actual[lens_name].layer.long(), layers), lens_name
        assert torch.equal(actual[lens_name].tokens.long(), tokens), lens_name
    assert len(set(actual["logit"].layer.flatten().tolist())) > 1  # else it says nothing


@pytest.mark.parametrize("name", ["llama", "bert", "bart", "vit"])
def test_more_ranks_than_outputs_are_refused(name):
    transformer = Transformer.wrap(build(name))
    batch, lenses = batch_of(transformer), {"logit": Lens(transformer)}
    outputs = transformer.d_vocab
    assert saturate(transformer, lenses, [batch], k=outputs)["logit"].k == outputs
    with pytest.raises(BadSettings, match=f"{outputs + 1} ranks: .* has {outputs} outputs"):
        saturate(transformer, lenses, [batch], k=outputs + 1)
    with pytest.raises(BadSettings, match="choose 1 to"):
        saturate(transformer, lenses, [batch], k=0)


@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_a_model_with_one_layer_is_refused(name):
    transformer = Transformer.wrap(build(name, num_hidden_layers=1))
    with pytest.raises(BadSettings, match="has 1 layer, so no token can saturate before the last"):
        saturate(transformer, {"logit": Lens(transformer)}, [batch_of(transformer)])


@pytest.mark.parametrize("name", [*SEQ_TO_SEQ, *CLASS])
def test_the_right_answer_is_the_token_that_follows_or_the_label_that_a_batch_brings(name):
    transformer = Transformer.wrap(build(name))
    batch = batch_of(transformer, rows=3)
    actual = saturate(transformer, {"logit": Lens(transformer)}, [batch], k=2)["logit"]
    if name in CLASS:
        assert actual.gold.tolist() == [-1, -1, -1]
        labelled = Batch(**{**vars(batch), "gold": torch.tensor([4, 0, 2])})
        actual = saturate(transformer, {"logit": Lens(transformer)}, [labelled], k=2)["logit"]
        assert actual.gold.tolist() == [4, 0, 2]
    else:
        ids = batch.inputs["decoder_input_ids"]
        expected = torch.cat([ids[:, 1:], torch.full((3, 1), -1)], dim=1)
        assert torch.equal(actual.gold.long(), expected.flatten())


KINDS = ["llama", "gemma2", "bert", "t5", "whisper", "vit"]


@pytest.mark.parametrize("name", KINDS)
def test_observed_readings_saturate_where_those_tracked_from_the_end_do(name):
    transformer = Transformer.wrap(build(name).double())
    batch = batch_of(transformer, rows=20)
    lenses = {"logit": Lens(transformer), "linear": Lens(transformer, random_bank(transformer))}
    observed = walked(transformer, lenses, [batch], share=0.5)[0]
    for lens_name, tracked in saturate(transformer, lenses, [batch]).items():
        for tensor in ("layer", "tokens", "gold", "documents", "positions"):
            assert torch.equal(getattr(observed[lens_name], tensor), getattr(tracked, tensor))


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_model_has_random_walks(name):
    transformer = Transformer.wrap(build(name))
    batch = batch_of(transformer, rows=20)
    lenses = {"logit": Lens(transformer), "linear": Lens(transformer, random_bank(transformer))}
    real, walks = walked(transformer, lenses, [batch], share=0.5)
    for lens_name, walk in walks.items():
        double = walk.saturation
        assert 0 < len(double) < len(real[lens_name])
        assert torch.equal(double.documents, real[lens_name].rows(walk.rows).documents)
        assert double.layer.min() >= 0
        assert double.layer.max() <= transformer.n_layers
        assert not torch.equal(double.layer, real[lens_name].rows(walk.rows).layer)


def test_an_untrained_model_with_tied_embeddings_often_says_its_input_from_the_start():
    """A rank that never changes saturates at layer 0; counted as the last it would be lost."""
    torch.manual_seed(0)
    config = hf.GPT2Config(
        vocab_size=61,
        n_embd=24,
        n_layer=4,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformer = Transformer.wrap(hf.GPT2LMHeadModel(config).eval())
    batch = batch_of(transformer, rows=20)
    actual = saturate(transformer, {"logit": Lens(transformer)}, [batch])["logit"]
    own = batch.inputs["input_ids"][batch.keep] == actual.tokens[:, 0]
    assert own.double().mean() > 0.5
    assert (actual.layer[own, 0] == 0).double().mean() > 0.5
