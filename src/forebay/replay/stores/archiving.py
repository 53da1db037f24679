"""The store as a policy sees it while a batch is taken: for a train step, removed rows become ARCHIVED.

A policy removes what it returns, by `take` or by `delete`, and need not know for what. Handed this view of
the store, the same policy archives. The view remembers what was removed and what was put, so that a batch
that is cancelled or fails half way is given back, and groups of which only some could be put are taken out.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from forebay.aio.tasks import outlast
from forebay.replay.query import ARCHIVED, QueryLike
from forebay.replay.stores.contract import StorageBackend, StorageItem, copy_row
from forebay.replay.stores.slices import change, slices_of

PARKED_STEP, COPY_STEP = 2**62 - 1, 2**62
"""Train steps of ARCHIVED rows that none consumed, which no `restore` makes live, and no `commit` prunes: groups
between two owners, and copies of unfinished ones."""


class ArchivingStorage:
    """A view of `storage` whose takes and `delete` archive rows for `train_step`, or remove them if None.

    Everything else is the store's own.
    """

    def __init__(self, storage: StorageBackend, train_step: int | None) -> None:
        self._storage = storage
        self._train_step = train_step
        self.held: QueryLike = {"status": ARCHIVED, "train_step": train_step}
        """The query for the archived rows until the batch is done."""
        self.taken: list[StorageItem] = []
        """The rows that were removed through this view, as they were."""
        self.added: list[int] = []
        """The uids of the rows that were put through it."""

    async def give_back(self) -> None:
        """Undo what was done through this view; rows that were not archived come back as the newest."""
        if self.added:
            await self._storage.delete(self.added)
        if self._train_step is None:
            for part in slices_of(self.taken, self._storage.rows_at_once):
                for row in part:
                    await self._storage.put(row)
                await asyncio.sleep(0)
        else:
            # Only rows that still are as they were left: another process may have gone back to a checkpoint.
            await change(self._storage, self.taken, lambda row: copy_row(row, item=None), self.held)

    async def put(self, item: StorageItem) -> int:
        uid = await self._storage.put(item)
        self.added.append(uid)
        return uid

    async def take(
        self, uids: Iterable[int], *, query: QueryLike | None = None, train_step: int | None = None
    ) -> list[StorageItem]:
        """Archive or remove these rows and return them as they were."""
        before = len(self.taken)
        for part in slices_of(uids, self._storage.rows_at_once):
            self.taken += await self._storage.take(part, query=query, train_step=self._train_step)
            await self._let_others(len(part))
        return self.taken[before:]

    async def take_first(
        self, count: int, query: QueryLike, *, order: str | None = None, train_step: int | None = None
    ) -> list[StorageItem]:
        """Archive or remove the first rows and return them as they were."""
        take = partial(self._storage.take_first, query=query, order=order, train_step=self._train_step)
        return await self._take_slices(count, take)

    async def take_drawn(
        self, count: int, query: QueryLike, random: Callable[[], float], *, train_step: int | None = None
    ) -> list[StorageItem]:
        """Archive or remove drawn rows and return them as they were."""
        take = partial(self._storage.take_drawn, query=query, random=random, train_step=self._train_step)
        return await self._take_slices(count, take)

    async def _take_slices(self, count: int, take: Callable[[int], Awaitable[list[StorageItem]]]) -> list[StorageItem]:
        """Up to `count` rows, a few at a time: the buffer holds its lock, but other work may go on."""
        at_once = self._storage.rows_at_once or max(count, 1)
        before = len(self.taken)
        while (left := count - len(self.taken) + before) > 0:
            taken = await take(min(left, at_once))
            self.taken += taken
            # Fewer than asked for: there are no more.
            if len(taken) < min(left, at_once):
                break
            await self._let_others(len(taken))
        return self.taken[before:]

    async def _let_others(self, num_rows: int) -> None:
        if num_rows == self._storage.rows_at_once:
            await asyncio.sleep(0)

    async def delete(self, uids: Iterable[int]) -> None:
        """Archive or remove these rows."""
        await self.take(uids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def __len__(self) -> int:
        return len(self._storage)


@asynccontextmanager
async def taking(storage: StorageBackend, train_step: int | None) -> AsyncIterator[ArchivingStorage]:
    """A view for the time of one batch; on any error, or if cancelled, what was taken is given back."""
    view = ArchivingStorage(storage, train_step)
    try:
        yield view
    except BaseException:
        # In a task of its own: a second cancellation must not stop it half way.
        giving_back = asyncio.ensure_future(view.give_back())
        await outlast(giving_back)
        # If giving back failed, that is the worse news.
        giving_back.result()
        raise
