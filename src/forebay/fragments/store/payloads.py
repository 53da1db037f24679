"""Payloads of fragments in files that all processes of a machine share.

It keeps what it is given until it is told to delete it. Which payloads are still of use is for the buffer to
know; see `forebay.fragments.store.collector`.

::

    SampleFragment --pack--> payload --id % num_shards--> shard (mapped database) --+--> get: views, no copy
                                                                                    '--> stack: one batch

    folder/shard-0/   tables: payloads (id -> payload), schemas, totals (count, bytes)
           shard-1/   ...    several processes write at a time, one in each shard
"""

from __future__ import annotations

import itertools
import os
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from forebay.fragments.records import SampleFragment
from forebay.fragments.remote.codec import (
    COMPRESSIONS,
    Bytes,
    Packed,
    Schema,
    pack,
    schema_id_of,
    stack,
    unpack,
)
from forebay.fragments.remote.unstacking import unstack
from forebay.fragments.store.mapped import Environment, Snapshot, StoreFullError

_TOTALS = struct.Struct("<QQ")
_TOTALS_KEY = b"totals"
_ROOM_BYTES = 64 << 20
"""A shard's file may grow to twice its payloads plus this: freed pages that arrays still look into stay."""
_STAGED_BYTES = 16 << 10
"""A smaller payload is put together in memory of its own: that is there at once."""


