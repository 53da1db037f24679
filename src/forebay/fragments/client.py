"""A fragment buffer that another process serves.

::

    add_fragments(...) --Call--> socket --> `server` --> ReplayBufferActor
         '-- waits for its Answer <-- one task reads all answers <--'
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from forebay.cancelling import outlast
from forebay.fragments import wire
from forebay.fragments.leases import FragmentBatch, Lease
from forebay.fragments.records import FragmentMetadata
from forebay.fragments.server import STREAM_BYTES
from forebay.fragments.turns import BufferClosed
from forebay.framing import read_frame


class RemoteFragmentBuffer:
    """The methods of `ReplayBufferActor`, called in the process that serves it.

    Invariants: equal calls have equal results and errors; calls of one client begin in the order in which
    they were made; a cancelled call is cancelled there too, and its caller waits for the end of it.

    >>> buffer = await RemoteFragmentBuffer.connect("run/fragments.sock")
    >>> batch = await buffer.fetch_fragments(64)
    >>> await buffer.disconnect()
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[wire.Answer]] = {}
        self._lost: str | None = None
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, path: str | os.PathLike[str]) -> RemoteFragmentBuffer:
        """A client of the buffer served at the socket `path`.

        Raises:
            OSError: nobody listens there, or not for this user.
        """
        return cls(*await asyncio.open_unix_connection(os.fspath(path), limit=STREAM_BYTES))

    async def disconnect(self) -> None:
        """End the connection; calls under way raise `BufferClosed`. The buffer goes on."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._lose("the connection was closed on this side")

    async def _read(self) -> None:
        """consumes: answers / waits for: the next / woken by: the socket / produces: ends of calls"""
        while (frame := await read_frame(self._reader)) is not None:
            answer = wire.decode_answer(frame)
            pending = self._pending.pop(answer.number, None)
            if pending is not None:
                pending.set_result(answer)
        self._lose("the process that served the fragment buffer is gone")

    def _lose(self, reason: str) -> None:
        self._lost = reason
        self._writer.close()
        for pending in self._pending.values():
            pending.set_exception(BufferClosed(reason))
        self._pending.clear()

    async def _call(self, method: str, *arguments: Any) -> Any:
        if self._lost is not None:
            raise BufferClosed(self._lost)
        number = next(self._numbers)
        pending: asyncio.Future[wire.Answer] = asyncio.get_running_loop().create_future()
        wire.write_frame(self._writer, wire.Call(number, method, wire.encode(arguments)))
        self._pending[number] = pending
        try:
            answer = await asyncio.shield(pending)
        except asyncio.CancelledError:
            await self._cancel(number, method, pending)
            raise
        if answer.error == wire.CANCELLED:
            raise BufferClosed("the process that serves the fragment buffer ends")
        if answer.error is not None:
            raise wire.error_of(answer)
        return wire.METHODS[method].result.decode(answer.value)

    async def _cancel(self, number: int, method: str, pending: asyncio.Future[wire.Answer]) -> None:
        if number in self._pending:
            wire.write_frame(self._writer, wire.Call(number, wire.CANCEL))
        await outlast(pending)
        answer = None if pending.exception() else pending.result()
        if answer is not None and answer.error is None and method == "fetch_fragments":
            # It was served in the same moment, and nobody is going to read it.
            batch = wire.METHODS[method].result.decode(answer.value)
            arguments = wire.encode((batch.lease_id,))
            wire.write_frame(self._writer, wire.Call(next(self._numbers), "release", arguments))

    async def add_fragment(self, fragment_id: str, metadata: FragmentMetadata) -> None:
        """See `ReplayBufferActor.add_fragment`."""
        await self._call("add_fragments", [(fragment_id, metadata)])

    async def add_fragments(self, fragments: Sequence[tuple[str, FragmentMetadata]]) -> None:
        """See `ReplayBufferActor.add_fragments`."""
        await self._call("add_fragments", fragments)

    async def wait_for_room(self) -> None:
        """See `ReplayBufferActor.wait_for_room`."""
        await self._call("wait_for_room")

    async def remove_worker(self, worker_uuid: str) -> None:
        """See `ReplayBufferActor.remove_worker`."""
        await self._call("remove_worker", worker_uuid)

    async def fetch_fragments(
        self, num_fragments: int, *, timeout_s: float | None = None, lease_s: float | None = None
    ) -> FragmentBatch:
        """See `ReplayBufferActor.fetch_fragments`."""
        message: wire.Batch = await self._call("fetch_fragments", num_fragments, timeout_s, lease_s)
        return message.batch()

    async def prepared_fragments(self) -> FragmentBatch:
        """See `ReplayBufferActor.prepared_fragments`."""
        message: wire.Batch = await self._call("prepared_fragments")
        return message.batch()

    async def release(self, lease: Lease | str) -> bool:
        """See `ReplayBufferActor.release`."""
        return bool(await self._call("release", _id_of(lease)))

    async def renew(self, lease: Lease | str) -> bool:
        """See `ReplayBufferActor.renew`."""
        return bool(await self._call("renew", _id_of(lease)))

    async def update_model_version(self, session_id: str, model_version: int) -> None:
        """See `ReplayBufferActor.update_model_version`."""
        await self._call("update_model_version", session_id, model_version)

    async def update_priorities(self, priorities: Mapping[str, float]) -> None:
        """See `ReplayBufferActor.update_priorities`."""
        await self._call("update_priorities", dict(priorities))

    async def get_database_config(self) -> dict[str, Any]:
        """See `ReplayBufferActor.get_database_config`."""
        return dict(await self._call("get_database_config"))

    async def metrics(self) -> dict[str, float]:
        """See `ReplayBufferActor.metrics`."""
        return dict(await self._call("metrics"))

    async def save(self, path: str) -> None:
        """See `ReplayBufferActor.save`; the path is one of this machine."""
        await self._call("save", os.fspath(path))

    async def close(self) -> None:
        """Close the buffer for everybody, and end the connection."""
        await self._call("close")
        await self.disconnect()


def _id_of(lease: Lease | str) -> str:
    return lease.lease_id if isinstance(lease, Lease) else lease
