"""Taps: in force inside a `with`, on one thread, in a fixed order, and gone afterwards."""

import copy
import gc
import inspect
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from families import build
from layerleap.models.hooks.attention import attention_chosen_by
from layerleap.models.hooks.forward import Tap, hooks_of, once, tapped
from layerleap.models.transformer import Transformer
from tiny_models import tiny

X = torch.ones(1, 3)


def elsewhere(function):
    """What a function returns on another thread."""
    results = []
    other = threading.Thread(target=lambda: results.append(function()), daemon=True)
    other.start()
    other.join(20)
    assert results, "the other thread is stuck"
    return results[0]


def changes(*, by):
    return Tap(change_input=lambda args, kwargs: ((args[0] + by,), kwargs))


def test_a_tap_runs_in_its_order_whatever_was_set_first():
    linear, order = nn.Identity(), []
    watch = Tap(
        see_input=lambda args, kwargs: order.append(("in", args[0].sum().item())),
        see_output=lambda output: order.append(("out", output.sum().item())),
    )
    edit = Tap(
        change_input=lambda args, kwargs: ((args[0] * 2,), kwargs),
        change_output=lambda output: output + 1,
    )
    around = Tap(around=lambda forward, args, kwargs: forward(args[0] * 10))
    for taps in ([watch, edit, around], [around, edit, watch], [edit, around, watch]):
        order.clear()
        with tapped(linear, [(linear, tap) for tap in taps]):
            assert linear(X).sum() == 63
        assert order == [("in", 60.0), ("out", 63.0)]
        assert linear(X).sum() == 3


def test_the_last_replacement_decides_and_watchers_see_around_it():
    linear, seen = nn.Identity(), []
    watch = Tap(see_input=lambda args, kwargs: seen.append(args[0]), see_output=seen.append)
    one, two = (Tap(replace=lambda n=n: lambda x: x * n) for n in (3, 5))
    none = Tap(replace=lambda: None)
    with tapped(linear, [(linear, tap) for tap in (one, two, none, watch, changes(by=1))]):
        assert torch.equal(linear(X), 5 * X)  # what is replaced gets its input as it is
    assert torch.equal(seen[0], X)
    assert torch.equal(seen[1], 5 * X)
    with tapped(linear, {linear: none}), tapped(linear, {linear: changes(by=1)}):
        assert torch.equal(linear(X), X + 1)


def test_a_forward_of_another_library_stays_inside_and_comes_back():
    linear = nn.Linear(3, 3)
    plain = linear.forward

    def theirs(x):
        return plain(x) + 1

    linear.forward = theirs
    with tapped(linear, {linear: changes(by=1)}):
        assert hooks_of(linear).instance_forward(linear) is theirs
        with tapped(linear, {linear: changes(by=1)}):
            assert torch.equal(linear(X), plain(X + 2) + 1)
        assert torch.equal(linear(X), plain(X + 1) + 1)
    assert linear.__dict__["forward"] is theirs
    del linear.forward
    with tapped(linear, {linear: changes(by=1)}):
        assert hooks_of(linear).instance_forward(linear) is None
    assert "forward" not in linear.__dict__


def test_a_tapped_forward_keeps_its_signature():
    model = build("llama")
    names = list(inspect.signature(model.forward).parameters)
    with tapped(model, {model: Tap(around=lambda forward, args, kwargs: forward(*args, **kwargs))}):
        assert list(inspect.signature(model.forward).parameters) == names


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_taps_go_with_an_error_even_while_they_are_set(error):
    linear, other = nn.Linear(3, 3), nn.Linear(3, 3)
    expected = linear(X)

    def taps():
        yield linear, changes(by=1)
        yield other, Tap(see_output=print)
        raise error

    with pytest.raises(error), tapped(linear, taps()):
        raise AssertionError
    with pytest.raises(error), tapped(linear, {linear: changes(by=1)}):
        raise error
    assert torch.equal(linear(X), expected)
    assert "forward" not in linear.__dict__
    assert not other._forward_hooks
    elsewhere(lambda: hooks_of(linear).lock.acquire())  # was given back


