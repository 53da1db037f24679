"""A fragment buffer for other processes of the machine, on a Unix socket, without Ray or pickle.

::

    worker process  --add_fragments--> +--------------------------+
    worker process  --add_fragments--> | serve(buffer, path)      | --> ReplayBufferActor
    trainer process --fetch_fragments> |   one task a call        |
          | `RemoteFragmentBuffer`     +--------------------------+
          '---------- payloads: the store, mapped by every process -----------'

Only the user who started it may connect: the socket's file is closed to others. A client that goes away takes
back what it waits for; leases that it holds end by time, as those of any reader that was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

from forebay.fragments.buffer import ReplayBufferActor
from forebay.fragments.remote import wire
from forebay.io.framing import is_answered, read_frame
from forebay.io.heartbeat import beat

BACKLOG = 4096
"""Connections that wait to be accepted; the system lowers it to its own limit."""

STREAM_BYTES = 1 << 20
"""Read ahead of one client: a few thousand fragments."""


@contextlib.asynccontextmanager
async def serve(
    buffer: ReplayBufferActor, path: str | os.PathLike[str], *, client_limit_s: float = wire.CLIENT_LIMIT_S
) -> AsyncIterator[None]:
    """Answer clients at the socket `path` as long as the block runs; the buffer stays open after it.

    A client without a sign of life for `client_limit_s` is given up as one that went away.

    >>> async with serve(buffer, "run/fragments.sock"):
    ...     await done.wait()

    Raises:
        OSError: another server listens there, or the place cannot be used.
    """
    connections: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await _Connection(buffer, reader, writer, client_limit_s).run()
        except asyncio.CancelledError:
            # Only `serve` cancels it; asyncio would report that as an error.
            return
        finally:
            connections.discard(task)

    listening = _listen(os.fspath(path))
    server = await asyncio.start_unix_server(connected, sock=listening, limit=STREAM_BYTES, backlog=BACKLOG)
    try:
        yield
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _listen(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        if os.path.exists(path) and not is_answered(path):
            # Left by a server that was killed.
            os.unlink(path)
        sock.bind(path)
        # Nobody can connect before it listens.
        os.chmod(path, 0o600)
    except BaseException:
        sock.close()
        raise
    return sock


class _Connection:
    """One client.

    consumes: calls / waits for: the next / woken by: the socket / produces: a task for each, which answers

    However many calls of it wait, the next is read: it may be the fetch that lets them go on.
    """

    def __init__(
        self,
        buffer: ReplayBufferActor,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limit_s: float,
    ) -> None:
        self._buffer, self._limit_s = buffer, limit_s
        self._num_heard = 0
        self._reader, self._writer = reader, writer
        self._running: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        watching = asyncio.create_task(self._watch())
        try:
            while (frame := await read_frame(self._reader)) is not None:
                self._num_heard += 1
                await self._begin(wire.decode_call(frame))
        except ValueError:
            # It speaks something else: there is nobody to answer.
            return
        finally:
            watching.cancel()
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)
            self._writer.close()

    async def _watch(self) -> None:
        """End the connection of a client that is silent; its own signs of life are answered."""
        await beat(lambda: None, lambda: self._num_heard, limit_s=self._limit_s)
        self._writer.transport.abort()

    async def _begin(self, call: wire.Call) -> None:
        if call.method == wire.CANCEL:
            if call.number in self._running:
                self._running[call.number].cancel()
            return
        if call.method == wire.ALIVE:
            wire.write_frame(self._writer, wire.Answer(call.number, wire.encode(None)))
            return
        task = asyncio.create_task(self._answer(call))
        self._running[call.number] = task
        task.add_done_callback(lambda _: self._running.pop(call.number))
        # It begins before the next frame is read: a task cancelled before that would never answer.
        await asyncio.sleep(0)

    async def _answer(self, call: wire.Call) -> None:
        try:
            answer = wire.Answer(call.number, wire.encode(await self._call(call)))
        except asyncio.CancelledError:
            answer = wire.Answer(call.number, wire.encode(None), wire.CANCELLED)
        except Exception as error:
            # Whatever it is, the caller is the one to know.
            answer = wire.failure(call.number, error)
        if not self._writer.is_closing():
            wire.write_frame(self._writer, answer)
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()

    async def _call(self, call: wire.Call) -> Any:
        method = wire.METHODS.get(call.method)
        if method is None:
            raise ValueError(f"a fragment buffer has no method {call.method!r} for other processes")
        arguments = method.arguments.decode(call.arguments)
        if call.method == "fetch_fragments":
            num_fragments, timeout_s, lease_s = arguments
            batch = await self._buffer.fetch_fragments(num_fragments, timeout_s=timeout_s, lease_s=lease_s)
            return wire.Batch.of(batch)
        result = await getattr(self._buffer, call.method)(*arguments)
        return wire.Batch.of(result) if call.method == "prepared_fragments" else result
