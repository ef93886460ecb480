"""Edits of every kind: laws over every family, in float64."""

import copy

import pytest
import torch
from transformers import AttentionInterface

from edit_cases import (
    EXPERTS,
    OWN_ATTENTION,
    average,
    foreign,
    inputs,
    logits,
    parts_replaced,
    recording,
    traces,
    wrapped,
)
from families import ALL, NEXT_TOKEN
from layerleap.act.edits import (
    AddNeuron,
    PatchState,
    ReplaceAttention,
    ReplaceParts,
    ScaleNeuron,
    SetNeuron,
    ZeroNeuron,
)
from layerleap.errors import BadSettings, ModelRefused, WrongModel
from layerleap.models.discovery.compare import row_gap as gap
from layerleap.models.transformer import Transformer
from layerleap.models.weights import feed_forward

DENSE = [name for name in ALL if name not in EXPERTS]
WITH_INTERFACE = [name for name in ALL if name not in OWN_ATTENTION]
LOOKUP = AttentionInterface.get_interface


def edits_of(name: str, block: int) -> list:
    """One of each kind that the family allows, acting in block `block`, at any position."""
    edits = [foreign(name, block), parts_replaced(name, ["ffn"], block - 1)]
    if name not in EXPERTS:
        edits.append(AddNeuron(block, 3, 2.0))
    if name not in OWN_ATTENTION:
        edits.append(ReplaceAttention(average, [block]))
    return edits


@pytest.mark.parametrize("name", DENSE)
def test_a_neuron_edit_moves_the_output_of_the_ffn_along_its_value_vector(name):
    model = wrapped(name)
    for block in (1, 3):
        sites = [(block, "ffn.out")]
        before = model.capture(inputs(name), layers=[], sites=sites).sites[sites[0]]
        value = feed_forward(model, block).values(model)[7]
        coefficients = []
        for edit in (
            ZeroNeuron(block, 7),
            SetNeuron(block, 7, 3.0),
            AddNeuron(block, 7, -2.0),
            ScaleNeuron(block, 7, 4.0),
        ):
            with model.edit(edit):
                after = model.capture(inputs(name), layers=[], sites=sites).sites[sites[0]]
            change = (after - before) @ value / value.square().sum()
            torch.testing.assert_close(after, before + change[..., None] * value)
            coefficients.append(-change)
        zero, three, added, scaled = coefficients  # of which `zero` is the coefficient itself
        is_real = (three + 3 - zero).abs() < 1e-9
        torch.testing.assert_close(scaled[is_real], -3 * zero[is_real])
        torch.testing.assert_close(added[is_real], torch.full_like(added[is_real], 2.0))
        n_padded = 2 if "attention_mask" in inputs(name) else 0  # padding is left alone
        assert int((~is_real).sum()) == n_padded


@pytest.mark.parametrize("name", ALL)
def test_below_the_edited_block_nothing_changes_bit_for_bit(name):
    clean = recording(name)
    for block in (1, 2, 3):
        for edit in edits_of(name, block):
            with wrapped(name).edit(edit) as report:
                captured = wrapped(name).capture(inputs(name), logits=True)
            for layer in range(block):
                assert torch.equal(captured.states[layer], clean.states[layer])
            assert not torch.equal(captured.states[block], clean.states[block])
            assert not torch.equal(captured.logits, clean.logits)
            assert report[0].passes == 1


@pytest.mark.parametrize("name", NEXT_TOKEN)
def test_before_the_edited_position_nothing_changes_bit_for_bit(name):
    clean, patch = recording(name), foreign(name, 2, text=0, position=3)
    neurons = [] if name in EXPERTS else [AddNeuron(2, 3, 2.0, positions=[3])]
    for edit in (patch, *neurons):
        with wrapped(name).edit(edit):
            captured = wrapped(name).capture(inputs(name), logits=True)
        for layer in range(4):
            ours, theirs = captured.states[layer], clean.states[layer]
            if name in EXPERTS:  # rows meet in one product there, and its size may change
                assert gap(ours[:, :3], theirs[:, :3]) < 1e-9
            else:
                assert torch.equal(ours[:, :3], theirs[:, :3])
        assert torch.equal(captured.logits[:, :3], clean.logits[:, :3]) or name in EXPERTS
        assert not torch.equal(captured.logits[0, 3:], clean.logits[0, 3:])


