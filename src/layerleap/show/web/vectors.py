"""Routes about weights: value vectors and keys, names, search, clusters; pairs of heads."""

import time
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import APIRouter, Path, Query, Request

from layerleap.show.web import limits, requests, schemas
from layerleap.show.web.answers import answer
from layerleap.show.web.schemas import Json

if TYPE_CHECKING:
    from layerleap.show.web.app import Served

Block = Annotated[int, Path(ge=1, lt=2**31)]
Neuron = Annotated[int, Path(ge=0, lt=2**31)]
Top = Annotated[int, Query(ge=1, le=200)]
Offset = Annotated[int, Query(ge=-2048, le=2048)]
Words = Annotated[str, Query(max_length=limits.NAME)]


def vector_routes(served: "Served") -> APIRouter:
    """The routes about value vectors, their names and the concept index."""
    routes, debugger, store = APIRouter(), served.debugger, served.store

    def named(rows: list[Json]) -> list[Json]:
        names = store.names((row["block"], row["neuron"]) for row in rows)
        return [{**row, "name": names.get((row["block"], row["neuron"]))} for row in rows]

    @routes.get("/vectors/{block}/{neuron}", response_model=schemas.Vector)
    async def vector(block: Block, neuron: Neuron, request: Request) -> Json:
        vector = await answer(served.worker, request, lambda: debugger.vector(block, neuron))
        name, note = store.name(block, neuron)
        return {**vector, "name": name, "note": note}

    @routes.get("/vectors/{block}/{neuron}/neighbours", response_model=schemas.Neighbours)
    async def neighbours(block: Block, neuron: Neuron, request: Request, top: Top = 10) -> Json:
        rows = await answer(
            served.worker, request, lambda: debugger.neighbours(block, neuron, top=top)
        )
        return {"neighbours": named(rows)}

    @routes.put("/vectors/{block}/{neuron}/name", response_model=schemas.VectorName)
    def name(block: Block, neuron: Neuron, body: requests.VectorName) -> Json:
        debugger.check_neuron(block, neuron)
        name, note = body.name.strip(), body.note.strip()
        store.save_name(block, neuron, name, note)
        return {"block": block, "neuron": neuron, "name": name or None, "note": note or None}

    @routes.get("/search", response_model=schemas.Search)
    def search(
        q: Words,
        top: Top = 20,
        side: Literal["both", "promoted", "suppressed"] = "both",
        space: Literal["any", "with", "without"] = "any",
    ) -> Json:
        started = time.perf_counter()
        matches = debugger.search(q, top=top, side=side, space=space)
        milliseconds = round((time.perf_counter() - started) * 1000, 3)
        results = named(matches["results"])
        return {**matches, "query": q, "results": results, "milliseconds": milliseconds}

    @routes.get("/clusters", response_model=schemas.Clusters)
    def clusters(q: Words | None = None, top: Top = 50) -> Json:
        return {"clusters": debugger.clusters(top=top, query=q or None)}

    @routes.get("/clusters/{number}", response_model=schemas.Cluster)
    def cluster(number: Annotated[int, Path(ge=0, lt=2**31)]) -> Json:
        group = debugger.cluster(number)
        return {**group, "members": named(group["members"])}

    return routes


def weight_routes(served: "Served") -> APIRouter:
    """The routes about what else is read from the weights: keys and heads."""
    routes, debugger = APIRouter(), served.debugger

    @routes.get("/vectors/{block}/{neuron}/keys", response_model=schemas.Keys)
    async def keys(block: Block, neuron: Neuron, request: Request) -> Json:
        return await answer(served.worker, request, lambda: debugger.keys(block, neuron))

    @routes.get("/heads/{block}", response_model=schemas.Heads)
    async def heads(block: Block, request: Request) -> Json:
        return await answer(served.worker, request, lambda: debugger.heads(block))

    @routes.get("/heads/{block}/{head}", response_model=schemas.Pairs)
    async def pairs(
        block: Block,
        head: Neuron,
        request: Request,
        form: Literal["vo", "qk"] = "vo",
        offset: Offset = 0,
        top: Top = 20,
    ) -> Json:
        def compute() -> Json:
            return debugger.pairs(block, head, form=form, offset=offset, top=top)

        return await answer(served.worker, request, compute)

    return routes
