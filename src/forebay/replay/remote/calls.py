"""The methods that a client of a buffer server may call, on one buffer that all connections share.

::

    put_groups --admit--> known, here or to an earlier server? room? --put--> stored, once for each key
    take --> Handover --keep--> with the client, for good        --release--> in the buffer again
    count, commit, save, ... --call--> the buffer's own

Everything that outlives one connection is here: the buffer, the admission of puts, and the outcomes of puts
and takes whose answer may have been lost.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Generic, TypeVar

import msgspec
from pydantic import Field, PositiveInt

from forebay.aio.changed import BufferClosed
from forebay.aio.gate import Gate, SharedLock
from forebay.aio.tasks import finish
from forebay.aio.time_limits import timeout
from forebay.config import StrictModel
from forebay.io.channel import STALL_S
from forebay.replay.arrival import arrived_row
from forebay.replay.buffer import ReplayBuffer
from forebay.replay.format.packed import GroupCodec, HeldGroup
from forebay.replay.remote import messages
from forebay.replay.remote.handover import Handover, recover, take_over
from forebay.replay.stores.contract import StorageBackend, StorageItem
from forebay.replay.stores.errors import OwnerLost
from forebay.types import Status

Value = TypeVar("Value")

_log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""The pause before a store that failed is asked again; nothing tells that its database is back."""

MAX_REMEMBERED = 16_384
"""Groups put and takes whose outcome is remembered: many times what clients have under way at once."""