@pytest.mark.parametrize("name", ALL)
def test_edits_leave_no_trace(name):
    model, clean = wrapped(name), recording(name).logits
    before = traces(model.model)
    edits = edits_of(name, 2)
    with model.edit(*edits):
        assert traces(model.model) != before
        logits(name)
    assert traces(model.model) == before
    assert AttentionInterface.get_interface is LOOKUP
    assert torch.equal(logits(name), clean)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["gpt2", "bert", "albert", "mpt", "llama"])
def test_an_error_inside_leaves_no_trace_either(name, error):
    model, before = wrapped(name), traces(wrapped(name).model)
    first, second = edits_of(name, 2)[:2]

    def stop():
        with model.edit(first), model.edit(second):
            assert traces(model.model) != before
            raise error("stop")

    with pytest.raises(error, match="stop"):
        stop()
    assert traces(model.model) == before
    assert torch.equal(logits(name), recording(name).logits)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interruption_in_the_middle_of_a_pass_leaves_no_trace(error):
    model, before = wrapped("llama"), traces(wrapped("llama").model)

    def stop(*_, **__):
        raise error("stop")

    def run():
        with model.edit(AddNeuron(1, 0, 1.0), ReplaceAttention(stop, [2])):
            logits("llama")

    with pytest.raises(error, match="stop"):
        run()
    assert traces(model.model) == before
    assert AttentionInterface.get_interface is LOOKUP
    assert torch.equal(logits("llama"), recording("llama").logits)


@pytest.mark.parametrize("name", ["llama", "albert", "gpt2"])
def test_edits_act_in_the_order_given_and_inner_ones_after_outer_ones(name):
    model = wrapped(name)
    one, two = SetNeuron(2, 3, 5.0), ScaleNeuron(2, 3, 3.0)
    with model.edit(SetNeuron(2, 3, 15.0)):
        fifteen = logits(name)
    with model.edit(SetNeuron(2, 3, 5.0)):
        five = logits(name)
    with model.edit(one, two):
        assert torch.equal(logits(name), fifteen)
    with model.edit(two, one):
        assert torch.equal(logits(name), five)
    with model.edit(one):
        with model.edit(two):
            assert torch.equal(logits(name), fifteen)
        assert torch.equal(logits(name), five)
    with model.edit(two), model.edit(one):
        assert torch.equal(logits(name), five)


@pytest.mark.parametrize("layer", [0, 2])
def test_the_last_of_two_patches_of_one_state_stays(layer):
    model, one, two = wrapped("llama"), torch.zeros(24), torch.ones(24)
    for edits in ([PatchState(layer, one, 1), PatchState(layer, two, 1)],):
        with model.edit(*edits):
            h = model.capture(inputs("llama"), layers=[layer]).states[layer]
        assert torch.equal(h[:, 1], torch.ones(3, 24, dtype=h.dtype))
        with model.edit(edits[0]), model.edit(edits[1]):
            again = model.capture(inputs("llama"), layers=[layer]).states[layer]
        assert torch.equal(again, h)


@pytest.mark.parametrize("name", WITH_INTERFACE)
def test_a_replaced_attention_function_runs_in_the_chosen_blocks_only(name):
    model, modules = wrapped(name), []

    def noted(module, *args, **kwargs):
        modules.append(module)
        return average(module, *args, **kwargs)

    for blocks in ([2], [3, 1], None):
        modules.clear()
        with model.edit(ReplaceAttention(noted, blocks)) as report:
            changed = model.capture(inputs(name)).states
        numbers = sorted(range(1, 4) if blocks is None else blocks)
        assert len(modules) == len(numbers)
        for number, module in zip(numbers, modules, strict=True):
            assert module in list(model.block(number).modules())
        assert (report[0].passes, report[0].positions) == (1, changed[0][..., 0].numel())
        clean = recording(name).states
        assert gap(changed[numbers[0]], clean[numbers[0]]) > 1e-6


@pytest.mark.parametrize("name", sorted(OWN_ATTENTION))
def test_models_with_attention_of_their_own_are_refused_by_name(name):
    with (
        pytest.raises(ModelRefused, match=r"ForCausalLM does not use .* AttentionInterface"),
        wrapped(name).edit(ReplaceAttention(average)),
    ):
        pass


