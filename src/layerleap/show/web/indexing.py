"""The concept index, built while the debugger runs: one build that all pages see.

In: a debugger that can build it, and a worker whose spare time it takes. Out: `IndexBuilder` with
its state, and the routes to it. The build keeps every finished step, so stopping it, Ctrl-C or a
crash lose one step at most.
"""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

from layerleap.act.debug.debugger import Debugger, Stopped
from layerleap.errors import BadSettings, LayerleapError
from layerleap.show.web.schemas import BuildState, IndexBuild
from layerleap.show.web.worker import Worker

if TYPE_CHECKING:
    from layerleap.act.debug.index_cost import IndexCost
    from layerleap.show.web.app import Served

BUSY = ("waiting", "building", "stopping")
TRUSTED = 5.0  # seconds of building after which its own pace says more than the estimate
NOTHING = {"phase": None, "done": None, "total": None, "unit": None}


class IndexBuilder:
    """Starts and stops the one build; safe to use from several threads."""

    def __init__(self, debugger: Debugger, worker: Worker) -> None:
        self.debugger, self.worker = debugger, worker
        self._lock = threading.Lock()
        self._state: BuildState = "missing"
        self._message: str | None = None
        self._cost: IndexCost | None = None
        self._spent = 0.0  # seconds of the estimate that are behind us
        self._begun: tuple[float, float] | None = None  # when, and what was spent by then
        self._progress: dict[str, Any] = NOTHING
        index = debugger.index_state()
        if index["buildable"] and not index["ready"]:
            worker.in_spare_time(lambda give_way: self._estimate())

    def describe(self) -> IndexBuild:
        """The state, for the page."""
        index = self.debugger.index_state()
        with self._lock:
            state: BuildState = self._state
            if state not in BUSY and (index["ready"] or not index["buildable"]):
                state = "ready" if index["ready"] else "unavailable"
            cost = None if state in ("ready", "unavailable") else self._cost
            return IndexBuild(
                state=state,
                message=index["reason"] if state == "unavailable" else self._message,
                seconds=None if cost is None else self._seconds_left(cost),
                share=None if cost is None else min(1.0, self._spent / max(cost.total, 1e-9)),
                megabytes=None if cost is None else cost.megabytes,
                **self._progress,
            )

    def _seconds_left(self, cost: "IndexCost") -> float:
        left = max(0.0, cost.total - self._spent)
        if self._begun is None:
            return left
        elapsed, work = time.monotonic() - self._begun[0], self._spent - self._begun[1]
        return left * elapsed / work if elapsed > TRUSTED and work > 0 else left

    def start(self) -> IndexBuild:
        """Build it; nothing happens if it is there or being built."""
        index = self.debugger.index_state()
        if not index["ready"]:
            if not index["buildable"]:
                raise BadSettings(index["reason"])
            with self._lock:
                if self._state not in BUSY:
                    self._state, self._message = "waiting", None
                    self.worker.in_spare_time(self._build)
                elif self._state == "stopping":
                    self._state = "building"
        return self.describe()

    def stop(self) -> IndexBuild:
        """Stop building at the next chance; finished steps are kept."""
        with self._lock:
            if self._state in BUSY:
                self._state = "stopping"
        return self.describe()

    def _estimate(self) -> None:
        """What is left to do; on the worker's thread, because it takes the model."""
        try:
            cost = self.debugger.index_cost()
        except LayerleapError as error:  # such as another process that is building it
            with self._lock:
                self._cost, self._message = None, str(error)
            return
        with self._lock:
            self._cost, self._spent, self._begun = cost, cost.total - cost.left, None

    def _build(self, give_way: Callable[[], None]) -> None:
        """In the worker's spare time."""
        self._estimate()
        with self._lock:
            self._message, self._begun = None, (time.monotonic(), self._spent)
            if self._state == "waiting":
                self._state = "building"

        def report(phase: str, done: int, total: int | None, unit: str = "texts") -> None:
            give_way()
            with self._lock:
                if self._state == "stopping":
                    raise Stopped
                self._progress = {"phase": phase, "done": done, "total": total, "unit": unit}
                spent = self._cost and self._cost.reached(phase, done, total)
                self._spent = max(self._spent, spent or 0.0)

        try:
            report("starting", 0, None)
            self.debugger.build_index(report)
        except Stopped:
            self._end("missing")
            self._estimate()  # what is left now
        except LayerleapError as error:
            self._end("failed", str(error))
        except Exception as error:  # a mistake of ours: the page must not wait for ever
            self._end("failed", f"the server failed: {type(error).__name__}")
        else:
            self._end("missing")  # it is found, and so "ready"

    def _end(self, state: BuildState, message: str | None = None) -> None:
        with self._lock:
            self._state, self._message, self._progress = state, message, NOTHING
            self._begun = None


def index_routes(served: "Served") -> APIRouter:
    """The routes: how far the index is, build it, stop building."""
    routes, builder = APIRouter(), served.builder
    routes.get("/index")(builder.describe)
    routes.post("/index")(builder.start)
    routes.delete("/index")(builder.stop)
    return routes
