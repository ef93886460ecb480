"""The concept index, built while the debugger runs: for all pages, between their requests."""

import itertools
import json
import sqlite3
import threading
import time

import httpx2
import pytest
from asking import frames
from fake import N_LAYERS, PROMPT, FakeDebugger
from rich.console import Console
from starlette.testclient import TestClient

import layerleap as ll
from layerleap.act.debug.debugger import Debugger
from layerleap.act.debug.index_cost import duration, index_cost
from layerleap.lens.vocabulary import build
from layerleap.lens.vocabulary.index_settings import IndexSettings, default_path
from layerleap.lens.vocabulary.store import Building
from layerleap.show.cli import debug as command
from layerleap.show.web import schemas
from tiny_models import sentences, tiny

TEXT = "the cat sat on the"
ASK = {"input": {"text": PROMPT}}


@pytest.fixture
def own_text(empty_cache, monkeypatch):
    """A text for natural ranges: the bundled one would be fetched, because the cache is empty."""
    for module in ("lens.vocabulary.build", "act.debug.index_cost"):
        monkeypatch.setattr(f"layerleap.{module}.reference_text", lambda _: (sentences(20), ""))


def state(client):
    answer = client.get("/api/index").json()
    schemas.IndexBuild.model_validate(answer)
    return answer


def wait(client, *states):
    deadline = time.monotonic() + 30
    while (found := state(client))["state"] not in states:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


def post(client):
    return client.post("/api/index", json={}).json()


def missing(**settings):
    return FakeDebugger(index=False, buildable=True, **settings)


def test_requests_are_answered_while_the_index_is_built_and_then_it_is_searched(serve):
    debugger = missing(step=0.03)
    client = serve(debugger)
    offer = wait(client, "missing")
    assert post(client)["state"] in ("waiting", "building")
    cell = client.post("/api/cell", json={**ASK, "block": 3, "position": 1})
    trace = frames(client.post("/api/trace", json=ASK).text)
    assert cell.status_code == 200
    assert trace[0]["frame"] == "meta", "nobody was ahead"
    assert debugger.blocks_done < N_LAYERS, "the build has not held them up"
    half = wait(client, "building")
    assert (half["phase"], half["total"], half["unit"]) == ("reading neurons", N_LAYERS, "blocks")
    assert wait(client, "ready")["message"] is None
    assert client.get("/api/search", params={"q": "guitar"}).json()["results"]
    assert offer["state"] == "missing"


def test_the_offer_says_what_building_takes_and_the_progress_what_is_left(serve):
    debugger = missing(step=0.02)
    client = serve(debugger)
    deadline = time.monotonic() + 10
    while (offer := state(client))["seconds"] is None:  # it is measured when nobody waits
        assert time.monotonic() < deadline
    assert (offer["seconds"], offer["megabytes"], offer["share"]) == (120, 64.8, 0)
    post(client)
    shares = []
    while (found := state(client))["state"] != "ready":
        if found["state"] == "building":
            shares.append(found["share"])
            assert found["seconds"] == pytest.approx(120 * (1 - found["share"]))
    assert shares == sorted(shares)
    assert 0 < shares[-1] < 1


def test_a_stopped_build_keeps_what_is_done_and_goes_on(serve):
    debugger = missing(step=0.02)
    client = serve(debugger)
    post(client)
    while debugger.blocks_done < 3:
        time.sleep(0.01)
    assert client.delete("/api/index").json()["state"] in ("stopping", "missing")
    wait(client, "missing")
    kept = debugger.blocks_done
    assert 3 <= kept < N_LAYERS
    deadline = time.monotonic() + 10
    while state(client)["seconds"] != 120 - 3 * kept:
        assert time.monotonic() < deadline
    assert state(client)["share"] > 0
    post(client)
    wait(client, "ready")
    assert client.delete("/api/index").json()["state"] == "ready"


def test_two_pages_see_one_build(serve):
    calls = []

    class Counted(FakeDebugger):
        def build_index(self, progress):
            calls.append(threading.current_thread())
            super().build_index(progress)

    client = serve(Counted(index=False, buildable=True, step=0.01))
    with httpx2.Client(base_url=client.base_url, timeout=60) as other:
        post(client)
        post(other)
        shown = wait(other, "building")
        assert shown["total"] == N_LAYERS or shown["phase"] in (None, "starting")
        wait(client, "ready")
        assert post(other)["state"] == "ready"
    assert len(calls) == 1


def test_a_server_without_an_index_of_its_own_does_not_build_one(make_app):
    with TestClient(make_app(FakeDebugger(index=False)), base_url="http://localhost") as client:
        found = state(client)
        refused = client.post("/api/index", json={})
    assert found["state"] == "unavailable"
    assert "layerleap index" in found["message"]
    assert (refused.status_code, refused.json()["error"]) == (422, found["message"])


