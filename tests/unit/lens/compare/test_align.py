"""`ll.align`: settings, refusals, what is said about the result."""

import json
from functools import cache

import pytest
import torch
from tokenizers import Tokenizer, models as token_models
from transformers import PreTrainedTokenizerFast

import layerleap as ll
from families import build
from layerleap.errors import BadSettings
from layerleap.lens.compare import similarity as module
from layerleap.lens.compare.align import align
from layerleap.lens.compare.alignment import Alignment
from layerleap.models.transformer import Transformer
from layerleap.models.weights import unembedding, vectors
from tiny_models import tiny, tokenizer


@cache
def model(name: str = "llama", seed: int = 0, **changes: object) -> Transformer:
    return tiny(name, seed=seed, **changes)


@cache
def pair() -> Alignment:
    return align(model(), model(seed=1), progress=False)


def explicit(a: Transformer, b: Transformer, kind: str, block_a: int, block_b: int):
    """|Pearson| of the scores of all tokens, the long way."""
    scores = [
        vectors(m, block, kind).double() @ unembedding(m).double().T
        for m, block in ((a, block_a), (b, block_b))
    ]
    n = len(scores[0])
    return torch.corrcoef(torch.cat(scores))[:n, n:].abs()


def test_similarities_are_means_and_best_matches_of_explicit_correlations():
    for kind in ("ffn.up", "ffn.value", "attn.k"):
        mean, best = (pair().matching(kind, measure) for measure in ("mean", "best"))
        for a in (1, 2, 3):
            for b in (1, 2, 3):
                found = explicit(model(), model(seed=1), kind, a, b)
                row, column = a - 1, b - 1
                assert mean.similarity[row][column] == pytest.approx(float(found.mean()), abs=1e-6)
                expected = float(found.amax(1).mean())
                assert best.similarity[row][column] == pytest.approx(expected, abs=1e-6)


def test_pieces_and_groups_of_blocks_give_the_same(monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 500)
    monkeypatch.setattr(module, "READY_BYTES", 1)
    parts = align(model(), model(seed=1), progress=False)
    for one, other in zip(parts.matchings, pair().matchings, strict=True):
        torch.testing.assert_close(torch.tensor(one.similarity), torch.tensor(other.similarity))


def test_a_model_matches_itself_in_both_spaces():
    found = align(model(), model(), progress=False)
    assert found.spaces == ("vocabulary", "raw")
    for kind in found.kinds:
        for space in found.spaces:
            one = found.matching(kind, "best", space)
            assert one.hits == 3
            assert one.similarity[0][0] == pytest.approx(1.0, abs=1e-6)


def test_models_of_different_width_have_no_control():
    wide = model(seed=1, hidden_size=32)
    found = align(model(), wide, progress=False)
    assert found.spaces == ("vocabulary",)
    assert (
        found.missing["raw"] == "raw coordinates cannot be compared: the models are 24 and 32 wide"
    )
    assert any("24 and 32 wide" in note for note in found.notes)


def test_models_of_different_depth_are_matched():
    deep = model(seed=1, num_hidden_layers=5)
    one = align(model(), deep, kinds=["ffn.value"], progress=False).matching("ffn.value")
    assert len(one.matches) == 3
    assert (len(one.similarity), len(one.similarity[0])) == (3, 5)
    assert one.expected_hits == pytest.approx(3 / 5)


def test_rows_are_drawn_from_the_first_model_only_and_that_is_said():
    found = align(model(), model(), kinds=["ffn.value"], rows=7, seed=3, progress=False)
    one = found.matching("ffn.value")
    assert one.similarity[0][0] == pytest.approx(1.0, abs=1e-6)  # all rows of B are there
    assert one.rows == 7
    assert any(
        "at most 7 rows of tiny-llama per block and kind, drawn with seed 3" in n
        for n in found.notes
    )
    again = align(model(), model(), kinds=["ffn.value"], rows=7, seed=3, progress=False)
    other = align(model(), model(), kinds=["ffn.value"], rows=7, seed=4, progress=False)
    assert again.matchings == found.matchings
    assert other.matchings != found.matchings


def test_more_rows_than_there_are_is_all_of_them():
    found = align(model(), model(), kinds=["attn.k"], rows=999, progress=False)
    assert {one.rows for one in found.matchings} == {None}


def test_what_would_take_too_long_is_drawn_and_said(monkeypatch):
    monkeypatch.setitem(module.AFFORDABLE, "raw", 1.0)
    found = align(model(intermediate_size=80), model(seed=1), kinds=["ffn.value"], progress=False)
    assert found.matching("ffn.value").rows is None
    assert found.matching("ffn.value", space="raw").rows == 64
    assert "raw: at most 64 rows" in " ".join(found.notes)


def test_tokens_can_be_restricted():
    ids = list(range(3, 50))
    found = align(model(), model(seed=1), kinds=["ffn.value"], tokens=ids, progress=False)
    assert (found.n_tokens, found.d_vocab) == (47, 61)
    assert found.notes[0].startswith("correlations over 47 of 61 tokens")
    same = align(model(), model(seed=1), kinds=["ffn.value"], tokens=torch.tensor(ids * 2))
    assert same.matchings == found.matchings
    assert found.matchings[0].similarity != pair().matching("ffn.value").similarity


