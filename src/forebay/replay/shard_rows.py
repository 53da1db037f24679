"""The rows of several shards as if they were those of one store: counted, ranked, merged.

::

    query, order, limit --> every shard: its first `limit` rows --> merged by the order --> the first `limit`

It changes nothing and moves no payload. A row's uid is ``uid there * shards + number of the shard``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from forebay.replay.query import QueryLike
from forebay.replay.storage import StorageItem, copy_row, parse_order

if TYPE_CHECKING:
    from forebay.replay.buffer import ReplayBuffer
    from forebay.replay.client import RemoteReplayBuffer

Shard: TypeAlias = "ReplayBuffer | RemoteReplayBuffer"


class Rows(Protocol):
    """What is asked of a shard's store."""

    async def count(self, query: Any) -> int:
        """See `StorageBackend.count`."""
        ...

    async def get(
        self, query: Any, *, order: str | None = None, limit: int | None = None, rows_only: bool = False
    ) -> list[StorageItem]:
        """See `StorageBackend.get`."""
        ...

    async def get_train_step(self, task_name: str) -> int | None:
        """See `StorageBackend.get_train_step`."""
        ...


class ShardedRows:
    """Looks at the rows of all shards.

    >>> await buffer.storage.get({"task_name": "math"}, order="-staleness", limit=8, rows_only=True)
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._stores: list[Rows] = [shard.storage for shard in shards]

    async def count(self, query: QueryLike) -> int:
        """See `StorageBackend.count`."""
        return sum(await asyncio.gather(*(store.count(query) for store in self._stores)))

    async def get(
        self, query: QueryLike, *, order: str | None = None, limit: int | None = None, rows_only: bool = False
    ) -> list[StorageItem]:
        """See `StorageBackend.get`; only for ``rows_only=True``.

        Raises:
            ValueError: payloads are asked for, or the query or the order is not one.
        """
        if not rows_only:
            raise ValueError("a sharded store shows its rows only; give rows_only=True, or take the groups")
        ranked = await self.rank(query, order=order, limit=limit)
        shards = len(self._stores)
        return [copy_row(row, uid=row.uid * shards + number) for number, row in ranked]

    async def rank(
        self, query: QueryLike, *, order: str | None = None, limit: int | None = None
    ) -> list[tuple[int, StorageItem]]:
        """The first rows of all shards in order, each with the number of its shard."""
        found = await asyncio.gather(
            *(store.get(query, order=order, limit=limit, rows_only=True) for store in self._stores)
        )
        return merge_rows(enumerate(found), order)[:limit]


def merge_rows(
    of_shards: Iterable[tuple[int, Sequence[StorageItem]]], order: str | None
) -> list[tuple[int, StorageItem]]:
    """The rows in order, ties as they arrived, each with the number of its shard."""
    field, descending = parse_order(order)
    rows = [(number, row) for number, found in of_shards for row in found]
    rows.sort(key=lambda pair: (pair[1].timestamp_id, pair[0]))
    rows.sort(key=lambda pair: getattr(pair[1], field), reverse=descending)
    return rows


def split_uids(priorities: Mapping[Any, float], shards: int) -> list[dict[int, float]]:
    """For each shard: the priorities of its rows, by the uids there. What is no uid belongs to nobody."""
    of_shards: list[dict[int, float]] = [{} for _ in range(shards)]
    for uid, priority in priorities.items():
        if isinstance(uid, int) and not isinstance(uid, bool):
            of_shards[uid % shards][uid // shards] = priority
    return of_shards