def test_a_build_that_fails_says_why_and_may_be_tried_again(serve):
    class Failing(FakeDebugger):
        def build_index(self, progress):
            if self.step:
                raise RuntimeError("a mistake of the server's")
            super().build_index(progress)

    debugger = Failing(index=False, buildable=True)
    client = serve(debugger)
    post(client)
    assert wait(client, "failed")["message"] == "the server failed: RuntimeError"
    debugger.step = 0
    post(client)
    wait(client, "ready")


@pytest.mark.usefixtures("own_text")
def test_another_process_that_builds_it_is_named_and_waited_for():
    model = tiny()
    target = default_path(model, IndexSettings())
    with ll.debug(model, progress=False) as session:
        client = httpx2.Client(base_url=session.url, timeout=60)
        with Building(target, IndexSettings().to_dict(model)):
            post(client)
            assert "another process is building" in wait(client, "failed")["message"]
            with pytest.raises(ll.LayerleapError, match="another process is building"):
                index_cost(model)
        post(client)
        assert wait(client, "ready")["state"] == "ready"
        assert client.get("/api/search", params={"q": "cat"}).json()["results"]
        client.close()


@pytest.mark.usefixtures("own_text")
def test_a_server_that_stops_while_it_builds_leaves_a_build_to_go_on_with(monkeypatch):
    model, own, read = tiny(), build.both_ends, []
    reached, closing = threading.Event(), threading.Event()

    def slow(values, *rest):
        read.append(len(values))
        if len(read) == 2:
            reached.set()
            closing.wait(20)
        return own(values, *rest)

    monkeypatch.setattr(build, "both_ends", slow)
    whole = index_cost(model).total
    with ll.debug(model, progress=False) as session:
        httpx2.post(f"{session.url}api/index", json={}, timeout=60)
        assert reached.wait(20)
        threading.Timer(0.3, closing.set).start()
    assert not default_path(model, IndexSettings()).exists()
    cost = index_cost(model)
    assert cost.left < cost.total
    assert whole > 0
    with ll.debug(model, progress=False) as session:
        client = httpx2.Client(base_url=session.url, timeout=60)
        post(client)
        wait(client, "ready")
        client.close()
    assert len(read) == 4, "the first of three blocks was kept"


@pytest.mark.usefixtures("own_text")
def test_what_is_answered_between_two_pieces_of_the_build_and_the_index_are_the_same(tmp_path):
    model = tiny()
    debugger = Debugger(model)
    ids = debugger.encode(TEXT)

    def answers():
        options = {"lens": "logit", "watch": None, "top": 3}
        trace = [
            {**frame, "seconds": 0}
            for frame in Debugger(model).trace(ids, edits=["L2.N3=9"], lens="logit", top=3)
        ]
        cell = debugger.cell(ids, block=2, position=1, edits=["L1.N2=off"], **options)
        return json.dumps([trace, cell])

    alone, phases = answers(), []

    def ask(phase, done, total, unit="texts"):
        if phase not in phases or phase == "natural ranges":
            assert answers() == alone, phase
        phases.append(phase)

    options = {"text": sentences(20), "n_texts": 20, "clusters": 5}
    between = build.index(model, tmp_path / "between", progress=ask, **options)
    plain = build.index(model, tmp_path / "plain", progress=False, **options)
    assert {
        "reading neurons",
        "naming tokens",
        "sorting tokens",
        "natural ranges",
        "clusters",
    } <= set(phases)
    assert contents(between.path) == contents(plain.path)


def contents(path):
    with sqlite3.connect(path) as connection:
        names = ("vectors", "ranges", "tokens", "postings", "clusters", "members")
        return [connection.execute(f"SELECT * FROM {name}").fetchall() for name in names]


def test_estimates_are_words_that_people_use():
    assert list(map(duration, (1, 12, 54, 55, 89, 95, 600))) == [
        "5 seconds",
        "10 seconds",
        "55 seconds",
        "1 minute",
        "1 minute",
        "2 minutes",
        "10 minutes",
    ]


class Offered:
    """A debugger without an index, and what becomes of it."""

    def __init__(self, model):
        self.model, self.built = model, 0

    def index_state(self):
        return {"ready": False, "reason": "no index", "buildable": True}

    def index_cost(self):
        return index_cost(self.model)

    def build_index(self, progress):
        self.built += 1


@pytest.mark.usefixtures("own_text")
@pytest.mark.parametrize(("typed", "built"), [("y\n", 1), ("\n", 0), (None, 0)])
def test_the_command_offers_the_index_on_a_terminal_and_else_says_where_it_is_built(
    monkeypatch, capsys, typed, built
):
    debugger, asked = Offered(tiny()), itertools.count()

    class Terminal:
        def isatty(self):
            return typed is not None

        def readline(self, *_):
            next(asked)
            return typed

    monkeypatch.setattr("sys.stdin", Terminal())
    if typed is not None:
        monkeypatch.setattr(command, "err", Console(stderr=True, force_terminal=True))
    command._offer_index(debugger)
    said = capsys.readouterr().err
    assert debugger.built == built
    assert next(asked) == (typed is not None)
    assert "about 5 seconds" in said
    assert ("Build it now" in said) is (typed is not None)
    assert ("on the page" in said) is (typed is None)
