"""The debugger: traces, cells, edits, generation; without a browser."""

import gc
import json
import math
import threading
import weakref
from functools import cache

import pytest
import torch

import layerleap as ll
from contract_bank import bank_of
from families import build
from layerleap.act.debug import debugger as module
from layerleap.act.debug.cells import CellReader
from layerleap.act.debug.debugger import Debugger, Stopped
from layerleap.act.edits import AddNeuron, PatchState, SetNeuron
from layerleap.errors import BadSettings, BadText, LayerleapError
from layerleap.lens.lens import Lens
from layerleap.lens.vocabulary.neurons import Neurons
from layerleap.models.transformer import Transformer
from layerleap.models.weights import feed_forwards, unembedding
from tiny_models import tiny, tokenizer

TEXT = "the cat sat on the mat and then"
FAMILIES = ("llama", "gpt2", "gpt_neox", "gemma2", "bert")


@cache
def debugger(name: str = "llama") -> Debugger:
    return Debugger(tiny(name))


def frames(text=TEXT, name: str = "llama", **options) -> list[dict]:
    return list(debugger(name).trace(text, **options))


def cells(found: list[dict], side: str = "before") -> dict:
    return {
        (cell["layer"], cell["position"]): cell
        for frame in found
        if frame["frame"] == "cells" and frame["side"] == side
        for cell in frame["cells"]
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_a_trace_reads_what_the_lens_reads(name):
    text = "the <mask> sat on the mat" if name == "bert" else TEXT
    found, model = frames(text, name), debugger(name).transformer
    readings = Lens(model).read(text)
    grid = cells(found)
    assert set(grid) == {
        (layer, position)
        for layer in range(model.n_layers + 1)
        for position in range(len(readings.tokens))
    }
    for row in readings.rows():
        cell = grid[row["layer"], row["position"]]
        assert [index for index, _ in cell["top"]] == [one["id"] for one in row["top"]]
        assert cell["top"][0][1] == pytest.approx(row["top"][0]["prob"], rel=1e-4)
        assert cell["agrees"] == row["agrees"]
        assert cell["kl"] == pytest.approx(row["kl"], abs=1e-5)
        assert not cell["changed"]


def test_the_selected_position_comes_first_then_every_fourth_layer():
    found = frames(selected=2)
    assert [frame["frame"] for frame in found[:3]] == ["meta", "cells", "saturation"]
    assert {cell["position"] for cell in found[1]["cells"]} == {2}
    assert len(found[1]["cells"]) == debugger().transformer.n_layers + 1
    assert found[2]["position"] == 2
    assert found[3]["cells"][0]["layer"] == debugger().transformer.n_layers
    assert found[-1]["frame"] == "done"
    assert [token["text"].strip() for token in found[0]["tokens"]] == TEXT.split()


def test_frames_are_plain_json_and_name_every_token_once():
    found = json.loads(json.dumps(frames()))
    names = [index for frame in found if frame["frame"] == "cells" for index in frame["names"]]
    assert len(names) == len(set(names))
    assert {str(index) for cell in cells(found).values() for index, _ in cell["top"]} == set(names)


def test_a_watched_token_is_followed_with_probability_and_rank():
    found = cells(frames(watch=9))
    states = debugger().transformer.capture(TEXT).states
    for (layer, position), cell in found.items():
        logits = debugger().transformer.logits(states[layer][0, position][None])[0].detach()
        probs = logits.softmax(-1)
        assert cell["watch"][0] == pytest.approx(float(probs[9]), rel=1e-4)
        assert cell["watch"][1] == int((probs > probs[9]).sum())


def test_saturation_is_the_first_layer_from_which_the_top_token_stays():
    found = frames()
    grid, last = cells(found), debugger().transformer.n_layers
    for frame in (frame for frame in found if frame["frame"] == "saturation"):
        tops = [grid[layer, frame["position"]]["top"][0][0] for layer in range(last + 1)]
        expected = next(layer for layer in range(last + 1) if set(tops[layer:]) == {tops[-1]})
        assert frame["before"] == expected
        assert frame["after"] is None


def sharpened(debugger, factor):
    """The same model with a larger head, so that its readings are sure of one token."""
    model = tiny("llama", seed=3)
    with torch.no_grad():
        unembedding(model).mul_(factor)
    return Debugger(model)


def test_an_exit_is_offered_only_where_it_gives_the_models_answer_and_is_else_a_warning():
    sure = sharpened(debugger(), 60.0)
    edit = SetNeuron(1, 5, 30.0)
    found = list(sure.trace(TEXT, edits=[edit]))
    last, before = sure.transformer.n_layers, cells(found)
    grids = {"before": before, "after": before | cells(found, "after")}
    seen = set()
    for frame in (frame for frame in found if frame["frame"] == "saturation"):
        for side, grid in grids.items():
            own = [grid[layer, frame["position"]]["top"][0] for layer in range(last + 1)]
            first = next((layer for layer in range(1, last) if own[layer][1] >= 0.9), None)
            stop = frame["exits"][side]
            assert (None if stop is None else stop["layer"]) == first
            if stop is not None:
                tokens = stop["top"]["id"], stop["answer"]["id"]
                assert tokens == (own[first][0], own[last][0])
                assert stop["agrees"] is (own[first][0] == own[last][0])
                seen.add(stop["agrees"])
    assert seen == {True, False}


@pytest.mark.parametrize("name", FAMILIES)
def test_edited_cells_are_those_of_the_edited_model_and_only_where_states_changed(name):
    edit = SetNeuron(2, 5, 30.0, positions=[3])
    found = frames(name=name, edits=[edit])
    model = debugger(name).transformer
    plain = model.capture(TEXT).states
    with model.edit(edit):
        edited = model.capture(TEXT).states
    after, before = cells(found, "after"), cells(found)
    changed = {
        (layer, position)
        for layer in range(model.n_layers + 1)
        for position in range(plain[0].shape[1])
        if not torch.equal(plain[layer][0, position], edited[layer][0, position])
    }
    assert {place for place, cell in after.items() if cell["changed"]} == changed & set(before)
    assert after
    answers = {
        p: int(model.logits(edited[model.n_layers][0, p][None]).argmax())
        for p in range(plain[0].shape[1])
    }
    for (layer, position), cell in after.items():
        assert cell["agrees"] == (cell["top"][0][0] == answers[position])
        if not cell["changed"]:
            assert cell["top"] == before[layer, position]["top"]
            continue
        logits = model.logits(edited[layer][0, position][None])[0].detach()
        assert cell["top"][0][0] == int(logits.argmax())
        old = model.logits(plain[layer][0, position][None])[0].detach().log_softmax(-1)
        divergence = (old.exp() * (old - logits.log_softmax(-1))).sum()
        assert cell["change"] == pytest.approx(float(divergence), rel=1e-3, abs=1e-5)


def test_an_edit_of_generated_positions_does_not_apply_to_a_prompt_and_says_so(empty_cache):
    found = frames(edits=["L2.N5=30@generated"])
    assert found[0]["edits"] == [
        {
            "spec": "L2.N5=30@generated",
            "applied": False,
            "remark": "",
            "sentence": "Set neuron 5 of block 2 to 30 at generated positions",
        }
    ]
    assert not cells(found, "after")


def test_a_bank_is_a_second_lens():
    model = tiny("llama")
    bank = bank_of(model)
    both = Debugger(model, bank=bank)
    assert [lens["name"] for lens in both.describe()["lenses"]] == ["logit", "linear"]
    grid = cells(list(both.trace(TEXT, lens="linear")))
    readings = Lens(model, bank).read(TEXT)
    for row in readings.rows():
        if row["map"] == "linear":
            assert grid[row["layer"], row["position"]]["top"][0][0] == row["top"][0]["id"]
    stage = both.cell(TEXT, block=2, position=1, lens="linear")["stages"][-1]
    assert stage["top"][0]["token"]["id"] == grid[2, 1]["top"][0][0]


def test_a_cell_shows_stages_and_sub_updates_before_and_after_an_edit():
    strongest = Neurons(debugger().transformer).dominant(TEXT, 3).blocks[1].updates[0]
    answer = debugger().cell(TEXT, block=2, position=3, edits=[f"{strongest.name}=off"])
    assert [stage["where"] for stage in answer["stages"]] == ["before", "attention", "ffn"]
    assert answer["updates"][0]["neuron"] == strongest.neuron
    assert answer["updates"][0]["range"] is None
    assert strongest.neuron not in [update["neuron"] for update in answer["after"]["updates"]]
    assert answer["after"]["stages"][1] == answer["stages"][1]
    assert answer["after"]["stages"][2] != answer["stages"][2]
    json.dumps(answer)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "gemma2", "bert", "albert"])
