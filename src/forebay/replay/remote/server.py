"""The replay buffer for other processes: one buffer, served on a local socket, without Ray or pickle.

::

    producer process --put-------> +-----------------------------+
    producer process --put-------> | serve(buffer, address)      |
    trainer process  <-take_batch- |   accept -> ClientConnection each | --> ReplayBuffer --> any store
    trainer process  --commit----> +-----------------------------+
      `RemoteReplayBuffer`          `connection`, `calls`

It is not a database: the buffer's store decides what survives. It is not a way between machines that do not
trust each other: see `forebay.io.address`.

Both sides can rely on this:

* **Put.** Answered when it is stored. Over `max_live` it waits, in order of arrival, and can be cancelled. A
  client whose connection breaks sends it again under the same key, and the server stores it once; one that
  was started anew asks its database. With a store in memory it cannot be known, and the client raises
  `ConnectionLost`.
* **Take.** The groups are parked until the client has them all: if it dies before, they are live again, in
  their old places. Then they are removed, or, with a train step, ARCHIVED, and `restore` brings them back.
* **Others.** A client that waits, reads slowly or dies holds up no other: each has its own tasks and socket.
* **Closing.** What runs comes to its end, what waits raises `ServerClosed`, then everybody is sent goodbye.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from forebay.io.address import Address, listen, tune
from forebay.io.channel import Channel
from forebay.io.messages import Goodbye
from forebay.io.session import Acceptor
from forebay.replay.buffer import ReplayBuffer
from forebay.replay.remote.calls import CLIENT_LIMIT_S, MAX_CLIENTS, MAX_PUT_BYTES, Limits, Served
from forebay.replay.remote.connection import ClientConnection
from forebay.replay.remote.messages import MAX_FRAME_BYTES

GRACE_S = 5.0
"""For clients to read their last answers when the server closes."""


class BufferServer:
    """Accepts clients of one buffer; made by `serve`."""

    def __init__(self, buffer: ReplayBuffer, address: Address, *, token: str | None, limits: Limits) -> None:
        self.address = str(address)
        self._path = address.path
        self._token = token
        self._served = Served(buffer, instance=secrets.token_bytes(16), limits=limits)
        self._connections: dict[ClientConnection, asyncio.Task[Any]] = {}
        self._acceptor: Acceptor | None = None

    @property
    def num_clients(self) -> int:
        """Clients that are connected."""
        return len(self._connections)

    async def open(self, listener: socket.socket) -> None:
        """Begin to accept."""
        await self._served.open()
        self._acceptor = Acceptor(listener, self._serve, self._path)

    async def close(self) -> None:
        """Accept no more, let running calls come to their end, say goodbye."""
        if self._acceptor is not None:
            await self._acceptor.stop()
        await asyncio.gather(*(self._end(*both) for both in self._connections.items()))
        await self._served.close()

    async def _serve(self, sock: socket.socket) -> None:
        tune(sock)
        max_clients = self._served.limits.max_clients
        if self.num_clients >= max_clients:
            # Its client has said nothing yet, and so little fits into any socket's buffer.
            channel = Channel(sock)
            channel.post(Goodbye(f"refused: the server takes {max_clients} connections"))
            channel.end()
            channel.close()
            return
        connection = ClientConnection(sock, self._served, token=self._token)
        task = asyncio.current_task()
        assert task is not None
        self._connections[connection] = task
        try:
            await connection.run()
        finally:
            del self._connections[connection]

    async def _end(self, connection: ClientConnection, serving: asyncio.Task[None]) -> None:
        closing = asyncio.create_task(connection.close())
        # It also ends by itself when its client leaves.
        await asyncio.wait([closing, serving], timeout=GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        connection.channel.end()
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
    of life for `client_limit_s` seconds is given up: the groups it took and did not confirm are live again.

    One server at a time for a store: the next one takes groups that are parked in it for left over.

    >>> from forebay.replay import FIFOReplayPolicy, IndexedStorage, RemoteReplayBuffer
    >>> from forebay.types import RolloutState, Status
    >>> async def example():
    ...     buffer = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
    ...     async with serve(buffer, "tcp://127.0.0.1:0", max_live=4096) as server:
    ...         async with await RemoteReplayBuffer.connect(server.address) as client:
    ...             group = [RolloutState([], response_ids=[7, 8], status=Status.COMPLETED)]
    ...             await client.put(group, "math", model_step=3)
    ...             groups, counts = await client.take_batch({"math": 1}, train_step=4)
    ...     return counts, groups["math"][0][0].response_model_steps
    >>> asyncio.run(example())
    ({'math': 1}, array([3, 3], dtype=int32))

    Raises:
        ValueError: the address is not one, or can be reached from other machines and there is no token;
            a limit is not positive, or there is `max_live` and the buffer has a `limit` as well.
        OSError: something else is at the address.
    """
    limits = Limits(
        max_live=max_live,
        max_frame_bytes=max_frame_bytes,
        max_clients=max_clients,
        max_put_bytes=max_put_bytes,
        client_limit_s=client_limit_s,
    )
    if max_live is not None and buffer.limit is not None:
        raise ValueError(
            f"either puts wait (max_live {max_live}) or old groups are evicted (limit {buffer.limit}); "
            f"leave one out"
        )
    listener, found = await listen(Address.parse(address), token)
    server = BufferServer(buffer, found, token=token, limits=limits)
    try:
        await server.open(listener)
        yield server
    finally:
        await server.close()
        listener.close()
