"""The thread in which a SQL store talks to its database.

::

    coroutines --call---> queue --one by one------------------> result back in the caller's event loop
               --share--> queue --all that wait, together-----> one commit, a result for each

The event loop never waits for the database: every call is a job in the queue, done in order of arrival.
Shared jobs that wait next to each other are done in one transaction, so that many callers pay for one commit.

Consumes jobs, waits for the next one, is woken by the queue, produces the results. `close` ends it after the
jobs that are already there; later calls are a `RuntimeError`.

Cancelling a call that has not begun keeps it from happening. One that has begun cannot be stopped: its caller
gets the `CancelledError` when it is done, and undone if the call says how.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

Result = TypeVar("Result")

MAX_SHARED = 64
"""Jobs in one transaction at most: large groups make it some 8 MB, and others wait about 30 ms for it."""


@dataclass(slots=True, eq=False)
class _Job:
    work: Callable[[], Any] | None
    """None: a shared job, which `content` describes."""
    content: Any
    future: asyncio.Future[Any]
    """Where the caller waits; it belongs to the caller's event loop."""
    state: str = "waiting"
    """waiting -> begun or cancelled."""
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

    `prepare` turns the content of a shared job into what is written (what it raises fails that job alone);
    `write` gets a list of these and returns a result for each (what it raises fails all of them).

    >>> worker = Worker("store", prepare=encode, write=insert_all)
    >>> uid = await worker.share(item)
    >>> rows = await worker.call(lambda: select(query))
    """

    def __init__(
        self, name: str, *, prepare: Callable[[Any], Any], write: Callable[[list[Any]], list[Any]]
    ) -> None:
        self._prepare = prepare
        self._write = write
        self._jobs: deque[_Job] = deque()
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def call(
        self, work: Callable[[], Result], *, undo: Callable[[Result], None] | None = None
    ) -> Result:
        """The result of `work()`, done in the thread; if cancelled too late, `undo` gets that result."""
        job = self._submit(work, None)
        try:
            result: Result = await self._outcome(job)
        except asyncio.CancelledError:
            if undo is not None and job.state == "begun" and job.error is None:
                await _outlast(self._submit(lambda: undo(job.result), None).future)
            raise
        return result

    async def share(self, content: Any) -> Any:
        """The result for `content`, written together with what else waits."""
        return await self._outcome(self._submit(None, content))

    def close(self) -> None:
        """Do what is in the queue and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _submit(self, work: Callable[[], Any] | None, content: Any) -> _Job:
        job = _Job(work, content, asyncio.get_running_loop().create_future())
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the store is closed")
            self._jobs.append(job)
            self._changed.notify()
        return job

    async def _outcome(self, job: _Job) -> Any:
        try:
            return await asyncio.shield(job.future)
        except asyncio.CancelledError:
            with self._changed:
                if job.state == "waiting":
                    job.state = "cancelled"
                    self._jobs.remove(job)
            if job.state == "begun":
                await _outlast(job.future)
            raise

    def _run(self) -> None:
        while jobs := self._next_jobs():
            if jobs[0].work is None:
                self._share(jobs)
            else:
                _do(jobs[0], jobs[0].work)
            for loop in {job.future.get_loop() for job in jobs}:
                # One call for all: each costs the event loop a wake-up.
                of_loop = [job for job in jobs if job.future.get_loop() is loop]
                # A loop that was closed meanwhile has nobody left who waits.
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(_settle, of_loop)
                del of_loop
            # Results must not live on here while the thread waits.
            del jobs

    def _next_jobs(self) -> list[_Job]:
        """One job, or the shared ones that wait next to each other; none after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_closed)
            jobs: list[_Job] = []
            while self._jobs and len(jobs) < MAX_SHARED and (not jobs or _are_shared(jobs[0], self._jobs[0])):
                jobs.append(self._jobs.popleft())
                jobs[-1].state = "begun"
            return jobs

    def _share(self, jobs: list[_Job]) -> None:
        prepared = []
        for job in jobs:
            try:
                prepared.append((job, self._prepare(job.content)))
            except BaseException as error:  # whatever it is, it belongs to the caller and not to this thread
                job.error = error
        try:
            results = self._write([content for _, content in prepared]) if prepared else []
        except BaseException as error:
            for job, _ in prepared:
                job.error = error
        else:
            for (job, _), result in zip(prepared, results, strict=True):
                job.result = result


def _are_shared(*jobs: _Job) -> bool:
    return all(job.work is None for job in jobs)


def _do(job: _Job, work: Callable[[], Any]) -> None:
    try:
        job.result = work()
    except BaseException as error:  # as above
        job.error = error


def _settle(jobs: list[_Job]) -> None:
    for job in jobs:
        job.settle()


async def _outlast(future: asyncio.Future[Any]) -> None:
    """Wait for the end of `future`, however often the waiting is cancelled."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        # Retrieved, so that nobody warns of it: the caller is told of the cancellation instead.
        future.exception()
