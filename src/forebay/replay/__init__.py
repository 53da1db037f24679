"""The replay buffer: groups of rollouts between production and training."""

from forebay.replay.buffer import AsyncReplayBufferConfig, ReplayBuffer, SyncReplayBufferConfig
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

__all__ = [
    "AsyncReplayBufferConfig",
    "FIFOReplayPolicy",
    "IndexedStorage",
    "NaiveStorage",
    "PrioritizedReplayPolicy",
    "ReplayBuffer",
    "ReplayPolicy",
    "StalenessReplayPolicy",
    "StorageBackend",
    "StorageIndices",
    "StorageItem",
    "SyncReplayBufferConfig",
    "parse_query",
]
