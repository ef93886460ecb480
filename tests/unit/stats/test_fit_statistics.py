import os
import signal
import subprocess
import sys
import weakref
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from families import build
from layerleap.errors import BadArtifact, BadSettings, BadText, WrongModel
from layerleap.maps.fit import solve_bank
from layerleap.models.load import load
from layerleap.models.transformer import Transformer
from layerleap.stats import fit_statistics as fit_statistics
from layerleap.stats.collect import collect, finish, merge
from layerleap.stats.fit_statistics import FitStatistics
from layerleap.stats.moments import Moments, save_moments
from layerleap.stream.examples import Sampling
from tiny_models import sentences, tiny, tokenizer

TEXTS = sentences(80)
SETTINGS = {"choose_ridge": True, "tokens_per_batch": 64}


@cache
def model():
    return tiny("llama")


def run(**options) -> FitStatistics:
    return collect(model(), TEXTS, Sampling(unit="document"), **{**SETTINGS, **options})


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch):
    """So that products are taken in the midst of these short runs, with rows left in the buffer."""
    monkeypatch.setattr("layerleap.stats.moments.BUFFER", 10)


@pytest.fixture
def save_always(monkeypatch):
    monkeypatch.setattr(fit_statistics, "pause_after", lambda _: -1.0)


def assert_bit_equal(ours: FitStatistics, theirs: FitStatistics) -> None:
    assert (ours.n_texts, ours.n_batches, ours.about) == (
        theirs.n_texts,
        theirs.n_batches,
        theirs.about,
    )
    assert ours.sets.keys() == theirs.sets.keys()
    for a, b in ((ours.sets[name], theirs.sets[name]) for name in ours.sets):
        left, right = a.tensors(), b.tensors()
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)


def assert_close(ours: FitStatistics, theirs: FitStatistics, tolerance: float = 1e-12) -> None:
    assert ours.n_texts == theirs.n_texts
    for a, b in ((ours.fit, theirs.fit), (ours.ridge_rows, theirs.ridge_rows)):
        assert a.n == b.n
        for x, y in zip([a.sums, *a.cross], [b.sums, *b.cross], strict=True):
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance * y.abs().max().item())


def stop_after(batches: int):
    """Progress that presses Ctrl-C once so many batches are in."""
    n_calls = 0

    def progress(*_, **__):
        nonlocal n_calls
        n_calls += 1
        if n_calls == batches:
            raise KeyboardInterrupt

    return progress


def test_a_run_counts_every_text_of_the_fitting_side_once():
    whole = run(choose_ridge=False)
    assert whole.n_texts == whole.fit.n == whole.about["data"]["texts"]
    assert 40 < whole.fit.n < 80
    assert whole.n_batches > 10
    split = run()
    assert split.fit.n + split.ridge_rows.n == whole.fit.n
    assert split.ridge_rows.n > 0


@pytest.mark.parametrize("pairs", ["final", "all"])
@pytest.mark.parametrize("batches", [1, 2, 7])
def test_an_interrupted_run_resumes_and_ends_with_bit_identical_sums(batches, pairs, tmp_path):
    path = tmp_path / "run.safetensors"
    with pytest.raises(KeyboardInterrupt):
        run(pairs=pairs, checkpoint=path, progress=stop_after(batches))
    assert FitStatistics.load(path).n_batches == batches
    resumed = run(pairs=pairs, checkpoint=path)
    assert_bit_equal(resumed, run(pairs=pairs))
    finish(path)
    assert not path.exists()


def test_a_run_may_be_interrupted_again_and_again(tmp_path):
    path = tmp_path / "run.safetensors"
    for _ in range(4):
        with pytest.raises(KeyboardInterrupt):
            run(checkpoint=path, progress=stop_after(2))
    assert FitStatistics.load(path).n_batches == 8
    assert_bit_equal(run(checkpoint=path), run())


def test_seen_batches_are_not_run_through_the_model_again(tmp_path, monkeypatch):
    path = tmp_path / "run.safetensors"
    with pytest.raises(KeyboardInterrupt):
        run(checkpoint=path, progress=stop_after(5))
    passes = []
    see = type(model()).capture
    monkeypatch.setattr(type(model()), "capture", lambda *a, **k: passes.append(1) or see(*a, **k))
    assert len(passes) == 0
    resumed = run(checkpoint=path)
    assert len(passes) == resumed.n_batches - 5