@pytest.mark.parametrize("name", sorted(EXPERTS))
def test_neurons_of_experts_are_refused_with_the_reason(name):
    with (
        pytest.raises(ModelRefused, match=r"FFN of block 2 .* mixture of experts"),
        wrapped(name).edit(ZeroNeuron(2, 0)),
    ):
        pass


def test_edits_are_checked_before_any_of_them_acts():
    model, before = wrapped("llama"), traces(wrapped("llama").model)
    good = ZeroNeuron(1, 0)
    for bad, message in (
        (ZeroNeuron(0, 0), "block 0 does not exist: this model has blocks 1 to 3"),
        (ZeroNeuron(4, 0), "block 4 does not exist"),
        (SetNeuron(2, 40, 1.0), "neuron 40 does not exist: block 2 has neurons 0 to 39"),
        (AddNeuron(2, -1, 1.0), "neuron -1 does not exist"),
        (ReplaceAttention(average, [5]), "block 5 does not exist"),
        (ReplaceAttention("average"), "'average' is not callable"),
        (
            parts_replaced("llama", ["heads"], 0),
            "the kind of parts is 'heads'; expected one of 'attn'",
        ),
        (parts_replaced("llama", ["ffn"], 4), "layer 4 does not exist"),
        ("ZeroNeuron", "cannot read the edit 'ZeroNeuron'"),
        (7, "7 is not an edit"),
    ):
        with pytest.raises(BadSettings, match=message), model.edit(good, bad):
            pass
    with pytest.raises(BadSettings, match="no edits given"), model.edit():
        pass
    with (
        pytest.raises(WrongModel, match="fit a bank for"),
        model.edit(parts_replaced("gpt2", ["ffn"], 0)),
    ):
        pass
    for positions, message in (
        ("first", "positions 'first'; expected 'all', 'last', 'generated', or numbers"),
        ([], r"positions \[\]"),
        ([-1], "positions='last'"),
    ):
        with pytest.raises(BadSettings, match=message):
            ZeroNeuron(1, 0, positions=positions)
    assert traces(model.model) == before


def test_the_report_says_what_each_edit_did(empty_cache):  # an index would add remarks
    model = wrapped("llama")
    edits = (
        ZeroNeuron(1, 0),
        AddNeuron(2, 1, 1.0, positions="last"),
        ZeroNeuron(3, 2, positions=[9]),
    )
    with model.edit(*edits) as report:
        assert report.unused == edits
        logits("llama")
        model.capture(inputs("llama"), layers=[2])  # ends before the third block
    assert [(one.passes, one.positions) for one in report] == [(2, 38), (2, 6), (0, 0)]
    assert report.unused == edits[2:]
    assert len(report) == 3
    assert str(report).splitlines() == [
        "ZeroNeuron(block=1, neuron=0, positions='all'): 2 passes, 38 positions",
        "AddNeuron(block=2, neuron=1, positions='last', amount=1.0): 2 passes, 6 positions",
        "ZeroNeuron(block=3, neuron=2, positions=(9,)): never applied",
    ]


def test_a_neuron_of_a_replaced_ffn_is_reported_as_never_applied():
    for name in ("llama", "bert"):  # an FFN that is a module, and one of loose matrices
        for edits in (
            (parts_replaced(name, ["ffn"], 1), AddNeuron(2, 3, 9.0)),
            (AddNeuron(2, 3, 9.0), parts_replaced(name, ["ffn"], 1)),
        ):
            with wrapped(name).edit(*edits) as report:
                both = logits(name)
            with wrapped(name).edit(parts_replaced(name, ["ffn"], 1)):
                assert torch.equal(both, logits(name))
            assert [type(edit) for edit in report.unused] == [AddNeuron]


