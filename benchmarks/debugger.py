"""The debugger's server, run as a user runs it: how soon it answers, and whether it stays sound.

debug_first    from a request for a trace of 40 tokens to the first cells, over a bare forward pass
debug_memory   memory of the server after 1,000 requests, over its memory before them
debug_clients  wrong answers and failures when eight clients ask at once
"""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from common import MODEL, Row, median, timed

N_TOKENS = 40
N_CLIENTS = 8
LONG = 200  # tokens of the prompts that fill the server's cache of prompts
TEXT = "the old river ran under a small bridge near our town and then it turned north"
WORDS = TEXT.split()


def run(*, smoke: bool) -> list[Row]:
    """All three, on one server."""
    with _server() as (url, process), _client(url) as client:
        return [
            _first(client, 2 if smoke else 25),
            _memory(client, process, 12 if smoke else 1000, 2 if smoke else 30),
            _clients(client, 1 if smoke else 8),
        ]


@contextmanager
def _server() -> Iterator[tuple[str, Any]]:
    """The address and the process of `layerleap debug`."""
    import psutil

    program = str(Path(sys.executable).with_name("layerleap"))
    command = [program, "debug", MODEL, "--port", "0", "--no-browser", "--no-index"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            url = child.stdout.readline().strip()
            if not url:
                raise RuntimeError("layerleap debug did not start")
            yield url, psutil.Process(child.pid)
        finally:
            child.terminate()


def _client(url: str) -> Any:
    import httpx2

    return httpx2.Client(base_url=url, timeout=600)


def _prompt(client: Any, number: int, length: int) -> dict[str, Any]:
    """A prompt of so many tokens, another one for each number, so that no cache knows it."""
    text = " ".join([str(number), *(WORDS[(number + n) % len(WORDS)] for n in range(length))])
    tokens = client.post("/api/tokens", json={"text": text}).json()["tokens"]
    return {"ids": [token["id"] for token in tokens[:length]]}


def _first_cells(client: Any, prompt: dict[str, Any]) -> None:
    """Ask for a trace and leave when the selected position has been read at all layers."""
    with client.stream("POST", "/api/trace", json={"input": prompt}) as answer:
        for line in answer.iter_lines():
            if json.loads(line)["frame"] == "cells":
                return
    raise RuntimeError("the trace had no cells")


def _settle(client: Any) -> None:
    """Wait until the server has noticed that we left: it answers one after the other."""
    client.get("/api/vectors/1/0").raise_for_status()


def _first(client: Any, rounds: int) -> Row:
    import torch

    from layerleap import load

    transformer = load(MODEL)
    prompts = [_prompt(client, number, N_TOKENS) for number in range(rounds + 1)]

    @torch.inference_mode()
    def bare(number: int) -> None:
        transformer.model(torch.tensor([prompts[number]["ids"]]), use_cache=False)

    def answered(number: int) -> None:
        _first_cells(client, prompts[number])

    sides = {"first": answered, "bare": bare}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds, -1, -1):
        for name in sides if number % 2 else reversed(sides):
            seconds[name].append(timed(partial(sides[name], number)))
            _settle(client)
    seconds = {name: samples[1:] for name, samples in seconds.items()}  # the first call is slower
    detail = {
        "note": f"from a request for a trace of {N_TOKENS} new tokens to its first cells: one "
        "position at all layers (ours); a bare forward pass over the same tokens (peer)",
        "samples": seconds,
        "n": rounds,
    }
    medians = map(median, (seconds["first"], seconds["bare"]))
    return Row("debug_first", *medians, "seconds", at_most=1.5, detail=detail)


def _memory(client: Any, process: Any, requests: int, fill: int) -> Row:
    for number in range(fill):  # the server keeps prompts up to a limit; now it has reached it
        _first_cells(client, _prompt(client, number, LONG))
    for number in range(requests // 10):
        _any(client, -number)
    before = process.memory_info().rss
    for number in range(requests):
        _any(client, number)
    after = process.memory_info().rss
    client.delete("/api/sessions/bench")
    detail = {
        "note": f"resident memory of the server after {requests} requests (ours) and before "
        "them, with its cache of prompts already full (peer); the model is included",
        "growth": (after - before) / 2**20,
        "n": requests,
    }
    return Row("debug_memory", after / 2**20, before / 2**20, "MiB", at_most=1.05, detail=detail)


def _any(client: Any, number: int) -> None:
    """One request of a mixture, about a prompt of its own."""
    prompt = {"text": f"{' '.join(WORDS[: 2 + number % 4])} {number}"}
    edits = [f"L{1 + number % 30}.N{number % 1000}=3"] if number % 3 == 0 else []
    kind = number % 8
    if kind == 0:
        answer = client.post("/api/trace", json={"input": prompt, "edits": edits})
    elif kind == 1:
        body = {"input": prompt, "edits": edits, "max_new_tokens": 3, "sides": ["edited"]}
        answer = client.post("/api/generate", json=body)
    elif kind in (2, 3, 4):
        body = {"input": prompt, "edits": edits, "block": 1 + number % 30, "position": 1}
        answer = client.post("/api/cell", json=body)
    elif kind == 5:
        answer = client.get(f"/api/vectors/{1 + number % 30}/{number % 1000}")
    elif kind == 6:
        body = {"title": "bench", "state": {"number": number}}
        answer = client.put("/api/sessions/bench", json=body)
    else:
        answer = client.post("/api/tokens", json=prompt)
    answer.raise_for_status()


def _clients(client: Any, rounds: int) -> Row:
    prompts = [{"text": " ".join(WORDS[n : n + 3 + n % 3])} for n in range(N_CLIENTS)]
    alone = [_answers(client, prompt) for prompt in prompts]
    wrong: list[str] = []

    def ask(number: int) -> None:
        for _ in range(rounds):
            try:
                if _answers(client, prompts[number]) != alone[number]:
                    wrong.append(f"client {number} got another answer")
            except Exception as error:
                wrong.append(f"client {number}: {error!r}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(N_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    detail = {
        "note": f"answers of {N_CLIENTS} clients at once that differ from those of one alone, "
        "or are errors; each asks for a trace, a cell with an edit, and generated text",
        "wrong": wrong[:10],
        "n": rounds * N_CLIENTS * 3,
    }
    return Row("debug_clients", len(wrong), None, "failures", at_most=0, detail=detail)


def _answers(client: Any, prompt: dict[str, Any]) -> list[Any]:
    """What the server says about a prompt, without how long it took."""
    edits = ["L20.N7=4"]
    cell = {"input": prompt, "block": 20, "position": 1, "edits": edits}
    text = {"input": prompt, "edits": edits, "max_new_tokens": 3}
    requests = {"/api/trace": {"input": prompt}, "/api/cell": cell, "/api/generate": text}
    answers = []
    for path, body in requests.items():
        answer = client.post(path, json=body)
        answer.raise_for_status()
        for line in map(json.loads, answer.text.splitlines()):
            if line.get("frame") in ("queued", "error"):
                if line["frame"] == "error":
                    raise RuntimeError(line["error"])
                continue
            answers.append({key: value for key, value in line.items() if key != "seconds"})
    return answers


if __name__ == "__main__":
    for row in run(smoke="--smoke" in sys.argv):
        print(row)