def test_an_interruption_in_the_midst_of_a_product_never_saves_half_a_batch(
    tmp_path, monkeypatch, save_always
):
    path, calls, product = tmp_path / "run.safetensors", [], torch.Tensor.addmm_

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 6:  # some layers of the second product are in, some are not
            raise KeyboardInterrupt
        return product(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "addmm_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(checkpoint=path)
    assert path.exists()
    assert_bit_equal(run(checkpoint=path), run())


def test_an_interruption_before_the_first_batch_leaves_no_checkpoint(tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Transformer, "capture", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(checkpoint=tmp_path / "run.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pairs": "all"}, "pairs"),
        ({"tokens_per_batch": 32}, "tokens_per_batch"),
        ({"n_texts": 5}, "n_texts"),
        ({"choose_ridge": False}, "choose_ridge"),
        ({"shard": (0, 2)}, "shard"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused_by_name(change, named, tmp_path):
    path = tmp_path / "run.safetensors"
    with pytest.raises(KeyboardInterrupt):
        run(checkpoint=path, progress=stop_after(2))
    with pytest.raises(
        WrongModel, match=rf"different settings \({named}\); delete it to start over"
    ):
        run(checkpoint=path, **change)
    assert path.exists()


def test_a_checkpoint_of_another_model_or_sampling_is_refused(tmp_path):
    path = tmp_path / "run.safetensors"
    with pytest.raises(KeyboardInterrupt):
        run(checkpoint=path, progress=stop_after(2))
    with pytest.raises(WrongModel, match=r"different settings \(model\)"):
        collect(
            tiny("llama", seed=1), TEXTS, Sampling(unit="document"), checkpoint=path, **SETTINGS
        )
    with pytest.raises(WrongModel, match=r"different settings \(sampling\)"):
        collect(model(), TEXTS, Sampling(unit="document", seed=1), checkpoint=path, **SETTINGS)


@pytest.mark.parametrize(
    "others", [["another cat sat there", *TEXTS[1:]], TEXTS[:3], sentences(80, 1)]
)
def test_a_text_that_changed_since_the_checkpoint_is_refused(others, tmp_path):
    path = tmp_path / "run.safetensors"
    with pytest.raises(KeyboardInterrupt):
        run(checkpoint=path, progress=stop_after(8))
    with pytest.raises(WrongModel, match="the text has changed since the checkpoint of 8 batches"):
        collect(model(), others, Sampling(unit="document"), checkpoint=path, **SETTINGS)
    assert path.exists()
    assert_bit_equal(run(checkpoint=path), run())


def test_a_run_interrupted_after_its_last_batch_is_finished_by_the_next(tmp_path):
    path, last = tmp_path / "run.safetensors", run().n_batches
    with pytest.raises(KeyboardInterrupt):
        run(checkpoint=path, progress=stop_after(last))
    assert_bit_equal(run(checkpoint=path), run())


@pytest.mark.parametrize("options", [{}, {"choose_ridge": False}, {"shard": (1, 2)}])
def test_a_finished_run_stays_in_its_checkpoint_until_its_result_is_safe(
    options, tmp_path, monkeypatch
):
    path = tmp_path / "run.safetensors"
    whole = run(checkpoint=path, **options)
    content = path.read_bytes()
    monkeypatch.setattr(type(model()), "capture", lambda *_, **__: pytest.fail("ran again"))
    again = run(checkpoint=path, **options)
    assert_bit_equal(again, whole)
    assert path.read_bytes() == content
    finish(path)
    finish(path)  # nothing left to do
    finish(None)
    assert list(tmp_path.iterdir()) == []


def test_other_solving_options_resume_from_the_same_checkpoint(tmp_path):
    path = tmp_path / "run.safetensors"
    run(checkpoint=path, solving={"rank": 3})
    assert run(checkpoint=path, solving={"rank": 5}).about["solve"] == {"rank": 5}


def test_a_run_without_anything_to_fit_on_leaves_no_checkpoint(tmp_path):
    with pytest.raises(BadText, match="no position to fit on"):
        collect(model(), ["a b"], Sampling(held_out=0.0), checkpoint=tmp_path / "run.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_rows_are_held_back_only_when_a_ridge_is_to_be_chosen(tmp_path):
    path = tmp_path / "run.safetensors"
    assert run(choose_ridge=False, checkpoint=path).ridge_rows is None
    assert {name.split("/")[0] for name in load_file(path)} == {"fit"}
    assert FitStatistics.load(path).ridge_rows is None
    finish(path)
    assert run(checkpoint=path).ridge_rows.n > 0
    assert {name.split("/")[0] for name in load_file(path)} == {"fit", "ridge_rows", "rows"}


@pytest.mark.parametrize(
    ("saving", "pause"), [(0.0, 30.0), (1.0, 30.0), (2.0, 40.0), (2.75, 55.0), (60.0, 55.0)]
)
def test_checkpoints_cost_little_time_and_a_kill_about_a_minute(saving, pause):
    assert fit_statistics.pause_after(saving) == pause
    assert saving > 2.75 or saving <= 0.05 * (pause + saving)


def test_slow_checkpoints_are_written_less_often(tmp_path, monkeypatch):
    """One second a batch, two to write a checkpoint."""
    clock, saved = [0.0], []
    monkeypatch.setattr(fit_statistics.time, "monotonic", lambda: clock[0])

    def save(self, path):
        saved.append(clock[0])
        clock[0] += 2.0

    def progress(*_, **__):
        clock[0] += 8.0

    monkeypatch.setattr(FitStatistics, "save", save)
    run(checkpoint=tmp_path / "run.safetensors", progress=progress)
    assert saved[0] == 32.0  # the first after more than half a minute
    assert saved[1] == 34.0 + 48.0  # the next when 20 times the 2 seconds are over


def test_a_broken_checkpoint_is_named(tmp_path):
    path = tmp_path / "run.safetensors"
    path.write_bytes(b"broken")
    with pytest.raises(BadArtifact, match=r"run\.safetensors"):
        run(checkpoint=path)
    save_moments(path, {"other": Moments(3, 24)}, {})
    with pytest.raises(BadArtifact, match="not statistics"):
        run(checkpoint=path)


STATE = {"about": {}, "n_batches": 3, "n_texts": 4, "digest": "ab"}


@pytest.mark.parametrize(
    "state",
    [
        "text",
        [1],
        None,
        {},
        {**STATE, "n_batches": "3"},
        {**STATE, "about": []},
        {**STATE, "digest": None},
        {**STATE, "more": 1},
        {"about": {}, "n_texts": 4, "digest": "ab"},
    ],
    ids=repr,
)
def test_a_state_that_is_none_of_a_tally_is_a_bad_artifact(state, tmp_path):
    path = tmp_path / "run.safetensors"
    save_moments(path, {"fit": Moments(3, 24)}, STATE)
    assert FitStatistics.load(path).n_texts == 4
    save_moments(path, {"fit": Moments(3, 24)}, state)
    with pytest.raises(BadArtifact, match=r"run\.safetensors"):
        FitStatistics.load(path)


def shards(tmp_path: Path, of: int, **options) -> list[Path]:
    paths = []
    for which in range(of):
        paths.append(tmp_path / f"{which}of{of}.safetensors")
        run(shard=(which, of), **options).save(paths[-1])
    return paths


@pytest.mark.parametrize("pairs", ["final", "all"])
def test_merged_shards_equal_a_single_run(pairs, tmp_path):
    paths = shards(tmp_path, 3, pairs=pairs)
    single = run(pairs=pairs)
    for order in (paths, paths[::-1], [paths[1], paths[0], paths[2]]):
        whole = merge(order)
        assert_close(whole, single)
        assert whole.about == single.about
        assert whole.n_batches == single.n_batches


def test_a_shard_can_be_interrupted_and_resumed(tmp_path):
    path = tmp_path / "run.safetensors"
    with pytest.raises(KeyboardInterrupt):
        run(shard=(1, 2), checkpoint=path, progress=stop_after(3))
    assert_bit_equal(run(shard=(1, 2), checkpoint=path), run(shard=(1, 2)))


def test_more_shards_than_batches_are_merged_all_the_same(tmp_path):
    paths = shards(tmp_path, 5, n_texts=3, tokens_per_batch=10**6)
    assert_close(merge(paths), run(n_texts=3, tokens_per_batch=10**6))


def test_shards_that_do_not_make_a_whole_are_refused(tmp_path):
    two, three = shards(tmp_path, 2), shards(tmp_path, 3)
    with pytest.raises(BadSettings, match="nothing to merge"):
        merge([])
    with pytest.raises(BadSettings, match=r"shards \[0, 2\] of 3 are missing"):
        merge([three[1]])
    for twice in ([two[0], two[0]], [two[0], two[1], two[0]], [*three, three[2]]):
        with pytest.raises(BadSettings, match="twice"):
            merge(twice)
    with pytest.raises(BadSettings, match="split into \\[2, 3\\] shards"):
        merge([two[0], three[1]])


def test_statistics_of_other_or_whole_runs_are_not_shards(tmp_path):
    paths = shards(tmp_path, 2)
    run().save(tmp_path / "whole.safetensors")
    with pytest.raises(BadArtifact, match="is not a finished shard: it holds a whole"):
        merge([paths[0], tmp_path / "whole.safetensors"])
    other = collect(
        tiny("llama", seed=1), TEXTS, Sampling(unit="document"), shard=(1, 2), **SETTINGS
    )
    other.save(tmp_path / "other.safetensors")
    with pytest.raises(WrongModel, match="differ in 'model'"):
        merge([paths[0], tmp_path / "other.safetensors"])
    other = collect(model(), TEXTS[:50], Sampling(unit="document"), shard=(1, 2), **SETTINGS)
    other.save(tmp_path / "other.safetensors")
    with pytest.raises(WrongModel, match="differ in 'data'"):
        merge([paths[0], tmp_path / "other.safetensors"])
    paths[1].write_bytes(paths[1].read_bytes()[:500])
    with pytest.raises(BadArtifact, match="1of2"):
        merge(paths)


def test_an_unfinished_shard_is_not_merged(tmp_path):
    path, whole = tmp_path / "run.safetensors", shards(tmp_path, 2)
    with pytest.raises(KeyboardInterrupt):
        run(shard=(1, 2), checkpoint=path, progress=stop_after(3))
    with pytest.raises(BadArtifact, match="an unfinished run"):
        merge([whole[0], path])
    save_moments(path, {"fit": Moments(3, 24)}, {"about": {"shard": "1/2", "data": {}}})
    with pytest.raises(BadArtifact, match="not a finished shard"):
        merge([whole[0], path])


def test_shards_are_read_one_at_a_time(tmp_path, monkeypatch):
    paths, alive, most = shards(tmp_path, 4), [], []
    from_file = FitStatistics.load.__func__

    def counted(cls, path):
        actual = from_file(cls, path)
        alive.append(weakref.ref(actual))
        most.append(sum(ref() is not None for ref in alive))
        return actual

    monkeypatch.setattr(FitStatistics, "load", classmethod(counted))
    assert merge(paths).fit.n == run().fit.n
    assert len(most) == 4
    assert max(most) <= 2


def test_a_bank_of_shards_is_solved_as_the_shards_say_or_as_asked(tmp_path):
    solving = {"intercept": True, "ridge": 0.5, "rank": 3}
    whole = merge(shards(tmp_path, 2, solving=solving))
    for options in ({}, {"ridge": 0.25}, {"intercept": False}, {"rank": 4, "ridge": "auto"}):
        bank = solve_bank(whole, **options)
        expected = {**solving, **options}
        assert {key: bank.settings[key] for key in solving} == expected
        assert bank[0, 3].rank == expected["rank"]
        assert (bank[0, 3].bias is not None) == expected["intercept"]


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_without_an_automatic_ridge_every_row_is_used(ridge):
    split, whole = solve_bank(run(), ridge=ridge), solve_bank(run(choose_ridge=False), ridge=ridge)
    assert split.data["rows_fitted"] == whole.data["rows_fitted"]
    assert split.data["ridge_rows"] == 0
    for pair, shortcut in whole.maps.items():
        torch.testing.assert_close(split.maps[pair].weight, shortcut.weight, rtol=1e-4, atol=1e-5)
    stats = run()
    auto = solve_bank(stats, ridge="auto")
    assert auto.data["rows_fitted"] == stats.fit.n
    assert auto.data["ridge_rows"] == stats.ridge_rows.n > 0
    every = solve_bank(run(pairs="all"))  # rows held back know nothing of inner layers
    assert every.data["ridge_rows"] == stats.ridge_rows.n


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0, 0)])
def test_a_shard_that_does_not_exist_is_refused(shard):
    with pytest.raises(BadSettings, match="does not exist; count from 0"):
        run(shard=shard)


