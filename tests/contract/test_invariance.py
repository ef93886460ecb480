"""A row's result does not depend on the other rows of its batch, on batch size or on padding."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings, strategies as st

from families import build
from layerleap.lens.lens import Lens
from layerleap.models.discovery.compare import row_gap as gap
from layerleap.models.transformer import Transformer
from layerleap.stream.examples import Example, Sampling, collate, iter_batches, iter_examples
from tiny_models import sentences, tokenizer

FAMILIES = (
    "llama",
    "gpt2",
    "opt",
    "bloom",
    "mistral",
    "gemma3",
    "mixtral",
    "bert",
    "roberta",
    "albert",
)
# BLOOM takes its softmax in float32 whatever the dtype, so its rounding is float32's.
EXACT = {name: 1e-6 if name == "bloom" else 1e-9 for name in FAMILIES}
rows = st.lists(st.lists(st.integers(5, 50), min_size=1, max_size=12), min_size=1, max_size=6)


def tries(n: int) -> settings:
    return settings(max_examples=n, deadline=None, derandomize=True, database=None)


@cache
def wrapped(name: str, side: str = "right") -> Transformer:
    """In float64, so that only real differences remain."""
    model = build(name)
    if hasattr(model.config, "_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped kernels know no float64
    kind = "masked-token" if name in ("bert", "roberta", "albert") else "next-token"
    return Transformer.wrap(model.double(), tokenizer(kind, side=side))


def states_of(transformer: Transformer, texts: list[list[int]]) -> list[list[torch.Tensor]]:
    """For each text, its states by layer, all read in one batch."""
    examples = [Example(n, tuple(ids), tuple(range(len(ids)))) for n, ids in enumerate(texts)]
    batch = collate(transformer, examples)
    captured = transformer.capture(batch.inputs, keep=batch.keep)
    return [
        [captured.states[layer][batch.documents == n] for layer in range(transformer.n_layers + 1)]
        for n in range(len(texts))
    ]


def worst_gap(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(gap(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
@tries(10)
@given(texts=rows)
def test_states_do_not_depend_on_the_other_rows_or_the_padding(name, texts):
    transformer = wrapped(name)
    together = states_of(transformer, texts)
    for ids, states in zip(texts, together, strict=True):
        assert worst_gap(states, states_of(transformer, [ids])[0]) < EXACT[name]


@pytest.mark.parametrize("name", FAMILIES)
@tries(5)
@given(text=st.lists(st.integers(5, 50), min_size=1, max_size=8), amount=st.integers(1, 40))
def test_states_do_not_depend_on_the_amount_of_padding(name, text, amount):
    transformer = wrapped(name)
    filler = [7] * (len(text) + amount)
    assert (
        worst_gap(states_of(transformer, [text, filler])[0], states_of(transformer, [text])[0])
        < EXACT[name]
    )


@pytest.mark.parametrize("name", FAMILIES)
@tries(3)
@given(texts=rows)
def test_left_padding_tokenizers_give_the_same_states(name, texts):
    """Inputs are always padded on the right: in many models, left padding shifts positions."""
    right, left = (states_of(wrapped(name, side), texts) for side in ("right", "left"))
    for ours, theirs in zip(left, right, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_corpus_gives_the_same_rows_at_any_batch_size_and_padding_side(name, side):
    def by_document(transformer, tokens_per_batch):
        sampling = Sampling(unit="document", held_out=0.0)
        examples = iter_examples(transformer, sentences(12), sampling)
        rows = {}
        for batch in iter_batches(transformer, examples, tokens_per_batch=tokens_per_batch):
            captured = transformer.capture(batch.inputs, keep=batch.keep)
            last = captured.states[transformer.n_layers]
            rows |= {
                int(d): (int(p), h)
                for d, p, h in zip(batch.documents, batch.positions, last, strict=True)
            }
        return rows

    one_by_one = by_document(wrapped(name), 1)
    assert sorted(one_by_one) == list(range(12))
    for size in (64, 10_000):
        batched = by_document(wrapped(name, side), size)
        for document, (position, h) in one_by_one.items():
            assert batched[document][0] == position
            assert gap(batched[document][1], h) < EXACT[name]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_reading_a_batch_equals_reading_one_by_one(name, side):
    lens = Lens(wrapped(name, side))
    texts = ["the cat sat", "the old man saw a small red fish under the tree", "dog", [9, 8, 7, 40]]
    for text, batched in zip(texts, lens.read_batch(texts), strict=True):
        alone = Lens(wrapped(name)).read(text)
        assert batched.tokens == alone.tokens
        assert batched.positions == alone.positions
        ours, theirs = batched.tracks["logit"], alone.tracks["logit"]
        assert torch.equal(ours.ids, theirs.ids)
        assert torch.equal(ours.agrees, theirs.agrees)
        for measure in ("probs", "kl", "surprisal"):
            torch.testing.assert_close(
                getattr(ours, measure), getattr(theirs, measure), rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize("name", FAMILIES)
def test_the_reading_of_the_last_layer_is_the_models_own_answer(name):
    transformer = wrapped(name)
    text = [9, 8, 7, 40, 12]
    track = Lens(transformer).read(text).tracks["logit"]
    batch = collate(transformer, [Example(0, tuple(text), tuple(range(5)))])
    with torch.inference_mode():
        logits = transformer.model(**batch.inputs).logits[0]
    assert torch.equal(track.ids[-1, :, 0], logits.argmax(-1))
    assert track.agrees[-1].all()
    assert track.kl[-1].abs().max() < 1e-6
    torch.testing.assert_close(
        track.probs[-1, :, 0].double(), logits.softmax(-1).amax(-1), rtol=1e-5, atol=1e-6
    )
