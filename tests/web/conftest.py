"""The app around the make-believe debugger, in this process and behind a real socket."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from asking import HERE
from fake import FakeDebugger
from starlette.testclient import TestClient

from layerleap.show.web.access import Access
from layerleap.show.web.app import create_app
from layerleap.show.web.guard import Guard
from layerleap.show.web.limits import Limits
from layerleap.show.web.serve import Server, listen
from layerleap.show.web.store import Store


@pytest.fixture
def static(tmp_path: Path) -> Path:
    folder = tmp_path / "static"
    folder.mkdir()
    (folder / "index.html").write_text("<!doctype html><title>page</title>")
    (folder / "app.js").write_text("export const one = 1;")
    return folder


@pytest.fixture
def make_app(tmp_path: Path, static: Path) -> Callable[..., Guard]:
    def make(debugger: Any = None, *, limits: Limits | None = None, **more: Any) -> Guard:
        store = Store("f" * 32, tmp_path / "saved.sqlite")
        own = debugger if debugger is not None else FakeDebugger()
        return create_app(own, store, limits=limits, **{"static": static, **more})

    return make


@pytest.fixture
def client(make_app: Callable[..., Guard]) -> Iterator[TestClient]:
    with TestClient(make_app(), base_url=HERE) as client:
        yield client


@pytest.fixture
def serve(make_app: Callable[..., Guard]) -> Iterator[Callable[..., httpx2.Client]]:
    """Start a real server; what comes back is a client of it."""
    started: list[tuple[Server, httpx2.Client]] = []

    def start(debugger: Any = None, **more: Any) -> httpx2.Client:
        listening = listen("127.0.0.1", 0)
        port = listening.getsockname()[1]
        server = Server(make_app(debugger, access=Access(port=port), **more), listening)
        server.start()
        client = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        started.append((server, client))
        return client

    yield start
    for server, client in started:
        client.close()
        server.stop()
        assert not server.is_running
