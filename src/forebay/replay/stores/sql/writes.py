"""Transactions that callers of a SQL store share: of puts and train steps, and of evictions.

::

    put, set_train_step, get_train_step --+-- all that wait --> write_together --> one commit
    evict --------------------------------+-- all that wait --> evict_together --> one commit

Evictions have a transaction of their own, so that one that fails costs no put.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import sqlalchemy as sa

from forebay.replay.stores.contract import ARRIVAL, Codec, StorageItem
from forebay.replay.stores.errors import StepPassed
from forebay.replay.stores.sql.connections import Transactions
from forebay.replay.stores.sql.ranking import Ranking, count_live, ranked_rows
from forebay.replay.stores.sql.rows import (
    PreparedRow,
    Removed,
    delete_rows,
    give_ids,
    insert_rows,
    insert_tasks,
    next_ids,
    read_payloads,
)
from forebay.replay.stores.sql.schema import EVICT_LOCK, LIVE, groups, insert_missing, receipts, tasks

RECEIPT_S = 3600
"""A client asks for its receipt as soon as the buffer's server has been started again."""


@dataclass(frozen=True, slots=True)
class Write:
    """Rows to be put, or without rows the train step of a task, to be set or only asked for."""

    task_names: frozenset[str]
    rows: list[PreparedRow] | None = None
    """Written together, or not at all."""
    receipt: bytes | None = None
    train_step: int | None = None
    """Becomes the step of the tasks, if it is later. Rows were judged at this step."""


def write_together(
    transactions: Transactions, writes: Sequence[Write]
) -> list[list[int] | StepPassed | int | None]:
    """Write rows and train steps, many in one transaction; return an answer to each of `writes`.

    The answer is the uids of the rows, or why they are not written, or the train step of the task. A train
    step is written if it is later than the one in the database, whichever process wrote that. Rows that were
    judged at an older step than that of their task are not written.
    """
    if all(write.rows is None for write in writes):
        with transactions.reading() as connection:
            steps, later = _steps_and_later(connection, writes)
        if not later:
            return [steps.get(task) for write in writes for task in write.task_names]
    with transactions.writing() as connection:
        steps = raise_steps(connection, writes)
        answers = [_answer(write, steps) for write in writes]
        rows = [row for answer in answers if isinstance(answer, list) for row in answer]
        give_ids(connection, rows)
        insert_rows(connection, rows)
        stored = (write for write, answer in zip(writes, answers, strict=True) if answer is write.rows)
        keep_receipts(connection, *(write.receipt for write in stored))
    return [[row.uid for row in answer] if isinstance(answer, list) else answer for answer in answers]


def _answer(write: Write, steps: Mapping[str, int | None]) -> list[PreparedRow] | StepPassed | int | None:
    """The rows if they are to be written, or why they are not; for a call without rows, the train step."""
    if write.rows is None:
        return steps.get(next(iter(write.task_names)))
    reached = max((steps.get(task) or 0 for task in write.task_names), default=0)
    is_passed = write.train_step is not None and reached > write.train_step
    return StepPassed(reached) if is_passed else write.rows


def _steps_and_later(
    connection: sa.Connection, writes: Sequence[Write]
) -> tuple[dict[str, int | None], dict[str, int]]:
    """The train steps of all tasks, and the named ones that take their place."""
    lines = connection.execute(_STEPS).all()
    may_fall = {line.task_name for line in lines if line.may_fall}
    steps: dict[str, int | None] = {line.task_name: line.train_step for line in lines}
    later = {
        task: step
        for task, step in _latest_named(writes).items()
        if (before := steps.get(task)) is None or before < step or task in may_fall
    }
    return steps, later


_STEPS = sa.select(tasks.c.task_name, tasks.c.train_step, tasks.c.may_fall)


def _latest_named(writes: Sequence[Write]) -> dict[str, int]:
    latest: dict[str, int] = {}
    for write in writes:
        if (step := write.train_step) is not None:
            latest |= {task: max(step, latest.get(task, step)) for task in write.task_names}
    return latest


