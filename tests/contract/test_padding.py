"""Left, right or no padding, alone or in a batch: the same states in every family."""

import pytest
import torch

from families import ALL, CLASS, CLASSIFIERS, POOLED_IMAGE, build
from layerleap.errors import BadSettings
from layerleap.models.discovery.compare import row_gap as gap
from layerleap.models.discovery.probe import probe_ids
from layerleap.models.hooks.recording import record
from layerleap.models.inputs import right_padded
from layerleap.models.transformer import Transformer

LENGTHS = (3, 6, 9)
TEXTS = [name for name in {**ALL, **CLASSIFIERS} if name not in {**CLASS, **POOLED_IMAGE}]
# Families that compute attention or biases in float32 whatever their dtype. Gemma 2 gives NaN for
# padding beyond its window in float64, where its masked scores overflow float32; it is run in that.
ROUGH = {"mpt": 1e-6, "gptj": 1e-6, "gpt_neo": 1e-6, "gemma2": 1e-4}


def wrap(name: str) -> Transformer:
    model = build(name)
    if hasattr(model.config, "_experts_implementation"):
        model.set_experts_implementation("eager")
    return Transformer.wrap(model if name == "gemma2" else model.double(), check=False)


def batch_of(texts, side):
    """Inputs of a batch padded on one side, and where each text begins."""
    width = max(map(len, texts))
    ids, mask = torch.zeros(2, len(texts), width, dtype=torch.long)
    starts = []
    for row, text in enumerate(texts):
        start = width - len(text) if side == "left" else 0
        ids[row, start : start + len(text)] = text
        mask[row, start : start + len(text)] = 1
        starts.append(start)
    return ids, mask, starts


def inputs_of(transformer, ids, mask):
    if not transformer.model.config.is_encoder_decoder:
        return {"input_ids": ids, "attention_mask": mask}
    inputs = {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    model = transformer.model
    if model.main_input_name == "input_features":
        features = torch.randn(1, 8, 40, generator=torch.Generator().manual_seed(1))
        return {**inputs, "input_features": features.expand(len(ids), -1, -1)}
    source = probe_ids(model, 1, 5, seed=9).expand(len(ids), -1)
    return {**inputs, "input_ids": source}


@pytest.mark.parametrize("name", TEXTS)
def test_padding_on_either_side_changes_no_state_at_any_length(name):
    transformer = wrap(name)
    texts = [probe_ids(transformer.model, 1, n, seed=n)[0] for n in LENGTHS]
    alone = [
        transformer.capture(
            inputs_of(transformer, text[None], torch.ones_like(text[None])), logits=True
        )
        for text in texts
    ]
    allowed = ROUGH.get(name, 1e-9)
    for side in ("left", "right"):
        ids, mask, starts = batch_of(texts, side)
        inputs = inputs_of(transformer, ids, mask)
        together = transformer.capture(inputs, logits=True)
        kept = transformer.capture(inputs, keep=mask.bool())
        for row, (text, start) in enumerate(zip(texts, starts, strict=True)):
            stop, before = start + len(text), sum(map(len, texts[:row]))
            for layer, h in alone[row].states.items():
                assert gap(together.states[layer][row, start:stop], h[0]) < allowed
                rows = kept.states[layer][before : before + len(text)]
                assert torch.equal(rows, together.states[layer][row, start:stop])
            if together.logits.dim() == 3:
                assert gap(together.logits[row, start:stop], alone[row].logits[0]) < allowed
            else:
                assert gap(together.logits[row], alone[row].logits[0]) < allowed


@pytest.mark.parametrize("name", ["gpt2", "opt", "bloom", "llama", "bert", "bart"])
def test_a_recorded_pass_of_left_padded_texts_runs_again_to_the_same_states(name):
    transformer = wrap(name)
    texts = [probe_ids(transformer.model, 1, n, seed=n)[0] for n in LENGTHS]
    ids, mask, _ = batch_of(texts, "left")
    recording = record(transformer, inputs_of(transformer, ids, mask), logits=True)
    again = recording.run(recording.states[1], 1)
    real = mask.bool()
    assert torch.equal(again[real], recording.states[-1][real])
    captured = transformer.capture(inputs_of(transformer, ids, mask), logits=True)
    assert torch.equal(recording.logits, captured.logits)


def test_positions_that_the_caller_gives_and_gaps_inside_a_text_stay_as_they_are():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [1, 0, 1, 1], [0, 1, 0, 1]])
    ids = torch.arange(16).reshape(4, 4)
    arranged, order = right_padded({"input_ids": ids, "attention_mask": mask})
    assert arranged["input_ids"].tolist() == [[2, 3, 0, 1], *ids[1:].tolist()]
    assert arranged["attention_mask"][0].tolist() == [1, 1, 0, 0]
    assert torch.equal(order.restore(arranged["input_ids"]), ids)
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": ids % 4}
    unchanged, order = right_padded(given)
    assert order is None
    assert unchanged["input_ids"] is ids


def test_natural_inputs_are_read_and_others_refused_in_words():
    transformer = wrap("gpt2")
    ids = probe_ids(transformer.model, 2, 5, seed=1)
    by_name = transformer.capture({"input_ids": ids}).states[3]
    assert torch.equal(transformer.capture(ids).states[3], by_name)
    assert torch.equal(transformer.capture(ids.tolist()).states[3], by_name)
    assert gap(transformer.capture(ids[0]).states[3], by_name[:1]) < 1e-9
    assert gap(transformer.capture(ids[0].tolist()).states[3], by_name[:1]) < 1e-9
    lists = transformer.capture({"input_ids": [[5, 6, 7], [8, 9]]})  # as tokenizers return them
    assert gap(lists.states[3][1, :2], transformer.capture([8, 9]).states[3][0]) < 1e-9
    for wrong in (None, 3, [], torch.rand(2, 5), torch.zeros(1, 2, 3, dtype=torch.long)):
        with pytest.raises(BadSettings, match="expected"):
            transformer.capture(wrong)
    for layers in (["3"], "3", 3, [1.0]):
        with pytest.raises(BadSettings, match="layer"):
            transformer.capture(ids, layers=layers)
    with pytest.raises(BadSettings, match=r"cannot run on input_ids.*reads a pair"):
        wrap("t5").capture({"input_ids": ids})
    with pytest.raises(BadSettings, match="IndexError"):
        transformer.capture({"input_ids": torch.tensor([[61]])})
