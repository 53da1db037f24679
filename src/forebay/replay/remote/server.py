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
* **Closing.** Running calls end, waiting ones raise `ServerClosed`, then every client is sent goodbye.
"""

import asyncio
import ctypes
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.config import parse_config
from forebay.extras import needed_by
from forebay.io.address import Address, hide_password, listen, tune
from forebay.io.channel import Channel
from forebay.io.link import Acceptor
from forebay.io.messages import Goodbye
from forebay.replay.buffer import ReplayBuffer
from forebay.replay.policies import POLICIES
from forebay.replay.remote.calls import MAX_CLIENTS, Limits, Served
from forebay.replay.remote.connection import ClientConnection
from forebay.replay.stores.contract import StorageBackend
from forebay.replay.stores.indexed import IndexedStorage


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
        """Open the store, and begin to accept connections."""
        # Before clients are let in: they may ask for groups that an earlier server left parked.
        await self._served.open()
        self._acceptor = Acceptor(listener, self._serve, self._path)

    async def close(self) -> None:
        """Accept no more, let running calls come to their end, say goodbye."""
        if self._acceptor is not None:
            await self._acceptor.stop()
        await asyncio.gather(*(self._end(*both) for both in self._connections.items()))
        # After the connections: it waits for their puts that are still being stored.
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


GRACE_S = 5.0
"""The time that clients get to read their last answers when the server closes."""


@asynccontextmanager
async def serve(
    buffer: ReplayBuffer, address: str | os.PathLike[str], *, token: str | None = None, **limits: Any
) -> AsyncIterator[BufferServer]:
    """Serve `buffer` at `address` for the time of the block; the buffer may be used here as well.

    The limits are the fields of `Limits`. `max_live` makes the puts of clients wait while there are so many
    live groups. A group of more than `max_frame_bytes` is refused, and so is a connection beyond
    `max_clients`. Over `max_put_bytes` of groups on their way in, from all clients together, further ones
    wait with their clients. A client without a sign of life for `client_limit_s` seconds is given up: the
    groups it took and did not confirm are live again.

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
    checked = parse_config(Limits, limits, source="serve")
    if (most := checked.max_live) is not None and buffer.limit is not None:
        raise ValueError(
            f"either puts wait (max_live {most}) or old groups are evicted (limit {buffer.limit}); leave one out"
        )
    listener, found = await listen(Address.parse(address), token)
    server = BufferServer(buffer, found, token=token, limits=checked)
    try:
        await server.open(listener)
        yield server
    finally:
        await server.close()
        # Still open if the server did not begin to accept.
        listener.close()


TOKEN_VARIABLE = "FOREBAY_BUFFER_TOKEN"
"""The variable with the token where no file is named; a command line would show it to everybody."""

IN_MEMORY = "memory"

KEPT_BYTES = 256 << 20
"""Freed memory that the process keeps at most: that of some thousand groups of 1,000 tokens each."""

APART_BYTES = 32 << 20
"""Larger pieces get pages of their own, which go back at once; the C library allows no more."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of the command line.

    >>> ServeOptions(address="run/buffer.sock", store="run/buffer.db", max_live=4096).policy
    'staleness'
    """

    address: str
    store: str = IN_MEMORY
    """`IN_MEMORY`, the path of a SQLite file, or the URL of a database."""
    policy: str = "staleness"
    limit: int | None = None
    max_live: int | None = None
    max_clients: int | None = None
    """Connections at a time; None: `MAX_CLIENTS` of the server."""
    token_file: Path | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"unknown policy {self.policy!r}; known: {', '.join(POLICIES)}")
        # Here too, and not only where it is served: a buffer on Ray is opened later, in another process.
        if self.max_live is not None and self.limit is not None:
            raise ValueError(f"not both max_live = {self.max_live} and limit = {self.limit}: leave one out")


async def serve_buffer(options: ServeOptions, say: Callable[[str], None]) -> None:
    """``forebay buffer serve``: build a buffer, serve it until SIGTERM or Ctrl-C, leave nothing behind.

    `say` is told where it is served.

    Raises:
        ValueError: the options contradict each other.
        OSError: a file cannot be read or written, or the address is taken.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def note_signal() -> None:
        stop.set()
        # A second one has its usual effect.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, note_signal)
    keep_freed_memory()
    buffer = open_buffer(options)
    try:
        token = read_token(options.token_file)
        serving = serve(
            buffer,
            options.address,
            token=token,
            max_live=options.max_live,
            max_clients=options.max_clients or MAX_CLIENTS,
        )
        async with serving as server:
            held = await buffer.storage.count({})
            say(f"listening on {server.address}")
            say(f"{held} live groups, store {hide_password(options.store)}, policy {options.policy}")
            await stop.wait()
            say("closing")
    finally:
        await buffer.close()


def read_token(file: Path | None) -> str | None:
    """The token of that file, or of the environment; None if there is none.

    Raises:
        ValueError: the file is empty; a server without a token is asked for by naming none.
    """
    if file is None:
        return os.environ.get(TOKEN_VARIABLE, "").strip() or None
    token = file.read_text(encoding="utf-8").strip()
    if not token:
        raise ValueError(f"the token file {str(file)!r} is empty; write a token into it, or name no file")
    return token


def open_buffer(options: ServeOptions) -> ReplayBuffer:
    """The buffer of these options, with what its store holds."""
    storage: StorageBackend = IndexedStorage()
    if options.store != IN_MEMORY:
        with needed_by("a database"):
            from forebay.replay.stores.sql.store import SQLStorage

        storage = SQLStorage(options.store)
    return ReplayBuffer(POLICIES[options.policy](), storage, limit=options.limit)


def keep_freed_memory() -> bool:
    """Keep freed memory in this process from now on, up to `KEPT_BYTES`; False if the C library has no way.

    By default it gives freed memory back at once, and each group that comes next has the system find and
    clear its pages anew: a fifth of the time of a put. For processes that were started for a buffer, not for
    a program that serves one beside other work.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    return bool(set_option(_M_TRIM_THRESHOLD, KEPT_BYTES) and set_option(_M_MMAP_THRESHOLD, APART_BYTES))
