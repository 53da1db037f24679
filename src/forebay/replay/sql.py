"""A store in a database: a SQLite file, or PostgreSQL by URL; what it returned from survives the process.

::

    put ---------> queue --+   one thread (`sql_worker`)    +--> groups, tags     light rows, with indexes
    put ---------> queue --+-> prepare all, one commit -----+--> payloads         bytes, read when taken
    set_train_step queue --+                                +--> tasks            train steps, evictions
    take_first, get, ...  ---> a transaction each

It is not a cache: nothing of the content is held in memory, so several processes may use one database at the
same time. It knows no rollouts: a `Codec` makes bytes of payloads (a `ReplayBuffer` hands it one for groups).

Writers. Puts that wait at the same time share a commit (`sql_shared`). On SQLite a write transaction has the
file alone and others wait for their turn (`sql_turns`; readers never wait: write-ahead log). On PostgreSQL
rows are locked one by one, and `take_first` passes over those that another taker holds (``FOR UPDATE SKIP
LOCKED``).

Reading. Queries are compiled to SQL (`sql_query`), so that counts, orders and limits are the database's work.
A query too large for a database is evaluated here, on light rows.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import sqlalchemy as sa

from forebay.replay.query import Query, QueryLike, matches, parse_query
from forebay.replay.row_book import check_state
from forebay.replay.sql_ids import next_ids, raise_ids
from forebay.replay.sql_ranking import (
    Ranking,
    count_live,
    count_rows,
    has_rows,
    lock_drawn,
    lock_matching,
    ranked_rows,
    read_priorities,
    train_steps,
)
from forebay.replay.sql_rows import (
    archive_rows,
    attach_payloads,
    delete_rows,
    insert_rows,
    insert_tasks,
    lock_rows,
    prepare,
    read_rows,
    replace_rows,
    select_rows,
    storable_uids,
    write_priorities,
)
from forebay.replay.sql_schema import (
    create_receipts,
    groups,
    insert_or_update,
    open_engine,
    payloads,
    tags,
    tasks,
)
from forebay.replay.sql_shared import (
    Content,
    Evicted,
    GetTrainStep,
    PreparedRows,
    RowWriter,
    SetTrainStep,
    count_evicted,
    evict_together,
    has_receipt,
    keep_receipts,
)
from forebay.replay.sql_state import StoredItems
from forebay.replay.sql_turns import turns_of
from forebay.replay.sql_worker import Sharing, Worker
from forebay.replay.storage import STATE_VERSION, Codec, StepPassed, StorageBackend, StorageItem
from forebay.replay.sum_tree import SumTree

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


class SQLStorage(StorageBackend):
    """Rows and payloads in a SQLite file or a PostgreSQL database, shared by any number of processes.

    Every method but the plain ones (``len()``, `num_evicted`, `state_dict`, `load_state_dict`, `close`)
    leaves the event loop free; the plain ones wait for the database. A call returns after its commit.

    >>> store = SQLStorage("runs/buffer.db")
    >>> store = SQLStorage("postgresql://me@host/rl")
    >>> uid = await store.put(StorageItem({"text": "hi"}, -1, -1, "math", "completed", 0))
    >>> store.close()
    """

    keeps_receipts = True
    is_shared = True

    def __init__(
        self, url: str | os.PathLike[str], *, codec: Codec | None = None, create: bool = True
    ) -> None:
        """Open the database, and make its tables if it has none and `create` says so.

        Raises:
            FileNotFoundError: there is no such file, and it is not to be created.
            ValueError: it is not a replay store of this version, or of another kind of database.
        """
        self._engine = open_engine(url, create=create)
        self._codec: Codec = JsonCodec() if codec is None else codec
        self._is_codec_fixed = codec is not None
        self._my_turn = turns_of(self._engine.url)
        self._worker = Worker("forebay-sql")
        self._writer = RowWriter(self._reading, self._writing)
        self._has_receipts = False
        self._rows = Sharing(self._prepare, self._writer.write)
        self._evictions = Sharing(int, lambda limits: evict_together(self._writing, limits, self._codec))

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
        [uid] = await self.put_many([item])
        return uid

    async def put_many(
        self, items: Sequence[StorageItem], *, receipt: bytes | None = None, aged_at: int | None = None
    ) -> list[int]:
        """See `StorageBackend.put_many`."""
        await self._prepare_receipts(receipt)
        uids: list[int] | StepPassed = await self._worker.share(self._rows, (tuple(items), receipt, aged_at))
        if isinstance(uids, StepPassed):
            raise uids
        return uids

    async def has_receipt(self, receipt: bytes) -> bool:
        """See `StorageBackend.has_receipt`."""
        await self._prepare_receipts(receipt)

        def work() -> bool:
            with self._reading() as connection:
                return has_receipt(connection, receipt)

        return await self._worker.call(work)

    async def _prepare_receipts(self, receipt: bytes | None) -> None:
        if receipt is not None and not self._has_receipts:
            await self._worker.call(partial(create_receipts, self._engine))
            self._has_receipts = True

    async def get(
        self, query: QueryLike, *, order: str | None = None, limit: int | None = None, rows_only: bool = False
    ) -> list[StorageItem]:
        """See `StorageBackend.get`."""
        ranking = Ranking.of(query, order, limit)

        def work() -> list[StorageItem]:
            with self._reading() as connection:
                rows = ranked_rows(connection, ranking, self._codec)
                if not rows_only:
                    attach_payloads(connection, rows, self._codec)
            return rows

        return await self._worker.call(work)

    async def count(self, query: QueryLike) -> int:
        """See `StorageBackend.count`."""
        [number] = await self.count_many([query])
        return number

    async def count_many(self, queries: Sequence[QueryLike]) -> list[int]:
        """See `StorageBackend.count_many`; all at one moment."""
        parsed = list(map(parse_query, queries))

        def work() -> list[int]:
            with self._reading() as connection:
                return [count_rows(connection, query, self._codec) for query in parsed]

        return await self._worker.call(work)

    async def take(
        self, uids: Iterable[int], *, query: QueryLike | None = None, train_step: int | None = None
    ) -> list[StorageItem]:
        """See `StorageBackend.take`."""
        parsed = None if query is None else parse_query(query)
        wanted = storable_uids(uids)

        def choose(connection: sa.Connection) -> list[StorageItem]:
            found = lock_rows(connection, wanted, self._codec, train_steps(connection))
            rows = [found[uid] for uid in wanted if uid in found]
            return [row for row in rows if parsed is None or matches(parsed, row)]

        return await self._take(choose, train_step, None)

    async def take_first(
        self, count: int, query: QueryLike, *, order: str | None = None, train_step: int | None = None
    ) -> list[StorageItem]:
        """See `StorageBackend.take_first`."""
        ranking = Ranking.of(query, order, count)
        choose = partial(ranked_rows, ranking=ranking, codec=self._codec, lock="skip")
        return await self._take(choose, train_step, ranking.query)

    async def take_drawn(
        self,
        count: int,
        query: QueryLike,
        random: Callable[[], float],
        *,
        train_step: int | None = None,
    ) -> list[StorageItem]:
        """See `StorageBackend.take_drawn`; of the rows that match, only ids and priorities are read."""
        parsed = parse_query(query)

        def read() -> SumTree:
            # Before the transaction that writes: it takes long where many rows match.
            with self._reading() as connection:
                return read_priorities(connection, parsed, self._codec)

        tree = await self._worker.call(read)
        drawing = partial(lock_drawn, tree=tree, query=parsed, count=count, random=random, codec=self._codec)
        return await self._take(drawing, train_step, None)

    async def update_priorities(self, priorities: Mapping[int, float]) -> int:
        """See `StorageBackend.update_priorities`."""
        wanted = dict(priorities)

        def work() -> int:
            with self._writing() as connection:
                return write_priorities(connection, wanted)

        return await self._worker.call(work)

    async def evict(self, limit: int) -> list[StorageItem]:
        """See `StorageBackend.evict`."""
        evicted: Evicted = await self._worker.share(self._evictions, limit, undo=self._give_back_evicted)
        if evicted.rows:
            # Only now: they are gone, whether their payloads can be read or not.
            try:
                await self._worker.call(partial(evicted.decode, self._codec))
            except asyncio.CancelledError:
                # Else nobody would be told of them.
                await self._worker.call_to_the_end(partial(self._give_back_evicted, evicted))
                raise
        return evicted.rows

    async def delete(self, uids: Iterable[int]) -> None:
        """See `StorageBackend.delete`."""
        wanted = storable_uids(uids)

        def work() -> None:
            with self._writing() as connection:
                found = lock_rows(connection, wanted, self._codec, {})
                delete_rows(connection, found)

        await self._worker.call(work)

    async def delete_where(self, query: QueryLike, *, receipt: bytes | None = None) -> int:
        """See `StorageBackend.delete_where`."""
        parsed = parse_query(query)
        await self._prepare_receipts(receipt)

        def work() -> int:
            with self._writing() as connection:
                uids = lock_matching(connection, parsed, self._codec)
                delete_rows(connection, uids)
                keep_receipts(connection, _listed(receipt))
            return len(uids)

        return await self._worker.call(work)

    async def update(self, items: Iterable[StorageItem]) -> None:
        """See `StorageBackend.update`."""
        await self._update(items, None, None)

    async def update_if(
        self, items: Iterable[StorageItem], query: QueryLike, *, receipt: bytes | None = None
    ) -> int:
        """See `StorageBackend.update_if`."""
        await self._prepare_receipts(receipt)
        return await self._update(items, parse_query(query), receipt)

    async def _update(self, items: Iterable[StorageItem], query: Query | None, receipt: bytes | None) -> int:
        listed = list(items)

        def work() -> int:
            rows = [prepare(item, self._codec, keep_payload=True) for item in listed]
            uids = storable_uids(row.uid for row in rows)
            with self._writing() as connection:
                found = lock_rows(connection, uids, self._codec, train_steps(connection))
                known = {uid for uid, row in found.items() if query is None or matches(query, row)}
                replace_rows(connection, [row for row in rows if row.uid in known])
                keep_receipts(connection, _listed(receipt))
            return len(known)

        return await self._worker.call(work)

    async def get_train_step(self, task_name: str) -> int | None:
        """See `StorageBackend.get_train_step`."""
        step: int | None = await self._worker.share(self._rows, GetTrainStep(task_name))
        return step

    async def set_train_step(self, task_name: str, train_step: int) -> None:
        """See `StorageBackend.set_train_step`."""
        await self._worker.share(self._rows, SetTrainStep(task_name, train_step))

    async def let_train_steps_fall(self) -> None:
        """See `StorageBackend.let_train_steps_fall`; for all processes."""

        def work() -> None:
            with self._writing() as connection:
                connection.execute(tasks.update().values(may_fall=1))

        await self._worker.call(work)

    def __len__(self) -> int:
        with self._reading() as connection:
            return count_live(connection)

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
        """See `StorageBackend.state_dict`; here it reads everything into memory.

        It must: the payloads outlive the transaction that read them, and the rows they were read from may be
        taken before the caller is done.
        """
        with self.reading_state() as state:
            return state | {"items": list(state["items"])}

    @contextmanager
    def reading_state(self) -> Iterator[dict[str, Any]]:
        """As `state_dict`, of this moment: payloads are read within the block, as the items are walked."""
        with self._reading() as connection:
            steps = train_steps(connection)
            # As given, and not as stale as now: whoever loads it knows the train steps, too.
            lines = connection.execute(select_rows().order_by(groups.c.timestamp_id))
            rows = list(read_rows(lines, self._codec, {}))
            following = next_ids(connection)
            yield {
                "version": STATE_VERSION,
                "items": StoredItems(rows, partial(attach_payloads, connection, codec=self._codec)),
                "next_uid": following["uid"],
                "next_timestamp_id": following["timestamp_id"],
                "train_steps": {name: step for name, step in steps.items() if step is not None},
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
            connection.execute(tasks.update().values(train_step=None, may_fall=0))
            raise_ids(connection, {name: state[f"next_{name}"] for name in ("uid", "timestamp_id")})
            insert_tasks(connection, (row.columns["task_name"] for row in rows))
            insert_rows(connection, rows, [(row.uid, row.timestamp_id) for row in rows])
            if steps:
                insert_or_update(connection, tasks, steps, "train_step")
        self._writer.forget()

    async def _take(
        self,
        choose: Callable[[sa.Connection], list[StorageItem]],
        train_step: int | None,
        query: Query | None,
    ) -> list[StorageItem]:
        """Remove or archive the rows that `choose` returns, locked, within the transaction.

        If all of them match `query`, an empty answer takes no turn to write: producers ask for interrupted
        groups before each new prompt, and there are hardly ever any.
        """

        def work() -> list[StorageItem]:
            if query is not None and not self._may_match(query):
                return []
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

    def _may_match(self, query: Query) -> bool:
        with self._reading() as connection:
            return has_rows(connection, query)

    def _give_back(self, items: list[StorageItem]) -> None:
        """Undo a take whose caller was cancelled."""
        with self._writing() as connection:
            self._put_back(connection, items)

    def _give_back_evicted(self, evicted: Evicted) -> None:
        """Undo an eviction whose caller was cancelled."""
        evicted.decode(self._codec)
        with self._writing() as connection:
            for row in evicted.rows:
                count_evicted(connection, row.task_name, -1)
            self._put_back(connection, evicted.rows)

    def _put_back(self, connection: sa.Connection, items: list[StorageItem]) -> None:
        rows = [prepare(item, self._codec) for item in items]
        delete_rows(connection, [row.uid for row in rows])
        insert_rows(connection, rows, [(row.uid, row.timestamp_id) for row in rows])

    def _prepare(self, content: tuple[Sequence[StorageItem], bytes | None, int | None] | Content) -> Content:
        if not isinstance(content, tuple):
            return content
        items, receipt, aged_at = content
        return PreparedRows([prepare(item, self._codec) for item in items], receipt, aged_at)

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
        with (
            self._my_turn(),
            self._engine.connect().execution_options(forebay_write=True) as connection,
            connection.begin(),
        ):
            yield connection


def _listed(receipt: bytes | None) -> list[bytes]:
    return [] if receipt is None else [receipt]
