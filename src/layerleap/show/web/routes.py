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

    def checked(given: ask.Input) -> list[int] | str:
        """The prompt, if it is not too long; a text is cut into tokens by the engine alone."""
        ids = given.ids if given.ids is not None else [0] * len(engine.tokens(given.text or ""))
        if len(ids) > limits.tokens:
            raise BadText(
                f"the prompt has {len(ids)} tokens; at most {limits.tokens} are read, so shorten it"
            )
        return given.value

    @routes.get("/model")
    def model() -> dict[str, Any]:
        return {
            **engine.describe(), "limits": limits.to_dict(), "version": layerleap.__version__,
        }  # fmt: skip

    @routes.post("/tokens")
    def tokens(body: ask.Text) -> dict[str, Any]:
        return {"tokens": [t.to_dict() for t in engine.tokens(body.text)], "limit": limits.tokens}

    @routes.post("/vocabulary")
    def vocabulary(body: ask.Text) -> dict[str, Any]:
        return {"tokens": [t.to_dict() for t in engine.vocabulary(body.text)]}

    @routes.post("/trace")
    async def trace(body: ask.Trace) -> Response:
        prompt = checked(body.input)

        def work(emit: Emit, should_stop: ShouldStop) -> None:
            for frame in engine.trace(
                prompt, lens=body.lens, watch=body.watch, edits=body.edits, top=body.top,
                selected=body.selected, should_stop=should_stop,
            ):  # fmt: skip
                emit(frame)

        return await stream(served.worker, work)

    @routes.post("/cell")
    async def cell(body: ask.Cell, request: Request) -> Any:
        prompt = checked(body.input)

        def compute() -> Any:
            found = engine.cell(
                prompt, block=body.block, position=body.position, lens=body.lens,
                watch=body.watch, edits=body.edits, top=body.top,
            )  # fmt: skip
            for side in (found, found.get("after") or {}):
                _name(served, body.block, side)
            return found

        return await answer(served.worker, request, compute)

    @routes.post("/generate")
    async def generate(body: ask.Generate) -> Response:
        prompt = checked(body.input)

        def work(emit: Emit, should_stop: ShouldStop) -> None:
            for side in dict.fromkeys(body.sides):
                emit({"frame": "start", "side": side})
                _write(served, prompt, side, body, emit, should_stop)
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
    prompt: list[int] | str,
    side: str,
    body: ask.Generate,
    emit: Emit,
    should_stop: ShouldStop,
) -> None:
    """Generate one side."""
    pieces: list[str] = []
    started = time.perf_counter()

    def on_token(token: Any, piece: str) -> None:
        pieces.append(piece)
        emit(
            {"frame": "token", "side": side, "id": token.id, "piece": piece, "label": token.label}
        )

    served.engine.generate(
        prompt, edits=body.edits if side == "edited" else [], max_new_tokens=body.max_new_tokens,
        on_token=on_token, should_stop=should_stop,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    emit({"frame": "done", "side": side, "text": "".join(pieces), "seconds": seconds})
