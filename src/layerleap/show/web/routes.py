"""Routes that ask the model, and those for what the user keeps: sessions and exports."""

import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Request
from starlette.responses import Response

import layerleap
from layerleap.errors import BadSettings, BadText
from layerleap.show.web import requests as ask, schemas
from layerleap.show.web.answers import answer, stream
from layerleap.show.web.schemas import shape
from layerleap.show.web.snippet import exported
from layerleap.show.web.worker import Emit, ShouldStop

if TYPE_CHECKING:
    from layerleap.show.web.app import Served

Id = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


def model_routes(served: "Served") -> APIRouter:
    """The routes, around one engine."""
    routes, asked = APIRouter(), Questions(served)
    routes.get("/model", **shape(schemas.Model))(asked.model)
    routes.post("/tokens", **shape(schemas.Tokens))(asked.tokens)
    routes.post("/vocabulary", **shape(schemas.Vocabulary))(asked.vocabulary)
    routes.post("/trace")(asked.trace)
    routes.post("/cell")(asked.cell)
    routes.post("/generate")(asked.generate)
    return routes


class Questions:
    """What can be asked about a model and a prompt.

    Methods that begin with an underscore run on the worker's thread, all others on the server's.
    """

    def __init__(self, served: "Served") -> None:
        self.engine, self.store = served.engine, served.store
        self.worker, self.limits = served.worker, served.limits

    def model(self) -> dict[str, Any]:
        """The model, its blocks and lenses, and the limits on requests."""
        return {
            **self.engine.describe(),
            "limits": self.limits.to_dict(),
            "version": layerleap.__version__,
        }

    def tokens(self, body: ask.Text) -> dict[str, Any]:
        """A text cut into tokens."""
        return {"tokens": self.engine.tokens(body.text), "limit": self.limits.tokens}

    def vocabulary(self, body: ask.Text) -> dict[str, Any]:
        """Output tokens that a typed text may mean."""
        return {"tokens": self.engine.vocabulary(body.text)}

    async def trace(self, body: ask.Trace) -> Response:
        """Every layer's reading of every position, as a stream of frames."""
        return await stream(self.worker, partial(self._trace, body))

    async def cell(self, body: ask.Cell, request: Request) -> Response:
        """One block at one position: its stages and its strongest sub-updates."""
        return await answer(self.worker, request, partial(self._cell, body))

    async def generate(self, body: ask.Generate) -> Response:
        """The prompt continued, with and without edits, as a stream of frames."""
        return await stream(self.worker, partial(self._generate, body))

    def _trace(self, body: ask.Trace, emit: Emit, should_stop: ShouldStop) -> None:
        for frame in self.engine.trace(
            self._prompt(body.input),
            lens=body.lens,
            watch=body.watch,
            edits=body.edits,
            top=body.top,
            follow=body.follow,
            selected=body.selected,
            should_stop=should_stop,
        ):
            emit(frame)

    def _cell(self, body: ask.Cell) -> dict[str, Any]:
        reading = self.engine.cell(
            self._prompt(body.input),
            block=body.block,
            position=body.position,
            lens=body.lens,
            watch=body.watch,
            edits=body.edits,
            top=body.top,
        )
        for side in (reading, reading.get("after") or {}):
            updates = (side.get("neurons") or {}).get("updates", [])
            names = self.store.names((body.block, each["neuron"]) for each in updates)
            for each in updates:
                each["name"] = names.get((body.block, each["neuron"]))
        return reading

    def _generate(self, body: ask.Generate, emit: Emit, should_stop: ShouldStop) -> None:
        ids = self._prompt(body.input)
        if reason := self.engine.describe()["generate_reason"]:
            raise BadSettings(reason)
        self.engine.check_edits(body.edits)  # now: later, half of the text would be written
        for side in dict.fromkeys(body.sides):
            self._write(ids, side, body, emit, should_stop)
        emit({"frame": "end"})

    def _write(
        self,
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

        self.engine.generate(
            ids,
            edits=body.edits if side == "edited" else [],
            on_token=on_token,
            max_new_tokens=body.max_new_tokens,
            should_stop=should_stop,
        )
        seconds = time.perf_counter() - started
        emit({"frame": "done", "side": side, "text": "".join(pieces), "seconds": seconds})

    def _prompt(self, given: ask.Input) -> list[int]:
        """The ids of a prompt, neither none nor too many."""
        ids = given.ids
        if ids is None:
            ids = [token["id"] for token in self.engine.tokens(given.text or "")]
        if not ids:
            raise BadText("the prompt is empty; type something to read")
        if len(ids) > self.limits.tokens:
            raise BadText(
                f"the prompt has {len(ids)} tokens; at most {self.limits.tokens} are read, so "
                "shorten it"
            )
        return ids


def saved_routes(served: "Served") -> APIRouter:
    """The routes, around one store."""
    routes, store = APIRouter(), served.store

    @routes.get("/sessions", **shape(list[schemas.SavedTitle]))
    def sessions() -> list[dict[str, Any]]:
        return store.sessions()

    @routes.get("/sessions/{id}", **shape(schemas.SavedSession))
    def session(id: Id) -> dict[str, Any]:
        kept = store.session(id)
        if kept is None:
            raise HTTPException(404)
        return kept

    @routes.put("/sessions/{id}", **shape(schemas.SavedTitle))
    def save(id: Id, body: ask.Session) -> dict[str, Any]:
        return store.save_session(id, body.title.strip() or "untitled", body.state)

    @routes.delete("/sessions/{id}")
    def delete(id: Id) -> dict[str, bool]:
        if not store.delete_session(id):
            raise HTTPException(404)
        return {"deleted": True}

    @routes.post("/export")
    def export(body: ask.Export) -> dict[str, Any]:
        return exported(served.engine.describe(), body.state)

    return routes
