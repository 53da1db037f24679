"""Fragment replay: experience of workers that emit long streams of environment steps."""

from typing import TYPE_CHECKING, Any

from forebay.aio.changed import BufferClosed
from forebay.fragments.records import FragmentIndex, FragmentMetadata, SampleFragment

if TYPE_CHECKING:
    from forebay.fragments.buffer import ReplayBufferActor
    from forebay.fragments.leases import FragmentBatch, Lease
    from forebay.fragments.rate_limit import RateLimit
    from forebay.fragments.remote.client import RemoteFragmentBuffer
    from forebay.fragments.remote.server import serve
    from forebay.fragments.store.mapped import StoreFullError
    from forebay.fragments.store.payloads import FragmentStore

__all__ = [
    "BufferClosed",
    "FragmentBatch",
    "FragmentIndex",
    "FragmentMetadata",
    "FragmentStore",
    "Lease",
    "RateLimit",
    "RemoteFragmentBuffer",
    "ReplayBufferActor",
    "SampleFragment",
    "StoreFullError",
    "serve",
]

# LMDB (the extra `fragments`) is loaded only where a store is used.
_LAZY = {
    "FragmentBatch": "leases",
    "FragmentStore": "store.payloads",
    "Lease": "leases",
    "RateLimit": "rate_limit",
    "RemoteFragmentBuffer": "remote.client",
    "ReplayBufferActor": "buffer",
    "StoreFullError": "store.mapped",
    "serve": "remote.server",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
