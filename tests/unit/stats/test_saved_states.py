import json
import mmap
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from layerleap.errors import BadArtifact, BadSettings, NotFinite, WrongModel
from layerleap.stats import fit_statistics as fit_statistics
from layerleap.stats.collect import collect
from layerleap.stats.saved_states import SavedStates, StateFile, StateWriter, _places
from layerleap.stream.examples import Sampling
from tiny_models import sentences, tiny

TEXTS = sentences(80)


@cache
def model():
    return tiny("llama")


def run(path: Path, *, limit: int = 10_000, **options):
    settings = {"tokens_per_batch": 64, **options}
    return collect(
        model(),
        TEXTS,
        Sampling(unit="document"),
        save_states=StateFile(path, limit=limit),
        **settings,
    )


def stop_after(batches: int):
    n_calls = 0

    def progress(*_, **__):
        nonlocal n_calls
        n_calls += 1
        if n_calls == batches:
            raise KeyboardInterrupt

    return progress


def written(path: Path) -> tuple[bytes, str]:
    return path.read_bytes(), StateFile(path).header.read_text()


def test_the_rows_are_those_of_the_moments_in_their_order(tmp_path):
    stats = run(tmp_path / "rows")
    rows = StateFile(tmp_path / "rows").open()
    assert len(rows) == stats.fit.n > 40
    states = rows.states(slice(None)).double()
    torch.testing.assert_close(states.sum(0), stats.fit.sums)
    torch.testing.assert_close(states[:, 1].T @ states[:, 3], stats.fit.xy(1, 3))
    picked = rows.states([5, 2])
    assert torch.equal(picked, states[[5, 2]].float())
    assert len(rows.documents.unique()) == stats.about["data"]["documents"]


def test_rows_are_read_through_a_memory_map(tmp_path):
    run(tmp_path / "rows")
    assert isinstance(StateFile(tmp_path / "rows").open()._records, np.memmap)


def test_rows_held_back_for_the_ridge_are_not_saved(tmp_path):
    stats = run(tmp_path / "rows", choose_ridge=True)
    assert stats.ridge_rows.n > 0
    states = StateFile(tmp_path / "rows").open().states(slice(None)).double()
    torch.testing.assert_close(states.sum(0), stats.fit.sums)


def test_there_are_never_more_rows_than_the_limit_and_they_are_rows_of_the_pass(tmp_path):
    whole = run(tmp_path / "all").fit.n
    run(tmp_path / "some", limit=12)
    rows = StateFile(tmp_path / "some").open()
    assert len(rows) == 12 < whole
    every = {h.numpy().tobytes() for h in StateFile(tmp_path / "all").open().states(slice(None))}
    saved = [h.numpy().tobytes() for h in rows.states(slice(None))]
    assert len(set(saved)) == 12
    assert set(saved) < every


def test_every_row_has_the_same_chance_to_be_saved():
    saved = np.zeros(60)
    for seed in range(2000):
        last = np.full(10, -1)
        for number, place in enumerate(_places(np.arange(60), 10, seed).tolist()):
            if place < 10:
                last[place] = number
        saved[last] += 1
    # 2000 draws at 1/6: a standard deviation is 17, and 5 of them leave no luck.
    assert np.abs(saved - 2000 / 6).max() < 5 * 17


@pytest.mark.parametrize("limit", [12, 10_000])
@pytest.mark.parametrize("batches", [1, 7])
def test_an_interrupted_run_ends_with_the_same_file(tmp_path, limit, batches):
    work = tmp_path / "work.safetensors"
    run(tmp_path / "whole", limit=limit)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "rows", limit=limit, checkpoint=work, progress=stop_after(batches))
    run(tmp_path / "rows", limit=limit, checkpoint=work)
    assert written(tmp_path / "rows") == written(tmp_path / "whole")


@pytest.mark.parametrize("limit", [12, 10_000])
def test_rows_written_after_the_last_checkpoint_do_not_stay(tmp_path, limit, monkeypatch):
    work = tmp_path / "work.safetensors"
    run(tmp_path / "whole", limit=limit)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "rows", limit=limit, checkpoint=work, progress=stop_after(3))
    saved = work.read_bytes()
    monkeypatch.setattr(fit_statistics.Saver, "save", lambda self: None)  # killed: nothing saved
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "rows", limit=limit, checkpoint=work, progress=stop_after(5))
    monkeypatch.undo()
    assert work.read_bytes() == saved
    with (tmp_path / "rows").open("ab") as file:
        file.write(b"half a row")
    run(tmp_path / "rows", limit=limit, checkpoint=work)
    assert written(tmp_path / "rows") == written(tmp_path / "whole")


