import math
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from families import build
from layerleap.errors import BadArtifact, BadSettings, BadText, NotFinite, WrongModel
from layerleap.lens.lens import Lens
from layerleap.lens.metrics import Reference
from layerleap.maps import tune as tune_module
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.fit import solve_bank
from layerleap.maps.linear import LinearMap
from layerleap.maps.map_settings import Tuning
from layerleap.maps.translator import Translator, kl_gradient, translators
from layerleap.maps.tune import batch, summary, tune_maps
from layerleap.models.transformer import Transformer
from layerleap.stats.collect import collect, finish
from layerleap.stats.saved_states import SavedStates, StateFile
from layerleap.stream.examples import Sampling
from tiny_models import sentences, tiny, tokenizer

FAST = Tuning(max_rows=1920, rows_per_step=64, lr=1e-2, check_every=10)
SAMPLING = Sampling(positions="all")


@cache
def model(name: str = "llama"):
    return tiny(name)


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> SimpleNamespace:
    """A bank, rows to train on and rows held out, all of one tiny model."""
    return make(model(), tmp_path_factory.mktemp("rows"))


def make(transformer, folder: Path) -> SimpleNamespace:
    stats = collect(transformer, sentences(150), SAMPLING, save_states=folder / "rows")
    rows, held_out = StateFile(folder / "rows").open().split(0.2)
    return SimpleNamespace(bank=solve_bank(stats), rows=rows, held_out=held_out, stats=stats)


def run(case, tuning: Tuning = FAST, **options):
    return tune_maps(model(), case.bank, case.rows, case.held_out, tuning, **options)


def kl_of(lens: Lens, rows: SavedStates, layer: int) -> float:
    states = rows.states(slice(None))
    reference = Reference(lens.transformer.logits(states[:, -1]))
    return reference.compare(lens.logits(states[:, layer], layer)).kl.mean().item()


def without_seconds(record: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in record]


def assert_same_maps(ours: ShortcutBank, theirs: ShortcutBank) -> None:
    assert ours.maps.keys() == theirs.maps.keys()
    for pair, actual in ours.maps.items():
        left, right = actual.tensors(), theirs.maps[pair].tensors()
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("start", ["linear", "logit"])
def test_training_gets_closer_to_the_model_than_the_closed_form_on_rows_held_out(case, start):
    bank, record = run(case, Tuning(max_rows=9600, rows_per_step=64, lr=1e-2, start=start))
    assert {row["start"] for row in record} == {"linear", start}
    for layer in range(model().n_layers):
        closed = kl_of(case.bank.lens(model()), case.held_out, layer)
        actual = kl_of(bank.lens(model()), case.held_out, layer)
        assert actual < 0.97 * closed
        row = next(row for row in summary(record) if row["layer"] == layer)
        assert math.isclose(row["kl_tuned"], actual, rel_tol=1e-3)
        assert math.isclose(row["kl_closed"], closed, rel_tol=1e-3)
        assert row["improved"]
        assert 0 < row["rows_needed"] <= 9600
        assert row["seconds_needed"] > 0


def test_training_begins_exactly_at_its_start_map(case):
    last = model().n_layers
    states = case.held_out.states(slice(None))
    for start in case.bank.maps.values():
        (one,) = translators([start], case.rows)
        assert torch.equal(one(states[:, start.src]), start(states[:, start.src]))
        assert one.result() is start
    _, record = run(case, layers=[1])
    first = record[0]
    assert (first["layer"], first["rows_seen"], first["seconds"]) == (1, 0, 0.0)
    assert math.isclose(first["kl"], kl_of(case.bank.lens(model()), case.held_out, 1), rel_tol=1e-4)
    assert case.bank.maps[1, last].bias is None


