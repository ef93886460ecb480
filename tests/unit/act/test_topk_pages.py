"""Page selection: bounds that hold, and summaries that stay right whatever happens to a cache."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

import layerleap as ll
from families import build
from layerleap.act.edits import Pages, TopKAttention
from layerleap.act.topk.pages import PagedKeys, _bounds
from layerleap.errors import BadSettings
from layerleap.models.transformer import Transformer

SMALL = Pages(size=2, keep=2)


@pytest.fixture(scope="module")
def llama():
    model = build("llama").double()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return Transformer.wrap(model, check=False)


def drawn(n_keys=23, n_queries=1):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 6, n_queries, 4), (2, 3, n_keys, 4), (2, 3, n_keys, 5)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def test_no_key_of_a_page_has_a_higher_product_than_the_bound():
    query, key, _ = drawn(24)
    paged = PagedKeys(Pages(size=4, keep=1))
    summary = paged._summary(key, 6)
    rows = query.squeeze(2).unflatten(1, (3, 2))
    products = (rows @ key.mT).unflatten(-1, (6, 4)).amax(-1)
    bounds = _bounds(query, summary)
    assert (bounds >= products - 1e-6).all()
    single = PagedKeys(Pages(size=1, keep=1))._summary(key, 24)
    # A page of one key has no slack at all.
    torch.testing.assert_close(_bounds(query, single), rows @ key.mT)


def test_a_float_mask_of_hidden_keys_is_as_good_as_a_boolean_one():
    query, key, value = drawn(24)
    visible = torch.rand(2, 1, 1, 24, generator=torch.Generator().manual_seed(1)) < 0.8
    floats = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    ours = PagedKeys(SMALL).narrow(query, key, value, floats)
    theirs = PagedKeys(SMALL).narrow(query, key, value, visible)
    assert ours[0].shape[2] < 24
    assert all(torch.equal(own, other) for own, other in zip(ours, theirs, strict=True))
    with pytest.raises(BadSettings, match="adds biases to scores"):
        PagedKeys(SMALL).narrow(query, key, value, floats - 0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_pages_far_below_the_best_one_are_still_ordered(dtype):
    """Their share of attention is 0 in this precision; their bounds differ all the same."""
    key = torch.zeros(1, 1, 8, 4, dtype=dtype)
    key[0, 0, :, 0] = torch.tensor([5, 40, -90, -60, -70, 400, -80, -50])
    query = torch.tensor([1.0, 0, 0, 0], dtype=dtype).view(1, 1, 1, 4)
    kept = PagedKeys(Pages(size=1, keep=3)).narrow(query, key, key, None, scaling=1.0)[0]
    assert sorted(kept[0, 0, :, 0].tolist()) == [5, 40, 400]
    hidden = torch.ones(1, 1, 1, 8, dtype=torch.bool)
    hidden[..., [0, 1]] = False
    kept = PagedKeys(Pages(size=1, keep=3)).narrow(query, key, key, hidden, scaling=1.0)[0]
    assert sorted(kept[0, 0, :, 0].tolist()) == [-60, -50, 400]


def test_the_best_pages_and_the_keys_after_the_last_page_are_kept():
    query, key, value = drawn(23)
    query[:] = 0
    query[..., 0] = 1  # so that the bound is the highest first coordinate of a page
    paged = PagedKeys(Pages(size=4, keep=2))
    keys, values, mask = paged.narrow(query, key, value, None)
    assert keys.shape == (2, 3, 11, 4)
    assert mask is None
    for text in range(2):
        for head in range(3):
            pages = key[text, head, :20].unflatten(0, (5, 4))
            best = set(pages[..., 0].amax(-1).topk(2).indices.tolist())
            wanted = {tuple(row.tolist()) for page in best for row in pages[page]}
            wanted |= {tuple(row.tolist()) for row in key[text, head, 20:]}
            assert {tuple(row.tolist()) for row in keys[text, head]} == wanted
            order = [key[text, head].tolist().index(row.tolist()) for row in keys[text, head]]
            assert torch.equal(values[text, head], value[text, head, order])


def test_hidden_keys_stay_hidden_and_hidden_pages_are_not_chosen():
    query, key, value = drawn(23)
    mask = torch.ones(2, 1, 1, 23, dtype=torch.bool)
    mask[1, ..., :13] = False
    keys, _, narrow = PagedKeys(Pages(size=4, keep=2)).narrow(query, key, value, mask)
    assert narrow.shape == (2, 6, 1, 11)
    for text, seen in ((0, 11), (1, None)):
        for head in range(3):
            for column, row in enumerate(keys[text, head]):
                number = key[text, head].tolist().index(row.tolist())
                assert (
                    narrow[text, head * 2 : head * 2 + 2, 0, column] == mask[text, 0, 0, number]
                ).all()
        assert seen is None or narrow[text].sum() == 6 * seen


def test_passes_over_several_queries_and_few_keys_are_left_alone():
    for query, key, value in (drawn(23, n_queries=2), drawn(9)):
        paged = PagedKeys(Pages(size=4, keep=2))
        keys, values, _ = paged.narrow(query, key, value, None)
        assert keys is key
        assert values is value
        assert paged.n_summarised == 0


def steps(transformer, ids, cache, edit):
    """Logits of tokens that are given one by one."""
    with torch.no_grad(), transformer.edit(edit):
        return torch.cat(
            [
                transformer.model(ids[:, n : n + 1], past_key_values=cache).logits
                for n in range(ids.shape[1])
            ]
        )


def recomputed(transformer, ids, cache, edit):
    """The same, with summaries made anew for every token."""
    rows = [steps(transformer, ids[:, n : n + 1], cache, edit) for n in range(ids.shape[1])]
    return torch.cat(rows)


def prefilled(transformer, n=17, rows=1):
    ids = torch.randint(3, 60, (rows, n), generator=torch.Generator().manual_seed(n))
    cache = DynamicCache()
    with torch.no_grad():
        transformer.model(ids, past_key_values=cache)
    return cache


def test_a_growing_cache_is_summarised_once(llama, monkeypatch):
    made = []
    monkeypatch.setattr(
        "layerleap.act.edits.topk.PagedKeys",
        lambda pages: made.append(PagedKeys(pages)) or made[-1],
    )
    ids = torch.tensor([[5, 9, 7, 3, 8, 6, 4, 5]])
    edit, cache = TopKAttention(k=3, pages=SMALL), prefilled(llama)
    ours = steps(llama, ids, copy.deepcopy(cache), edit)
    assert [one.n_summarised for one in made] == [24, 24, 24]  # 17 + 8 keys, in whole pages
    made.clear()
    theirs = recomputed(llama, ids, copy.deepcopy(cache), edit)
    assert sum(one.n_summarised for one in made) > 3 * 100
    assert torch.equal(ours, theirs)
    exact = steps(llama, ids, copy.deepcopy(cache), TopKAttention(k=3))
    assert not torch.allclose(ours, exact, atol=1e-4)
    every = steps(llama, ids, copy.deepcopy(cache), TopKAttention(k=3, pages=Pages(2, 50)))
    torch.testing.assert_close(every, exact)


def changed(kind, cache):
    """What can happen to a cache between two passes."""
    if kind == "cropped":
        cache.crop(-6)
    elif kind == "reordered":
        cache.batch_select_indices(torch.tensor([1, 0]))
    elif kind == "written":
        for layer in cache.layers:
            layer.keys[:, :, :8] += 3
    elif kind == "replaced":
        for layer in cache.layers:
            layer.keys = layer.keys.flip(2)
    return cache


@pytest.mark.parametrize("kind", ["cropped", "reordered", "written", "replaced"])
def test_summaries_are_made_again_when_a_cache_has_changed(llama, kind):
    ids = torch.tensor([[5, 9, 7, 3], [6, 4, 5, 9]])
    edit, cache = TopKAttention(k=3, pages=SMALL), prefilled(llama, rows=2)
    texts = []
    for run in (steps, recomputed):
        own, rows = copy.deepcopy(cache), []
        with torch.no_grad(), llama.edit(edit):
            for n in range(4):
                rows.append(llama.model(ids[:, n : n + 1], past_key_values=own).logits)
            changed(kind, own)
            if run is steps:
                for n in range(4):
                    rows.append(llama.model(ids[:, n : n + 1], past_key_values=own).logits)
        if run is recomputed:
            rows.append(recomputed(llama, ids, own, edit))
        texts.append(torch.cat(rows))
    assert torch.equal(*texts)


def test_two_caches_in_turn_do_not_share_summaries(llama):
    edit, ids = TopKAttention(k=3, pages=SMALL), torch.tensor([[5, 9, 7, 3]])
    first, second = prefilled(llama, 17), prefilled(llama, 19)
    alone = [steps(llama, ids, copy.deepcopy(one), edit) for one in (first, second)]
    rows = [[], []]
    with torch.no_grad(), llama.edit(edit):
        for n in range(4):
            for number, cache in enumerate((first, second)):
                rows[number].append(llama.model(ids[:, n : n + 1], past_key_values=cache).logits)
    for number in range(2):
        assert torch.equal(torch.cat(rows[number]), alone[number])


def test_static_caches_and_inference_mode_are_summarised_at_every_step(llama):
    ids, edit = torch.tensor([[5, 9, 7, 3, 8]]), TopKAttention(k=3, pages=SMALL)
    cache = prefilled(llama)
    plain = steps(llama, ids, copy.deepcopy(cache), edit)
    with torch.inference_mode():
        inside = steps(llama, ids, copy.deepcopy(cache), edit)
    assert torch.equal(plain, inside)
    text = torch.randint(3, 60, (1, 17), generator=torch.Generator().manual_seed(17))
    static = StaticCache(config=llama.model.config, max_cache_len=40)
    with torch.no_grad():
        llama.model(text, past_key_values=static)
    with torch.no_grad(), llama.edit(TopKAttention(k=64, pages=Pages(2, 50))):
        ours = llama.model(ids[:, :1], past_key_values=static).logits
        exact = llama.model(ids[:, :1], past_key_values=copy.deepcopy(cache)).logits
    torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}])
def test_text_is_generated_with_pages(llama, options):
    ids = torch.randint(3, 60, (1, 20), generator=torch.Generator().manual_seed(1))
    with llama.edit(TopKAttention(k=64, pages=Pages(2, 50))):  # all pages: exact
        ours = llama.model.generate(ids, max_new_tokens=10, do_sample=False, **options)
    assert torch.equal(
        ours, llama.model.generate(ids, max_new_tokens=10, do_sample=False, **options)
    )


def test_pages_that_hold_fewer_keys_than_k_are_refused():
    with pytest.raises(BadSettings, match="2 pages of 2 keys hold fewer than k, 5; keep more"):
        TopKAttention(k={1: 3, 2: [5, 1]}, pages=SMALL)


def test_padded_batches_give_no_weight_to_padding():
    """With one key per page bounds are exact, so that page selection is top-k itself.

    Each head of keys serves one query head: heads that share keys also share the pages.
    """
    model = build("llama", num_key_value_heads=4).double()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    transformer = Transformer.wrap(model, check=False)
    ids = torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    for k in (1, 3):
        with transformer.edit(TopKAttention(k=k)):
            exact = model.generate(ids, **options)
        with transformer.edit(TopKAttention(k=k, pages=Pages(1, 4))):
            assert torch.equal(model.generate(ids, **options), exact)


def test_the_decoders_of_this_package_are_refused_with_the_reason(llama):
    from contract_bank import bank_of

    custom = ll.decoder(bank_of(llama), transformer=llama)
    with (
        llama.edit(TopKAttention(k=4, pages=SMALL)),
        pytest.raises(BadSettings, match="page selection is for passes over one token"),
    ):
        llama.model.generate(torch.tensor([[5, 9, 7]]), custom_generate=custom, max_new_tokens=4)


def test_bad_pages_are_refused():
    for options, message in (
        ({"size": 0}, "size of pages is 0; expected at least 1"),
        ({"keep": 0}, "keep of pages is 0; expected at least 1"),
        ({"size": 1.5}, "size is 1.5; expected a whole number"),
    ):
        with pytest.raises(BadSettings, match=message):
            Pages(**options)
    with pytest.raises(BadSettings, match="pages is 32; expected"):
        TopKAttention(pages=32)
