"""Several texts in one pass: each ends where it would have ended alone."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from contract_bank import bank_of
from decoders import wrapped
from families import build
from layerleap.act.decode import speculative as share_file
from layerleap.act.decode.decoder import decoder
from layerleap.act.decode.draft_tree import Drafter, SharedPass
from layerleap.act.decode.pass_cost import PassCost
from layerleap.act.decode.request import depends_on_place
from layerleap.act.decode.speculative import KEYS, groups
from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.cursor.batch import BatchCursor
from layerleap.models.cursor.cursor import Cursor
from layerleap.models.cursor.tree import Tree
from layerleap.models.cursor.verify import find_axes
from layerleap.models.hooks.forward import Tap, tapped

CHEAP = PassCost((1, 2, 4, 8, 16), (1.0, 1.01, 1.02, 1.04, 1.08))
TEXTS = {0: [5, 9, 7, 11, 23, 6, 40], 1: [8, 31], 4: [12, 17, 50, 3, 3]}


@pytest.fixture(scope="module")
def llama():
    return wrapped()


def last(transformer, ids):
    keep = torch.ones(1, len(ids), dtype=torch.bool)
    n = transformer.n_layers
    return transformer.capture({"input_ids": torch.tensor([ids])}, keep=keep, layers=[n]).states[n]


def begun(transformer):
    """A cursor that holds all of TEXTS."""
    axes = find_axes(transformer)
    both = BatchCursor(transformer, axes)
    for text, ids in TEXTS.items():
        with Cursor(transformer, axes) as cursor:
            cursor.run(ids)
        both.join(text, cursor)
    return both


@pytest.mark.parametrize("name", ["llama", "mistral", "bloom", "gpt2"])
def test_trees_of_several_texts_end_where_each_path_alone_ends(name):
    transformer = wrapped(name)
    fork = Tree((20, 21, 22, 23), (-1, 0, 0, 2))  # 20 21, and 20 22 23
    with begun(transformer) as cursor:
        h = cursor.run_all({0: fork, 4: Tree.chain([30, 31])})
    for found, text, new in (
        (h[0][:2], 0, [20, 21]),
        (h[0][2:], 0, [20, 22, 23]),
        (h[4], 4, [30, 31]),
    ):
        alone = last(transformer, [*TEXTS[text], *new])[-2:]
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)  # biases are float32


def test_what_is_kept_of_a_pass_is_what_later_ones_see(llama):
    fork = Tree((20, 21, 22, 23), (-1, 0, 0, 2))
    with begun(llama) as cursor:
        cursor.run_all({0: fork, 1: Tree.chain([30, 31]), 4: Tree.chain([33])})
        cursor.keep_all({0: [0, 2, 3], 1: [0]})  # of the last text nothing
        assert cursor.lengths() == {0: 10, 1: 3, 4: 5}
        h = cursor.run_all({text: Tree.chain([35]) for text in TEXTS})
    for text, new in ((0, [20, 22, 23]), (1, [30]), (4, [])):
        torch.testing.assert_close(h[text], last(llama, [*TEXTS[text], *new, 35])[-1:])


def test_one_token_of_one_text_does_not_see_the_others(llama):
    with begun(llama) as cursor:
        h = cursor.run_all({1: Tree.chain([30])})
        cursor.keep_all({1: [0]})
        again = cursor.run_all({1: Tree.chain([31])})
    torch.testing.assert_close(h[1], last(llama, [*TEXTS[1], 30])[-1:])
    torch.testing.assert_close(again[1], last(llama, [*TEXTS[1], 30, 31])[-1:])


def test_a_text_that_left_is_no_longer_visible_and_the_last_one_continues_alone(llama):
    with begun(llama) as cursor:
        cursor.leave(1)
        h = cursor.run_all({0: Tree.chain([35]), 4: Tree.chain([36])})
        torch.testing.assert_close(h[4], last(llama, [*TEXTS[4], 36])[-1:])
        cursor.keep_all({0: [0], 4: [0]})
        cursor.leave(4)
        assert (cursor.ids, cursor.length) == ([*TEXTS[0], 35], 8)
        h = cursor.run_all({0: Tree.chain([37])})
        assert cursor.length == 9  # one token, and nothing beside it
    torch.testing.assert_close(h[0], last(llama, [*TEXTS[0], 35, 37])[-1:])


def test_texts_join_once_and_passes_are_settled_before_the_next(llama):
    with begun(llama) as cursor:
        with pytest.raises(BadSettings, match="not joined"):
            cursor.run_all({2: Tree.chain([1])})
        with pytest.raises(BadSettings, match="joined already"):
            cursor.join(0, Cursor(llama, find_axes(llama)))
        cursor.run_all({0: Tree.chain([1, 2])})
        with pytest.raises(BadSettings, match="which tokens"):
            cursor.run_all({0: Tree.chain([3])})


def test_masks_that_do_not_depend_on_distance_alone_are_refused(llama):
    with begun(llama) as cursor:
        arrangement = cursor._arrangement
        cursor._arrangement = lambda tree: partial(chunked, arrangement(tree))
        with pytest.raises(ModelRefused, match="distance"):
            cursor.run_all({0: Tree.chain([1]), 1: Tree.chain([2])})


def chunked(arrange, value, query, key):
    """As if the first twelve keys were masked for every query."""
    if query is not None and key is not None:
        value = value.clone()
        value.narrow(key, 0, 12).fill_(False)
    return arrange(value, query, key)


def test_models_that_look_in_chunks_are_decoded_one_by_one():
    config = build("llama").config
    assert not depends_on_place(config)
    config.attention_chunk_size = 24
    assert depends_on_place(config)


def test_texts_go_together_as_long_as_there_is_room():
    choices = [SimpleNamespace(skip=0) for _ in range(11)]
    assert [len(group) for group in groups(choices, 100)] == [8, 3]
    assert [len(group) for group in groups(choices, 100, most=4)] == [4, 4, 3]
    assert [len(group) for group in groups(choices, KEYS // 2)] == [2, 2, 2, 2, 2, 1]
    assert [len(group) for group in groups(choices[:2], 3 * KEYS)] == [1, 1]
    choices[1].skip = KEYS  # padding takes no room
    assert [len(group) for group in groups(choices[:2], KEYS)] == [2]


def batch(n):
    ids = torch.randint(3, 50, (n, 9), generator=torch.Generator().manual_seed(n))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return ids * mask, mask


def test_a_batch_takes_fewer_passes_than_its_texts_and_more_texts_than_go_at_once(
    llama, monkeypatch
):
    monkeypatch.setattr(share_file, "TEXTS", 2)
    calls = []
    model = llama.model
    ids, mask = batch(3)
    options = {"max_new_tokens": 12, "do_sample": False}
    custom = decoder(transformer=llama, cost=CHEAP)  # a table of drafts would ask the model too
    model.generate(ids[:1], custom_generate=custom, **options)  # what is set up first
    with tapped(model, {model: Tap(see_input=lambda *_: calls.append(1))}):
        ours = model.generate(ids, attention_mask=mask, custom_generate=custom, **options)
    passes = [stats.passes for stats in custom.stats]
    assert len(calls) == 3 + max(passes[:2]) + passes[2]
    assert all(stats.exactness == "exact" for stats in custom.stats)
    assert [stats.texts_per_pass for stats in custom.stats] == [2, 2, 1]
    assert "shared by 2 texts" in str(custom.stats[0])
    for row, skip in ((0, 0), (1, 4), (2, 0)):
        alone = model.generate(ids[row : row + 1, skip:], **options)
        assert torch.equal(ours[row, skip:], alone[0])


def test_a_text_that_ends_early_is_padded_and_the_others_go_on(llama):
    model = llama.model
    ids, mask = batch(3)
    custom = decoder(bank_of(llama), transformer=llama, cost=CHEAP)
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    whole = model.generate(ids, custom_generate=custom, **options)
    eos = int(whole[1, 9 + 3])
    theirs = model.generate(ids, eos_token_id=eos, **options)
    ours = model.generate(ids, eos_token_id=eos, custom_generate=custom, **options)
    assert torch.equal(ours, theirs)
    assert (ours[1, 9 + 4 :] == 0).all()


def test_processors_get_one_text_at_a_time(llama):
    ids, mask = batch(4)
    custom = decoder(bank_of(llama), transformer=llama, cost=CHEAP)
    options = {
        "max_new_tokens": 12,
        "do_sample": False,
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 2,
        "attention_mask": mask,
    }
    theirs = llama.model.generate(ids, **options)
    ours = llama.model.generate(ids, custom_generate=custom, **options)
    assert torch.equal(ours, theirs)


def test_after_an_interruption_the_model_is_as_before(llama):
    class Stop(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] > 12:
                raise KeyboardInterrupt
            return torch.zeros(len(input_ids), dtype=torch.bool)

    ids, mask = batch(3)
    custom = decoder(bank_of(llama), transformer=llama, cost=CHEAP)
    before = llama.model(ids).logits
    with pytest.raises(KeyboardInterrupt):
        llama.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=12,
            do_sample=False,
            custom_generate=custom,
            stopping_criteria=StoppingCriteriaList([Stop()]),
        )
    assert torch.equal(llama.model(ids).logits, before)
    assert not any("forward" in module.__dict__ for module in llama.model.modules())


def test_a_pass_that_is_full_already_gets_fewer_guesses():
    # Eight tokens cost what one does; from there on each is dear.
    cost = PassCost((1, 8, 9), (1.0, 1.001, 3.0))
    drafter = Drafter(cost)
    drafter.begin([1, 2, 3, 4, 5, 6, 7, 1, 2])
    alone = drafter.draw(2, room=20)
    beside = drafter.draw(2, room=20, shared=SharedPass(7, 7.0))
    assert len(alone.tree) > 3
    assert len(beside.tree) == 1


def test_passes_that_take_longer_than_thought_get_fewer_guesses():
    cost = PassCost((1, 32), (1.0, 1.1))
    drafter = Drafter(cost)
    first, other = drafter.for_batch(), drafter.for_batch()
    for one in (drafter, first, other):
        one.begin([1, 2, 3, 4, 5, 6, 7, 1, 2])
    before = first.draw(2, room=20)
    assert len(before.tree) > 3
    for _ in range(20):
        first.record_time(len(before.tree), 8.0)
        first.record_time(2, 1.0)
    assert len(other.draw(2, room=20).tree) < 3  # all drafters of the batch know
    assert drafter.draw(2, room=20).tree == before.tree  # passes of one text are another matter


def test_drafters_of_a_batch_share_what_they_learn_but_not_their_text():
    drafter = Drafter(CHEAP)
    drafter.begin([1, 2, 3, 1, 2])
    other = drafter.for_batch()
    other.begin([7, 8])
    assert drafter.lookup.ids != other.lookup.ids
    drawn = drafter.draw(2, room=3)
    drafter.learn(drawn, [0], [9] * len(drawn.tree), [9])
    assert drafter.lookup.ids[-1] == 9
    assert other.chances is drafter.chances
    other.add(2)
    assert 9 in other.draw(2, room=3).tree.ids  # what the model said after 2 elsewhere


def test_a_pass_never_holds_more_than_it_may(llama):
    sizes = []
    see = Tap(see_input=lambda args, kwargs: sizes.append(kwargs["input_ids"].numel()))
    ids, mask = batch(3)
    custom = decoder(transformer=llama, cost=CHEAP, max_nodes=5)
    options = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False}
    with tapped(llama.model, {llama.model: see}):
        llama.model.generate(ids, custom_generate=custom, **options)
    passes = max(stats.passes for stats in custom.stats)
    assert 3 < max(sizes[-passes:]) <= 5


def test_sampled_texts_of_a_batch_are_drawn_as_those_of_generate(llama):
    """Both halves of the likeliest continuations come as often as in the library's batch."""
    ids = torch.tensor([[5, 9, 7], [11, 12, 13]]).repeat(80, 1)
    custom = decoder(bank_of(llama), transformer=llama, cost=CHEAP)
    options = {"max_new_tokens": 2, "do_sample": True, "top_k": 4, "temperature": 2.0}
    torch.manual_seed(0)
    ours = llama.model.generate(ids, custom_generate=custom, **options)[:, 3:]
    probabilities = top(llama, ids[0].tolist(), 4)
    first = ours[::2, 0]
    counts = [int((first == token).sum()) for token in probabilities]
    assert sum(counts) == 80
    for count, p in zip(counts, probabilities.values(), strict=True):
        assert abs(count - 80 * p) < 4 * (80 * p * (1 - p)) ** 0.5 + 1
    # The second token follows from the first, which is no matter of chance alone.
    likeliest = max(probabilities, key=probabilities.get)
    after = top(llama, [*ids[0].tolist(), likeliest], 4)
    seconds = ours[::2, 1][first == likeliest]
    assert set(seconds.tolist()) <= set(after)
    for token, p in after.items():
        n = len(seconds)
        assert abs(int((seconds == token).sum()) - n * p) < 4 * (n * p * (1 - p)) ** 0.5 + 1


def top(transformer, ids, k):
    """The k likeliest next tokens and their chances at temperature 2."""
    best = (transformer.model(torch.tensor([ids])).logits[0, -1].float() / 2).topk(k)
    return dict(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))