def test_a_text_without_a_position_to_fit_on_is_refused():
    with pytest.raises(BadText, match="no position to fit on"):
        collect(model(), ["a b"], Sampling(unit="sentence", held_out=0.0))


def test_maps_of_merged_shards_equal_those_of_one_run(tmp_path):
    ours, theirs = solve_bank(merge(shards(tmp_path, 3))), solve_bank(run())
    for src in range(3):
        torch.testing.assert_close(ours[src, 3].weight, theirs[src, 3].weight, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A model in a folder and a file of texts, for processes of their own."""
    folder = tmp_path_factory.mktemp("saved")
    build("llama").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "texts.txt").write_text("\n\n".join(TEXTS))
    return folder


PREAMBLE = """
import os, sys, torch
torch.set_num_threads(1)
import layerleap as ll
from layerleap.models.load import load
from layerleap.stats import fit_statistics, moments
from layerleap.stream.examples import Sampling
moments.BUFFER = 10
folder = sys.argv[1]
def collect(**options):
    return ll.stats.collect(load(folder), folder + "/texts.txt", Sampling(unit="document"),
                      choose_ridge=True, tokens_per_batch=64, **options)
"""


def collect_saved(folder: Path, **options) -> FitStatistics:
    return collect(
        load(folder), f"{folder}/texts.txt", Sampling(unit="document"), **SETTINGS, **options
    )


def start(
    code: str, *arguments: object, module: tuple[str, ...] = ()
) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    script = Path(str(arguments[0])) / "run.py"
    script.write_text(PREAMBLE + code)
    command = [sys.executable, *module, str(script), *map(str, arguments)]
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its workers too
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_a_killed_run_resumes_and_ends_with_bit_identical_sums(saved, tmp_path):
    checkpoint = tmp_path / "run.safetensors"
    code = """
from pathlib import Path
fit_statistics.pause_after = lambda _: -1.0
seen = 0
def progress(*_, **__):
    global seen
    seen += 1
    if seen == 6:
        os.kill(os.getpid(), 9)
collect(checkpoint=Path(sys.argv[2]), progress=progress)
"""
    process = start(code, saved, checkpoint)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert FitStatistics.load(checkpoint).n_batches == 5
    assert_bit_equal(collect_saved(saved, checkpoint=checkpoint), collect_saved(saved))


def test_two_processes_under_torchrun_give_the_maps_of_one(saved, tmp_path):
    code = """
import torch.distributed as dist
from safetensors.torch import save_file
found = collect(pairs="all")
from layerleap.maps.fit import solve_bank
bank = solve_bank(found)
pairs = [(s, d) for s in range(3) for d in range(s + 1, 4)]
tensors = {f"xy.{s}.{d}": found.fit.xy(s, d).contiguous() for s, d in pairs}
tensors |= {f"map.{s}": bank[s, 3].weight.contiguous() for s in range(3)}
tensors["n"] = torch.tensor([found.fit.n, found.ridge_rows.n, found.n_texts])
save_file(tensors, f"{sys.argv[2]}/rank{dist.get_rank()}.safetensors")
dist.destroy_process_group()
"""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    process = start(code, saved, tmp_path, module=launcher)
    assert process.returncode == 0, process.stderr
    single = collect_saved(saved, pairs="all")
    bank = solve_bank(single)
    for rank in (0, 1):
        theirs = load_file(tmp_path / f"rank{rank}.safetensors")
        assert theirs["n"].tolist() == [single.fit.n, single.ridge_rows.n, single.n_texts]
        for src in range(3):
            for dst in range(src + 1, 4):
                exact = single.fit.xy(src, dst)
                gap = (theirs[f"xy.{src}.{dst}"] - exact).abs().max() / exact.abs().max()
                assert gap < 1e-12
            exact = bank[src, 3].weight
            assert (theirs[f"map.{src}"] - exact).abs().max() / exact.abs().max() < 1e-6


def test_sums_are_added_up_even_if_the_script_has_started_nccl(monkeypatch):
    """NCCL adds up GPU tensors only, and the sums are on the CPU: the run used to end there."""
    used = []
    dist = fit_statistics.dist
    monkeypatch.setattr(fit_statistics, "world", lambda: (0, 2))
    monkeypatch.setattr(dist, "get_backend_config", lambda *_: "cuda:nccl")
    monkeypatch.setattr(dist, "new_group", lambda backend: f"a group of {backend}")
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: used.append((tensor, group)))
    stats = run()
    assert len(used) == 1 + sum(1 + len(moments.cross) for moments in stats.sets.values())
    assert {group for _, group in used} == {"a group of gloo"}
    monkeypatch.setattr(dist, "get_backend_config", lambda *_: "cpu:gloo,cuda:nccl")
    assert fit_statistics.cpu_group() is None
