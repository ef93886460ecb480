"""Edits as strings and sentences."""

import pytest
from hypothesis import given, strategies as st

import layerleap as ll
from layerleap.act.edits import (
    AddNeuron,
    AddVector,
    MeanHead,
    PatchState,
    ScaleHead,
    ScaleNeuron,
    ScaleSite,
    SetHead,
    SetNeuron,
    ZeroHead,
    ZeroNeuron,
    ZeroSite,
    edit_sentence,
    edit_spec,
    parse_edit,
)
from layerleap.act.edits.spec import describe
from layerleap.errors import BadSettings
from tiny_models import sentences, tiny

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
POSITIONS = st.one_of(
    st.sampled_from(["all", "last", "generated"]),
    st.lists(st.integers(0, 99), min_size=1, max_size=4).map(tuple),
)
PLACES = st.tuples(st.integers(1, 99), st.integers(0, 9999))


@given(PLACES, NUMBERS, POSITIONS, st.sampled_from([SetNeuron, ScaleNeuron, AddNeuron, None]))
def test_every_edit_of_a_neuron_is_read_back_as_it_was(place, number, positions, kind):
    edit = (
        ZeroNeuron(*place, positions=positions)
        if kind is None
        else kind(*place, number, positions=positions)
    )
    assert parse_edit(edit_spec(edit)) == edit


@pytest.mark.parametrize(
    ("spec", "edit", "sentence"),
    [
        ("L12.N34=5", SetNeuron(12, 34, 5.0), "Set neuron 34 of block 12 to 5"),
        (
            " l12n34 * -0.5 @last ",
            ScaleNeuron(12, 34, -0.5, positions="last"),
            "Multiply neuron 34 of block 12 by -0.5 at the last position",
        ),
        (
            "L1.N2-3@generated",
            AddNeuron(1, 2, -3.0, positions="generated"),
            "Add -3 to neuron 2 of block 1 at generated positions",
        ),
        (
            "L1.N2=off@0, 3",
            ZeroNeuron(1, 2, positions=(0, 3)),
            "Switch off neuron 2 of block 1 at positions 0, 3",
        ),
        (
            "L1.N2+1e-3@4",
            AddNeuron(1, 2, 1e-3, positions=(4,)),
            "Add 0.001 to neuron 2 of block 1 at position 4",
        ),
        ("L12.H3=0", ZeroHead(12, 3), "Switch off head 3 of block 12"),
        (
            "l12h3 * 2@last",
            ScaleHead(12, 3, 2.0, positions="last"),
            "Multiply head 3 of block 12 by 2 at the last position",
        ),
        ("L12.attn=off", ZeroSite(12, "attn"), "Switch off attn of block 12"),
        ("L12.ffn.in*0.5", ScaleSite(12, "ffn.in", 0.5), "Multiply ffn.in of block 12 by 0.5"),
    ],
)
def test_edits_are_read_and_told_in_words(spec, edit, sentence):
    assert parse_edit(spec) == edit
    assert edit_sentence(edit) == sentence


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "L12",
        "L12.N34",
        "L12.N34=",
        "L12.N34=five",
        "N34=5",
        "L12.N34==5",
        "L12.N34*off",
        "L12.N34=1e999",
        "L12.N34=nan",
        "L12.N34=5@",
        "L-1.N3=5",
        "L1.H2=5",
        "L1.H2+1",
        "L1.attn+1",
        "L1.attn=mean",
        "L1.N2=mean",
        "h15",
        "h15+",
        "h15*2",
    ],
)
def test_what_is_no_edit_is_refused_with_an_example(spec):
    with pytest.raises(BadSettings, match=r"edit"):
        parse_edit(spec)


def test_unknown_positions_are_refused_with_the_choices():
    with pytest.raises(BadSettings, match="expected all, last, generated, or numbers"):
        parse_edit("L1.N2=5@first")


def test_other_edits_have_no_string():
    import torch

    for edit in (
        PatchState(1, torch.zeros(4), positions=0),
        SetHead(1, 2, torch.zeros(4)),
        AddVector(1, torch.ones(4)),
        MeanHead(1, 2, over="the cat"),
    ):
        with pytest.raises(BadSettings, match="not an edit of a neuron"):
            edit_spec(edit)
        assert describe(edit)["spec"] is None


def test_the_mean_of_a_head_has_a_string():
    edit = parse_edit("L12.H3=mean@0")
    assert isinstance(edit, MeanHead)
    assert edit_spec(edit) == "L12.H3=mean@0"
    assert edit_sentence(edit) == "Set head 3 of block 12 to its mean at position 0"


def test_an_edit_outside_the_natural_range_says_by_how_much(empty_cache):
    model = tiny("llama")
    index = ll.index(model, text=sentences(20), n_texts=20, clusters=0, progress=False)
    known = index.range(2, 3)
    assert known is not None
    with model.edit(
        SetNeuron(2, 3, 1e9), SetNeuron(2, 3, known["mean"]), ZeroNeuron(2, 3)
    ) as report:
        pass
    far, inside, off = (applied.remark for applied in report)
    times = (1e9 - known["high"]) / (known["high"] - known["low"])
    assert "1e+09 is outside its natural range" in far
    assert f"by {times:,.1f} times its width" in far
    assert far in str(report)
    assert inside == off == ""
    for edit in (ScaleNeuron(2, 3, 1e6), AddNeuron(2, 3, -1e6)):
        assert "outside its natural range" in edit.remark(model)


def test_without_an_index_nothing_is_known_of_natural_ranges(empty_cache):
    assert SetNeuron(1, 0, 1e9).remark(tiny("llama")) == ""
