"""`ll.stitch`: kernels, losses, reading, and what is refused."""

import pytest
import torch

import layerleap as ll
from families import build
from layerleap.act.stitch.translation import translate
from layerleap.errors import BadSettings, BadText, ModelRefused
from layerleap.lens.lens import Lens
from layerleap.maps.kernel import (
    embedding_kernel,
    fit_kernels,
    random_kernel,
    shared_tokens,
    vocabulary_matrix,
)
from layerleap.models.transformer import Transformer
from layerleap.stream.batches import batches_of
from layerleap.stream.examples import Sampling
from rotated import plain_llama, rotated, rotation
from tiny_models import sentences, tiny, tokenizer

TEXT = "the cat sat on the mat and then it went under the old tree"


@pytest.fixture(scope="module")
def pair() -> tuple[Transformer, Transformer]:
    return tiny("llama"), tiny("llama", seed=1, hidden_size=16, num_hidden_layers=4)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    import json

    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in sentences(60)), "utf8")
    return str(path)


def test_logits_come_for_texts_ids_and_batches(pair):
    stitched = ll.stitch(pair[0], 2, pair[1], 1)
    ids = pair[0].tokenizer(TEXT)["input_ids"]
    logits = stitched(TEXT)
    assert logits.shape == (1, len(ids), 61)
    assert torch.equal(stitched(ids), logits)
    assert torch.equal(stitched(torch.tensor([ids])), logits)
    assert stitched([TEXT, "the dog ran"]).shape == (2, len(ids), 61)


def test_the_kernel_is_the_textbook_formula(pair):
    n = shared_tokens(*pair)
    assert n == len(pair[0].tokenizer.get_vocab()) < 61  # rows that are no token do not count
    ours, theirs = (vocabulary_matrix(one)[:n].double() for one in pair)
    expected = ours.T @ torch.linalg.pinv(theirs).T
    found = embedding_kernel(*pair)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("names", [("llama", "llama"), ("llama", "gpt2"), ("gpt2", "llama")])
def test_the_folded_kernel_carries_centred_scores_of_the_final_norm(names):
    torch.manual_seed(4)
    models = [build(name, seed) for seed, name in enumerate(names)]
    for model in models:
        final = next(m for n, m in model.named_modules() if n.endswith((".norm", ".ln_f")))
        torch.nn.init.uniform_(final.weight, 0.5, 2)
    pair = [Transformer.wrap(one, tokenizer()) for one in models]
    kernel = embedding_kernel(*pair, folded=True)
    n = shared_tokens(*pair)
    scores = []
    for name, model, one in zip(names, models, pair, strict=True):
        final = next(m for k, m in model.named_modules() if k.endswith((".norm", ".ln_f")))
        centring = torch.eye(one.d_model) - (name == "gpt2") / one.d_model
        rows = vocabulary_matrix(one)[:n] @ (final.weight.detach()[:, None] * centring)
        scores.append((rows - rows.mean(0)).detach().double())
    expected = scores[0].T @ torch.linalg.pinv(scores[1], rtol=1e-6).T
    torch.testing.assert_close(kernel, expected, rtol=1e-4, atol=1e-4)


def test_a_stitched_model_is_the_two_halves_run_by_hand(pair):
    a, b = pair
    stitched = ll.stitch(a, 2, b, 1)
    h = a.capture(TEXT, layers=[2]).states[2] @ embedding_kernel(a, b).float()
    with torch.no_grad():
        from layerleap.models.hooks.recording import record

        last = record(b, TEXT).run(h, 1)
        expected = b.logits(last[0])
    torch.testing.assert_close(stitched(TEXT)[0], expected, rtol=1e-4, atol=1e-4)


def test_the_loss_is_that_of_the_logits_and_skips_padding(pair):
    stitched = ll.stitch(pair[0], 1, pair[1], 1)
    texts = [TEXT, "the dog ran"]
    sums, count = 0.0, 0
    for text in texts:
        ids = torch.tensor(pair[0].tokenizer(text)["input_ids"])
        log_p = stitched(text)[0].log_softmax(-1)
        sums -= float(log_p[torch.arange(len(ids) - 1), ids[1:]].sum())
        count += len(ids) - 1
    assert stitched.loss(texts) == pytest.approx(sums / count, rel=1e-4)
    with pytest.raises(BadText, match="one token"):
        stitched.loss("cat")