class FragmentStore:
    """Fragments by id, in the folder `path`.

    Invariants: an id is never used for another fragment; a fragment is there whole or not at all, whichever
    process is killed when; opening a folder keeps what is in it. Ids are texts, unique across processes.

    >>> store = FragmentStore(path=tempfile.mkdtemp())
    >>> fragment_id = store.add_fragment(fragment)
    >>> store.get_fragment(fragment_id).reward
    array([1., 1., 1.], dtype=float32)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        num_shards: int = 1,
        *,
        max_bytes: int = 4 << 30,
        compression: str | None = None,
    ) -> None:
        """Open or make the store; every process that uses it names the same `path`, `num_shards` and
        `max_bytes`.

        `num_shards` writers work at a time. `max_bytes` bounds the payloads, the files grow to about twice
        that. `compression` (``"lz4"``, ``"zstd"``) is for what is added here; such fragments are copied when
        read.

        Raises:
            ValueError: a value is not possible, or the folder was made with another `num_shards`.
        """
        self.path = Path(path)
        if num_shards < 1:
            raise ValueError(f"num_shards must be at least 1, got {num_shards}")
        if compression not in COMPRESSIONS:
            raise ValueError(f"compression must be one of {COMPRESSIONS}, got {compression!r}")
        found = len(list(self.path.glob("shard-*")))
        if found not in (0, num_shards):
            raise ValueError(f"{str(path)!r} was made with num_shards={found}, got num_shards={num_shards}")
        self._compression = compression
        self._max_bytes = max_bytes
        self._shards = [_Shard(self.path / f"shard-{i}", max_bytes // num_shards) for i in range(num_shards)]
        self._ids = _new_ids()
        self._schemas: dict[bytes, Schema] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        args = (self.path, len(self._shards), self._max_bytes, self._compression)
        return _reopen, args

    def add_fragment(self, fragment: SampleFragment) -> str:
        """Keep `fragment`; its id."""
        return self.add_fragments([fragment])[0]

    def add_fragments(self, fragments: Iterable[SampleFragment]) -> list[str]:
        """Keep them, with one commit a shard; their ids, in order.

        Raises:
            StoreFullError: they do not fit; those of other shards may have been kept, without use.
            ValueError: a fragment holds something that cannot be stored.
        """
        return self._put([pack(fragment, self._compression) for fragment in fragments])

    def add_stacked(self, batch: SampleFragment) -> list[str]:
        """Keep the fragments that `batch` is made of, as `stack` returns them; their ids, in order.

        Several times as fast as one by one, when they are small: a worker that steps many environments has
        them together anyway. A plain value in place of a list is that of every fragment.

        Raises:
            StoreFullError: as `add_fragments`.
            ValueError: the arrays and lists differ in length, or it holds something that cannot be stored.
        """
        return self._put(unstack(batch, self._compression))

    def _put(self, packed: list[Packed]) -> list[str]:
        ids = list(itertools.islice(self._ids, len(packed)))
        rows = defaultdict(list)
        for fragment_id, one in zip(ids, packed, strict=True):
            rows[self._shard_of(fragment_id)].append((fragment_id.encode(), one))
        for shard, items in rows.items():
            shard.put(items)
        return ids

    def get_fragment(self, fragment_id: str) -> SampleFragment:
        """The fragment; see `get_fragments`."""
        return self.get_fragments([fragment_id])[0]

    def get_fragments(self, fragment_ids: Sequence[str]) -> list[SampleFragment]:
        """The fragments, in order; their arrays look into the store without a copy, where that is cheaper.

        Such arrays cannot be written to. They stay as they are for as long as they live, even when the
        fragment is deleted; but what is freed in the meantime is not used again, so copy what is kept for
        long.

        Raises:
            KeyError: an id is not there: never added, or already deleted.
        """
        reading = _Reading(self)
        return [unpack(*reading.payload(fragment_id)) for fragment_id in fragment_ids]

    def stack(self, fragment_ids: Sequence[str]) -> SampleFragment:
        """The fragments as one, with a leading axis on every array and a list for every plain value.

        The arrays are one copy of the payloads, and may be written to.

        Raises:
            KeyError: an id is not there.
            ValueError: there are none, or they differ in nesting, dtypes or shapes.
        """
        reading = _Reading(self)
        payloads = [reading.raw(fragment_id) for fragment_id in fragment_ids]
        if not payloads:
            raise ValueError("only fragments of one schema can be stacked; these 0 have 0")
        return stack(payloads, reading.schema(fragment_ids[0], schema_id_of(payloads[0])))

    def delete_fragment(self, fragment_id: str) -> bool:
        """Delete the fragment; whether it was there."""
        return self.delete_fragments([fragment_id]) == 1

    def delete_fragments(self, fragment_ids: Iterable[str]) -> int:
        """Delete those of them that are there; how many were."""
        keys = defaultdict(list)
        for fragment_id in fragment_ids:
            keys[self._shard_of(fragment_id)].append(fragment_id.encode())
        return sum(shard.delete(rows) for shard, rows in keys.items())

    def clear(self) -> None:
        """Delete all fragments, whoever still needs them."""
        for shard in self._shards:
            shard.delete(list(shard))

    def ids(self) -> list[str]:
        """Of all fragments there are, those of one process in the order in which they were added."""
        return [str(key, "utf-8") for shard in self._shards for key in shard]

    def __contains__(self, fragment_id: str) -> bool:
        return fragment_id.encode() in self._shard_of(fragment_id)

    def __len__(self) -> int:
        return sum(shard.totals()[0] for shard in self._shards)

    def num_bytes(self) -> int:
        """Of the payloads."""
        return sum(shard.totals()[1] for shard in self._shards)

    def get_disk_space(self) -> int:
        """Bytes that the files take on the disk, room for later payloads included."""
        return sum(file.stat().st_blocks * 512 for file in self.path.glob("shard-*/*"))

    def copy(self, path: Path) -> None:
        """A copy in the new folder `path`, on the disk when this returns."""
        for shard in self._shards:
            shard.environment.copy(path / shard.name)

    def _shard_of(self, fragment_id: str) -> _Shard:
        if len(self._shards) == 1:
            return self._shards[0]
        return self._shards[zlib.crc32(fragment_id.encode()) % len(self._shards)]


def _reopen(path: Path, num_shards: int, max_bytes: int, compression: str | None) -> FragmentStore:
    return FragmentStore(path, num_shards, max_bytes=max_bytes, compression=compression)


def _new_ids() -> Iterator[str]:
    """Neighbors in the database follow each other in time: what is added together lies together."""
    prefix = os.urandom(8).hex()
    return (f"{prefix}{number:016x}" for number in itertools.count())


class _Reading:
    """The payloads of one call: one snapshot of each shard it looks into."""

    def __init__(self, store: FragmentStore) -> None:
        self._store = store
        self._snapshots: dict[_Shard, Snapshot] = {}
        self._copies: dict[_Shard, bool] = {}

    def raw(self, fragment_id: str) -> memoryview:
        """The payload, for use before this is let go."""
        shard = self._store._shard_of(fragment_id)
        snapshot = self._snapshots.get(shard)
        if snapshot is None:
            snapshot = self._snapshots[shard] = shard.environment.read()
        raw = snapshot.get(fragment_id.encode(), shard.payloads)
        if raw is None:
            raise KeyError(
                f"no fragment {fragment_id!r} in {str(self._store.path)!r}: it was never added, or was "
                f"deleted when its lease was released or had expired"
            )
        return raw

    def payload(self, fragment_id: str) -> tuple[Bytes, Schema]:
        """The payload as an array that may outlive this, and its schema."""
        raw = self.raw(fragment_id)
        shard = self._store._shard_of(fragment_id)
        snapshot = self._snapshots[shard]
        if shard not in self._copies:
            self._copies[shard] = not shard.environment.pin(snapshot)
        value = snapshot.value(raw, copy=self._copies[shard])
        return value, self.schema(fragment_id, schema_id_of(raw))

    def schema(self, fragment_id: str, schema_id: bytes) -> Schema:
        """The schema `schema_id`, which the fragment has."""
        known = self._store._schemas
        if schema_id not in known:
            shard = self._store._shard_of(fragment_id)
            text = self._snapshots[shard].get(schema_id, shard.schemas)
            assert text is not None
            known[schema_id] = Schema.parse(bytes(text))
        return known[schema_id]


class _Shard:
    """One of the databases."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.name = path.name
        self._max_bytes = max_bytes
        self.environment = Environment.open(path, max_bytes=2 * max_bytes + _ROOM_BYTES)
        self.payloads = self.environment.table("payloads")
        self.schemas = self.environment.table("schemas")
        self._totals = self.environment.table("totals")
        self._known_schemas: set[bytes] = set()
        self._stage = memoryview(b"")
        """Used inside a transaction only, so by one thread at a time."""

    def put(self, rows: list[tuple[bytes, Packed]]) -> None:
        num_bytes = sum(one.num_bytes for _, one in rows)
        new = {one.schema_id: one.schema.text for _, one in rows if one.schema_id not in self._known_schemas}
        with self.environment.write(num_bytes) as transaction:
            count, held = self._read_totals(transaction)
            if held + num_bytes > self._max_bytes:
                raise StoreFullError(
                    f"{self.name} holds {held} bytes, and {num_bytes} more exceed its bound of "
                    f"{self._max_bytes}: lower the buffer's max_chunks, or raise max_bytes"
                )
            for schema_id, text in new.items():
                transaction.put(schema_id, text, db=self.schemas)
            cursor = transaction.cursor(self.payloads)
            _, added = cursor.putmulti(self._staged(rows), overwrite=False)
            assert added == len(rows), "an id was used twice"
            transaction.put(_TOTALS_KEY, _TOTALS.pack(count + len(rows), held + num_bytes), db=self._totals)
        self._known_schemas |= new.keys()

    def _staged(self, rows: list[tuple[bytes, Packed]]) -> Iterator[tuple[bytes, Any]]:
        """Keys and payloads; a large payload lies in memory that the next one is written to again.

        New memory for each would take longer than copying to it.
        """
        for key, one in rows:
            if one.num_bytes < _STAGED_BYTES:
                yield key, one.payload
                continue
            if one.num_bytes > len(self._stage):
                self._stage = memoryview(bytearray(one.num_bytes))
            yield key, one.write(self._stage)

    def delete(self, keys: Sequence[bytes]) -> int:
        num_deleted = num_bytes = 0
        with self.environment.write() as transaction:
            cursor = transaction.cursor(self.payloads)
            for key in keys:
                if cursor.set_key(key):
                    num_bytes += len(cursor.value())
                    num_deleted += 1
                    cursor.delete()
            count, held = self._read_totals(transaction)
            row = _TOTALS.pack(count - num_deleted, held - num_bytes)
            transaction.put(_TOTALS_KEY, row, db=self._totals)
        return num_deleted

    def _read_totals(self, reader: Any) -> tuple[int, int]:
        raw = reader.get(_TOTALS_KEY, db=self._totals)
        return _TOTALS.unpack(raw) if raw is not None else (0, 0)

    def totals(self) -> tuple[int, int]:
        """Count and bytes of the payloads."""
        raw = self.environment.read().get(_TOTALS_KEY, self._totals)
        return _TOTALS.unpack(raw) if raw is not None else (0, 0)

    def __iter__(self) -> Iterator[bytes]:
        return self.environment.read().keys(self.payloads)

    def __contains__(self, key: bytes) -> bool:
        return self.environment.read().get(key, self.payloads) is not None
