"""How many groups are live, and who may put another: the back-pressure of a buffer server.

::

    put --> Gate.admit: room? --yes--> store
                          '--no--> wait in order of arrival <-- woken by every change of the content

Room is what `max_live` leaves. The groups are counted by `Census`: a store in memory is asked each time; one
on disk is asked when it must be, and what goes through the server is added and subtracted in between. It must
be when there seems to be no room, and when the buffer has changed in another way than through the server.
Changes that another process makes in the same database show only when the store is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forebay.aio.changed import Changes
from forebay.aio.gate import SharedLock
from forebay.replay.buffer import ReplayBuffer
from forebay.replay.stores.contract import StorageBackend


class Census:
    """The number of live groups, without asking a database each time.

    What changes it happens `within` it, so that a count of the database sees all of that or nothing.

    >>> async with census.within():
    ...     await buffer.put(group, "math")
    ...     census.add(1)
    >>> census.num_live
    1
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer
        # A store that has nothing to close is in memory, and counts itself at once.
        self._counts_itself = type(buffer.storage).close is StorageBackend.close
        self._num_live = 0
        self._known_version = buffer.version
        """Of the buffer, as far as its changes are in `_num_live`."""
        self._lock = SharedLock()

    @property
    def num_live(self) -> int:
        """As of now; on disk, changes by other processes show after the next `measure`."""
        return len(self._buffer) if self._counts_itself else self._num_live

    @property
    def knows_all(self) -> bool:
        """Whether all changes of the buffer in this process are in `num_live`."""
        return self._counts_itself or self._buffer.version <= self._known_version

    @asynccontextmanager
    async def within(self) -> AsyncIterator[None]:
        """The time between a change of the store and its `add`."""
        async with self._lock.shared():
            yield

    def add(self, number: int) -> None:
        """So many groups more (or fewer, if negative), by one change of the buffer."""
        self._num_live += number
        self._known_version += number != 0
        if self._buffer.limit is not None and number > 0:
            self._num_live = min(self._num_live, self._buffer.limit)

    async def measure(self) -> int:
        """Count the store, and return the number."""
        if not self._counts_itself:
            async with self._lock.alone():
                # Before the count: what changes meanwhile may not be in it.
                version = self._buffer.version
                self._num_live = await self._buffer.storage.count({})
                self._known_version = version
        return self.num_live


class Gate:
    """Lets puts in while there are fewer than `max_live` groups, first come, first served.

    Consumes nothing, waits for room, is woken by `note_change` and by puts that are done.

    >>> await gate.admit(1)
    >>> await buffer.put(group, "math")
    >>> gate.leave(1)
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

    def close(self) -> None:
        """The buffer was closed: whoever waits for room is told so (`BufferClosed`)."""
        self._changes.close()

    async def admit(self, number: int) -> None:
        """Wait for room for so many groups and occupy it until `leave`.

        Raises:
            ValueError: there can never be so much room.
        """
        if self.max_live is None:
            return
        if number > self.max_live:
            raise ValueError(
                f"{number} groups at once never fit under max_live {self.max_live}; put fewer in one call"
            )
        # Whoever has the turn waits for room, the others for the turn.
        async with self._turn:
            while True:
                seen = self._changes.version
                if self._census.knows_all and self._num_free(self._census.num_live) >= number:
                    break
                if self._num_free(await self._census.measure()) >= number:
                    break
                await self._changes.wait(seen)
            self._num_entering += number

    def leave(self, number: int) -> None:
        """The put is done, and the store counts it, or it has failed."""
        if self.max_live is not None:
            self._num_entering -= number
            self._changes.note()

    def _num_free(self, num_live: int) -> int:
        assert self.max_live is not None, "without a limit nobody waits"
        return self.max_live - num_live - self._num_entering
