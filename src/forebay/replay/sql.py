"""A store in a database: a SQLite file, or PostgreSQL by URL; what it returned from survives the process.

::

    put ---------> queue --+   one thread (`sql_worker`)    +--> groups, tags     light rows, with indexes
    put ---------> queue --+-> prepare all, one commit -----+--> payloads         bytes, read when taken
    set_train_step queue --+                                +--> tasks            train steps, evictions
    take_first, get, ...  ---> a transaction each

It is not a cache: nothing of the content is held in memory, so several processes may use one database at the
same time. It knows no rollouts: a `Codec` makes bytes of payloads (a `ReplayBuffer` hands it one for groups).

Writers. Puts that wait at the same time share a commit. On SQLite a write transaction has the file alone and
others wait for it (write-ahead log: readers never do). On PostgreSQL rows are locked one by one, and
`take_first` passes over those that another taker holds (``FOR UPDATE SKIP LOCKED``).

Reading. Queries are compiled to SQL (`sql_query`), so that counts, orders and limits are the database's work.
A query too large for a database is evaluated here, on light rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import sqlalchemy as sa

from forebay.replay.query import Query, QueryLike, matches, parse_query
from forebay.replay.sql_ids import next_ids, raise_ids, reserve_ids
from forebay.replay.sql_query import is_too_large, plan_arms
from forebay.replay.sql_rows import (
    PreparedRow,
    archive_rows,
    attach_payloads,
    delete_rows,
    insert_rows,
    lock_rows,
    prepare,
    read_rows,
    replace_rows,
    select_rows,
    storable_uids,
)
from forebay.replay.sql_schema import (
    EVICT_LOCK,
    LIVE,
    groups,
    insert_or_update,
    open_engine,
    payloads,
    tags,
    tasks,
)
from forebay.replay.sql_worker import Worker
from forebay.replay.storage import (
    STATE_VERSION,
    Codec,
    StorageBackend,
    StorageItem,
    check_state,
    parse_order,
)

Result = TypeVar("Result")


class JsonCodec:
    """Payloads that are JSON values; what a SQL store uses until it is handed another codec.

    >>> JsonCodec().decode(JsonCodec().encode({"prompt": [1, 2]}))
    {'prompt': [1, 2]}
    """

    def encode(self, payload: Any) -> bytes:
        """The payload as JSON; ValueError if it is none."""
        try:
            return json.dumps(payload).encode()
        except TypeError as error:
            raise ValueError(f"the payload is no JSON value ({error}); give the store a codec") from None

    def decode(self, data: bytes) -> Any:
        """The payload; ValueError if the bytes are no JSON."""
        try:
            return json.loads(data)
        except ValueError:
            raise ValueError(
                f"the payload is no JSON, it starts with {data[:8]!r}; open the store with the codec that "
                f"wrote it"
            ) from None

    def status(self, value: str) -> str:
        """The value."""
        return value


@dataclass(frozen=True, slots=True)
class _TrainStep:
    task_name: str
    train_step: int


class SQLStorage(StorageBackend):
    """Rows and payloads in a SQLite file or a PostgreSQL database, shared by any number of processes.

    Every method but the plain ones (``len()``, `num_evicted`, `state_dict`, `load_state_dict`, `close`)
    leaves the event loop free; the plain ones wait for the database. A call returns after its commit.

    >>> store = SQLStorage("runs/buffer.db")
    >>> store = SQLStorage("postgresql://me@host/rl")
    >>> uid = await store.put(StorageItem({"text": "hi"}, -1, -1, "math", "completed", 0))
    >>> store.close()
    """

    def __init__(self, url: str | os.PathLike[str], *, codec: Codec | None = None) -> None:
        """Open the database, and make its tables if it has none.

        Raises:
            ValueError: it is not a replay store of this version, or of another kind of database.
        """
        self._engine = open_engine(url)
        self._codec: Codec = JsonCodec() if codec is None else codec
        self._is_codec_fixed = codec is not None
        self._worker = Worker("forebay-sql", prepare=self._prepare, write=self._write_together)

    def use_codec(self, codec: Codec) -> None:
        """Payloads are what `codec` says, unless the store was built with a codec."""
        if not self._is_codec_fixed:
            self._codec = codec

    def close(self) -> None:
        """Finish what was called, end the thread, close the connections."""
        self._worker.close()
        self._engine.dispose()

    async def put(self, item: StorageItem) -> int:
        """See `StorageBackend.put`."""
        uid: int = await self._worker.share(item)
        return uid

    async def get(
        self, query: QueryLike, *, order: str | None = None, limit: int | None = None, rows_only: bool = False
    ) -> list[StorageItem]:
        """See `StorageBackend.get`."""
        ranking = _Ranking(parse_query(query), *parse_order(order), limit)

        def work() -> list[StorageItem]:
            with self._reading() as connection:
                rows = self._ranked(connection, ranking)
                if not rows_only:
                    attach_payloads(connection, rows, self._codec)
            return rows

        return await self._worker.call(work)

    async def count(self, query: QueryLike) -> int:
        """See `StorageBackend.count`."""
        parsed = parse_query(query)

        def work() -> int:
            with self._reading() as connection:
                if is_too_large(parsed):
                    return len(self._scan(connection, parsed))
                count = sa.select(sa.func.count()).select_from(groups)
                arms = plan_arms(parsed, _train_steps(connection), by_age=False)
                return sum(connection.scalar(count.where(arm.where)) or 0 for arm in arms)

        return await self._worker.call(work)

    async def take(
        self, uids: Iterable[int], *, query: QueryLike | None = None, train_step: int | None = None
    ) -> list[StorageItem]:
        """See `StorageBackend.take`."""
        parsed = None if query is None else parse_query(query)
        wanted = storable_uids(uids)

        def choose(connection: sa.Connection) -> list[StorageItem]:
            found = lock_rows(connection, wanted, self._codec, _train_steps(connection))
            rows = [found[uid] for uid in wanted if uid in found]
            return [row for row in rows if parsed is None or matches(parsed, row)]

        return await self._take(choose, train_step)

    async def take_first(
        self, count: int, query: QueryLike, *, order: str | None = None, train_step: int | None = None
    ) -> list[StorageItem]:
        """See `StorageBackend.take_first`."""
        ranking = _Ranking(parse_query(query), *parse_order(order), count)
        return await self._take(partial(self._ranked, ranking=ranking, lock=True), train_step)

    async def evict(self, limit: int) -> list[StorageItem]:
        """See `StorageBackend.evict`."""

        def choose(connection: sa.Connection) -> list[StorageItem]:
            if connection.dialect.name == "postgresql":
                # Two that count at once would both remove the excess.
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(EVICT_LOCK)))
            excess = _count_live(connection) - limit
            rows = self._ranked(
                connection, _Ranking(parse_query({}), "timestamp_id", False, excess), lock=True
            )
            for name in sorted({row.task_name for row in rows}):
                number = sum(row.task_name == name for row in rows)
                connection.execute(
                    tasks.update()
                    .where(tasks.c.task_name == name)
                    .values(num_evicted=tasks.c.num_evicted + number)
                )
            return rows

        return await self._take(choose, None)

    async def delete(self, uids: Iterable[int]) -> None:
        """See `StorageBackend.delete`."""
        wanted = storable_uids(uids)

        def work() -> None:
            with self._writing() as connection:
                found = lock_rows(connection, wanted, self._codec, {})
                delete_rows(connection, found)

        await self._worker.call(work)

    async def update(self, items: Iterable[StorageItem]) -> None:
        """See `StorageBackend.update`."""
        await self._update(items, None)

    async def update_if(self, items: Iterable[StorageItem], query: QueryLike) -> int:
        """See `StorageBackend.update_if`."""
        return await self._update(items, parse_query(query))

    async def _update(self, items: Iterable[StorageItem], query: Query | None) -> int:
        listed = list(items)

        def work() -> int:
            rows = [prepare(item, self._codec, keep_payload=True) for item in listed]
            uids = storable_uids(row.uid for row in rows)
            with self._writing() as connection:
                found = lock_rows(connection, uids, self._codec, _train_steps(connection))
                known = {uid for uid, row in found.items() if query is None or matches(query, row)}
                replace_rows(connection, [row for row in rows if row.uid in known])
            return len(known)

        return await self._worker.call(work)

    async def get_train_step(self, task_name: str) -> int | None:
        """See `StorageBackend.get_train_step`."""

        def work() -> int | None:
            with self._reading() as connection:
                return _train_steps(connection).get(task_name)

        return await self._worker.call(work)

    async def set_train_step(self, task_name: str, train_step: int) -> None:
        """See `StorageBackend.set_train_step`."""
        await self._worker.share(_TrainStep(task_name, train_step))

    def __len__(self) -> int:
        with self._reading() as connection:
            return _count_live(connection)

    @property
    def num_evicted(self) -> dict[str, int]:
        """See `StorageBackend.num_evicted`; of all processes, ever."""
        counts = sa.select(tasks.c.task_name, tasks.c.num_evicted).where(tasks.c.num_evicted > 0)
        with self._reading() as connection:
            return {line.task_name: line.num_evicted for line in connection.execute(counts)}

    @num_evicted.setter
    def num_evicted(self, counts: Mapping[str, int]) -> None:
        rows = [{"task_name": name, "num_evicted": counts[name]} for name in sorted(counts)]
        with self._writing() as connection:
            connection.execute(tasks.update().values(num_evicted=0))
            if rows:
                insert_or_update(connection, tasks, rows, "num_evicted")

    def state_dict(self) -> dict[str, Any]:
        """See `StorageBackend.state_dict`; here it reads everything into memory."""
        with self._reading() as connection:
            train_steps = _train_steps(connection)
            # As given, and not as stale as now: whoever loads it knows the train steps, too.
            lines = connection.execute(select_rows().order_by(groups.c.timestamp_id))
            items = list(read_rows(lines, self._codec, {}))
            attach_payloads(connection, items, self._codec)
            following = next_ids(connection)
        return {
            "version": STATE_VERSION,
            "items": items,
            "next_uid": following["uid"],
            "next_timestamp_id": following["timestamp_id"],
            "train_steps": {name: step for name, step in train_steps.items() if step is not None},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `StorageBackend.load_state_dict`."""
        rows = [prepare(item, self._codec) for item in check_state(state)]
        steps = [
            {"task_name": name, "train_step": step} for name, step in sorted(state["train_steps"].items())
        ]
        with self._writing() as connection:
            for table in (tags, payloads, groups):
                connection.execute(table.delete())
            connection.execute(tasks.update().values(train_step=None))
            raise_ids(connection, {name: state[f"next_{name}"] for name in ("uid", "timestamp_id")})
            insert_rows(connection, rows, [(row.uid, row.timestamp_id) for row in rows])
            if steps:
                insert_or_update(connection, tasks, steps, "train_step")

    async def _take(
        self, choose: Callable[[sa.Connection], list[StorageItem]], train_step: int | None
    ) -> list[StorageItem]:
        """Remove or archive the rows that `choose` returns, locked, within the transaction."""

        def work() -> list[StorageItem]:
            with self._writing() as connection:
                rows = choose(connection)
                # Before the commit: a payload that cannot be read must not cost its group.
                attach_payloads(connection, rows, self._codec)
                if train_step is None:
                    delete_rows(connection, [row.uid for row in rows])
                else:
                    archive_rows(connection, [row.uid for row in rows], train_step)
            return rows

        return await self._worker.call(work, undo=self._give_back)

    def _give_back(self, items: list[StorageItem]) -> None:
        """Undo a take whose caller was cancelled."""
        rows = [prepare(item, self._codec) for item in items]
        with self._writing() as connection:
            delete_rows(connection, [row.uid for row in rows])
            insert_rows(connection, rows, [(row.uid, row.timestamp_id) for row in rows])

    def _prepare(self, content: StorageItem | _TrainStep) -> PreparedRow | _TrainStep:
        return content if isinstance(content, _TrainStep) else prepare(content, self._codec)

    def _write_together(self, contents: list[PreparedRow | _TrainStep]) -> list[int | None]:
        rows = [content for content in contents if isinstance(content, PreparedRow)]
        steps = {step.task_name: step.train_step for step in contents if isinstance(step, _TrainStep)}
        with self._writing() as connection:
            ids = reserve_ids(connection, [(row.uid, row.timestamp_id) for row in rows]) if rows else []
            insert_rows(connection, rows, ids)
            if steps:
                lines = [{"task_name": name, "train_step": steps[name]} for name in sorted(steps)]
                insert_or_update(connection, tasks, lines, "train_step")
        uids = iter([uid for uid, _ in ids])
        return [next(uids) if isinstance(content, PreparedRow) else None for content in contents]

    def _ranked(
        self, connection: sa.Connection, ranking: _Ranking, *, lock: bool = False
    ) -> list[StorageItem]:
        """The rows of a ranking, without payload; with `lock`, rows that others have locked are left out."""
        if ranking.limit is not None and ranking.limit <= 0:
            return []
        if is_too_large(ranking.query):
            rows = self._scan(connection, ranking.query, lock=lock)
            return ranking.cut(rows)
        train_steps = _train_steps(connection)
        rows = []
        for arm in plan_arms(ranking.query, train_steps, by_age=ranking.field == "staleness"):
            statement = select_rows().where(arm.where).limit(ranking.limit)
            statement = statement.order_by(*arm.order_by(ranking.field, ranking.descending))
            if lock:
                statement = statement.with_for_update(skip_locked=True)
            rows += read_rows(connection.execute(statement), self._codec, train_steps)
        return ranking.cut(rows)

    def _scan(self, connection: sa.Connection, query: Query, *, lock: bool = False) -> list[StorageItem]:
        statement = select_rows().with_for_update(skip_locked=True) if lock else select_rows()
        lines = connection.execute(statement)
        rows = read_rows(lines, self._codec, _train_steps(connection))
        return [row for row in rows if matches(query, row)]

    @contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        """A transaction that sees one moment of the database."""
        with self._engine.connect() as connection:
            if connection.dialect.name == "postgresql":
                connection = connection.execution_options(isolation_level="REPEATABLE READ")
            with connection.begin():
                yield connection

    @contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        """A transaction that is committed at the end, or rolled back by an error."""
        with self._engine.connect().execution_options(forebay_write=True) as connection, connection.begin():
            yield connection


@dataclass(frozen=True, slots=True)
class _Ranking:
    """What `get` was asked for."""

    query: Query
    field: str
    descending: bool
    limit: int | None

    def cut(self, rows: list[StorageItem]) -> list[StorageItem]:
        """The first of these rows, which come from several arms."""
        rows.sort(key=lambda row: row.timestamp_id)
        # Sorting keeps ties in arrival order, also with reverse=True.
        rows.sort(key=lambda row: getattr(row, self.field), reverse=self.descending)
        return rows if self.limit is None else rows[: self.limit]


def _train_steps(connection: sa.Connection) -> dict[str, int | None]:
    """Every task of the store, with its train step."""
    lines = connection.execute(sa.select(tasks.c.task_name, tasks.c.train_step))
    return {line.task_name: line.train_step for line in lines}


def _count_live(connection: sa.Connection) -> int:
    return connection.scalar(sa.select(sa.func.count()).select_from(groups).where(LIVE)) or 0
