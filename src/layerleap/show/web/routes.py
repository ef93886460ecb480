"""Routes about the model and a prompt, and those for what the user keeps: sessions and exports."""

import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Request
from starlette.responses import Response

import layerleap
from layerleap.errors import BadSettings, BadText
from layerleap.lens.vocabulary.tokens import TokenLabel
from layerleap.show.web import frames, requests, schemas
from layerleap.show.web.answers import Lines, answer, stream
from layerleap.show.web.schemas import Json
from layerleap.show.web.snippet import exported
from layerleap.show.web.worker import Emit, ShouldStop

if TYPE_CHECKING:
    from layerleap.show.web.app import Served

Id = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


def model_routes(served: "Served") -> APIRouter:
    """The routes about the model and a prompt."""
    routes, model = APIRouter(), ModelRoutes(served)
    routes.get("/model", response_model=schemas.Model)(model.describe)
    routes.post("/tokens", response_model=schemas.Tokens)(model.tokens)
    routes.post("/vocabulary", response_model=schemas.Vocabulary)(model.vocabulary)
    routes.post("/trace", **_lines_of(frames.TraceFrame))(model.trace)
    routes.post("/cell", response_model=schemas.CellReading)(model.cell)
    routes.post("/generate", **_lines_of(frames.GenerateFrame))(model.generate)
    return routes


def _lines_of(frame: Any) -> dict[str, Any]:
    """Arguments for a route that streams frames, a line each."""
    return {"response_class": Lines, "responses": {200: {"model": frame}}}


class ModelRoutes:
    """Requests about a model and a prompt.

    Methods that begin with an underscore run on the worker's thread, all others on the server's.
    """

    def __init__(self, served: "Served") -> None:
        self.debugger, self.store = served.debugger, served.store
        self.worker, self.limits = served.worker, served.limits

    def describe(self) -> Json:
        """The model, its blocks and lenses, and the limits on requests."""
        described = self.debugger.describe()
        return {**described, "limits": self.limits, "version": layerleap.__version__}

    def tokens(self, body: requests.Text) -> Json:
        """A text cut into tokens; none for an empty one."""
        tokens = self.debugger.tokens(body.text) if body.text else []
        return {"tokens": tokens, "limit": self.limits.tokens}

    def vocabulary(self, body: requests.Text) -> Json:
        """Output tokens that a typed text may mean."""
        return {"tokens": self.debugger.outputs(body.text) if body.text else []}

    async def trace(self, body: requests.Trace) -> Response:
        """Every layer's reading of every position, as a stream of frames."""
        return await stream(self.worker, partial(self._trace, body))

    async def cell(self, body: requests.Cell, request: Request) -> Json:
        """One block at one position: its stages and its strongest sub-updates."""
        return await answer(self.worker, request, partial(self._cell, body))

    async def generate(self, body: requests.Generate) -> Response:
        """The prompt continued, with and without edits, as a stream of frames."""
        return await stream(self.worker, partial(self._generate, body))

    def _trace(self, body: requests.Trace, emit: Emit, should_stop: ShouldStop) -> None:
        options = body.model_dump(exclude={"input"})
        ids = self._prompt(body.input)
        for frame in self.debugger.trace(ids, **options, should_stop=should_stop):
            emit(frames.traced(frame))

    def _cell(self, body: requests.Cell) -> Json:
        options = body.model_dump(exclude={"input"})
        cell = self.debugger.cell(self._prompt(body.input), **options)
        for side in filter(None, (cell, cell["after"])):
            names = self.store.names((up["block"], up["neuron"]) for up in side["updates"])
            for update in side["updates"]:
                update["name"] = names.get((update["block"], update["neuron"]))
        return schemas.ranks_from_one(cell)

    def _generate(self, body: requests.Generate, emit: Emit, should_stop: ShouldStop) -> None:
        ids = self._prompt(body.input)
        if reason := self.debugger.describe()["generate_reason"]:
            raise BadSettings(reason)
        self.debugger.check_edits(body.edits)  # now: later, half of the text would be written
        how = {"max_new_tokens": body.max_new_tokens, "should_stop": should_stop}
        for side in dict.fromkeys(body.sides):
            self._write(ids, side, body.edits if side == "edited" else [], emit, **how)
        emit(frames.EndFrame())

    def _write(
        self, ids: list[int], side: frames.TextSide, edits: list[str], emit: Emit, **how: Any
    ) -> None:
        """Generate one side."""
        emit(frames.StartFrame(side=side))
        pieces: list[str] = []
        started = time.perf_counter()

        def on_token(token: TokenLabel, piece: str) -> None:
            pieces.append(piece)
            emit(frames.TokenFrame(side=side, id=token.id, piece=piece, label=token.label))

        self.debugger.generate(ids, edits=edits, on_token=on_token, **how)
        seconds = time.perf_counter() - started
        emit(frames.TextFrame(side=side, text="".join(pieces), seconds=seconds))

    def _prompt(self, prompt: requests.Input) -> list[int]:
        """The ids of a prompt, neither none nor too many."""
        ids = prompt.ids
        if ids is None:
            ids = self.debugger.encode(prompt.text) if prompt.text else []
        if not ids:
            raise BadText("the prompt is empty; type something to read")
        if len(ids) > self.limits.tokens:
            raise BadText(
                f"the prompt has {len(ids)} tokens; at most {self.limits.tokens} are read, so "
                "shorten it"
            )
        return ids


def saved_routes(served: "Served") -> APIRouter:
    """The routes about what the user keeps."""
    routes, store = APIRouter(), served.store

    @routes.get("/sessions", response_model=list[schemas.SavedTitle])
    def sessions() -> list[Json]:
        return store.sessions()

    @routes.get("/sessions/{id}", response_model=schemas.SavedSession)
    def session(id: Id) -> Json:
        session = store.session(id)
        if session is None:
            raise HTTPException(404)
        return session

    @routes.put("/sessions/{id}", response_model=schemas.SavedTitle)
    def save(id: Id, body: requests.Session) -> Json:
        return store.save_session(id, body.title.strip() or "untitled", body.state)

    @routes.delete("/sessions/{id}", response_model=schemas.Deleted)
    def delete(id: Id) -> Json:
        if not store.delete_session(id):
            raise HTTPException(404)
        return {"deleted": True}

    @routes.post("/export", response_model=schemas.Exported)
    def export(body: requests.Export) -> Json:
        return exported(served.debugger.describe(), body.state)

    return routes
