"""How many groups are live, and which put may store another: the back-pressure of a buffer server.

::

    put --> Admission.admit: room? --yes--> store
                               '--no--> wait in order of arrival <-- woken by every change of the content

Room is what `max_live` leaves. The groups are counted by `Census`: a store in memory is asked each time; one
on disk is asked when it must be, and what goes through the server is added and subtracted in between. It must
be when there seems to be no room, and when the buffer has changed in another way than through the server.
Changes that another process makes in the same database show only when the store is asked.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from forebay.aio.gate import Gate, SharedLock
from forebay.replay.buffer import ReplayBuffer
from forebay.replay.stores.contract import StorageBackend


class Admission:
    """Lets puts in while there are fewer than `max_live` groups, first come, first served."""

    def __init__(self, census: Census, max_live: int | None) -> None:
        self.max_live = max_live
        self._census = census
        self._gate = Gate()
        self._num_entering = 0

    async def note_change(self) -> None:
        """The content changed: count it again if a put waits for room and the number is not known."""
        if len(self._gate) and not self._census.knows_all:
            await self._census.measure()
        self._gate.wake()

    def close(self) -> None:
        """End every wait for room with `BufferClosed`: the buffer was closed."""
        self._gate.close("the buffer was closed")

    async def admit(self, number: int) -> None:
        """Wait for room for so many groups and occupy it until `leave`.

        consumes: room / waits for: groups to be taken / woken by: `note_change`, `leave`, `close` /
        produces: the right to put

        Raises:
            ValueError: there can never be so much room.
            BufferClosed: the buffer was closed.
        """
        if self.max_live is None:
            return
        limit = self.max_live
        if number > limit:
            raise ValueError(
                f"{number} groups at once never fit under max_live {limit}; put fewer in one call"
            )

        def has_room() -> bool:
            is_known = self._census.knows_all
            return is_known and self._census.num_live + self._num_entering + number <= limit

        if not has_room():
            # Another process may have taken groups from the same database, which shows only when it is asked.
            await self._census.measure()
        await self._gate.wait(has_room)
        self._num_entering += number
        self._gate.wake()

    def leave(self, number: int) -> None:
        """The put is done, and the store counts it, or it has failed."""
        if self.max_live is not None:
            self._num_entering -= number
            self._gate.wake()


class Census:
    """The number of live groups, without asking a database each time.

    Changes of it happen `within` it, so that a count of the database sees all of each or nothing.
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

    def within(self) -> AbstractAsyncContextManager[None]:
        """The time between a change of the store and its `add`."""
        return self._lock.shared()

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
