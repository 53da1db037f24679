"""A buffer on disk, opened for reading: a snapshot, a run's checkpoint, or a SQL store.

::

    PATH --find_snapshot--> snapshot folder --> SnapshotSource: rows in memory, rollouts read on demand
    URL or .db file --------------------------> SqlSource: the store itself

Rows are answered by `storage`; what lies in the rollouts (sizes, scores, texts) is read only for the groups
asked for. Nothing here changes what it reads.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from forebay.extras import needed_by
from forebay.replay import IndexedStorage, StorageBackend, StorageItem
from forebay.replay.analysis import join, joined_batches
from forebay.replay.format.codec import GroupCodec
from forebay.replay.format.snapshot import MANIFEST, SnapshotTables, open_snapshot
from forebay.replay.format.tables import read_groups, read_rows, rollout_batches
from forebay.types import RolloutState, Status

SQL_SUFFIXES = (".db", ".sqlite", ".sqlite3")
SQLITE_MAGIC = b"SQLite format 3\0"
"""What every SQLite file begins with; one that was served may have any name."""

ALL_STATUSES = {"status": {"$in": [status.value for status in Status]}}
"""The query for live and ARCHIVED rows together."""

GROUPS_AT_ONCE = 256
"""Of a SQL store, whose payloads are decoded one by one: some megabytes for long rollouts."""


@dataclass(frozen=True)
class Digest:
    """What a table of groups shows of a group's rollouts."""

    group_id: str
    num_rollouts: int
    num_tokens: int
    """Response tokens of all rollouts."""
    max_tokens: int
    """Response tokens of the longest rollout."""
    score: float | None
    """Mean over the rollouts that have one."""


class BufferSource(ABC):
    """A buffer on disk. `storage` holds its rows, perhaps without payloads; the rest is by uid.

    >>> with open_snapshot(path) as tables:
    ...     source = SnapshotSource(path, tables)
    """

    storage: StorageBackend
    location: str
    kind: str
    """What it is, in a few words."""
    num_bytes: int | None
    """On disk; None if that cannot be known."""
    num_evicted: dict[str, int]

    @abstractmethod
    def rollouts(self, uids: Collection[int]) -> AsyncIterator[pa.RecordBatch]:
        """The rollouts of these groups, in pieces, without those that somebody took out meanwhile."""

    async def digests(self, uids: Collection[int]) -> dict[int, Digest]:
        """The digest of each of these groups, without those that somebody took out meanwhile."""
        lines = [
            pa.table(
                {
                    "uid": batch.column("uid"),
                    "group_id": batch.column("group_id"),
                    "tokens": pc.list_value_length(batch.column("response_ids")),
                    "score": batch.column("score"),
                }
            )
            async for batch in self.rollouts(uids)
        ]
        if not lines:
            return {}
        sums = [
            ("group_id", "min"),
            ("uid", "count"),
            ("tokens", "sum"),
            ("tokens", "max"),
            ("score", "mean"),
        ]
        grouped = pa.concat_tables(lines).group_by("uid").aggregate(sums)
        columns = [grouped.column("_".join(pair)).to_pylist() for pair in sums]
        return {
            uid: Digest(*values)
            for uid, *values in zip(grouped.column("uid").to_pylist(), *columns, strict=True)
        }

    async def group(self, uid: int) -> Sequence[RolloutState]:
        """The rollouts of the group, which exists; ValueError if somebody took it out meanwhile."""
        async for batch in self.rollouts([uid]):
            return next(group for _, group in read_groups(batch))
        raise ValueError(f"group {uid} was taken out of {self.location!r} just now")

    @abstractmethod
    async def joined(self, rows: Sequence[StorageItem]) -> list[pa.RecordBatch]:
        """The table of `forebay.replay.analysis` of these rows, in pieces."""


class SnapshotSource(BufferSource):
    """A snapshot folder; its files stay on disk until they are asked for."""

    def __init__(self, path: Path, tables: SnapshotTables) -> None:
        self._tables = tables
        self.storage = IndexedStorage()
        self.storage.load_state_dict(tables.storage_state(read_rows(tables.groups)))
        self.location = str(path)
        manifest = tables.manifest
        self.kind = f"snapshot, format {manifest['version']}, policy {manifest['policy']}"
        self.num_bytes = sum(entry["bytes"] for entry in manifest["files"].values())
        self.num_evicted = dict(manifest["num_evicted"])

    async def joined(self, rows: Sequence[StorageItem]) -> list[pa.RecordBatch]:
        """See `BufferSource.joined`."""
        uids = [row.uid for row in rows]
        groups = self._tables.groups
        groups = groups.filter(pc.is_in(groups.column("uid"), pa.array(uids, pa.int64())))
        return [join(groups, batch) async for batch in self.rollouts(uids)]

    async def rollouts(self, uids: Collection[int]) -> AsyncIterator[pa.RecordBatch]:
        """See `BufferSource.rollouts`."""
        wanted = pa.array(list(uids), pa.int64())
        for index in range(self._tables.rollouts.num_record_batches):
            batch = self._tables.rollouts.get_batch(index)
            found = batch.filter(pc.is_in(batch.column("uid"), wanted))
            if len(found):
                yield found


class SqlSource(BufferSource):
    """A SQL store."""

    def __init__(self, url: str) -> None:
        self.storage = open_sql(url)
        self.location = hide_password(url)
        self.kind = "SQL store"
        self.num_bytes = None if "://" in url else _bytes_on_disk(Path(url))
        self.num_evicted = dict(self.storage.num_evicted)

    async def rollouts(self, uids: Collection[int]) -> AsyncIterator[pa.RecordBatch]:
        """See `BufferSource.rollouts`."""
        async for rows in self._payloads(list(uids)):
            for batch in rollout_batches(rows):
                yield batch

    async def joined(self, rows: Sequence[StorageItem]) -> list[pa.RecordBatch]:
        """See `BufferSource.joined`."""
        pieces = self._payloads([row.uid for row in rows])
        return [batch async for found in pieces for batch in joined_batches(found)]

    async def _payloads(self, uids: list[int]) -> AsyncIterator[list[StorageItem]]:
        for start in range(0, len(uids), GROUPS_AT_ONCE):
            query = {"uid": {"$in": uids[start : start + GROUPS_AT_ONCE]}, **ALL_STATUSES}
            yield await self.storage.get(query)


def _bytes_on_disk(file: Path) -> int:
    """Of the database and its write-ahead log, which another process may empty at any moment."""
    log = file.with_name(f"{file.name}-wal")
    return file.stat().st_size + (log.stat().st_size if log.exists() else 0)


def is_sql(location: str) -> bool:
    """Whether `location` names a database: by a URL, or by the suffix or the first bytes of its file."""
    return "://" in location or location.endswith(SQL_SUFFIXES) or _is_sqlite_file(Path(location))


def _is_sqlite_file(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC


def open_sql(url: str, *, create: bool = False) -> StorageBackend:
    """The SQL store at `url`, for groups of rollouts.

    Raises:
        FileNotFoundError: there is no such file, and it is not to be created.
        ValueError: SQLAlchemy is not installed, or the database is not a replay store.
    """
    with needed_by("a SQL store"):
        from sqlalchemy.exc import SQLAlchemyError

        from forebay.replay.stores.sql.store import SQLStorage
    try:
        storage = SQLStorage(url, create=create)
        # Not an argument: a server may give it a codec that keeps groups packed.
        storage.use_codec(GroupCodec())
        return storage
    except (SQLAlchemyError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"cannot open the database {hide_password(url)!r}: {reason}") from None


def hide_password(url: str) -> str:
    """`url` as it may be shown."""
    scheme, found, rest = url.partition("://")
    if not found:
        return url
    rest = re.sub(r"(?<=[?&]password=)[^&]*", "***", rest)
    user, at, host = rest.rpartition("@")
    return f"{scheme}://{user.partition(':')[0]}@{host}" if at else f"{scheme}://{rest}"


def find_snapshot(path: Path) -> Path:
    """The snapshot folder that `path` means: itself, in a checkpoint, or of a run's newest checkpoint.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        ValueError: there is, but no snapshot.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is nothing at {str(path)!r}")
    checkpoints = sorted(path.glob("checkpoints/step_*[0-9]"))
    places = [path, path / "buffer", path / "manager" / "buffer"]
    places += [checkpoint / "manager" / "buffer" for checkpoint in checkpoints[-1:]]
    for place in places:
        if (place / MANIFEST).is_file():
            return place
    raise ValueError(
        f"{str(path)!r} holds no buffer; name a snapshot folder, a checkpoint, a run folder, or a database "
        f"(a URL, or a file that ends in {', '.join(SQL_SUFFIXES)})"
    )


@contextmanager
def open_folder(folder: Path) -> Iterator[BufferSource]:
    """The snapshot in `folder`, as `find_snapshot` found it.

    Raises:
        ValueError: it is damaged, or of another format.
    """
    with open_snapshot(folder) as tables:
        yield SnapshotSource(folder, tables)
