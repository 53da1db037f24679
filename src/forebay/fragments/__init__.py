"""Fragment replay: experience of workers that emit long streams of environment steps."""

from forebay.aio.changed import BufferClosed
from forebay.fragments.buffer import ReplayBufferActor
from forebay.fragments.leases import FragmentBatch, Lease
from forebay.fragments.records import FragmentIndex, FragmentMetadata, SampleFragment
from forebay.fragments.remote import RemoteFragmentBuffer, serve
from forebay.fragments.rules import RateLimit
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
