"""The task probe: what it says, how it is saved, and what it refuses."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest
import torch

from layerleap.act.exits.calibration import calibrate
from layerleap.act.exits.cost import Cost
from layerleap.act.exits.evidence import Evidence
from layerleap.act.exits.replay import curve, replay, sweep
from layerleap.act.exits.rules import Never, Task, family
from layerleap.errors import BadArtifact, BadSettings, BadText, CannotWrite, NotFinite, WrongModel
from layerleap.lens.lens import Lens
from layerleap.lens.probes.cells import CellSampling, cells_of, task_labels
from layerleap.lens.probes.task import ARRAYS, Softmax, TaskProbe, features
from layerleap.lens.saturation import saturate
from layerleap.lens.scores import score
from layerleap.maps.artifact import config_hash
from layerleap.stats.saved_states import StateFile, StateWriter
from layerleap.stream.examples import Sampling, iter_batches, iter_examples
from made_evidence import made, partial_evidence
from made_saturation import Knowing, ignorant, saturation
from tiny_models import sentences, tiny


@cache
def probe(k: int = 3) -> TaskProbe:
    of = saturation(300, k=k)
    return TaskProbe.fit(of, Knowing(of))


@cache
def model():
    return tiny("llama", num_hidden_layers=6)


def batches(n: int = 150):
    sampling = Sampling(unit="document", positions="every:3")
    examples = iter_examples(model(), sentences(n), sampling, side="both")
    return list(iter_batches(model(), examples, tokens_per_batch=256))


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Saturation, rows and evidence of a small random model: one pass, as a study has it."""
    file = StateFile(tmp_path_factory.mktemp("rows") / "rows", limit=2000)
    writer = StateWriter(file, model(), 0)
    actual = saturate(
        model(),
        {"logit": Lens(model())},
        batches(),
        k=2,
        on_states=lambda states, batch: writer.add(
            [states[layer] for layer in sorted(states)], batch.documents
        ),
    )["logit"]
    writer.finish()
    evidence = Evidence.from_scores(score(model(), {"logit": Lens(model())}, batches()), "logit")
    return actual, file.open(), evidence


def test_a_probe_of_states_that_contain_the_task_finds_it():
    of = saturation(200, seed=5)
    cells = cells_of(of, CellSampling())
    p = probe().probabilities(Knowing(of, loudness=3.0).cells(cells.row, cells.layer))
    assert p.shape == (len(cells), 3)
    torch.testing.assert_close(p.sum(1), torch.ones(len(cells), dtype=torch.float64))
    assert (p.argmax(1) + 1 == cells.task).double().mean() > 0.9


def test_later_is_all_tasks_but_the_first_and_zero_where_nothing_was_learned():
    h = torch.randn(7, 16)
    low = min(probe().layers)
    torch.testing.assert_close(probe().later(h, low), probe().probabilities(h)[:, 1:].sum(1))
    assert (probe().later(h, low - 1) == 0).all()
    assert low > 1


def test_evidence_has_a_column_for_every_layer_in_order():
    states = {layer: torch.randn(3, 16) for layer in (9, 0, 5)}
    actual = probe().evidence(states)
    assert list(actual) == ["task"]
    for column, layer in enumerate((0, 5, 9)):
        assert torch.equal(actual["task"][:, column], probe().later(states[layer], layer))


def test_two_tasks_are_one_log_odds():
    of = saturation(200, k=2)
    actual = TaskProbe.fit(of, Knowing(of))
    assert actual.n_tasks == 2
    assert (actual.weights.coefficients[0] == 0).all()


def test_scaled_states_are_separated_by_direction_alone():
    of = saturation(200)
    actual = TaskProbe.fit(of, Knowing(of), space="unit")
    h = torch.randn(5, 16)
    torch.testing.assert_close(actual.probabilities(h), actual.probabilities(100 * h))
    assert not torch.allclose(probe().probabilities(h), probe().probabilities(100 * h))


def test_a_loaded_probe_is_bit_identical_to_the_saved_one(tmp_path):
    quality = [{"measure": "AUC", "task": 2, "value": 0.75, "chance": 0.5}]
    saved = replace(probe(), quality=tuple(quality))
    saved.save_pretrained(tmp_path / "probe")
    actual = TaskProbe.from_pretrained(tmp_path / "probe")
    h = torch.randn(9, 16)
    assert torch.equal(actual.probabilities(h), saved.probabilities(h))
    assert (actual.layers, actual.space, actual.lens) == (saved.layers, "raw", "logit")
    assert (repr(actual), actual.quality, actual.data) == (repr(saved), saved.quality, saved.data)
    assert sorted(path.name for path in (tmp_path / "probe").iterdir()) == [
        "README.md",
        "probe.json",
        "probe.safetensors",
    ]
    assert "AUC of task 2: 0.750" in (tmp_path / "probe" / "README.md").read_text()


