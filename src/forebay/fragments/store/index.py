"""The buffer's rows on disk: what a killed process knew is what the next one knows.

::

    ReplayState --changes--> commit (one transaction) --> folder/index/ --load--> the next process's state
                                  '-- the folder has a newer owner: BufferClosed

    rows:  meta | segment, uses, priorities + number (`segments`: chunks) | part + number | lease + number

The rows are committed before anybody is told, and before a payload that they no longer name is deleted. So
whatever the moment of a crash, every payload that a row names is there, and one that no row names is garbage.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from forebay.aio.changed import BufferClosed
from forebay.fragments.chunks import Chunk, Fragment
from forebay.fragments.leases import LeaseRow
from forebay.fragments.store import segments
from forebay.fragments.store.mapped import Environment
from forebay.fragments.store.segments import RowKey
from forebay.fragments.tallies import Tallies

MAX_BYTES = 4 << 30
"""Room for ten million fragments and more; what is not used takes no disk."""
_KINDS: dict[str, Any] = {
    "segment": list[segments.Row],
    "uses": bytes,
    "priorities": bytes,
    "part": Fragment,
    "lease": LeaseRow,
}
_OWNER_KEY = b"owner"
_META_KEY = b"meta"
_OWNER = struct.Struct("<Q")


class Meta(msgspec.Struct):
    """What there is once."""

    fragments_per_chunk: int
    session_id: str = ""
    model_version: int = -1
    num_fragments: int = 0
    """Numbered so far."""
    num_chunks: int = 0
    num_leases: int = 0
    num_draws: int = 0
    """Batches drawn: every draw has a seed of its own, so a resumed buffer does not repeat any."""
    difference: float = 0.0
    """Of the rate limit."""
    max_priority: float = 1.0
    """The largest that was ever set: new chunks begin with it."""
    tallies: Tallies = msgspec.field(default_factory=Tallies)


class Rows(NamedTuple):
    """Everything in an index."""

    meta: Meta | None
    """None: the index is new."""
    chunks: list[Chunk]
    segments: list[int]
    """Numbers of the rows that they are in."""
    parts: list[Fragment]
    """Fragments without a chunk yet."""
    leases: list[LeaseRow]


class Index:
    """The rows of one buffer; whoever opened the folder last owns it.

    >>> index = Index(Path(tempfile.mkdtemp()))
    >>> index.commit({}, Meta(fragments_per_chunk=1))
    >>> index.load().meta.session_id
    ''
    """

    def __init__(self, path: Path) -> None:
        self._environment = Environment.open(path, max_bytes=MAX_BYTES)
        self._table = self._environment.table("rows")
        with self._environment.write() as transaction:
            raw = transaction.get(_OWNER_KEY, db=self._table)
            self._owner = _OWNER.unpack(raw)[0] + 1 if raw is not None else 1
            transaction.put(_OWNER_KEY, _OWNER.pack(self._owner), db=self._table)
        self._path = path
        self._encoder = msgspec.msgpack.Encoder()

    def load(self) -> Rows:
        """All rows, each kind by number.

        Raises:
            ValueError: another program, or another version of this one, made them.
        """
        rows: dict[str, dict[int, Any]] = {kind: {} for kind in _KINDS}
        meta = None
        snapshot = self._environment.read()
        try:
            for key, raw in snapshot.items(self._table):
                if key == _META_KEY:
                    meta = msgspec.msgpack.decode(raw, type=Meta)
                elif key != _OWNER_KEY:
                    kind, number = key[:-8].decode(), int.from_bytes(key[-8:], "big")
                    rows[kind][number] = msgspec.msgpack.decode(raw, type=_KINDS[kind])
        except (msgspec.MsgspecError, KeyError) as error:
            raise ValueError(f"{str(self._path)!r} is not the index of a fragment buffer: {error}") from error
        chunks = segments.read(*(rows[kind] for kind in segments.KINDS))
        return Rows(meta, chunks, [*rows["segment"]], [*rows["part"].values()], [*rows["lease"].values()])

    def commit(self, changes: Mapping[RowKey, Any], meta: Meta) -> None:
        """Put the rows (None: delete), and `meta`: all of it or nothing.

        Raises:
            BufferClosed: another buffer opened the folder since.
        """
        encode = self._encoder.encode
        rows = {key: None if row is None else encode(row) for key, row in changes.items()}
        num_bytes = sum(len(row) for row in rows.values() if row is not None)
        with self._environment.write(num_bytes) as transaction:
            raw = transaction.get(_OWNER_KEY, db=self._table)
            assert raw is not None
            if _OWNER.unpack(raw)[0] != self._owner:
                raise BufferClosed(f"another buffer has opened {str(self._path)!r}")
            for (kind, number), row in rows.items():
                key = kind.encode() + number.to_bytes(8, "big")
                if row is None:
                    transaction.delete(key, db=self._table)
                else:
                    transaction.put(key, row, db=self._table)
            transaction.put(_META_KEY, encode(meta), db=self._table)

    def copy(self, path: Path) -> None:
        """A copy in the new folder `path`."""
        self._environment.copy(path)
