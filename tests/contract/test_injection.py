"""States put into the stream: laws over every family, in float64."""

from functools import cache

import pytest
import torch
from families import ALL, NEXT_TOKEN, build
from torch import nn

from layerleap.act.edits.patch import Injection, inject, run_injected
from layerleap.errors import BadSettings
from layerleap.models.discovery.compare import row_gap as gap
from layerleap.models.discovery.probe import prepare, probe
from layerleap.models.hooks.recording import Recording, record
from layerleap.models.transformer import Transformer


@cache
def wrapped(name: str) -> Transformer:
    model = build(name)
    if hasattr(model.config, "_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped kernels know no float64
    return Transformer.wrap(model.double(), check=False)


@cache
def inputs(name: str) -> dict:
    """Three texts, one of them padded on the right where the family knows padding."""
    model = wrapped(name).model
    found = probe(model, rows=3, seed=4)
    if "attention_mask" in found:
        found["attention_mask"][2, 5:] = 0
    return prepare(model, found)


@cache
def recording(name: str) -> Recording:
    return record(wrapped(name), inputs(name), logits=True)


def traces(model: nn.Module) -> list:
    """Everything that hooks leave on a module."""
    return [
        (list(m._forward_hooks), list(m._forward_pre_hooks), m.__dict__.get("forward"))
        for m in model.modules()
    ]


def foreign(name: str, layer: int, *, text: int = 1, position: int = 0) -> Injection:
    """The state of another text at the same layer, and noise: all images start alike."""
    generator = torch.Generator().manual_seed(layer)
    states = recording(name).states[layer][0, :1]
    states = states + torch.randn(states.shape, generator=generator, dtype=states.dtype)
    return Injection(layer, states, torch.tensor([text]), torch.tensor([position]))


@torch.no_grad()
def logits(name: str) -> torch.Tensor:
    return wrapped(name).model(**inputs(name)).logits


@pytest.mark.parametrize("name", ALL)
def test_putting_in_the_own_state_changes_nothing_to_the_bit(name):
    found = recording(name)
    for layer in range(3):
        own = Injection(
            layer, found.states[layer][[0, 1], [1, 0]], torch.tensor([0, 1]), torch.tensor([1, 0])
        )
        with inject(wrapped(name), own):
            assert torch.equal(logits(name), found.logits)
        for at, h in run_injected(found, [own]):
            assert torch.equal(h, found.states[at])


@pytest.mark.parametrize("name", ALL)
def test_a_foreign_state_is_seen_there_and_changes_what_follows(name):
    found = recording(name)
    for layer in range(3):
        injection = foreign(name, layer)
        with inject(wrapped(name), injection):
            seen = wrapped(name).capture(inputs(name), logits=True)
        for below in range(layer):
            assert torch.equal(seen.states[below], found.states[below])
        if layer == 0:  # what is above zero is seen as the block below left it
            assert torch.equal(seen.states[0][1, 0], injection.states[0])
        assert gap(seen.states[layer + 1][1, :1], found.states[layer + 1][1, :1]) > 1e-6
        assert torch.equal(seen.logits[[0, 2]], found.logits[[0, 2]])
        assert not torch.equal(seen.logits[1], found.logits[1])


@pytest.mark.parametrize("name", ALL)
def test_a_recorded_pass_goes_on_as_the_whole_model_does(name):
    """With and without hooks; several layers at once, the blocks of one shared block told apart."""
    found = recording(name)
    both = [foreign(name, 1, text=1), foreign(name, 2, text=2, position=1)]
    for injections in ([both[0]], [both[1]], both):
        with inject(wrapped(name), *injections):
            seen = wrapped(name).capture(inputs(name), logits=True)
        states = dict(run_injected(found, injections))
        assert list(states) == list(range(min(i.layer for i in injections), 4))
        assert torch.equal(states[3], seen.states[3])
        for injection in injections:
            place = (injection.texts, injection.positions)
            assert torch.equal(states[injection.layer][place], injection.states)


@pytest.mark.parametrize("name", NEXT_TOKEN)
def test_what_comes_before_the_position_never_hears_of_it(name):
    states = dict(run_injected(recording(name), [foreign(name, 1, position=3)]))
    assert gap(states[3][1, :3], recording(name).states[3][1, :3]) < 1e-9
    assert gap(states[3][1, 3:4], recording(name).states[3][1, 3:4]) > 1e-6


@pytest.mark.parametrize("name", ALL)
def test_injections_leave_no_trace(name):
    before = traces(wrapped(name).model)
    found = recording(name).logits
    with inject(wrapped(name), foreign(name, 1)):
        assert traces(wrapped(name).model) != before
        logits(name)
    list(run_injected(recording(name), [foreign(name, 1)]))
    assert traces(wrapped(name).model) == before
    assert torch.equal(logits(name), found)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_inside_leaves_no_trace_either(error):
    before = traces(wrapped("albert").model)

    def stop():
        with inject(wrapped("albert"), foreign("albert", 1)):
            raise error("stop")

    with pytest.raises(error, match="stop"):
        stop()
    assert traces(wrapped("albert").model) == before


def test_every_pass_inside_counts_its_blocks_anew():
    with inject(wrapped("albert"), foreign("albert", 2)):
        first, second = logits("albert"), logits("albert")
    assert torch.equal(first, second)
    assert not torch.equal(first, recording("albert").logits)


def test_the_states_given_are_not_changed():
    found = recording("gpt2")
    before = [h.clone() for h in found.states]
    list(run_injected(found, [foreign("gpt2", 0), foreign("gpt2", 2)]))
    assert all(torch.equal(a, b) for a, b in zip(before, found.states, strict=True))


def test_places_that_do_not_exist_are_refused():
    one = torch.zeros(1, 24)
    model, at = wrapped("gpt2"), torch.tensor
    for layer in (-1, 3):
        with (
            pytest.raises(BadSettings, match="before a block"),
            inject(model, Injection(layer, one, at([0]), at([0]))),
        ):
            pass
    with pytest.raises(BadSettings, match="at least one"), inject(model):
        pass
    for text, position, message in ((3, 0, "texts"), (0, 7, "positions"), (0, -1, "positions")):
        with pytest.raises(BadSettings, match=message):
            Injection(1, one, at([text]), at([position])).into(torch.zeros(3, 7, 24))
    with pytest.raises(BadSettings, match="width 24"):
        Injection(1, one, at([0]), at([0])).into(torch.zeros(3, 7, 25))
    with pytest.raises(BadSettings, match="one for each row"):
        Injection(1, one, at([0, 1]), at([0]))
    with pytest.raises(BadSettings, match="same place"):
        Injection(1, one.repeat(2, 1), at([0, 0]), at([5, 5]))
