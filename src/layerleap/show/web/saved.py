"""Routes for what the user keeps: sessions, and a session written down as Python."""

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, HTTPException, Path

from layerleap.show.web import requests as ask
from layerleap.show.web import schemas
from layerleap.show.web.schemas import shape
from layerleap.show.web.snippet import exported

if TYPE_CHECKING:
    from layerleap.show.web.app import Served

Id = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


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
