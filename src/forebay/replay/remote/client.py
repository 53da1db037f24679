"""`RemoteReplayBuffer`: a replay buffer in another process, with the methods of `ReplayBuffer`.

::

    connect --> BufferLink --lost--> the next call connects again
                 |
    put, get, count, ... --> one message there, one answer back; any number of calls at a time

It holds no groups and decides nothing; `forebay.replay.remote.server` says what it can rely on.

When the connection breaks, calls are made again on a new connection: those that only look; those that do the
same when done twice; puts, which the server knows by their keys, also after a restart if its store is a
database; and takes, because groups that did not arrive here, or were not confirmed, are in the buffer again.
Only `resume`, and a put into a server in memory that was started anew, raise `ConnectionLost`, because they
may have happened. So does every call while no process answers at the address.
"""

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Unpack

import msgspec

from forebay.aio.time_limits import timeout
from forebay.io.address import Address
from forebay.io.messages import SILENCE_LIMIT_S, UNDO_S, Note, check_limit, encode_value
from forebay.io.methods import called
from forebay.replay.arrival import Arrival, PutKeywords
from forebay.replay.buffer import Group, ReplayBuffer
from forebay.replay.query import check_sizes
from forebay.replay.remote import messages
from forebay.replay.remote.link import BufferLink
from forebay.replay.remote.messages import ConnectionLost
from forebay.replay.stores.contract import StorageItem, TagValue, check_tags
from forebay.types import RolloutState, Status, expire_group

Locate = Callable[[], Awaitable[tuple[Address, str | None]]]
"""Where the server is now, and the token that it asks for."""


FULL_PAUSE_S = 0.25
"""The wait before a put that found the server full is sent again: each attempt sends all its megabytes."""


