"""Which rows of a SQL store a query means, in which order: read, counted, or locked to be taken.

::

    query --plan_arms--> one SELECT per arm --> rows of all arms, merged and cut at the limit
      '--(no database compares so)--> all rows, matched here

Everything happens within a transaction that the store opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import sqlalchemy as sa

from forebay.replay.query import Query, QueryLike, matches, parse_query
from forebay.replay.stores.contract import Codec, StorageItem, parse_order
from forebay.replay.stores.sql.query import asks_age, leaves, needs_scan, plan_arms
from forebay.replay.stores.sql.rows import SELECT_ROWS, lock_rows, read_rows
from forebay.replay.stores.sql.schema import counts, groups, tasks
from forebay.replay.stores.sum_tree import SumTree

Lock = Literal["none", "skip", "wait"]
"""Rows that others are changing are read as they were, passed over, or waited for and looked at again."""
_Cells = list[tuple[StorageItem, int]]
"""A row of each task and status, and how many there are."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """The arguments of `StorageBackend.get`."""

    query: Query
    field: str
    descending: bool
    limit: int | None

    @classmethod
    def of(cls, query: QueryLike, order: str | None, limit: int | None) -> Ranking:
        """The ranking of these arguments; ValueError if the query or the order is not one."""
        return cls(parse_query(query), *parse_order(order), limit)

    def cut(self, rows: list[StorageItem]) -> list[StorageItem]:
        """The first of these rows, which come from several arms."""
        rows.sort(key=lambda row: row.timestamp_id)
        # Sorting keeps ties in arrival order, also with reverse=True.
        rows.sort(key=lambda row: getattr(row, self.field), reverse=self.descending)
        return rows if self.limit is None else rows[: self.limit]


def ranked_rows(
    connection: sa.Connection, ranking: Ranking, codec: Codec, *, lock: Lock = "none"
) -> list[StorageItem]:
    """The rows of a ranking, without payload."""
    if ranking.limit is not None and ranking.limit <= 0:
        return []
    if needs_scan(ranking.query):
        return ranking.cut(_scan(connection, ranking.query, codec, lock))
    steps = train_steps(connection)
    rows: list[StorageItem] = []
    for arm in plan_arms(ranking.query, steps, by_age=ranking.field == "staleness"):
        statement = SELECT_ROWS.where(arm.where).limit(ranking.limit)
        statement = statement.order_by(*arm.order_by(ranking.field, ranking.descending))
        rows += read_rows(connection.execute(_locking(statement, lock)), codec, steps)
    return ranking.cut(rows)


def count_rows(connection: sa.Connection, queries: Sequence[Query], codec: Codec) -> list[int]:
    """How many rows match each of the queries."""
    cells: _Cells | None = None
    if connection.dialect.name == "sqlite":
        # Some dozens of numbers, read faster than one query is built.
        lines = connection.execute(_CELLS)
        cells = [(StorageItem(None, -1, -1, task, status, 0), number) for task, status, number in lines]
    return [_count(connection, query, codec, cells) for query in queries]


def count_live(connection: sa.Connection, codec: Codec) -> int:
    """How many rows are not ARCHIVED."""
    return count_rows(connection, [parse_query({})], codec)[0]


def _count(connection: sa.Connection, query: Query, codec: Codec, cells: _Cells | None) -> int:
    if needs_scan(query):
        return len(_scan(connection, query, codec, "none"))
    if cells is not None and all(leaf.field in ("task_name", "status") for leaf in leaves(query)):
        return sum(number for row, number in cells if matches(query, row))
    if asks_age(query):
        statements = _counts(query, train_steps(connection))
    else:
        # Equal texts are the same question. Equal numbers are not: True equals 1.
        is_text = all(isinstance(leaf.value, str) for leaf in leaves(query))
        statements = _known_counts(query) if is_text else _counts(query, {})
    return sum(connection.scalar(statement) or 0 for statement in statements)


_CELLS = sa.select(counts.c.task_name, counts.c.status, counts.c.number)


@lru_cache(maxsize=256)
def _known_counts(query: Query) -> list[sa.Select[Any]]:
    """The same few are asked again and again, and to build one takes longer than to answer it."""
    return _counts(query, {})


def _counts(query: Query, steps: Mapping[str, int | None]) -> list[sa.Select[Any]]:
    counted = sa.select(sa.func.count()).select_from(groups)
    return [counted.where(arm.where) for arm in plan_arms(query, steps, by_age=False)]


def read_priorities(connection: sa.Connection, query: Query, codec: Codec) -> SumTree:
    """The priorities of the rows that match; of each row only its ids and its priority are read."""
    lines: list[Any]
    if needs_scan(query):
        rows = _scan(connection, query, codec, "none")
        lines = [(row.timestamp_id, row.uid, row.priority) for row in rows]
    else:
        light = sa.select(groups.c.timestamp_id, groups.c.uid, groups.c.priority)
        arms = plan_arms(query, train_steps(connection), by_age=False)
        lines = [line for arm in arms for line in connection.execute(light.where(arm.where))]
    timestamp_ids, uids, priorities = ([line[i] for line in lines] for i in range(3))
    return SumTree(timestamp_ids, uids, priorities)


def lock_drawn(
    connection: sa.Connection,
    tree: SumTree,
    *,
    query: Query,
    count: int,
    random: Callable[[], float],
    codec: Codec,
) -> list[StorageItem]:
    """Up to `count` rows that are drawn from `tree`, still match and are locked, without payload."""
    steps = train_steps(connection)
    drawn: list[StorageItem] = []
    while len(drawn) < count and (uids := tree.draw(count - len(drawn), random)):
        # Without those that a rival takes or has changed since; the next numbers draw others.
        found = lock_rows(connection, uids, codec, steps, skip_locked=True)
        drawn += [found[uid] for uid in uids if uid in found and matches(query, found[uid])]
    return drawn


def lock_matching(connection: sa.Connection, query: Query, codec: Codec) -> list[int]:
    """The uids of the rows that match, locked; nothing but the uids is read."""
    if needs_scan(query):
        return [row.uid for row in _scan(connection, query, codec, "wait")]
    uids: list[int] = []
    for arm in plan_arms(query, train_steps(connection), by_age=False):
        # By uid, so that two processes that lock the same rows do not wait for each other.
        statement = sa.select(groups.c.uid).where(arm.where).order_by(groups.c.uid)
        uids += connection.scalars(_locking(statement, "wait"))
    return uids


def train_steps(connection: sa.Connection) -> dict[str, int | None]:
    """Every task of the store, with its train step."""
    return dict(connection.execute(sa.select(tasks.c.task_name, tasks.c.train_step)).all())


def _scan(connection: sa.Connection, query: Query, codec: Codec, lock: Lock) -> list[StorageItem]:
    lines = connection.execute(_locking(SELECT_ROWS.order_by(groups.c.uid), lock))
    rows = read_rows(lines, codec, train_steps(connection))
    return [row for row in rows if matches(query, row)]


def _locking(statement: sa.Select[Any], lock: Lock) -> sa.Select[Any]:
    return statement if lock == "none" else statement.with_for_update(skip_locked=lock == "skip")
