"""What the callers of a SQL store share a transaction for: puts and train steps; evictions.

::

    put, set_train_step, get_train_step --+-- all that wait --> RowWriter.write --> one commit
    evict --------------------------------+-- all that wait --> evict_together --> one commit

Evictions have a transaction of their own, so that one that fails costs no put.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice

import sqlalchemy as sa

from forebay.replay.sql_ids import next_ids, reserve_ids
from forebay.replay.sql_ranking import Ranking, count_live, ranked_rows, train_steps
from forebay.replay.sql_rows import (
    PreparedRow,
    decode_payload,
    delete_rows,
    insert_rows,
    insert_tasks,
    read_payloads,
)
from forebay.replay.sql_schema import (
    EVICT_LOCK,
    LIVE,
    groups,
    insert_missing,
    insert_or_update,
    receipts,
    tasks,
)
from forebay.replay.storage import ARRIVAL, Codec, StorageItem

RECEIPT_S = 3600
"""Who asks does so as soon as the buffer's server has been started again."""

Open = Callable[[], AbstractContextManager[sa.Connection]]
"""Begins a transaction, which ends with the context."""


@dataclass(frozen=True, slots=True)
class SetTrainStep:
    """A call of `StorageBackend.set_train_step`."""

    task_name: str
    train_step: int


@dataclass(frozen=True, slots=True)
class GetTrainStep:
    """A call of `StorageBackend.get_train_step`."""

    task_name: str


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """The rows of a call of `StorageBackend.put_many`, which are written together."""

    rows: list[PreparedRow]
    receipt: bytes | None = None


Content = PreparedRows | SetTrainStep | GetTrainStep


class RowWriter:
    """Writes rows and train steps, many in one transaction; remembers what it need not write again.

    A task that is known stays known, and its name is written once. A train step that this store has written,
    and that nobody here was told to change since, is not written again. (Another process may have set a later
    one meanwhile; that stands, as the latest that was seen.)

    >>> writer = RowWriter(reading, writing)
    >>> [uid], _ = writer.write([PreparedRows([prepare(item, codec)]), SetTrainStep("math", 4)])
    """

    def __init__(self, reading: Open, writing: Open) -> None:
        self._reading = reading
        self._writing = writing
        self._known_tasks: set[str] = set()
        self._steps: dict[str, int] = {}

    def has_written(self, step: SetTrainStep) -> bool:
        """Whether the train step is the last one that was written here."""
        return self._steps.get(step.task_name) == step.train_step

    def forget(self) -> None:
        """The content was replaced."""
        self._known_tasks.clear()
        self._steps.clear()

    def write(self, contents: Sequence[Content]) -> list[list[int] | int | None]:
        """The uids of all rows and the train step of each question, as if done in this order."""
        rows = [row for content in contents if isinstance(content, PreparedRows) for row in content.rows]
        set_steps = [content for content in contents if isinstance(content, SetTrainStep)]
        asks = any(isinstance(content, GetTrainStep) for content in contents)
        kept = [c.receipt for c in contents if isinstance(c, PreparedRows) and c.receipt is not None]
        with (self._writing if rows or set_steps or kept else self._reading)() as connection:
            steps = train_steps(connection) if asks else {}
            names = {row.columns["task_name"] for row in rows} - self._known_tasks
            ids = reserve_ids(connection, [(row.uid, row.timestamp_id) for row in rows]) if rows else []
            insert_tasks(connection, names)
            insert_rows(connection, rows, ids)
            keep_receipts(connection, kept)
            written = {step.task_name: step.train_step for step in set_steps}
            if written:
                lines = [{"task_name": name, "train_step": written[name]} for name in sorted(written)]
                insert_or_update(connection, tasks, lines, "train_step")
        # Only now it is certain.
        self._known_tasks |= names
        self._steps |= written
        uids = iter(uid for uid, _ in ids)
        return [
            list(islice(uids, len(content.rows)))
            if isinstance(content, PreparedRows)
            else _step(content, steps)
            for content in contents
        ]


def keep_receipts(connection: sa.Connection, kept: Sequence[bytes]) -> None:
    """Remember that what these are of has happened; now and then, forget what is old."""
    if not kept:
        return
    now = int(time.time())
    insert_missing(connection, receipts, [{"receipt": receipt, "at": now} for receipt in kept])
    if kept[0][-1] == 0:
        # One in 256, as they are random: of an hour, there may be many.
        connection.execute(receipts.delete().where(receipts.c.at < now - RECEIPT_S))


def has_receipt(connection: sa.Connection, receipt: bytes) -> bool:
    """Whether what the receipt is of has happened."""
    found = sa.select(receipts.c.at).where(receipts.c.receipt == receipt)
    return connection.scalar(found) is not None


def _step(content: SetTrainStep | GetTrainStep, steps: dict[str, int | None]) -> int | None:
    if isinstance(content, SetTrainStep):
        steps[content.task_name] = content.train_step
        return None
    return steps.get(content.task_name)


@dataclass(frozen=True, slots=True)
class Evicted:
    """Rows that one call of `StorageBackend.evict` removed, and the bytes of their payloads."""

    rows: list[StorageItem]
    data: dict[int, bytes]

    def decode(self, codec: Codec) -> None:
        """Give the rows their payloads; ValueError if one is damaged."""
        for row in self.rows:
            row.item = decode_payload(row.uid, self.data[row.uid], codec)


def evict_together(writing: Open, limits: Sequence[int], codec: Codec) -> list[Evicted]:
    """Evict until so many live rows are left, and count it; the first of equal calls gets what is removed."""
    evicted: list[Evicted] = []
    with writing() as connection:
        if connection.dialect.name == "postgresql":
            # Two that count at once would both remove the excess.
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(EVICT_LOCK)))
        reached: int | None = None
        for limit in limits:
            if reached is not None and limit >= reached:
                evicted.append(Evicted([], {}))
                continue
            evicted.append(_evict(connection, limit, codec))
            reached = limit
    return evicted


def _evict(connection: sa.Connection, limit: int, codec: Codec) -> Evicted:
    if _at_most_live(connection) <= limit:
        return Evicted([], {})
    excess = count_live(connection) - limit
    rows = ranked_rows(connection, Ranking.of({}, ARRIVAL, excess), codec, lock="wait")
    if connection.dialect.name == "postgresql":
        # It waited for takers of these rows, who may have left less to evict than was counted before.
        rows = rows[: max(0, count_live(connection) - limit)]
    data = read_payloads(connection, [row.uid for row in rows])
    delete_rows(connection, [row.uid for row in rows])
    for name in sorted({row.task_name for row in rows}):
        count_evicted(connection, name, sum(row.task_name == name for row in rows))
    return Evicted(rows, data)


def count_evicted(connection: sa.Connection, task_name: str, number: int) -> None:
    """Add to the evictions of the task."""
    connection.execute(
        tasks.update().where(tasks.c.task_name == task_name).values(num_evicted=tasks.c.num_evicted + number)
    )


def _at_most_live(connection: sa.Connection) -> int:
    """A bound of the number of live rows, from the ids of the oldest one and of the next; reads no others."""
    oldest = sa.select(groups.c.timestamp_id).where(LIVE).order_by(groups.c.timestamp_id).limit(1)
    first = connection.scalar(oldest)
    return 0 if first is None else next_ids(connection)["timestamp_id"] - first
