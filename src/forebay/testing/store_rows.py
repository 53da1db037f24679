"""What the conformance suite does to stores: rows, and operations and queries drawn at random."""

from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from forebay.replay.query import QUERY_FIELDS
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


ORDERS = (None, "timestamp_id", "-timestamp_id", "staleness", "-staleness", "priority", "-priority")


def draw_operation(draw: Random, number: int) -> Callable[[StorageBackend], Awaitable[Any]]:
    """An operation on a store that has had about `number` of them; the same one each time it is called."""
    task, status = draw.choice(("math", "code")), draw.choice(("completed", "aborted", "failed"))
    levels: list[TagValue] = [1, 2.5, True, "3"]
    tags = {"level": draw.choice(levels)}
    priority, share, step = draw.choice([0.0, 0.5, 1.0, 3.0]), draw.random(), draw.choice([None, 1, 4, 7])
    # Some of these uids are taken already, and some were never given out.
    uids, count = draw.choices(range(-1, number + 10), k=draw.randrange(6)), draw.randrange(4)
    query = {"task_name": task, "status": "completed"}

    async def change(store: StorageBackend) -> None:
        rows = await store.get({"uid": {"$in": uids}}, rows_only=True)
        for row in rows:
            row.status, row.tags, row.priority, row.timestamp_id = status, tags, priority, 50
        await store.update([*rows, make_row("unknown")])

    async def revive(store: StorageBackend) -> None:
        await store.update([revive_row(row) for row in await store.get({"status": "archived"}, rows_only=True)])

    # Ids that are brought along are kept if they are new.
    uid, timestamp_id = draw.choice([-1, 0, number + 9]), draw.choice([-1, number + 7])

    def put(store: StorageBackend) -> Awaitable[int]:
        row = make_row(number, task, status, staleness=count, step=step, tags=tags, priority=priority)
        row.uid, row.timestamp_id = uid, timestamp_id
        return store.put(row)

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


_NUMBERS = (0, 1, 2.5, 4, 10**30, float("inf"), True)
_VALUES = (*_NUMBERS, "3", "math", "completed", "archived", Status.FAILED, "' OR 1=1", None)


def draw_query(draw: Random, depth: int = 2) -> dict[str, Any]:
    """A query on the rows that operations make, with values of every kind for any field."""
    if depth and draw.random() < 0.4:
        return {draw.choice(("$and", "$or")): [draw_query(draw, depth - 1) for _ in range(draw.randrange(4))]}
    field, value = draw.choice((*QUERY_FIELDS, "tags.level", "tags.' OR 1=1")), draw.choice(_VALUES)
    several: list[Any] = draw.choices(_VALUES, k=draw.randrange(4))
    one, many = draw.choice(("$eq", "$ne", "$gt", "$gte", "$lt", "$lte")), draw.choice(("$in", "$not_in"))
    return {field: draw.choice([value, {one: value}, {many: several}])}
