"""The thread in which a SQL store talks to its database.

::

    coroutines --call---> queue --one by one---------------> result back in the caller's event loop
               --share--> list --all that wait, together---> one commit, a result for each

The event loop never waits for the database. Calls are done in order of arrival. Shared jobs are written
together in one transaction, so that many callers pay for one commit: the thread is told of them when the
event loop has run everything that was ready, and takes up those that arrive while it prepares. Preparing ten
more groups costs less time than another commit. Their results are handed out in slices, and the event loop
runs other work between the slices.

Consumes jobs, waits for the next one, is woken by the queue, produces results. `close` ends the thread after
the jobs that are already there; later calls are a `RuntimeError`.

Cancelling a call that has not begun keeps it from happening. One that has begun cannot be stopped: its caller
gets the `CancelledError` when it is done, and undone if the call says how. A database that does not answer
holds up no cancelled caller for longer than `GRACE_S` and `CUT_S`: the connection is cut, and the thread
undoes the call when it gets to it.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from forebay.aio.tasks import outlast

Result = TypeVar("Result")

GRACE_S = 2.0
"""How long a cancelled caller waits for a call that has begun; a commit takes milliseconds."""
CUT_S = 1.0
"""How long a thread takes at most to notice that its connection was cut, on a busy machine."""
MAX_SHARED = 64
"""Jobs in one transaction at most: large groups make it some 8 MB, and others wait about 30 ms for it."""
SETTLED_AT_ONCE = 8
"""Callers that go on in one turn of the event loop: each may need a millisecond for its next step."""

_log = logging.getLogger(__name__)
_here = threading.local()


def is_cut() -> bool:
    """Whether the job of this thread is to end with an error: its caller does not wait for it any more."""
    cut: threading.Event | None = getattr(_here, "cut", None)
    return cut is not None and cut.is_set()


class Worker:
    """One thread, doing jobs in order; shared jobs that wait at the same time are done together.

    `changes_nothing` says that no job writes: then a cancelled caller does not wait for the end of its job.
    """

    def __init__(self, name: str, *, changes_nothing: bool = False) -> None:
        self._changes_nothing = changes_nothing
        self._cut = threading.Event()
        self._thread = ThreadPoolExecutor(1, name, partial(setattr, _here, "cut", self._cut))
        self._waiting: deque[_Shared] = deque()
        self._is_closed = False

    async def call(self, work: Callable[[], Result], *, undo: Callable[[Result], None] | None = None) -> Result:
        """The result of `work()`, done in the thread; if cancelled too late, `undo` gets that result."""
        job = self._submit(work)
        result: Result = await self._outcome(job, asyncio.wrap_future(job), undo)
        return result

    async def share(
        self,
        write: Callable[[list[Any]], Sequence[Any]],
        make: Callable[[], Any],
        *,
        undo: Callable[[Any], None] | None = None,
    ) -> Any:
        """The result of ``make()``, written together with other jobs that wait for `write`.

        `write` returns a result, or an error, for each of those that it gets; an error that it raises fails
        all of them. An error of `make` fails its own job alone. `undo` is that of `call`.
        """
        self.require_open()
        loop = asyncio.get_running_loop()
        shared = _Shared(write, make, loop.create_future())
        self._waiting.append(shared)
        if len(self._waiting) == 1:
            # Not at once: other tasks that are ready to run may have a job for the same commit.
            loop.call_soon(self._begin_shared)
        return await self._outcome(shared.job, shared.answer, undo)

    def close(self) -> None:
        """Do the jobs that are there and end the thread."""
        if not self._is_closed:
            self._is_closed = True
            self._thread.submit(self._write_all)
            self._thread.shutdown()

    def require_open(self) -> None:
        """RuntimeError if it was closed."""
        if self._is_closed:
            raise RuntimeError("the store is closed")

    def _submit(self, work: Callable[[], Result]) -> Future[Result]:
        self.require_open()
        return self._thread.submit(self._run, work)

    def _run(self, work: Callable[[], Result]) -> Result:
        # A cut was meant for the job before this one.
        self._cut.clear()
        return work()

    async def _outcome(self, job: Future[Any], answer: asyncio.Future[Any], undo: Callable[[Any], None] | None) -> Any:
        try:
            return await answer
        except asyncio.CancelledError:
            if job.cancel() or self._changes_nothing:
                raise
            # The thread does one job after the other: an undo runs when the job has ended, however late.
            ended = asyncio.wrap_future(self._submit(partial(_undo, job, undo)) if undo else job)
            # The caller gets the cancellation in place of the job's error.
            ended.add_done_callback(lambda future: future.exception())
            for limit_s in (GRACE_S, CUT_S):
                await outlast(asyncio.ensure_future(asyncio.wait([ended], timeout=limit_s)))
                if ended.done():
                    break
                if not job.done():
                    self._cut.set()
            raise

    def _begin_shared(self) -> None:
        if not self._is_closed:
            self._thread.submit(self._run, self._write_shared)

    def _write_all(self) -> None:
        while self._waiting:
            self._write_shared()

    def _write_shared(self) -> None:
        """Write the shared jobs that wait, and those that arrive while these are prepared."""
        begun: list[_Shared] = []
        made: dict[Callable[[list[Any]], Sequence[Any]], list[tuple[_Shared, Any]]] = {}
        while self._waiting and len(begun) < MAX_SHARED:
            shared = self._waiting.popleft()
            if not shared.job.set_running_or_notify_cancel():
                continue
            begun.append(shared)
            try:
                made.setdefault(shared.write, []).append((shared, shared.make()))
            except BaseException as error:  # whatever it is, it belongs to the caller and not to this thread
                shared.job.set_exception(error)
        for write, together in made.items():
            try:
                results = write([content for _, content in together])
            except BaseException as error:  # as above
                results = [error] * len(together)
            for (shared, _), result in zip(together, results, strict=True):
                if isinstance(result, BaseException):
                    shared.job.set_exception(result)
                else:
                    shared.job.set_result(result)
        for loop in {shared.answer.get_loop() for shared in begun}:
            # One call for all: each call costs the event loop a wake-up.
            of_loop = [shared for shared in begun if shared.answer.get_loop() is loop]
            # In a loop that was closed meanwhile no caller is left.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, loop, of_loop)
        if self._waiting:
            self._begin_shared()


@dataclass(frozen=True, slots=True, eq=False)
class _Shared:
    write: Callable[[list[Any]], Sequence[Any]]
    make: Callable[[], Any]
    answer: asyncio.Future[Any]
    """The future that the caller waits for; it belongs to the caller's event loop."""
    job: Future[Any] = field(default_factory=Future)
    """The outcome, and whether the thread has begun: set by the thread, or cancelled by the caller."""


def _settle(loop: asyncio.AbstractEventLoop, done: list[_Shared]) -> None:
    for shared in done[:SETTLED_AT_ONCE]:
        if shared.answer.done():
            # Its caller was cancelled.
            continue
        if (error := shared.job.exception()) is None:
            shared.answer.set_result(shared.job.result())
        else:
            shared.answer.set_exception(error)
    if len(done) > SETTLED_AT_ONCE:
        loop.call_soon(_settle, loop, done[SETTLED_AT_ONCE:])


def _undo(job: Future[Any], undo: Callable[[Any], None]) -> None:
    if job.exception() is None:
        try:
            undo(job.result())
        except Exception:
            _log.exception("what a cancelled call had done could not be undone")
