"""Groups between two owners: taken from the buffer, and not yet known to be with the client.

::

    live --take--> parked (ARCHIVED, of no train step) --keep--> deleted --done--> forgotten
      ^               |  release                          |  release: the caller was cancelled
      '---------------'                                   '---> live, as the newest of its task

A client that dies before it said `keep` releases what it took: the groups are live again, in their old
places. Parked groups are in the store, so a server that is killed loses none either: the next one that opens
the store calls `recover`. They are of no train step, so `commit` and `restore` pass over them.

ARCHIVED groups that are asked for are removed at once: they are nobody's to train on, and come back, if
they must, as newer ARCHIVED ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forebay.replay.archiving import taking
from forebay.replay.buffer import Group, ReplayBuffer
from forebay.replay.storage import StorageItem, TagValue, copy_row, revive_row
from forebay.types import Status

PARKED_STEP = 0
"""The train step of a row for the moment until it has none; train steps count from 1."""

PARKED = {"status": Status.ARCHIVED, "train_step": None}
"""The query for what is between two owners."""


@dataclass(slots=True, eq=False)
class Handover:
    """The groups of one take, and how to give them back.

    >>> handover = await take_over(buffer, {"math": 64}, Status.COMPLETED)
    >>> await handover.keep()      # or: await handover.release()
    """

    buffer: ReplayBuffer
    groups: dict[str, list[Group]]
    """By task, for whoever asked."""
    rows: list[StorageItem]
    """As they were before."""
    is_parked: bool
    """Whether the store still holds them."""
    is_kept: bool = False

    async def keep(self) -> None:
        """They are with the client: the store forgets them."""
        if self.is_parked:
            await self.buffer.storage.delete([row.uid for row in self.rows])
            self.is_parked = False
        self.is_kept = True

    async def release(self) -> int:
        """Nobody has them: they are live again; return how many."""
        buffer, rows = self.buffer, self.rows
        self.rows = []
        if not rows:
            return 0
        async with buffer._lock.alone():
            if self.is_parked:
                await buffer.storage.update_if([copy_row(row, item=None) for row in rows], PARKED)
            else:
                for row in rows:
                    await buffer.storage.put(row)
            buffer._changes.note()
        return sum(not row.is_archived for row in rows)


async def take_over(
    buffer: ReplayBuffer,
    task_batch_sizes: Mapping[str, int],
    group_status: Status,
    tags: Mapping[str, TagValue] | None = None,
) -> Handover:
    """Take up to so many groups of each task, as `ReplayBuffer.get` does, so that they can be given back."""
    parks = group_status is not Status.ARCHIVED
    groups: dict[str, list[Group]] = {}
    async with buffer._lock.alone(), taking(buffer.storage, PARKED_STEP if parks else None) as view:
        for task, size in task_batch_sizes.items():
            groups[task] = await buffer._take(size, task, group_status, view, tags=tags) if size > 0 else []
        rows = view.taken
        if parks and rows:
            await buffer.storage.update([_parked(row) for row in rows])
        if rows:
            buffer._changes.note()
    return Handover(buffer, groups, rows, is_parked=parks)


async def recover(buffer: ReplayBuffer) -> int:
    """Make live again what a server that was killed had not handed over; return how many groups."""
    interrupted = {**PARKED, "train_step": {"$in": [None, PARKED_STEP]}}
    async with buffer._lock.alone():
        rows = await buffer.storage.get(interrupted, rows_only=True)
        await buffer.storage.update_if([revive_row(row) for row in rows], interrupted)
        if rows:
            buffer._changes.note()
    return len(rows)


def _parked(row: StorageItem) -> StorageItem:
    return copy_row(row, item=None, status=Status.ARCHIVED, status_before=row.status, train_step=None)
