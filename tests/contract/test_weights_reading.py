"""Parameters of every family read as tokens, against the whole matrices of tiny vocabularies."""

import re

import pytest
import torch
from torch import Tensor

import layerleap as ll
from edit_cases import EXPERTS, wrapped
from families import CLASS, CLASSIFIERS, MASKED_TOKEN, NEXT_TOKEN
from layerleap.errors import BadSettings, ModelRefused
from layerleap.lens.vocabulary.space import Space
from layerleap.lens.vocabulary.token_pairs import Pairs
from layerleap.models.transformer import Transformer
from layerleap.models.weights import all_heads, embedding, kinds, unembedding, vectors

FAMILIES = [name for name in (*NEXT_TOKEN, *MASKED_TOKEN) if name not in EXPERTS]
# Families whose heads must be readable in both forms; others may be refused, with a reason.
BOTH_FORMS = ("gpt2", "gpt_neox", "opt", "llama", "mistral", "qwen2", "phi3", "bert")


def source_of(model: Transformer) -> Tensor:
    """The matrix that tokens are read from: the input matrix, if its width fits."""
    try:
        return embedding(model)
    except ModelRefused:
        return unembedding(model)


def entries(product: Tensor, top: int) -> list[tuple[int, int]]:
    order = product.flatten().sort(descending=True, stable=True).indices[:top].tolist()
    return [divmod(place, product.shape[1]) for place in order]