def test_a_cell_of_a_recorded_prompt_is_that_of_a_whole_pass(name):
    """Only the block itself runs, on the recorded or edited state before it."""
    own = Debugger(tiny(name))
    neurons, ids = Neurons(own.transformer), own.encode(TEXT)
    edits = [SetNeuron(2, 5, 3.0, positions=[1]), AddNeuron(3, 7, -2.0)]
    with own.transformer.edit(*edits):
        edited = neurons.at(ids, 3, blocks=[1, 2, 3]).blocks
    plain = neurons.at(ids, 3, blocks=[1, 2, 3]).blocks
    for block in (1, 2, 3):
        answer = own.cell(TEXT, block=block, position=3, edits=edits)
        for got, whole in ((answer, plain[block - 1]), (answer["after"], edited[block - 1])):
            assert got["stages"] == whole.to_dict()["stages"]
            expected = [{**update, "range": None} for update in whole.to_dict()["updates"]]
            assert got["updates"] == expected


def test_generating_with_edits_is_generating_inside_model_edit():
    model = debugger().transformer
    edit = AddNeuron(3, 7, 40.0, positions="generated")
    with model.edit(edit):
        expected = ll.generate(model, TEXT, bank=None, decoder="transformers", max_new_tokens=6).ids
    seen: list[tuple[int, str]] = []
    answer = debugger().generate(
        TEXT,
        edits=["L3.N7+40@generated"],
        max_new_tokens=6,
        on_token=lambda token, piece: seen.append((token.id, piece)),
    )
    plain = debugger().generate(TEXT, max_new_tokens=6)
    assert answer["ids"] == expected == [token for token, _ in seen]
    assert answer["text"] == "".join(piece for _, piece in seen)
    assert plain["ids"] != expected


