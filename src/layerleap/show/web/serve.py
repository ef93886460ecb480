"""Running the app: a port, a server, and a clean end.

In: an app and an address. Out: a server on a thread, until it is closed or Ctrl-C is pressed.
"""

import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvicorn

from layerleap.errors import BadSettings
from layerleap.show.web.access import Access

PORT = 8123
LATER = 50  # ports that are tried to offer a free one
PATIENCE = 3  # seconds that answers in progress have to end


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections at once; they wait until the server runs."""
    if not 0 <= port < 2**16:
        raise BadSettings(f"port {port} does not exist; expected 0 to 65535")
    try:
        return _bound(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            free = next_free(host, port)
            offer = f"; use port {free}, which is free" if free else ""
            reason = f"port {port} of {host} is in use by another program{offer}"
        elif error.errno in (errno.EACCES, errno.EPERM):
            reason = (
                f"port {port} needs more rights than you have; use port {PORT}, or any above 1023"
            )
        else:
            reason = f"cannot listen on {host}, port {port}: {error.strerror or error}; the host "
            reason += "must be an address of this machine"
        raise BadSettings(reason) from error


def next_free(host: str, port: int) -> int | None:
    """The first free port after `port`, if there is one nearby."""
    for other in range(port + 1, min(port + 1 + LATER, 65536)):
        with suppress(OSError):
            _bound(host, other).close()
            return other
    return None


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)  # now: two sockets that only are bound can share a port
    except BaseException:
        listening.close()
        raise
    return listening


class Server(uvicorn.Server):
    """Serves one app on a socket that is already open."""

    def __init__(self, app: Any, listening: socket.socket) -> None:
        quiet: Any = {"log_level": "error", "access_log": False, "server_header": False}
        plain: Any = {"ws": "none", "proxy_headers": False, "lifespan": "on"}
        config = uvicorn.Config(app, timeout_graceful_shutdown=PATIENCE, **quiet, **plain)
        super().__init__(config)
        self.listening = listening
        self._thread: threading.Thread | None = None

    def run_beside(self, work: Callable[[], None]) -> None:
        """Serve on a thread while `work` runs on this one; ends with it, or at Ctrl-C."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # `kill` is as good as Ctrl-C
        with suppress(KeyboardInterrupt):
            self.start()
            try:
                work()
            finally:
                has_failed = not self.should_exit
                self.stop()
            if has_failed:
                raise RuntimeError("the server stopped unexpectedly")

    def start(self) -> None:
        """Serve on a thread."""
        self._thread = threading.Thread(target=self._run_there, name="layerleap-web", daemon=True)
        self._thread.start()

    def _run_there(self) -> None:
        try:
            self.run(sockets=[self.listening])
        finally:  # even if it could not start: no more work will come
            self.config.app.stop()  # type: ignore[union-attr]  # a Guard

    @property
    def is_running(self) -> bool:
        """Whether a thread serves."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """End the thread; answers in progress have a few seconds."""
        self.should_exit = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=3 * PATIENCE)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the model's work first: a stream ends only when its work does."""
        self.config.app.stop()  # type: ignore[union-attr]  # a Guard
        await super().shutdown(sockets)


def has_display() -> bool:
    """Whether a browser can be opened: a text browser would take the terminal away."""
    if sys.platform.startswith("linux"):
        return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return not os.environ.get("SSH_CONNECTION")


def open_browser(access: Access) -> None:
    """Show the page, if there is a screen to show it on."""
    if has_display():
        import webbrowser

        with suppress(webbrowser.Error):
            webbrowser.open(access.url)