def test_a_probe_gives_the_same_bits_wherever_its_numbers_lie_in_memory():
    """Loaded numbers begin anywhere in memory, and products round differently for it."""
    h, weights = torch.randn(9, 16), probe().weights
    for offset in range(1, 8):
        moved = {}
        for name in ARRAYS:
            value = getattr(weights, name)
            moved[name] = torch.empty(offset + value.numel(), dtype=value.dtype)[offset:]
            moved[name] = moved[name].view(value.shape).copy_(value)
        same = Softmax(**moved)
        assert torch.equal(same.probabilities(h.double()), weights.probabilities(h.double()))


def change(folder, **values):
    config = json.loads((folder / "probe.json").read_text()) | values
    config["content_sha256"] = config_hash(config)
    (folder / "probe.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format": 2}, "format 2; expected format 1"),
        ({"model": {"name": "x"}}, "no fingerprint"),
        ({"layers": [99]}, "does not describe a probe"),
        ({"space": "normed"}, "does not describe a probe"),
        ({"quality": 3}, "does not describe a probe"),
    ],
)
def test_a_damaged_probe_is_refused(tmp_path, values, message):
    probe().save_pretrained(tmp_path / "probe")
    change(tmp_path / "probe", **values)
    with pytest.raises(BadArtifact, match=message):
        TaskProbe.from_pretrained(tmp_path / "probe")


def test_changed_files_and_other_folders_are_refused(tmp_path):
    probe().save_pretrained(tmp_path / "probe")
    path = tmp_path / "probe" / "probe.json"
    path.write_text(path.read_text().replace('"raw"', '"unit"'))
    with pytest.raises(BadArtifact, match="changed after it was saved"):
        TaskProbe.from_pretrained(tmp_path / "probe")
    probe().save_pretrained(tmp_path / "probe")
    (tmp_path / "probe" / "probe.safetensors").write_bytes(b"x")
    with pytest.raises(BadArtifact, match="changed or truncated"):
        TaskProbe.from_pretrained(tmp_path / "probe")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(CannotWrite, match="other files than a probe"):
        probe().save_pretrained(tmp_path / "other")


def test_a_probe_of_another_model_is_refused_on_loading(real, tmp_path):
    of, rows, _ = real
    TaskProbe.fit(of, rows).save_pretrained(tmp_path / "probe")
    actual = TaskProbe.from_pretrained(tmp_path / "probe", model())
    assert actual.model["fingerprint"] == model().identity.fingerprint
    with pytest.raises(WrongModel, match="this probe belongs to tiny-llama"):
        TaskProbe.from_pretrained(tmp_path / "probe", tiny("llama", seed=1, num_hidden_layers=6))
    with pytest.raises(WrongModel, match="6 layers of 24"):
        actual.check_model(tiny("llama"))


def test_states_of_other_rows_are_refused():
    """The released code of the paper labels the wrong tokens without noticing."""
    of = saturation(300)
    with pytest.raises(BadSettings, match="same rows in the same order"):
        TaskProbe.fit(of, Knowing(saturation(299)))
    shifted = replace(of, documents=of.documents.roll(1))
    with pytest.raises(BadSettings, match="same rows in the same order"):
        TaskProbe.fit(shifted, Knowing(of))
    with pytest.raises(BadSettings, match="same rows"):
        made(20).with_probe(probe(), Knowing(of))


def test_broken_numbers_and_settings_are_refused():
    of = saturation(300)

    class Broken(Knowing):
        def cells(self, rows, layers):
            return super().cells(rows, layers) * torch.nan

    with pytest.raises(NotFinite, match="NaN or infinite states"):
        TaskProbe.fit(of, Broken(of))
    with pytest.raises(BadSettings, match="strength"):
        TaskProbe.fit(of, Knowing(of), strength=0)
    with pytest.raises(BadSettings, match="space is 'normed'"):
        replace(probe(), space="normed")
    with pytest.raises(BadSettings, match="width 3"):
        probe().probabilities(torch.zeros(1, 3))
    with pytest.raises(BadSettings, match="NaN or infinite"):
        replace(probe().weights, mean=torch.full((16,), torch.nan))
    with pytest.raises(BadSettings, match="shape"):
        replace(probe().weights, intercepts=torch.zeros(2))


def test_too_few_rows_are_refused_with_the_number_that_is_needed():
    of = saturation(30)
    with pytest.raises(BadText, match="about"):
        TaskProbe.fit(of, ignorant(of))


