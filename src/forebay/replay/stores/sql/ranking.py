"""Which rows of a SQL store a query means, in which order: read, counted, or locked to be taken.

::

    query --plan_arms--> one SELECT per arm --> rows of all arms, merged and cut at the limit
      '--(no database compares so)--> all rows, matched here

Everything happens within a transaction that the store opened. The same few questions are asked again and
again, and to build a statement takes longer than to answer it: those of short queries are kept.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Self

import sqlalchemy as sa

from forebay.replay.query import Query, QueryLike, matches, parse_query
from forebay.replay.stores.contract import Codec, StorageItem, parse_order
from forebay.replay.stores.sql.direct import Connection
from forebay.replay.stores.sql.query import asks_age, leaves, needs_scan, plan_arms
from forebay.replay.stores.sql.rows import SELECT_ROWS, lock_rows, read_rows
from forebay.replay.stores.sql.schema import counts, groups, tasks
from forebay.replay.stores.sum_tree import SumTree

Steps = Mapping[str, int | None]
"""Every task of the store, with its train step."""
Lock = Literal["none", "skip", "wait"]
"""Rows that others are changing are read as they were, passed over, or waited for and looked at again."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """The arguments of `StorageBackend.get`."""

    query: Query
    field: str
    descending: bool
    limit: int | None

    @classmethod
    def of(cls, query: QueryLike, order: str | None, limit: int | None) -> Self:
        """The ranking of these arguments; ValueError if the query or the order is not one."""
        return cls(parse_query(query), *parse_order(order), limit)

    def cut(self, rows: list[StorageItem]) -> list[StorageItem]:
        """The first of these rows, which come from several arms."""
        rows.sort(key=lambda row: row.timestamp_id)
        # Sorting keeps ties in arrival order, also with reverse=True.
        rows.sort(key=lambda row: getattr(row, self.field), reverse=self.descending)
        return rows if self.limit is None else rows[: self.limit]


def ranked_rows(connection: Connection, ranking: Ranking, codec: Codec, *, lock: Lock = "none") -> list[StorageItem]:
    """The rows of a ranking, without payload."""
    if ranking.limit is not None and ranking.limit <= 0:
        return []
    if needs_scan(ranking.query):
        return ranking.cut(_scan(connection, ranking.query, codec, lock))
    steps = train_steps(connection)
    lines = _lines(connection, SELECT_ROWS, ranking, steps, lock)
    return ranking.cut(list(read_rows(lines, codec, steps)))


def _lines(
    connection: Connection, columns: sa.Select[Any], ranking: Ranking, steps: Steps, lock: Lock = "none"
) -> Iterator[Any]:
    """These columns of the rows of every arm, each arm in the order of the ranking."""
    by_age = ranking.field == "staleness" or asks_age(ranking.query)
    # Where age plays no part, one statement finds the rows of all tasks.
    tasks = tuple((task, step is not None) for task, step in steps.items()) if by_age else ()
    # Equal queries need not be one question, True equals 1; their texts are.
    shown = repr(ranking.query)
    build = _statements if len(shown) <= MAX_KEPT else _statements.__wrapped__
    values = {f"step_{place}": steps[task] for place, (task, _) in enumerate(tasks)}
    for statement in build(columns, ranking, shown, tasks, lock):
        found = connection.execute(statement, values)
        # A piece at a time: a generator that ends early would close a cursor that it walks, from any thread.
        while some := found.fetchmany(1000):
            yield from some


MAX_KEPT = 1000
"""Characters of a query whose statements are kept; longer ones name many values, and hardly come again."""


@lru_cache(maxsize=256)
def _statements(
    columns: sa.Select[Any], ranking: Ranking, shown: str, tasks: tuple[tuple[str, bool], ...], lock: Lock
) -> list[sa.Select[Any]]:
    """A statement for each arm; of the `tasks`, those that have a train step."""
    bound = [sa.bindparam(f"step_{place}", type_=sa.BigInteger()) for place in range(len(tasks))]
    steps = {task: step if has_step else None for (task, has_step), step in zip(tasks, bound, strict=True)}
    statements = []
    for arm in plan_arms(ranking.query, steps, by_age=ranking.field == "staleness"):
        statement = columns.where(arm.where)
        # Counts and priorities need no order and no locks.
        if columns not in (_COUNT, _LIGHT):
            ranked = arm.order_by(ranking.field, ranking.descending)
            statement = _locking(statement.limit(ranking.limit).order_by(*ranked), lock)
        statements.append(statement)
    return statements


_COUNT = sa.select(sa.func.count()).select_from(groups)
_LIGHT = sa.select(groups.c.timestamp_id, groups.c.uid, groups.c.priority)
_UIDS = sa.select(groups.c.uid)


def count_rows(connection: Connection, queries: Sequence[Query], codec: Codec) -> list[int]:
    """How many rows match each of the queries."""
    if connection.dialect.name == "sqlite":
        numbers = count_cells(connection.execute(CELLS).fetchall(), queries)
        if numbers is not None:
            return numbers
    return [_count(connection, query, codec) for query in queries]


def count_cells(lines: Sequence[Any], queries: Sequence[Query]) -> list[int] | None:
    """How many rows match each query, by the `CELLS`; None if a query asks for more than they say."""
    cells = tuple([(task, status) for task, status, _ in lines])
    chosen = [places for query in queries if (places := _choose(query, cells)) is not None]
    numbers = [sum([lines[place][2] for place in places]) for places in chosen]
    return numbers if len(numbers) == len(queries) else None


@lru_cache(maxsize=1024)
def _choose(query: Query, cells: tuple[tuple[str, str], ...]) -> list[int] | None:
    if any(leaf.field not in ("task_name", "status") for leaf in leaves(query)):
        return None
    rows = [StorageItem(None, -1, -1, task, status, 0) for task, status in cells]
    return [place for place, row in enumerate(rows) if matches(query, row)]


def count_live(connection: Connection, codec: Codec) -> int:
    """How many rows are not ARCHIVED."""
    return count_rows(connection, [parse_query({})], codec)[0]


def _count(connection: Connection, query: Query, codec: Codec) -> int:
    if needs_scan(query):
        return len(_scan(connection, query, codec, "none"))
    steps = train_steps(connection) if asks_age(query) else {}
    return sum(line[0] for line in _lines(connection, _COUNT, Ranking.of(query, None, None), steps))


CELLS = sa.select(counts.c.task_name, counts.c.status, counts.c.number)
"""Groups by task and status, a table that SQLite alone has: some dozens of numbers."""


def read_priorities(connection: Connection, query: Query, codec: Codec) -> SumTree:
    """The priorities of the rows that match; of each row only its ids and its priority are read."""
    lines: list[Any]
    if needs_scan(query):
        rows = _scan(connection, query, codec, "none")
        lines = [(row.timestamp_id, row.uid, row.priority) for row in rows]
    else:
        lines = [*_lines(connection, _LIGHT, Ranking.of(query, None, None), train_steps(connection))]
    timestamp_ids, uids, priorities = ([line[i] for line in lines] for i in range(3))
    return SumTree(timestamp_ids, uids, priorities)


def lock_drawn(
    connection: Connection, tree: SumTree, *, query: Query, count: int, random: Callable[[], float], codec: Codec
) -> list[StorageItem]:
    """Up to `count` rows that are drawn from `tree`, still match and are locked, without payload."""
    steps = train_steps(connection)
    drawn: list[StorageItem] = []
    while len(drawn) < count and (uids := tree.draw(count - len(drawn), random)):
        # Without those that a rival takes or has changed since; the next numbers draw others.
        found = lock_rows(connection, uids, codec, steps, skip_locked=True)
        drawn += [found[uid] for uid in uids if uid in found and matches(query, found[uid])]
    return drawn


def lock_matching(connection: Connection, query: Query, codec: Codec) -> list[int]:
    """The uids of the rows that match, locked; nothing but the uids is read."""
    if needs_scan(query):
        return [row.uid for row in _scan(connection, query, codec, "wait")]
    # By uid, so that two processes that lock the same rows do not wait for each other.
    ranking = Ranking(query, "uid", False, None)
    return [uid for (uid,) in _lines(connection, _UIDS, ranking, train_steps(connection), "wait")]


def train_steps(connection: Connection) -> dict[str, int | None]:
    """Every task of the store, with its train step."""
    return {task: step for task, step, _ in connection.execute(STEPS)}


STEPS = sa.select(tasks.c.task_name, tasks.c.train_step, tasks.c.may_fall)


def _scan(connection: Connection, query: Query, codec: Codec, lock: Lock) -> list[StorageItem]:
    lines = connection.execute(_locking(SELECT_ROWS.order_by(groups.c.uid), lock))
    return [row for row in read_rows(lines, codec, train_steps(connection)) if matches(query, row)]


def _locking(statement: sa.Select[Any], lock: Lock) -> sa.Select[Any]:
    return statement if lock == "none" else statement.with_for_update(skip_locked=lock == "skip")
