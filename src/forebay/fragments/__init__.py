"""Fragment replay: experience of workers that emit long streams of environment steps."""

from forebay.aio.changed import BufferClosed as BufferClosed
from forebay.fragments.buffer import ReplayBufferActor as ReplayBufferActor
from forebay.fragments.leases import FragmentBatch as FragmentBatch
from forebay.fragments.leases import Lease as Lease
from forebay.fragments.records import FragmentIndex as FragmentIndex
from forebay.fragments.records import FragmentMetadata as FragmentMetadata
from forebay.fragments.records import SampleFragment as SampleFragment
from forebay.fragments.remote import RemoteFragmentBuffer as RemoteFragmentBuffer
from forebay.fragments.remote import serve as serve
from forebay.fragments.rules import RateLimit as RateLimit
from forebay.fragments.store.mapped import StoreFullError as StoreFullError
from forebay.fragments.store.payloads import FragmentStore as FragmentStore
