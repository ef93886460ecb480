"""How work becomes an answer: one JSON object, a stream of lines, a file, or an error.

A client that goes away takes its work with it, whether that waits or runs.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from layerleap.errors import LayerleapError
from layerleap.show.web.worker import Busy, Emit, Frame, Job, ShouldStop, Work, Worker

NDJSON = "application/x-ndjson"
# The system's table of types may lack these or have others; modules need an exact type.
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".json": "application/json",
    ".woff2": "font/woff2",
    ".ico": "image/x-icon",
}


def refusal(status: int, sentence: str, **more: Any) -> JSONResponse:
    """An error: one sentence, without what UTF-8 cannot carry."""
    clean = sentence.encode("utf8", "replace").decode()
    headers = {"retry-after": "1"} if status == 429 else None
    return JSONResponse({"error": clean, **more}, status, headers=headers)


async def answer(worker: Worker, request: Request, compute: Callable[[], Any]) -> Response:
    """The result of `compute`, run by the worker."""

    def work(emit: Emit, should_stop: ShouldStop) -> None:
        emit({"result": compute()})

    job = worker.submit(work)
    try:
        reading = asyncio.ensure_future(_result(job))
        leaving = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return Json(reading.result() if reading.done() else None)
        finally:
            reading.cancel()
            leaving.cancel()
    finally:
        worker.cancel(job)


async def _result(job: Job) -> Any:
    """What the work emitted last; before it come places in the queue."""
    result = None
    async for frame in job.frames():
        result = frame.get("result")
    return result


async def _gone(request: Request) -> None:
    """Return when the client has closed the connection; the body has been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def stream(worker: Worker, work: Work) -> Response:
    """The frames of some work, a line each.

    The first frame is waited for unless others are ahead: a mistake in the request then has a
    status of its own. Later errors can only be a line.
    """
    job = worker.submit(work)
    try:
        first = None if job.ahead else await job.next()
    except BaseException:
        worker.cancel(job)
        raise
    return Lines(_lines(worker, job, first), media_type=NDJSON)


class Lines(StreamingResponse):
    """A stream that no proxy should hold back."""

    def init_headers(self, headers: Any = None) -> None:
        """Add ours to the usual ones."""
        super().init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})


async def _lines(worker: Worker, job: Job, first: Frame | None) -> AsyncIterator[bytes]:
    try:
        if job.ahead:
            yield _line({"frame": "queued", "place": job.ahead})
        elif first is None:  # no frame at all: the server is shutting down
            return
        else:
            yield _line(first)
        async for frame in job.frames():
            yield _line(frame)
    except Busy as error:
        yield _line({"frame": "error", "error": str(error), "place": error.place})
    except LayerleapError as error:
        yield _line({"frame": "error", "error": str(error)})
    except Exception as error:  # a mistake of ours: the page must not wait for ever
        yield _line({"frame": "error", "error": f"the server failed: {type(error).__name__}"})
        raise
    finally:
        worker.cancel(job)


def _line(frame: Frame) -> bytes:
    return as_json(frame) + b"\n"


class Json(JSONResponse):
    """An answer of the model's, whose numbers may have left the finite ones."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return as_json(content)


def as_json(value: Any) -> bytes:
    """JSON, in which a number that is not finite is null: an edit can drive a model that far."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf8", "replace")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inside) for inside in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class StaticPage(StaticFiles):
    """Files of one folder; `/` is index.html. An entity tag saves sending them again."""

    def __init__(self, folder: Any) -> None:
        super().__init__(directory=folder, html=True, check_dir=False)

    async def get_response(self, path: str, scope: Scope) -> Response:
        """One file."""
        response = await super().get_response(path, scope)
        suffix = "." + path.rpartition(".")[2] if "." in path else ".html"
        if kind := TYPES.get(suffix):
            response.headers["content-type"] = kind
        response.headers["cache-control"] = "no-cache"
        return response