@pytest.mark.parametrize("decoding", [{"decoder": "transformers"}, {}, {"rule": ll.exits.Never()}])
def test_edits_hold_during_generation_with_any_decoder(decoding):
    model = debugger().transformer
    edits = [SetNeuron(3, 7, 40.0)]
    with model.edit(*edits):
        ids = torch.tensor([Lens(model).encode(TEXT)])
        expected = model.model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    got = ll.generate(model, TEXT, bank=None, edits=edits, max_new_tokens=6, **decoding)
    assert got.ids == expected.tolist()


def test_generation_takes_token_ids_and_never_tokenises_decoded_text():
    model = debugger().transformer
    ids = Lens(model).encode(TEXT)
    assert (
        ll.generate(model, ids, bank=None, max_new_tokens=4).ids
        == ll.generate(model, TEXT, bank=None, max_new_tokens=4).ids
    )
    with pytest.raises(BadText, match="out of range"):
        ll.generate(model, [5, 999], bank=None)
    with pytest.raises(BadSettings, match="chat template"):
        ll.generate(model, ids, bank=None, chat=True)


def test_a_trace_and_a_generation_stop_when_no_longer_wanted():
    stop = threading.Event()
    running = debugger().trace(TEXT, should_stop=stop.is_set)
    next(running), next(running)
    stop.set()
    assert all(frame["frame"] != "done" for frame in running)
    with pytest.raises(Stopped):
        debugger().generate(TEXT, max_new_tokens=5, should_stop=stop.is_set)
    assert frames()[-1]["frame"] == "done"


