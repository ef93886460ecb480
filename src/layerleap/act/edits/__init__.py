"""Edits: values that say what to change in a model's forward pass, for `model.edit`.

    with model.edit(ll.edits.ZeroNeuron(block=3, neuron=17)) as report:
        print(ll.generate(model, "The capital of France is"))
    print(report)

PatchState, PatchSite, PatchHead,
PatchNeuron                         what was there in another run (activation patching)
SetNeuron, ScaleNeuron, AddNeuron,
ZeroNeuron                          one FFN coefficient
SetHead, ScaleHead, MeanHead,
ZeroHead                            what one attention head gives
ScaleSite, ZeroSite                 what attention or the FFN of a block adds
AddVector, ProjectOut, ClampAlong   states along a vector or a `Direction` (steering)
TopKNeurons                         all but the largest coefficients of each position set to 0
ReplaceParts                        attention, FFN or norms by linear maps
ReplaceAttention                    the attention function
TopKAttention                       attention to the k highest-scoring keys only
Pages                               its option for decoding with a long cache
ApplyDelta                          parameters, by what was learned

`parse_edit("L12.N34=5@last")` reads an edit from a string; so do "L12.H3=0", "L12.attn*0.5" and
"h15+direction.safetensors*2".
"""

import lazy_loader

# The public names are those of the stub beside this file, each loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