def test_a_model_stitched_to_itself_has_its_own_loss(pair):
    own = ll.stitch(pair[0], 3, pair[0], 3, "identity").loss(TEXT)
    logits = pair[0].capture(TEXT, layers=(), logits=True).logits[0, :-1]
    ids = torch.tensor(pair[0].tokenizer(TEXT)["input_ids"])[1:]
    assert own == pytest.approx(float(torch.nn.functional.cross_entropy(logits, ids)), rel=1e-6)


def test_layers_after_the_seam_can_be_read_and_edited(pair):
    a, b = pair
    stitched = ll.stitch(a, 2, b, 2)
    with stitched.spliced(TEXT) as report:
        readings = Lens(b).read(TEXT)
    assert not report.unused
    before = stitched(TEXT)
    last = [row["top"][0]["id"] for row in readings.rows() if row["layer"] == b.n_layers]
    said = before[0].argmax(-1).tolist()
    assert last == [said[position] for position in readings.positions]
    with b.edit(ll.edits.ZeroNeuron(block=4, neuron=0)):
        assert not torch.equal(stitched(TEXT), before)
    with b.edit(ll.edits.ZeroNeuron(block=1, neuron=0)):  # below the seam nothing of b is used
        assert torch.equal(stitched(TEXT), before)
    assert torch.equal(stitched(TEXT), before)


def test_a_fitted_kernel_of_a_rotated_copy_is_the_rotation(documents):
    model = plain_llama()
    turn = rotation(24)
    a = Transformer.wrap(model, tokenizer(), name="a")
    b = Transformer.wrap(rotated(model, turn), tokenizer(), name="b")
    stitched = ll.stitch(a, 2, b, 2, "least-squares", text=documents, ridge=0.0, progress=False)
    torch.testing.assert_close(stitched.map.weight, turn.float(), rtol=1e-4, atol=1e-4)
    assert stitched.kernel == "least-squares"


def test_fitted_kernels_are_least_squares_between_widths(pair, documents):
    batches = list(batches_of(pair[0], documents, Sampling(positions="all"), n_texts=40))
    found = fit_kernels(*pair, [(1, 2), (3, 4)], batches, ridge=0.0)
    for (i, j), (kernel, report) in found.items():
        x, y = (
            torch.cat(
                [m.capture(b.inputs, layers=[layer], keep=b.keep).states[layer] for b in batches]
            ).double()
            for m, layer in ((pair[0], i), (pair[1], j))
        )
        expected = torch.linalg.lstsq(x, y).solution
        torch.testing.assert_close(kernel.weight.double(), expected, rtol=1e-3, atol=1e-3)
        assert (report.src, report.dst, report.rows, report.width) == (i, j, len(x), 24)
        assert report.rank == 24


def test_few_rows_get_a_ridge(pair, documents):
    batches = batches_of(pair[0], documents, Sampling(), n_texts=5)
    ((_, report),) = fit_kernels(*pair, [(1, 1)], batches).values()
    assert report.ridge == 0.01


def test_a_random_kernel_has_the_size_of_the_other_one(pair):
    kernel = embedding_kernel(*pair)
    random = random_kernel(kernel, seed=3)
    assert random.shape == kernel.shape
    torch.testing.assert_close(torch.linalg.svdvals(random), torch.linalg.svdvals(kernel))
    assert torch.equal(random, random_kernel(kernel, seed=3))
    assert not torch.allclose(random, random_kernel(kernel, seed=4))


def test_a_matrix_or_a_function_can_be_given(pair):
    kernel = embedding_kernel(*pair).float()
    named = ll.stitch(pair[0], 1, pair[1], 1)(TEXT)
    for given in (kernel, lambda h: h @ kernel):
        torch.testing.assert_close(
            ll.stitch(pair[0], 1, pair[1], 1, given)(TEXT), named, rtol=1e-5, atol=1e-5
        )


