"""Many rows of a store changed in slices, so that the event loop can do other work in between.

::

    commit -> forget      restore -> revive      update_priorities -> reweigh      hand-overs -> change

The buffer holds its lock meanwhile, so that its callers see all of it or nothing. A store that leaves the
event loop free by itself (`StorageBackend.rows_at_once` is None) is asked once: its call is one transaction.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

from forebay.replay.query import QueryLike, plain_value, read_field
from forebay.replay.stores.contract import StorageBackend, StorageItem, check_priority, revive_row

ROWS_AT_ONCE = 256
"""Rows that are built or changed between two turns of the event loop; it takes a few milliseconds."""

Item = TypeVar("Item")
Made = TypeVar("Made")


def slices_of(items: Iterable[Item], size: int | None) -> Iterator[list[Item]]:
    """The items in lists of `size`; all in one if it is None.

    >>> list(slices_of([1, 2, 3], 2))
    [[1, 2], [3]]
    """
    iterator = iter(items)
    while part := list(islice(iterator, size)):
        yield part


async def map_in_turns(make: Callable[[Item], Made], items: Iterable[Item], size: int) -> list[Made]:
    """``make(item)`` for each; after each `size` of them, other work of the event loop has its turn.

    No generator of slices: one costs a single group, as most puts have, up to a tenth of the put.
    """
    made: list[Made] = []
    for item in items:
        if made and not len(made) % size:
            await asyncio.sleep(0)
        made.append(make(item))
    return made


async def forget(storage: StorageBackend, query: QueryLike) -> int:
    """Remove the rows that match; return how many."""
    if storage.rows_at_once is None:
        return await storage.delete_where(query)
    number = 0
    while rows := await storage.get(query, limit=storage.rows_at_once, rows_only=True):
        await storage.delete([row.uid for row in rows])
        number += len(rows)
        await asyncio.sleep(0)
    return number


async def revive(storage: StorageBackend, query: QueryLike) -> int:
    """Make the consumed rows that match live again; return how many."""
    number = 0
    while rows := await storage.get(query, limit=storage.rows_at_once, rows_only=True):
        changed = await change(storage, rows, revive_row, query)
        number += changed
        if storage.rows_at_once is None or not changed:
            # Those that are left were changed by another process since they were read.
            break
    return number


async def change(
    storage: StorageBackend, rows: Iterable[StorageItem], make: Callable[[StorageItem], StorageItem], query: QueryLike
) -> int:
    """Replace each of these rows that still matches by ``make(row)``; return how many."""
    number = 0
    made: list[StorageItem] = []
    for part in slices_of(rows, ROWS_AT_ONCE):
        made += map(make, part)
        # A store that changes all rows in one transaction is asked once, at the end.
        if storage.rows_at_once is not None:
            number += await storage.update_if(made, query)
            made = []
        await asyncio.sleep(0)
    return number + (await storage.update_if(made, query) if made else 0)


async def check_priorities(priorities: Mapping[Any, float]) -> dict[Any, float]:
    """The priorities by plain values; ValueError if one is none."""

    def check(pair: tuple[Any, float]) -> tuple[Any, float]:
        return plain_value(pair[0]), check_priority(pair[1])

    # A copy, because the caller may change its own between two turns.
    return dict(await map_in_turns(check, [*priorities.items()], ROWS_AT_ONCE))


async def reweigh(
    storage: StorageBackend, priorities: Mapping[Any, float], by: str, of_task: Mapping[str, str]
) -> int:
    """Give the live rows with these values of the field `by` these priorities; return how many."""
    number = 0
    for part in slices_of(priorities.items(), ROWS_AT_ONCE):
        wanted = dict(part)
        rows = await storage.get({"$and": [{by: {"$in": list(wanted)}}, of_task]}, rows_only=True)
        number += await storage.update_priorities({row.uid: wanted[read_field(row, by)] for row in rows})
        await asyncio.sleep(0)
    return number
