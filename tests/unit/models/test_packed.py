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
from layerleap.models.cursor.verify import find_axes
from layerleap.models.transformer import Transformer

IDS = [5, 9, 7, 11, 23, 6, 40, 8]
SIZES = range(2, 17)


@pytest.fixture(params=packing.LAYOUTS)
def llama(request, monkeypatch):
    """With one layout at a time, where the library has it."""
    layout = packing.LAYOUTS[request.param]
    monkeypatch.setattr(packing, "LAYOUTS", {request.param: layout})
    return Transformer.wrap(build("llama"))


def run(transformer, packed):
    with Cursor(transformer, find_axes(transformer), packed=packed) as cursor:
        return cursor.run(IDS).h


def packed_or_none(transformer):
    """None where the library is missing."""
    packed = Packed.of(transformer.model, SIZES)
    [layout] = packing.LAYOUTS.values()
    assert (packed is not None) == layout.is_available()
    return packed


def spoil(packed):
    """Put other weights into the copies, so that using them shows."""
    for one in packed._copies if packed else ():
        one.packed = packed._pack(torch.nn.Linear(*one.module.weight.shape[::-1]))


def test_the_numbers_are_the_same_and_the_copies_are_used(llama, monkeypatch):
    expected, packed = run(llama, None), packed_or_none(llama)
    if packed is None:
        return
    assert set(SIZES) == set(packed.sizes)
    torch.testing.assert_close(run(llama, packed), expected)
    spoil(packed)
    assert not torch.allclose(run(llama, packed), expected)


def test_weights_that_change_unnoticed_are_packed_again(llama):
    packed = packed_or_none(llama)
    llama.model.model.layers[1].mlp.up_proj.weight.data *= -1  # autograd does not notice
    torch.testing.assert_close(run(llama, packed), run(llama, None))


def test_a_wrong_product_is_not_used(llama, monkeypatch):
    """Layouts are verified: one that is right for five rows only is used for five."""
    right = packing._forward

    def wrong(layout, one, sizes, thread, x):
        return right(layout, one, sizes, thread, x) * (1 if x.shape[-2] == 5 else 1.01)

    monkeypatch.setattr(packing, "_forward", wrong)
    packed = packed_or_none(llama)
    assert packed is None or packed.sizes == (5,)


def test_only_sizes_that_are_faster_are_used_and_the_fastest_layout(llama, monkeypatch):
    real = dict(packing.LAYOUTS)
    [layout] = real.values()
    if not layout.is_available():
        return

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
    monkeypatch.setattr(Packed, "_seconds", lambda self, n, plain=False: 1.0)
    assert Packed.of(build("llama")) is None


def test_weights_are_not_copied_without_plenty_of_memory(llama, monkeypatch):
    monkeypatch.setattr(packing, "_free", lambda: 1000.0)
    assert Packed.of(llama.model) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_only_float32_weights_are_packed(llama, dtype):
    assert Packed.of(llama.model.to(dtype)) is None


def test_passes_of_other_threads_and_with_gradients_are_left_alone(llama, monkeypatch):
    packed, ids, found = packed_or_none(llama), torch.tensor([IDS]), []
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
    packed = packed_or_none(llama)
    llama.model.to(torch.float64)
    torch.testing.assert_close(run(llama, packed), run(llama, None))


def test_a_cursor_that_cannot_be_entered_leaves_the_model_to_others(llama, monkeypatch):
    packed = packed_or_none(llama)
    if packed is None:
        return
    before = [dict(module.__dict__) for module in llama.model.modules()]
    monkeypatch.setattr(Packed, "in_use", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), Cursor(llama, packed=packed):
        raise AssertionError
    assert [dict(module.__dict__) for module in llama.model.modules()] == before
    done = []
    other = Thread(target=lambda: done.append(run(llama, None)), daemon=True)
    other.start()
    other.join(20)
    assert done  # the lock was given back


def test_under_autocast_products_are_left_alone(llama):
    packed = packed_or_none(llama)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(run(llama, packed), run(llama, None))


def test_the_model_is_as_before_even_after_an_error(llama):
    before = [dict(module.__dict__) for module in llama.model.modules()]
    packed = packed_or_none(llama)
    cursor = Cursor(llama, find_axes(llama), packed=packed)
    with pytest.raises(ZeroDivisionError), cursor:
        raise ZeroDivisionError
    assert [dict(module.__dict__) for module in llama.model.modules()] == before


def test_packed_weights_are_edited_like_others(llama):
    """An edit of what enters a packed layer, set before the copies are in use and after."""
    packed, edit = packed_or_none(llama), AddNeuron(2, 3, 5.0)
    with llama.edit(edit):
        expected = run(llama, None)
        torch.testing.assert_close(run(llama, packed), expected)
    cursor = Cursor(llama, find_axes(llama), packed=packed)
    with cursor, llama.edit(edit) as report:
        torch.testing.assert_close(cursor.run(IDS).h, expected)
    assert report[0].positions == len(IDS)
    assert not torch.allclose(run(llama, packed), expected)