def check_pairs(found: Pairs, product: Tensor) -> None:
    assert [(pair.first.id, pair.second.id) for pair in found] == entries(product, len(found))
    scores = [float(product[pair.first.id, pair.second.id]) for pair in found]
    assert [pair.score for pair in found] == pytest.approx(scores, rel=1e-9, abs=1e-12)
    rows, columns = ([token.id for token in end] for end in (found.grid.rows, found.grid.columns))
    torch.testing.assert_close(
        torch.tensor(found.grid.scores).double(), product[rows][:, columns], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_pairs_are_the_largest_entries_of_the_whole_matrix(name, fold):
    model = wrapped(name)
    weights = ll.weights(model, norms="fold" if fold else "skip")
    own = all_heads(model)[2]
    if isinstance(own, str):
        assert name not in BOTH_FORMS
        with pytest.raises(ModelRefused, match=re.escape(own)):
            weights.pairs("L2.H1", progress=False)
        return
    source, target = source_of(model), unembedding(model)
    value, output = (part(model, 1, fold=fold) for part in (own.value, own.output))
    whole = source @ value @ output @ target.T
    check_pairs(weights.pairs("L2.H1", top=40, centred=False, progress=False), whole)
    centred = (source - source.mean(0)) @ value @ output @ (target - target.mean(0)).T
    check_pairs(weights.pairs("L2.H1", top=40, progress=False), centred)
    if own.qk_reason is not None:
        assert name not in BOTH_FORMS
        with pytest.raises(ModelRefused, match=re.escape(own.qk_reason)):
            weights.pairs("L2.H1", form="qk", progress=False)
        return
    query, key = (part(model, 1, fold=fold) for part in (own.query, own.key))
    for offset in (0, 3) if own.positions == "rotary" else (0,):
        turned = query @ own.rotation(model, offset).to(query)
        found = weights.pairs(
            "L2.H1", form="qk", top=40, offset=offset, centred=False, progress=False
        )
        check_pairs(found, source @ turned @ key.T @ source.T)
        assert found.offset == (offset if own.positions == "rotary" else None)
        assert (f"at offset {offset}" in found.title) == (own.positions == "rotary")


@pytest.mark.parametrize("name", FAMILIES)
def test_vectors_are_read_through_the_right_matrix(name):
    model = wrapped(name)
    weights = ll.weights(model)
    known = [kind for kind in kinds(model, 1) if kind.startswith("ffn.")]
    reading = weights.read("L1.N7", top=61)
    assert [one.kind for one in reading] == known
    assert bool(reading.missing) == (known == ["ffn.value"])
    for one in reading:
        matrix = unembedding(model) if one.role == "writes" else source_of(model)
        vector = vectors(model, 1, one.kind)[7]
        scores = matrix.double() @ vector.double()
        assert one.role == ("writes" if one.kind == "ffn.value" else "reads")
        assert one.norm == pytest.approx(float(vector.norm()), rel=1e-5)
        for end, sign in ((one.promotes, 1), (one.suppresses, -1)):
            assert len(end) == len(matrix)
            told = torch.tensor([scored.score for scored in end])
            own = scores[[scored.token.id for scored in end]]
            torch.testing.assert_close(told.double(), own, rtol=2e-3, atol=2e-3)
            assert ((sign * own).diff() <= 1e-5).all()


def test_grouped_heads_are_served_by_their_own_keys_and_values():
    """Explicit slices of the weights of a Llama: 4 query heads, 2 of keys and values."""
    model = wrapped("llama")
    weights, attention = ll.weights(model), model.model.model.layers[1].self_attn
    source, target = embedding(model), unembedding(model)
    assert not torch.equal(source, target)
    for head in range(4):
        own, shared = (slice(6 * i, 6 * i + 6) for i in (head, head // 2))
        query, key, value = (
            getattr(attention, f"{part}_proj").weight.detach()[rows]
            for part, rows in (("q", own), ("k", shared), ("v", shared))
        )
        output = attention.o_proj.weight.detach()[:, own]
        found = weights.pairs(f"L2.H{head}", centred=False, progress=False)
        check_pairs(found, source @ value.T @ output.T @ target.T)
        assert found.about["read_through"] == "input matrix"
        found = weights.pairs(f"L2.H{head}", form="qk", centred=False, progress=False)
        check_pairs(found, source @ query.T @ key @ source.T)
        for part, vector, matrix in (
            ("Q", query[5], source),
            ("K", key[5], source),
            ("V", value[5], source),
            ("O", output[:, 5], target),
        ):
            (one,) = weights.read(f"L2.H{head}.{part}5", top=1)
            scores = matrix @ vector
            assert one.promotes[0].token.id == int(scores.argmax())
            assert one.suppresses[0].token.id == int(scores.argmin())


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_with_the_pseudo_inverse_scores_of_all_tokens_keep_inner_products(name):
    """h w = (h E)(E' w) for any state h, where E is the matrix that w is read through."""
    model = wrapped(name)
    space = Space.of(model, "skip", "pseudo")
    states = torch.randn(5, model.d_model, generator=torch.Generator().manual_seed(0)).double()
    rows = vectors(model, 1, "attn.q").double()
    exact = states @ rows.T
    by_tokens = (states @ space.source.T) @ space.read(rows)
    torch.testing.assert_close(by_tokens, exact, rtol=1e-6, atol=1e-6)
    pseudo = ll.weights(model, inverse="pseudo").read("L1.H0.Q0", top=3)
    expected = torch.linalg.pinv(space.source.T) @ rows[0]
    assert [s.token.id for s in pseudo.vectors[0].promotes] == expected.topk(3).indices.tolist()


def test_tied_models_say_so():
    weights = ll.weights(wrapped("gpt2"))
    assert weights.space.source_name == "tied matrix"
    assert weights.read("L1.N0").about["written_through"] == "tied matrix"


def test_a_restricted_vocabulary_keeps_the_scores_of_the_whole_one():
    weights = ll.weights(wrapped("gpt2"))
    some = {3, 8, 20, 21, 40, 59}
    everything = weights.pairs("L3.H2", top=61 * 61, progress=False)
    within = [p for p in everything if {p.first.id, p.second.id} <= some]
    found = weights.pairs("L3.H2", top=1000, tokens=[*some, 3], progress=False)
    assert found.n_tokens == 6
    assert [(p.first, p.second) for p in found] == [(p.first, p.second) for p in within]
    assert [p.score for p in found] == pytest.approx([p.score for p in within])
    different = weights.pairs("L3.H2", top=1000, tokens=[*some], identical=False, progress=False)
    assert [(p.first, p.second) for p in different] == [
        (p.first, p.second) for p in within if p.first != p.second
    ]


@pytest.mark.parametrize("name", [*CLASS, *list(CLASSIFIERS)[:2]])
def test_a_model_without_a_vocabulary_is_refused(name):
    with pytest.raises(ModelRefused, match="predicts classes, not tokens"):
        ll.weights(wrapped(name))


@pytest.mark.parametrize("name", sorted(EXPERTS))
def test_neurons_of_experts_are_refused_with_the_reason(name):
    with pytest.raises(ModelRefused, match="mixture of experts"):
        ll.weights(wrapped(name)).read("L1.N0")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("L4.N0", r"block 4 does not exist|1 to 3"),
        ("L0.H0.Q0", "1 to 3"),
        ("L1.N40", "neuron 40 does not exist: block 1 has neurons 0 to 39"),
        ("L1.H4.Q0", "head 4 does not exist: block 1 has heads 0 to 3"),
        ("L1.H3.Q6", "column 6 does not exist: W_Q of L1.H3 has columns 0 to 5"),
        ("L1.H3.O6", "row 6 does not exist: W_O of L1.H3 has rows 0 to 5"),
        ("L1.H3", "is a whole head, a matrix; ask for its pairs"),
        ("nonsense", "is not the name of a parameter"),
    ],
)
def test_reading_what_does_not_exist_names_the_range(name, message):
    with pytest.raises(BadSettings, match=message):
        ll.weights(wrapped("llama")).read(name)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"head": "L1.N3"}, "is a single vector, which has no pairs"),
        ({"head": "L1.H4"}, "head 4 does not exist: block 1 has heads 0 to 3"),
        ({"top": 0}, "top is 0; expected 1 or more"),
        ({"offset": 2}, "W_VO does not depend on positions"),
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": [61]}, "token 61 does not exist; expected ids from 0 to 60"),
        ({"form": "kq"}, "form is 'kq'; expected one of 'vo', 'qk'"),
        ({"largest": "most"}, "largest is 'most'; expected one of"),
    ],
)
def test_mistakes_about_pairs_are_named(given, message):
    with pytest.raises(BadSettings, match=message):
        ll.weights(wrapped("llama")).pairs(**{"head": "L1.H0", "progress": False, **given})


