"""Weights packed for a few rows: the same numbers, never stale, never left in the model."""

from dataclasses import replace
from threading import Thread

import pytest
import torch

from families import build
from layerleap.act.edits import AddNeuron
from layerleap.models.cursor import packed as packing
from layerleap.models.cursor.cursor import Cursor
from layerleap.models.cursor.packed import Packed
from layerleap.models.cursor.tree import Tree
from layerleap.models.cursor.verify import find_axes
from layerleap.models.transformer import Transformer

IDS = [5, 9, 7, 11, 23, 6, 40, 8]
SIZES = range(2, 17)


def only(name, dtype, monkeypatch):
    """Use one layout alone; skip where the library is missing or lacks the dtype."""
    layout = packing.LAYOUTS[name]
    if not layout.is_available(dtype):
        pytest.skip(f"this build of torch, or this processor, has no {name} for {dtype}")
    monkeypatch.setattr(packing, "LAYOUTS", {name: layout})


@pytest.fixture(params=packing.LAYOUTS)
def llama(request, monkeypatch):
    """With one layout at a time, where the library has it."""
    only(request.param, torch.float32, monkeypatch)
    return Transformer.wrap(build("llama"))


@pytest.fixture
def narrow(monkeypatch):
    only("onednn", torch.bfloat16, monkeypatch)
    return Transformer.wrap(build("llama").to(torch.bfloat16))


def run(transformer, packed):
    with Cursor(transformer, find_axes(transformer), packed=packed) as cursor:
        return cursor.run(Tree.chain(IDS)).h


def packed_of(transformer):
    packed = Packed.of(transformer.model, SIZES)
    assert packed is not None
    return packed


def spoil(packed):
    """Put other weights into the copies, so that using them shows."""
    for one in packed._copies:
        shape = one.module.weight.shape[::-1]
        one.packed = packed._pack(torch.nn.Linear(*shape, dtype=packed.dtype))


def test_the_numbers_are_the_same_and_the_copies_are_used(llama, monkeypatch):
    expected, packed = run(llama, None), packed_of(llama)
    assert set(SIZES) == set(packed.sizes)
    torch.testing.assert_close(run(llama, packed), expected)
    spoil(packed)
    assert not torch.allclose(run(llama, packed), expected)


def test_weights_that_change_unnoticed_are_packed_again(llama):
    packed = packed_of(llama)
    llama.model.model.layers[1].mlp.up_proj.weight.data *= -1  # autograd does not notice
    torch.testing.assert_close(run(llama, packed), run(llama, None))


def test_a_wrong_product_is_not_used(llama, monkeypatch):
    """Layouts are verified: one that is right for five rows only is used for five."""
    right = packing._forward

    def wrong(layout, one, sizes, thread, x):
        return right(layout, one, sizes, thread, x) * (1 if x.shape[-2] == 5 else 1.01)

    monkeypatch.setattr(packing, "_forward", wrong)
    assert packed_of(llama).sizes == (5,)


def test_only_sizes_that_are_faster_are_used_and_the_fastest_layout(llama, monkeypatch):
    real = dict(packing.LAYOUTS)
    [layout] = real.values()

    def seconds(self, n, *, plain=False):  # the second layout wins, and from three rows on
        return 1.0 if plain else (0.5 if self.layout is other else 0.9) * (0.1 * n if n < 3 else 1)

    def slow(self, n, *, plain=False):
        return 2.0 if not plain and n < 3 else seconds(self, n, plain=plain)

    other = replace(layout)
    monkeypatch.setattr(packing, "LAYOUTS", {"one": layout, "other": other})
    monkeypatch.setattr(Packed, "_seconds", slow)
    packed = Packed.of(llama.model)
    assert packed.layout is other
    assert packed.sizes == tuple(range(3, 33))
    assert Packed.of(llama.model) is packed  # one copy, whoever asks


def test_a_layout_that_is_not_faster_is_timed_once_per_model_and_dtype(llama, monkeypatch):
    timed = []

    def same(self, n, *, plain=False):
        timed.append(n)
        return 1.0

    monkeypatch.setattr(Packed, "_seconds", same)
    assert Packed.of(llama.model) is None
    assert timed
    timed.clear()
    assert Packed.of(llama.model) is None
    assert timed == []


def test_weights_are_not_copied_without_plenty_of_memory(llama, monkeypatch):
    monkeypatch.setattr(packing, "_free", lambda: 1000.0)
    assert Packed.of(llama.model) is None


def test_weights_are_not_packed_in_a_dtype_without_a_layout(llama):
    assert Packed.of(llama.model.to(torch.float64)) is None