def test_a_finished_pass_is_not_run_again_and_its_rows_stay(tmp_path):
    work = tmp_path / "work.safetensors"
    run(tmp_path / "rows", checkpoint=work)
    before = written(tmp_path / "rows")
    run(tmp_path / "rows", checkpoint=work)
    assert written(tmp_path / "rows") == before


def test_rows_of_an_unfinished_run_are_not_read(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "rows", progress=stop_after(2))
    assert (tmp_path / "rows").stat().st_size > 0
    with pytest.raises(BadArtifact, match="missing"):
        StateFile(tmp_path / "rows").open()


def test_a_file_cut_short_or_with_another_header_is_refused(tmp_path):
    run(tmp_path / "rows")
    file = StateFile(tmp_path / "rows")
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[:-1])
    with pytest.raises(BadArtifact, match="recreate it"):
        file.open()
    file.path.write_bytes(whole)
    header = json.loads(file.header.read_text())
    file.header.write_text(json.dumps({**header, "format": 2}))
    with pytest.raises(BadArtifact, match="format 1"):
        file.open()


def test_a_checkpoint_whose_states_are_missing_is_refused(tmp_path):
    work = tmp_path / "work.safetensors"
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "rows", checkpoint=work, progress=stop_after(4))
    (tmp_path / "rows").unlink()
    with pytest.raises(BadArtifact, match="delete the checkpoint"):
        run(tmp_path / "rows", checkpoint=work)


def test_another_limit_is_another_run(tmp_path):
    work = tmp_path / "work.safetensors"
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "rows", checkpoint=work, progress=stop_after(4))
    with pytest.raises(WrongModel, match="save_states"):
        run(tmp_path / "rows", limit=5, checkpoint=work)


def test_shards_cannot_save_states(tmp_path):
    with pytest.raises(BadSettings, match="a sharded run cannot save states"):
        run(tmp_path / "rows", shard=(0, 2))


def test_a_limit_of_nothing_is_refused(tmp_path):
    with pytest.raises(BadSettings, match="saves nothing"):
        StateFile(tmp_path / "rows", limit=0)


def test_a_split_keeps_documents_whole(tmp_path):
    run(tmp_path / "rows")
    rows = StateFile(tmp_path / "rows").open()
    most, rest = rows.split(0.2, seed=3)
    assert len(most) + len(rest) == len(rows)
    ours, theirs = set(most.documents.tolist()), set(rest.documents.tolist())
    assert not ours & theirs
    assert len(theirs) == round(0.2 * len(ours | theirs))
    with pytest.raises(BadSettings, match="share 0"):
        rows.split(0)
    one = SavedStates(rows._records, np.arange(1), rows.model)
    with pytest.raises(BadSettings, match="cannot be split"):
        one.split(0.5)


def test_states_too_large_for_float32_are_refused(tmp_path):
    writer = StateWriter(StateFile(tmp_path / "rows"), model(), 0)
    states = [torch.full((1, 24), 1e300, dtype=torch.float64)] * 4
    with pytest.raises(NotFinite, match="float32"):
        writer.add(states, torch.zeros(1, dtype=torch.long))
    writer.close()


def test_rows_can_be_removed(tmp_path):
    run(tmp_path / "rows")
    StateFile(tmp_path / "rows").remove()
    assert not list(tmp_path.iterdir())


def test_cells_are_single_states_of_chosen_rows_and_layers(tmp_path):
    run(tmp_path / "rows")
    rows = StateFile(tmp_path / "rows").open()
    _, some = rows.split(0.4)
    which, layers = torch.tensor([3, 0, 3]), torch.tensor([2, 0, 1])
    for chosen in (rows, some):
        actual = chosen.cells(which, layers)
        assert torch.equal(actual, chosen.states(which)[[0, 1, 2], layers])


@pytest.mark.parametrize("limit", [12, 10_000])
def test_the_numbers_of_the_saved_rows_are_known(tmp_path, limit):
    n_rows = run(tmp_path / "all").fit.n
    run(tmp_path / "some", limit=limit)
    file = StateFile(tmp_path / "some", limit=limit)
    numbers = file.row_numbers(n_rows)
    assert len(numbers) == min(limit, n_rows)
    every = StateFile(tmp_path / "all").open()
    assert torch.equal(every.states(numbers), file.open().states(slice(None)))
    assert torch.equal(every.documents[numbers], file.open().documents)


def test_pages_that_were_read_are_unmapped(tmp_path):
    """They would count as memory of this process: the whole file after a few reads."""
    run(tmp_path / "rows")
    saved, given_back = StateFile(tmp_path / "rows").open(), []
    saved._records._mmap = SimpleNamespace(madvise=given_back.append)
    for read in (
        lambda: saved.states([0, 1]),
        lambda: saved.cells(torch.tensor([0]), torch.tensor([1])),
        lambda: saved.documents,
    ):
        assert len(read())
        assert given_back == [mmap.MADV_DONTNEED]
        given_back.clear()
