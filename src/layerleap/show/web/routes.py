"""Routes that ask the model: what it is, tokens, traces, cells and generated text."""

import time
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

import layerleap
from layerleap.errors import BadText
from layerleap.show.web import requests as ask
from layerleap.show.web.answers import answer, stream
from layerleap.show.web.worker import Emit, ShouldStop

if TYPE_CHECKING:
    from layerleap.show.web.app import Served


def model_routes(served: "Served") -> APIRouter:
    """The routes, around one engine."""
    routes, engine, limits = APIRouter(), served.engine, served.limits

    def prompt(given: ask.Input) -> list[int]:
        """The ids of a prompt; on the worker's thread, because a tokenizer is not for many."""
        ids = given.ids
        if ids is None:
            ids = [token["id"] for token in engine.tokens(given.text or "")]
        if not ids:
            raise BadText("the prompt is empty; type something to read")
        if len(ids) > limits.tokens:
            raise BadText(
                f"the prompt has {len(ids)} tokens; at most {limits.tokens} are read, so shorten it"
            )
        return ids

    @routes.get("/model")
    def model() -> dict[str, Any]:
        return {
            **engine.describe(), "limits": limits.to_dict(), "version": layerleap.__version__,
        }  # fmt: skip

    @routes.post("/tokens")
    def tokens(body: ask.Text) -> dict[str, Any]:
        return {"tokens": engine.tokens(body.text), "limit": limits.tokens}

    @routes.post("/vocabulary")
    def vocabulary(body: ask.Text) -> dict[str, Any]:
        return {"tokens": engine.vocabulary(body.text)}

    @routes.post("/trace")
    async def trace(body: ask.Trace) -> Response:
        def work(emit: Emit, should_stop: ShouldStop) -> None:
            for frame in engine.trace(
                prompt(body.input), lens=body.lens, watch=body.watch, edits=body.edits,
                top=body.top, selected=body.selected, should_stop=should_stop,
            ):  # fmt: skip
                emit(frame)

        return await stream(served.worker, work)

    @routes.post("/cell")
    async def cell(body: ask.Cell, request: Request) -> Response:
        def compute() -> Any:
            found = engine.cell(
                prompt(body.input), block=body.block, position=body.position, lens=body.lens,
                watch=body.watch, edits=body.edits, top=body.top,
            )  # fmt: skip
            for side in (found, found.get("after") or {}):
                _name(served, body.block, side)
            return found

        return await answer(served.worker, request, compute)

    @routes.post("/generate")
    async def generate(body: ask.Generate) -> Response:
        def work(emit: Emit, should_stop: ShouldStop) -> None:
            ids = prompt(body.input)
            for side in dict.fromkeys(body.sides):
                _write(served, ids, side, body, emit, should_stop)
            emit({"frame": "end"})

        return await stream(served.worker, work)

    return routes


def _name(served: "Served", block: int, cell: dict[str, Any]) -> None:
    """Add the user's names to the sub-updates of a cell."""
    updates = (cell.get("neurons") or {}).get("updates", [])
    names = served.store.names((block, each["neuron"]) for each in updates)
    for each in updates:
        each["name"] = names.get((block, each["neuron"]))


def _write(
    served: "Served",
    ids: list[int],
    side: str,
    body: ask.Generate,
    emit: Emit,
    should_stop: ShouldStop,
) -> None:
    """Generate one side."""
    emit({"frame": "start", "side": side})
    pieces: list[str] = []
    started = time.perf_counter()

    def on_token(token: dict[str, Any], piece: str) -> None:
        pieces.append(piece)
        shown = {"id": token["id"], "piece": piece, "label": token["label"]}
        emit({"frame": "token", "side": side, **shown})

    served.engine.generate(
        ids, edits=body.edits if side == "edited" else [], max_new_tokens=body.max_new_tokens,
        on_token=on_token, should_stop=should_stop,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    emit({"frame": "done", "side": side, "text": "".join(pieces), "seconds": seconds})
