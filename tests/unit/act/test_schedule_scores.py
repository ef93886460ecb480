"""Scores of the model when blocks and jumps take turns."""

import pytest
import torch

from layerleap.act.edits.schedule import Schedule, Segment, round_robin, single_jump
from layerleap.act.edits.scores import ScheduleScores, run_schedule
from layerleap.errors import BadSettings, BadText
from layerleap.lens.lens import Lens
from layerleap.lens.scores import score
from layerleap.maps.fit import fit
from layerleap.models.hooks.recording import record
from layerleap.stream.examples import Sampling, iter_batches, iter_examples
from tiny_models import sentences, tiny

DOCUMENTS = sentences(50)


@pytest.fixture(scope="module", params=["llama", "bert", "albert", "gpt_neox"])
def case(request):
    transformer = tiny(request.param)
    bank = fit(transformer, DOCUMENTS, pairs="all")
    examples = iter_examples(transformer, DOCUMENTS, Sampling(), side="held-out")
    return transformer, bank, list(iter_batches(transformer, examples))


def test_running_every_block_is_the_model_bit_for_bit(case):
    transformer, bank, batches = case
    recording = record(transformer, batches[0].inputs)
    whole = single_jump(transformer.n_layers, transformer.n_layers)
    found = run_schedule(whole, recording, bank, batches[0].keep)
    assert torch.equal(found, recording.rows(batches[0].keep)[transformer.n_layers])


def test_jumps_between_blocks_are_taken_at_all_positions(case):
    transformer, bank, batches = case
    last, keep = transformer.n_layers, batches[0].keep
    recording = record(transformer, batches[0].inputs)
    way = Schedule(
        "jump, run, jump", (Segment("jump", 0, 1), Segment("run", 1, 2), Segment("jump", 2, last))
    )
    by_hand = bank[2, last](recording.run(bank[0, 1](recording.states[0]), 1, 2))[keep]
    torch.testing.assert_close(run_schedule(way, recording, bank, keep), by_hand)


def test_a_single_jump_scores_as_the_lens_does(case):
    transformer, bank, batches = case
    last = transformer.n_layers
    jumps = [single_jump(last, blocks) for blocks in range(last)]
    along = ScheduleScores(transformer, bank, {"single jump": jumps})
    scores = score(
        transformer, {"linear": Lens(transformer, bank)}, batches, on_recording=along.add
    )
    wanted = {(row["layer"], row["metric"]): row["value"] for row in scores.table()}
    table = along.table()
    assert {row["kind"] for row in table} == {"single jump"}
    assert len(table) == 5 * last
    for row in table:
        assert row["value"] == pytest.approx(wanted[row["blocks"], row["metric"]], rel=1e-4)


def test_a_schedule_of_another_depth_or_without_its_map_is_refused(case):
    transformer, bank, _ = case
    with pytest.raises(BadSettings, match="leads to layer 12"):
        ScheduleScores(transformer, bank, {"x": [round_robin(12, 1, 1)]})
    final = fit(transformer, DOCUMENTS)
    way = Schedule("x", (Segment("jump", 0, 1), Segment("run", 1, transformer.n_layers)))
    with pytest.raises(BadSettings, match="no map from layer 0 to layer 1"):
        ScheduleScores(transformer, final, {"x": [way]})


def test_without_a_batch_there_is_no_table(case):
    transformer, bank, _ = case
    with pytest.raises(BadText, match="add a recorded batch first"):
        ScheduleScores(transformer, bank, {"x": [single_jump(transformer.n_layers, 1)]}).table()
