"""Writes are atomic."""

import errno
import hashlib
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from layerleap import files
from layerleap.errors import BadArtifact, CannotWrite, LayerleapError
from layerleap.files import (
    cache_root,
    read_json,
    sha256_of,
    whole_file,
    whole_folder,
    write_json,
)


@pytest.fixture
def mask():
    """A umask that lets the group read."""
    old = os.umask(0o027)
    yield 0o027
    os.umask(old)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_appears_only_when_it_is_complete(tmp_path):
    target = tmp_path / "deep" / "er" / "a.txt"
    with whole_file(target) as temporary:
        temporary.write_text("done")
        assert not target.exists()
        assert temporary.parent == target.parent  # a rename across file systems is no single step
    assert target.read_text() == "done"
    assert list(target.parent.iterdir()) == [target]


def test_an_existing_file_stays_until_the_new_one_is_complete(tmp_path):
    target = tmp_path / "a.txt"
    target.write_text("old")
    with whole_file(target) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(1)], ids=repr)
@pytest.mark.parametrize("existed", [False, True])
def test_a_failure_leaves_files_as_they_were(tmp_path, error, existed):
    target = tmp_path / "a.txt"
    if existed:
        target.write_text("old")

    def write():
        with whole_file(target) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(type(error)):
        write()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"] * existed


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(1)], ids=repr)
@pytest.mark.parametrize("existed", [False, True])
def test_a_failure_leaves_folders_as_they_were(tmp_path, error, existed):
    target = tmp_path / "a"
    if existed:
        target.mkdir()
        (target / "x").write_text("old")

    def write():
        with whole_folder(target) as temporary:
            (temporary / "x").write_text("half")
            raise error

    with pytest.raises(type(error)):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["a"] * existed
    assert not existed or (target / "x").read_text() == "old"


def test_a_folder_replaces_the_old_one_whole(tmp_path):
    target = tmp_path / "a"
    target.mkdir()
    (target / "left-over").write_text("old")
    with whole_folder(target) as temporary:
        (temporary / "x").write_text("new")
        assert (target / "left-over").exists()
    assert [path.name for path in target.iterdir()] == ["x"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_swap_that_fails_puts_the_old_folder_back(tmp_path, monkeypatch):
    target = tmp_path / "a"
    target.mkdir()
    (target / "x").write_text("old")
    rename = Path.rename

    def fail(self, other):
        if Path(other) == target and not (self / "x").read_text() == "old":
            raise OSError(errno.EIO, "broken")
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CannotWrite, match="broken"), whole_folder(target) as temporary:
        (temporary / "x").write_text("new")
    assert (target / "x").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_is_not_replaced_by_a_folder(tmp_path):
    (tmp_path / "a").write_text("precious")
    with (
        pytest.raises(CannotWrite, match="is a file; expected a folder"),
        whole_folder(tmp_path / "a"),
    ):
        pytest.fail("the body must not run")
    assert (tmp_path / "a").read_text() == "precious"


def test_a_folder_is_not_replaced_by_a_file(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(CannotWrite, match="cannot write"), whole_file(tmp_path / "a") as temporary:
        temporary.write_text("x")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("whole", [whole_file, whole_folder])
def test_errors_of_the_system_become_one_line(tmp_path, whole):
    (tmp_path / "a").write_text("a file where a folder is needed")
    with (
        pytest.raises(CannotWrite, match="choose another location") as caught,
        whole(tmp_path / "a" / "b"),
    ):
        pytest.fail("the body must not run")
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, LayerleapError)


@pytest.mark.parametrize("whole", [whole_file, whole_folder])
def test_a_full_disk_is_named(tmp_path, whole):
    error = OSError(errno.ENOSPC, "No space left on device")
    with (
        pytest.raises(CannotWrite, match="No space left on device; free some"),
        whole(tmp_path / "a"),
    ):
        raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("whole", [whole_file, whole_folder])
