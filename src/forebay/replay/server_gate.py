"""How many groups are live, and who may put another: the back-pressure of a buffer server.

::

    put --> Gate.admit: room? --yes--> store
                          '--no--> wait in order of arrival <-- woken by every change of the content

Room is what `max_live` leaves. The groups are counted by `Census`: a store in memory is asked each time; one
on disk is asked when it must be, and what goes through the server is added and subtracted in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forebay.replay.changes import Changes
from forebay.replay.locks import SharedLock
from forebay.replay.storage import StorageBackend


class Census:
    """The number of live groups, without asking a database each time.

    What changes it happens `within` it, so that a count of the database sees all of that or nothing.

    >>> async with census.within():
    ...     await buffer.put(group, "math")
    ...     census.add(1)
    >>> census.num_live
    1
    """

    def __init__(self, storage: StorageBackend, limit: int | None) -> None:
        self._storage = storage
        self._limit = limit
        # A store that has nothing to close is in memory, and counts itself at once.
        self._counts_itself = type(storage).close is StorageBackend.close
        self._num_live = 0
        self._lock = SharedLock()

    @property
    def num_live(self) -> int:
        """As of now; on disk, changes by other processes show after the next `measure`."""
        return len(self._storage) if self._counts_itself else self._num_live

    @asynccontextmanager
    async def within(self) -> AsyncIterator[None]:
        """The time between a change of the store and its `add`."""
        async with self._lock.shared():
            yield

    def add(self, number: int) -> None:
        """So many groups more (or fewer, if negative)."""
        self._num_live += number
        if self._limit is not None and number > 0:
            self._num_live = min(self._num_live, self._limit)

    async def measure(self) -> int:
        """Count the store, and return the number."""
        if not self._counts_itself:
            async with self._lock.alone():
                self._num_live = await self._storage.count({})
        return self.num_live


class Gate:
    """Lets puts in while there are fewer than `max_live` groups, first come, first served.

    Consumes nothing, waits for room, is woken by `note_change` and by puts that are done.

    >>> async with gate.admitted():
    ...     await buffer.put(group, "math")
    """

    def __init__(self, census: Census, max_live: int | None) -> None:
        self.max_live = max_live
        self._census = census
        self._changes = Changes()
        self._turn = asyncio.Lock()
        self._num_entering = 0

    def note_change(self) -> None:
        """The content changed."""
        self._changes.note()

    async def admit(self) -> None:
        """Wait for room and occupy it until `leave`."""
        if self.max_live is None:
            return
        # Whoever has the turn waits for room, the others for the turn.
        async with self._turn:
            while True:
                seen = self._changes.version
                if self._has_room(self._census.num_live) or self._has_room(await self._census.measure()):
                    break
                await self._changes.wait(seen)
            self._num_entering += 1

    def leave(self) -> None:
        """The put is done, and the store counts it, or it has failed."""
        if self.max_live is not None:
            self._num_entering -= 1
            self._changes.note()

    def _has_room(self, num_live: int) -> bool:
        return self.max_live is not None and num_live + self._num_entering < self.max_live