class Served:
    """One buffer, as all connections share it."""

    def __init__(self, buffer: ReplayBuffer, *, instance: bytes, limits: "Limits") -> None:
        self.buffer = buffer
        self.instance = instance
        """Another one for each start: clients find out that their calls under way are forgotten."""
        self.limits = limits
        self.put_bytes = 0
        """Bytes of the puts of all connections, from the first byte of each until it is stored."""
        self.room = Room(buffer, limits.max_live)
        self.num_evicted: dict[str, int] = {}
        self._puts: Outcomes[Any] = Outcomes()
        self._kept: Outcomes[bool] = Outcomes()
        self.takes: dict[bytes, Handover] = {}
        """By key, those sent to a client, until it says what became of them, maybe on its next connection."""
        self._owed: set[Handover] = set()
        """Handovers that are to be released, until they are."""
        self._on_evict = buffer.on_evict
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Recover the groups that an earlier server left, count, and begin to watch the buffer.

        A server that still runs on the same database is fenced off first: it must keep nothing any more.
        """
        if type(self.buffer.storage.codec) is GroupCodec:
            # Most groups go on as they came: none is decoded before it is looked at.
            self.buffer.storage.use_codec(GroupCodec(keep_packed=True))
        await self.buffer.storage.claim()
        await recover(self.buffer)
        await self._look()
        self.buffer.on_evict = self._note_eviction
        self._watching = asyncio.create_task(self._watch(self.buffer.version))

    async def close(self) -> None:
        """End what `open` began, after the puts that are being stored."""
        await self._puts.settled()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        self.buffer.on_evict = self._on_evict
        if type(self.buffer.storage.codec) is GroupCodec:
            self.buffer.storage.use_codec(GroupCodec())

    async def _look(self) -> None:
        await self.room.measure()
        # In a thread, because a store on disk asks its database.
        self.num_evicted = await asyncio.to_thread(lambda: dict(self.buffer.num_evicted))

    async def _watch(self, seen: int) -> None:
        """consumes: `_owed` / waits for: changes / woken by: the buffer / produces: wake-ups of the gate"""
        with suppress(BufferClosed):
            while True:
                changed = await self.buffer.wait_for_change(seen)
                try:
                    await self._give_back()
                    await self.room.note_change()
                    seen = changed
                # Whatever it is, puts that wait for room and groups that are owed need the next attempt.
                except Exception as error:
                    _log.warning("the store of a served buffer failed, and is asked again: %s", error)
                    with suppress(TimeoutError):
                        async with timeout(AGAIN_S):
                            await self.buffer.wait_for_change(self.buffer.version)
        # Closed under its server.
        self.room.close()

    def _note_eviction(self, item: StorageItem) -> None:
        self.num_evicted[item.task_name] = self.num_evicted.get(item.task_name, 0) + 1
        if self._on_evict is not None:
            self._on_evict(item)

    # Puts

    async def admit(self, arguments: messages.PutArguments, groups: list[HeldGroup]) -> Any:
        """Wait until the groups may be `put`; their result instead if an earlier server has stored them.

        Raises:
            ConnectionLost: it cannot be known whether one has.
        """
        if self._puts.knows(arguments.key):
            return None
        if arguments.asked_first not in (b"", self.instance):
            if not self.buffer.storage.keeps_receipts:
                raise messages.ConnectionLost(
                    "the server was started anew with a store in memory; whether the put happened is not known"
                )
            if await self.buffer.storage.has_receipt(arguments.key):
                return await self._result_of_earlier(arguments, groups)
        await self.room.admit(len(groups))
        # While this one waited, the same put may have come on another connection.
        if self._puts.knows(arguments.key):
            self.room.leave(len(groups))
        return None

    async def _result_of_earlier(self, arguments: messages.PutArguments, groups: list[HeldGroup]) -> Any:
        task, how = arguments.task_name, arguments.arrival
        # Of the two the later one, as for the put itself.
        steps = [await self.buffer.storage.get_train_step(task), how.current_train_step]
        seen = max((step for step in steps if step is not None), default=None)
        return _put_result([arrived_row(group, task, seen, how) for group in groups], ())

    async def put(self, arguments: messages.PutArguments, groups: list[HeldGroup]) -> Any:
        """Store the groups, which were admitted, unless they were stored under this key before.

        The result is, for each group, whether it is EXPIRED and the staleness of its members; and what was
        evicted for them. Not to be cancelled.
        """
        return await self._puts.once(arguments.key, lambda: self._store(arguments, groups), len(groups))

    async def _store(self, arguments: messages.PutArguments, groups: list[HeldGroup]) -> Any:
        try:
            task, how = arguments.task_name, arguments.arrival
            async with self.room.within():
                key = arguments.key if self.buffer.storage.keeps_receipts else None
                rows, evicted = await self.buffer._store(groups, task, how, key)
                self.room.add(len(groups))
        finally:
            self.room.leave(len(groups))
        for item in evicted:
            self._note_eviction(item)
        return _put_result(rows, evicted)

    # Takes

    async def take(self, arguments: messages.TakeArguments) -> Handover:
        """Take groups, which are parked until they are kept."""
        async with self.room.within():
            handover = await take_over(self.buffer, arguments, max_bytes=self.limits.max_frame_bytes)
            if arguments.group_status is not Status.ARCHIVED:
                self.room.add(-len(handover.rows))
        return handover

    async def keep(self, key: bytes, handover: Handover | None) -> None:
        """The groups of `handover` are with the client; without it, check that they were kept before.

        Not to be cancelled.

        Raises:
            ConnectionLost: they were not, and are not going to be.
        """

        async def keep() -> bool:
            if handover is not None:
                return await handover.keep(key)
            # An earlier server may have done so.
            storage = self.buffer.storage
            return storage.keeps_receipts and await storage.has_receipt(key)

        # Once for each key: a confirmation that may still come on a lost connection comes too late.
        if not await self._kept.once(key, keep):
            raise messages.ConnectionLost(
                "the connection broke while groups were handed over; they are in the buffer again"
            )

    async def release(self, key: bytes, handover: Handover | None, *, unless_kept: bool = False) -> None:
        """Put the groups of `handover`, which were taken under `key`, back: no caller has them.

        Without it, those taken on an earlier connection. With `unless_kept` the connection is lost: groups
        that the client has confirmed are still its own, and it may yet say on the next one what becomes of
        them.
        """
        if (handover := handover or self.takes.get(key)) is None:
            return

        async def give_back() -> None:
            # A client that gave up while its confirmation was on its way says both at once; and a connection
            # may break while its last confirmation is being done, of which the client learns on its next one.
            await self._kept.settled(key)
            if unless_kept and handover.is_kept:
                asyncio.get_running_loop().call_later(STALL_S, self.takes.pop, key, None)
            else:
                self.takes.pop(key, None)
                self._owed.add(handover)
                # A store that fails is noted as changed, at which `_watch` tries again, and says so.
                with suppress(Exception), self.buffer._changes.noted_if_cut_short():
                    await self._give_back()

        await finish(give_back())

    async def _give_back(self) -> None:
        """Release what is owed; if the store fails, it stays owed."""
        for handover in list(self._owed):
            async with self.room.within():
                # A later owner has recovered what was parked.
                with suppress(OwnerLost):
                    self.room.add(await handover.release())
            self._owed.discard(handover)

    # Other methods

    async def call(self, method: str, arguments: msgspec.Struct) -> Any:
        """The result of a method of `ReplayBuffer`, or of its counterpart here; paths are of this machine."""
        own = getattr(self, f"_{method}", None) or getattr(self.buffer, method)
        return await own(**msgspec.structs.asdict(arguments))

    async def _restore(self, train_step: int) -> None:
        await self.buffer.restore(train_step)
        await self.room.measure()

    async def _resume(self, path: str) -> None:
        await self.buffer.resume(path)
        await recover(self.buffer)
        await self._look()


class Room:
    """Lets puts in while there are fewer than `max_live` live groups, first come, first served.

    A store in memory is asked each time how many there are; one on disk is asked when it must be, and what
    goes through the server is added and subtracted in between. It must be when there seems to be no room, and
    when the buffer has changed in another way than through the server. Changes that another process makes in
    the same database show only when the store is asked. Changes of the number happen `within` the count, so
    that a look at the database sees all of each or nothing.
    """

    def __init__(self, buffer: ReplayBuffer, max_live: int | None) -> None:
        self.max_live = max_live
        self._buffer = buffer
        # A store that has nothing to close is in memory, and counts itself at once.
        self._counts_itself = type(buffer.storage).close is StorageBackend.close
        self._num_live = 0
        self._known_version = buffer.version
        """The version of the buffer up to which its changes are in `_num_live`."""
        self._lock = SharedLock()
        self._gate = Gate()
        self._num_entering = 0

    @property
    def num_live(self) -> int:
        """As of now; on disk, changes by other processes show after the next `measure`."""
        return len(self._buffer) if self._counts_itself else self._num_live

    @property
    def _knows_all(self) -> bool:
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

    async def measure(self) -> None:
        """Count the groups of the store."""
        if not self._counts_itself:
            async with self._lock.alone():
                # Before the count: what changes meanwhile may not be in it.
                version = self._buffer.version
                self._num_live = await self._buffer.storage.count({})
                self._known_version = version

    async def admit(self, number: int) -> None:
        """Wait for room for so many groups and occupy it until `leave`.

        consumes: room / waits for: groups to be taken / woken by: `note_change`, `leave`, `close` /
        produces: the right to put

        Raises:
            ValueError: there can never be so much room.
            BufferClosed: the buffer was closed.
        """
        if (limit := self.max_live) is None:
            return
        if number > limit:
            raise ValueError(f"{number} groups at once never fit under max_live {limit}; put fewer in one call")

        def has_room() -> bool:
            return self._knows_all and self.num_live + self._num_entering + number <= limit

        if not has_room():
            # Another process may have taken groups from the same database, which shows only when it is asked.
            await self.measure()
        await self._gate.wait(has_room)
        self._num_entering += number
        self._gate.wake()

    def leave(self, number: int) -> None:
        """The put is done, and the store counts it, or it has failed."""
        if self.max_live is not None:
            self._num_entering -= number
            self._gate.wake()

    async def note_change(self) -> None:
        """The content changed: count it again if a put waits for room and the number is not known."""
        if len(self._gate) and not self._knows_all:
            await self.measure()
        self._gate.wake()

    def close(self) -> None:
        """End every wait for room with `BufferClosed`: the buffer was closed."""
        self._gate.close("the buffer was closed")


CLIENT_LIMIT_S = 60.0
"""Twice what a client allows a server: a trainer's event loop may be blocked by its work."""