def test_only_the_chosen_states_are_ever_held():
    of = saturation(500)

    class Counting(Knowing):
        most = 0

        def cells(self, rows, layers):
            self.most = max(self.most, len(rows))
            return super().cells(rows, layers)

    states = Counting(of)
    TaskProbe.fit(of, states, sampling=CellSampling(limit=400))
    assert 0 < states.most <= 400
    states.most = 0
    evidence = made(500, of.n_layers)
    replace(evidence, document=of.documents).with_probe(probe(), states)
    assert 0 < states.most <= 256


def test_the_weights_are_those_of_the_pipeline_of_scikit_learn():
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    for k in (2, 3):
        of = saturation(300, k=k)
        cells = cells_of(of, CellSampling())
        x = features(Knowing(of), cells, "raw")
        theirs = make_pipeline(StandardScaler(), LogisticRegression(C=0.5, max_iter=2000))
        theirs.fit(x.numpy(), cells.task.numpy())
        ours = Softmax.fit(x, cells.task, k, 0.5)
        fresh = torch.randn(40, 16, dtype=torch.float64)
        expected = torch.from_numpy(theirs.predict_proba(fresh.numpy()))
        torch.testing.assert_close(ours.probabilities(fresh), expected)


def test_using_a_saved_probe_needs_no_scikit_learn(tmp_path):
    probe().save_pretrained(tmp_path / "probe")
    code = (
        "import sys, torch\n"
        "from layerleap.lens.probes.task import TaskProbe\n"
        f"TaskProbe.from_pretrained({str(tmp_path / 'probe')!r}).later(torch.zeros(1, 16), 5)\n"
        "print([m for m in ('sklearn', 'scipy.stats') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_on_a_real_pass_labels_states_and_evidence_belong_to_the_same_rows(real):
    of, rows, evidence = real
    assert len(of) == len(rows) == len(evidence) > 300
    assert torch.equal(of.documents, rows.documents)
    assert torch.equal(evidence.document, of.documents)
    # The first rank saturates where the reading agrees from there on.
    s = 6 - evidence.agrees.flip(1).int().cumprod(1).sum(1) + 1
    assert torch.equal(of.layer[:, 0].long(), s)
    actual = TaskProbe.fit(of, rows)
    attached = evidence.with_probe(actual, rows)
    states = rows.states(slice(None))
    for layer in range(7):
        torch.testing.assert_close(
            attached.extra["task"][:, layer], actual.later(states[:, layer], layer)
        )
    assert task_labels(of).shape == attached.extra["task"].shape


def test_replay_sweep_curve_and_calibration_take_the_rule_as_any_other(real):
    of, rows, evidence = real
    actual = TaskProbe.fit(of, rows)
    attached = evidence.with_probe(actual, rows)
    kind = family(Task)
    swept = sweep(kind, attached, n=12)
    for index, knob in enumerate(swept.knobs):
        assert torch.equal(swept.exits(index).layer, replay(kind.at(knob), attached).layer)
    assert swept.exits(0).mean_layer == 6
    boldest = swept.exits(len(swept.knobs) - 1).layer
    assert (boldest == min(actual.layers)).all()  # 0 lets every row go where the probe speaks
    cost = Cost((100.0,) * 6, 500.0, (0.0,) * 7, 24, 10)
    full, bold = curve([Never(), Task(0.0)], attached, cost)
    assert (full["rule"], bold["rule"], bold["knob"]) == ("never", "task", 0.0)
    first = min(actual.layers)
    checks = sum(48.0 for layer in range(1, 6) if layer <= first)
    assert full["flops"] == 6 * 100 + 500
    assert bold["flops"] == pytest.approx(first * 100 + checks + 500)
    assert bold["layers"] == first
    chosen = calibrate(kind, attached, 0.5, method="crc")
    assert chosen.rule is None or chosen.rule.name == "task"


def test_a_live_run_exits_where_the_replay_does(real):
    """Layer by layer the run knows the states so far, and asks the same rule object."""
    of, rows, evidence = real
    actual = TaskProbe.fit(of, rows)
    attached = evidence.with_probe(actual, rows)
    middle = attached.extra["task"][:, list(actual.layers)].double().median().item()
    rule = Task(middle)
    expected = replay(rule, attached).layer
    some = torch.arange(60)
    states = rows.states(some)
    left = torch.full((60,), 6)
    for layer in range(6, 0, -1):
        captured = {upto: states[:, upto] for upto in range(1, layer + 1)}
        known = partial_evidence(
            tuple(captured), torch.zeros(60), torch.zeros(60), extra=actual.evidence(captured)
        )
        left[rule.stops(known)[:, -1]] = layer
    assert torch.equal(left, expected[:60])
    assert len(left.unique()) > 1


def test_without_a_probe_the_rule_says_what_it_needs():
    with pytest.raises(BadSettings, match="needs the extra evidence 'task'"):
        replay(Task(0.5), made(10))
