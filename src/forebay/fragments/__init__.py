"""Fragment replay: experience of workers that emit long streams of environment steps."""

from typing import TYPE_CHECKING, Any

from forebay.fragments.records import FragmentIndex, FragmentMetadata, SampleFragment

if TYPE_CHECKING:
    from forebay.fragments.actor import ReplayBufferActor
    from forebay.fragments.client import RemoteFragmentBuffer
    from forebay.fragments.leases import FragmentBatch, Lease
    from forebay.fragments.mapped import StoreFullError
    from forebay.fragments.rate_limit import RateLimit
    from forebay.fragments.server import serve
    from forebay.fragments.store import FragmentStore
    from forebay.fragments.turns import BufferClosed

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
    "BufferClosed": "turns",
    "FragmentBatch": "leases",
    "FragmentStore": "store",
    "Lease": "leases",
    "RateLimit": "rate_limit",
    "RemoteFragmentBuffer": "client",
    "ReplayBufferActor": "actor",
    "StoreFullError": "mapped",
    "serve": "server",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
