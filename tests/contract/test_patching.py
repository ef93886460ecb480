"""Activation patching: laws over every family, in float64."""

import pytest
import torch

from edit_cases import EXPERTS, foreign, inputs, logits, recording, traces, wrapped
from families import ALL, NEXT_TOKEN
from layerleap.act.edits import AddVector, PatchState
from layerleap.act.edits.patch import run_patched
from layerleap.errors import BadSettings
from layerleap.models.discovery.compare import row_gap as gap
from layerleap.models.hooks.recording import record


@pytest.mark.parametrize("name", ALL)
def test_patching_in_the_own_state_changes_nothing_bit_for_bit(name):
    clean = recording(name)
    for layer in range(4):
        own = PatchState(layer, clean.states[layer][[0, 1], [1, 0]], [1, 0], [0, 1])
        with wrapped(name).edit(own) as report:
            assert torch.equal(logits(name), clean.logits)
        assert (report[0].passes, report[0].positions) == (1, 2)
        for at, h in run_patched(clean, [own]):
            assert torch.equal(h, clean.states[at])


@pytest.mark.parametrize("name", ALL)
def test_a_foreign_state_is_captured_there_and_changes_what_follows(name):
    clean = recording(name)
    for layer in range(4):
        patch = foreign(name, layer)
        with wrapped(name).edit(patch):
            captured = wrapped(name).capture(inputs(name), logits=True)
        for below in range(layer):
            assert torch.equal(captured.states[below], clean.states[below])
        assert torch.equal(captured.states[layer][1, 0], patch.states[0])
        assert torch.equal(captured.states[layer][1, 1:], clean.states[layer][1, 1:])
        for above in range(layer, 4):
            assert gap(captured.states[above][1, :1], clean.states[above][1, :1]) > 1e-6
        assert torch.equal(captured.logits[[0, 2]], clean.logits[[0, 2]])
        assert not torch.equal(captured.logits[1], clean.logits[1])


@pytest.mark.parametrize("name", ALL)
def test_a_recorded_pass_goes_on_as_the_whole_model_does(name):
    """Patches of one layer and of several at once; layers of a shared block are told apart."""
    clean = recording(name)
    both = [foreign(name, 1, text=1), foreign(name, 2, text=2, position=1)]
    for patches in ([both[0]], [both[1]], both):
        with wrapped(name).edit(*patches):
            captured = wrapped(name).capture(inputs(name), logits=True)
            again = clean.run(clean.states[0], 0)
        states = dict(run_patched(clean, patches))
        assert list(states) == list(range(min(patch.layer for patch in patches), 4))
        assert torch.equal(states[3], captured.states[3])
        assert torch.equal(again, captured.states[3])
        for patch in patches:
            assert torch.equal(states[patch.layer][patch.texts, patch.positions], patch.states)


@pytest.mark.parametrize("name", NEXT_TOKEN)
def test_positions_before_the_patch_never_change(name):
    clean = recording(name)
    states = dict(run_patched(clean, [foreign(name, 1, position=3)]))
    if name in EXPERTS:  # rows meet in one product there, and its size may change
        assert gap(states[3][1, :3], clean.states[3][1, :3]) < 1e-9
    else:
        assert torch.equal(states[3][1, :3], clean.states[3][1, :3])
    assert gap(states[3][1, 3:4], clean.states[3][1, 3:4]) > 1e-6


@pytest.mark.parametrize("name", ALL)
def test_patches_leave_no_trace(name):
    before = traces(wrapped(name).model)
    clean = recording(name).logits
    with wrapped(name).edit(foreign(name, 1)):
        assert traces(wrapped(name).model) != before
        logits(name)
    list(run_patched(recording(name), [foreign(name, 1)]))
    assert traces(wrapped(name).model) == before
    assert torch.equal(logits(name), clean)


def test_every_pass_counts_its_blocks_anew():
    with wrapped("albert").edit(foreign("albert", 2)) as report:
        first, second = logits("albert"), logits("albert")
    assert torch.equal(first, second)
    assert not torch.equal(first, recording("albert").logits)
    assert report[0].passes == 2


