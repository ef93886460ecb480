"""How work becomes an answer: a validated model, a stream of lines, a file, or an error.

A client that goes away takes its work with it, whether that waits or runs.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from layerleap.errors import LayerleapError
from layerleap.show.web.frames import ErrorFrame, QueuedFrame
from layerleap.show.web.schemas import Answer
from layerleap.show.web.worker import Busy, Emit, Job, ShouldStop, Work, Worker

A = TypeVar("A")
NDJSON = "application/x-ndjson"
# The system's table of types may lack these or have others; modules need an exact type.
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


def refusal(status: int, sentence: str, **more: Any) -> JSONResponse:
    """An error: one sentence, without what UTF-8 cannot carry."""
    headers = {"retry-after": "1"} if status == 429 else None
    return JSONResponse({"error": _as_utf8(sentence), **more}, status, headers=headers)


def _as_utf8(sentence: str) -> str:
    return sentence.encode("utf8", "replace").decode()


async def answer(worker: Worker, request: Request, compute: Callable[[], A]) -> A:
    """The result of `compute`, run by the worker."""
    results: list[A] = []

    def work(emit: Emit, should_stop: ShouldStop) -> None:
        results.append(compute())

    job = worker.submit(work)
    reading = asyncio.ensure_future(_end(job))
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            reading.result()  # raises what the work raised
    finally:
        reading.cancel()
        leaving.cancel()
        worker.cancel(job)
    if not results:
        raise HTTPException(503, "the request was stopped before its answer was complete")
    return results[0]


async def _end(job: Job) -> None:
    """Return when the work is done; before that, there are frames with its place in the queue."""
    async for _ in job.frames():
        pass


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
    return Lines(_lines(worker, job, first))


class Lines(StreamingResponse):
    """A stream that no proxy should hold back."""

    media_type = NDJSON

    def init_headers(self, headers: Any = None) -> None:
        """Add ours to the usual ones."""
        super().init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})


async def _lines(worker: Worker, job: Job, first: Answer | None) -> AsyncIterator[bytes]:
    try:
        if job.ahead:
            yield _line(QueuedFrame(place=job.ahead))
        elif first is None:  # no frame at all: the server is shutting down
            return
        else:
            yield _line(first)
        async for frame in job.frames():
            yield _line(frame)
    except Busy as error:
        yield _line(ErrorFrame(error=_as_utf8(str(error)), place=error.place))
    except LayerleapError as error:
        yield _line(ErrorFrame(error=_as_utf8(str(error))))
    except Exception as error:  # a mistake of ours: the page must not wait for ever
        yield _line(ErrorFrame(error=f"the server failed: {type(error).__name__}"))
        raise
    finally:
        worker.cancel(job)


def _line(frame: Answer) -> bytes:
    return frame.model_dump_json(by_alias=True).encode() + b"\n"


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
