"""A fragment buffer for other processes of the machine, on a Unix socket, without Ray or pickle.

::

    worker process  --add_fragments--> +--------------------------+
    worker process  --add_fragments--> | serve(buffer, path)      | --> ReplayBufferActor
    trainer process --fetch_fragments> |   one task a call        |
          | `RemoteFragmentBuffer`     +--------------------------+
          '---------- payloads: the store, mapped by every process -----------'

Only ids and metadata go through the socket, which only the user who started the server may open. A client
that leaves takes back its waiting calls; its leases end by time, as those of a reader that was killed.
"""

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import msgspec

from forebay.aio.changed import BufferClosed
from forebay.aio.time_limits import timeout
from forebay.fragments.buffer import ReplayBufferActor
from forebay.fragments.leases import FragmentBatch, Lease
from forebay.fragments.records import FragmentIndex
from forebay.fragments.store.mapped import StoreFullError
from forebay.io.address import Address, dial, listen
from forebay.io.channel import Channel
from forebay.io.link import Acceptor, Link, Result, Session
from forebay.io.messages import ERRORS, SILENCE_LIMIT_S, Call, check_limit
from forebay.io.methods import Method, called


class FragmentCalls(ABC):
    """The methods of `ReplayBufferActor`, each one call: by a socket here, by Ray in `forebay.cluster`."""

    @abstractmethod
    async def _call(self, method: str, **arguments: Any) -> Any:
        """The result of the method there, or its error."""

    add_fragment = called(ReplayBufferActor.add_fragment)
    add_fragments = called(ReplayBufferActor.add_fragments)
    wait_for_room = called(ReplayBufferActor.wait_for_room)
    remove_worker = called(ReplayBufferActor.remove_worker)
    fetch_fragments = called(ReplayBufferActor.fetch_fragments)
    prepared_fragments = called(ReplayBufferActor.prepared_fragments)
    release = called(ReplayBufferActor.release)
    renew = called(ReplayBufferActor.renew)
    update_model_version = called(ReplayBufferActor.update_model_version)
    get_database_config = called(ReplayBufferActor.get_database_config)
    metrics = called(ReplayBufferActor.metrics)
    save = called(ReplayBufferActor.save)


class RemoteFragmentBuffer(FragmentCalls):
    """The methods of `ReplayBufferActor`, called in the process that serves it.

    Invariants: equal calls have equal results and errors; calls of one client begin in the order in which
    they were made; a cancelled call is cancelled there too, and its caller waits for the end of it.
    `forebay.fragments.serve` has an example.
    """

    def __init__(self, link: Link) -> None:
        self._link = link

    @classmethod
    async def connect(cls, path: str | os.PathLike[str], *, limit_s: float = SILENCE_LIMIT_S) -> Self:
        """A client of the buffer served at the socket `path`.

        A server that does not answer within `limit_s`, or later is silent for so long, is given up.

        Raises:
            OSError: no process listens or answers there (`TimeoutError`), or not for this user.
            ValueError: the limit is not positive.
        """
        check_limit("limit_s", limit_s)
        found = os.fspath(path)
        try:
            async with timeout(limit_s):
                channel = Channel(await dial(Address(Path(found))), max_header_bytes=MAX_CALL_BYTES)
                client = cls(
                    Link(
                        channel,
                        f"the process that serves the fragment buffer at {found!r}",
                        limit_s=limit_s,
                        other_limit_s=CLIENT_LIMIT_S,
                        errors=_ERRORS,
                        loss=BufferClosed,
                    )
                )
                try:
                    # The system connects also to a server that is stopped.
                    await client.get_database_config()
                except BaseException:
                    await client.disconnect()
                    raise
                return client
        except TimeoutError:
            raise TimeoutError(f"the fragment buffer at {found!r} did not answer within {limit_s:g} s") from None

    async def disconnect(self) -> None:
        """End the connection; calls under way raise `BufferClosed`. The buffer goes on."""
        await self._link.close()

    async def close(self) -> None:
        """Close the buffer for all clients, and end the connection."""
        await self._call("close")
        await self.disconnect()

    async def _call(self, method: str, **arguments: Any) -> Any:
        def give_back(value: msgspec.Raw) -> None:
            # The fetch was answered in the moment in which it was cancelled.
            _, lease, _ = msgspec.msgpack.decode(value, type=_BATCH)
            self._link.tell("release", {"lease": lease})

        late = give_back if method == "fetch_fragments" else None
        value, _ = await self._link.call(method, arguments, late=late)
        result = msgspec.msgpack.decode(value, type=METHODS[method].result)
        return FragmentBatch(*result) if isinstance(result, tuple) else result


CLIENT_LIMIT_S = 60.0
"""A client without a sign of life for so long is given up; twice the time it allows a server."""
MAX_CALL_BYTES = 64 << 20
"""The header of a call at most: half a million fragments announced at once."""
_ERRORS = ERRORS | {
    "BufferClosed": BufferClosed,
    "StoreFullError": StoreFullError,
    # A call that this side did not cancel: only the end of the server does.
    "CancelledError": BufferClosed,
}


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
        arguments = msgspec.msgpack.decode(call.arguments, type=method.arguments)
        result = await getattr(self._buffer, call.method)(**msgspec.structs.asdict(arguments))
        # To msgpack it is a list like any other: what else it has is sent beside it.
        if isinstance(result, FragmentBatch):
            return (result, result.lease, result.staleness), ()
        return result, ()


_BATCH = tuple[list[tuple[FragmentIndex, str]], Lease | None, list[int]]
"""A `FragmentBatch` as it is sent."""


def _sent(name: str) -> Method:
    method = Method.of(getattr(ReplayBufferActor, name))
    return method._replace(result=_BATCH) if method.result is FragmentBatch else method


METHODS = {name: _sent(name) for name in (*vars(FragmentCalls), "close") if not name.startswith("_")}
"""The methods of the buffer that other processes may call."""
