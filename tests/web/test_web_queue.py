"""One model, many clients: places in the queue, cancelled work, right answers for all."""

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from asking import frames
from fake import PROMPT, FakeDebugger

from layerleap.show.web.limits import Limits
from layerleap.show.web.worker import AHEAD, Job, Worker

META = {"frame": "meta", "tokens": [], "positions": [], "layers": [], "selected": 0}
META |= {"lens": "logit", "edits": [], "lowest": None}


class Slow(FakeDebugger):
    """Traces run until they are let go, or until their client has gone."""

    def __init__(self):
        super().__init__()
        self.go, self.running, self.stopped = threading.Event(), threading.Event(), 0
        self.cells = []

    def cell(self, ids, **options):
        self.cells.append(options["position"])
        return super().cell(ids, **options)

    def trace(self, ids, *, should_stop, **options):
        yield META
        self.running.set()
        while not self.go.wait(0.01):
            if should_stop():
                self.stopped += 1
                return
        yield {"frame": "done", "seconds": 0.1}


ASK = {"input": {"text": PROMPT}}
CELL = {**ASK, "block": 3, "position": 1}


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


@pytest.fixture
def slow():
    debugger = Slow()
    yield debugger
    debugger.go.set()


def in_thread(work):
    result = []
    thread = threading.Thread(target=lambda: result.append(work()))
    thread.start()
    return thread, result


