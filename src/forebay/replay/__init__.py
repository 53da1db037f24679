"""The replay buffer: groups of rollouts between production and training."""

from typing import TYPE_CHECKING, Any

from forebay.replay.buffer import AsyncReplayBufferConfig, ReplayBuffer, SyncReplayBufferConfig
from forebay.replay.dataframe import PandasStorage
from forebay.replay.indexed import IndexedStorage
from forebay.replay.naive import NaiveStorage
from forebay.replay.policies import (
    FIFOReplayPolicy,
    PrioritizedReplayPolicy,
    ReplayPolicy,
    StalenessReplayPolicy,
)
from forebay.replay.query import StorageIndices, parse_query
from forebay.replay.storage import StorageBackend, StorageItem

if TYPE_CHECKING:
    from forebay.replay.sql import SQLStorage

__all__ = [
    "AsyncReplayBufferConfig",
    "FIFOReplayPolicy",
    "IndexedStorage",
    "NaiveStorage",
    "PandasStorage",
    "PrioritizedReplayPolicy",
    "ReplayBuffer",
    "ReplayPolicy",
    "SQLStorage",
    "StalenessReplayPolicy",
    "StorageBackend",
    "StorageIndices",
    "StorageItem",
    "SyncReplayBufferConfig",
    "parse_query",
]


def __getattr__(name: str) -> Any:
    # SQLAlchemy is loaded only where a SQL store is used.
    if name == "SQLStorage":
        from forebay.replay.sql import SQLStorage

        return SQLStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
