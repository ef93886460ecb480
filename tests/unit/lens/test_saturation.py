"""Saturation layers: the definition, ties, and the same rows however they are batched."""

import pytest
import torch

from layerleap.errors import BadArtifact, BadText, NotFinite
from layerleap.lens.lens import Lens
from layerleap.lens.readings import saturation_layers
from layerleap.lens.saturation import Saturation, saturate
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.fit import fit
from layerleap.maps.linear import LinearMap
from layerleap.stream.examples import (
    Example,
    Sampling,
    collate,
    iter_batches,
    iter_examples,
)
from tiny_models import sentences, tiny

DOCUMENTS = sentences(30)


@pytest.fixture(scope="module")
def llama():
    transformer = tiny("llama")
    bank = fit(transformer, DOCUMENTS)
    return transformer, {"logit": Lens(transformer), "linear": Lens(transformer, bank)}


def examples_of(transformer, positions="all"):
    sampling = Sampling(positions=positions)
    return list(iter_examples(transformer, DOCUMENTS, sampling, side="both"))


def one_rank(*tops):
    return int(saturation_layers(torch.tensor(tops).reshape(1, -1, 1)))


def test_a_token_that_always_stood_there_saturates_at_layer_0():
    assert one_rank(7, 7, 7, 7, 7) == 0


def test_a_token_that_only_the_last_block_puts_there_saturates_at_the_last_layer():
    assert one_rank(3, 3, 3, 3, 7) == 4
    assert one_rank(7, 7, 7, 3, 7) == 4  # having stood there before is not enough


def test_a_token_saturates_where_it_comes_to_stay():
    assert one_rank(1, 7, 2, 7, 7) == 3
    assert one_rank(1, 7, 7, 7, 7) == 1


def test_a_rank_is_judged_by_its_own_token_alone():
    tops = torch.tensor([[[1, 2, 3], [1, 3, 2], [1, 2, 3]]])  # one row, three layers
    assert saturation_layers(tops).tolist() == [[0, 2, 2]]


def test_results_are_small_and_say_where_they_come_from(llama):
    transformer, lenses = llama
    examples = examples_of(transformer)
    actual = saturate(transformer, lenses, iter_batches(transformer, examples))
    n_rows = sum(len(example.keep) for example in examples)
    for name, one in actual.items():
        assert (len(one), one.k, one.n_layers, one.lens) == (n_rows, 5, 3, name)
        assert one.layer.dtype == torch.int16
        assert one.tokens.dtype == one.gold.dtype == torch.int32
        assert one.layer.min() >= 0
        assert one.layer.max() <= 3
    assert repr(actual["logit"]).endswith("ranks 1 to 5, layers 0 to 3, lens 'logit')")
    assert torch.equal(actual["logit"].tokens, actual["linear"].tokens)  # the model's own
    assert not torch.equal(actual["logit"].layer, actual["linear"].layer)


def as_lists(s):
    """Rows whose order is their own: batches of other sizes have another order."""
    columns = (s.documents, s.positions, s.gold, s.tokens, s.layer)
    return torch.cat([column.reshape(len(s), -1).long() for column in columns], 1).tolist()


@pytest.mark.parametrize("tokens", [1, 40, 500])
@pytest.mark.parametrize("entries", [61, 61 * 7, 2**23])
def test_rows_do_not_depend_on_how_they_are_cut(llama, monkeypatch, tokens, entries):
    transformer, lenses = llama
    examples = examples_of(transformer, "every:3")

    def run(size):
        batches = iter_batches(transformer, examples, tokens_per_batch=size)
        return {
            name: sorted(as_lists(s)) for name, s in saturate(transformer, lenses, batches).items()
        }

    expected = run(10**6)
    monkeypatch.setattr("layerleap.memory.LOGITS", entries)
    assert run(tokens) == expected


def test_equal_logits_are_in_order_of_id():
    transformer = tiny("llama", vocab_size=64)
    with torch.no_grad():  # every output twice: a tie at every rank and layer
        head = transformer.model.get_output_embeddings().weight
        head[1::2] = head[0::2]
    batch = next(iter_batches(transformer, examples_of(transformer)))
    actual = saturate(transformer, {"logit": Lens(transformer)}, [batch], k=4)["logit"]
    assert (actual.tokens[:, 0] + 1 == actual.tokens[:, 1]).all()
    assert (actual.tokens[:, 2] + 1 == actual.tokens[:, 3]).all()
    assert (actual.layer[:, 0] == actual.layer[:, 1]).all()