def test_eight_threads_get_the_answers_of_one():
    texts = [TEXT, "a dog ran under the tree", "the old man saw the moon", "red fish"]
    expected = {text: cells(frames(text, edits=["L2.N5=9"])) for text in texts}
    wrong: list[str] = []

    def ask(text: str) -> None:
        for _ in range(4):
            if cells(frames(text, edits=["L2.N5=9"])) != expected[text]:
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(text,)) for text in texts * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_recorded_prompts_are_kept_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(module, "KEPT_BYTES", 10_000)
    own = Debugger(debugger().transformer)
    for length in range(2, 12):
        list(own.trace([5] * length))
    kept = sum(map(module._n_bytes, own._prompts.values()))
    assert kept <= 10_000
    assert tuple([5] * 11) in own._prompts


def test_masked_models_are_read_at_all_positions_and_their_last_mask_is_selected():
    found = frames("the <mask> sat on the <mask> .", "bert")
    assert found[0]["positions"] == list(range(len(found[0]["tokens"])))
    assert found[0]["tokens"][found[0]["selected"]]["label"] == "<mask>"
    assert debugger("bert").describe()["mask_token"] == "<mask>"
    assert not debugger("bert").describe()["can_generate"]


def test_classifiers_show_their_classes():
    model = Transformer.wrap(build("bert_text"), tokenizer("masked-token"), name="classes")
    own = Debugger(model)
    found = list(own.trace(TEXT))
    names = {
        token["kind"]
        for frame in found
        if frame["frame"] == "cells"
        for token in frame["names"].values()
    }
    assert names == {"class"}
    assert own.outputs(model.output_name(1).lower())[0].id == 1
    with pytest.raises(BadSettings, match="cannot generate"):
        own.generate(TEXT)


def test_a_model_without_neurons_is_traced_and_says_what_is_missing():
    own = Debugger(Transformer.wrap(build("mixtral"), tokenizer(), name="experts"))
    assert cells(list(own.trace(TEXT)))
    assert "mixture of experts" in own.describe()["blocks"][0]["reason"]
    answer = own.cell(TEXT, block=1, position=2)
    assert answer["stages"]
    assert "mixture of experts" in answer["missing"]["neurons"]


def test_typed_words_are_found_as_output_tokens():
    found = debugger().outputs("cat")
    assert [label.text.strip() for label in found] == ["cat"]
    assert debugger().outputs("cat dog") == []


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda d: d.trace(""), BadText, "empty"),
        (lambda d: d.trace("the " * 100), BadText, "at most"),
        (lambda d: d.trace(TEXT, lens="linear"), BadSettings, "expected"),
        (lambda d: d.trace(TEXT, watch=999), BadSettings, "output 999 does not exist"),
        (lambda d: d.trace(TEXT, top=0), BadSettings, "at least 1"),
        (lambda d: d.trace(TEXT, edits=["L2.N999=1"]), BadSettings, "neuron 999 does not exist"),
        (lambda d: d.trace(TEXT, edits=["L9.N1=1"]), BadSettings, "block 9 does not exist"),
        (lambda d: d.trace(TEXT, edits=["nonsense"]), BadSettings, "cannot read the edit"),
        (lambda d: [d.cell(TEXT, block=0, position=1)], BadSettings, "block 0 does not exist"),
        (lambda d: [d.cell(TEXT, block=1, position=99)], BadSettings, "position 99"),
    ],
)
def test_bad_questions_are_refused_in_one_sentence(call, error, words):
    with pytest.raises(error, match=words):
        list(call(debugger()))


