import json
from functools import cache
from pathlib import Path

import pytest

from families import build
from layerleap.errors import BadSettings, BadText
from layerleap.models.load import load
from layerleap.models.transformer import Transformer
from layerleap.stream.examples import Sampling, iter_examples
from layerleap.stream.generated import TextGeneration, generated_texts
from tiny_models import WORDS, sentences, tiny, tokenizer

NAMES = (
    *("model", "identity", "blocks", "tail", "anatomy", "kind", "d_model", "d_vocab", "tokenizer"),
)
SMALL = TextGeneration(n_texts=30, max_tokens=12, rounds=3)
pytestmark = pytest.mark.usefixtures("empty_cache")


@cache
def model(name: str) -> Transformer:
    return tiny(name, vocab_size=len(WORDS) + 5)  # every id is a word the tokenizer knows


@pytest.fixture
def starts(tmp_path) -> Path:
    path = tmp_path / "starts.txt"
    path.write_text("\n\n".join(text.lower().replace(" .", "") for text in sentences(6)))
    return path


def generate(name: str, starts: Path, settings: TextGeneration = SMALL, **options) -> Path:
    real = starts if name == "bert" else None
    return generated_texts(model(name), settings, starts=real, **options)


def texts_of(path: Path) -> list[list[str]]:
    records = [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]
    assert len({record["name"] for record in records}) == len(records)
    return [record["text"].split("\n\n") for record in records]


both = pytest.mark.parametrize("name", ["bert", "llama"])


@both
def test_the_same_seed_gives_the_same_texts(name, starts, monkeypatch, tmp_path):
    first = generate(name, starts)
    monkeypatch.setenv("LAYERLEAP_CACHE", str(tmp_path / "another"))
    again = generate(name, starts)
    assert first != again
    assert first.name == again.name
    assert first.read_bytes() == again.read_bytes()
    other = generate(name, starts, TextGeneration(n_texts=30, max_tokens=12, rounds=3, seed=1))
    assert other.read_bytes() != first.read_bytes()


@both
def test_generating_leaves_the_random_state_of_the_caller_alone(name, starts):
    import torch

    torch.manual_seed(5)
    before = torch.get_rng_state()
    generate(name, starts)
    assert torch.equal(torch.get_rng_state(), before)


@both
def test_a_second_call_takes_the_file_from_the_cache_and_does_not_run_the_model(
    name, starts, monkeypatch, empty_cache
):
    first = generate(name, starts)
    assert first.is_relative_to(empty_cache)

    def fail(*_, **__):
        raise AssertionError("the model was run")

    monkeypatch.setattr(model(name).model, "forward", fail)
    monkeypatch.setattr(model(name).model, "generate", fail, raising=False)
    assert generate(name, starts, progress=fail) == first


@both
def test_an_interrupted_run_leaves_nothing_in_the_cache(name, starts, empty_cache):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(name, starts, progress=interrupt)
    assert [path for path in empty_cache.rglob("*") if path.is_file()] == []


@both
def test_as_many_texts_are_generated_as_asked_for_and_none_is_too_long(name, starts):
    chains = texts_of(generate(name, starts))
    assert sum(map(len, chains)) >= 30
    assert all(len(text.split()) <= 12 for chain in chains for text in chain)


@both
def test_special_tokens_are_never_generated(name, starts):
    words = {
        word
        for chain in texts_of(generate(name, starts))
        for text in chain
        for word in text.split()
    }
    assert words <= set(WORDS)
    assert len(words) > 20


def test_a_chain_stays_close_to_its_real_sequence_and_restarts_from_it(starts):
    real = [text.split()[:10] for text in starts.read_text().split("\n\n")]
    for chain, start in zip(texts_of(generate("bert", starts)), real, strict=True):
        assert len(chain) == 5
        changed = [sum(a != b for a, b in zip(t.split(), start, strict=True)) for t in chain]
        assert sum(changed) > 0
        assert changed[0] < len(start)  # one round resamples a fifth of the tokens
        assert changed[3] < len(start)  # the first round after a new start


