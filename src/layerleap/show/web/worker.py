"""The thread that works with the model, and the short queue before it.

In: jobs, each a function that emits frames. Out: the frames, as they come, to the client that
asked. A job whose client has gone, or has stopped reading, is dropped from the queue or stopped.

Long work that nobody waits for is done in spare time: on the same thread, because a second one
would take the cores from under the first, and it lets the queue go first whenever it can.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from layerleap.act.debug.debugger import Stopped
from layerleap.errors import LayerleapError
from layerleap.show.web.frames import QueuedFrame
from layerleap.show.web.schemas import Answer

Emit = Callable[[Answer], None]
ShouldStop = Callable[[], bool]
Work = Callable[[Emit, ShouldStop], None]
SpareWork = Callable[[Callable[[], None]], None]  # gets `give_way`
AHEAD = 64  # frames that may wait for their reader; then the work waits
PATIENCE = 30.0  # seconds until a client that stops reading is dropped: others want the model


class Busy(LayerleapError):
    """The queue is full."""

    def __init__(self, place: int) -> None:
        super().__init__(
            f"the model is busy and {place - 1} requests are waiting; try again in a moment"
        )
        self.place = place


class Job:
    """One piece of work and the frames it has emitted; belongs to one event loop."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.ahead = 0  # jobs before this one when it was queued
        self._loop = asyncio.get_running_loop()
        self._frames: asyncio.Queue[Answer | BaseException | None] = asyncio.Queue()
        self._room = threading.Semaphore(AHEAD)
        self._stop = threading.Event()

    def run(self) -> Exception | None:
        """Do the work on the calling thread; returns what the reader gets last."""
        try:
            if not self.is_cancelled():
                self.work(self._emit, self.is_cancelled)
        except Stopped:
            pass
        except Exception as error:  # it is raised again where the frames are read
            return error
        return None

    def _emit(self, frame: Answer) -> None:
        if not self._room.acquire(timeout=PATIENCE):
            self.cancel()
        if self.is_cancelled():
            raise Stopped
        self.put(frame)

    def put(self, item: Answer | BaseException | None) -> None:
        """Hand something to the reader; from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._frames.put_nowait, item)
        except RuntimeError:  # the loop is closed: the server is shutting down
            self._stop.set()

    def cancel(self) -> None:
        """Ask the work to stop, even if it waits for its reader."""
        self._stop.set()
        self._room.release()

    def is_cancelled(self) -> bool:
        """Whether the client no longer wants the rest."""
        return self._stop.is_set()

    async def next(self) -> Answer | None:
        """The next frame, or None after the last one; raises what the work raised."""
        item = await self._frames.get()
        self._room.release()
        if isinstance(item, BaseException):
            raise item
        return item

    async def frames(self) -> AsyncIterator[Answer]:
        """All frames, as they come."""
        while (frame := await self.next()) is not None:
            yield frame


class Worker:
    """Runs jobs one after the other, in the order in which they came.

    They run on the thread that calls `run`, or on one of its own after `start`.
    """

    def __init__(self, waiting: int) -> None:
        """`waiting` jobs may stand in the queue beside the one that runs."""
        self._room = waiting
        self._queue: deque[Job] = deque()
        self._running: Job | None = None
        self._spare: deque[SpareWork] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Run jobs on a thread."""
        self._thread = threading.Thread(target=self.run, name="layerleap-debug", daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> Job:
        """Queue some work; raises `Busy` if there is no room."""
        job = Job(work)
        with self._changed:
            job.ahead = len(self._queue) + (self._running is not None)
            if self._is_closed or len(self._queue) >= self._room:
                raise Busy(len(self._queue) + 1)
            self._queue.append(job)
            self._changed.notify()
        return job

    def in_spare_time(self, work: SpareWork) -> None:
        """Do some work when the queue is empty, one after the other.

        It gets a function to call as often as it can: that runs all jobs that wait, and raises
        `Stopped` when the worker is to end.
        """
        with self._changed:
            self._spare.append(work)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Drop a job that waits, or ask the one that runs to stop."""
        job.cancel()
        with self._changed:
            if job in self._queue:
                self._queue.remove(job)
                self._tell_places()

    def stop(self) -> None:
        """End all jobs, as far as they listen, and take no more."""
        with self._changed:
            self._is_closed = True
            for job in self._queue:
                job.cancel()
                job.put(None)
            if self._running is not None:
                self._running.cancel()
            self._queue.clear()
            self._changed.notify()

    def close(self) -> None:
        """Stop, and wait for the thread to end."""
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def run(self) -> None:
        """Run jobs on the calling thread, until `stop`."""
        while self._wait():
            self._run_queue()
            with self._changed:
                has_time = self._spare and not self._queue and not self._is_closed
                spare = self._spare.popleft() if has_time else None
            if spare is not None:
                with suppress(Stopped):
                    spare(self._give_way)

    def _give_way(self) -> None:
        self._run_queue()
        if self._is_closed:
            raise Stopped

    def _wait(self) -> bool:
        """Wait for something to do; False if the worker is to end."""
        with self._changed:
            # With a limit: on some systems Ctrl-C is only handled after a wait.
            while not self._changed.wait_for(
                lambda: self._queue or self._spare or self._is_closed, timeout=1
            ):
                pass
            return not self._is_closed

    def _run_queue(self) -> None:
        """Run the jobs that wait, on this thread."""
        while (job := self._next()) is not None:
            last = None
            try:
                last = job.run()
            finally:  # after Ctrl-C as well
                with self._changed:
                    self._running = None
                # Not earlier: a client that gets the end may ask again, and must not wait.
                job.put(last)
            del job, last  # with frames and states, before the next one comes

    def _next(self) -> Job | None:
        with self._changed:
            if self._is_closed or not self._queue:
                return None
            self._running = self._queue.popleft()
            self._tell_places()
            return self._running

    def _tell_places(self) -> None:
        """Tell every job that waits how many are before it."""
        for place, job in enumerate(self._queue, start=1):
            job.put(QueuedFrame(place=place))
