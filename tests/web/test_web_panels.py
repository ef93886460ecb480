"""What a new panel takes: one from outside the package, and one inside, counted."""

import re
from pathlib import Path

from asking import HERE
from fastapi import APIRouter, Request
from page_types import TARGET, definitions
from starlette.testclient import TestClient

import layerleap
from layerleap.act.debug.debugger import Debugger
from layerleap.show.web.answers import answer
from layerleap.show.web.app import ROUTES
from layerleap.show.web.schemas import Answer
from tiny_models import tiny

SOURCES = Path(layerleap.__file__).parent
TEXT = "the cat sat"


class Norms(Answer):
    """The norms of a text's states at one layer."""

    layer: int
    norms: list[float]


def norm_routes(served):
    routes = APIRouter()

    @routes.get("/norms/{layer}")
    async def norms(layer: int, text: str, request: Request) -> Norms:
        def compute():
            state = served.debugger.transformer.capture(text).states[layer]
            return Norms(layer=layer, norms=state[0].norm(dim=-1).tolist())

        return await answer(served.worker, request, compute)

    return routes


def test_a_panel_of_ones_own_is_a_model_a_route_and_a_line(make_app):
    model = tiny()
    app = make_app(Debugger(model), routes=(*ROUTES, norm_routes))
    with TestClient(app, base_url=HERE) as client:
        got = client.get("/api/norms/2", params={"text": TEXT}).json()
        schemas = client.get("/api/openapi.json").json()["components"]["schemas"]
        assert client.get("/api/model").json()["n_layers"] == model.n_layers
        assert client.get("/api/norms/two", params={"text": TEXT}).status_code == 422
    state = model.capture(TEXT).states[2][0]
    assert got == {"layer": 2, "norms": state.norm(dim=-1).tolist()}
    assert set(schemas["Norms"]["properties"]) == {"layer", "norms"}


def test_a_panel_is_spelled_in_five_files():
    """The recipe in CONTRIBUTING.md names them; `types.js` is written by a script."""
    spelled = re.compile(r"\bHeads\b|def heads\b|/heads\.js")
    files = [*(SOURCES / "show/web").rglob("*"), *(SOURCES / "act/debug").glob("*.py")]
    names = {
        file.name
        for file in files
        if file.suffix in (".py", ".js", ".html", ".css") and spelled.search(file.read_text("utf8"))
    }
    assert names - {TARGET.name} == {
        "concepts.py",
        "schemas.py",
        "vectors.py",
        "heads.js",
        "app.js",
    }


def test_the_types_of_the_page_are_those_of_the_server():
    message = "run: python tests/web/page_types.py"
    assert TARGET.read_text("utf8") == definitions(), message