def test_plain_calls_on_other_threads_are_left_alone():
    linear, seen = nn.Linear(3, 3), []
    expected = linear(X)
    watch = Tap(see_input=lambda *_: seen.append(1), see_output=lambda _: seen.append(1))
    around = Tap(around=lambda forward, args, kwargs: forward(*args, **kwargs) * 0)
    for tap in (watch, changes(by=1), around, Tap(replace=lambda: lambda x: x * 0)):
        with tapped(linear, {linear: tap}):
            assert torch.equal(elsewhere(lambda: linear(X)), expected)
    assert not seen


def test_a_second_thread_waits_until_the_first_has_left():
    model, order = tiny("llama"), []
    inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
    started = threading.Event()

    def second():
        started.set()
        model.capture(inputs)
        order.append("second")

    other = threading.Thread(target=second, daemon=True)
    with tapped(model.model, {}):
        other.start()
        started.wait(10)
        model.capture(inputs)  # the same thread may go on: the lock is re-entrant
        order.append("first")
    other.join(20)
    assert order == ["first", "second"]


def test_one_model_has_one_lock_and_a_copy_has_its_own():
    model = build("llama")
    one, two = Transformer.wrap(model), Transformer.wrap(model)
    assert hooks_of(one.model) is hooks_of(two.model)
    twin = copy.deepcopy(model)
    assert hooks_of(twin).lock is not hooks_of(model).lock
    with hooks_of(model).lock:
        pickle.dumps(model)  # no lock among what is pickled
        assert elsewhere(lambda: hooks_of(twin).lock.acquire())


def test_locks_and_edits_do_not_keep_a_model_alive():
    from layerleap.act.edits import ZeroNeuron
    from layerleap.models.cursor.cursor import Cursor
    from layerleap.models.cursor.verify import find_axes

    transformer = tiny("llama")
    transformer.capture({"input_ids": torch.tensor([[5, 6]])})
    with transformer.edit(ZeroNeuron(1, 0)), Cursor(transformer, find_axes(transformer)) as cursor:
        cursor.run([5, 6])
    alive = weakref.ref(transformer.model)
    del transformer, cursor
    gc.collect()
    assert alive() is None


def test_attention_is_chosen_on_this_thread_only_and_the_lookup_is_put_back():
    from transformers import AttentionInterface

    before = AttentionInterface.get_interface
    model, ids = build("llama"), torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = model(ids).logits

    def nothing(module, query, key, value, *args, **kwargs):
        return torch.zeros_like(query).transpose(1, 2), None

    def run():
        with torch.no_grad():
            return model(ids).logits

    with attention_chosen_by(lambda module: nothing):
        with attention_chosen_by(lambda module: None):  # decides first, and leaves it to the other
            assert not torch.equal(run(), expected)
        assert torch.equal(elsewhere(run), expected)

        def chosen():
            with attention_chosen_by(lambda module: None):
                return run()

        assert torch.equal(elsewhere(chosen), expected)
        assert not torch.equal(run(), expected)
    assert AttentionInterface.get_interface is before
    assert torch.equal(run(), expected)


def test_a_property_that_needs_the_model_waits_for_it_before_it_takes_a_lock_of_its_own():
    """With `cached_property` of Python 3.11, these two threads would wait for each other."""
    transformer = SimpleNamespace(model=nn.Linear(2, 2))
    lock, asked, runs = hooks_of(transformer.model).lock, threading.Event(), []

    class Owner:
        def __init__(self):
            self.transformer = transformer

        @once
        def value(self):
            """Something about the model."""
            with lock:
                runs.append(1)
                return 7

    owner, other = Owner(), Owner()
    with ThreadPoolExecutor(1) as pool:
        with lock:
            waiting = pool.submit(lambda: (asked.set(), other.value)[1])
            assert asked.wait(10)
            assert owner.value == 7  # while the other thread is already inside the property
        assert waiting.result(timeout=10) == 7
    assert (owner.value, other.value) == (7, 7)
    assert len(runs) == 2