class RemoteReplayBuffer:
    """The buffer of a server, for one event loop of this process.

    Methods, results and errors are those of `ReplayBuffer`; groups come and go by value. After a `put` the
    caller's rollouts are labeled, aged and, if they expired, wiped, as they are there. ``len(buffer)``,
    `version` and `num_evicted` are as of the last answer that this client got.
    `forebay.replay.serve` has an example.
    """

    reuse = None
    """None: only a buffer in the trainer's own process can use groups again (`forebay.replay.reuse`)."""

    def __init__(self, locate: Locate, link: BufferLink, limit_s: float = SILENCE_LIMIT_S) -> None:
        self.on_evict: Callable[[StorageItem], None] | None = None
        """Called for each group that a put of this client has evicted; its rollouts have only their ids."""
        self._locate = locate
        self._link = link
        self._limit_s = limit_s
        self._opening: asyncio.Task[BufferLink] | None = None
        """The attempt to connect again, one for all calls that wait for it."""
        self._is_closed = False

    @classmethod
    async def connect(
        cls, address: str | os.PathLike[str], token: str | None = None, *, limit_s: float = SILENCE_LIMIT_S
    ) -> "RemoteReplayBuffer":
        """Connect to the server at `address`.

        A server that refuses connections or gives no sign of life for `limit_s` seconds is given up.

        Raises:
            ValueError: the address is not one, or the limit is not positive.
            ConnectionLost: no process listens or answers there, or the server refuses; a `ConnectionError`.
        """
        found = Address.parse(address)

        async def locate() -> tuple[Address, str | None]:
            return found, token

        return await cls.connect_through(locate, limit_s=limit_s)

    @classmethod
    async def connect_through(cls, locate: Locate, *, limit_s: float = SILENCE_LIMIT_S) -> "RemoteReplayBuffer":
        """Connect to wherever `locate` says the server is now; it is asked again when the connection is lost.

        Raises:
            ConnectionLost: no process listens or answers there, or the server refuses.
        """
        check_limit("limit_s", limit_s)
        return cls(locate, await BufferLink.open(*await locate(), limit_s=limit_s), limit_s)

    async def __aenter__(self) -> "RemoteReplayBuffer":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection; the buffer itself stays with the server."""
        self._is_closed = True
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        await self._link.close()

    @property
    def address(self) -> str:
        """The server's address at the latest connection."""
        return self._link.address

    def __len__(self) -> int:
        return self._link.num_live

    @property
    def version(self) -> int:
        """Grows with every change of the content."""
        return self._link.version

    @property
    def num_evicted(self) -> dict[str, int]:
        """Groups evicted so far, by task."""
        return dict(self._link.num_evicted)

    async def put(self, items: Sequence[RolloutState], task_name: str, **arrival: Unpack[PutKeywords]) -> None:
        """See `ReplayBuffer.put`; returns when the group is stored, which may take until there is room.

        If cancelled while it waits for room, nothing is stored; later, the group is.

        Raises:
            ValueError: as there; nothing is stored.
            ServerClosed: the server closed before there was room; nothing is stored.
            ConnectionLost: the connection broke, and the server is gone or was started anew with a store in
                memory, so that it is not known whether the group is stored.
        """
        await self.put_groups([items], task_name, **arrival)

    async def put_groups(
        self, groups: Iterable[Sequence[RolloutState]], task_name: str, **arrival: Unpack[PutKeywords]
    ) -> None:
        """See `ReplayBuffer.put_groups`; as `put` here, for all groups together."""
        how = Arrival.of(task_name, arrival)
        if not (listed := [group for group in groups if group is None or len(group)]):
            return
        arguments = messages.PutArguments(secrets.token_bytes(messages.KEY_BYTES), task_name, how)
        (outcomes, evicted), _ = await self._repeat("put_groups", arguments, listed)
        for group, (is_expired, staleness) in zip(listed, outcomes, strict=True):
            for state, value in zip(group, staleness, strict=True):
                state.seq_staleness = value
            if is_expired:
                expire_group(group)
        if self.on_evict is not None:
            for row in msgspec.convert(evicted, list[messages.EvictedGroup]):
                self.on_evict(row.to_row())

    async def get(
        self, batch_size: int, task_name: str, group_status: Status, *, tags: Mapping[str, TagValue] | None = None
    ) -> list[Group]:
        """Take groups; those that do not arrive here are in the buffer again."""
        sizes, checked = check_sizes({task_name: batch_size}), None if tags is None else check_tags(tags)
        arguments = messages.TakeArguments(b"", sizes, group_status, None, checked)
        return (await self._take(arguments))[task_name]

    count = called(ReplayBuffer.count)
    count_statuses = called(ReplayBuffer.count_statuses)
    is_ready = called(ReplayBuffer.is_ready)
    commit = called(ReplayBuffer.commit)
    restore = called(ReplayBuffer.restore)
    refresh_staleness = called(ReplayBuffer.refresh_staleness)
    """Where the connection broke meanwhile, groups that had expired before it broke are not counted."""
    update_priorities = called(ReplayBuffer.update_priorities)

    async def take_batch(
        self,
        task_batch_sizes: Mapping[str, int],
        *,
        group_status: Status = Status.COMPLETED,
        train_step: int | None = None,
    ) -> tuple[dict[str, list[Group]], dict[str, int]]:
        """Take groups of several tasks; those that do not arrive here are in the buffer again."""
        arguments = messages.TakeArguments(b"", check_sizes(task_batch_sizes), group_status, train_step)
        taken = await self._take(arguments)
        return taken, {task: len(groups) for task, groups in taken.items()}

    async def save(self, path: str | Path) -> None:
        """Write a snapshot; the server writes, on its machine."""
        await self._call("save", path=_absolute(path))

    async def resume(self, path: str | Path) -> None:
        """Take over a snapshot; the server reads, on its machine."""
        await self._repeat("resume", {"path": _absolute(path)}, repeats=False)

    async def wait_for_change(self, version: int) -> int:
        """Wait for a change of the content; also returns when another server has taken over."""
        link = await self._linked()
        try:
            found, _ = await link.ask("wait_for_change", {"version": version})
        except ConnectionLost:
            if link.lost is not None and not link.may_be_replaced:
                raise
            # Another server counts its versions anew: the one that was seen means nothing to it.
            if link.lost is None or (await self._linked()).instance != link.instance:
                return self.version
            return await self.wait_for_change(version)
        return int(found)

    async def _call(self, method: str, **arguments: Any) -> Any:
        """The result of a method that does the same when done twice."""
        # Any iterable is taken; of a mapping its keys.
        for name in {"task_names", "statuses"} & arguments.keys():
            arguments[name] = None if arguments[name] is None else list(arguments[name])
        result, _ = await self._repeat(method, arguments)
        return msgspec.convert(result, messages.METHODS[method].result)

    async def _repeat(
        self,
        method: str,
        arguments: Any,
        groups: Sequence[Sequence[RolloutState]] | None = None,
        *,
        repeats: bool = True,
    ) -> tuple[Any, list[Group]]:
        """Call, with groups to put; again if the connection breaks and it `repeats`."""
        first = link = await self._linked()
        while True:
            try:
                if groups is None:
                    return await link.ask(method, arguments)
                return await link.put(arguments, groups), []
            except messages.ServerFull:
                # Puts of all clients wait to be stored; nothing of this one was kept.
                await asyncio.sleep(FULL_PAUSE_S)
                continue
            except ConnectionLost as error:
                if not link.may_be_replaced:
                    # The connection is up and the server says so, or its answer cannot be read here.
                    raise
                unknown = ConnectionLost(f"{error}; whether {method} has happened is not known")
            if not repeats:
                raise unknown
            try:
                link = await self._linked()
            except ConnectionLost as error:
                # Whether it has happened matters only to a put.
                raise error if groups is None else unknown from None
            if isinstance(arguments, messages.PutArguments):
                # The server of the first attempt: it, or any that came after it, may have stored the put.
                arguments.asked_first = first.instance

    async def _take(self, arguments: messages.TakeArguments) -> dict[str, list[Group]]:
        """Take, and confirm the groups that came; again if the connection breaks before that.

        Groups that are not confirmed go back into the buffer: with a connection that breaks by itself, and
        from a caller that is cancelled or gets an error because the server is told.
        """
        while True:
            link = await self._linked()
            # A new key for each attempt: what the server knows of an earlier one must not count for this one.
            arguments.key = secrets.token_bytes(messages.KEY_BYTES)
            settling = {"key": arguments.key}
            try:
                counts, groups = await link.ask("take_batch", arguments)
                if groups:
                    await self._repeat("keep", settling)
            except ConnectionLost:
                if self._is_closed or not link.may_be_replaced:
                    raise
                continue
            # Also after an error: a store may have failed to confirm, and the groups are parked in it.
            except (asyncio.CancelledError, Exception):
                await self._give_back(settling)
                raise
            # Now the server may forget how to give them back.
            if groups:
                self._link.channel.post(Note(encode_value(messages.Key(arguments.key))))
            following = iter(groups)
            return {task: list(islice(following, number)) for task, number in counts.items()}

    async def _give_back(self, settling: dict[str, bytes]) -> None:
        """Say that no caller has the groups of a take, and wait a little for that."""
        # Asked before `tell`, which itself adds a call without an answer.
        is_answering = self._link.is_answering
        released = self._link.tell("release", settling)
        if released is None:
            # On the next connection: the server may have kept them for this client before the last one broke.
            with suppress(ConnectionError, TimeoutError):
                async with timeout(UNDO_S):
                    await self._repeat("release", settling)
        elif is_answering:
            await asyncio.wait([released], timeout=UNDO_S)

    async def _linked(self) -> BufferLink:
        """The connection, made anew if it was lost."""
        if self._is_closed:
            raise ConnectionLost("this client was closed")
        if self._link.lost is None:
            return self._link
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open_again())
            # Retrieved, so that asyncio does not warn of it: every caller may have been cancelled.
            self._opening.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        try:
            # Together, and also for the others when one of them is cancelled.
            return await asyncio.shield(self._opening)
        except asyncio.CancelledError:
            if self._is_closed:
                raise ConnectionLost("this client was closed") from None
            raise

    async def _open_again(self) -> BufferLink:
        await self._link.close()
        self._link = await BufferLink.open(*await self._locate(), limit_s=self._limit_s)
        return self._link


def _absolute(path: str | Path) -> str:
    return os.path.abspath(path)