def test_models_that_average_positions_or_read_no_text_are_refused():
    for name in ("vit", "t5"):
        with pytest.raises(LayerleapError, match="one text"):
            Debugger(Transformer.wrap(build(name), check=False))


def test_an_effect_lists_every_state_and_stays_in_the_cone():
    model = debugger().transformer
    effect = ll.effect(model, TEXT, [SetNeuron(2, 5, 30.0, positions=[3])])
    table = effect.to_pandas()
    assert len(table) == (model.n_layers + 1) * len(TEXT.split())
    outside = table[(table.layer < 2) | (table.position < 3)]
    assert not outside.changed.any()
    assert (outside.kl == 0).all()
    assert table[(table.layer == 2) & (table.position == 3)].kl.item() > 0
    assert not effect.unused
    assert set(effect.changed) <= {(layer, place) for layer in (2, 3) for place in range(3, 8)}
    assert "states changed" in repr(effect)
    assert effect.to_dict()["edits"] == ["Set neuron 5 of block 2 to 30 at position 3"]
    with pytest.raises(BadSettings, match="no edits"):
        ll.effect(model, TEXT, [])


def test_an_effect_of_other_edits_works_too():
    model = debugger().transformer
    state = model.capture("a dog ran", layers=[2]).states[2][0, -1]
    effect = ll.effect(model, TEXT, [PatchState(2, state, positions=3)])
    assert (2, 3) in effect.changed
    assert effect.edits == ["PatchState(layer=2, positions=[3])"]


def test_an_effect_takes_strings_and_says_which_edits_met_no_position():
    model = debugger().transformer
    effect = ll.effect(model, TEXT, ["L2.N5=30@99", "L2.N6=9@last"])
    assert effect.unused == ["Set neuron 5 of block 2 to 30 at position 99"]
    assert "not applied: Set neuron 5" in repr(effect)
    assert "KL (nats)" in effect._repr_html_()


def test_cells_below_an_edit_are_compared_with_the_edited_answer():
    """Their state is the same, but the answer that they agree with, or not, is another one."""
    model = debugger().transformer
    edits = [SetNeuron(3, 5, 200.0, positions="last")]
    found = frames(edits=edits)
    after = cells(found, "after")
    last = len(TEXT.split()) - 1
    assert {layer for layer, position in after if position == last} == set(range(4))
    with model.edit(*edits):
        answer = model.model(torch.tensor([Lens(model).encode(TEXT)])).logits[0, -1].detach()
    for layer in range(3):
        cell = after[layer, last]
        assert not cell["changed"]
        assert cell["agrees"] == (cell["top"][0][0] == int(answer.argmax()))
        state = model.capture(TEXT, layers=[layer]).states[layer][0, -1:]
        reading = model.logits(state)[0].detach().log_softmax(-1)
        goal = answer.log_softmax(-1)
        assert cell["kl"] == pytest.approx(float((goal.exp() * (goal - reading)).sum()), rel=1e-3)


def test_followed_tokens_have_a_probability_and_rank_in_every_cell():
    plain, both = cells(frames(watch=9)), cells(frames(follow=[9, 12]))
    for place, cell in both.items():
        assert cell["follow"][9] == plain[place]["watch"]
        assert set(cell["follow"]) == {9, 12}
    with pytest.raises(BadSettings, match="output 999"):
        frames(follow=[999])


def test_equal_logits_have_ranks_in_the_order_of_their_ids():
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    norm = logits.logsumexp(-1)
    ranks = [CellReader._followed(logits, norm, torch.tensor([i]))[0][1] for i in range(4)]
    assert ranks == [2, 0, 1, 3]