def test_the_states_given_are_not_changed():
    clean = recording("gpt2")
    before = [h.clone() for h in clean.states]
    list(run_patched(clean, [foreign("gpt2", 0), foreign("gpt2", 2)]))
    assert all(torch.equal(a, b) for a, b in zip(before, clean.states, strict=True))


def test_without_texts_a_state_goes_into_every_text():
    state = torch.randn(24, dtype=torch.float64)
    with wrapped("llama").edit(PatchState(2, state, 1)) as report:
        h = wrapped("llama").capture(inputs("llama"), layers=[2]).states[2]
    assert torch.equal(h[:, 1], state.expand(3, -1))
    assert report[0].positions == 3
    assert torch.equal(dict(run_patched(recording("llama"), [PatchState(2, state, 1)]))[2], h)


def test_a_recorded_pass_with_padding_on_the_left_is_patched_where_the_whole_model_is():
    model, ids = wrapped("llama"), [[0, 0, 5, 9, 7], [4, 6, 8, 3, 2]]
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, :2] = 0
    batch = {"input_ids": torch.tensor(ids), "attention_mask": mask}
    patch = PatchState(2, torch.randn(24, dtype=torch.float64), 1, 0)
    with model.edit(patch):
        whole = model.capture(batch).states
    states = dict(run_patched(record(model, batch), [patch]))
    assert torch.equal(states[2][0, 3], patch.states[0])  # its second real token
    assert all(torch.equal(states[layer], whole[layer]) for layer in (2, 3))


def test_padding_is_never_patched():
    with wrapped("llama").edit(PatchState(1, torch.zeros(24), 5, 2)) as report:
        assert torch.equal(logits("llama"), recording("llama").logits)
    assert report.unused == (report[0].edit,)
    assert str(report) == "PatchState(layer=1, positions=[5], texts=[2]): never applied"


def test_positions_that_do_not_exist_are_refused():
    one = torch.zeros(1, 24)
    model = wrapped("gpt2")
    for layer in (-1, 4):
        with (
            pytest.raises(BadSettings, match=f"layer {layer} does not exist"),
            model.edit(PatchState(layer, one, 0)),
        ):
            pass
        with pytest.raises(BadSettings, match=f"layer {layer} does not exist"):
            next(run_patched(recording("gpt2"), [PatchState(layer, one, 0)]))
    with pytest.raises(BadSettings, match="at least one"):
        next(run_patched(recording("gpt2"), []))
    with (
        pytest.raises(BadSettings, match=r"width 23 .* expected its width, 24"),
        model.edit(PatchState(1, one[:, :23], 0)),
    ):
        pass
    given = recording("gpt2")
    for text, position, message in ((3, 0, "texts"), (0, 7, "positions")):
        with pytest.raises(BadSettings, match=message):
            PatchState(1, one, position, text).into(given.states[1], given)
    for text, position, message in ((0, -1, "positions"), (-1, 0, "texts")):
        with pytest.raises(BadSettings, match=rf"{message} \[-1\] .* from 0 on"):
            PatchState(1, one, position, text)
    with pytest.raises(BadSettings, match="width 24"):
        PatchState(1, one, 0, 0).into(torch.zeros(3, 6, 25), given)
    with pytest.raises(BadSettings, match="one of positions for each state"):
        PatchState(1, one, [0, 1], [0])
    with pytest.raises(BadSettings, match="same position"):
        PatchState(1, one.repeat(2, 1), [5, 5], [0, 0])
    with pytest.raises(BadSettings, match="same position"):
        PatchState(1, one.repeat(2, 1), [5, 5])


@pytest.mark.parametrize("name", ALL)
def test_edits_of_every_layer_act_once_when_a_recorded_pass_runs_again(name):
    model = wrapped(name)
    vector = torch.linspace(-1, 1, model.d_model, dtype=torch.float64)
    for edited in range(4):
        with model.edit(AddVector(edited, vector)):
            own = record(model, inputs(name))
            for start in range(3):
                assert torch.equal(own.run(own.states[start], start), own.states[3])
            patched = dict(run_patched(own, [PatchState(0, own.states[0][0, 0], 0, 0)]))
            assert torch.equal(patched[3], own.states[3])
            with model.edit(AddVector(0, vector)):  # a later one is not in the recorded state
                assert gap(own.run(own.states[0], 0, 1), own.states[1]) > 1e-6
