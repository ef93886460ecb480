"""Routes about weights: value vectors and keys, names, search, clusters; pairs of heads."""

import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from layerleap.show.web import limits, requests as ask, schemas
from layerleap.show.web.answers import answer
from layerleap.show.web.schemas import shape

if TYPE_CHECKING:
    from layerleap.show.web.app import Served

Block = Annotated[int, Path(ge=1, lt=2**31)]
Neuron = Annotated[int, Path(ge=0, lt=2**31)]
Top = Annotated[int, Query(ge=1, le=200)]
Offset = Annotated[int, Query(ge=-2048, le=2048)]
Words = Annotated[str, Query(max_length=limits.NAME)]


def vector_routes(served: "Served") -> APIRouter:
    """The routes, around one engine and its index."""
    routes, engine, store = APIRouter(), served.engine, served.store

    def named(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        names = store.names((row["block"], row["neuron"]) for row in rows)
        return [{**row, "name": names.get((row["block"], row["neuron"]))} for row in rows]

    @routes.get("/vectors/{block}/{neuron}", **shape(schemas.Vector))
    async def vector(block: Block, neuron: Neuron, request: Request) -> Response:
        def compute() -> dict[str, Any]:
            vector = engine.vector(block, neuron)
            name, note = store.name(block, neuron)
            return {**vector, "name": name, "note": note}

        return await answer(served.worker, request, compute)

    @routes.get("/vectors/{block}/{neuron}/neighbours")
    async def neighbours(block: Block, neuron: Neuron, request: Request, top: Top = 10) -> Response:
        def compute() -> dict[str, Any]:  # from the weights, which may have to be converted
            return {"neighbours": named(engine.neighbours(block, neuron, top=top))}

        return await answer(served.worker, request, compute)

    @routes.put("/vectors/{block}/{neuron}/name")
    def name(block: Block, neuron: Neuron, body: ask.VectorName) -> dict[str, Any]:
        engine.check_neuron(block, neuron)
        title, note = body.name.strip(), body.note.strip()
        store.save_name(block, neuron, title, note)
        return {"block": block, "neuron": neuron, "name": title or None, "note": note or None}

    @routes.get("/search", **shape(schemas.Search))
    def search(
        q: Words,
        top: Top = 20,
        side: Literal["both", "promoted", "suppressed"] = "both",
        space: Literal["any", "with", "without"] = "any",
    ) -> dict[str, Any]:
        started = time.perf_counter()
        matches = engine.search(q, top=top, side=side, space=space)
        took = (time.perf_counter() - started) * 1000
        return {
            "query": q,
            "results": named(matches["results"]),
            "notes": matches["notes"],
            "milliseconds": round(took, 3),
        }

    @routes.get("/clusters")
    def clusters(q: Words | None = None, top: Top = 50) -> dict[str, Any]:
        return {"clusters": engine.clusters(top=top, query=q or None)}

    @routes.get("/clusters/{number}")
    def cluster(number: Annotated[int, Path(ge=0, lt=2**31)]) -> dict[str, Any]:
        group = engine.cluster(number)
        return {**group, "members": named(group["members"])}

    return routes


def weight_routes(served: "Served") -> APIRouter:
    """The routes about what else is read from the weights: keys and heads."""
    routes, engine = APIRouter(), served.engine

    @routes.get("/vectors/{block}/{neuron}/keys", **shape(schemas.Keys))
    async def keys(block: Block, neuron: Neuron, request: Request) -> Response:
        return await answer(served.worker, request, lambda: engine.keys(block, neuron))

    @routes.get("/heads/{block}", **shape(schemas.Heads))
    async def heads(block: Block, request: Request) -> Response:
        return await answer(served.worker, request, lambda: engine.heads(block))

    @routes.get("/heads/{block}/{head}", **shape(schemas.Pairs))
    async def pairs(
        block: Block,
        head: Neuron,
        request: Request,
        form: Literal["vo", "qk"] = "vo",
        offset: Offset = 0,
        top: Top = 20,
    ) -> Response:
        def compute() -> dict[str, Any]:
            return engine.pairs(block, head, form=form, offset=offset, top=top)

        return await answer(served.worker, request, compute)

    return routes
