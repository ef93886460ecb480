"""The page's own files: right types, checked again on every visit."""

from typing import Any

from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

# The system's table of types may lack these or have others; modules need an exact type.
TYPES = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml", ".png": "image/png",
    ".json": "application/json", ".woff2": "font/woff2", ".ico": "image/x-icon",
}  # fmt: skip


class StaticPage(StaticFiles):
    """Files of one folder; `/` is index.html. An entity tag saves sending them again."""

    def __init__(self, folder: Any) -> None:
        super().__init__(directory=folder, html=True, check_dir=False)

    async def get_response(self, path: str, scope: Scope) -> Response:
        """One file."""
        response = await super().get_response(path, scope)
        suffix = "." + path.rpartition(".")[2] if "." in path else ".html"
        if kind := TYPES.get(suffix):
            response.headers["content-type"] = kind
        response.headers["cache-control"] = "no-cache"
        return response