def test_started_at_the_identity_the_first_reading_is_the_logit_lens(case):
    _, record = run(case, Tuning(max_rows=64, rows_per_step=64, start="logit"))
    for row in record:
        if row["rows_seen"] == 0:
            lens = Lens(model(), case.bank if row["start"] == "linear" else None)
            assert math.isclose(row["kl"], kl_of(lens, case.held_out, row["layer"]), rel_tol=1e-4)
    assert [row["start"] for row in record[:6]] == ["linear"] * 3 + ["logit"] * 3


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "bert"])
def test_the_gradient_is_that_of_kl_through_the_whole_tail(name):
    transformer = tiny(name)
    transformer.model.double()
    generator = torch.Generator().manual_seed(0)
    y, last = (
        torch.randn(5, transformer.d_model, dtype=torch.float64, generator=generator)
        for _ in range(2)
    )
    p = transformer.logits(last).softmax(-1).detach()
    expected = y.clone().requires_grad_()
    q = transformer.logits(expected).log_softmax(-1)
    torch.nn.functional.kl_div(q, p, reduction="batchmean").backward()
    transformer.model.zero_grad(set_to_none=True)
    actual = kl_gradient(transformer, y, p)
    torch.testing.assert_close(actual, expected.grad, rtol=1e-9, atol=1e-12)
    assert all(parameter.grad is None for parameter in transformer.model.parameters())


def test_the_gradient_of_the_delta_is_that_of_autograd(case):
    (one,) = translators([case.bank.maps[1, 3]], case.rows)
    x = case.rows.states(slice(0, 9))[:, 1]
    at_last = torch.randn(9, model().d_model, generator=torch.Generator().manual_seed(0))
    white = one.whitened(x)
    delta = one.delta.clone().requires_grad_()
    (one.start(x) + (white @ delta) * one.scale).backward(at_last)
    torch.testing.assert_close(one.gradient(white, at_last), delta.grad)


def test_updates_are_those_of_adam(case):
    (one,) = translators([case.bank.maps[1, 3]], case.rows)
    theirs = torch.zeros_like(one.delta, requires_grad=True)
    adam = torch.optim.Adam([theirs], lr=1e-3, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 6):
        theirs.grad = torch.randn(theirs.shape, generator=generator)
        adam.step()
        one.update(theirs.grad, 1e-3, step)
    torch.testing.assert_close(one.delta, theirs.detach())


def test_the_saved_map_does_what_the_trained_one_did(case):
    start = LinearMap(1, 3, weight=case.bank.maps[1, 3].weight, bias=torch.linspace(-1, 1, 24))
    (one,) = translators([start], case.rows)
    one.delta.normal_(generator=torch.Generator().manual_seed(0)).mul_(0.1)
    one.keep_best()
    x = case.held_out.states(slice(None))[:, 1]
    torch.testing.assert_close(one.result()(x), one(x), rtol=1e-4, atol=1e-5)
    assert set(one.result().tensors()) == {"weight", "bias"}


def test_a_map_of_low_rank_can_be_the_start(case):
    low = solve_bank(case.stats, rank=2)
    bank, record = tune_maps(model(), low, case.rows, case.held_out, FAST, layers=[2])
    assert record[-1]["kl"] < record[0]["kl"]
    assert set(bank.maps[2, 3].tensors()) == {"weight", "bias"}
    assert set(bank.maps[1, 3].tensors()) == {"left", "right"}


def test_scaling_does_not_depend_on_how_large_the_states_are(case):
    start = case.bank.maps[1, 3]
    (one,) = translators([start], case.rows)
    records = case.rows._records.copy()
    records["states"] *= 8.0  # a power of two: exact
    (other,) = translators([start], SavedStates(records, case.rows._chosen, case.rows.model))
    torch.testing.assert_close(other.scale, one.scale)
    assert torch.equal(other.size, 8 * one.size)


