"""The replay buffer: groups of rollouts between production and training."""

from typing import TYPE_CHECKING, Any

from forebay.replay.buffer import ReplayBuffer
from forebay.replay.building import AsyncReplayBufferConfig, SyncReplayBufferConfig
from forebay.replay.changes import BufferClosed
from forebay.replay.indexed import IndexedStorage, PandasStorage
from forebay.replay.naive import NaiveStorage
from forebay.replay.objects import SavedFields
from forebay.replay.policies import (
    FIFOReplayPolicy,
    PrioritizedReplayPolicy,
    ReplayPolicy,
    StalenessReplayPolicy,
)
from forebay.replay.query import StorageIndices, parse_query
from forebay.replay.storage import StorageBackend, StorageItem
from forebay.replay.store_errors import DamagedRowError, OwnerLost, StoreBusy

if TYPE_CHECKING:
    from forebay.replay.client import RemoteReplayBuffer
    from forebay.replay.server import BufferServer, serve
    from forebay.replay.server_messages import ConnectionLost, ServerClosed
    from forebay.replay.sql import SQLStorage

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
_LAZY = {
    "BufferServer": "server",
    "ConnectionLost": "server_messages",
    "RemoteReplayBuffer": "client",
    "SQLStorage": "sql",
    "ServerClosed": "server_messages",
    "serve": "server",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        from forebay.extras import needed_by

        with needed_by(f"forebay.replay.{name}"):
            return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
