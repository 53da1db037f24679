"""A store in a database: a SQLite file, or PostgreSQL by URL; what it returned from survives the process.

::

    put ---------> list --+   a thread (`worker`)           +--> groups, tags     light rows, with indexes
    put ---------> list --+-> prepare all, one commit ------+--> payloads         bytes, read when taken
    set_train_step list --+                                 +--> tasks            train steps, evictions
    take_first, get, ... ---> a transaction each

It is not a cache: nothing of the content is held in memory, so several processes may use one database at the
same time. It knows no rollouts: a `Codec` makes bytes of payloads (a `ReplayBuffer` hands it one for groups).

Writers. Puts that wait at the same time share a commit (`writes`). On SQLite a write transaction has the file
alone and others wait for their turn (`connections`; readers never wait: write-ahead log). On PostgreSQL rows
are locked one by one, and `take_first` passes over those that another taker holds (``FOR UPDATE SKIP
LOCKED``).

Reading. Queries are compiled to SQL (`query`): counts, orders and limits are the database's work.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

import sqlalchemy as sa

from forebay.replay.query import Query, QueryLike, matches, parse_query
from forebay.replay.stores.contract import STATE_VERSION, Codec, StorageBackend, StorageItem
from forebay.replay.stores.errors import StoreBusy
from forebay.replay.stores.sql import ranking, writes
from forebay.replay.stores.sql import rows as sql_rows
from forebay.replay.stores.sql.connections import Transactions, open_engine
from forebay.replay.stores.sql.direct import Connection
from forebay.replay.stores.sql.query import needs_scan
from forebay.replay.stores.sql.schema import ID_NAMES, groups, insert_or_update, meta, payloads, receipts, tags, tasks
from forebay.replay.stores.sql.worker import Worker
from forebay.replay.stores.state import check_state

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


class SQLStorage(StorageBackend):
    """Rows and payloads in a SQLite file or a PostgreSQL database, shared by any number of processes.

    Every method but the plain ones (``len()``, `num_evicted`, `state_dict`, `load_state_dict`, `close`)
    leaves the event loop free, but for short questions to a small SQLite file, which take up to 5 ms;
    the plain ones wait for the database. A call returns after its commit. A power
    cut may undo the last commits of a SQLite file; of ``sqlite:///PATH?synchronous=full`` it undoes none.
    """

    keeps_receipts = True
    is_shared = True
    is_durable = True

    def __init__(self, url: str | os.PathLike[str] | sa.URL, *, create: bool = True) -> None:
        """Open the database, and make its tables if it has none and `create` says so.

        Raises:
            FileNotFoundError: there is no such file, and it is not to be created.
            ValueError: it is not a replay store of this version, or of another kind of database.
        """
        self._engine = open_engine(url, create=create)
        self._glances = self._engine.dialect.name == "sqlite"
        self.codec: Codec = self.plain_codec()
        self._transactions = Transactions(self._engine)
        self._reading, self._writing = self._transactions.reading, self._transactions.writing
        self._worker = Worker("forebay-sql")
        self._reader = Worker("forebay-sql-read", changes_nothing=True)
        self._write_together = partial(writes.write_together, self._transactions)

    def close(self) -> None:
        """Finish the calls that were made, end the threads, close the connections."""
        # First the threads, then the connections that they use.
        self._worker.close()
        self._reader.close()
        self._transactions.close()
        self._engine.dispose()

    async def claim(self) -> None:
        await self._worker.call(self.claim_now)

    def claim_now(self) -> None:
        """`claim`, in the calling thread."""
        self._transactions.claim()

    async def put(self, item: StorageItem) -> int:
        [uid] = await self.put_many([item])
        return uid

    async def put_many(
        self, items: Sequence[StorageItem], *, receipt: bytes | None = None, aged_at: int | None = None
    ) -> list[int]:
        def make() -> writes.Write:
            rows = [sql_rows.prepare(item, self.codec) for item in items]
            return writes.Write(frozenset(item.task_name for item in items), rows, receipt, aged_at)

        uids: list[int] = await self._worker.share(self._write_together, make)
        return uids

    async def has_receipt(self, receipt: bytes) -> bool:
        return await self._read(lambda connection: connection.scalar(_RECEIPT, {"kept": receipt}) is not None)

    async def get(
        self, query: QueryLike, *, order: str | None = None, limit: int | None = None, rows_only: bool = False
    ) -> list[StorageItem]:
        asked = ranking.Ranking.of(query, order, limit)

        def work(connection: Connection) -> list[StorageItem]:
            rows = ranking.ranked_rows(connection, asked, self.codec)
            if not rows_only:
                sql_rows.attach_payloads(connection, rows, self.codec)
            return rows

        if rows_only and limit is not None and limit <= FEW_LINES:
            return await self._look(work, [asked.query])
        return await self._read(work)

    async def count(self, query: QueryLike) -> int:
        [number] = await self.count_many([query])
        return number

    async def count_many(self, queries: Sequence[QueryLike]) -> list[int]:
        """How many rows match each query, all counted at one moment."""
        parsed = list(map(parse_query, queries))
        if self._glances:
            numbers = ranking.count_cells(await self._ask(ranking.CELLS), parsed)
            if numbers is not None:
                return numbers
        return await self._look(lambda connection: ranking.count_rows(connection, parsed, self.codec), parsed)

    async def take(
        self, uids: Iterable[int], *, query: QueryLike | None = None, train_step: int | None = None
    ) -> list[StorageItem]:
        parsed = None if query is None else parse_query(query)
        wanted = sql_rows.storable_uids(uids)

        def choose(connection: Connection) -> list[StorageItem]:
            found = sql_rows.lock_rows(connection, wanted, self.codec, ranking.train_steps(connection))
            rows = [found[uid] for uid in wanted if uid in found]
            return [row for row in rows if parsed is None or matches(parsed, row)]

        return await self._take(choose, train_step)

    async def take_first(
        self, count: int, query: QueryLike, *, order: str | None = None, train_step: int | None = None
    ) -> list[StorageItem]:
        asked = ranking.Ranking.of(query, order, count)
        return await self._take(
            lambda connection: ranking.ranked_rows(connection, asked, self.codec, lock="skip"), train_step
        )

    async def take_drawn(
        self, count: int, query: QueryLike, random: Callable[[], float], *, train_step: int | None = None
    ) -> list[StorageItem]:
        """Of the rows that match, only ids and priorities are read."""
        parsed = parse_query(query)
        # Before the transaction that writes: it takes long where many rows match.
        tree = await self._read(partial(ranking.read_priorities, query=parsed, codec=self.codec))
        drawing = partial(ranking.lock_drawn, tree=tree, query=parsed, count=count, random=random, codec=self.codec)
        return await self._take(drawing, train_step)

    async def update_priorities(self, priorities: Mapping[int, float]) -> int:
        return await self._write(partial(sql_rows.write_priorities, priorities=dict(priorities)))

    async def evict(self, limit: int) -> list[StorageItem]:
        try:
            evicted: sql_rows.Removed = await self._worker.share(self._evict, lambda: limit, undo=self._give_back)
        except StoreBusy as error:
            # Of a put that is stored, and would be repeated; the next one evicts what is too many by then.
            _log.warning("the buffer holds more than its limit of %d groups for now: %s", limit, error)
            return []
        return evicted.rows

    async def delete(self, uids: Iterable[int]) -> None:
        wanted = sql_rows.storable_uids(uids)
        await self._write(
            lambda connection: sql_rows.delete_rows(connection, sql_rows.lock_rows(connection, wanted, self.codec, {}))
        )

    async def delete_where(
        self, query: QueryLike, *, receipt: bytes | None = None, expected: int | None = None
    ) -> int:
        parsed = parse_query(query)

        def work(connection: Connection) -> int:
            uids = ranking.lock_matching(connection, parsed, self.codec)
            if expected in (None, len(uids)):
                sql_rows.delete_rows(connection, uids)
                writes.keep_receipts(connection, receipt)
            return len(uids)

        return await self._write(work)

    async def update(self, items: Iterable[StorageItem]) -> None:
        await self.update_if(items, None)

    async def update_if(
        self,
        items: Iterable[StorageItem],
        query: QueryLike | None,
        *,
        receipt: bytes | None = None,
        expected: int | None = None,
    ) -> int:
        parsed = None if query is None else parse_query(query)
        listed = list(items)

        def work() -> int:
            # Before the transaction: encoding takes time, and other writers wait for their turn.
            rows = [sql_rows.prepare(item, self.codec, keep_payload=True) for item in listed]
            uids = sql_rows.storable_uids(row.uid for row in rows)
            with self._writing() as connection:
                found = sql_rows.lock_rows(connection, uids, self.codec, ranking.train_steps(connection))
                known = {uid for uid, row in found.items() if parsed is None or matches(parsed, row)}
                if expected in (None, len(known)):
                    sql_rows.replace_rows(connection, [row for row in rows if row.uid in known])
                    writes.keep_receipts(connection, receipt)
            return len(known)

        return await self._worker.call(work)

    async def get_train_step(self, task_name: str) -> int | None:
        return {line[0]: line[1] for line in await self._ask(ranking.STEPS)}.get(task_name)

    async def set_train_step(self, task_name: str, train_step: int) -> None:
        said = writes.Write(frozenset([task_name]), train_step=train_step)
        # Most calls name the step that stands already; SQLite tells so for far less than a write costs.
        if not self._glances or writes.later_steps(await self._ask(ranking.STEPS), [said]):
            await self._worker.share(self._write_together, lambda: said)

    async def let_train_steps_fall(self) -> None:
        """Let train steps fall, for all processes that use the database."""
        await self._write(lambda connection: connection.execute(tasks.update().values(may_fall=1)))

    def __len__(self) -> int:
        with self._reading() as connection:
            return ranking.count_live(connection, self.codec)

    @property
    def num_evicted(self) -> dict[str, int]:
        """Groups evicted by task, by all processes since the database was made."""
        counts = sa.select(tasks.c.task_name, tasks.c.num_evicted).where(tasks.c.num_evicted > 0)
        with self._reading() as connection:
            return dict(connection.execute(counts).fetchall())

    @num_evicted.setter
    def num_evicted(self, counts: Mapping[str, int]) -> None:
        rows = [{"task_name": name, "num_evicted": counts[name]} for name in sorted(counts)]
        with self._writing() as connection:
            connection.execute(tasks.update().values(num_evicted=0))
            if rows:
                insert_or_update(connection, tasks, rows, "num_evicted")

    @property
    def holder(self) -> str | None:
        """The name of the run whose groups these are, as it was set; None: of none."""
        with self._reading() as connection:
            name: str | None = connection.scalar(sa.select(meta.c.value).where(meta.c.name == HOLDER))
        return name

    @holder.setter
    def holder(self, name: str | None) -> None:
        with self._writing() as connection:
            insert_or_update(connection, meta, [{"name": HOLDER, "value": name}], "value")

    def state_dict(self) -> dict[str, Any]:
        """Here it reads everything into memory.

        It must: the payloads outlive the transaction that read them, and the rows they were read from may be
        taken before the caller is done.
        """
        with self.reading_state() as state:
            return state | {"items": list(state["items"])}

    @contextmanager
    def reading_state(self) -> Iterator[dict[str, Any]]:
        """As `state_dict`, of this moment: payloads are read within the block, as the items are walked."""
        with self._reading() as connection:
            steps = ranking.train_steps(connection)
            # As given, and not as stale as now: whatever loads it knows the train steps, too.
            lines = connection.execute(sql_rows.SELECT_ROWS.order_by(groups.c.timestamp_id))
            rows = list(sql_rows.read_rows(lines, self.codec, {}))
            yield {
                "version": STATE_VERSION,
                "items": self._with_payloads(connection, rows),
                **{f"next_{name}": following for name, following in sql_rows.next_ids(connection).items()},
                "train_steps": {name: step for name, step in steps.items() if step is not None},
            }

    def _with_payloads(self, connection: Connection, rows: list[StorageItem]) -> Iterator[StorageItem]:
        """The rows, which get their payloads when they are walked; ValueError if one is damaged."""
        # Popped from the end, so that no list holds a row that was walked already.
        rows.reverse()
        while items := [rows.pop() for _ in range(min(GROUPS_AT_ONCE, len(rows)))]:
            sql_rows.attach_payloads(connection, items, self.codec)
            items.reverse()
            while items:
                yield items.pop()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rows = [sql_rows.prepare(item, self.codec) for item in check_state(state)]
        steps = [{"task_name": name, "train_step": step} for name, step in sorted(state["train_steps"].items())]
        with self._writing() as connection:
            for table in (tags, payloads, groups):
                connection.execute(table.delete())
            connection.execute(tasks.update().values(train_step=None, may_fall=0))
            sql_rows.raise_ids(connection, {name: state[f"next_{name}"] for name in ID_NAMES})
            sql_rows.insert_tasks(connection, (row.columns["task_name"] for row in rows))
            sql_rows.insert_rows(connection, rows)
            if steps:
                insert_or_update(connection, tasks, steps, "train_step")

    async def _ask(self, statement: sa.Select[Any]) -> Sequence[Any]:
        """The few lines of `statement`, which names no values."""

        def work(connection: Connection) -> Sequence[Any]:
            return connection.execute(statement).fetchall()

        return self._read_here(work) if self._glances else await self._read(work)

    async def _look(self, work: Callable[[Connection], Result], queries: Sequence[Query]) -> Result:
        """As `_read`, of rows alone; in a small database here, because a change of threads would take longer."""
        if self._glances and not any(needs_scan(query) or len(repr(query)) > ranking.MAX_KEPT for query in queries):
            cells = await self._ask(ranking.CELLS)
            if sum([number for _, _, number in cells]) <= FEW_ROWS:
                return self._read_here(work)
        return await self._read(work)

    def _read_here(self, work: Callable[[Connection], Result]) -> Result:
        # A writer does not block readers (write-ahead log).
        self._reader.require_open()
        return _within(self._reading, work)

    async def _read(self, work: Callable[[Connection], Result]) -> Result:
        """`work(connection)` in a transaction, in the thread that only reads."""
        return await self._reader.call(partial(_within, self._reading, work))

    async def _write(self, work: Callable[[Connection], Result]) -> Result:
        """`work(connection)` in a transaction, in the thread that writes."""
        return await self._worker.call(partial(_within, self._writing, work))

    async def _take(
        self, choose: Callable[[Connection], list[StorageItem]], train_step: int | None
    ) -> list[StorageItem]:
        """Remove or archive the rows that `choose` returns, locked, within the transaction."""

        def work() -> sql_rows.Removed:
            taken = sql_rows.Removed([], {}, train_step)
            try:
                with self._writing() as connection:
                    rows = choose(connection)
                    uids = [row.uid for row in rows]
                    data = sql_rows.read_payloads(connection, uids)
                    for uid in uids:
                        # Before the commit: a payload that cannot be read must not cost its group.
                        data[uid] = sql_rows.StoredPayload(data[uid].checked(uid), None)
                    if train_step is None:
                        sql_rows.delete_rows(connection, uids)
                    else:
                        sql_rows.archive_rows(connection, uids, train_step)
                    taken.rows.extend(rows)
                    taken.data.update(data)
                # After the commit, because others wait for it, and this takes longer.
                taken.decode(self.codec)
            except BaseException:
                # No caller is going to have these groups, whether they were committed or not.
                if taken.rows:
                    self._give_back(taken)
                raise
            return taken

        return (await self._worker.call(work, undo=self._give_back)).rows

    def _give_back(self, removed: sql_rows.Removed) -> None:
        """Undo a take or an eviction of which no caller is told; a later owner may have the groups."""
        with self._writing(is_fenced=False) as connection:
            if removed.is_evicted:
                writes.count_evicted(connection, removed.rows, -1)
            removed.put_back(connection, self.codec)

    def _evict(self, limits: list[int]) -> list[sql_rows.Removed]:
        evicted = writes.evict_together(self._transactions, limits, self.codec)
        for removed in evicted:
            for row in removed.rows:
                # Only after the commit: they are gone, whether their payloads can be read or not. An error
                # would be that of a put that is stored, and hide the other rows.
                try:
                    sql_rows.Removed([row], removed.data).decode(self.codec)
                except ValueError as error:
                    _log.warning("an evicted group is known by its row alone: %s", error)
        return evicted


def _within(begin: Callable[[], AbstractContextManager[Connection]], work: Callable[[Connection], Result]) -> Result:
    with begin() as connection:
        return work(connection)


_RECEIPT = sa.select(receipts.c.at).where(receipts.c.receipt == sa.bindparam("kept"))
HOLDER = "holder"
"""The name of its line in the table of facts about the store."""
FEW_ROWS, FEW_LINES = 4096, 64
"""Rows of a database, and lines of an answer, that a short query reads in 0.3 ms, and with several tags in 5."""
GROUPS_AT_ONCE = 32
"""Payloads of a save in memory beyond those that its writer holds: of long groups, of 5 MB each, 160 MB."""