class Faked(tune_module._Run):
    """A run whose held-out rows say what a test wants."""

    says: tuple[float, ...] = ()

    def _measure(self, maps):
        value = self.says[min(self.training.step // FAST.check_every, len(self.says) - 1)]
        return dict.fromkeys(maps, (value, 0.5))


@pytest.fixture
def fake(monkeypatch):
    def says(*values):
        monkeypatch.setattr(Faked, "says", values)
        monkeypatch.setattr(tune_module, "_Run", Faked)

    return says


def test_a_layer_stops_after_its_patience_and_keeps_its_best_state(case, fake):
    long = Tuning(max_rows=64 * 100, rows_per_step=64, lr=1e-2, check_every=10, patience=2)
    fake(3.0, 2.0, 2.5, 2.0, 1.0)
    stopped, record = run(case, long, layers=[1])
    assert [row["kl"] for row in record] == [3.0, 2.0, 2.5, 2.0]
    assert [row["best"] for row in record] == [True, True, False, False]
    assert stopped.settings["tuning"]["rows_seen"] == [30 * 64]
    best = {}
    original = Translator.keep_best

    def keep_best(self):
        original(self)
        best["map"] = self.result()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Translator, "keep_best", keep_best)
        run(case, long, layers=[1])
    assert torch.equal(stopped.maps[1, 3].weight, best["map"].weight)


def test_a_layer_that_never_improves_keeps_its_start_map_and_says_so(case, fake):
    fake(1.0, 2.0, 3.0)
    bank, record = run(case)
    assert_same_maps(bank, case.bank)
    assert bank.fits == case.bank.fits
    assert bank.settings["tuning"]["never_improved"] == [0, 1, 2]
    assert not any(row["improved"] for row in summary(record))
    assert all(row["rows_needed"] is None for row in summary(record))
    identity, _ = run(case, Tuning(max_rows=640, rows_per_step=64, start="logit"))
    assert torch.equal(identity.maps[0, 3].weight, torch.eye(model().d_model))


def test_a_layer_that_runs_out_of_numbers_stops_at_once(case, fake):
    fake(1.0, math.nan, 0.5)
    bank, record = run(case, layers=[0])
    assert [row["kl"] for row in record] == [1.0, None]
    assert torch.equal(bank.maps[0, 3].weight, case.bank.maps[0, 3].weight)


def test_a_start_map_with_logits_that_are_not_finite_is_refused(case, fake):
    fake(math.nan)
    with pytest.raises(NotFinite, match="start map of layer 0"):
        run(case)


class Stop(Exception):
    """The power fails."""


def stop_after(steps: int):
    def progress(phase, done, total, unit="texts"):
        if done >= steps * 64 * 3:
            raise Stop

    return progress


@pytest.mark.parametrize("start", ["linear", "logit"])
@pytest.mark.parametrize("steps", [1, 10, 17])
def test_an_interrupted_training_ends_with_bit_identical_maps(
    case, tmp_path, monkeypatch, steps, start
):
    tuning = Tuning(max_rows=1920, rows_per_step=64, lr=1e-2, check_every=10, start=start)
    whole, record = run(case, tuning)
    path = tmp_path / "work.safetensors"
    monkeypatch.setattr("layerleap.stats.fit_statistics.pause_after", lambda _: -1.0)
    with pytest.raises(Stop):
        run(case, tuning, checkpoint=path, progress=stop_after(steps + 1))
    done = []
    original = tune_module._Run._step

    def step(self):
        done.append(self.training.step)
        original(self)

    monkeypatch.setattr(tune_module._Run, "_step", step)
    resumed, again = run(case, tuning, checkpoint=path)
    assert done == list(range(steps, 30))
    assert_same_maps(resumed, whole)
    assert without_seconds(again) == without_seconds(record)
    assert all(b["seconds"] > 0 for b in again if b["rows_seen"])


def test_a_finished_training_stays_in_its_checkpoint_until_its_bank_is_safe(
    case, tmp_path, monkeypatch
):
    path = tmp_path / "work.safetensors"
    whole, record = run(case, checkpoint=path)
    monkeypatch.setattr(tune_module._Run, "_step", None)  # nothing is left to do
    monkeypatch.setattr(tune_module._Run, "_check", None)
    again, same = run(case, checkpoint=path)
    assert_same_maps(again, whole)
    assert same == record
    finish(path)
    assert not path.exists()


def test_checkpoints_are_not_written_after_every_step(case, tmp_path, monkeypatch):
    saves = []
    original = tune_module.Training.save
    monkeypatch.setattr(
        tune_module.Training, "save", lambda *args: (saves.append(1), original(*args))[1]
    )
    run(case, checkpoint=tmp_path / "work.safetensors")
    assert len(saves) == 1


def test_a_checkpoint_of_another_training_is_refused_by_name(case, tmp_path):
    path = tmp_path / "work.safetensors"
    run(case, checkpoint=path)
    other = Tuning(max_rows=1920, rows_per_step=64, lr=2e-2, check_every=10)
    with pytest.raises(WrongModel, match="tuning"):
        run(case, other, checkpoint=path)
    with pytest.raises(WrongModel, match=r"states, held_out"):
        tune_maps(model(), case.bank, case.held_out, case.rows, FAST, checkpoint=path)
    ridged = solve_bank(case.stats, ridge=0.1)
    with pytest.raises(WrongModel, match="maps"):
        tune_maps(model(), ridged, case.rows, case.held_out, FAST, checkpoint=path)


def test_a_damaged_checkpoint_is_named(case, tmp_path):
    path = tmp_path / "work.safetensors"
    run(case, checkpoint=path)
    whole = bytearray(path.read_bytes())
    path.write_bytes(whole[:-100])
    with pytest.raises(BadArtifact, match="truncated"):
        run(case, checkpoint=path)
    whole[-5] ^= 1
    path.write_bytes(whole)
    with pytest.raises(BadArtifact, match="was changed"):
        run(case, checkpoint=path)
    case.stats.save(path)
    with pytest.raises(BadArtifact, match="expected format 3 of a tuning file"):
        run(case, checkpoint=path)


def test_a_tuned_bank_is_saved_and_loaded_bit_equal_and_says_what_it_is(case, tmp_path):
    bank, record = run(case)
    bank.save_pretrained(tmp_path / "bank")
    loaded = ShortcutBank.from_pretrained(tmp_path / "bank")
    assert_same_maps(loaded, bank)
    lens = loaded.lens(model())
    assert lens.name == "tuned"
    assert Lens(model()).name == "logit"
    assert case.bank.lens(model()).name == "linear"
    assert set(lens.read("the cat sat").tracks) == {"logit", "tuned"}
    assert "tuned lens" in lens.read("the cat sat")._repr_html_()
    assert "tuned" in loaded.source
    assert loaded.settings["tuning"]["start"] == "linear"
    assert loaded.settings["tuning"]["rows_seen"] == [1920] * 3
    assert loaded.data["rows_tuned_on"] == len(case.rows)
    best = {row["layer"]: row["kl"] for row in record if row["best"]}
    assert {row["layer"]: row["kl"] for row in loaded.quality} == best
    assert not loaded.fits  # they were of other maps
    assert "- tuning:" in loaded.card()


def test_layers_that_are_not_trained_stay_as_they_are(case):
    bank, record = run(case, layers=[2])
    assert {row["layer"] for row in record} == {2}
    for layer in (0, 1):
        assert bank.maps[layer, 3] is case.bank.maps[layer, 3]
        assert bank.fits[layer, 3] == case.bank.fits[layer, 3]
    assert not torch.equal(bank.maps[2, 3].weight, case.bank.maps[2, 3].weight)


def test_progress_is_reported_in_rows_times_layers(case):
    reported = []
    run(case, progress=lambda *news: reported.append(news))
    assert reported[0] == ("tuning", 64 * 3, 1920 * 3, "rows x layers")
    assert reported[-1] == ("tuning", 1920 * 3, 1920 * 3, "rows x layers")


def test_batches_take_every_row_once_before_any_comes_again():
    rows = torch.cat([batch(10, 4, step, seed=0) for step in range(5)])
    assert sorted(rows[:10].tolist()) == sorted(rows[10:].tolist()) == list(range(10))
    assert rows[:10].tolist() != rows[10:].tolist()
    assert torch.equal(batch(10, 4, 2, seed=0), rows[8:12])
    assert not torch.equal(batch(10, 4, 0, seed=1), rows[:4])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lr": 0.0}, "lr 0"),
        ({"lr": math.nan}, "lr nan"),
        ({"rows_per_step": 0}, "rows_per_step 0"),
        ({"max_rows": 100}, "less than one step"),
        ({"check_every": 0}, "check_every 0"),
        ({"patience": 0}, "patience 0"),
        ({"start": "zero"}, "start is 'zero'"),
    ],
)
def test_settings_without_meaning_are_refused(change, named):
    with pytest.raises(BadSettings, match=named):
        Tuning(**change)