MAX_CLIENTS = 900
"""Connections at a time: a process has 1,024 files by default, and its store and logs need some of them."""

MAX_PUT_BYTES = 1 << 30
"""Of groups of all clients that are not stored yet: one of 4 MB from 256 producers at the same time."""


class Limits(StrictModel):
    """Bounds of a server; see `serve`.

    >>> Limits(max_live=1000).max_clients
    900
    """

    max_live: PositiveInt | None = None
    max_frame_bytes: int = messages.MAX_FRAME_BYTES
    max_clients: PositiveInt = MAX_CLIENTS
    max_put_bytes: PositiveInt = MAX_PUT_BYTES
    client_limit_s: float = Field(default=CLIENT_LIMIT_S, gt=0, allow_inf_nan=False)


class Outcomes(Generic[Value]):
    """Work that is done once for each key, and its outcome; the oldest outcomes are forgotten.

    >>> async def store():
    ...     print("storing")
    ...     return 7
    >>> async def example():
    ...     outcomes = Outcomes()
    ...     return [await outcomes.once(b"key", store) for _ in range(2)]
    >>> asyncio.run(example())
    storing
    [7, 7]
    """

    def __init__(self) -> None:
        self._begun: OrderedDict[bytes, tuple[asyncio.Future[Value], int]] = OrderedDict()
        """Values by key; those that have ended are in the order of their end."""
        self._size = 0

    def knows(self, key: bytes) -> bool:
        """Whether the work of this key is done, or being done."""
        return key in self._begun

    async def once(self, key: bytes, work: Callable[[], Awaitable[Value]], size: int = 1) -> Value:
        """The outcome of `work`, or of that which was begun for the key before.

        Work that failed has done nothing, so it may be tried again.
        """
        if key in self._begun:
            return await asyncio.shield(self._begun[key][0])
        outcome = asyncio.get_running_loop().create_future()
        self._begun[key] = outcome, size
        try:
            value = await work()
        except BaseException as error:
            del self._begun[key]
            outcome.set_exception(error)
            # Retrieved, so that asyncio does not warn of it if no other call waits.
            outcome.exception()
            raise
        outcome.set_result(value)
        # A connection that is lost now brings the same key again: the newest outcomes are kept.
        self._begun.move_to_end(key)
        self._size += size
        while self._size > MAX_REMEMBERED and len(self._begun) > 1 and next(iter(self._begun.values()))[0].done():
            self._size -= self._begun.popitem(last=False)[1][1]
        return value

    async def settled(self, *keys: bytes) -> None:
        """Wait for the end of the work of these keys, or of all, as far as it is being done."""
        begun = [self._begun[key][0] for key in keys or self._begun if key in self._begun]
        if running := [outcome for outcome in begun if not outcome.done()]:
            await asyncio.wait(running)


def _put_result(rows: Sequence[StorageItem], evicted: Sequence[StorageItem]) -> Any:
    # Also what came EXPIRED was wiped.
    outcomes = [[row.status is Status.EXPIRED, list(row.item.staleness)] for row in rows]
    return [outcomes, list(map(messages.EvictedGroup.of, evicted))]
