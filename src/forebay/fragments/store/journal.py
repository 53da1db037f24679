"""The buffer's changes on disk: what a killed process knew is what the next one knows.

::

    ReplayState --changes since the last commit--> entry --> folder/index/   snapshot, entry, entry, ...
                                                               | entries as large as the snapshot
    ReplayState <--replays entries on the snapshot--           '--> a new snapshot, no entries

An entry says what was asked (add, serve, release), not what became of it: the state decides the same again
when it is replayed. Draws are not repeated, since they depend on the version of numpy: the entry names them.

Entries are committed before a caller is answered, and before a payload that nothing names is deleted. So at
any moment of a crash the payloads of all chunks and leases are there, and all others are garbage.
"""

import struct
from collections.abc import Callable, Sequence
from operator import index
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from forebay.aio.changed import BufferClosed
from forebay.config import errors_about
from forebay.fragments.chunks import Chunk, Fragment
from forebay.fragments.leases import LeaseRow
from forebay.fragments.records import FragmentMetadata
from forebay.fragments.rules import Rules
from forebay.fragments.store.mapped import Environment
from forebay.fragments.tallies import Tallies

MAX_BYTES = 4 << 30
"""Room for ten million fragments and more; what is not used takes no disk."""
MIN_ENTRY_BYTES = 1 << 20
"""Entries may take this much before a snapshot is due: one of a small buffer is not written all the time."""
_OWNER_KEY, _SNAPSHOT_KEY = b"owner", b"snapshot"
# Big-endian: LMDB orders keys by their bytes, and that is then the order of the numbers.
_NUMBER = struct.Struct(">Q")


class Journal:
    """The journal of one buffer, which the last to open the folder owns.

    >>> import tempfile
    >>> Journal(Path(tempfile.mkdtemp())).load()
    Saved(snapshot=None, changes=[])
    """

    def __init__(self, path: Path) -> None:
        self._environment = Environment.open(path, max_bytes=MAX_BYTES)
        self._table, self._entries = self._environment.table("rows"), self._environment.table("entries")
        # Before `load`: the owner until now can commit no more, so nothing is written after what is read.
        with self._environment.write() as transaction:
            raw = transaction.get(_OWNER_KEY, db=self._table)
            self._owner = struct.unpack("<Q", raw)[0] + 1 if raw is not None else 1
            transaction.put(_OWNER_KEY, struct.pack("<Q", self._owner), db=self._table)
        self._path = path
        self._num_entries = 0
        # The first commit writes a snapshot: entries are replayed under the rules that it names.
        self._room_bytes = 0

    def load(self) -> "Saved":
        """The snapshot, and all changes since.

        Raises:
            ValueError: another program, or another version of this one, wrote it.
        """
        view = self._environment.read()
        raw = view.get(_SNAPSHOT_KEY, db=self._table)
        with errors_about(f"{str(self._path)!r} is not of a fragment buffer", msgspec.MsgspecError):
            snapshot = None if raw is None else msgspec.msgpack.decode(raw, type=Snapshot)
            decode = msgspec.msgpack.Decoder(list[Change]).decode
            changes = [change for _, entry in view.cursor(self._entries) for change in decode(entry)]
        return Saved(snapshot, changes)

    def commit(self, changes: "Sequence[Change]", take_snapshot: "Callable[[], Snapshot]") -> None:
        """Add `changes`, or the snapshot that is due, which holds them: all of it or nothing.

        Raises:
            BufferClosed: another buffer opened the folder since.
        """
        entry = _encode(changes)
        is_due = len(entry) > self._room_bytes
        row = _encode(take_snapshot()) if is_due else entry
        # Also where nothing has changed: a buffer that lost its folder must not answer. The owner is read
        # within the transaction, so that no other one can come between.
        with self._environment.write(len(row)) as transaction:
            raw = transaction.get(_OWNER_KEY, db=self._table)
            assert raw is not None
            if struct.unpack("<Q", raw)[0] != self._owner:
                raise BufferClosed(f"another buffer has opened {str(self._path)!r}")
            if is_due:
                transaction.drop(self._entries, delete=False)
                transaction.put(_SNAPSHOT_KEY, row, db=self._table)
            elif changes:
                transaction.put(_NUMBER.pack(self._num_entries), row, db=self._entries)
        self._num_entries += 1
        self._room_bytes = max(MIN_ENTRY_BYTES, len(row)) if is_due else self._room_bytes - len(row)

    def copy(self, path: Path) -> None:
        """A copy in the new folder `path`."""
        self._environment.copy(path)


class Added(msgspec.Struct, array_like=True, tag=True):
    """Fragments were added: the arguments and outcome of `ReplayState.add`."""

    fragments: dict[Annotated[str, msgspec.Meta(min_length=1)], FragmentMetadata]
    """The new fragments, by id."""
    num_duplicates: int


class Served(msgspec.Struct, array_like=True, tag=True):
    """`ReplayState.serve`; each chunk is named by its first fragment."""

    fragment_ids: list[str]
    lease_s: float


class LeaseEnded(msgspec.Struct, array_like=True, tag=True):
    """`ReplayState.release`, or the end of its term."""

    number: int
    is_expired: bool


class VersionSet(msgspec.Struct, array_like=True, tag=True):
    """A session has newer weights: `ReplayState.set_version`."""

    session_id: str
    model_version: int


class WorkerDropped(msgspec.Struct, array_like=True, tag=True):
    """A worker is gone, with its unfinished chunk: `ReplayState.drop_worker`."""

    worker_uuid: str


Change: TypeAlias = Added | Served | LeaseEnded | VersionSet | WorkerDropped

# Numbers of numpy, and others that are whole, are taken as such.
_encode = msgspec.msgpack.Encoder(enc_hook=lambda n: float(n) if isinstance(n, np.floating) else index(n)).encode
_decode = msgspec.msgpack.Decoder(Change).decode


def checked(change: Any) -> Any:
    """`change` as it is read back: before the state follows it, for one that cannot be kept would spoil the journal.

    Raises:
        ValueError: a caller gave a value of another type than the change has.
    """
    try:
        return _decode(_encode(change))
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"a fragment buffer cannot keep {change!r:.300}: {error}") from None


class Meta(msgspec.Struct):
    """The numbers of a buffer."""

    session_id: str = ""
    model_version: int = -1
    num_chunks: int = 0
    """Chunks so far; the next gets this number."""
    num_leases: int = 0
    num_draws: int = 0
    """Batches drawn: every draw has a seed of its own, so a resumed buffer does not repeat any."""
    difference: float = 0.0
    """The difference that `forebay.fragments.rules` draws, between inserts and samples."""
    tallies: Tallies = msgspec.field(default_factory=Tallies)


class Snapshot(msgspec.Struct):
    """A whole `ReplayState`."""

    rules: Rules
    """Under which the entries that follow were decided."""
    meta: Meta
    chunks: list[Chunk]
    parts: list[Fragment]
    """Fragments without a chunk yet, in order of arrival."""
    leases: list[LeaseRow]


class Saved(NamedTuple):
    """Everything in a journal."""

    snapshot: Snapshot | None
    """None: the journal is new."""
    changes: list[Change]
    """The changes since the snapshot, oldest first."""