def test_a_prompt_recorded_inside_an_edit_is_recorded_without_it():
    own = Debugger(debugger().transformer)
    with own.transformer.edit(SetNeuron(2, 5, 30.0)):
        inside = cells(list(own.trace(TEXT)))
    assert inside == cells(list(own.trace(TEXT))) == cells(frames())


def test_numbers_that_the_dtype_cannot_hold_are_refused():
    for spec in ("L2.N5=1e39", "L2.N5*1e300"):
        with pytest.raises(BadSettings, match="largest number of this model's dtype"):
            frames(edits=[spec])
    with pytest.raises(BadSettings, match="finite number"):
        SetNeuron(2, 5, float("nan"))
    with pytest.raises(BadSettings, match="expected one or more"):
        SetNeuron(2, 5, 1.0, positions=[10**30])


def test_half_precision_with_a_norm_after_the_ffn_has_finite_shares():
    model = build("gemma2").half()
    for layer in model.model.layers:
        layer.post_feedforward_layernorm.weight.data += 40
    found = ll.neurons(Transformer.wrap(model, tokenizer(), check=False)).dominant(TEXT, top=40)
    for block in found:
        assert block.shown_share + block.bias_share == pytest.approx(1, abs=0.02)
        assert all(math.isfinite(one.score) for update in block.updates for one in update.promotes)


def test_vectors_of_masked_models_go_through_all_matrices_of_the_head():
    """E v alone says next to nothing there: what a neuron writes passes the transform first."""
    model = tiny("bert")
    head = model.model.cls.predictions
    expected = head.decoder.weight @ head.transform.dense.weight
    torch.testing.assert_close(unembedding(model), expected.detach())
    generator = torch.Generator().manual_seed(3)
    state = torch.randn(1, model.d_model, generator=generator)
    vectors = torch.randn(20, model.d_model, generator=generator)
    with torch.no_grad():
        change = model.logits(state + 1e-2 * vectors) - model.logits(state)
        read, plain = vectors @ unembedding(model).T, vectors @ head.decoder.weight.T
    agreement = [
        float(torch.corrcoef(torch.stack([change.flatten(), one.flatten()]))[0, 1])
        for one in (read, plain)
    ]
    assert agreement[0] > 0.5 > abs(agreement[1])


def test_a_refused_model_is_not_kept_alive_by_its_reason():
    model = Transformer.wrap(build("mixtral"), check=False)
    assert "mixture of experts" in str(feed_forwards(model)[1])
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_dominant_neurons_of_classifiers_and_masked_models_are_read_where_the_head_reads():
    classes = Transformer.wrap(build("bert_text"), tokenizer("masked-token"), name="classes")
    assert ll.neurons(classes).dominant(TEXT).position == 0
    masked = ll.neurons(tiny("bert")).dominant("the <mask> sat on")
    assert masked.tokens[masked.position].label == "<mask>"


@pytest.mark.parametrize(
    "options",
    [
        {"position": "last"},
        {"position": 99},
        {"watch": "a"},
        {"watch": 999},
        {"blocks": 3},
        {"top": "a"},
    ],
)
def test_bad_questions_about_neurons_are_refused_in_one_sentence(options):
    with pytest.raises(BadSettings):
        ll.neurons(debugger().transformer).dominant(TEXT, **options)


def test_dominant_neurons_show_themselves():
    found = ll.neurons(debugger().transformer).dominant(TEXT, top=3)
    assert len(found.to_pandas()) == 3 * debugger().transformer.n_layers
    page = found._repr_html_()
    assert found.blocks[0].updates[0].name in page
    assert "<script" not in page
    vector = ll.neurons(debugger().transformer).read(2, 5, top=4)
    scores = [one.score for one in vector.promotes]
    assert scores == sorted(scores, reverse=True)
    assert len(vector.suppresses) == 4
    with pytest.raises(BadSettings, match="neuron 40 does not exist"):
        ll.neurons(debugger().transformer).read(2, 40)
