"""A fragment buffer for other processes of the machine, on a Unix socket, without Ray or pickle.

::

    worker process  --add_fragments--> +--------------------------+
    worker process  --add_fragments--> | serve(buffer, path)      | --> ReplayBufferActor
    trainer process --fetch_fragments> |   one task a call        |
          | `RemoteFragmentBuffer`     +--------------------------+
          '---------- payloads: the store, mapped by every process -----------'

Ids and metadata only go through the socket. Only the user who started the server may connect: the socket's
file is closed to others. A client that goes away takes back its waiting calls; leases that it holds end by
time, as those of a reader that was killed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from forebay.fragments.buffer import ReplayBufferActor
from forebay.fragments.leases import FragmentBatch, Lease
from forebay.fragments.records import FragmentIndex, FragmentMetadata
from forebay.io.address import Address, listen
from forebay.io.channel import Channel
from forebay.io.messages import Call
from forebay.io.session import Acceptor, Result, Session

CLIENT_LIMIT_S = 60.0
"""Without a sign of life a client is given up; twice what it allows a server."""
MAX_CALL_BYTES = 64 << 20
"""Half a million fragments announced at once."""


@contextlib.asynccontextmanager
async def serve(
    buffer: ReplayBufferActor, path: str | os.PathLike[str], *, client_limit_s: float = CLIENT_LIMIT_S
) -> AsyncIterator[None]:
    """Answer clients at the socket `path` as long as the block runs; the buffer stays open after it.

    A client without a sign of life for `client_limit_s` is given up as one that went away.

    >>> import asyncio, tempfile
    >>> from forebay.fragments import RemoteFragmentBuffer
    >>> async def example(folder):
    ...     config = {"path": f"{folder}/store"}
    ...     buffer = ReplayBufferActor(100, 2, 1, config, fragments_per_chunk=1)
    ...     async with serve(buffer, f"{folder}/socket"):
    ...         client = await RemoteFragmentBuffer.connect(f"{folder}/socket")
    ...         metrics = await client.metrics()
    ...         await client.close()
    ...     return metrics["added_fragments"]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(example(folder))
    0.0

    Raises:
        OSError: another server listens there, or the place cannot be used.
    """
    place = Path(path)
    listener, _ = await listen(Address(place))
    acceptor = Acceptor(
        listener,
        lambda sock: _Session(Channel(sock, max_header_bytes=MAX_CALL_BYTES), buffer, client_limit_s).run(),
        place,
    )
    try:
        yield
    finally:
        await acceptor.close()


class _Session(Session):
    def __init__(self, channel: Channel, buffer: ReplayBufferActor, limit_s: float) -> None:
        super().__init__(channel, limit_s=limit_s)
        self._buffer = buffer

    async def handle(self, call: Call, buffers: list[Any] | None) -> Result:
        method = METHODS.get(call.method)
        if method is None:
            raise ValueError(f"a fragment buffer has no method {call.method!r} for other processes")
        arguments = method.arguments.decode(call.arguments)
        if call.method == "fetch_fragments":
            num_fragments, timeout_s, lease_s = arguments
            result: Any = await self._buffer.fetch_fragments(
                num_fragments, timeout_s=timeout_s, lease_s=lease_s
            )
        else:
            result = await getattr(self._buffer, call.method)(*arguments)
        return Batch.of(result) if isinstance(result, FragmentBatch) else result, ()


class Batch(msgspec.Struct, array_like=True):
    """A `FragmentBatch` as it is sent."""

    entries: list[tuple[FragmentIndex, str]]
    staleness: list[int]
    lease: Lease | None

    @staticmethod
    def of(batch: FragmentBatch) -> Batch:
        """`batch` to be sent."""
        return Batch(batch, batch.staleness, batch.lease)

    def batch(self) -> FragmentBatch:
        """The batch itself."""
        return FragmentBatch(self.entries, self.lease, self.staleness)


class Method(NamedTuple):
    """Types of the arguments, in order, and of the result."""

    arguments: msgspec.msgpack.Decoder[tuple[Any, ...]]
    result: msgspec.msgpack.Decoder[Any]


def _method(result: Any, *arguments: Any) -> Method:
    kinds: Any = tuple.__class_getitem__(arguments)
    return Method(msgspec.msgpack.Decoder(kinds), msgspec.msgpack.Decoder(result))


METHODS = {
    "add_fragments": _method(None, list[tuple[str, FragmentMetadata]]),
    "wait_for_room": _method(None),
    "remove_worker": _method(None, str),
    "fetch_fragments": _method(Batch, int, float | None, float | None),
    "prepared_fragments": _method(Batch),
    "release": _method(bool, str),
    "renew": _method(bool, str),
    "update_model_version": _method(None, str, int),
    "update_priorities": _method(None, dict[str, float]),
    "get_database_config": _method(dict[str, Any]),
    "metrics": _method(dict[str, float]),
    "save": _method(None, str),
    "close": _method(None),
}
"""Of the buffer, that other processes may call."""
