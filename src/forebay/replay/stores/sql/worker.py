"""The thread in which a SQL store talks to its database.

::

    coroutines --call---> queue --one by one------------------> result back in the caller's event loop
               --share--> queue --all that wait, together-----> one commit, a result for each

The event loop never waits for the database: every call is a job in the queue, done in order of arrival.
Shared jobs that wait next to each other are done in one transaction, so that many callers pay for one commit.
The thread is woken when the event loop has run everybody who was ready, and takes up what arrives while it
prepares: a commit for one group costs as much time as ten groups more.

The results of many jobs are handed out in slices, with a turn of the event loop for others between them.

Consumes jobs, waits for the next one, is woken by the queue, produces the results. `close` ends it after the
jobs that are already there; later calls are a `RuntimeError`.

Cancelling a call that has not begun keeps it from happening. One that has begun cannot be stopped: its caller
gets the `CancelledError` when it is done, and undone if the call says how. But no caller waits for a database
that does not answer: after `GRACE_S` the connection is cut, and at the latest a second later the caller goes
on; the thread undoes the call when it is through. Nobody waits for the end of a call that changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from typing import Any, TypeVar

from forebay.aio.cancellation import outlast
from forebay.replay.stores.sql.connections import SILENT_S, Links

Result = TypeVar("Result")

GRACE_S = 2.0
"""How long a cancelled caller waits for a call that has begun; a commit takes milliseconds."""
CUT_S = 1.0
"""How long it takes a thread at most to notice that its connection was cut, on a busy machine."""

_log = logging.getLogger(__name__)

MAX_SHARED = 64
"""Jobs in one transaction at most: large groups make it some 8 MB, and others wait about 30 ms for it."""
SETTLED_AT_ONCE = 8
"""Callers that go on in one turn of the event loop: what they do next may take each of them a millisecond."""


@dataclass(frozen=True, eq=False)
class Sharing:
    """One way to do shared jobs, for `Worker.share`."""

    prepare: Callable[[Any], Any]
    """What is written for a content; what it raises fails that job alone."""
    write: Callable[[list[Any]], Sequence[Any]]
    """A result for each of these; what it raises fails all of them."""


@dataclass(slots=True, eq=False)
class _Job:
    work: Callable[[], Any] | Sharing
    content: Any
    """Of a shared job."""
    future: asyncio.Future[Any]
    """Where the caller waits; it belongs to the caller's event loop."""
    state: str = "waiting"
    """waiting -> begun or cancelled; begun -> done, or left by its caller."""
    undo: Callable[[Any], None] | None = None
    """What the thread does about the result of a job that was left."""
    result: Any = None
    error: BaseException | None = None

    def settle(self) -> None:
        """Hand the outcome to the caller; in its event loop."""
        if self.error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.error)