def test_bfloat16_weights_are_packed_and_used(narrow):
    expected, packed = run(narrow, None), packed_of(narrow)
    assert set(SIZES) == set(packed.sizes)
    found = run(narrow, packed)
    assert found.dtype == torch.bfloat16
    assert (found - expected).float().norm() < 0.02 * expected.float().norm()
    spoil(packed)
    assert (run(narrow, packed) - expected).float().norm() > 0.1 * expected.float().norm()


def test_a_prompt_is_multiplied_by_the_weights_themselves(llama):
    """`generate` computes it that way, and in narrow dtypes the bits matter."""
    packed, expected = packed_of(llama), run(llama, None)
    spoil(packed)
    with Cursor(llama, find_axes(llama), packed=packed) as cursor:
        assert torch.equal(cursor.run(IDS).h, expected)
        assert not torch.allclose(cursor.run([9]).h, run(llama, None)[:1])


@pytest.mark.parametrize("d_in", [64, 1536])
def test_bfloat16_rows_have_the_bits_of_products_of_one_row(monkeypatch, d_in):
    """Kernels sum long rows in another order when there are several of them."""
    only("onednn", torch.bfloat16, monkeypatch)
    torch.manual_seed(0)
    linear = torch.nn.Linear(d_in, 96, dtype=torch.bfloat16)
    half = linear.weight.data[:, : d_in // 2]
    linear.weight.data = torch.cat([half, -half], 1)  # sums cancel: all that is left is rounding
    packed = Packed.of(torch.nn.Sequential(linear), range(1, 33))
    (copy,) = packed._copies
    rows = torch.randn(1, 11, d_in // 2).bfloat16().repeat(1, 1, 2)
    alone = torch.cat([linear(rows[:, n : n + 1]) for n in range(11)], 1)
    assert torch.equal(packing._product(packed, copy, rows, 11), alone)


def test_a_model_cast_to_bfloat16_does_not_use_the_copies_of_before(narrow):
    wide = Transformer.wrap(build("llama"))
    packed = Packed.of(wide.model, SIZES)
    wide.model.to(torch.bfloat16)
    assert torch.equal(run(wide, packed), run(wide, None))


def test_passes_of_other_threads_and_with_gradients_are_left_alone(llama, monkeypatch):
    packed, ids, found = packed_of(llama), torch.tensor([IDS]), []
    expected = llama.model(ids).logits
    spoil(packed)
    with Cursor(llama, find_axes(llama), packed=packed):
        with torch.no_grad():
            other = Thread(target=lambda: found.append(llama.model(ids).logits))
            other.start()
            other.join()
        with torch.enable_grad():
            loss = llama.model(ids).logits.sum()
            loss.backward()
    assert torch.equal(found[0], expected)
    assert llama.model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0


def test_weights_cast_later_are_left_alone(llama):
    packed = packed_of(llama)
    llama.model.to(torch.float64)
    torch.testing.assert_close(run(llama, packed), run(llama, None))


def test_a_cursor_that_cannot_use_the_copies_leaves_the_model_to_others(llama, monkeypatch):
    packed, axes = packed_of(llama), find_axes(llama)
    before = [dict(module.__dict__) for module in llama.model.modules()]
    monkeypatch.setattr(Packed, "in_use", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), Cursor(llama, axes, packed=packed) as cursor:
        cursor.run([9])
    assert [dict(module.__dict__) for module in llama.model.modules()] == before
    done = []
    other = Thread(target=lambda: done.append(run(llama, None)), daemon=True)
    other.start()
    other.join(20)
    assert done  # the lock was given back


def test_under_autocast_products_are_left_alone(llama):
    packed = packed_of(llama)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(run(llama, packed), run(llama, None))


def test_the_model_is_as_before_even_after_an_error(llama):
    before = [dict(module.__dict__) for module in llama.model.modules()]
    packed = packed_of(llama)
    cursor = Cursor(llama, find_axes(llama), packed=packed)
    with pytest.raises(ZeroDivisionError), cursor:
        raise ZeroDivisionError
    assert [dict(module.__dict__) for module in llama.model.modules()] == before


def test_packed_weights_are_edited_like_others(llama):
    """An edit of what enters a packed layer, set before the copies are in use and after."""
    packed, edit = packed_of(llama), AddNeuron(2, 3, 5.0)
    with llama.edit(edit):
        expected = run(llama, None)
        torch.testing.assert_close(run(llama, packed), expected)
    cursor = Cursor(llama, find_axes(llama), packed=packed)
    with cursor, llama.edit(edit) as report:
        torch.testing.assert_close(cursor.run(Tree.chain(IDS)).h, expected)
    assert report[0].positions == len(IDS)
    assert not torch.allclose(run(llama, packed), expected)
