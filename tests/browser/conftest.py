"""The page in a real browser: the system's Chromium, driven by Playwright, against the real app.

The app runs around the make-believe debugger of `tests/web/fake.py`, so that no model is needed.
No test may reach anything but this machine: such requests are aborted, and their test fails.
"""

import asyncio
import faulthandler
import re
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from browsing import WIDE, find_chromium

sys.path.insert(0, str(Path(__file__).parents[1] / "web"))

ELSEWHERE = re.compile(r"^(?!data:|blob:|file:|https?://127\.0\.0\.1[:/])")


class Served:
    """The app on a port of its own; it can go away and come back."""

    def __init__(self, folder, debugger=None, **settings):
        from fake import FakeDebugger

        from layerleap.show.web.store import Store

        self.debugger = debugger or FakeDebugger(**settings)
        self.store = Store("f" * 32, folder / "sessions.sqlite")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        self.start()

    def start(self):
        import uvicorn

        from layerleap.show.web.app import create_app

        app = create_app(self.debugger, self.store)
        config = uvicorn.Config(
            app, "127.0.0.1", self.port, log_level="critical", timeout_graceful_shutdown=1
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.thread.start()
        deadline = time.monotonic() + 20
        while not self.server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.server.started

    async def _serve(self):
        self.loop = asyncio.get_running_loop()
        await self.server.serve()

    def stop(self):
        self.server.should_exit = True
        self.thread.join(20)
        if self.thread.is_alive():  # say where it waits; then it must not wait for anyone
            faulthandler.dump_traceback(file=sys.__stderr__)
            for task in asyncio.all_tasks(self.loop):
                task.print_stack(file=sys.__stderr__)
            self.server.force_exit = True
            self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    pytest.importorskip("uvicorn")
    pytest.importorskip("fastapi")
    served = Served(tmp_path_factory.mktemp("served"))
    yield served
    served.stop()


@pytest.fixture
def own_server(tmp_path):
    """A server that one test may stop, or start with other settings."""
    made = []

    def start(debugger=None, **settings):
        made.append(Served(tmp_path, debugger, **settings))
        return made[-1]

    pytest.importorskip("uvicorn")
    yield start
    for served in made:
        if served.thread.is_alive():
            served.stop()


@pytest.fixture(scope="session")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api")
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium on this machine; on Debian: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(chromium, server):
    """Opens the page in a tab of a fresh profile. Fails on mistakes of the page's own."""
    contexts, faults = [], []

    def open_tab(fragment="", *, url=None, size=WIDE, scheme="light", share=None):
        context = share
        if context is None:
            context = chromium.new_context(
                viewport=size, color_scheme=scheme, accept_downloads=True, reduced_motion="reduce"
            )
            context.set_default_timeout(30_000)
            context.route(
                ELSEWHERE, lambda route: (faults.append(route.request.url), route.abort())
            )
            contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: note(said, faults))
        page.goto((url or server.url) + (f"#{fragment}" if fragment else ""))
        page.wait_for_selector("#model:not(:text('Loading'))")
        return page

    yield open_tab
    for context in contexts:
        context.close()
    assert faults == []


def note(said, faults):
    """What the console says is a mistake, except that a request was refused or not answered."""
    if said.type == "error" and "Failed to load resource" not in said.text:
        faults.append(said.text)
