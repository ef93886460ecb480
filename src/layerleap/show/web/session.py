"""`ll.debug(model)`: the debugger beside a notebook or a Python session.

In: a wrapped model. Out: a server on a thread of this process, and an object that shows it.
"""

import html
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from layerleap.arguments import checked
from layerleap.errors import LayerleapError
from layerleap.maps.bank import ShortcutBank
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress
from layerleap.show.web import need_web

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from layerleap.act.debug.debugger import Debugger
    from layerleap.show.web.access import Access
    from layerleap.show.web.serve import Server
    from layerleap.show.web.worker import Worker

_RUNNING: list["DebugSession"] = []  # of this process
REMOTE = ("SSH_CONNECTION", "JUPYTERHUB_USER", "COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE")
HEIGHT = 900  # pixels of the page in a notebook


def make_server(
    debugger: "Debugger",
    access: "Access",
    listening: Any,
    *,
    in_notebook: bool = False,
    worker: "Worker | None" = None,
) -> "Server":
    """The server of one debugger; see `create_app`."""
    from layerleap.show.web.app import create_app
    from layerleap.show.web.limits import Limits
    from layerleap.show.web.serve import Server
    from layerleap.show.web.store import Store

    limits = Limits()
    store = Store(debugger.describe()["fingerprint"], sessions=limits.sessions)
    app = create_app(
        debugger, store, access=access, limits=limits, in_notebook=in_notebook, worker=worker
    )
    return Server(app, listening)


class DebugSession:
    """A running debugger: `url`, `close()`; a notebook shows the page itself.

    It ends with the process, or with `close`, or at the end of a `with` block.
    """

    def __init__(self, server: "Server", access: "Access", model: Transformer) -> None:
        self._server, self._access, self._model = server, access, model
        self._name = model.identity.name
        server.start()
        _RUNNING.append(self)

    @property
    def url(self) -> str:
        """Where the page is."""
        return self._access.url

    @property
    def is_running(self) -> bool:
        """Whether the page can be opened."""
        return self._server.is_running

    def link(self, tokens: Sequence[str]) -> str:
        """The page with a prompt, if its text gives the same tokens again; else the page alone."""
        text, tokenizer = "".join(tokens), self._model.tokenizer
        if tokenizer is None:
            return self.url
        again = [tokenizer.decode([token]) for token in tokenizer(text)["input_ids"]]
        return f"{self.url}#p={quote(text)}" if again == list(tokens) else self.url

    def close(self) -> None:
        """Stop the server; the model stays as it is."""
        self._server.stop()
        if self in _RUNNING:
            _RUNNING.remove(self)

    def __enter__(self) -> "DebugSession":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"open {self.url}" if self.is_running else "closed"
        return f"DebugSession({self._name}: {state})"

    def _repr_html_(self) -> str:
        if not self.is_running:
            return f"<p>The debugger of {html.escape(self._name)} is closed.</p>"
        url, name = html.escape(self.url, quote=True), html.escape(self._name, quote=True)
        link = f'<p>Debugger of {name}: <a href="{url}" target="_blank">{url}</a></p>'
        if any(map(os.environ.get, REMOTE)):
            return (
                f"{link}<p>This notebook runs on another machine. Forward the port to yours, such "
                f"as with <code>ssh -L {self._access.port}:127.0.0.1:{self._access.port} "
                "MACHINE</code>, then open the link.</p>"
            )
        return (
            f'{link}<iframe src="{url}" title="Debugger of {name}" width="100%" '
            f'height="{HEIGHT}" style="border:1px solid #8884"></iframe>'
        )


@checked
def debug(
    model: Transformer,
    *,
    bank: ShortcutBank | str | Path | None = None,
    other_model: bool = False,
    index: bool | str | Path | None = None,
    port: int | None = None,
    progress: Progress | bool = True,
) -> DebugSession:
    """Start the debugger of `model` on this machine and return at once.

        session = ll.debug(model)      a notebook shows the page, others print session.url
        session.close()

    Args:
        model: a wrapped model.
        bank: shortcuts to read through as well as the logit lens: a bank, its folder or hub name,
            or "default" for the cached one.
        other_model: allow a bank of another model of the same class and width, with a warning.
        index: the file of a concept index. True builds the cached one first if it is missing, None
            uses it if it is there, False leaves it out.
        port: of the server; by default 8123, or the next free one.
    """
    need_web()
    from layerleap.show.web.access import Access
    from layerleap.show.web.serve import PORT, listen, next_free

    before = running(model)
    if before is not None:
        before.close()
    chosen = port if port is not None else next_free("127.0.0.1", PORT - 1) or 0
    listening = listen("127.0.0.1", chosen)
    try:
        debugger = open_debugger(model, bank, index, other_model=other_model, progress=progress)
        access = Access(port=listening.getsockname()[1])
        server = make_server(debugger, access, listening, in_notebook=in_notebook())
    except BaseException:
        listening.close()
        raise
    return DebugSession(server, access, model)


def in_notebook() -> bool:
    """Whether this process answers a notebook, which shows the page in a frame."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def running(model: object) -> DebugSession | None:
    """The session of a model in this process, if there is one."""
    return next((s for s in _RUNNING if s._model is model and s.is_running), None)


def open_debugger(
    model: Transformer,
    bank: ShortcutBank | str | Path | None,
    index: bool | str | Path | None,
    *,
    other_model: bool = False,
    progress: Progress | bool,
) -> "Debugger":
    """The debugger of a model, with its lenses and its index."""
    from layerleap.act.debug.debugger import Debugger
    from layerleap.maps.fit import find_bank

    shortcuts = find_bank(model, bank, other_model=other_model, progress=progress)
    concepts, no_index = _find_index(model, index, progress)

    def find_index() -> Any:
        return _find_index(model, None, progress)[0]

    return Debugger(
        model,
        bank=shortcuts,
        bank_name=str(bank) if isinstance(bank, str | Path) else None,
        index=concepts,
        no_index=no_index,
        find_index=None if index is False else find_index,
    )


def _find_index(
    model: Transformer,
    index: bool | str | Path | None,
    progress: Progress | bool,
) -> tuple[Any, str | None]:
    """The concept index, or why there is none."""
    from layerleap.lens.vocabulary import build
    from layerleap.lens.vocabulary.index import ConceptIndex

    if index is False:
        return (
            None,
            "the debugger was started without its concept index; start it with one to search",
        )
    if isinstance(index, str | Path):
        return ConceptIndex.open(model, index), None
    if index:
        logger.info("building the concept index, unless it is there")
        return build.index(model, progress=progress), None
    try:
        return ConceptIndex.open(model), None
    except LayerleapError as error:
        return None, str(error)
