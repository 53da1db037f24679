"""What the callers of a SQL store share a transaction for: puts and train steps; evictions.

::

    put, set_train_step, get_train_step --+-- all that wait --> RowWriter.write --> one commit
    evict --------------------------------+-- all that wait --> evict_together --> one commit

Evictions have a transaction of their own, so that one that fails costs no put.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice

import sqlalchemy as sa

from forebay.replay.stores.contract import ARRIVAL, Codec
from forebay.replay.stores.errors import StepPassed
from forebay.replay.stores.sql.ids import next_ids, reserve_ids
from forebay.replay.stores.sql.ranking import Ranking, count_live, ranked_rows
from forebay.replay.stores.sql.rows import (
    PreparedRow,
    Removed,
    delete_rows,
    insert_rows,
    insert_tasks,
    read_payloads,
)
from forebay.replay.stores.sql.schema import (
    EVICT_LOCK,
    LIVE,
    groups,
    insert_missing,
    receipts,
    tasks,
)

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
    aged_at: int | None = None


Content = PreparedRows | SetTrainStep | GetTrainStep


class RowWriter:
    """Writes rows and train steps, many in one transaction.

    A task that is known stays known, and its name is written once. A train step is written if it is later
    than the one in the database, whichever process wrote that; rows that were aged at an older one are not
    written.

    >>> writer = RowWriter(reading, writing)
    >>> [uid], _ = writer.write([PreparedRows([prepare(item, codec)]), SetTrainStep("math", 4)])
    """

    def __init__(self, reading: Open, writing: Open) -> None:
        self._reading = reading
        self._writing = writing
        self._known_tasks: set[str] = set()

    def forget(self) -> None:
        """The content was replaced."""
        self._known_tasks.clear()

    def write(self, contents: Sequence[Content]) -> list[list[int] | int | StepPassed | None]:
        """For each of the contents: the uids of its rows, or why they are not written; or the train step."""
        named = _latest_steps(contents)
        if not any(isinstance(content, PreparedRows) for content in contents):
            with self._reading() as connection:
                steps, later = _steps_and_later(connection, named)
            if not later:
                return [_answer(content, steps) for content in contents]
        with self._writing() as connection:
            names = {task for content in contents for task in _tasks_of(content)} - self._known_tasks
            insert_tasks(connection, names)
            steps = _raise_steps(connection, named)
            answers = [_answer(content, steps) for content in contents]
            written = [
                content
                for content, answer in zip(contents, answers, strict=True)
                if isinstance(content, PreparedRows) and answer is None
            ]
            rows = [row for content in written for row in content.rows]
            ids = reserve_ids(connection, [(row.uid, row.timestamp_id) for row in rows]) if rows else []
            insert_rows(connection, rows, ids)
            keep_receipts(connection, [content.receipt for content in written if content.receipt is not None])
        # Only now it is certain.
        self._known_tasks |= names
        uids = iter(uid for uid, _ in ids)
        return [
            list(islice(uids, len(content.rows)))
            if isinstance(content, PreparedRows) and answer is None
            else answer
            for content, answer in zip(contents, answers, strict=True)
        ]


def _tasks_of(content: Content) -> set[str]:
    if isinstance(content, PreparedRows):
        return {row.columns["task_name"] for row in content.rows}
    return {content.task_name} if isinstance(content, SetTrainStep) else set()


def _latest_steps(contents: Sequence[Content]) -> dict[str, int]:
    """For each task, the latest train step that somebody names."""
    latest: dict[str, int] = {}
    for content in contents:
        if isinstance(content, GetTrainStep):
            continue
        step = content.train_step if isinstance(content, SetTrainStep) else content.aged_at
        if step is not None:
            latest |= {task: max(step, latest.get(task, step)) for task in _tasks_of(content)}
    return latest


def _steps_and_later(
    connection: sa.Connection, named: Mapping[str, int]
) -> tuple[dict[str, int | None], dict[str, int]]:
    """The train steps of all tasks, and the named ones that take their place."""
    lines = connection.execute(sa.select(tasks.c.task_name, tasks.c.train_step, tasks.c.may_fall)).all()
    may_fall = {line.task_name for line in lines if line.may_fall}
    steps: dict[str, int | None] = {line.task_name: line.train_step for line in lines}
    later = {
        task: step
        for task, step in named.items()
        if (before := steps.get(task)) is None or before < step or task in may_fall
    }
    return steps, later


def _raise_steps(connection: sa.Connection, named: Mapping[str, int]) -> dict[str, int | None]:
    """Write what is later; the train steps of all tasks, of which the named ones stay until the commit.

    On PostgreSQL another process may name a later step at the same time, and expire what is too old by then.
    It must either be seen here, or wait until the rows of this transaction can be seen there. Tasks are
    locked one after another in one order, and none twice, so that two processes never wait for each other.
    """
    steps, later = _steps_and_later(connection, named)
    for task in sorted(named):
        of_task = tasks.c.task_name == task
        if task in later:
            stands = sa.or_(
                tasks.c.train_step.is_(None), tasks.c.train_step < later[task], tasks.c.may_fall == 1
            )
            changed = tasks.update().where(of_task, stands).values(train_step=later[task], may_fall=0)
            connection.execute(changed)
            steps[task] = later[task]
        if connection.dialect.name == "postgresql":
            held = sa.select(tasks.c.train_step).where(of_task).with_for_update(read=True)
            steps[task] = connection.scalar(held)
    return steps


def _answer(content: Content, steps: Mapping[str, int | None]) -> int | StepPassed | None:
    """The train step that is asked for; why rows are not written; or None."""
    if isinstance(content, GetTrainStep):
        return steps.get(content.task_name)
    if isinstance(content, SetTrainStep) or content.aged_at is None:
        return None
    reached = [steps.get(task) or 0 for task in _tasks_of(content)]
    return StepPassed(max(reached)) if max(reached, default=0) > content.aged_at else None


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


def evict_together(writing: Open, limits: Sequence[int], codec: Codec) -> list[Removed]:
    """Evict until so many live rows are left, and count it; the first of equal calls gets what is removed."""
    evicted: list[Removed] = []
    with writing() as connection:
        if connection.dialect.name == "postgresql":
            # Two that count at once would both remove the excess.
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(EVICT_LOCK)))
        reached: int | None = None
        for limit in limits:
            if reached is not None and limit >= reached:
                evicted.append(Removed([], {}))
                continue
            evicted.append(_evict(connection, limit, codec))
            reached = limit
    return evicted


def _evict(connection: sa.Connection, limit: int, codec: Codec) -> Removed:
    if _at_most_live(connection) <= limit:
        return Removed([], {})
    excess = count_live(connection) - limit
    rows = ranked_rows(connection, Ranking.of({}, ARRIVAL, excess), codec, lock="wait")
    if connection.dialect.name == "postgresql":
        # It waited for takers of these rows, who may have left less to evict than was counted before.
        rows = rows[: max(0, count_live(connection) - limit)]
    data = read_payloads(connection, [row.uid for row in rows])
    delete_rows(connection, [row.uid for row in rows])
    for name in sorted({row.task_name for row in rows}):
        count_evicted(connection, name, sum(row.task_name == name for row in rows))
    return Removed(rows, data)


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