@pytest.mark.parametrize(
    "error",
    [
        OSError("no file named config.json"),
        FileNotFoundError(errno.ENOENT, "gone"),
        ConnectionResetError(errno.ECONNRESET, "reset"),
    ],
    ids=repr,
)
def test_errors_unrelated_to_writing_are_passed_on(tmp_path, whole, error):
    with pytest.raises(type(error)) as caught, whole(tmp_path / "a"):
        raise error
    assert caught.value is error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", sorted(files.WRITE_ERRORS), ids=errno.errorcode.get)
def test_every_write_error_is_one_line(tmp_path, number):
    with pytest.raises(CannotWrite, match="cannot write"), whole_file(tmp_path / "a"):
        raise OSError(number, os.strerror(number))


def test_a_full_disk_is_named_when_safetensors_writes(tmp_path):
    with pytest.raises(CannotWrite, match="os error 28"), whole_file(tmp_path / "a"):
        raise SafetensorError("Error while serializing: I/O error: No space (os error 28)")
    with pytest.raises(SafetensorError, match="header"), whole_file(tmp_path / "a"):
        raise SafetensorError("Error while deserializing header")  # nothing to do with writing
    assert list(tmp_path.iterdir()) == []


def test_files_have_the_mode_the_user_wants(tmp_path, mask):
    with whole_file(tmp_path / "a") as temporary:
        temporary.write_text("x")
    assert mode(tmp_path / "a") == 0o640
    with whole_file(tmp_path / "b") as temporary:
        save_file({"x": torch.zeros(1)}, temporary)  # it makes a private file of its own
    assert mode(tmp_path / "b") == 0o640


def test_folders_and_what_is_in_them_have_the_mode_the_user_wants(tmp_path, mask):
    with whole_folder(tmp_path / "a") as temporary:
        save_file({"x": torch.zeros(1)}, temporary / "weights")
        (temporary / "inner").mkdir()
        save_file({"x": torch.zeros(1)}, temporary / "inner" / "weights")
    assert mode(tmp_path / "a") == 0o750
    assert mode(tmp_path / "a" / "weights") == 0o640
    assert mode(tmp_path / "a" / "inner" / "weights") == 0o640


@pytest.mark.parametrize("whole", [whole_file, whole_folder])
def test_the_umask_of_the_process_is_never_set(tmp_path, monkeypatch, whole):
    """Another thread would create its files with it."""
    masks: list[int] = []
    monkeypatch.setattr(os, "umask", masks.append)
    with whole(tmp_path / "a"):
        pass
    assert (tmp_path / "a").exists()
    assert not masks


def test_json_round_trips(tmp_path):
    value = {"a": [1, 2.5, None, True], "b": "\u00e4\u4e2d"}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value
    assert "\u4e2d" in (tmp_path / "a.json").read_text(encoding="utf8")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}])
def test_values_that_json_cannot_hold_are_not_written(tmp_path, value):
    write_json(tmp_path / "a.json", "old")
    with pytest.raises((ValueError, TypeError)):
        write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == "old"


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b'{"a": 1,}'])
def test_broken_json_is_refused(tmp_path, data):
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(BadArtifact, match=r"a\.json is not valid JSON"):
        read_json(tmp_path / "a.json")


def test_missing_json_is_refused(tmp_path):
    with pytest.raises(BadArtifact, match=r"a\.json is missing"):
        read_json(tmp_path / "a.json")


def test_json_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(BadArtifact, match=r"a\.json cannot be read"):
        read_json(tmp_path / "a.json")


def test_a_hash_is_of_the_whole_file(tmp_path):
    data = b"x" * 1_000_003
    (tmp_path / "a").write_bytes(data)
    assert sha256_of(tmp_path / "a") == hashlib.sha256(data).hexdigest()


def test_the_cache_is_where_the_user_wants_it(monkeypatch, tmp_path):
    monkeypatch.setenv("LAYERLEAP_CACHE", str(tmp_path / "mine"))
    assert cache_root() == tmp_path / "mine"
    monkeypatch.setenv("LAYERLEAP_CACHE", "~/mine")
    assert cache_root() == Path.home() / "mine"
    monkeypatch.delenv("LAYERLEAP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "layerleap"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "layerleap"
