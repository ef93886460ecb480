"""Sessions and names: kept per model, whole after a kill, shared between processes."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from layerleap.errors import BadArtifact, BadSettings, CannotWrite, LayerleapError
from layerleap.show.web import limits
from layerleap.show.web.store import Store


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "debugger.sqlite"


@pytest.fixture
def store(path):
    store = Store("model-a", path, sessions=3)
    yield store
    store.close()


def test_a_session_comes_back_as_it_was(store, path):
    state = {"prompt": "né\u2028\U0001f600", "edits": ["L1.N2=3"], "deep": [{"a": [1, None, 2.5]}]}
    store.save_session("one", "First", state)
    again = Store("model-a", path)
    found = again.session("one")
    assert found["state"] == state
    assert found["title"] == "First"
    assert [each["id"] for each in again.sessions()] == ["one"]
    again.close()


def test_the_newest_session_is_first_and_saving_again_replaces(store):
    for name in ("a", "b", "a"):
        store.save_session(name, name.upper(), {"n": name})
        time.sleep(0.002)
    assert [each["id"] for each in store.sessions()] == ["a", "b"]
    assert store.delete_session("a")
    assert not store.delete_session("a")
    assert store.session("a") is None


def test_models_do_not_see_each_others_sessions_and_names(store, path):
    other = Store("model-b", path)
    store.save_session("one", "First", {})
    store.save_name(3, 4, "music", "note")
    assert other.sessions() == []
    assert other.session("one") is None
    assert other.name(3, 4) == (None, None)
    assert not other.delete_session("one")
    other.close()


def test_names_are_kept_and_taken_away(store):
    store.save_name(3, 4, "music", "")
    store.save_name(3, 5, "", "only a note")
    assert store.name(3, 4) == ("music", None)
    assert store.names([(3, 4), (3, 5), (9, 9)]) == {(3, 4): "music"}
    store.save_name(3, 4, "", "")
    assert store.name(3, 4) == (None, None)


def test_there_is_room_for_so_many_sessions_and_no_more(store):
    for number in range(3):
        store.save_session(str(number), "", {})
    with pytest.raises(BadSettings, match="3 sessions are saved"):
        store.save_session("one too many", "", {})
    store.save_session("2", "replaced", {})
    assert store.session("2")["title"] == "replaced"


@pytest.mark.parametrize(
    "state",
    [{"a": float("nan")}, {"a": float("inf")}, {"a": "\ud800"}, {"a": "x" * limits.STATE}],
    ids=["nan", "infinity", "half a pair", "large"],
)
def test_a_state_that_json_cannot_carry_is_refused_and_nothing_is_written(store, state):
    store.save_session("one", "kept", {"a": 1})
    with pytest.raises((ValueError, BadSettings)):
        store.save_session("one", "lost", state)
    assert store.session("one")["title"] == "kept"


def test_another_kind_of_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("not a database, and long enough to be looked at" * 20)
    with pytest.raises(BadArtifact, match="is not a file of sessions"):
        Store("m", path)


def test_a_file_of_a_later_version_is_left_alone(path, store):
    store.save_session("one", "First", {})
    store.close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version=99")
    database.close()
    with pytest.raises(BadArtifact, match="format 99"):
        Store("model-a", path)


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match="cannot write"):
        Store("m", tmp_path / "file" / "debugger.sqlite")


WRITER = """
import sys
from pathlib import Path
from layerleap.show.web.store import Store
store = Store("m", Path(sys.argv[1]), sessions=10**9)
number = 0
while True:
    store.save_session(f"{sys.argv[2]}-{number % 20}", "t", {"number": number, "pad": "x" * 20000})
    print(number, flush=True)
    number += 1
"""


def writer(path: Path, name: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name], stdout=subprocess.PIPE, text=True
    )


def test_killing_the_server_while_it_writes_loses_nothing_that_was_saved(path):
    for _ in range(3):
        child = writer(path, "a")
        said = [int(child.stdout.readline()) for _ in range(50)][-1]
        os.kill(child.pid, signal.SIGKILL)
        said = max([said, *map(int, child.stdout.read().split())])
        child.wait()
        child.stdout.close()
        store = Store("m", path)
        numbers = [store.session(each["id"])["state"]["number"] for each in store.sessions()]
        assert max(numbers) >= said  # one more may have been written than was told
        assert store._database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        store.close()


def test_two_processes_write_to_one_file(path):
    children = [writer(path, name) for name in "ab"]
    for child in children:
        for _ in range(60):
            assert child.stdout.readline().strip().isdigit()
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()
    store = Store("m", path)
    ids = {each["id"] for each in store.sessions()}
    assert ids == {f"{name}-{number}" for name in "ab" for number in range(20)}
    store.close()


def test_servers_that_open_a_new_file_at_once_wait_for_each_other(path):
    """Without waiting, about one opening in seven fails."""
    for round_ in range(5):
        barrier, failed = threading.Barrier(6), []

        def open_one(file=path.with_name(f"{round_}.sqlite"), barrier=barrier, failed=failed):
            barrier.wait()
            try:
                Store("m", file).close()
            except LayerleapError as error:
                failed.append(error)

        threads = [threading.Thread(target=open_one) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed


def test_threads_share_one_store(store, path):
    store.room = 1000
    failed = []

    def work(name):
        try:
            for number in range(20):
                store.save_session(f"{name}-{number}", "t", {"n": number})
                assert store.session(f"{name}-{number}")["state"] == {"n": number}
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(store.sessions()) == 80
    assert json.dumps(store.sessions())
