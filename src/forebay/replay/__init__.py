"""The replay buffer: groups of rollouts between production and training."""

from typing import TYPE_CHECKING

from forebay.aio.changed import BufferClosed
from forebay.lazy import lazy_names
from forebay.replay.buffer import ReplayBuffer
from forebay.replay.config import AsyncReplayBufferConfig, SyncReplayBufferConfig
from forebay.replay.format.values import SavedFields
from forebay.replay.policies import (
    FIFOReplayPolicy,
    PrioritizedReplayPolicy,
    ReplayPolicy,
    StalenessReplayPolicy,
)
from forebay.replay.query import StorageIndices, parse_query
from forebay.replay.stores.contract import StorageBackend, StorageItem
from forebay.replay.stores.errors import DamagedRowError, OwnerLost, StoreBusy
from forebay.replay.stores.indexed import IndexedStorage, PandasStorage
from forebay.replay.stores.naive import NaiveStorage

if TYPE_CHECKING:
    from forebay.replay.remote.client import RemoteReplayBuffer
    from forebay.replay.remote.messages import ConnectionLost, ServerClosed
    from forebay.replay.remote.server import BufferServer, serve
    from forebay.replay.stores.sql.store import SQLStorage

__all__ = [
    "AsyncReplayBufferConfig",
    "BufferClosed",
    "BufferServer",
    "ConnectionLost",
    "DamagedRowError",
    "FIFOReplayPolicy",
    "IndexedStorage",
    "NaiveStorage",
    "OwnerLost",
    "PandasStorage",
    "PrioritizedReplayPolicy",
    "RemoteReplayBuffer",
    "ReplayBuffer",
    "ReplayPolicy",
    "SQLStorage",
    "SavedFields",
    "ServerClosed",
    "StalenessReplayPolicy",
    "StorageBackend",
    "StorageIndices",
    "StorageItem",
    "StoreBusy",
    "SyncReplayBufferConfig",
    "parse_query",
    "serve",
]

# SQLAlchemy and msgspec are loaded only where a SQL store or a server is used.
__getattr__ = lazy_names(
    __name__,
    {
        "remote.client": ["RemoteReplayBuffer"],
        "remote.messages": ["ConnectionLost", "ServerClosed"],
        "remote.server": ["BufferServer", "serve"],
        "stores.sql.store": ["SQLStorage"],
    },
)
