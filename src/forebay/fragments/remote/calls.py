"""The methods of a fragment buffer that is in another process: what its clients have in common.

::

    RemoteFragmentBuffer (a socket), ReplayBufferClient (Ray) --_call--> ReplayBufferActor
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from forebay.fragments.leases import FragmentBatch, Lease
from forebay.fragments.records import FragmentMetadata


class FragmentCalls(ABC):
    """The methods of `ReplayBufferActor`, each one call; a client says how it is made.

    >>> batch = await client.fetch_fragments(64)
    """

    @abstractmethod
    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """What the method returns there, or raise what it raises."""

    async def add_fragment(self, fragment_id: str, metadata: FragmentMetadata) -> None:
        """See `ReplayBufferActor.add_fragment`."""
        await self.add_fragments([(fragment_id, metadata)])

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
        batch = await self._call("fetch_fragments", num_fragments, timeout_s=timeout_s, lease_s=lease_s)
        assert isinstance(batch, FragmentBatch)
        return batch

    async def prepared_fragments(self) -> FragmentBatch:
        """See `ReplayBufferActor.prepared_fragments`."""
        batch = await self._call("prepared_fragments")
        assert isinstance(batch, FragmentBatch)
        return batch

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
        """See `ReplayBufferActor.save`; the path is one of the machine of that process."""
        await self._call("save", os.fspath(path))


def _id_of(lease: Lease | str) -> str:
    return lease.lease_id if isinstance(lease, Lease) else lease
