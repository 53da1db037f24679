"""A fragment buffer in another process: its methods, and the client over a socket.

::

    RemoteFragmentBuffer --Call--> socket --> `server` --> ReplayBufferActor
    ReplayBufferClient (`forebay.cluster`) --> Ray ------> ReplayBufferActor
    `FragmentCalls`: the methods that both have
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from forebay.aio.changed import BufferClosed
from forebay.aio.time_limits import timeout
from forebay.fragments.leases import FragmentBatch, Lease
from forebay.fragments.records import FragmentMetadata
from forebay.fragments.remote.server import CLIENT_LIMIT_S, MAX_CALL_BYTES, METHODS, Batch
from forebay.fragments.store.mapped import StoreFullError
from forebay.io.address import Address, dial
from forebay.io.channel import Channel
from forebay.io.heartbeat import SILENCE_LIMIT_S, check_limit
from forebay.io.link import Link
from forebay.io.messages import ERRORS

_ERRORS = ERRORS | {
    "BufferClosed": BufferClosed,
    "StoreFullError": StoreFullError,
    # A call that this side did not cancel: only the end of the server does.
    "CancelledError": BufferClosed,
}


class FragmentCalls(ABC):
    """The methods of `ReplayBufferActor`, each one call; a client says how it is made."""

    @abstractmethod
    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The result of the method there, or its error."""

    async def add_fragment(self, fragment_id: str, metadata: FragmentMetadata) -> None:
        await self.add_fragments([(fragment_id, metadata)])

    async def add_fragments(self, fragments: Sequence[tuple[str, FragmentMetadata]]) -> None:
        await self._call("add_fragments", fragments)

    async def wait_for_room(self) -> None:
        await self._call("wait_for_room")

    async def remove_worker(self, worker_uuid: str) -> None:
        await self._call("remove_worker", worker_uuid)

    async def fetch_fragments(
        self, num_fragments: int, *, timeout_s: float | None = None, lease_s: float | None = None
    ) -> FragmentBatch:
        batch = await self._call("fetch_fragments", num_fragments, timeout_s=timeout_s, lease_s=lease_s)
        assert isinstance(batch, FragmentBatch)
        return batch

    async def prepared_fragments(self) -> FragmentBatch:
        batch = await self._call("prepared_fragments")
        assert isinstance(batch, FragmentBatch)
        return batch

    async def release(self, lease: Lease | str) -> bool:
        return bool(await self._call("release", _id_of(lease)))

    async def renew(self, lease: Lease | str) -> bool:
        return bool(await self._call("renew", _id_of(lease)))

    async def update_model_version(self, session_id: str, model_version: int) -> None:
        await self._call("update_model_version", session_id, model_version)

    async def update_priorities(self, priorities: Mapping[str, float]) -> None:
        await self._call("update_priorities", dict(priorities))

    async def get_database_config(self) -> dict[str, Any]:
        return dict(await self._call("get_database_config"))

    async def metrics(self) -> dict[str, float]:
        return dict(await self._call("metrics"))

    async def save(self, path: str) -> None:
        await self._call("save", os.fspath(path))


class RemoteFragmentBuffer(FragmentCalls):
    """The methods of `ReplayBufferActor`, called in the process that serves it.

    Invariants: equal calls have equal results and errors; calls of one client begin in the order in which
    they were made; a cancelled call is cancelled there too, and its caller waits for the end of it.
    `forebay.fragments.serve` has an example.
    """

    def __init__(self, link: Link) -> None:
        self._link = link

    @classmethod
    async def connect(
        cls, path: str | os.PathLike[str], *, limit_s: float = SILENCE_LIMIT_S
    ) -> RemoteFragmentBuffer:
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
            raise TimeoutError(
                f"the fragment buffer at {found!r} did not answer within {limit_s:g} s"
            ) from None

    async def disconnect(self) -> None:
        """End the connection; calls under way raise `BufferClosed`. The buffer goes on."""
        await self._link.close()

    async def close(self) -> None:
        """Close the buffer for all clients, and end the connection."""
        await self._call("close")
        await self.disconnect()

    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        # By position in the message: in the order of the signature.
        late = self._give_back if method == "fetch_fragments" else None
        value, _ = await self._link.call(method, (*arguments, *options.values()), late=late)
        if method not in METHODS:
            return value
        result = METHODS[method].result.decode(value)
        return result.batch() if isinstance(result, Batch) else result

    def _give_back(self, value: msgspec.Raw) -> None:
        """A fetch was answered in the moment in which it was cancelled."""
        lease = METHODS["fetch_fragments"].result.decode(value).lease
        self._link.tell("release", (lease.lease_id,))


def _id_of(lease: Lease | str) -> str:
    return lease.lease_id if isinstance(lease, Lease) else lease