def raise_steps(connection: sa.Connection, writes: Sequence[Write]) -> dict[str, int | None]:
    """Write the later steps; the train steps of all tasks, of which the named ones stay until the commit.

    On PostgreSQL another process may name a later step at the same time, and expire what is too old by then.
    It must either be seen here, or wait until the rows of this transaction can be seen there. Tasks are
    locked one after another in one order, and none twice, so that two processes never wait for each other.
    """
    steps, later = _steps_and_later(connection, writes)
    for_ever = [write for write in writes if write.rows is not None or write.train_step is not None]
    insert_tasks(connection, {task for write in for_ever for task in write.task_names} - steps.keys())
    is_postgres = connection.dialect.name == "postgresql"
    for task in sorted(_latest_named(writes) if is_postgres else later):
        of_task = tasks.c.task_name == task
        if task in later:
            stands = sa.or_(
                tasks.c.train_step.is_(None), tasks.c.train_step < later[task], tasks.c.may_fall == 1
            )
            changed = tasks.update().where(of_task, stands).values(train_step=later[task], may_fall=0)
            connection.execute(changed)
            steps[task] = later[task]
        if is_postgres:
            held = sa.select(tasks.c.train_step).where(of_task).with_for_update(read=True)
            steps[task] = connection.scalar(held)
    return steps


def keep_receipts(connection: sa.Connection, *kept: bytes | None) -> None:
    """Remember that the calls with these receipts have happened; now and then, forget the old ones."""
    now = int(time.time())
    lines = [{"receipt": receipt, "at": now} for receipt in kept if receipt is not None]
    if lines:
        insert_missing(connection, receipts, lines)
    if any(receipt is not None and receipt[-1] == 0 for receipt in kept):
        # One in 256, as they are random: an hour may leave many.
        connection.execute(receipts.delete().where(receipts.c.at < now - RECEIPT_S))


def evict_together(transactions: Transactions, limits: Sequence[int], codec: Codec) -> list[Removed]:
    """Evict until so many live rows are left, and count it; the first of equal calls gets what is removed."""
    evicted: list[Removed] = []
    with transactions.writing() as connection:
        if connection.dialect.name == "postgresql":
            # Two that count at once would both remove the excess.
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(EVICT_LOCK)))
        reached: int | None = None
        for limit in limits:
            if reached is not None and limit >= reached:
                evicted.append(Removed([], {}))
            else:
                evicted.append(_evict(connection, limit, codec))
                reached = limit
    return evicted


def _evict(connection: sa.Connection, limit: int, codec: Codec) -> Removed:
    if _at_most_live(connection) <= limit:
        return Removed([], {})
    excess = count_live(connection, codec) - limit
    rows = ranked_rows(connection, Ranking.of({}, ARRIVAL, excess), codec, lock="wait")
    if connection.dialect.name == "postgresql":
        # It waited for takers of these rows, after which there may be less to evict than was counted before.
        rows = rows[: max(0, count_live(connection, codec) - limit)]
    data = read_payloads(connection, [row.uid for row in rows])
    delete_rows(connection, [row.uid for row in rows])
    count_evicted(connection, rows, 1)
    return Removed(rows, data, is_evicted=True)


def count_evicted(connection: sa.Connection, rows: Sequence[StorageItem], sign: Literal[1, -1]) -> None:
    """Add the rows to the evictions of their tasks, or take them off."""
    for task, number in sorted(Counter(row.task_name for row in rows).items()):
        counted = tasks.c.num_evicted + sign * number
        connection.execute(tasks.update().where(tasks.c.task_name == task).values(num_evicted=counted))


def _at_most_live(connection: sa.Connection) -> int:
    """A bound of the number of live rows, from the ids of the oldest one and of the next; reads no others."""
    oldest = sa.select(groups.c.timestamp_id).where(LIVE).order_by(groups.c.timestamp_id).limit(1)
    first = connection.scalar(oldest)
    return 0 if first is None else next_ids(connection)["timestamp_id"] - first