class Worker:
    """One thread, doing jobs in order; shared jobs that wait together are done together.

    >>> worker = Worker("store")
    >>> puts = Sharing(prepare=encode, write=insert_all)
    >>> uid = await worker.share(puts, item)
    >>> rows = await worker.call(lambda: select(query))
    """

    def __init__(self, name: str, links: Links | None = None, *, changes_nothing: bool = False) -> None:
        self._links = links
        self._changes_nothing = changes_nothing
        self._jobs: deque[_Job] = deque()
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def call(
        self, work: Callable[[], Result], *, undo: Callable[[Result], None] | None = None
    ) -> Result:
        """The result of `work()`, done in the thread; if cancelled too late, `undo` gets that result."""
        result: Result = await self._outcome(self._submit(work, None), undo)
        return result

    async def call_to_the_end(self, work: Callable[[], object]) -> None:
        """Do `work()` in the thread though the caller is cancelled; its error is logged."""
        job = self._submit(work, None)
        self._watch(job)
        if await self._see_out(job, may_cut=False) and job.error is not None:
            _log.error("what a cancelled call had done could not be undone", exc_info=job.error)

    async def share(
        self, sharing: Sharing, content: Any, *, undo: Callable[[Any], None] | None = None
    ) -> Any:
        """The result for `content`, written together with what else waits; `undo` as for `call`."""
        return await self._outcome(self._submit(sharing, content), undo)

    def close(self) -> None:
        """Do what is in the queue and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        while self._thread.is_alive():
            self._thread.join(GRACE_S)
            self._cut_if_silent()

    def _submit(self, work: Callable[[], Any] | Sharing, content: Any) -> _Job:
        loop = asyncio.get_running_loop()
        job = _Job(work, content, loop.create_future())
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the store is closed")
            self._jobs.append(job)
        # Not at once: others that are ready to run may have a job for the same commit.
        loop.call_soon(self._wake)
        return job

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    async def _outcome(self, job: _Job, undo: Callable[[Any], None] | None) -> Any:
        self._watch(job)
        try:
            return await asyncio.shield(job.future)
        except asyncio.CancelledError:
            with self._changed:
                if job.state == "waiting":
                    job.state = "cancelled"
                    self._jobs.remove(job)
            if job.state == "cancelled" or self._changes_nothing:
                raise
            if not await self._see_out(job):
                with self._changed:
                    if job.state != "done":
                        job.state, job.undo = "left", undo
                        raise
                await outlast(job.future)
            if undo is not None and job.error is None:
                await self.call_to_the_end(lambda: undo(job.result))
            raise

    async def _see_out(self, job: _Job, *, may_cut: bool = True) -> bool:
        """Wait for the end of a job, whoever cancels that, for a bounded time; whether it ended."""
        for limit_s in (GRACE_S, CUT_S):
            await outlast(asyncio.ensure_future(asyncio.wait([job.future], timeout=limit_s)))
            if job.future.done():
                break
            if self._links is not None and may_cut:
                self._links.cut(self._thread.ident)
        return job.future.done()

    def _watch(self, job: _Job) -> None:
        """Look again and again whether the database still answers, until the job is done."""
        if self._links is None:
            return
        timer = job.future.get_loop().call_later(SILENT_S, self._look_again, job)
        job.future.add_done_callback(lambda _: timer.cancel())

    def _look_again(self, job: _Job) -> None:
        if job.state in ("begun", "left"):
            self._cut_if_silent()
        if job.state != "cancelled" and not job.future.done():
            self._watch(job)

    def _cut_if_silent(self) -> None:
        if self._links is not None and self._links.silent_s(self._thread.ident) > SILENT_S:
            self._links.cut(self._thread.ident)

    def _run(self) -> None:
        while jobs := self._next_jobs():
            if self._links is not None:
                self._links.begin()
            if isinstance(jobs[0].work, Sharing):
                self._share(jobs)
            else:
                _do(jobs[0], jobs[0].work)
            self._end(jobs)
            for loop in {job.future.get_loop() for job in jobs}:
                # One call for all: each costs the event loop a wake-up.
                of_loop = [job for job in jobs if job.future.get_loop() is loop]
                # A loop that was closed meanwhile has nobody left who waits.
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(_settle, loop, of_loop)
                del of_loop
            # Results must not live on here while the thread waits.
            del jobs

    def _end(self, jobs: list[_Job]) -> None:
        """Undo those whose callers did not wait for the end."""
        with self._changed:
            left = [job for job in jobs if job.state == "left"]
            for job in jobs:
                job.state = "done"
        for job in left:
            if job.error is None and (undo := job.undo) is not None:
                undoing = _Job(work := partial(undo, job.result), None, job.future)
                _do(undoing, work)
                if undoing.error is not None:
                    _log.error("what a cancelled call had done could not be undone", exc_info=undoing.error)

    def _next_jobs(self) -> list[_Job]:
        """One job, or the shared ones that wait next to each other; none after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_closed)
            return self._begin_shared(MAX_SHARED) or self._begin(min(1, len(self._jobs)))

    def _begin_shared(self, limit: int) -> list[_Job]:
        """The shared jobs at the head of the queue."""
        shared = takewhile(lambda job: isinstance(job.work, Sharing), islice(self._jobs, limit))
        return self._begin(sum(1 for _ in shared))

    def _begin(self, number: int) -> list[_Job]:
        jobs = [self._jobs.popleft() for _ in range(number)]
        for job in jobs:
            job.state = "begun"
        return jobs

    def _share(self, jobs: list[_Job]) -> None:
        """Do these jobs and the shared ones that arrive while these are prepared; `jobs` grows by those."""
        prepared: dict[Sharing, list[tuple[_Job, Any]]] = {}
        for job in jobs:
            assert isinstance(job.work, Sharing)
            try:
                prepared.setdefault(job.work, []).append((job, job.work.prepare(job.content)))
            except BaseException as error:  # whatever it is, it belongs to the caller and not to this thread
                job.error = error
            if job is jobs[-1]:
                with self._changed:
                    jobs += self._begin_shared(MAX_SHARED - len(jobs))
        for sharing, together in prepared.items():
            _write(sharing, together)


def _write(sharing: Sharing, together: list[tuple[_Job, Any]]) -> None:
    try:
        results = sharing.write([content for _, content in together])
    except BaseException as error:  # as above
        for job, _ in together:
            job.error = error
    else:
        for (job, _), result in zip(together, results, strict=True):
            job.result = result


def _do(job: _Job, work: Callable[[], Any]) -> None:
    try:
        job.result = work()
    except BaseException as error:  # as above
        job.error = error


def _settle(loop: asyncio.AbstractEventLoop, jobs: list[_Job]) -> None:
    for job in jobs[:SETTLED_AT_ONCE]:
        job.settle()
    if len(jobs) > SETTLED_AT_ONCE:
        loop.call_soon(_settle, loop, jobs[SETTLED_AT_ONCE:])
