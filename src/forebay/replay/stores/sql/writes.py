"""Transactions that callers of a SQL store share: of puts and train steps, and of evictions.

::

    put, set_train_step --+-- all that wait --> write_together --> one commit
    evict ----------------+-- all that wait --> evict_together --> one commit

Evictions have a transaction of their own, so that one that fails costs no put.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa

from forebay.replay.stores.contract import ARRIVAL, Codec, StorageItem
from forebay.replay.stores.errors import StepPassed
from forebay.replay.stores.sql import rows as sql_rows
from forebay.replay.stores.sql.connections import Transactions
from forebay.replay.stores.sql.direct import Connection
from forebay.replay.stores.sql.ranking import STEPS, Ranking, count_live, ranked_rows
from forebay.replay.stores.sql.schema import EVICT_LOCK, LIVE, groups, insert_missing, receipts, tasks

RECEIPT_S = 3600
"""A client asks for its receipt as soon as the buffer's server has been started again."""


@dataclass(frozen=True, slots=True)
class Write:
    """Rows to be put, or without rows the train step of a task."""

    task_names: frozenset[str]
    rows: list[sql_rows.PreparedRow] | None = None
    """Written together, or not at all."""
    receipt: bytes | None = None
    train_step: int | None = None
    """Becomes the step of the tasks, if it is later. Rows were judged at this step."""


def write_together(transactions: Transactions, writes: Sequence[Write]) -> list[list[int] | StepPassed | None]:
    """Write rows and train steps, many in one transaction; return an answer to each of `writes`.

    The answer is the uids of the rows, or why they are not written, or None where there are none. A train
    step is written if it is later than the one in the database, whichever process wrote that. Rows that were
    judged at an older step than that of their task are not written.
    """
    with transactions.writing() as connection:
        # First, so that rows are judged also by the steps that others name in this transaction.
        steps = raise_steps(connection, writes)
        answers = [_answer(write, steps) for write in writes]
        rows = [row for answer in answers if isinstance(answer, list) for row in answer]
        sql_rows.give_ids(connection, rows)
        sql_rows.insert_rows(connection, rows)
        stored = (write for write, answer in zip(writes, answers, strict=True) if answer is write.rows)
        keep_receipts(connection, *(write.receipt for write in stored))
    return [[row.uid for row in answer] if isinstance(answer, list) else answer for answer in answers]


def _answer(write: Write, steps: Mapping[str, int | None]) -> list[sql_rows.PreparedRow] | StepPassed | None:
    """The rows if they are to be written, or why they are not."""
    if write.rows is None:
        return None
    reached = max((steps.get(task) or 0 for task in write.task_names), default=0)
    is_passed = write.train_step is not None and reached > write.train_step
    return StepPassed(reached) if is_passed else write.rows


def later_steps(lines: Sequence[Any], writes: Sequence[Write]) -> dict[str, int]:
    """The named train steps that take the place of those in `lines`, which are answers to `STEPS`."""
    stands = {task: step for task, step, may_fall in lines if step is not None and not may_fall}
    later: dict[str, int] = {}
    for task, step in ((task, write.train_step) for write in writes for task in write.task_names):
        if step is not None and step > stands.get(task, step - 1):
            later[task] = stands[task] = step
    return later


def raise_steps(connection: Connection, writes: Sequence[Write]) -> dict[str, int | None]:
    """Write the later steps; the train steps of all tasks, of which the named ones stay until the commit.

    On PostgreSQL another process may name a later step at the same time, and expire what is too old by then.
    It must either be seen here, or wait until the rows of this transaction can be seen there. Tasks are
    locked one after another in one order, and none twice, so that two processes never wait for each other.
    """
    lines = connection.execute(STEPS).fetchall()
    steps: dict[str, int | None] = {task: step for task, step, _ in lines}
    later = later_steps(lines, writes)
    sql_rows.insert_tasks(connection, {task for write in writes for task in write.task_names} - steps.keys())
    is_postgres = connection.dialect.name == "postgresql"
    named = {task for write in writes if write.train_step is not None for task in write.task_names}
    # SQLite has one writer at a time: a step that is not raised need not be locked there.
    for task in sorted(named if is_postgres else later):
        if task in later:
            connection.execute(_RAISE, {"task": task, "step": later[task]})
            steps[task] = later[task]
        if is_postgres:
            steps[task] = connection.scalar(_HELD, {"task": task})
    return steps


_OF_TASK, _STEP = tasks.c.task_name == sa.bindparam("task"), sa.bindparam("step", type_=sa.BigInteger())
_RAISE = (
    tasks.update()
    .where(_OF_TASK, sa.or_(tasks.c.train_step.is_(None), tasks.c.train_step < _STEP, tasks.c.may_fall == 1))
    .values(train_step=_STEP, may_fall=0)
)
_HELD = sa.select(tasks.c.train_step).where(_OF_TASK).with_for_update(read=True)


def keep_receipts(connection: Connection, *kept: bytes | None) -> None:
    """Remember that the calls with these receipts have happened; now and then, forget the old ones."""
    now = int(time.time())
    lines = [{"receipt": receipt, "at": now} for receipt in kept if receipt is not None]
    if lines:
        insert_missing(connection, receipts, lines)
    if any(receipt is not None and receipt[-1] == 0 for receipt in kept):
        # One in 256, as they are random: an hour may leave many.
        connection.execute(receipts.delete().where(receipts.c.at < now - RECEIPT_S))


def evict_together(transactions: Transactions, limits: Sequence[int], codec: Codec) -> list[sql_rows.Removed]:
    """Evict until so many live rows are left, and count it; the first of equal calls gets what is removed."""
    with transactions.writing() as connection:
        if connection.dialect.name == "postgresql":
            # Two that count at once would both remove the excess.
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(EVICT_LOCK)))
        evicted = {limit: _evict(connection, limit, codec) for limit in dict.fromkeys(limits)}
    return [evicted.pop(limit, sql_rows.Removed([], {})) for limit in limits]


def _evict(connection: Connection, limit: int, codec: Codec) -> sql_rows.Removed:
    if _at_most_live(connection) <= limit:
        return sql_rows.Removed([], {})
    excess = count_live(connection, codec) - limit
    rows = ranked_rows(connection, Ranking.of({}, ARRIVAL, excess), codec, lock="wait")
    if connection.dialect.name == "postgresql":
        # It waited for takers of these rows, after which there may be less to evict than was counted before.
        rows = rows[: max(0, count_live(connection, codec) - limit)]
    data = sql_rows.read_payloads(connection, [row.uid for row in rows])
    sql_rows.delete_rows(connection, [row.uid for row in rows])
    count_evicted(connection, rows, 1)
    return sql_rows.Removed(rows, data, is_evicted=True)


def count_evicted(connection: Connection, rows: Sequence[StorageItem], sign: Literal[1, -1]) -> None:
    """Add the rows to the evictions of their tasks, or take them off."""
    numbers = sorted(Counter(row.task_name for row in rows).items())
    if numbers:
        connection.execute(_COUNT_EVICTED, [{"task": task, "more": sign * number} for task, number in numbers])


def _at_most_live(connection: Connection) -> int:
    """A bound of the number of live rows, from the ids of the oldest one and of the next; reads no others."""
    first = connection.scalar(_OLDEST)
    return 0 if first is None else sql_rows.next_ids(connection)["timestamp_id"] - first


_COUNT_EVICTED = tasks.update().where(_OF_TASK).values(num_evicted=tasks.c.num_evicted + sa.bindparam("more"))
_OLDEST = sa.select(groups.c.timestamp_id).where(LIVE).order_by(groups.c.timestamp_id).limit(1)
