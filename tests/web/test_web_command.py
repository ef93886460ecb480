"""`layerleap debug`, as a user runs it: starts, says where, stops, and survives kill -9."""

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager

import httpx2
import pytest
from tiny_models import tiny

from layerleap.show.web.serve import listen

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

    def start(*words, code=MAIN):
        return subprocess.Popen(
            [sys.executable, "-c", code, "debug", *map(str, words)], text=True, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return start


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


def refused(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.strip().splitlines()) == 1, err
    return err


def test_the_command_prints_its_address_serves_and_stops(command, folder):
    process = command(folder, "--port", 0)
    with running(process) as url:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
        assert httpx2.get(f"{url}api/model", timeout=60).json()["n_layers"] == 3
        with httpx2.stream("POST", f"{url}api/generate", json={"input": {"text": "the cat"}}):
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "layerleap index" in err
    assert err.strip().splitlines()[-1].startswith("stopped")
    assert "Traceback" not in err


def test_a_taken_port_is_said_before_the_model_is_loaded(command):
    taken = listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    said = refused(command("no-such-model", "--port", port))
    taken.close()
    assert f"port {port}" in said
    assert re.search(r"use port \d+", said)


def test_other_mistakes_are_one_line_too(command, folder):
    assert "no-such-model" in refused(command("no-such-model", "--port", 0))
    assert "host must be" in refused(command(folder, "--host", "192.0.2.77"))
    missing = "import sys; sys.modules['fastapi'] = None; " + MAIN
    assert 'pip install "layerleap[web]"' in refused(command(folder, code=missing))


def test_beyond_loopback_the_link_works_once_and_the_next_is_printed(command, folder):
    process = command(folder, "--port", 0, "--host", "0.0.0.0", "--no-index")
    with running(process) as url:
        port, token = re.fullmatch(r"http://[^/]+:(\d+)/\?token=(\S+)", url).groups()
        here = f"http://127.0.0.1:{port}"
        assert httpx2.get(f"{here}/api/model", timeout=60).status_code == 401
        with httpx2.Client(base_url=here) as client:
            assert client.get("/", params={"token": token}).status_code == 200
            assert client.get("/api/model").status_code == 200
        assert httpx2.get(here, params={"token": token}).status_code == 401
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    second = re.search(r"another browser: \S+token=(\S+)", err)
    assert second is not None
    assert second[1] != token


def test_saved_sessions_survive_a_kill(command, folder):
    process = command(folder, "--port", 0, "--no-index")
    with running(process) as url:
        for number in range(20):
            body = {"title": f"session {number}", "state": {"number": number}}
            assert (
                httpx2.put(f"{url}api/sessions/{number}", json=body, timeout=60).status_code == 200
            )
        name = {"name": "kept", "note": ""}
        assert httpx2.put(f"{url}api/vectors/1/2/name", json=name).status_code == 200
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
    again = command(folder, "--port", 0, "--no-index")
    with running(again) as url:
        found = httpx2.get(f"{url}api/sessions", timeout=60).json()
        assert {each["id"] for each in found} == {str(number) for number in range(20)}
        assert httpx2.get(f"{url}api/sessions/7").json()["state"] == {"number": 7}
        assert httpx2.get(f"{url}api/vectors/1/2").json()["name"] == "kept"
