"""The store as a policy sees it while a train step takes its batch: what is removed becomes ARCHIVED.

A policy removes what it returns, by `take` or by `delete`, and need not know for what. Handed this view of
the store, the same policy archives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from forebay.replay.query import QueryLike
from forebay.replay.storage import StorageBackend, StorageItem


class ArchivingStorage(StorageBackend):
    """A view of `storage` whose `take` and `delete` archive rows for `train_step`; else the store's own.

    >>> await FIFOReplayPolicy().get(8, {"status": "completed"}, ArchivingStorage(store, train_step=5))
    """

    def __init__(self, storage: StorageBackend, train_step: int) -> None:
        self._storage = storage
        self._train_step = train_step

    async def put(self, item: StorageItem) -> int:
        """As the store."""
        return await self._storage.put(item)

    async def get(
        self, query: QueryLike, *, order: str | None = None, limit: int | None = None, rows_only: bool = False
    ) -> list[StorageItem]:
        """As the store."""
        return await self._storage.get(query, order=order, limit=limit, rows_only=rows_only)

    async def count(self, query: QueryLike) -> int:
        """As the store."""
        return await self._storage.count(query)

    async def take(
        self, uids: Iterable[int], *, query: QueryLike | None = None, train_step: int | None = None
    ) -> list[StorageItem]:
        """Archive these rows and return them as they were."""
        return await self._storage.take(uids, query=query, train_step=self._train_step)

    async def delete(self, uids: Iterable[int]) -> None:
        """Archive these rows."""
        await self._storage.take(uids, train_step=self._train_step)

    async def update(self, items: Iterable[StorageItem]) -> None:
        """As the store."""
        await self._storage.update(items)

    async def get_train_step(self, task_name: str) -> int | None:
        """As the store."""
        return await self._storage.get_train_step(task_name)

    async def set_train_step(self, task_name: str, train_step: int) -> None:
        """As the store."""
        await self._storage.set_train_step(task_name, train_step)

    def __len__(self) -> int:
        return len(self._storage)

    def state_dict(self) -> dict[str, Any]:
        """As the store."""
        return self._storage.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As the store."""
        self._storage.load_state_dict(state)
