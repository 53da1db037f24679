"""The replay buffer for other processes: one buffer, served on a local socket, without Ray or pickle.

::

    producer process --put-------> +-----------------------------+
    producer process --put-------> | serve(buffer, address)      |
    trainer process  <-take_batch- |   accept -> Connection each | --> ReplayBuffer --> any store
    trainer process  --commit----> +-----------------------------+
      `RemoteReplayBuffer`          `server_connection`, `server_calls`

It is not a database: the buffer's store decides what survives. It is not a way between machines that do not
trust each other: see `server_address`.

What each side can rely on:

* **Put.** Answered when it is stored. Over `max_live` it waits, in order of arrival, and can be cancelled. A
  client whose connection breaks sends it again under the same key, and the server stores it once; one that
  was started anew asks its database. With a store in memory nobody knows, and the client raises
  `ConnectionLost`.
* **Take.** The groups are parked until the client has them all: if it dies before, they are live again, in
  their old places. Then they are removed, or, with a train step, ARCHIVED, and `restore` brings them back.
* **Others.** A client that waits, reads slowly or dies holds up nobody: each has its own tasks and sockets.
* **Closing.** What runs comes to its end, what waits raises `ServerClosed`, then everybody is sent goodbye.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from forebay.io.address import Address, listen, tune
from forebay.io.heartbeat import check_limit
from forebay.replay.buffer import ReplayBuffer
from forebay.replay.remote.calls import Served
from forebay.replay.remote.connection import Connection, turn_away
from forebay.replay.remote.messages import MAX_FRAME_BYTES

GRACE_S = 5.0
"""For clients to read their last answers when the server closes."""

MAX_CLIENTS = 900
"""Connections at a time: a process has 1,024 files by default, and its store and logs need some of them."""

CLIENT_LIMIT_S = 60.0
"""Twice what a client allows a server: a trainer's event loop may be blocked by its work."""

MAX_PUT_BYTES = 1 << 30
"""Of groups of all clients that are not stored yet: one of 4 MB from 256 producers at the same time."""

ACCEPT_PAUSE_S = 1.0
"""When the system has no file descriptor left; asyncio's own servers wait as long."""

_log = logging.getLogger(__name__)


class BufferServer:
    """Accepts clients of one buffer; made by `serve`.

    Consumes connections, waits for the next one, is woken by the listening socket, produces a task for each.

    >>> async with serve(buffer, "tcp://127.0.0.1:0") as server:
    ...     print(server.address)
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        listener: socket.socket,
        address: Address,
        *,
        token: str | None,
        max_clients: int,
        **limits: Any,
    ) -> None:
        self.address = str(address)
        self._path = address.path
        self._listener = listener
        self._token = token
        self._max_clients = max_clients
        self._served = Served(buffer, instance=secrets.token_bytes(16), **limits)
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._accepting: asyncio.Task[None] | None = None

    @property
    def num_clients(self) -> int:
        """Clients that are connected."""
        return len(self._connections)

    async def open(self) -> None:
        """Begin to accept."""
        await self._served.open()
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Accept no more, let what runs come to its end, say goodbye."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        self._listener.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        await asyncio.gather(*(self._end(*both) for both in self._connections.items()))
        await self._served.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                _log.warning("cannot accept a buffer client: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            tune(sock)
            if self.num_clients >= self._max_clients:
                await turn_away(sock, f"refused: the server takes {self._max_clients} connections")
                continue
            connection = Connection(sock, self._served, token=self._token)
            self._connections[connection] = asyncio.create_task(self._serve(connection))

    async def _serve(self, connection: Connection) -> None:
        try:
            await connection.run()
        finally:
            del self._connections[connection]

    async def _end(self, connection: Connection, serving: asyncio.Task[None]) -> None:
        closing = asyncio.create_task(connection.close())
        # It also ends by itself when its client leaves.
        await asyncio.wait([closing, serving], timeout=GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        connection.abort()
        closing.cancel()
        await asyncio.gather(closing, serving, return_exceptions=True)


@asynccontextmanager
async def serve(
    buffer: ReplayBuffer,
    address: str | os.PathLike[str],
    *,
    token: str | None = None,
    max_live: int | None = None,
    max_frame_bytes: int = MAX_FRAME_BYTES,
    max_clients: int = MAX_CLIENTS,
    max_put_bytes: int = MAX_PUT_BYTES,
    client_limit_s: float = CLIENT_LIMIT_S,
) -> AsyncIterator[BufferServer]:
    """Serve `buffer` at `address` for the time of the block; the buffer may be used here as well.

    `max_live` makes the puts of clients wait while there are so many live groups. A group of more than
    `max_frame_bytes` is refused, and so is a connection beyond `max_clients`. Over `max_put_bytes` of groups
    on their way in, from all clients together, further ones wait with their clients. A client without a sign
    of life for `client_limit_s` seconds is given up: what it took and did not confirm is live again.

    One server at a time for a store: the next one takes what is parked in it for left over.

    >>> async with serve(buffer, "run/buffer.sock", max_live=4096):
    ...     await train(buffer)

    Raises:
        ValueError: the address is not one, or can be reached from other machines and there is no token;
            a limit is not positive, or there is `max_live` and the buffer has a `limit` as well.
        OSError: something else is at the address.
    """
    if max_live is not None and max_live < 1:
        raise ValueError(f"max_live must be at least 1 group, or None for no limit, got {max_live}")
    for name, limit in (("max_clients", max_clients), ("max_put_bytes", max_put_bytes)):
        if limit < 1:
            raise ValueError(f"{name} must be at least 1, got {limit}")
    check_limit("client_limit_s", client_limit_s)
    if max_live is not None and buffer.limit is not None:
        raise ValueError(
            f"either puts wait (max_live {max_live}) or old groups are evicted (limit {buffer.limit}); "
            f"leave one out"
        )
    listener, found = await listen(Address.parse(address), token)
    server = BufferServer(
        buffer,
        listener,
        found,
        token=token,
        max_clients=max_clients,
        max_live=max_live,
        max_frame_bytes=max_frame_bytes,
        max_put_bytes=max_put_bytes,
        client_limit_s=client_limit_s,
    )
    try:
        await server.open()
        yield server
    finally:
        await server.close()
