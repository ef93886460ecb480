"""Heads that copy, suppress or map, on models whose W_VO is known."""

import pytest
import torch
from tokenizers import Tokenizer, models as token_models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import layerleap as ll
from families import build
from layerleap.errors import BadSettings
from layerleap.lens.top import ranks_of
from layerleap.lens.vocabulary.copying import Relation, share, word_pairs
from layerleap.models.transformer import Transformer

D = 48


def word_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(
        token_models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=words[0])


@torch.no_grad()
def one_headed(embeddings: Tensor, w_vo: Tensor, words: list[str] | None = None) -> Transformer:
    """A tied Llama with a single head of full width, and that W_VO in block 2."""
    n, d = embeddings.shape
    model = build(
        "llama",
        vocab_size=n,
        hidden_size=d,
        num_attention_heads=1,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model.get_input_embeddings().weight.copy_(embeddings)
    attention = model.model.layers[1].self_attn
    attention.v_proj.weight.copy_(w_vo.T)
    attention.o_proj.weight.copy_(torch.eye(d))
    tokenizer = None if words is None else word_tokenizer(words)
    return Transformer.wrap(model, tokenizer, name="one-headed")


def rotation(n: int) -> Tensor:
    return torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(5)))[0]


def both_signs() -> Tensor:
    """Unit rows whose mean is 0: no other row has as large a product with a row as it has."""
    turn = rotation(24)
    return torch.cat([turn, -turn])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("centred", [True, False])
def test_the_identity_copies_everything_and_its_negative_suppresses_everything(sign, centred):
    model = one_headed(both_signs(), sign * torch.eye(24))
    table = ll.weights(model).heads(k=1, sample=20, blocks=[2], centred=centred, progress=False)
    (head,) = table
    assert head.name == "L2.H0"
    assert table.n_sample == 20
    assert table.n_tokens == D
    assert (head.copies.value, head.suppresses.value) == ((1, 0) if sign == 1 else (0, 1))
    assert head.roles == (("copies",) if sign == 1 else ("suppresses",))
    copied, suppressed = (len(end) for end in (head.copied, head.suppressed))
    assert (copied, suppressed) == ((5, 0) if sign == 1 else (0, 5))


def test_a_head_that_maps_countries_to_capitals_is_found_with_its_pairs():
    pairs = [pair for pair in word_pairs()["capital"] if pair[0] != "Britain"]
    words = ["<unk>", *(word for pair in pairs for word in pair)]
    words += ["<more>"] * (len(words) % 2)
    w_vo = torch.zeros(len(words), len(words))
    for first, second in pairs:
        w_vo[words.index(first), words.index(second)] = 1.0
    turn = rotation(len(words))
    model = one_headed(turn, turn.T @ w_vo @ turn, words)
    table = ll.weights(model).heads(k=1, sample=30, blocks=[2], progress=False)
    assert table.relations == {"capital": len(pairs)}
    assert "only 0 of" in table.left_out["plural"]
    (head,) = table.having("maps")
    (mapped,) = head.clear_maps
    assert mapped.relation == "capital"
    assert mapped.share.value == 1
    assert mapped.control == 0
    assert tuple(one.text.strip() for one in mapped.examples[0]) == pairs[0]
    assert head.copies.value < 0.1


def test_shares_of_a_restricted_vocabulary_rank_among_it_only():
    model = one_headed(both_signs(), torch.eye(24))
    table = ll.weights(model).heads(k=2, tokens=[40, 3, 3, 17, 9], blocks=[2], progress=False)
    assert (table.n_sample, table.n_tokens, table.restricted) == (4, 4, True)
    assert next(iter(table)).copies.value == 1


@pytest.mark.parametrize(("k", "width"), [(1, 30), (4, 30), (4, 300), (50, 300)])
def test_ranks_are_those_of_sorting_and_ties_are_ordered_by_id(k, width):
    generator = torch.Generator().manual_seed(k)
    scores = torch.randint(0, 9, (50, width), generator=generator).float()
    places = torch.randint(0, width, (50,), generator=generator)
    high, low = ranks_of(scores, places, k)
    for row, place in enumerate(places.tolist()):
        down = scores[row].sort(descending=True, stable=True).indices.tolist().index(place)
        up = scores[row].sort(stable=True).indices.tolist().index(place)
        assert (int(high[row]), int(low[row])) == (min(down, k), min(up, k))


def test_the_control_leaves_out_every_right_answer():
    relation = Relation("capital", torch.tensor([1, 2, 3]), torch.tensor([7, 7, 9]))
    assert relation.wrong.tolist() == [
        [False, False, True],
        [False, False, True],
        [True, True, False],
    ]


def test_pairs_in_the_repository_are_pairs_of_different_words():
    for name, pairs in word_pairs().items():
        assert len(pairs) >= 20, name
        assert len(set(pairs)) == len(pairs), name
        assert all(first != second for first, second in pairs), name


def test_a_share_has_wilsons_interval():
    found = share(8, 10)
    assert (found.value, found.n) == (0.8, 10)
    assert (found.low, found.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)


def test_mistakes_are_named():
    weights = ll.weights(one_headed(both_signs(), torch.eye(24)))
    with pytest.raises(BadSettings, match="expected at most half of them"):
        weights.heads(k=30, progress=False)
    with pytest.raises(BadSettings, match="token 48 does not exist; expected ids from 0 to 47"):
        weights.heads(tokens=[1, 48], progress=False)
    with pytest.raises(BadSettings, match="block 9"):
        weights.heads(blocks=[9], progress=False)
    with pytest.raises(BadSettings, match="k=0"):
        weights.heads(k=0, progress=False)


def test_the_table_tells_what_it_holds():
    table = ll.weights(one_headed(both_signs(), torch.eye(24))).heads(
        k=1, sample=20, blocks=[2], progress=False
    )
    assert table.short() == "HeadTable(one-headed: 1 heads; 1 copy, 0 suppress, 0 map)"
    assert table.to_dict()["heads"][0]["copies"]["value"] == 1
    assert list(table.to_pandas()["copies"]) == [1]
    assert table.notes == ["no mappings tested: the model has no tokenizer"]