def test_missing_rows_are_refused(case):
    none = SavedStates(case.rows._records, np.arange(0), case.rows.model)
    with pytest.raises(BadText, match="no rows to train on"):
        tune_maps(model(), case.bank, none, case.held_out, FAST)
    with pytest.raises(BadText, match="no rows to hold out"):
        tune_maps(model(), case.bank, case.rows, none, FAST)


def test_a_bank_or_rows_of_another_model_are_refused(case, tmp_path):
    other = tiny("llama", seed=1)
    theirs = make(other, tmp_path)
    with pytest.raises(WrongModel, match="this bank belongs to"):
        tune_maps(model(), theirs.bank, case.rows, case.held_out, FAST)
    with pytest.raises(WrongModel, match="these states were saved from"):
        tune_maps(model(), case.bank, case.rows, theirs.held_out, FAST)


@pytest.mark.parametrize("layers", [[3], [-1], [], [0, 7]])
def test_layers_without_a_map_are_refused(case, layers):
    with pytest.raises(BadSettings, match="maps to the last layer from"):
        run(case, layers=layers)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "bert"])
def test_other_families_can_be_tuned(name, tmp_path):
    transformer = tiny(name)
    sampling = Sampling(positions="one" if name == "bert" else "all")
    stats = collect(transformer, sentences(200), sampling, save_states=tmp_path / "rows")
    rows, held_out = StateFile(tmp_path / "rows").open().split(0.25)
    # From the identity: a random BERT is so nearly linear that its closed form leaves no room.
    tuning = Tuning(max_rows=1920, rows_per_step=64, lr=1e-2, check_every=10, start="logit")
    _, record = tune_maps(transformer, solve_bank(stats), rows, held_out, tuning)
    for layer in range(transformer.n_layers):
        own = [r for r in record if (r["layer"], r["start"]) == (layer, "logit")]
        assert own[-1]["kl"] < own[0]["kl"]


def test_a_model_of_few_bits_is_tuned_in_its_own_dtype(tmp_path):
    narrow = build("llama").to(torch.bfloat16)
    transformer = Transformer.wrap(narrow, tokenizer(), name="tiny-narrow")
    actual = make(transformer, tmp_path)
    bank, record = tune_maps(transformer, actual.bank, actual.rows, actual.held_out, FAST)
    assert bank.maps[0, 3].weight.dtype == torch.float32
    assert all(row["kl_tuned"] < row["kl_closed"] for row in summary(record))


def test_a_bank_in_which_several_layers_stayed_at_the_identity_can_be_saved(case, tmp_path):
    wild = Tuning(start="logit", lr=1e3, max_rows=320, rows_per_step=32, check_every=1)
    actual, _ = run(case, wild)
    assert len(actual.settings["tuning"]["never_improved"]) > 1
    loaded = ShortcutBank.from_pretrained(actual.save_pretrained(tmp_path / "bank"))
    assert_same_maps(loaded, actual)
