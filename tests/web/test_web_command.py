"""`layerleap debug`, as a user runs it: starts, says where, stops, and survives kill -9."""

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import httpx2
import pytest
from typer.testing import CliRunner

import layerleap as ll
from layerleap.show.cli.app import app
from layerleap.show.web.serve import listen
from tiny_models import tiny

get, put = partial(httpx2.get, timeout=60), partial(httpx2.put, timeout=60)  # machines are busy
MAIN = "from layerleap.show.cli.app import main; main()"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model on disk."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    transformer = tiny()
    transformer.model.save_pretrained(path)
    transformer.tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def command(empty_cache):
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        environment.pop(name, None)

    def start(*words):
        return subprocess.Popen(
            [sys.executable, "-c", MAIN, "debug", *map(str, words)],
            text=True,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=_hear_ctrl_c,
        )

    return start


def _hear_ctrl_c():
    """A shell that starts tests in the background makes them, and their children, ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def running(process):
    """The address that the command prints; it is killed at the end if it still runs."""
    try:
        url = process.stdout.readline().strip()
        assert url, process.stderr.read()
        yield url
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def refused(*words):
    answer = CliRunner().invoke(app, ["debug", *map(str, words)], env={"COLUMNS": "200"})
    assert answer.exit_code == 2, answer.output
    assert answer.stdout == ""
    assert answer.stderr.startswith("error: ")
    assert len(answer.stderr.strip().splitlines()) == 1, answer.stderr
    return answer.stderr


def test_the_command_serves_survives_a_kill_and_stops(command, folder):
    """One story, because each start of the command takes seconds."""
    process = command(folder, "--port", 0)
    with running(process) as url:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
        assert get(f"{url}api/model").json()["n_layers"] == 3
        for number in range(20):
            body = {"title": f"session {number}", "state": {"number": number}}
            assert put(f"{url}api/sessions/{number}", json=body).status_code == 200
        name = {"name": "kept", "note": ""}
        assert put(f"{url}api/vectors/1/2/name", json=name).status_code == 200
        os.kill(process.pid, signal.SIGKILL)
        assert "layerleap index" in process.communicate(timeout=30)[1]

    again = command(folder, "--port", 0, "--host", "0.0.0.0", "--no-index")
    with running(again) as url:
        port, token = re.fullmatch(r"http://[^/]+:(\d+)/\?token=(\S+)", url).groups()
        here = f"http://127.0.0.1:{port}"
        assert get(f"{here}/api/model").status_code == 401
        with httpx2.Client(base_url=here, timeout=60) as client:
            assert client.get("/", params={"token": token}).status_code == 200
            kept = client.get("/api/sessions").json()
            assert {each["id"] for each in kept} == {str(number) for number in range(20)}
            assert client.get("/api/sessions/7").json()["state"] == {"number": 7}
            assert client.get("/api/vectors/1/2").json()["name"] == "kept"
            assert get(here, params={"token": token}).status_code == 401, "a link works once"
            with client.stream("POST", "/api/generate", json={"input": {"text": "the cat"}}):
                again.send_signal(signal.SIGINT)
                _, err = again.communicate(timeout=30)
    assert again.returncode == 0
    following = re.search(r"another browser: \S+token=(\S+)", err)
    assert following is not None
    assert following[1] != token
    assert err.strip().splitlines()[-1].startswith("stopped")
    assert "Traceback" not in err


def test_a_taken_port_is_said_before_the_model_is_loaded(folder, monkeypatch):
    monkeypatch.setattr("layerleap.show.cli.options.Loading.load", None)  # cannot be called
    taken = listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    error = refused(folder, "--port", port)
    taken.close()
    assert f"port {port}" in error
    assert re.search(r"use port \d+", error)


def test_other_mistakes_are_one_line_too(folder, monkeypatch):
    assert "no-such-model" in refused("no-such-model", "--port", 0)
    assert "host must be" in refused(folder, "--host", "192.0.2.77")
    index = ll.index(ll.load(str(folder)), path=folder.parent / "x", progress=False).path
    assert "leave out --index" in refused(folder, "--no-index", "--index-file", index)
    assert "no such index" in refused(folder, "--port", 0, "--index-file", "no such index")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert 'pip install "layerleap[web]"' in refused(folder)
