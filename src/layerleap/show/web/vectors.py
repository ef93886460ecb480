"""Routes about value vectors: their tokens, neighbours, names, search and clusters."""

import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request

from layerleap.errors import BadArtifact
from layerleap.show.web import limits
from layerleap.show.web import requests as ask
from layerleap.show.web.answers import answer

if TYPE_CHECKING:
    from layerleap.show.web.app import Served

Block = Annotated[int, Path(ge=1, lt=2**31)]
Neuron = Annotated[int, Path(ge=0, lt=2**31)]
Top = Annotated[int, Query(ge=1, le=200)]
Words = Annotated[str, Query(max_length=limits.NAME)]


def vector_routes(served: "Served") -> APIRouter:
    """The routes, around one engine and its index."""
    routes, engine, store = APIRouter(), served.engine, served.store

    def index() -> Any:
        if engine.index is None:
            raise BadArtifact(
                engine.describe()["index"]["reason"]
                or "this model has no concept index; build it with: layerleap index MODEL"
            )
        return engine.index

    def named(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        names = store.names((row["block"], row["neuron"]) for row in rows)
        return [{**row, "name": names.get((row["block"], row["neuron"]))} for row in rows]

    @routes.get("/vectors/{block}/{neuron}")
    async def vector(block: Block, neuron: Neuron, request: Request) -> Any:
        found = await answer(served.worker, request, lambda: engine.vector(block, neuron))
        name, note = store.name(block, neuron)
        return found and {**found, "name": name, "note": note}

    @routes.get("/vectors/{block}/{neuron}/neighbours")
    def neighbours(block: Block, neuron: Neuron, top: Top = 10) -> dict[str, Any]:
        found = index().neighbours(block, neuron, top=top)
        return {"neighbours": named([each.to_dict() for each in found])}

    @routes.put("/vectors/{block}/{neuron}/name")
    def name(block: Block, neuron: Neuron, body: ask.VectorName) -> dict[str, Any]:
        engine.check_neuron(block, neuron)
        title, note = body.name.strip(), body.note.strip()
        store.save_name(block, neuron, title, note)
        return {"block": block, "neuron": neuron, "name": title or None, "note": note or None}

    @routes.get("/search")
    def search(
        q: Words,
        top: Top = 20,
        side: Literal["both", "promoted", "suppressed"] = "both",
        space: Literal["any", "with", "without"] = "any",
    ) -> dict[str, Any]:
        started = time.perf_counter()
        found = index().search(q, top=top, side=side, space=space)
        took = (time.perf_counter() - started) * 1000
        rows = named([each.to_dict() for each in found])
        return {"query": q, "results": rows, "milliseconds": round(took, 3)}

    @routes.get("/clusters")
    def clusters(q: Words | None = None, top: Top = 50) -> dict[str, Any]:
        return {"clusters": [each.to_dict() for each in index().clusters(top=top, query=q)]}

    @routes.get("/clusters/{number}")
    def cluster(number: Annotated[int, Path(ge=0, lt=2**31)]) -> Any:
        return index().cluster(number).to_dict()

    return routes