def test_norms_can_be_folded_in():
    plain = align(model(), model(seed=1), kinds=["ffn.up"], progress=False)
    folded = align(model(), model(seed=1), kinds=["ffn.up"], fold=True, progress=False)
    assert plain.matchings[0].similarity != folded.matchings[0].similarity
    assert "norms folded in" in folded.notes[0]


def test_the_control_can_be_left_out():
    found = align(model(), model(seed=1), kinds=["attn.o"], control=False, progress=False)
    assert found.spaces == ("vocabulary",)
    assert not found.missing


def test_experts_are_left_out_with_the_reason():
    moe = Transformer.wrap(build("mixtral"), tokenizer(), name="tiny-moe")
    found = align(moe, model(), kinds=["attn.v", "ffn.value"], progress=False)
    assert found.kinds == ("attn.v",)
    reason = found.missing["ffn.value of tiny-moe"]
    assert "experts" in reason


def test_progress_counts_pairs_of_blocks():
    steps = []
    ll.align(
        model(),
        model(seed=1),
        kinds=["attn.k"],
        progress=lambda phase, done, total, unit="": steps.append((phase, done, total, unit)),
    )
    assert steps[-1] == ("comparing blocks", 18, 18, "pairs")
    assert len(steps) == 18


def other_words() -> PreTrainedTokenizerFast:
    words = {word: place for place, word in enumerate(["<unk>", *"abcdefgh"])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(token_models.WordLevel(words, unk_token="<unk>")),
        unk_token="<unk>",
    )


def test_different_vocabularies_are_refused():
    larger = Transformer.wrap(build("llama", seed=1, vocab_size=67))
    with pytest.raises(BadSettings, match=r"61 and 67 tokens, and no tokenizers"):
        align(model(), larger)
    foreign = Transformer.wrap(build("llama", seed=1), other_words(), name="foreign")
    with pytest.raises(BadSettings, match=r"tiny-llama and foreign .* '<unk>', have different ids"):
        align(model(), foreign)
    unnamed = Transformer.wrap(build("llama", seed=1))
    assert align(model(), unnamed, kinds=["attn.k"], progress=False).kinds == ("attn.k",)


def test_tables_that_differ_in_padding_only_are_compared_over_the_common_tokens():
    padded = model(vocab_size=67)
    found = align(model(), padded, kinds=["ffn.value"], progress=False)
    assert found.d_vocab == len(tokenizer())
    with pytest.raises(BadSettings, match="token 61 does not exist"):
        align(model(), padded, tokens=[5, 61])


def test_classifiers_are_refused():
    classes = Transformer.wrap(build("llama_text"))
    with pytest.raises(BadSettings, match="predicts classes, not tokens"):
        align(model(), classes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": ["ffn.values"]}, "kind is 'ffn.values'; .*did you mean 'ffn.value'"),
        ({"rows": 0}, "rows is 0; expected 1 or more"),
        ({"tokens": [5]}, "1 tokens to compare over; a correlation needs at least 2"),
        ({"tokens": [5, 61]}, "token 61 does not exist; expected 0 to 60"),
        ({"tokens": [-1, 5]}, "token -1 does not exist"),
        ({"rows": "many"}, "rows is 'many'; expected a whole number"),
    ],
)
def test_mistakes_are_one_line(options, message):
    with pytest.raises(BadSettings, match=message):
        align(model(), model(seed=1), **options)


def test_a_name_is_not_a_model():
    with pytest.raises(BadSettings, match=r"expected a model from ll\.load"):
        align("smollm2", model())


def test_the_result_prints_counts_and_becomes_json_and_a_table():
    found = pair()
    assert repr(found).startswith("Alignment(tiny-llama and tiny-llama, blocks at their own")
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert len(told["matchings"]) == len(found.kinds) * 2 * 2
    frame = found.to_pandas()
    assert len(frame) == len(found.matchings) * 3
    assert list(frame.columns[:5]) == ["kind", "space", "measure", "a", "b"]
    with pytest.raises(BadSettings, match=r"kind is 'ffn\.key'"):
        found.matching("ffn.key")
    with pytest.raises(BadSettings, match="measure is 'worst'"):
        found.matching("ffn.up", "worst")


def test_tokens_without_a_row_in_either_model_are_left_out():
    def without(tokens: list[int], seed: int) -> Transformer:
        bare = build("llama", seed)
        with torch.no_grad():
            bare.lm_head.weight[tokens] = 0
        return Transformer.wrap(bare, tokenizer(), name=f"seed {seed}")

    a, b = without([3, 50], 0), without([50, 51], 1)
    found = align(a, b, kinds=["ffn.value"], progress=False)
    assert found.n_tokens == 58
    assert found.notes[0].startswith("correlations over 58 of 61 tokens")
    rest = [token for token in range(61) if token not in (3, 50, 51)]
    chosen = align(a, b, kinds=["ffn.value"], tokens=rest, progress=False)
    assert chosen.matchings == found.matchings
    everything = align(a, b, kinds=["ffn.value"], tokens=range(61), progress=False)
    assert everything.matchings != found.matchings


def test_a_kind_with_fewer_vectors_than_are_drawn_is_compared_in_full():
    found = align(model(), model(), kinds=["ffn.value", "attn.k"], rows=20, progress=False)
    assert found.matching("ffn.value").rows == 20
    assert found.matching("attn.k").rows is None
