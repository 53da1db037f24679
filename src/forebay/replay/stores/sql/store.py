"""A store in a database: a SQLite file, or PostgreSQL by URL; what it returned from survives the process.

::

    put ---------> queue --+   a thread (`sql_worker`)      +--> groups, tags     light rows, with indexes
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
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import sqlalchemy as sa

from forebay.replay.query import Query, QueryLike, matches, parse_query
from forebay.replay.stores.contract import STATE_VERSION, Codec, StorageBackend, StorageItem
from forebay.replay.stores.errors import StepPassed
from forebay.replay.stores.row_book import check_state
from forebay.replay.stores.sql.connections import Links
from forebay.replay.stores.sql.ids import next_ids, raise_ids
from forebay.replay.stores.sql.ranking import (
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
from forebay.replay.stores.sql.rows import (
    Removed,
    archive_rows,
    attach_payloads,
    delete_rows,
    insert_rows,
    insert_tasks,
    lock_rows,
    prepare,
    put_back,
    read_payloads,
    read_rows,
    replace_rows,
    select_rows,
    storable_uids,
    write_priorities,
)
from forebay.replay.stores.sql.schema import (
    groups,
    insert_or_update,
    is_in_memory,
    open_engine,
    payloads,
    tags,
    tasks,
)
from forebay.replay.stores.sql.shared import (
    Content,
    GetTrainStep,
    PreparedRows,
    RowWriter,
    SetTrainStep,
    count_evicted,
    evict_together,
    has_receipt,
    keep_receipts,
)
from forebay.replay.stores.sql.state import StoredItems
from forebay.replay.stores.sql.transactions import JsonCodec, Transactions
from forebay.replay.stores.sql.worker import Sharing, Worker
from forebay.replay.stores.sum_tree import SumTree

Result = TypeVar("Result")


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
        self._transactions = Transactions(self._engine)
        self._reading, self._writing = self._transactions.reading, self._transactions.writing
        links = Links(self._engine) if self._engine.dialect.name == "postgresql" else None
        self._worker = Worker("forebay-sql", links)
        self._reader = Worker("forebay-sql-read", links, changes_nothing=True)
        # An SQLite database in memory lives as long as a connection.
        self._keeper = self._engine.connect() if is_in_memory(self._engine.url) else None
        self._writer = RowWriter(self._reading, self._writing)
        self._rows = Sharing(self._prepare, self._writer.write)
        self._evictions = Sharing(int, lambda limits: evict_together(self._writing, limits, self._codec))

    def use_codec(self, codec: Codec) -> None:
        """Payloads are what `codec` says, unless the store was built with a codec."""
        if not self._is_codec_fixed:
            self._codec = codec

    def close(self) -> None:
        """Finish what was called, end the threads, close the connections."""
        for worker in (self._worker, self._reader):
            worker.close()
        if self._keeper is not None:
            self._keeper.close()
        self._engine.dispose()

    async def claim(self) -> None:
        """See `StorageBackend.claim`."""
        await self._worker.call(self._transactions.claim)

    async def put(self, item: StorageItem) -> int:
        """See `StorageBackend.put`."""
        [uid] = await self.put_many([item])
        return uid

    async def put_many(
        self, items: Sequence[StorageItem], *, receipt: bytes | None = None, aged_at: int | None = None
    ) -> list[int]:
        """See `StorageBackend.put_many`."""
        uids: list[int] | StepPassed = await self._worker.share(self._rows, (tuple(items), receipt, aged_at))
        if isinstance(uids, StepPassed):
            raise uids
        return uids

    async def has_receipt(self, receipt: bytes) -> bool:
        """See `StorageBackend.has_receipt`."""

        def work() -> bool:
            with self._reading() as connection:
                return has_receipt(connection, receipt)

        return await self._reader.call(work)

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

        return await self._reader.call(work)

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

        return await self._reader.call(work)

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

        tree = await self._reader.call(read)
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
        evicted: Removed = await self._worker.share(self._evictions, limit, undo=self._give_back_evicted)
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

    async def delete_where(
        self, query: QueryLike, *, receipt: bytes | None = None, expected: int | None = None
    ) -> int:
        """See `StorageBackend.delete_where`."""
        parsed = parse_query(query)

        def work() -> int:
            with self._writing() as connection:
                uids = lock_matching(connection, parsed, self._codec)
                if expected in (None, len(uids)):
                    delete_rows(connection, uids)
                    keep_receipts(connection, _listed(receipt))
            return len(uids)

        return await self._worker.call(work)

    async def update(self, items: Iterable[StorageItem]) -> None:
        """See `StorageBackend.update`."""
        await self._update(items, None)

    async def update_if(
        self,
        items: Iterable[StorageItem],
        query: QueryLike,
        *,
        receipt: bytes | None = None,
        expected: int | None = None,
    ) -> int:
        """See `StorageBackend.update_if`."""
        return await self._update(items, parse_query(query), receipt, expected)

    async def _update(
        self,
        items: Iterable[StorageItem],
        query: Query | None,
        receipt: bytes | None = None,
        expected: int | None = None,
    ) -> int:
        listed = list(items)

        def work() -> int:
            rows = [prepare(item, self._codec, keep_payload=True) for item in listed]
            uids = storable_uids(row.uid for row in rows)
            with self._writing() as connection:
                found = lock_rows(connection, uids, self._codec, train_steps(connection))
                known = {uid for uid, row in found.items() if query is None or matches(query, row)}
                if expected in (None, len(known)):
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

        def work() -> Removed:
            if query is not None and not self._may_match(query):
                return Removed([], {})
            taken = Removed([], {}, train_step)
            try:
                with self._writing() as connection:
                    self._remove(connection, choose(connection), taken)
            except sa.exc.DBAPIError as error:
                if error.connection_invalidated:
                    # Whether it was committed is not known, and nobody is going to have these groups.
                    self._give_back(taken)
                raise
            try:
                # After it, because others wait for the commit, and this takes longer.
                taken.decode(self._codec)
            except BaseException:
                self._give_back(taken)
                raise
            return taken

        return (await self._worker.call(work, undo=self._give_back)).rows

    def _remove(self, connection: sa.Connection, rows: list[StorageItem], taken: Removed) -> None:
        """Remove or archive the rows; afterwards they are in `taken`, with the bytes of their payloads."""
        uids = [row.uid for row in rows]
        data = read_payloads(connection, uids)
        for uid in uids:
            # Before the commit: a payload that cannot be read must not cost its group.
            data[uid].checked(uid)
        if taken.train_step is None:
            delete_rows(connection, uids)
        else:
            archive_rows(connection, uids, taken.train_step)
        taken.rows.extend(rows)
        taken.data.update(data)

    def _may_match(self, query: Query) -> bool:
        with self._reading() as connection:
            return has_rows(connection, query)

    def _give_back(self, taken: Removed) -> None:
        """Undo a take whose caller was cancelled, or that could not be decoded; a later owner may have it."""
        rows = taken.prepared(self._codec)
        with self._writing(is_fenced=False) as connection:
            put_back(connection, taken, rows, self._codec)

    def _give_back_evicted(self, evicted: Removed) -> None:
        """Undo an eviction whose caller was cancelled."""
        rows = evicted.prepared(self._codec)
        with self._writing(is_fenced=False) as connection:
            for row in evicted.rows:
                count_evicted(connection, row.task_name, -1)
            put_back(connection, evicted, rows, self._codec)

    def _prepare(self, content: tuple[Sequence[StorageItem], bytes | None, int | None] | Content) -> Content:
        if not isinstance(content, tuple):
            return content
        items, receipt, aged_at = content
        return PreparedRows([prepare(item, self._codec) for item in items], receipt, aged_at)


def _listed(receipt: bytes | None) -> list[bytes]:
    return [] if receipt is None else [receipt]