def test_other_starts_or_another_model_give_another_file(starts, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("the cat sat\n\nthe dog ran\n")
    paths = {
        generate("bert", starts),
        generate("bert", other),
        generated_texts(tiny("bert", seed=1, vocab_size=len(WORDS) + 5), SMALL, starts=starts),
    }
    assert len(paths) == 3


def test_a_round_in_which_no_token_is_chosen_is_fine(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("cat\n")
    (chain,) = texts_of(
        generated_texts(model("bert"), TextGeneration(n_texts=20, share=0.2), starts=path)
    )
    assert len(chain) == 20
    assert "cat" in chain


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_texts_never_outgrow_the_position_table(name, tmp_path):
    path = tmp_path / "long.txt"
    path.write_text(" ".join(WORDS * 4) + "\n")
    generated = generated_texts(
        model(name),
        TextGeneration(n_texts=2, max_tokens=500),
        starts=path if name == "bert" else None,
    )
    longest = max(len(text.split()) for chain in texts_of(generated) for text in chain)
    assert 20 < longest <= 64


@both
def test_generated_texts_can_be_read_like_any_other(name, starts):
    sampling = Sampling(unit="paragraph", per_document=None, held_out=0.5, seed=2)
    path = generate(name, starts)
    fit, held_out = (
        {e.document for e in iter_examples(model(name), path, sampling, side=side)}
        for side in ("fit", "held-out")
    )
    assert fit
    assert held_out
    assert not fit & held_out  # whole chains are on one side


def test_what_follows_the_end_of_a_text_is_not_part_of_it(monkeypatch):
    import torch

    transformer = model("llama")
    bare = tokenizer()
    bare.pad_token = None
    bare_model = Transformer(**{**{n: getattr(transformer, n) for n in NAMES}, "tokenizer": bare})
    end, cat, dog = bare.eos_token_id, *bare("cat dog")["input_ids"]
    ids = torch.tensor([[1, cat, dog, end, 0, 0], [1, dog, end, cat, cat, cat], [1] + [cat] * 5])
    monkeypatch.setattr(transformer.model, "generate", lambda *_, **__: ids)
    chains = texts_of(generated_texts(bare_model, TextGeneration(n_texts=3)))
    assert chains == [["cat dog"], ["dog"], ["cat cat cat cat cat"]]


def test_a_tokenizer_without_padding_pads_with_the_end_and_not_with_a_word(monkeypatch):
    transformer = model("llama")
    bare = tokenizer()
    bare.pad_token = None
    bare_model = Transformer(**{**{n: getattr(transformer, n) for n in NAMES}, "tokenizer": bare})
    plain = texts_of(generated_texts(transformer, SMALL))
    assert texts_of(generated_texts(bare_model, SMALL)) == plain
    assert any(len(text.split()) < 8 for chain in plain for text in chain)  # some end early


def test_the_checkpoints_generation_config_has_no_influence(monkeypatch, tmp_path):
    from transformers import GenerationConfig

    transformer = model("llama")
    plain = generate("llama", tmp_path).read_bytes()
    narrow = GenerationConfig(
        repetition_penalty=5.0,
        top_k=2,
        temperature=0.1,
        do_sample=True,
        min_new_tokens=9,
        bad_words_ids=[[9]],
        no_repeat_ngram_size=1,
        eos_token_id=[2, 7],
    )
    monkeypatch.setattr(transformer.model, "generation_config", narrow)
    monkeypatch.setenv("LAYERLEAP_CACHE", str(tmp_path / "another"))
    assert generate("llama", tmp_path).read_bytes() == plain
    assert transformer.model.generation_config is narrow


def test_a_masked_model_that_cannot_read_reactions_needs_real_sequences():
    with pytest.raises(BadText, match=r"needs real sequences to start from.*--starts"):
        generated_texts(model("bert"), SMALL)


def test_models_that_cannot_generate_are_refused():
    with pytest.raises(BadText, match="no tokenizer"):
        generated_texts(Transformer.wrap(build("gpt2")), SMALL)
    for name in ("vit", "t5"):
        with pytest.raises(BadSettings, match="cannot generate texts: expected a causal or masked"):
            generated_texts(Transformer.wrap(build(name), tokenizer()), SMALL)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"n_texts": 0}, "n_texts"),
        ({"share": 0.0}, "share"),
        ({"share": 1.5}, "share"),
        ({"rounds": 0}, "rounds"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_settings_out_of_range_are_refused(change, name):
    with pytest.raises(BadSettings, match=name):
        TextGeneration(**change)


@pytest.mark.real
def test_reactions_are_generated_by_the_bundled_reaction_model(monkeypatch, tmp_path):
    monkeypatch.delenv("LAYERLEAP_CACHE")  # the model comes from the cache, the texts go elsewhere
    transformer = load("rxnmapper")
    monkeypatch.setenv("LAYERLEAP_CACHE", str(tmp_path / "cache"))
    path = generated_texts(transformer, TextGeneration(n_texts=60, max_tokens=64, rounds=2))
    chains = texts_of(path)
    assert sum(map(len, chains)) >= 60
    assert sum(">>" in text for chain in chains for text in chain) > 40
