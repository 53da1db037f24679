"""The replay buffer: groups of rollouts between production and training."""

from typing import TYPE_CHECKING

from forebay.aio.changed import BufferClosed as BufferClosed
from forebay.lazy import lazy_names
from forebay.replay.buffer import ReplayBuffer as ReplayBuffer
from forebay.replay.config import AsyncReplayBufferConfig as AsyncReplayBufferConfig
from forebay.replay.config import SyncReplayBufferConfig as SyncReplayBufferConfig
from forebay.replay.format.values import SavedFields as SavedFields
from forebay.replay.policies import FIFOReplayPolicy as FIFOReplayPolicy
from forebay.replay.policies import PrioritizedReplayPolicy as PrioritizedReplayPolicy
from forebay.replay.policies import ReplayPolicy as ReplayPolicy
from forebay.replay.policies import StalenessReplayPolicy as StalenessReplayPolicy
from forebay.replay.query import StorageIndices as StorageIndices
from forebay.replay.query import parse_query as parse_query
from forebay.replay.stores.contract import StorageBackend as StorageBackend
from forebay.replay.stores.contract import StorageItem as StorageItem
from forebay.replay.stores.errors import DamagedRowError as DamagedRowError
from forebay.replay.stores.errors import OwnerLost as OwnerLost
from forebay.replay.stores.errors import StoreBusy as StoreBusy
from forebay.replay.stores.indexed import IndexedStorage as IndexedStorage
from forebay.replay.stores.indexed import PandasStorage as PandasStorage
from forebay.replay.stores.naive import NaiveStorage as NaiveStorage

if TYPE_CHECKING:
    from forebay.replay.remote.client import RemoteReplayBuffer as RemoteReplayBuffer
    from forebay.replay.remote.messages import ConnectionLost as ConnectionLost
    from forebay.replay.remote.messages import ServerClosed as ServerClosed
    from forebay.replay.remote.server import serve as serve
    from forebay.replay.stores.sql.store import SQLStorage as SQLStorage


# SQLAlchemy and msgspec are loaded only where a SQL store or a server is used.
__getattr__ = lazy_names(__name__, __file__)