def test_the_right_answer_is_the_next_token_even_of_a_text_that_is_cut_there(llama):
    transformer, lenses = llama
    for positions in ("all", "one"):
        for example in examples_of(transformer, positions):
            assert len(example.gold) == len(example.keep)
    whole = {e.document: e for e in examples_of(transformer)}
    assert all(e.gold == (*e.ids[1:], -1) for e in whole.values())
    cut = examples_of(transformer, "one")
    actual = saturate(transformer, lenses, iter_batches(transformer, cut))["logit"]
    assert (actual.gold >= 0).float().mean() > 0.5  # the last of a text is followed by nothing


def test_the_right_answer_at_a_mask_is_what_it_hides():
    transformer = tiny("bert")
    example = examples_of(transformer, "one")[0]
    words = transformer.tokenizer.convert_ids_to_tokens(example.gold)
    assert example.ids[example.keep[0]] == transformer.tokenizer.mask_token_id
    assert words[0] in " ".join(DOCUMENTS).lower().split()
    actual = saturate(transformer, {"logit": Lens(transformer)}, [collate(transformer, [example])])
    assert actual["logit"].gold.tolist() == list(example.gold)


def test_without_word_from_the_batch_the_next_token_is_read_off_the_input(llama):
    transformer, lenses = llama
    batch = collate(transformer, [Example(0, (5, 6, 7), (0, 2)), Example(1, (8, 9), (0, 1))])
    assert batch.gold is None
    assert saturate(transformer, lenses, [batch])["logit"].gold.tolist() == [6, -1, 9, -1]


def test_states_are_handed_on_in_the_order_of_the_rows(llama):
    transformer, lenses = llama
    batches = list(iter_batches(transformer, examples_of(transformer), tokens_per_batch=60))
    states = []
    actual = saturate(transformer, lenses, batches, on_states=lambda h, batch: states.append(h))[
        "logit"
    ]
    assert len(states) == len(batches) > 1
    last = torch.cat([h[transformer.n_layers] for h in states])
    tops = transformer.logits(last).argmax(-1)
    assert torch.equal(tops.int(), actual.tokens[:, 0])


def test_rows_can_be_chosen_saved_and_loaded(llama, tmp_path):
    transformer, lenses = llama
    actual = saturate(transformer, lenses, iter_batches(transformer, examples_of(transformer)))[
        "linear"
    ]
    some = actual.rows(actual.layer[:, 0] < 3)
    assert 0 < len(some) < len(actual)
    assert some.layer[:, 0].max() < 3
    some.save(tmp_path / "s.safetensors")
    again = Saturation.load(tmp_path / "s.safetensors")
    assert (again.n_layers, again.lens) == (3, "linear")
    for name in ("layer", "tokens", "gold", "documents", "positions"):
        assert torch.equal(getattr(again, name), getattr(some, name))
    (tmp_path / "bad").write_bytes(b"no")
    for path in ("bad", "missing"):
        with pytest.raises(BadArtifact, match="not a saturation file"):
            Saturation.load(tmp_path / path)


def test_nothing_to_read_and_logits_that_are_not_finite_are_errors(llama):
    transformer, lenses = llama
    with pytest.raises(BadText, match="no position to read"):
        saturate(transformer, lenses, [])
    last, d = transformer.n_layers, transformer.d_model
    maps = [LinearMap(src, last, weight=torch.eye(d)) for src in range(last)]
    maps[last - 1] = LinearMap(last - 1, last, weight=torch.full((d, d), torch.nan))
    bank = ShortcutBank(maps, model=transformer.identity.to_dict(), n_layers=last, d_model=d)
    batch = next(iter_batches(transformer, examples_of(transformer)))
    with pytest.raises(NotFinite, match=r"infinite logits of lens 'bad' \(linear\) at layer 2 in"):
        saturate(transformer, {"bad": Lens(transformer, bank)}, [batch])
