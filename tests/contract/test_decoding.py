"""Exact decoding writes what `generate` writes, token for token, in every family."""

import copy

import pytest
import torch
from transformers import DynamicCache

from contract_bank import bank_of
from edit_cases import OWN_ATTENTION
from families import NEXT_TOKEN, build
from layerleap.act.decode.decoder import decoder
from layerleap.act.decode.pass_cost import PassCost
from layerleap.act.exits.rules import Never
from layerleap.models.transformer import Transformer

SINGLE = (
    "gpt_oss",
    "mixtral",
    "qwen2_moe",
    "mpt",
)  # parts of these compute in float32 whatever the dtype
CHEAP = PassCost((1, 2, 4, 8, 16), (1.0, 1.01, 1.02, 1.04, 1.08))  # so that trees are large
PROMPT = [5, 9, 7, 5, 9, 7, 8, 5, 9]
WAYS = {
    "tree": {"cost": CHEAP},
    "lookup": {"cost": CHEAP, "drafts": ("lookup",)},
    "early": {"drafts": ("early",), "draft_layer": 1},
    "never": {"rule": Never()},
}


@pytest.fixture(scope="module", params=NEXT_TOKEN)
def ready(request):
    model = build(request.param)
    model = model if request.param in SINGLE else model.double()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.config.use_cache = True
    model.generation_config.use_cache = True
    transformer = Transformer.wrap(model)
    bank = bank_of(transformer)
    ways = {
        name: decoder(bank, transformer=transformer, **options) for name, options in WAYS.items()
    }
    return model, ways


def both(ready, way, ids=None, **options):
    model, ways = ready
    ids = torch.tensor([PROMPT]) if ids is None else ids
    options = {"max_new_tokens": 24, "do_sample": False, **options}
    found = []
    for custom in (None, ways[way]):
        torch.manual_seed(3)
        found.append(model.generate(ids, custom_generate=custom, **options))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_greedy_text_is_that_of_generate(ready, way):
    theirs, ours = both(ready, way)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3},
        {"do_sample": True, "temperature": 0.7, "top_k": 20},
        {"min_new_tokens": 5, "bad_words_ids": [[9], [7]]},
    ],
    ids=["penalties", "sampling", "bans"],
)
def test_processors_and_seeds_are_honoured(ready, options):
    theirs, ours = both(ready, "tree", **options)
    assert torch.equal(ours, theirs)


def test_the_end_in_the_middle_of_a_right_guess_ends_the_text(ready):
    theirs, _ = both(ready, "tree")
    guessed = ready[1]["tree"].stats[0].drafted
    new = theirs[0, len(PROMPT) :].tolist()
    ends = [n for n, was in enumerate(guessed) if was and new.index(new[n]) == n]
    eos = new[ends[0]] if ends else new[10]
    theirs, ours = both(ready, "tree", eos_token_id=eos)
    assert torch.equal(ours, theirs)
    assert int(ours[0, -1]) == eos


def test_in_float32_too_the_text_is_that_of_generate(ready):
    model, _ = ready
    single = copy.deepcopy(model).float()
    transformer = Transformer.wrap(single)
    custom = decoder(bank_of(transformer), transformer=transformer, cost=CHEAP)
    options = {"max_new_tokens": 24, "do_sample": False}
    theirs = single.generate(torch.tensor([PROMPT]), **options)
    ours = single.generate(torch.tensor([PROMPT]), custom_generate=custom, **options)
    assert torch.equal(ours, theirs)
    assert custom.stats[0].exactness == "exact"


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma2", "phi3", "olmo2", "bloom"])
def test_in_bfloat16_a_text_called_exact_is_that_of_generate(name):
    """Bits are kept where they can be; a family where they cannot says so."""
    model = build(name).bfloat16()
    model.generation_config.eos_token_id = None
    model.config.use_cache = model.generation_config.use_cache = True
    transformer = Transformer.wrap(model)
    custom = decoder(bank_of(transformer), transformer=transformer, cost=CHEAP)
    options = {"max_new_tokens": 40, "do_sample": False}
    theirs = model.generate(torch.tensor([PROMPT]), **options)
    ours = model.generate(torch.tensor([PROMPT]), custom_generate=custom, **options)
    stats = custom.stats[0]
    assert stats.drafts > 0
    assert stats.exactness == ("rounded" if name in OWN_ATTENTION else "exact")
    assert torch.equal(ours, theirs) or stats.exactness == "rounded"


@pytest.mark.parametrize("tokens", [1, 7])
def test_the_length_is_kept_to_the_token(ready, tokens):
    theirs, ours = both(ready, "tree", max_new_tokens=tokens)
    assert torch.equal(ours, theirs)
    assert ours.shape[1] == len(PROMPT) + tokens


def test_texts_padded_on_the_left_are_each_as_alone(ready):
    # Not held against the library's own batch: in float64, some families give NaN for padding.
    ids = torch.tensor([PROMPT, [0, 0, 0, 0, 11, 12, 13, 11, 12]])
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    model, ways = ready
    options = {"max_new_tokens": 24, "do_sample": False}
    ours = model.generate(ids, attention_mask=mask, custom_generate=ways["tree"], **options)
    for row, skip in enumerate((0, 4)):
        alone = model.generate(ids[row : row + 1, skip:], **options)
        assert torch.equal(ours[row, skip:], alone[0])


def test_a_cache_from_an_earlier_call_is_gone_on_with(ready):
    model, ways = ready
    texts = []
    for custom in (None, ways["tree"]):
        cache = DynamicCache()  # without a window: one that has dropped keys is refused
        first = model.generate(
            torch.tensor([PROMPT]),
            past_key_values=cache,
            max_new_tokens=6,
            do_sample=False,
            custom_generate=custom,
        )
        held = cache.get_seq_length()
        longer = torch.cat([first, torch.tensor([[21, 22]])], 1)
        texts.append(
            model.generate(
                longer,
                past_key_values=cache,
                max_new_tokens=8,
                do_sample=False,
                attention_mask=torch.ones_like(longer),
                custom_generate=custom,
            )
        )
        assert held == first.shape[1] - 1
        assert cache.get_seq_length() == texts[-1].shape[1] - 1
    assert torch.equal(*texts)
