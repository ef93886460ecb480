"""`layerleap debug`: look inside a model in the browser."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from layerleap.errors import BadSettings, LayerleapError
from layerleap.show.cli import options, preflight
from layerleap.show.cli.terminal import TerminalProgress, clean_errors, err, out, tell

if TYPE_CHECKING:
    from layerleap.act.debug.debugger import Debugger


def debug(
    model: options.Model,
    bank: Annotated[
        str | None,
        Option(
            help="Folder or hub name of a bank to read through as well as the logit lens; "
            "'default' fits one once and caches it."
        ),
        preflight.bank,
    ] = None,
    other_model: options.OtherModel = False,
    port: Annotated[int, Option(help="Port of the page; 0 takes any free one.")] = 8123,
    host: Annotated[
        str,
        Option(
            help="Address to listen on. Other than this machine's own, it needs a link that works "
            "once, which is printed. The connection is not encrypted."
        ),
    ] = "127.0.0.1",
    no_browser: Annotated[bool, Option("--no-browser", help="Only print the address.")] = False,
    index: Annotated[
        bool | None,
        Option(
            "--index/--no-index",
            help="Build the concept index first, or do without. By default it is used if it is "
            "there, and else offered: here on a terminal, and on the page.",
        ),
    ] = None,
    index_file: Annotated[
        Path | None,
        Option("--index-file", help="File of the index; by default the cached one."),
        preflight.index,
    ] = None,
    loading: options.Loading = options.Loading(),
) -> None:
    """Open a page that shows MODEL layer by layer, searches its concepts and edits them.

    The page stays on this machine: nothing is sent elsewhere. Ctrl-C stops it.

    Example: layerleap debug smollm2
    """
    with clean_errors():
        if index is not None and index_file is not None:
            raise BadSettings(
                "--index-file uses an index that is there; leave out --index and --no-index"
            )
        from layerleap.show.web import need_web

        need_web()
        from layerleap.show.web.access import Access
        from layerleap.show.web.serve import listen, open_browser

        # Before the model is loaded: fail early if the port is in use.
        listening = listen(host, port)
        with listening:
            from layerleap.show.web.limits import Limits
            from layerleap.show.web.session import make_server, open_debugger
            from layerleap.show.web.worker import Worker

            transformer = loading.load(model)
            with TerminalProgress() as progress:
                debugger = open_debugger(
                    transformer,
                    bank,
                    index_file or index,
                    other_model=other_model,
                    progress=progress,
                )
            if index is None:
                _offer_index(debugger)
            access = Access(host, listening.getsockname()[1], announce=_show_next)
            worker = Worker(Limits().waiting)
            server = make_server(debugger, access, listening, worker=worker)
            out.print(access.url, highlight=False, soft_wrap=True)
            tell("Ctrl-C stops the debugger")
            if not no_browser:
                open_browser(access)
            # The model stays on the thread that loaded it, where a pass is fastest. On a second
            # one, OpenMP counts more threads than cores and lets them sleep between two products,
            # and the C library takes large tensors from the system again each time.
            server.run_beside(worker.run)
        tell("stopped; sessions, names and what is built of the index are saved")


def _offer_index(debugger: "Debugger") -> None:
    """Build the index now if the user wants it; without a terminal, say how to get it."""
    index = debugger.index_state()
    if index["ready"] or not index["buildable"]:
        if index["reason"]:
            tell(index["reason"])
        return
    missing = "no concept index yet: it is needed to search neurons by words"
    try:
        cost = debugger.index_cost()
        if not (sys.stdin.isatty() and err.is_terminal):
            tell(f"{missing}; build it on the page ({cost}), with --index, or with layerleap index")
        elif typer.confirm(f"{missing}. Build it now ({cost})? The page can, too", err=True):
            with TerminalProgress() as progress:
                debugger.build_index(progress)
    except LayerleapError as error:  # another process is building it, for example
        tell(str(error))


def _show_next(link: str) -> None:
    """The link has been used; the next visitor needs another."""
    err.print(f"for another browser: {link}", highlight=False, soft_wrap=True, markup=False)
