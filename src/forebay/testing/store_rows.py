"""Rows and queries of the conformance suite: six rows of all kinds, and what each query finds of them.

::

    fill(store) -> rows 0..5 -- every query of QUERIES --> the payloads it must find
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import numpy as np

from forebay.replay.query import StorageIndices, parse_query
from forebay.replay.stores.contract import StorageBackend, StorageItem, TagValue, revive_row
from forebay.types import Status

EVERYTHING = {"status": {"$in": [status.value for status in Status]}}


def make_row(
    payload: Any = "payload",
    task: str = "math",
    status: Any = "completed",
    *,
    staleness: int = 0,
    step: int | None = None,
    tags: dict[str, TagValue] | None = None,
    priority: float = 1.0,
) -> StorageItem:
    """A row to put."""
    return StorageItem(payload, -1, -1, task, status, staleness, dict(tags or {}), priority, oldest_model_step=step)


def uids(rows: list[StorageItem]) -> list[int]:
    """The uids, in order."""
    return [row.uid for row in rows]


async def put_all(storage: StorageBackend, *rows: StorageItem) -> list[int]:
    """Put the rows one after another."""
    return [await storage.put(row) for row in rows]


async def fill(storage: StorageBackend) -> None:
    """Six rows named by their uids, of all kinds; the last is archived."""
    await storage.set_train_step("math", 5)
    await put_all(
        storage,
        make_row(0, "math", step=1, tags={"level": 3, "kind": "add"}),
        make_row(1, "math", step=4, tags={"level": 1.5, "ok": True}),
        make_row(2, "math", "aborted", staleness=2, tags={"level": True}),
        make_row(3, "code", staleness=0, priority=0.5, tags={"level": "3"}),
        make_row(4, "code", "failed", staleness=4),
        make_row(5, "code", staleness=1, step=9),
    )
    await storage.take([5], train_step=7)


ORDERS = (None, "timestamp_id", "-timestamp_id", "staleness", "-staleness", "priority", "-priority")


def draw_operation(draw: Random, number: int) -> Callable[[StorageBackend], Awaitable[Any]]:
    """An operation on a store that has had about `number` of them; the same one each time it is called."""
    task, status = draw.choice(("math", "code")), draw.choice(("completed", "aborted", "failed"))
    levels: list[TagValue] = [1, 2.5, True, "3"]
    tags = {"level": draw.choice(levels)}
    priority, share, step = draw.choice([0.0, 0.5, 1.0, 3.0]), draw.random(), draw.choice([None, 1, 4, 7])
    # Some of these uids are taken already, and some were never given out.
    uids, count = draw.choices(range(-1, number + 2), k=draw.randrange(6)), draw.randrange(4)
    query = {"task_name": task, "status": "completed"}

    async def change(store: StorageBackend) -> None:
        rows = await store.get({"uid": {"$in": uids}}, rows_only=True)
        for row in rows:
            row.status, row.tags, row.priority, row.timestamp_id = status, tags, priority, 50
        await store.update([*rows, make_row("unknown")])

    async def revive(store: StorageBackend) -> None:
        await store.update([revive_row(row) for row in await store.get({"status": "archived"}, rows_only=True)])

    def put(store: StorageBackend) -> Awaitable[int]:
        return store.put(make_row(number, task, status, staleness=count, step=step, tags=tags, priority=priority))

    operations: list[Callable[[StorageBackend], Awaitable[Any]]] = [
        # Mostly puts: the others need rows to work on.
        *[put] * 6,
        change,
        revive,
        lambda store: store.take(uids, query=query if count else None, train_step=step),
        lambda store: store.take_first(count, query, order=ORDERS[number % len(ORDERS)], train_step=step),
        lambda store: store.take_drawn(count, query, lambda: share, train_step=step),
        lambda store: store.update_priorities(dict.fromkeys(uids, priority)),
        lambda store: store.delete(uids[:2]),
        lambda store: store.delete_where({**query, "staleness": {"$gte": 3}}, expected=count or None),
        lambda store: store.evict(12 + count),
        lambda store: store.set_train_step(task, 1 + number // 8),
        lambda store: store.let_train_steps_fall(),
    ]
    return draw.choice(operations)


QUERIES: list[tuple[Any, list[int]]] = [
    ({}, [0, 1, 2, 3, 4]),
    ({"$and": []}, [0, 1, 2, 3, 4]),
    ({"$or": []}, []),
    ({"task_name": "math"}, [0, 1, 2]),
    ({"task_name": "math", "status": "completed"}, [0, 1]),
    ({"status": Status.FAILED}, [4]),
    ({"status": {"$in": [Status.FAILED, "aborted"]}}, [2, 4]),
    ({"status": {"$not_in": ["completed"]}}, [2, 4]),
    ({"status": {"$ne": "completed"}}, [2, 4]),
    ({"staleness": {"$gte": 2}}, [0, 2, 4]),
    ({"staleness": {"$gt": 2, "$lte": 4}}, [0, 4]),
    ({"staleness": {"$between": [2, 3]}}, [0, 2]),
    ({"staleness": 0}, [1, 3]),
    ({"staleness": 0.0}, [1, 3]),
    ({"staleness": False}, []),
    ({"staleness": {"$lt": "5"}}, []),
    ({"staleness": {"$lt": 2.5}}, [1, 2, 3]),
    ({"staleness": {"$lt": float("inf")}}, [0, 1, 2, 3, 4]),
    ({"staleness": {"$gt": -(10**30)}}, [0, 1, 2, 3, 4]),
    ({"staleness": {"$ne": "5"}}, [0, 1, 2, 3, 4]),
    ({"staleness": {}}, [0, 1, 2, 3, 4]),
    ({"priority": {"$lt": 1}}, [3]),
    ({"oldest_model_step": None}, [2, 3, 4]),
    ({"oldest_model_step": {"$lte": 4}}, [0, 1]),
    ({"oldest_model_step": {"$ne": 1}}, [1, 2, 3, 4]),
    ({"uid": {"$in": [4, 1, 77, 10**30]}}, [1, 4]),
    ({"uid": {"$in": [True, 1.0]}}, [1]),
    ({"uid": True}, []),
    ({"timestamp_id": {"$between": (1, 2)}}, [1, 2]),
    ({"staleness": {"$gte": np.int64(4)}}, [4]),
    ({"task_name": {"$in": ["code", "none"]}, "$or": [{"status": "failed"}]}, [4]),
    # More values, and more conditions, than the SQL stores put into one statement.
    ({"uid": {"$in": list(range(0, 40_000, 2))}}, [0, 2, 4]),
    ({"$or": [{"uid": 3, "priority": n} for n in range(1500)] + [{"uid": 1}]}, [1]),
    ({"tags.level": 3}, [0]),
    ({"tags.level": {"$gte": 1}}, [0, 1]),
    ({"tags.level": "3"}, [3]),
    ({"tags.level": True}, [2]),
    ({"tags.level": {"$ne": 3}}, [1, 2, 3, 4]),
    ({"tags.level": {"$not_in": [3, "3"]}}, [1, 2, 4]),
    ({"tags.level": {"$not_in": [3, True]}}, [1, 3, 4]),
    ({"tags.level": {"$lt": "a"}}, [3]),
    ({"tags.level": None}, []),
    ({"tags.nobody": {"$lte": 3}}, []),
    ({"tags.kind": {"$gt": "aaa"}}, [0]),
    ({"task_name": "x' OR '1'='1"}, []),
    ({"tags.x' OR '1'='1": {"$ne": 1}}, [0, 1, 2, 3, 4]),
    ({"task_name": {"$lt": "d\0\ud800"}}, [3, 4]),
    ({"$or": [{"task_name": "code", "staleness": {"$lt": 4}}, {"uid": 0}]}, [0, 3]),
    ({"$and": [{"task_name": "math"}, {"$or": [{"staleness": 2}, {"tags.ok": True}]}]}, [1, 2]),
    ({"train_step": {"$gte": 0}}, []),
    ({"uid": 5}, []),
    ({"status": "archived"}, [5]),
    ({"status": {"$in": ["archived", "failed"]}}, [4, 5]),
    ({"status": Status.ARCHIVED, "train_step": {"$lte": 7}}, [5]),
    ({"status": Status.ARCHIVED, "train_step": {"$gt": 7}}, []),
    ({"status": {"$gte": "archived"}}, [0, 1, 3, 4]),
    ({"status": {"$ne": "archived"}}, [0, 1, 2, 3, 4]),
    ({"status_before": "completed", "status": "archived"}, [5]),
    (StorageIndices("math", Status.COMPLETED), [0, 1]),
    (parse_query(StorageIndices("math", tags={"ok": True})), [1]),
]
"""Queries on what `fill` puts, and the payloads they find."""