def test_it_says_what_it_is(pair):
    stitched = ll.stitch(pair[0], 2, pair[1], 1)
    assert repr(stitched) == (
        "Stitched(layers 0 to 2 of tiny-llama (3 layers), embedding kernel 24 x 16, from layer 1 "
        "of tiny-llama (4 layers) on)"
    )
    assert stitched.to_dict()["layer_a"] == 2
    narrow = ll.stitch(pair[0], 2, pair[1], 2)
    assert repr(translate(narrow)).startswith("Translated(the last 2 blocks and tail of tiny-llama")


def test_a_classifier_can_be_at_the_end_but_has_no_loss(pair):
    c = Transformer.wrap(build("llama_text"), tokenizer(), name="classifier")
    stitched = ll.stitch(pair[0], 2, c, 2)
    assert stitched([TEXT, "the dog ran"]).shape == (2, 4)
    with pytest.raises(BadSettings, match="predicts a text class, not the next token"):
        stitched.loss(TEXT)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda a, b: ll.stitch(a, 4, b, 0), "layer 4 does not exist: this model has"),
        (lambda a, b: ll.stitch(a, 0, b, 9), "layer_b: layer 9 does not exist"),
        (lambda a, b: ll.stitch(a, 0, b, 0, text="a b"), "text, sampling and ridge are for"),
        (lambda a, b: ll.stitch(a, -1, b, 0), "layer -1 does not exist"),
        (lambda a, b: ll.stitch(a, 0, b, 0, "embeding"), "did you mean 'embedding'"),
        (lambda a, b: ll.stitch(a, 0, b, 0, "identity"), "an identity kernel keeps states of"),
        (lambda a, b: ll.stitch(a, 0, b, 0, torch.eye(3)), r"has shape \(3, 3\); expected"),
        (lambda a, b: ll.stitch(a, 0, b, 0, 7), "kernel is a int; expected a name, a matrix"),
        (lambda a, b: ll.stitch(a, 0, b, 0, lambda h: h), "the kernel gives states of width 24"),
        (lambda a, b: ll.stitch("a", 0, b, 0), "a is 'a'; expected a model from ll.load"),
        (lambda a, b: translate(ll.stitch(b, 1, a, 1)), "rank 16 and no left inverse"),
        (lambda a, b: translate(ll.stitch(a, 1, b, 1, lambda h: h[..., :16])), "without a bias"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(pair, make, words):
    with pytest.raises(BadSettings, match=words):
        make(*pair)


def test_other_vocabularies_are_refused(pair):
    other = tokenizer()
    other.add_tokens(["whale"])
    strange = Transformer.wrap(build("llama", 1), other, name="strange")
    with pytest.raises(BadSettings, match="different vocabularies"):
        ll.stitch(pair[0], 1, strange, 1)
    silent = Transformer.wrap(build("llama", 1, vocab_size=70), name="silent")
    with pytest.raises(BadSettings, match="61 and 70 tokens, and no tokenizers"):
        ll.stitch(pair[0], 1, silent, 1)


def test_a_vocabulary_smaller_than_the_width_has_no_right_inverse(pair):
    wide = tiny("llama", hidden_size=72)
    with pytest.raises(BadSettings, match="right inverse"):
        ll.stitch(pair[0], 1, wide, 1)


def test_models_of_images_and_pairs_are_refused(pair):
    for name in ("vit", "bart"):
        other = Transformer.wrap(build(name), name=name)
        with pytest.raises(BadSettings, match="expected a language model"):
            ll.stitch(pair[0], 1, other, 1)


def test_experts_cannot_be_translated(pair):
    model = build("mixtral", 1)
    model.set_experts_implementation("eager")
    experts = Transformer.wrap(model, tokenizer(), name="experts")
    with pytest.raises(ModelRefused, match="cannot be translated"):
        translate(ll.stitch(pair[0], 1, experts, 1))