def test_observers_see_edited_values_whatever_was_set_up_first():
    """A site at which an edit acts, hooks of others, and transformers' own hidden states."""
    model, seen = wrapped("llama"), []
    ffn = feed_forward(model, 2).module(model)
    handle = ffn.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    with model.edit(SetNeuron(2, 3, 7.0)):
        after = ffn.register_forward_hook(lambda _, args, output: seen.append(output))
        out = model.capture(inputs("llama"), layers=[], sites=[(2, "ffn.out")]).sites[2, "ffn.out"]
        after.remove()
    handle.remove()
    assert torch.equal(seen[0], out)
    patch = PatchState(2, torch.zeros(24), 1)
    with torch.no_grad():
        model.model(**inputs("llama"), output_hidden_states=True)  # leaves hooks of its own
        with model.edit(patch):
            states = model.model(**inputs("llama"), output_hidden_states=True).hidden_states
    assert torch.equal(states[2][:, 1], torch.zeros(3, 24, dtype=torch.float64))


def test_a_hook_of_somebody_else_that_changes_a_state_is_captured():
    model = wrapped("llama")
    handle = model.block(2).register_forward_hook(lambda _, args, output: output * 2)
    h = model.capture(inputs("llama")).states
    handle.remove()
    torch.testing.assert_close(h[2], 2 * recording("llama").states[2])


def test_blocks_run_outside_a_pass_are_refused():
    model = wrapped("llama")
    with (
        model.edit(ZeroNeuron(2, 0)),
        pytest.raises(BadSettings, match="block 2 ran outside a pass of the wrapped model"),
    ):
        model.model.model(**inputs("llama"))


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bert"])
def test_edits_hold_when_recorded_blocks_run_again(name):
    model, clean = wrapped(name), recording(name)
    edits = (foreign(name, 2), ScaleNeuron(3, 5, -2.0, positions=[0, 2]))
    with model.edit(*edits) as report:
        whole = model.capture(inputs(name), layers=[3]).states[3]
        again = clean.run(clean.states[0], 0)
        part = clean.run(clean.states[1], 1)
    assert torch.equal(again, whole)
    assert torch.equal(part, whole)
    assert [one.passes for one in report] == [3, 3]


def test_texts_packed_into_one_row_are_refused():
    model, ids = wrapped("llama"), torch.tensor([[5, 6, 7, 8, 9]])
    places = torch.tensor([[0, 1, 2, 0, 1]])
    with (
        model.edit(ZeroNeuron(1, 0, positions=[1])),
        pytest.raises(BadSettings, match="give each text its own row"),
    ):
        model.model(ids, position_ids=places)


def test_a_mask_that_hides_where_texts_begin_is_refused():
    model, ids = wrapped("llama"), torch.tensor([[5, 6, 7]])
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    with (
        model.edit(ZeroNeuron(1, 0)),
        pytest.raises(BadSettings, match=r"expected a mask of \(1, 3\)"),
    ):
        model.model(ids, attention_mask=mask)


def test_values_of_edits_are_frozen_and_equal_by_what_they_say():
    assert SetNeuron(1, 2, 3.0, positions=[4]) == SetNeuron(1, 2, 3.0, positions=(4,))
    assert SetNeuron(1, 2, 3.0) != SetNeuron(1, 2, 4.0)
    with pytest.raises(AttributeError):
        ZeroNeuron(1, 2).block = 3
    with pytest.raises(AttributeError):
        PatchState(1, torch.zeros(24), 0).layer = 2
    assert repr(ReplaceAttention(average, [2])) == "ReplaceAttention(average, blocks=[2])"
    assert "bank" not in repr(parts_replaced("llama", ["ffn"], 1))
    assert ReplaceParts(part := parts_replaced("llama", None, 0).bank).skips_cache
    assert not ReplaceParts(part, ["norms"]).skips_cache


def test_offloaded_models_are_edited_and_get_their_own_forwards_back():
    accelerate = pytest.importorskip("accelerate")
    plain = wrapped("llama")
    model = copy.deepcopy(plain.model)
    accelerate.cpu_offload(model)
    offloaded = Transformer.wrap(model)
    before = traces(model)
    assert any(forward is not None for _, _, forward, _ in before)
    edits = foreign("llama", 2), ReplaceAttention(average, [3])
    expected, ours = (_logits_under(transformer, edits) for transformer in (plain, offloaded))
    torch.testing.assert_close(ours, expected)
    assert traces(model) == before
    with (
        pytest.raises(ModelRefused, match="offloaded, so they cannot be verified"),
        offloaded.edit(ZeroNeuron(2, 0)),
    ):
        pass


def _logits_under(transformer, edits):
    with transformer.edit(*edits):
        return transformer.capture(inputs("llama"), logits=True).logits
