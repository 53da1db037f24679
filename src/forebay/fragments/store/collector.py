"""Deletes payloads that nothing needs: those let go, and those that were never announced.

::

    discard(ids) --> queue --one thread at a time--> store.delete_fragments
                                                          ^
    sweep: ids in the store that nothing names --> suspects --still unnamed after `grace_s`

A payload is written before the buffer hears of it, so one that is not named may be on its way. It may also be
what a worker or a buffer left behind when it was killed. Time tells them apart: both looks are `grace_s`
apart. A sweep happens when the buffer is opened, and then with its activity at most every `grace_s`; no timer
runs while there is nothing to wait for.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

from forebay.fragments.store.payloads import FragmentStore


class Collector:
    """Deletes payloads from a store, beside the event loop."""

    def __init__(self, store: FragmentStore, is_named: Callable[[str], bool], grace_s: float) -> None:
        """`is_named` says whether anything needs the payload, or is about to."""
        self.num_orphans = 0
        """Payloads deleted that were not announced in time."""
        self._store = store
        self._is_named = is_named
        self._grace_s = grace_s
        self._queue: list[str] = []
        self._suspects: set[str] = set()
        self.due_s: float | None = None
        """When `advance` has something to do; None: not by time alone."""
        self._swept_s: float | None = None
        self._paused = 0
        self._working: asyncio.Task[None] | None = None

    def discard(self, fragment_ids: Iterable[str]) -> None:
        """Delete these soon; the event loop must be running."""
        self._queue += fragment_ids
        self._work()

    async def drained(self) -> None:
        """Wait until everything discarded so far, and not held back, is deleted.

        Raises what the store raised.
        """
        self._work()
        while self._working is not None and not self._working.done():
            # Shielded: a caller may be cancelled, and the work goes on.
            await asyncio.shield(self._working)

    def _is_free(self) -> bool:
        # It is done, and not None, if its event loop ended before it began.
        return self._working is None or self._working.done()

    def _work(self) -> None:
        if self._queue and not self._paused and self._is_free():
            self._working = asyncio.create_task(self._run(self._delete))

    async def _delete(self) -> None:
        ids = self._queue.copy()
        try:
            await asyncio.to_thread(self._store.delete_fragments, ids)
        finally:
            # Not before: the event loop may end before the deletion has begun. One that fails is left to a sweep.
            del self._queue[: len(ids)]

    async def _run(self, work: Callable[[], Awaitable[object]]) -> None:
        """Do `work`, which waits for a thread, and then what is queued.

        consumes: the queue / waits for: the thread / woken by: its end / produces: free room in the store
        """
        try:
            await work()
        finally:
            self._working = None
        self._work()

    def is_due(self, now_s: float) -> bool:
        """Whether the time of the suspects is over, which `advance` then deletes."""
        return self.due_s is not None and self.due_s <= now_s

    def advance(self, now_s: float) -> None:
        """Delete suspects whose time is over; sweep, if it is time for that."""
        if self.is_due(now_s):
            self.due_s = None
            orphans = [fragment_id for fragment_id in self._suspects if not self._is_named(fragment_id)]
            self._suspects.clear()
            self.num_orphans += len(orphans)
            self.discard(orphans)
        is_time = self._swept_s is None or self._swept_s + self._grace_s <= now_s
        if is_time and self.due_s is None and self._is_free():
            self._swept_s = now_s
            self._working = asyncio.create_task(self._run(lambda: self._sweep(now_s)))

    async def _sweep(self, now_s: float) -> None:
        ids = await asyncio.to_thread(self._store.ids)
        self._suspects = {fragment_id for fragment_id in ids if not self._is_named(fragment_id)}
        # Queued payloads are unnamed too, and need no second look.
        self._suspects.difference_update(self._queue)
        self.due_s = now_s + self._grace_s if self._suspects else None

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Delete no payload while the block runs."""
        self._paused += 1
        try:
            # A deletion that has begun ends first.
            await self.drained()
            yield
        finally:
            self._paused -= 1
            self._work()
