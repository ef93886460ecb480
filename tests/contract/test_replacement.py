"""Blocks run again, and their parts replaced: laws over every family, in float64."""

from functools import cache

import pytest
import torch

from edit_cases import cascade, part_bank, traces, wrapped
from families import ALL, SEQ_TO_SEQ
from layerleap.act.edits.replace import PartMaps, _alone, _together, cascades
from layerleap.models.discovery.compare import row_gap as gap
from layerleap.models.discovery.parts import KINDS
from layerleap.models.discovery.probe import prepare, probe
from layerleap.models.hooks.recording import Recording, record

# Attention whose output is taken at an inner projection: the module around it still runs.
INNER = {"bloom", "bert", "roberta", "albert", "electra"}


@cache
def padded(name: str) -> tuple[dict, torch.Tensor]:
    """Three texts, two of them padded on the right, and some of their positions."""
    model = wrapped(name).model
    inputs = probe(model, rows=3, seed=4)
    if "attention_mask" not in inputs:
        states = wrapped(name).capture(inputs, layers=[0]).states
        return inputs, torch.ones(states[0].shape[:2], dtype=torch.bool)
    inputs["attention_mask"][0, 4:] = 0
    inputs["attention_mask"][2, 6:] = 0
    keep = inputs["attention_mask"].bool().clone()
    keep[:, ::2] = False
    return prepare(model, inputs), keep


@cache
def recording(name: str) -> Recording:
    return record(wrapped(name), padded(name)[0], logits=True)


@cache
def part_maps(name: str) -> PartMaps:
    return PartMaps(wrapped(name), part_bank(name))


@pytest.mark.parametrize("name", ALL)
def test_blocks_run_again_give_the_same_states_bit_for_bit(name):
    found, last = recording(name), wrapped(name).n_layers
    for layer in range(last + 1):
        assert torch.equal(found.run(found.states[layer], layer), found.states[last])
        assert torch.equal(found.run(found.states[0], 0, layer), found.states[layer])


@pytest.mark.parametrize("name", ALL)
def test_a_recording_holds_the_states_and_logits_of_a_plain_pass(name):
    found = recording(name)
    seen = wrapped(name).capture(padded(name)[0], logits=True)
    assert len(found.states) == len(seen.states)
    for layer, h in enumerate(found.states):
        assert torch.equal(h, seen.states[layer])
    assert torch.equal(found.logits, seen.logits)


@pytest.mark.parametrize("name", ALL)
def test_running_again_changes_no_state_that_was_given(name):
    found = recording(name)
    before = [h.clone() for h in found.states]
    found.run(found.states[1], 1)
    assert all(torch.equal(a, b) for a, b in zip(before, found.states, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_recording_and_replacing_leave_no_trace(name):
    transformer, (inputs, keep) = wrapped(name), padded(name)
    before, logits = traces(transformer.model), recording(name).logits
    found = record(transformer, inputs)
    for kinds in (["attn"], ["ffn"], ["norms"], KINDS, []):
        cascade(part_maps(name), found, keep, kinds, 1)
    assert traces(transformer.model) == before
    with torch.no_grad():
        assert torch.equal(transformer.model(**inputs).logits, logits)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["gpt2", "bert", "albert", "mpt"])
def test_an_error_inside_leaves_no_trace_either(name, error):
    before = traces(wrapped(name).model)

    def stop():
        with wrapped(name).edit(part_maps(name).replacing(KINDS, 1)):
            assert traces(wrapped(name).model) != before
            raise error("stop")

    with pytest.raises(error, match="stop"):
        stop()
    assert traces(wrapped(name).model) == before


@pytest.mark.parametrize("name", ALL)
def test_replacing_nothing_is_the_recorded_pass_bit_for_bit(name):
    found, keep = recording(name), padded(name)[1]
    for start in range(wrapped(name).n_layers + 1):
        assert torch.equal(cascade(part_maps(name), found, keep, [], start), found.rows(keep)[3])
    for kind in KINDS:  # and after the last layer there is nothing left to replace
        assert torch.equal(cascade(part_maps(name), found, keep, [kind], 3), found.rows(keep)[3])


@pytest.mark.parametrize("kinds", [("attn",), ("ffn",), ("norms",), KINDS], ids="+".join)
@pytest.mark.parametrize("name", ALL)
def test_a_cascade_is_the_whole_model_run_with_its_parts_replaced(name, kinds):
    """The model runs from its inputs on; blocks up to the start must stay untouched."""
    found, (inputs, keep) = recording(name), padded(name)
    for start in (0, 1, 2):
        with wrapped(name).edit(part_maps(name).replacing(kinds, start)):
            seen = wrapped(name).capture(inputs)
        for layer in range(start + 1):
            assert torch.equal(seen.states[layer], found.states[layer])
        assert gap(seen.states[start + 1], found.states[start + 1]) > 1e-6
        ours = cascade(part_maps(name), found, keep, kinds, start)
        assert gap(ours, seen.states[3][keep]) < 1e-10


@pytest.mark.parametrize("name", ALL)
def test_positions_are_independent_once_attention_is_replaced(name):
    found, keep = recording(name), padded(name)[1]
    own = part_maps(name)
    assert own.is_local == (name not in INNER | set(SEQ_TO_SEQ))
    if not own.is_local:
        return
    for kinds in (("attn",), ("attn", "ffn"), KINDS):
        for start in (0, 2):
            alone = _alone(own, found, keep, kinds, start)
            assert gap(alone, _together(own, found, keep, kinds, start)) < 1e-10


@pytest.mark.parametrize("name", ALL)
def test_all_starts_at_once_equal_one_start_at_a_time(name):
    found, keep, own = recording(name), padded(name)[1], part_maps(name)
    for kinds in (("attn",), ("ffn",), KINDS):
        for starts in ((0, 1, 2), (1,), (0, 2)):
            every = cascades(own, found, keep, kinds, starts)
            for start, rows in zip(starts, every, strict=True):
                assert gap(rows, _together(own, found, keep, kinds, start)) < 1e-10


@pytest.mark.parametrize("name", ALL)
def test_replaced_parts_give_exactly_their_maps(name):
    """At the sites: the output of a replaced part is the map of its input."""
    transformer, inputs, own = wrapped(name), padded(name)[0], part_maps(name)
    for (block, part), linear in own.bank.parts.items():
        sites = [(block, f"{part}.in"), (block, f"{part}.out")]
        kind = part if part in KINDS else "norms"
        with transformer.edit(own.replacing([kind])):
            seen = transformer.capture(inputs, layers=[], sites=sites)
        assert gap(seen.sites[sites[1]], linear(seen.sites[sites[0]])) < 1e-12
