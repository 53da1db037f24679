"""The two usual buffers as settings of a run file: in order of arrival, or most stale first."""

from __future__ import annotations

from pydantic import Field

from forebay.config import StrictModel
from forebay.replay.buffer import ReplayBuffer
from forebay.replay.policies import FIFOReplayPolicy, StalenessReplayPolicy
from forebay.replay.stores.contract import StorageBackend


class SyncReplayBufferConfig(StrictModel):
    """A buffer that hands groups out in order of arrival.

    >>> buffer = SyncReplayBufferConfig(limit=10_000).build()
    """

    limit: int | None = Field(default=None, ge=1)
    """Live groups at most; what arrived first is evicted and counted. None: no limit."""
    keep_consumed: bool = False
    """Keep consumed groups, ARCHIVED, after the checkpoint that makes them safe to forget."""

    def build(self, storage_backend: StorageBackend | None = None) -> ReplayBuffer:
        """The buffer; in memory unless there is a store."""
        return ReplayBuffer(
            FIFOReplayPolicy(), storage_backend, limit=self.limit, keep_consumed=self.keep_consumed
        )


class AsyncReplayBufferConfig(StrictModel):
    """A buffer that hands out the most stale groups first; an asynchronous run's ``[replay]``.

    >>> buffer = AsyncReplayBufferConfig().build()
    """

    limit: int | None = Field(default=None, ge=1)
    """Live groups at most; what arrived first is evicted and counted. None: no limit."""
    keep_consumed: bool = False
    """Keep consumed groups, ARCHIVED, after the checkpoint that makes them safe to forget."""

    def build(self, storage_backend: StorageBackend | None = None) -> ReplayBuffer:
        """The buffer; in memory unless there is a store."""
        return ReplayBuffer(
            StalenessReplayPolicy(), storage_backend, limit=self.limit, keep_consumed=self.keep_consumed
        )
