"""A fragment buffer that another process serves.

::

    add_fragments(...) --Call--> socket --> `server` --> ReplayBufferActor
         '-- waits for its Answer <-- one task reads all answers <--'
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from forebay.aio.changed import BufferClosed
from forebay.fragments.remote import wire
from forebay.fragments.remote.calls import FragmentCalls
from forebay.fragments.remote.server import STREAM_BYTES
from forebay.io.framing import connect_unix, read_frame
from forebay.io.heartbeat import SILENCE_LIMIT_S, UNDO_S, beat, check_limit


class RemoteFragmentBuffer(FragmentCalls):
    """The methods of `ReplayBufferActor`, called in the process that serves it.

    Invariants: equal calls have equal results and errors; calls of one client begin in the order in which
    they were made; a cancelled call is cancelled there too, and its caller waits for the end of it.

    >>> buffer = await RemoteFragmentBuffer.connect("run/fragments.sock")
    >>> batch = await buffer.fetch_fragments(64)
    >>> await buffer.disconnect()
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, limit_s: float
    ) -> None:
        self._reader, self._writer = reader, writer
        self._where, self._limit_s = f"the process that serves the fragment buffer at {path!r}", limit_s
        self._num_heard = 0
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[wire.Answer]] = {}
        self._lost: BufferClosed | None = None
        self._tasks = [asyncio.create_task(self._until_lost(work)) for work in (self._read, self._beat)]

    @classmethod
    async def connect(
        cls, path: str | os.PathLike[str], *, limit_s: float = SILENCE_LIMIT_S
    ) -> RemoteFragmentBuffer:
        """A client of the buffer served at the socket `path`.

        A server that does not answer within `limit_s`, or later is silent for so long, is given up.

        Raises:
            OSError: nobody listens or answers there (`TimeoutError`), or not for this user.
            ValueError: the limit is not positive.
        """
        check_limit("limit_s", limit_s)
        found = os.fspath(path)
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                sock = await connect_unix(found)
                streams = await asyncio.open_unix_connection(sock=sock, limit=STREAM_BYTES)
                client = cls(*streams, found, limit_s)
                try:
                    await client._ask(wire.ALIVE)
                except BaseException:
                    await client.disconnect()
                    raise
                return client
        except TimeoutError:
            raise TimeoutError(
                f"the fragment buffer at {found!r} did not answer within {limit_s:g} s"
            ) from None

    async def disconnect(self) -> None:
        """End the connection; calls under way raise `BufferClosed`. The buffer goes on."""
        self._lose("the connection was closed on this side")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # What was said last should get there, unless nobody reads it.
        with suppress(OSError):
            async with asyncio.timeout(UNDO_S):
                await self._writer.wait_closed()
        self._writer.transport.abort()

    async def _until_lost(self, work: Callable[[], Awaitable[str]]) -> None:
        """Do a part of the connection's work; however it ends, the connection does."""
        try:
            self._lose(await work())
        except asyncio.CancelledError:
            self._lose("the connection was closed on this side")
            raise
        # Whatever it is: calls that wait for a task that is gone would wait forever.
        except BaseException as error:
            self._lose(f"the connection to {self._where} failed here: {error!r}", error)
            if not isinstance(error, Exception):
                raise

    async def _read(self) -> str:
        """consumes: answers / waits for: the next / woken by: the socket / produces: ends of calls"""
        while (frame := await read_frame(self._reader)) is not None:
            self._num_heard += 1
            answer = wire.decode_answer(frame)
            pending = self._pending.pop(answer.number, None)
            if pending is not None:
                pending.set_result(answer)
        return f"{self._where} is gone"

    async def _beat(self) -> str:
        def say() -> None:
            wire.write_frame(self._writer, wire.Call(next(self._numbers), wire.ALIVE))

        silent_s = await beat(
            say, lambda: self._num_heard, limit_s=self._limit_s, other_limit_s=wire.CLIENT_LIMIT_S
        )
        self._writer.transport.abort()
        return f"{self._where} has been silent for {silent_s:g} s: it hangs or was stopped"

    def _lose(self, reason: str, cause: BaseException | None = None) -> None:
        if self._lost is None:
            self._lost = BufferClosed(reason)
            self._lost.__cause__ = cause
        self._writer.close()
        for pending in self._pending.values():
            pending.set_exception(self._loss())
        self._pending.clear()

    def _loss(self) -> BufferClosed:
        """Why the connection is over, for one caller."""
        error = BufferClosed(str(self._lost))
        error.__cause__ = None if self._lost is None else self._lost.__cause__
        return error

    async def _ask(self, method: str, *arguments: Any) -> wire.Answer:
        if self._lost is not None:
            raise self._loss()
        number = next(self._numbers)
        pending: asyncio.Future[wire.Answer] = asyncio.get_running_loop().create_future()
        wire.write_frame(self._writer, wire.Call(number, method, wire.encode(arguments)))
        self._pending[number] = pending
        try:
            return await asyncio.shield(pending)
        except asyncio.CancelledError:
            # Whenever its answer comes: nobody is going to read it.
            pending.add_done_callback(partial(self._give_back, method))
            if number in self._pending:
                wire.write_frame(self._writer, wire.Call(number, wire.CANCEL))
            # The caller goes on when the call is undone, unless that takes a process that hangs.
            await asyncio.wait([pending], timeout=UNDO_S)
            raise

    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        # By place on the wire: in the order of the signature.
        answer = await self._ask(method, *arguments, *options.values())
        if answer.error == wire.CANCELLED:
            raise BufferClosed("the process that serves the fragment buffer ends")
        if answer.error is not None:
            raise wire.error_of(answer)
        result = wire.METHODS[method].result.decode(answer.value)
        return result.batch() if isinstance(result, wire.Batch) else result

    def _give_back(self, method: str, pending: asyncio.Future[wire.Answer]) -> None:
        answer = None if pending.exception() else pending.result()
        if answer is not None and answer.error is None and method == "fetch_fragments":
            # It was served in the same moment.
            batch = wire.METHODS[method].result.decode(answer.value)
            arguments = wire.encode((batch.lease_id,))
            wire.write_frame(self._writer, wire.Call(next(self._numbers), "release", arguments))

    async def close(self) -> None:
        """Close the buffer for everybody, and end the connection."""
        await self._call("close")
        await self.disconnect()
