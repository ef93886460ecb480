"""The function: values and gradients against the dense definition, memory, precision."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from dense_topk import causal, dense_topk
from layerleap.act.topk import blocks, products
from layerleap.act.topk.attention import topk_attend
from layerleap.act.topk.masks import Visible, visible_from
from layerleap.errors import BadSettings

KS = [1, 3, (1, 2, 9, 4), 20]
CHUNKS = [1, 3, 100]


@pytest.fixture(params=["gathered", "dense"])
def way(request, monkeypatch):
    """Both ways to compute products, with several parts and blocks, whatever the sizes."""
    monkeypatch.setattr(products, "SPARSE", 1 if request.param == "gathered" else 10**6)
    monkeypatch.setattr(products, "GATHERED", 50)
    monkeypatch.setattr(blocks, "SCORES", 1 if request.param == "gathered" else 2**24)


def drawn(*shapes, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def qkv(n_queries=7, n_keys=9, n_texts=2, n_heads=4, n_key_heads=2, width=5, values=3, **options):
    return drawn(
        (n_texts, n_heads, n_queries, width),
        (n_texts, n_key_heads, n_keys, width),
        (n_texts, n_key_heads, n_keys, values),
        **options,
    )


def assert_same_gradients(ours, theirs, tensors, tolerance=1e-12):
    draw = torch.randn(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(9))
    grads = [torch.autograd.grad((one * draw).sum(), tensors) for one in (ours, theirs)]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
    for own, other in zip(*grads, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("k", KS, ids=str)
def test_values_and_gradients_are_those_of_the_definition(way, k, chunk):
    for options in ({}, {"softcap": 1.5}, {"scaling": 0.3, "recompute": True}):
        tensors = qkv()
        ours = topk_attend(*tensors, Visible(is_causal=True), k, chunk=chunk, **options)
        options.pop("recompute", None)
        theirs = dense_topk(*tensors, k, mask=causal(7, 9), **options)
        assert_same_gradients(ours, theirs, tensors)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("k", [2, 20])
def test_sinks_and_biases_get_their_gradients(way, k, chunk):
    for shape in ((1, 4, 7, 9), (2, 1, 1, 9), (2, 4, 7, 9)):
        tensors, (sinks, bias) = qkv(), drawn((4,), shape, seed=1)
        ours = topk_attend(
            *tensors,
            visible_from({"bias": bias}, *tensors[:2], is_causal=True),
            k,
            chunk=chunk,
            sinks=sinks,
            softcap=2.0,
        )
        theirs = dense_topk(*tensors, k, mask=causal(7, 9), bias=bias, sinks=sinks, softcap=2.0)
        assert_same_gradients(ours, theirs, [*tensors, sinks, bias])


@pytest.mark.parametrize("k", [1, 3, 20])
def test_gradients_and_their_gradients_hold_against_finite_differences(way, k):
    tensors = qkv(4, 5, n_texts=1, n_heads=2, n_key_heads=1, width=3, values=2)
    sinks, bias = drawn((2,), (1, 2, 4, 5), seed=1)

    def run(query, key, value, sinks, bias):
        visible = Visible(True, None, (bias,))
        return topk_attend(query, key, value, visible, k, chunk=3, softcap=3.0, sinks=sinks)

    assert gradcheck(run, (*tensors, sinks, bias))
    assert gradgradcheck(run, (*tensors, sinks, bias))


@pytest.mark.parametrize("kind", ["boolean", "float", "infinite"])
@pytest.mark.parametrize("k", [2, 20])
def test_masks_hide_keys_and_rows_that_see_nothing_give_zero(way, kind, k):
    tensors = qkv()
    mask = causal(7, 9) & torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[1, ..., :4] = False  # padding on the left: the first two queries see nothing
    assert (~mask.any(-1)).sum() == 2
    lowest = -torch.inf if kind == "infinite" else torch.finfo(torch.float64).min
    given = (
        mask if kind == "boolean" else torch.zeros(mask.shape).double().masked_fill(~mask, lowest)
    )
    visible = visible_from({"mask": given}, *tensors[:2], is_causal=False)
    ours = topk_attend(*tensors, visible, k, chunk=3)
    assert_same_gradients(ours, dense_topk(*tensors, k, mask=mask), tensors)
    assert torch.equal(ours[1, :2], torch.zeros(2, 4, 3, dtype=torch.float64))
    assert ours.isfinite().all()


def test_a_window_in_the_mask_is_respected():
    tensors = qkv(n_keys=7)
    mask = causal(7, 7) & ~causal(7, 7).tril(-3)
    ours = topk_attend(*tensors, Visible(mask=mask), 2, chunk=2)
    assert_same_gradients(ours, dense_topk(*tensors, 2, mask=mask), tensors)


def test_of_equal_scores_the_first_keys_are_selected_whatever_comes_after_them():
    """Values tell the keys apart; hidden keys, as in a padded batch, change nothing."""
    scores = torch.tensor([3.0, 1, 3, 2, 2, 2, 2, 2, 2, 3], dtype=torch.float64)
    value = torch.eye(10, dtype=torch.float64)[None, None]
    query = torch.ones(1, 1, 1, 1).double()
    for k in range(1, 10):
        wanted = set(scores.sort(descending=True, stable=True).indices[:k].tolist())
        for extra in (0, 1, 30, 300):
            key = torch.cat([scores, torch.full((extra,), 9.0).double()])[None, None, :, None]
            own = torch.cat([value, value.new_zeros(1, 1, extra, 10)], 2)
            mask = (torch.arange(10 + extra) < 10)[None, None, None]
            output = topk_attend(query, key, own, Visible(mask=mask), k)
            assert set(output.flatten().nonzero().flatten().tolist()) == wanted


def test_of_equal_scores_those_selected_are_the_highest():
    """The values are the scores themselves, so that the output shows what was selected."""
    scores = torch.tensor([3.0, 1, 3, 2, 2, 2, 0, 3], dtype=torch.float64)
    key = scores[None, None, :, None]
    for k in range(1, 9):
        output = topk_attend(torch.ones(1, 1, 1, 1).double(), key, key, Visible(), k)
        best = scores.sort(descending=True).values[:k]
        torch.testing.assert_close(output.item(), float((best.softmax(0) * best).sum()))


def test_no_chunk_has_more_queries_than_asked_for(monkeypatch):
    monkeypatch.setattr(blocks, "SCORES", 10**9)
    for n_queries, chunk in ((2047, 1024), (7, 3), (8, 4), (5, 9), (1, 1)):
        query, key = torch.zeros(1, 2, n_queries, 1), torch.zeros(1, 1, n_queries, 1)
        sizes = [
            block.queries.stop - block.queries.start
            for block in blocks.blocks_of(query, key, chunk, is_causal=True)
        ]
        assert max(sizes) <= chunk
        assert sum(sizes) == n_queries


def test_blocks_cover_every_head_and_query_once(monkeypatch):
    for fitting in (1, 40, 100, 10**6):
        monkeypatch.setattr(blocks, "SCORES", fitting)
        query, key = torch.zeros(3, 6, 5, 1), torch.zeros(3, 3, 5, 1)
        seen = torch.zeros(3, 3, 5)
        for block in blocks.blocks_of(query, key, 2, is_causal=False):
            seen[block.texts, block.heads, block.queries] += 1
        assert (seen == 1).all()


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_is_the_same_in_both_passes_whatever_the_chunks(way, recompute):
    """With the weights of a call fixed by its seed, the output is linear in the values."""
    for k in (3, 20):
        query, key, value = qkv()

        def run(value, k=k, query=query, key=key):
            torch.manual_seed(5)
            return topk_attend(
                query, key, value, Visible(True), k, chunk=2, dropout=0.5, recompute=recompute
            )

        output = run(value)
        draw = torch.randn_like(output)
        (ours,) = torch.autograd.grad((output * draw).sum(), value)
        unit = torch.eye(value.numel(), dtype=value.dtype).reshape(-1, *value.shape)
        exact = torch.stack([(run(one) * draw).sum() for one in unit]).reshape(value.shape)
        torch.testing.assert_close(ours, exact)
        assert not torch.equal(output, topk_attend(query, key, value, Visible(True), k, chunk=2))


def test_gradients_with_dropout_hold_against_finite_differences(way):
    tensors = qkv(5, 5, n_texts=1, n_heads=2, n_key_heads=1, width=3, values=2)

    def run(query, key, value):
        torch.manual_seed(1)
        return topk_attend(query, key, value, Visible(True), 2, chunk=2, dropout=0.4)

    assert gradcheck(run, tensors)
    assert gradgradcheck(run, tensors)


def test_dropout_differs_between_calls_and_keeps_the_mean():
    query, key, value = qkv(1, 9, n_texts=1)
    with torch.no_grad():
        exact = topk_attend(query, key, value, Visible(), 4)
        draws = torch.stack(
            [topk_attend(query, key, value, Visible(), 4, dropout=0.3) for _ in range(2000)]
        )
    assert not torch.equal(draws[0], draws[1])
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - exact).abs() < 5 * error).all()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointing_repeats_the_same_pass(dropout):
    tensors = qkv()

    def run(*tensors):
        return topk_attend(*tensors, Visible(True), 3, chunk=2, dropout=dropout)

    torch.manual_seed(3)
    plain = torch.autograd.grad(run(*tensors).square().sum(), tensors)
    torch.manual_seed(3)
    output = checkpoint(run, *tensors, use_reentrant=False)
    again = torch.autograd.grad(output.square().sum(), tensors)
    for one, two in zip(plain, again, strict=True):
        assert torch.equal(one, two)


def saved_bytes(run) -> int:
    """Bytes kept for the backward pass, each storage once."""
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = run()
    assert output.requires_grad
    return sum(kept.values())


def test_what_is_kept_for_the_backward_pass_is_four_bytes_per_selected_key():
    n_heads, k = 2, 8
    for length in (64, 128, 256):
        tensors = qkv(length, length, n_texts=1, n_heads=n_heads, dtype=torch.float32)
        inputs = sum(tensor.numel() * 4 for tensor in tensors)
        kept = saved_bytes(lambda t=tensors: topk_attend(*t, Visible(True), k, chunk=16))
        assert kept == inputs + n_heads * length * k * 4
        for options in ({"k": k, "recompute": True}, {"k": None}):
            run = {"chunk": 16, **options}
            assert (
                saved_bytes(lambda t=tensors, o=run: topk_attend(*t, Visible(True), **o)) == inputs
            )
        eager = saved_bytes(lambda t=tensors, n=length: dense_topk(*t, n))
        assert eager > inputs + n_heads * length**2 * 4


def test_a_head_that_keeps_all_keys_costs_the_others_nothing():
    length, k = 128, (8, 8, 8, 10**9)
    tensors = qkv(length, length, n_texts=1, dtype=torch.float32)
    inputs = sum(tensor.numel() * 4 for tensor in tensors)
    kept = saved_bytes(lambda: topk_attend(*tensors, Visible(True), k, chunk=16))
    # The keys and values of one head are used twice: with k 8, and whole.
    shared = sum(tensor[:, :1].numel() * 4 for tensor in tensors[1:])
    more = kept - (inputs + shared + 3 * length * 8 * 4)
    assert 0 <= more < 1024  # the numbers of the heads


def test_only_one_block_of_scores_is_alive_at_a_time(monkeypatch):
    """No tensor of the size of all scores, or of the scores of a chunk for all heads, is made."""
    monkeypatch.setattr(blocks, "SCORES", 1)
    tensors, largest = qkv(64, 64, n_texts=1, dtype=torch.float32), [0]

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for one in result if isinstance(result, tuple | list) else [result]:
                if isinstance(one, torch.Tensor) and one.is_floating_point():
                    largest[0] = max(largest[0], one.numel())
            return result

    with Watch():
        topk_attend(*tensors, Visible(True), 4, chunk=8).sum().backward()
    group, chunk, keys = 2, 8, 64
    assert largest[0] <= max(group * chunk * keys, *(tensor.numel() for tensor in tensors))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_as_eager_attention_computes_it(way, dtype):
    """Products in the dtype of the inputs; softmax in float32, and so is all that leads to it."""
    query, key, value = qkv(9, 9, n_key_heads=4, width=16, values=16, dtype=dtype)
    mask = causal(9, 9)
    scores = query @ key.mT * 16**-0.5
    scores = scores + torch.zeros(mask.shape, dtype=dtype).masked_fill(
        ~mask, torch.finfo(dtype).min
    )
    weights = scores.softmax(-1, dtype=torch.float32).to(dtype)
    eager = (weights @ value).transpose(1, 2)
    ours = topk_attend(query, key, value, Visible(True), 9, chunk=4)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, eager, rtol=0, atol=2 * torch.finfo(dtype).eps)
    grads = [torch.autograd.grad(one.sum(), (query, key, value)) for one in (ours, eager)]
    for own, other in zip(*grads, strict=True):
        assert own.dtype == dtype
        torch.testing.assert_close(own, other, rtol=0, atol=16 * torch.finfo(dtype).eps)


def test_autocast_computes_in_its_dtype_whatever_the_dtypes_given():
    """Models rotate queries and keys in float32, and leave values in half precision."""
    query, key, value = qkv(dtype=torch.float32)
    half = [tensor.bfloat16() for tensor in (query, key, value)]
    plain = topk_attend(*half, Visible(True), 3, chunk=2)
    with torch.autocast("cpu", torch.bfloat16):
        inside = topk_attend(query, key, half[2], Visible(True), 3, chunk=2)
    assert torch.equal(plain, inside)
    ours, theirs = (torch.autograd.grad(one.sum(), (query, key, value)) for one in (inside, plain))
    for own, other in zip(ours, theirs, strict=True):
        assert own.dtype == torch.float32
        assert torch.equal(own, other)
    with pytest.raises(BadSettings, match="float32, float32, bfloat16; expected one dtype"):
        topk_attend(query, key, half[2], Visible(True), 3)


def test_dropout_of_everything_gives_zero():
    assert not topk_attend(*qkv(), Visible(True), 3, dropout=1.0).any()


def test_what_does_not_fit_is_refused_in_one_line():
    query, key, value = qkv()
    with pytest.raises(BadSettings, match="k for 3 heads; this attention has 4"):
        topk_attend(query, key, value, Visible(), (1, 2, 3))
    with pytest.raises(BadSettings, match="4 query heads and 3 key heads"):
        topk_attend(query, key[:, :1].expand(-1, 3, -1, -1), value, Visible(), 2)
    for mask, message in (
        (torch.ones(7, 9, dtype=torch.bool), r"shape \(7, 9\); expected \(2, 4, 7, 9\)"),
        (torch.ones(2, 1, 7, 8, dtype=torch.bool), r"shape \(2, 1, 7, 8\)"),
        (torch.ones(2, 1, 7, 9, dtype=torch.int64), "torch.int64; expected boolean"),
    ):
        with pytest.raises(BadSettings, match=message):
            visible_from({"attention_mask": mask}, query, key, is_causal=False)
