"""A buffer as settings: the ``[replay]`` table of a run file, and the two usual buffers."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from forebay.config import ConfigError, StrictModel
from forebay.replay.buffer import ReplayBuffer
from forebay.replay.policies import FIFOReplayPolicy, ReplayPolicy, StalenessReplayPolicy
from forebay.replay.reuse import ReuseConfig
from forebay.replay.stores.contract import StorageBackend


class BufferConfig(BaseModel):
    """The settings of a buffer; the two presets differ in the policy that they build.

    >>> SyncReplayBufferConfig(limit=10_000).build().limit
    10000
    """

    # As a `StrictModel`, without being one more ancestor of the presets.
    model_config = StrictModel.model_config

    policy: ClassVar[type[ReplayPolicy]] = FIFOReplayPolicy

    limit: int | None = Field(default=None, ge=1)
    """Live groups at most; the groups that arrived first are evicted and counted. None: no limit."""
    reuse: ReuseConfig = ReuseConfig()

    def build(
        self, storage_backend: StorageBackend | None = None, *, sync_weights_interval: int = 1, compares: bool = True
    ) -> ReplayBuffer:
        """The buffer; in memory unless there is a store."""
        reuse = self.reuse.build(sync_weights_interval, compares=compares)
        return ReplayBuffer(self.policy(), storage_backend, limit=self.limit, reuse=reuse)


class SyncReplayBufferConfig(BufferConfig):
    """A buffer that hands groups out in order of arrival."""


class AsyncReplayBufferConfig(BufferConfig):
    """A buffer that hands out the most stale groups first, so that none expires unused."""

    policy = StalenessReplayPolicy


class ReplayConfig(BufferConfig):
    """Where groups wait for the trainer, and for how long they are kept."""

    store: Literal["memory", "sqlite", "postgresql"] | None = None
    """``memory``; ``sqlite``: a file; ``postgresql``: the database at the URL in the environment variable
    ``FOREBAY_REPLAY_URL``. From the last two a killed run goes on with every finished group. None: ``sqlite``
    in a separate run and on Ray, where the run's folder is on a local disk and nothing is recorded, else
    ``memory``."""
    path: Path | None = None
    """The SQLite file, on a local disk; None: ``buffer.db`` in the run's folder."""

    @model_validator(mode="after")
    def _check(self) -> ReplayConfig:
        if self.path is not None and self.store != "sqlite":
            raise ConfigError(
                f"replay.path = {str(self.path)!r} is the file of store 'sqlite', and replay.store is "
                f"{self.store!r}: set replay.store = 'sqlite', or leave replay.path out"
            )
        return self
