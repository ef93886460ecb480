"""Edits: values that say what to change in a model's forward pass, for `model.edit`.

    with model.edit(ll.edits.ZeroNeuron(block=3, neuron=17)) as report:
        print(ll.generate(model, "The capital of France is"))
    print(report)

PatchState                          states of the residual stream (activation patching)
SetNeuron, ScaleNeuron, AddNeuron,
ZeroNeuron                          one FFN coefficient
TopKNeurons                         all but the largest coefficients of each position set to 0
ReplaceParts                        attention, FFN or norms by linear maps
ReplaceAttention                    the attention function
TopKAttention                       attention to the k highest-scoring keys only
Pages                               its option for decoding with a long cache
ApplyDelta                          parameters, by what was learned

`parse_edit("L12.N34=5@last")` reads an edit of a neuron from a string.
"""

from layerleap.act.edits.attention import ReplaceAttention
from layerleap.act.edits.delta import ApplyDelta
from layerleap.act.edits.neurons import AddNeuron, ScaleNeuron, SetNeuron, ZeroNeuron
from layerleap.act.edits.patch import PatchState
from layerleap.act.edits.replace import ReplaceParts
from layerleap.act.edits.spec import edit_sentence, edit_spec, parse_edit
from layerleap.act.edits.top_neurons import TopKNeurons
from layerleap.act.edits.topk import TopKAttention
from layerleap.act.topk.pages import Pages
from layerleap.models.hooks.edit import Applied, Edit, EditReport

__all__ = [
    "AddNeuron", "Applied", "ApplyDelta", "Edit", "EditReport", "Pages", "PatchState",
    "ReplaceAttention", "ReplaceParts", "ScaleNeuron", "SetNeuron", "TopKAttention", "TopKNeurons",
    "ZeroNeuron", "edit_sentence", "edit_spec", "parse_edit",
]  # fmt: skip
