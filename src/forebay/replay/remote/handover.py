"""Groups between two owners: taken from the buffer, and not yet known to be with the client.

::

    live --take--> parked (ARCHIVED, of `PARKED_STEP`) --keep--> removed, or ARCHIVED, of train step i
      ^                          |                                        |
      '--release-----------------+----------------------------------------'

A client that dies before it said `keep` releases what it took: the groups are live again, in their old
places. Parked groups are in the store, so a server that is killed loses none either: the next one that opens
the store calls `recover`. Their step is none of training, so `commit` and `restore` pass over them. A store that
outlives the server remembers with the keeping that it was done, so that a client that asks again is told.

A client whose caller is cancelled releases groups that came too late, as a cancelled take of `ReplayBuffer`
does; groups that were removed by then come back as the newest of their task.

ARCHIVED groups that are asked for are removed, or archived for the other step, at once: no batch to train on
has them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forebay.replay.buffer import ReplayBuffer
from forebay.replay.format.encode import PackedGroup
from forebay.replay.format.packed import pack_out
from forebay.replay.remote.messages import TakeArguments
from forebay.replay.stores.archiving import PARKED_STEP
from forebay.replay.stores.contract import StorageItem, archive_row, copy_row
from forebay.replay.stores.slices import change, revive
from forebay.types import Status

PARKED: Mapping[str, Any] = {"status": Status.ARCHIVED, "train_step": PARKED_STEP}
"""The query for what is between two owners."""


@dataclass(slots=True, eq=False)
class Handover:
    """The groups of one take, and how to give them back: `keep` or `release` ends it."""

    buffer: ReplayBuffer
    groups: dict[str, list[PackedGroup]]
    """The groups by task, as they go to the client."""
    rows: list[StorageItem]
    """Their rows as they were before the take, to be put back."""
    held: Mapping[str, Any] | None
    """The query for where the store has them now; None if they are removed."""
    train_step: int | None
    """The train step that they were taken for; None: for none."""
    is_kept: bool = False
    """Whether they stay taken when the client is gone."""

    async def keep(self, key: bytes) -> bool:
        """They are with the client: the store forgets them, or archives them for the train step.

        False, and they are live again, if one of them is not parked any more: a snapshot was resumed, say.
        """
        storage = self.buffer.storage
        noted = {"receipt": key} if storage.keeps_receipts else {}
        # Only what is still parked: a snapshot that was resumed meanwhile may use the same uids.
        parked = {"uid": {"$in": [row.uid for row in self.rows]}, **PARKED}
        num_rows = num_kept = len(self.rows)
        async with self.buffer._lock.alone():
            if self.held is PARKED and self.train_step is None:
                num_kept = await storage.delete_where(parked, expected=num_rows, **noted)
                self.held = None if num_kept == num_rows else PARKED
            elif self.held is PARKED and self.train_step is not None:
                archived = [archive_row(copy_row(row, item=None), self.train_step) for row in self.rows]
                num_kept = await storage.update_if(archived, parked, expected=num_rows, **noted)
                if num_kept == num_rows:
                    self.held = {"status": Status.ARCHIVED, "train_step": self.train_step}
        self.is_kept = num_kept == num_rows
        if not self.is_kept:
            await self.release()
        return self.is_kept

    async def release(self) -> int:
        """Put them back as they were, because no caller has them; return how many are live."""
        buffer = self.buffer
        async with buffer._lock.alone():
            if not (rows := self.rows):
                return 0
            if self.held is not None:
                num_back = await change(buffer.storage, rows, lambda row: copy_row(row, item=None), self.held)
            else:
                num_back = len(await buffer.storage.put_many(rows))
            # Not before: what could not be given back is, by the next call.
            self.rows = []
            buffer._changes.note()
        return min(num_back, sum(not row.is_archived for row in rows))


async def take_over(buffer: ReplayBuffer, arguments: TakeArguments, *, max_bytes: int) -> Handover:
    """Take as `ReplayBuffer.take_batch` and `ReplayBuffer.get` do, so that it can be undone later.

    The groups are packed before the lock is released, so that it does not matter what becomes of them.

    Raises:
        ValueError: a group cannot be sent, or has more than `max_bytes`; then nothing is taken.
    """
    train_step, status = arguments.train_step, arguments.group_status
    parks = status is not Status.ARCHIVED
    groups: dict[str, list[PackedGroup]] = {}
    async with buffer._lock.alone(), buffer._taking(PARKED_STEP if parks else train_step) as view:
        for task, size in arguments.task_batch_sizes.items():
            taking = buffer._take(size, task, status, view, tags=arguments.tags, present=pack_out)
            groups[task] = await taking
            for packed in groups[task]:
                if (num_bytes := sum(packed.size)) > max_bytes:
                    raise ValueError(
                        f"a group has {num_bytes} bytes, and a message at most {max_bytes}; "
                        f"serve the buffer with larger max_frame_bytes"
                    )
        if view.taken:
            buffer._changes.note()
    archived = {"status": Status.ARCHIVED, "train_step": train_step}
    held = PARKED if parks else None if train_step is None else archived
    return Handover(buffer, groups, view.taken, held, train_step)


async def recover(buffer: ReplayBuffer) -> int:
    """Make live again what a server that was killed had not handed over; return how many groups."""
    # A server of version 0.2.0 left them of step 0 or none; a group that was put as ARCHIVED has none, too.
    interrupted = {**PARKED, "train_step": {"$in": [None, 0, PARKED_STEP]}, "status_before": {"$ne": None}}
    async with buffer._lock.alone():
        if num_revived := await revive(buffer.storage, interrupted):
            buffer._changes.note()
    return num_revived
