"""Middleware in front of the app: refuses requests that our own page would not send.

In: any request. Out: the app's answer with headers that keep the page to itself, or a refusal. It
is plain ASGI, so that streams pass through it untouched.
"""

from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from layerleap.show.web.access import Access
from layerleap.show.web.answers import refusal
from layerleap.show.web.limits import Limits

SAFE = ("GET", "HEAD", "OPTIONS")
OWN = ("same-origin", "none")  # what Sec-Fetch-Site says of our page, and of typed addresses
LOCAL_PAGES = "'self' http://localhost:* http://127.0.0.1:* vscode-webview:"
WELCOME = (
    '<!doctype html><meta charset="utf-8"><title>layerleap debug</title>'
    '<meta http-equiv="refresh" content="0; url=/"><p><a href="/">Open the debugger</a></p>'
)


class Guard:
    """Hosts, origins, content types, sizes, the number of clients, and the token."""

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        limits: Limits,
        *,
        in_notebook: bool = False,
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        """Guard `app`.

        Args:
            in_notebook: let pages of this machine show ours in a frame.
            stop: ends what the app is doing; for servers that shut down.
        """
        self.app, self.access, self.limits, self.stop = app, access, limits, stop
        self.open = 0
        ancestors = LOCAL_PAGES if in_notebook else "'none'"
        self.headers = {
            "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; "
            "object-src 'none'; base-uri 'none'; form-action 'none'; "
            f"frame-ancestors {ancestors}",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-resource-policy": "same-origin",
            "cross-origin-opener-policy": "same-origin",
        }
        if not in_notebook:
            self.headers["x-frame-options"] = "DENY"  # for what does not know frame-ancestors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no web sockets here
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self.headers)
            await send(message)

        refused = self._refused(scope)
        if refused is not None:
            await refused(scope, receive, send_guarded)
            return
        self.open += 1
        try:
            body = await _body(receive, self.limits.body)
            if body is None:
                await self._too_large()(scope, receive, send_guarded)
            else:
                await self.app(scope, _replayed(body, receive), send_guarded)
        finally:
            self.open -= 1

    def _refused(self, scope: Scope) -> Response | None:
        """The answer to a request that is not passed on."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self.access.answers_to(hosts[0]):
            named = repr(hosts[0]) if hosts else "no name"
            return refusal(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"this server does not answer to {named}; open the address that it printed",
            )
        return (
            self._foreign(scope, headers, hosts[0])
            or self._unfit(scope, headers)
            or self._unknown(scope, headers)
            or self._crowded()
        )

    def _foreign(self, scope: Scope, headers: Headers, host: str) -> Response | None:
        """Reject requests from pages of other sites; following a link to our page is fine."""
        if scope["method"] in SAFE and not scope["path"].startswith("/api"):
            return None
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if site is not None and site not in OWN:
            return refusal(403, "this request comes from another site's page, which is not allowed")
        if origin is not None and origin.lower() != f"{scope['scheme']}://{host}".lower():
            return refusal(403, f"this request comes from {origin!r}, which is not allowed")
        return None

    def _unfit(self, scope: Scope, headers: Headers) -> Response | None:
        """Reject bodies that are not JSON, or whose content length is too large."""
        size = headers.get("content-length", "0")
        if size.isdecimal() and int(size[:20]) > self.limits.body:
            return self._too_large()
        has_body = size != "0" or "transfer-encoding" in headers
        if scope["method"] in SAFE or (scope["method"] == "DELETE" and not has_body):
            return None
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            return refusal(415, f"the content type is {kind!r}; expected application/json")
        return None

    def _unknown(self, scope: Scope, headers: Headers) -> Response | None:
        """Beyond loopback: exchange a link for a cookie; reject requests without either."""
        if self.access.is_open or self.access.knows(headers.get("cookie", "")):
            return None
        token = parse_qs(scope["query_string"].decode("latin1")).get("token", [""])[0]
        is_visit = scope["method"] == "GET" and scope["path"] == "/"
        if is_visit and token and (cookie := self.access.exchange(token)):
            # A page and not a redirect: after a redirect from a link elsewhere, browsers
            # would still hold back a strict cookie.
            return HTMLResponse(
                WELCOME, headers={"set-cookie": cookie, "cache-control": "no-store"}
            )
        return refusal(
            401,
            "this request has no valid key; open the link that layerleap debug printed last (each "
            "link works once)",
        )

    def _crowded(self) -> Response | None:
        if self.open < self.limits.clients:
            return None
        return refusal(
            429,
            f"{self.open} requests are open, which is all that this server takes at a time; try "
            "again in a moment",
            place=self.open - self.limits.clients + 1,
        )

    def _too_large(self) -> Response:
        return refusal(413, f"the request is larger than {self.limits.body:,} bytes")


async def _body(receive: Receive, limit: int) -> bytes | None:
    """The whole body, or None if it is too large; a sender may not say the size beforehand."""
    parts, size, is_more = [], 0, True
    while is_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > limit:
            return None
        is_more = message.get("more_body", False)
    return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once and then only news of the connection."""
    waiting: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay
