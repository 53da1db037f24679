"""A buffer on disk, opened for reading: a snapshot, a run's checkpoint, or a SQL store.

::

    PATH --find_snapshot--> snapshot folder --> rows in memory, rollouts read on demand
    URL or .db file, run with a database -----> the store itself

Rows are answered by `storage`; sizes, scores and texts lie in the rollouts, which are read only for the
groups asked for. Nothing here changes what it reads.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pyarrow as pa
import pyarrow.compute as pc

from forebay.config import read_toml
from forebay.extras import needed_by
from forebay.io.address import hide_password
from forebay.replay import IndexedStorage, StorageBackend, StorageItem
from forebay.replay.config import ReplayConfig
from forebay.replay.format.packed import GroupCodec
from forebay.replay.format.snapshot import MANIFEST, SnapshotTables, open_snapshot
from forebay.replay.format.tables import GROUPS_SCHEMA, group_batches, join, read_groups, read_rows, rollout_batches
from forebay.replay.stores.contract import copy_row
from forebay.runs.folder import RUN_FILE, list_checkpoints
from forebay.runs.store import STORE_FILE, database_url
from forebay.types import RolloutState, Status, scores_of

SQL_SUFFIXES = (".db", ".sqlite", ".sqlite3")
SQLITE_MAGIC = b"SQLite format 3\0"
"""The first bytes of every SQLite file; one that was served may have any name."""

ALL_STATUSES = {"status": {"$in": [status.value for status in Status]}}
"""The query for live and ARCHIVED rows together."""

GROUPS_AT_ONCE = 256
"""The groups of a SQL store that are read at once: some megabytes for long rollouts."""


@dataclass(frozen=True)
class BufferSource:
    """A buffer on disk. `storage` holds its rows, perhaps without payloads; the rest is by uid."""

    storage: StorageBackend
    location: str
    kind: str
    """The kind in a few words: a snapshot with its format and policy, or a SQL store."""
    num_bytes: int | None
    """On disk; None if that cannot be known."""
    num_evicted: Mapping[str, int]
    rollouts: Callable[[Collection[int]], AsyncIterator[pa.RecordBatch]]
    """The rollouts of the groups with these uids, in pieces; groups that are not there are left out."""
    near: Path | None
    """The file or folder near which a ledger may lie; None for a database that is named by its URL."""

    async def digests(self, uids: Collection[int]) -> "dict[int, Digest]":
        """The digest of each of these groups, without those that another process took out meanwhile."""
        batches = self.rollouts(uids)
        return {uid: _digest(group) async for batch in batches for uid, group in read_groups(batch)}

    async def group(self, uid: int) -> Sequence[RolloutState]:
        """The rollouts of the group, which was there; ValueError if another process took it out meanwhile."""
        async for batch in self.rollouts([uid]):
            return next(group for _, group in read_groups(batch))
        raise ValueError(f"group {uid} was taken out of {self.location!r} just now")

    async def joined(self, rows: Sequence[StorageItem]) -> list[pa.RecordBatch]:
        """Rows and rollouts as one table (`forebay.replay.format.tables.join`), in pieces."""
        batches = [batch async for batch in self.rollouts([row.uid for row in rows])]
        sizes = Counter(uid for batch in batches for uid in batch.column("uid").to_pylist())
        # Of the item only its length is asked: the rollouts are in the batches.
        sized = [copy_row(row, item=range(sizes[row.uid])) for row in rows]
        groups = pa.Table.from_batches(group_batches(sized, {}), GROUPS_SCHEMA)
        return [join(groups, batch) for batch in batches]


@dataclass(frozen=True)
class Digest:
    """A group's rollouts in numbers, for a table of groups."""

    group_id: str
    num_rollouts: int
    num_tokens: int
    """Response tokens of all rollouts."""
    max_tokens: int
    """Response tokens of the longest rollout."""
    score: float | None
    """Mean over the rollouts that have one."""


def _digest(group: Sequence[RolloutState]) -> Digest:
    tokens = [len(state.response_ids) for state in group]
    scores = scores_of(group)
    score = fmean(scores) if scores else None
    return Digest(str(group[0].group_id), len(group), sum(tokens), max(tokens), score)


@asynccontextmanager
async def opened(path: str) -> AsyncIterator[BufferSource]:
    """The buffer at `path`: a database, a run folder with one, or whatever `find_snapshot` takes.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: it is no buffer, is damaged, or is of another format.
    """
    if is_sql(url := own_database(path)):
        source = open_database(url, Path(path))
        with closing(source.storage):
            yield source
    else:
        folder = find_snapshot(Path(path))
        with open_snapshot(folder) as tables:
            yield _of_snapshot(folder, tables)


def _of_snapshot(folder: Path, tables: SnapshotTables) -> BufferSource:
    async def rollouts(uids: Collection[int]) -> AsyncIterator[pa.RecordBatch]:
        # The files stay on disk; a batch is read when its turn comes.
        wanted = pa.array(list(uids), pa.int64())
        for index in range(tables.rollouts.num_record_batches):
            batch = tables.rollouts.get_batch(index)
            found = batch.filter(pc.is_in(batch.column("uid"), wanted))
            if len(found):
                yield found

    storage, manifest = IndexedStorage(), tables.manifest
    storage.load_state_dict(tables.storage_state(read_rows(tables.groups)))
    kind = f"snapshot, format {manifest.version}, policy {manifest.policy}"
    num_bytes = manifest.files.groups.bytes + manifest.files.rollouts.bytes
    return BufferSource(storage, str(folder), kind, num_bytes, manifest.num_evicted, rollouts, folder)


def open_database(url: str, given: Path) -> BufferSource:
    """The SQL store at `url`, of what was `given`; its `storage` is to be closed."""

    async def rollouts(uids: Collection[int]) -> AsyncIterator[pa.RecordBatch]:
        listed = list(uids)
        for start in range(0, len(listed), GROUPS_AT_ONCE):
            query = {"uid": {"$in": listed[start : start + GROUPS_AT_ONCE]}, **ALL_STATUSES}
            for batch in rollout_batches(await storage.get(query)):
                yield batch

    storage = open_sql(url)
    # Another process may empty the write-ahead log at any moment.
    files = [] if "://" in url else [file for file in (Path(url), Path(f"{url}-wal")) if file.exists()]
    num_bytes = sum(file.stat().st_size for file in files) if files else None
    near = given if given.exists() else None
    return BufferSource(storage, hide_password(url), "SQL store", num_bytes, dict(storage.num_evicted), rollouts, near)


def own_database(location: str) -> str:
    """The database in which the run in the folder `location` keeps its groups; else `named_url`."""
    folder, run = Path(location), Path(location) / RUN_FILE
    named = ReplayConfig(store=read_toml(run).get("replay", {}).get("store") if run.is_file() else None)
    if named.kind == "postgresql":
        return database_url()
    file = named.path or folder / STORE_FILE
    checkpoints = list_checkpoints(folder)
    # With groups in its newest checkpoint the run has gone on in memory: the file is older.
    has_snapshot = checkpoints and (checkpoints[-1] / "manager" / "buffer" / MANIFEST).is_file()
    return str(file) if file.is_file() and not has_snapshot else named_url(location)


def named_url(name: str) -> str:
    """The URL of the environment for the name ``postgresql``, which `ps` may show; else `name`."""
    return database_url() if name == "postgresql" else name


def is_sql(location: str) -> bool:
    """Whether `location` names a database: by a URL, or by the suffix or the first bytes of its file."""
    if "://" in location or location.endswith(SQL_SUFFIXES):
        return True
    if not Path(location).is_file():
        return False
    with open(location, "rb") as file:
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


def find_snapshot(path: Path) -> Path:
    """The snapshot folder that `path` means: itself, in a checkpoint, or of a run's newest checkpoint.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        ValueError: there is, but no snapshot.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is nothing at {str(path)!r}")
    places = [path, path / "buffer", path / "manager" / "buffer"]
    places += [checkpoint / "manager" / "buffer" for checkpoint in list_checkpoints(path)[-1:]]
    for place in places:
        if (place / MANIFEST).is_file():
            return place
    raise ValueError(
        f"{str(path)!r} holds no buffer; name a snapshot folder, a checkpoint, a run folder, or a database "
        f"(a URL, or a file that ends in {', '.join(SQL_SUFFIXES)})"
    )
