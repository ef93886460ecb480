"""The app: a debugger, a store and limits in, an ASGI application out. No globals.

Every request passes the guard first; see `layerleap.show.web.guard`.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

import layerleap
from layerleap.act.debug.debugger import Debugger
from layerleap.errors import LayerleapError
from layerleap.show.web.access import Access
from layerleap.show.web.answers import StaticPage, refusal
from layerleap.show.web.guard import Guard
from layerleap.show.web.indexing import IndexBuilder, index_routes
from layerleap.show.web.limits import Limits
from layerleap.show.web.routes import model_routes, saved_routes
from layerleap.show.web.store import Store
from layerleap.show.web.vectors import vector_routes, weight_routes
from layerleap.show.web.worker import Busy, Worker

STATIC = Path(__file__).with_name("static")
# Newer versions of FastAPI can send traces of requests elsewhere; prompts stay on this machine.
UNSEEN: Any = dict.fromkeys(
    ("tracing", "metrics", "logs", "operation_spans", "auto_configure"), False
)
ROUTES: tuple[Callable[["Served"], APIRouter], ...] = (
    model_routes,
    vector_routes,
    weight_routes,
    index_routes,
    saved_routes,
)
WORDS = {404: "there is nothing at this address", 405: "this address does not take this method"}


@dataclass(frozen=True)
class Served:
    """What the routes work with."""

    debugger: Debugger
    store: Store
    worker: Worker
    limits: Limits
    builder: IndexBuilder


def create_app(
    debugger: Debugger,
    store: Store,
    *,
    access: Access | None = None,
    limits: Limits | None = None,
    static: Path = STATIC,
    in_notebook: bool = False,
    worker: Worker | None = None,
    routes: Sequence[Callable[[Served], APIRouter]] = ROUTES,
) -> Guard:
    """Build the app around a debugger.

    Args:
        debugger: what the routes call.
        store: keeps sessions and names; it is closed with the app.
        access: which requests are accepted; by default all that reach the loopback address.
        limits: on requests.
        static: the folder of the page.
        in_notebook: let pages of this machine show ours in a frame.
        worker: does the model's work; by default one with a thread of its own.
        routes: functions that make them; a panel of yours may add one to `ROUTES`.
    """
    limits = limits or Limits()
    if worker is None:
        worker = Worker(limits.waiting)
        worker.start()
    longest = debugger.describe()["longest"] or limits.tokens
    limits = replace(limits, tokens=min(limits.tokens, longest))
    served = Served(debugger, store, worker, limits, IndexBuilder(debugger, worker))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        served.worker.close()
        store.close()

    # The pages of /docs fetch scripts from elsewhere; the schema itself stays.
    app = FastAPI(
        title="layerleap debug",
        version=layerleap.__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
        lifespan=lifespan,
        telemetry=UNSEEN,
    )
    for make_routes in routes:
        app.include_router(make_routes(served), prefix="/api")
    app.router.default = StaticPage(static)  # not a mount, which would hide wrong methods
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(LayerleapError, _ours)
    app.add_exception_handler(Exception, _failed)
    # Outermost, so that even an answer to a mistake of ours carries the guard's headers.
    return Guard(app, access or Access(), limits, in_notebook=in_notebook, stop=served.worker.stop)


async def _invalid(_: Request, error: Any) -> Response:
    first = error.errors()[0]
    if first["type"] == "string_too_long":
        name, most = first["loc"][-1], first["ctx"]["max_length"]
        return refusal(
            422,
            f"the {name} has {len(first['input']):,} characters, but at most {most:,} can be "
            "read; shorten it",
        )
    where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    what = first["msg"].removeprefix("Value error, ")
    return refusal(422, f"{where}: {what}" if where else what)


async def _refused(_: Request, error: Any) -> Response:
    sentence = WORDS.get(error.status_code, error.detail)
    answer = refusal(error.status_code, str(sentence))
    answer.headers.update(error.headers or {})
    return answer


async def _failed(_: Request, error: Exception) -> Response:
    name = type(error).__name__
    return refusal(500, f"the server failed ({name}); the terminal it runs in says where")


async def _ours(_: Request, error: Any) -> Response:
    if isinstance(error, Busy):
        return refusal(429, str(error), place=error.place)
    return refusal(422, str(error))
