"""What a buffer server does for each method that a client may call.

::

    Call --arguments--> their type --> the method here --> result, and groups to send
                          '-- do not fit: ValueError for the caller

The methods are those of `ReplayBuffer`, on one buffer that all connections share; and ``keep`` and
``release``, which settle a take (`server_handover`). Everything that outlives one connection is here: the
buffer, the gate, and the puts and takes whose answer may have been lost.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from forebay.aio.cancellation import finish
from forebay.aio.changed import BufferClosed
from forebay.replay.arrival import arrived_row, staleness_of, status_of
from forebay.replay.buffer import ReplayBuffer
from forebay.replay.format.codec import GroupCodec
from forebay.replay.format.encode import PackedGroup
from forebay.replay.format.encoded import PackedPayload
from forebay.replay.remote import messages
from forebay.replay.remote.handover import Handover, recover, take_over
from forebay.replay.remote.room import Admission, Census
from forebay.replay.stores.contract import StorageItem
from forebay.types import RolloutState, Status

Value = TypeVar("Value")
Incoming = PackedPayload | list[RolloutState]
"""A group that a client has sent."""

MAX_REMEMBERED = 16_384
"""Groups put and takes whose outcome is remembered: many times what clients have under way at once."""


class Memory(Generic[Value]):
    """The latest outcomes by key, up to `size` of them together; the oldest are forgotten.

    >>> memory.remember(key, 7)
    >>> memory.get(key)
    7
    """

    def __init__(self, size: int = MAX_REMEMBERED) -> None:
        self._values: OrderedDict[bytes, tuple[Value, int]] = OrderedDict()
        self._size = size
        self._used = 0

    def get(self, key: bytes) -> Value | None:
        """What was remembered; None if nothing is."""
        found = self._values.get(key)
        return None if found is None else found[0]

    def remember(self, key: bytes, value: Value, size: int = 1) -> None:
        """Keep `value`, the latest whatever its size."""
        self._values[key] = value, size
        self._used += size
        while self._used > self._size and len(self._values) > 1:
            _, (_, forgotten) = self._values.popitem(last=False)
            self._used -= forgotten


@dataclass
class Result:
    """What a method returned: a plain value, and groups that follow it."""

    value: Any = None
    groups: list[PackedGroup] = field(default_factory=list)
    handover: Handover | None = None
    """How to give the groups back."""


class Served:
    """One buffer, as all connections share it; the settings are those of `serve`.

    >>> served = Served(buffer, instance=secrets.token_bytes(16), max_live=1000, max_frame_bytes=1 << 28,
    ...                 max_put_bytes=1 << 30, client_limit_s=60.0)
    >>> await served.open()
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        *,
        instance: bytes,
        max_live: int | None,
        max_frame_bytes: int,
        max_put_bytes: int,
        client_limit_s: float,
    ) -> None:
        self.buffer = buffer
        self.instance = instance
        """Another one for each start: clients find out that what they had under way is forgotten."""
        self.max_frame_bytes = max_frame_bytes
        self.max_put_bytes = max_put_bytes
        self.put_bytes = 0
        """Of puts of all connections, from their first byte until they are stored."""
        self.client_limit_s = client_limit_s
        self.census = Census(buffer)
        self.gate = Admission(self.census, max_live)
        self.num_evicted: dict[str, int] = {}
        self.evictions = 0
        """Grows when `num_evicted` changes."""
        self._storing: dict[bytes, asyncio.Task[Result]] = {}
        self._stored: Memory[Result] = Memory()
        self._kept: Memory[bool] = Memory()
        self._keeping: dict[bytes, asyncio.Task[None]] = {}
        self._on_evict = buffer.on_evict
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Recover what an earlier server left, count, and begin to watch the buffer.

        A server that still runs on the same database is fenced off first: it must keep nothing any more.
        """
        # Most groups go on as they came: none is decoded before it is looked at.
        self.buffer.storage.use_codec(GroupCodec(keep_packed=True))
        await self.buffer.storage.claim()
        await recover(self.buffer)
        await self._look()
        self.buffer.on_evict = self._note_eviction
        self._watching = asyncio.create_task(self._watch(self.buffer.version))

    async def close(self) -> None:
        """End what `open` began, after the puts that are being stored."""
        if self._storing:
            await asyncio.wait(self._storing.values())
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        self.buffer.on_evict = self._on_evict
        self.buffer.storage.use_codec(GroupCodec())

    async def _look(self) -> None:
        await self.census.measure()
        # In a thread, because a store on disk asks its database.
        self.num_evicted = await asyncio.to_thread(lambda: dict(self.buffer.num_evicted))
        self.evictions += 1

    async def _watch(self, seen: int) -> None:
        """Consumes nothing, waits for changes, is woken by the buffer, produces wake-ups of the gate."""
        with suppress(BufferClosed):
            while True:
                seen = await self.buffer.wait_for_change(seen)
                await self.gate.note_change()
        # Closed under its server.
        self.gate.close()

    def _note_eviction(self, item: StorageItem) -> None:
        self.num_evicted[item.task_name] = self.num_evicted.get(item.task_name, 0) + 1
        self.evictions += 1
        if self._on_evict is not None:
            self._on_evict(item)

    async def look_back(self, arguments: messages.PutArguments, groups: list[Incoming]) -> Result | None:
        """What a put had as its result if an earlier server has stored it; None if none has.

        Raises:
            ConnectionLost: nobody knows.
        """
        storage = self.buffer.storage
        if arguments.asked_first in (b"", self.instance) or self._is_known(arguments.key):
            return None
        if not storage.keeps_receipts:
            raise messages.ConnectionLost(
                "the server was started anew with a store in memory; whether the put happened is not known"
            )
        if not await storage.has_receipt(arguments.key):
            return None
        task, how = arguments.task_name, arguments.arrival.checked(arguments.task_name)
        # Of the two the later one, as for the put itself.
        steps = [await storage.get_train_step(task), how.current_train_step]
        seen = max((step for step in steps if step is not None), default=None)
        before = list(map(status_of, groups))
        rows = [arrived_row(group, task, seen, how) for group in groups]
        return _put_result(rows, before, ())

    async def admit(self, key: bytes, number: int) -> None:
        """Wait for room for a put, unless it is stored or being stored already; then `put` at once."""
        if not self._is_known(key):
            await self.gate.admit(number)
            # While this one waited, the same put may have come on another connection.
            if self._is_known(key):
                self.gate.leave(number)

    async def put(self, arguments: messages.PutArguments, groups: list[Incoming]) -> Result:
        """Store the groups, which were admitted, unless they were stored under this key before.

        The value is, for each group, whether it has expired and the staleness of its members; and what was
        evicted for them.
        """
        key, number = arguments.key, len(groups)
        if (stored := self._stored.get(key)) is not None:
            return stored
        if key not in self._storing:
            # Its own task: once begun, it is not given up when the connection ends.
            self._storing[key] = asyncio.create_task(self._store(arguments, groups))
            self._storing[key].add_done_callback(lambda task: self._note_stored(key, task, number))
        return await asyncio.shield(self._storing[key])

    def _is_known(self, key: bytes) -> bool:
        return key in self._storing or self._stored.get(key) is not None

    def _note_stored(self, key: bytes, task: asyncio.Task[Result], number: int) -> None:
        del self._storing[key]
        # A put that failed has stored nothing, so it may be tried again.
        if not task.cancelled() and task.exception() is None:
            self._stored.remember(key, task.result(), number)

    async def _store(self, arguments: messages.PutArguments, groups: list[Incoming]) -> Result:
        try:
            before = list(map(status_of, groups))
            task, how = arguments.task_name, arguments.arrival.checked(arguments.task_name)
            async with self.census.within():
                key = arguments.key if self.buffer.storage.keeps_receipts else None
                rows, evicted = await self.buffer._store(groups, task, how, key)
                self.census.add(len(groups))
        finally:
            self.gate.leave(len(groups))
        for item in evicted:
            self._note_eviction(item)
        return _put_result(rows, before, evicted)

    async def get(self, arguments: messages.GetArguments) -> Result:
        """See `ReplayBuffer.get`; the groups are parked until they are kept."""
        sizes = {arguments.task_name: arguments.batch_size}
        return await self._take_over(sizes, arguments.group_status, tags=arguments.tags)

    async def take_batch(self, arguments: messages.TakeArguments) -> Result:
        """See `ReplayBuffer.take_batch`; without a train step the groups are parked until they are kept."""
        return await self._take_over(
            arguments.task_batch_sizes, arguments.group_status, train_step=arguments.train_step
        )

    async def _take_over(self, sizes: dict[str, int], status: Status, **options: Any) -> Result:
        async with self.census.within():
            handover = await take_over(self.buffer, sizes, status, max_bytes=self.max_frame_bytes, **options)
            if status is not Status.ARCHIVED:
                self.census.add(-len(handover.rows))
        groups = [group for of_task in handover.groups.values() for group in of_task]
        counts = {task: len(of_task) for task, of_task in handover.groups.items()}
        return Result(counts, groups, handover)

    async def keep(self, key: bytes, handover: Handover | None) -> Result:
        """The groups of `handover` are with the client; without it, say whether they were kept before.

        Raises:
            ConnectionLost: they were not, and are not going to be.
        """
        if handover is not None and key not in self._keeping and self._kept.get(key) is None:
            self._keeping[key] = asyncio.create_task(self._keep(key, handover))
            self._keeping[key].add_done_callback(lambda _: self._keeping.pop(key))
        if key in self._keeping:
            await finish(self._keeping[key])
        elif self._kept.get(key) is None:
            storage = self.buffer.storage
            is_kept = storage.keeps_receipts and await storage.has_receipt(key)
            # What may still come on the lost connection comes too late.
            self._kept.remember(key, is_kept)
        if not self._kept.get(key):
            raise messages.ConnectionLost(
                "the connection broke while groups were handed over; they are in the buffer again"
            )
        return Result()

    async def _keep(self, key: bytes, handover: Handover) -> None:
        self._kept.remember(key, await handover.keep(key))

    async def release(self, key: bytes, handover: Handover | None) -> Result:
        """Nobody has the groups of `handover`, which were taken under `key`."""
        if handover is not None:
            await finish(self._release(key, handover))
        return Result()

    async def _release(self, key: bytes, handover: Handover) -> None:
        # A client that gave up while its confirmation was on its way says both at once.
        if (keeping := self._keeping.get(key)) is not None:
            await asyncio.wait([keeping])
        async with self.census.within():
            self.census.add(await handover.release())

    async def call(self, method: str, arguments: msgspec.Struct) -> Result:
        """See `ReplayBuffer`, or the method here that is more than that one; paths are of this machine."""
        if (own := getattr(self, method, None)) is not None:
            result: Result = await own(arguments)
            return result
        return Result(await getattr(self.buffer, method)(**msgspec.structs.asdict(arguments)))

    async def count_statuses(self, arguments: messages.CountStatusesArguments) -> Result:
        """See `ReplayBuffer.count_statuses`; a list of numbers for each task."""
        cells = await self.buffer.count_statuses(arguments.task_names, arguments.statuses)
        return Result({task: [of[status] for status in arguments.statuses] for task, of in cells.items()})

    async def count_rows(self, arguments: messages.RowsArguments) -> Result:
        """See `StorageBackend.count`."""
        return Result(await self.buffer.storage.count(arguments.query))

    async def get_rows(self, arguments: messages.RowsArguments) -> Result:
        """See `StorageBackend.get`; without payloads."""
        rows = await self.buffer.storage.get(
            arguments.query, order=arguments.order, limit=arguments.limit, rows_only=True
        )
        return Result([messages.row_values(row) for row in rows])

    async def restore(self, arguments: messages.StepArguments) -> Result:
        """See `ReplayBuffer.restore`."""
        await self.buffer.restore(arguments.train_step)
        await self.census.measure()
        return Result()

    async def update_priorities(self, arguments: messages.PrioritiesArguments) -> Result:
        """See `ReplayBuffer.update_priorities`."""
        number = await self.buffer.update_priorities(
            dict(arguments.priorities), by=arguments.by, task_name=arguments.task_name
        )
        return Result(number)

    async def resume(self, arguments: messages.PathArguments) -> Result:
        """See `ReplayBuffer.resume`."""
        await self.buffer.resume(arguments.path)
        await recover(self.buffer)
        await self._look()
        return Result()


def _put_result(
    rows: Sequence[StorageItem], before: Sequence[Status], evicted: Sequence[StorageItem]
) -> Result:
    outcomes = [
        [status is not Status.EXPIRED and row.status is Status.EXPIRED, list(staleness_of(row.item))]
        for row, status in zip(rows, before, strict=True)
    ]
    return Result([outcomes, list(map(messages.EvictedGroup.of, evicted))])


ARGUMENTS: dict[str, type[Any]] = {
    "put": messages.PutArguments,
    "put_groups": messages.PutArguments,
    "get": messages.GetArguments,
    "take_batch": messages.TakeArguments,
    "keep": messages.KeyArguments,
    "release": messages.KeyArguments,
    "count": messages.CountArguments,
    "count_statuses": messages.CountStatusesArguments,
    "count_rows": messages.RowsArguments,
    "get_rows": messages.RowsArguments,
    "commit": messages.StepArguments,
    "restore": messages.StepArguments,
    "refresh_staleness": messages.RefreshArguments,
    "update_priorities": messages.PrioritiesArguments,
    "save": messages.PathArguments,
    "resume": messages.PathArguments,
    "wait_for_change": messages.VersionArguments,
}