def test_an_offset_needs_rotary_positions():
    with pytest.raises(BadSettings, match="not rotary, so W_QK is the same at every offset"):
        ll.weights(wrapped("gpt2")).pairs("L1.H0", form="qk", offset=1, progress=False)


def test_settings_are_checked():
    with pytest.raises(BadSettings, match="norms is 'both'; expected one of 'skip', 'fold'"):
        ll.weights(wrapped("llama"), norms="both")
    with pytest.raises(BadSettings, match="inverse is 'none'"):
        ll.weights(wrapped("llama"), inverse="none")


def test_results_tell_what_they_are():
    weights = ll.weights(wrapped("llama"), norms="fold", inverse="pseudo")
    assert "the pseudo-inverse of E (input matrix), norms folded in" in repr(weights)
    pairs = weights.pairs("L1.H0", form="qk", offset=2, top=7, progress=False)
    assert repr(pairs).startswith("Pairs(L1.H0 W_QK at offset 2, 7 pairs of 61 tokens")
    assert len(pairs.to_pandas()) == len(pairs.to_dict()["pairs"]) == 7
    reading = weights.read("L1.N3", top=4)
    assert repr(reading).startswith("ParameterReading(L1.N3: ffn.")
    table = reading.to_pandas()
    assert len(table) == 8 * len(reading.vectors)
    assert set(table["end"]) == {words for one in reading.vectors for words in one.words}
    assert reading.to_dict()["inverse"] == "pseudo"