def run_elsewhere(work):
    """Run a coroutine on a thread: this one may have a loop, that of a browser's driver."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(work())).result(60)


def test_a_full_queue_is_said_with_the_place_and_later_there_is_room(serve, slow):
    client = serve(slow, limits=Limits(waiting=2))
    first_lines, rest = [], []

    def wait_in_line():
        with client.stream("POST", "/api/trace", json=ASK) as answer:
            lines = answer.iter_lines()
            first_lines.append(json.loads(next(lines)))
            rest.append([json.loads(line) for line in lines])

    threads = []
    for number in range(3):  # one runs, two wait
        threads.append(in_thread(wait_in_line)[0])
        until(lambda number=number: len(first_lines) > number)
    refused = client.post("/api/trace", json=ASK)
    assert refused.status_code == 429
    assert refused.json()["place"] == 3
    assert "busy" in refused.json()["error"]
    assert refused.headers["retry-after"]
    slow.go.set()
    for thread in threads:
        thread.join(20)
    assert [line.get("place") for line in first_lines] == [None, 1, 2]
    assert all(lines[-1]["frame"] == "done" for lines in rest)
    assert client.post("/api/trace", json=ASK).status_code == 200


def test_who_waits_is_told_when_the_queue_moves(serve, slow):
    client = serve(slow)
    with client.stream("POST", "/api/trace", json=ASK) as first:
        assert first.status_code == 200
        assert slow.running.wait(10)
        second, _ = in_thread(lambda: client.post("/api/trace", json=ASK))
        time.sleep(0.2)
        with client.stream("POST", "/api/trace", json=ASK) as third:
            lines = third.iter_lines()
            assert json.loads(next(lines)) == {"frame": "queued", "place": 2}
            slow.go.set()
            rest = [json.loads(line) for line in lines]
        second.join(10)
    assert {"frame": "queued", "place": 1} in rest
    assert [frame["frame"] for frame in rest][-2:] == ["meta", "done"]


def test_who_asks_one_thing_after_the_other_never_waits(serve):
    client = serve()
    for _ in range(30):
        assert client.post("/api/cell", json=CELL).status_code == 200
        assert client.post("/api/trace", json={"input": {"text": "!error"}}).status_code == 422
        answer = client.post("/api/generate", json={**ASK, "max_new_tokens": 1})
        assert frames(answer.text)[0]["frame"] == "start", "nobody was ahead"


def test_the_work_waits_for_a_client_that_reads_slowly():
    async def read():
        job = Job(lambda emit, _: [emitted.append(emit({"n": n})) for n in range(10 * AHEAD)])
        thread = threading.Thread(target=lambda: job.put(job.run()))
        thread.start()
        await asyncio.to_thread(until, lambda: len(emitted) == AHEAD)
        await asyncio.sleep(0.2)
        assert len(emitted) == AHEAD, "no more than that is kept"
        read = [frame["n"] async for frame in job.frames()]
        thread.join(10)
        return read

    emitted = []
    assert run_elsewhere(read) == list(range(10 * AHEAD))


@pytest.mark.parametrize("leaves", [True, False])
def test_a_client_that_reads_nothing_does_not_hold_the_model(monkeypatch, leaves):
    monkeypatch.setattr("layerleap.show.web.worker.PATIENCE", 60 if leaves else 0.2)

    async def stall():
        worker = Worker(2)
        worker.start()
        stalled = worker.submit(lambda emit, _: [emitted.append(emit({})) for _ in range(1000)])
        await asyncio.to_thread(until, lambda: len(emitted) == AHEAD)
        if leaves:
            worker.cancel(stalled)
        following = worker.submit(lambda emit, _: emit({"result": 1}))
        frames = [frame async for frame in following.frames()]
        worker.close()
        return frames[-1]

    emitted = []
    assert run_elsewhere(stall) == {"result": 1}
    assert len(emitted) == AHEAD


def test_ctrl_c_in_a_job_of_this_thread_ends_its_stream_and_the_run():
    worker, told = Worker(2), []

    def press(emit, _):
        emit({"frame": "first"})
        raise KeyboardInterrupt

    async def read():
        told.extend([frame["frame"] async for frame in worker.submit(press).frames()])

    reading, _ = in_thread(lambda: asyncio.run(read()))
    with pytest.raises(KeyboardInterrupt):
        worker.run()
    reading.join(10)
    assert not reading.is_alive()
    assert told == ["first"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_work_beside_a_server_that_cannot_start_ends_with_an_error(make_app, slow):
    from layerleap.show.web.serve import Server, listen

    worker = Worker(2)
    app, listening = make_app(slow, worker=worker), listen("127.0.0.1", 0)
    listening.close()
    with pytest.raises(RuntimeError, match="stopped unexpectedly"):
        Server(app, listening).run_beside(worker.run)


def test_a_client_that_leaves_frees_the_worker(serve, slow):
    client = serve(slow)
    with client.stream("POST", "/api/trace", json=ASK) as answer:
        assert answer.status_code == 200
        assert slow.running.wait(10)
    until(lambda: slow.stopped == 1)
    assert client.post("/api/cell", json=CELL).status_code == 200


def test_a_client_that_leaves_the_queue_is_forgotten(serve, slow):
    client = serve(slow, limits=Limits(waiting=1))
    with client.stream("POST", "/api/trace", json=ASK):
        assert slow.running.wait(10)
        with client.stream("POST", "/api/trace", json=ASK) as waiting:
            assert waiting.status_code == 200
            assert client.post("/api/cell", json=CELL).status_code == 429

        def has_room():
            with client.stream("POST", "/api/trace", json=ASK) as answer:
                return answer.status_code == 200

        until(has_room)
    until(lambda: slow.stopped == 1)


def test_a_cell_that_nobody_waits_for_is_not_computed(serve, slow):
    client = serve(slow, limits=Limits(waiting=1))
    with client.stream("POST", "/api/trace", json=ASK):
        assert slow.running.wait(10)
        body = json.dumps({**CELL, "position": 2}).encode()
        with socket.create_connection((client.base_url.host, client.base_url.port)) as raw:
            raw.sendall(
                b"POST /api/cell HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            time.sleep(0.3)
            assert client.post("/api/cell", json=CELL).status_code == 429

        def has_room():
            with client.stream("POST", "/api/trace", json=ASK) as answer:
                return answer.status_code == 200

        until(has_room)
        slow.go.set()
    assert client.post("/api/cell", json=CELL).status_code == 200
    assert slow.cells == [1], "the cell at position 2 was dropped"


def test_neighbours_wait_for_the_model_because_they_read_its_weights(serve, slow):
    client = serve(slow, limits=Limits(waiting=1))
    near = "/api/vectors/3/4/neighbours"
    with client.stream("POST", "/api/trace", json=ASK):
        assert slow.running.wait(10)
        thread, answers = in_thread(lambda: client.get(near))
        time.sleep(0.3)
        assert client.get(near).status_code == 429
        assert not answers
        slow.go.set()
    thread.join(10)
    assert answers[0].status_code == 200
    assert answers[0].json()["neighbours"]


def test_cheap_questions_do_not_wait_for_the_model(serve, slow):
    client = serve(slow)
    with client.stream("POST", "/api/trace", json=ASK):
        assert slow.running.wait(10)
        assert client.get("/api/model", timeout=5).status_code == 200
        assert client.post("/api/tokens", json={"text": "a"}, timeout=5).status_code == 200
        assert client.get("/api/sessions", timeout=5).status_code == 200
        assert client.get("/", timeout=5).status_code == 200


def test_eight_clients_at_once_get_their_own_answers(serve):
    client = serve(limits=Limits(waiting=16))
    expected = {
        position: client.post("/api/cell", json={**CELL, "position": position}).json()
        for position in range(8)
    }
    statuses, wrong = [], []

    def work(position):
        for _ in range(10):
            answer = client.post("/api/cell", json={**CELL, "position": position})
            statuses.append(answer.status_code)
            if answer.status_code == 200 and answer.json() != expected[position]:
                wrong.append(position)
            got = frames(client.post("/api/trace", json={**ASK, "selected": position}).text)
            if next(f for f in got if f["frame"] == "meta")["selected"] != position:
                wrong.append(position)

    threads = [threading.Thread(target=work, args=(position,)) for position in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong
    assert set(statuses) == {200}
    assert len(statuses) == 80


def test_a_stream_that_runs_ends_when_the_server_stops(make_app, slow):
    import httpx2

    from layerleap.show.web.access import Access
    from layerleap.show.web.serve import Server, listen

    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    server = Server(make_app(slow, access=Access(port=port)), listening)
    server.start()
    with (
        httpx2.Client(base_url=f"http://127.0.0.1:{port}") as client,
        client.stream("POST", "/api/trace", json=ASK) as answer,
    ):
        assert slow.running.wait(10)
        server.stop()
        assert not server.is_running
        assert [frame["frame"] for frame in frames(answer.read().decode())] == ["meta"]
    assert slow.stopped == 1
