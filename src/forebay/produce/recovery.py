"""A checkpoint of production that stops nothing, and going on from one with what came after it.

::

    cut: samplers, progress, place in the ledger, groups in memory, all of one moment --write--> a folder
                                                    (groups in a durable store stay there)

    settle, after samplers, progress and ledger were put back to the checkpoint of train step S:

        a group's row in the buffer                  its place in the books of S    becomes
        consumed or dropped after S                  live, or none                  live: restore(S)
        live                                         live                           live
        live                                         none, or only admitted         entered from the row
        copy of an unfinished one, without another   live, or none                  live, with its tokens
        live (a power cut took the last commits)     trained or dropped             deleted
        FAILED, perhaps for want of a lost part      any                            generated again
        none: it was in flight, at S or at the end   live                           generated again
        none: taken up after S                       none                           the sampler comes to it

A row carries its group's entry of the books, as tags, so both are one transaction.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from forebay.io.safe_files import seal, write_json, write_text
from forebay.ledger import Ledger
from forebay.produce.sampler import Sampler
from forebay.produce.strategies.rules import GROUP_TAG, name_group
from forebay.produce.unfinished import COPIES
from forebay.replay import ReplayBuffer, StorageItem
from forebay.replay.stores.slices import revive, slices_of
from forebay.types import Status

logger = logging.getLogger(__name__)

GROUPS = "buffer"
"""The folder with the groups, in that of a checkpoint; none where they stay in a durable store."""
LOST = "lost"
"""Why a group is dropped that was in flight and that no sampler can make again."""


@dataclass(eq=False)
class Cut:
    """Production as of one moment, until it is closed."""

    state: dict[str, Any]
    samplers: dict[str, dict[str, Any]]
    ledger: Ledger
    write_groups: Callable[[Path], Awaitable[None]] | None
    opened: AsyncExitStack

    async def write(self, path: Path) -> None:
        """Write it to the folder `path`, whose last file makes it count."""
        await asyncio.to_thread(path.mkdir, parents=True, exist_ok=True)
        if self.write_groups is not None:
            await self.write_groups(path / GROUPS)
        for name, place in self.samplers.items():
            await asyncio.to_thread(write_text, sampler_path(path, name), json.dumps(place))
        # Before the checkpoint counts: it names a place in the ledger's file, which must be there.
        await asyncio.to_thread(self.ledger.sync)
        await asyncio.to_thread(write_json, path / "manager.json", self.state)
        await asyncio.to_thread(seal, path)

    async def aclose(self) -> None:
        """Release the snapshot."""
        await self.opened.aclose()


def sampler_path(path: Path, task_name: str) -> Path:
    """The file of a task's sampler in the checkpoint at `path`."""
    # Task names are free text; those of files are not.
    return path / f"sampler-{quote(task_name, safe='')}.json"


async def settle(buffer: ReplayBuffer, ledger: Ledger, samplers: Mapping[str, Sampler], train_step: int) -> None:
    """Bring buffer, books and samplers together, as in the module's table."""
    await buffer.restore(train_step)
    rows = await buffer.storage.get({}, rows_only=True)
    # Of an earlier version, or put by a program of its own.
    unnamed = [row.uid for row in rows if GROUP_TAG not in row.tags]
    names = {row.uid: name_group(row.item) for row in await buffer.storage.get({"uid": {"$in": unnamed}})}
    copies = await buffer.storage.get(COPIES, order="-timestamp_id", rows_only=True)
    held: dict[str, set[Any]] = {name: set() for name in samplers}
    settled: list[int] = []
    # Copies come last, the latest first: a group that has a row of its own is further on.
    for some in slices_of([*rows, *copies], ROWS_AT_ONCE):
        found: dict[str, dict[Any, StorageItem]] = {}
        for row in some:
            group_id, of_task = names.get(row.uid, row.tags.get(GROUP_TAG)), found.setdefault(row.task_name, {})
            if row.status is Status.FAILED or group_id in held.setdefault(row.task_name, set()) or group_id in of_task:
                settled.append(row.uid)
            else:
                of_task[group_id] = row
        for name, of_task in found.items():
            over = ledger.record_found(name, {group_id: row.tags for group_id, row in of_task.items()})
            settled += [of_task[group_id].uid for group_id in over]
            held[name] |= of_task.keys() - over
        await asyncio.sleep(0)
    await buffer.storage.delete(settled)
    # After the deletion: of a group's copies only the one that is needed becomes live.
    await revive(buffer.storage, COPIES)
    for name, sampler in samplers.items():
        missing = [group_id for group_id in ledger.name_live(name) if group_id not in held[name]]
        for group_id in sampler.catch_up(ledger.life, missing):
            ledger.record(group_id, name, "dropped", reason=LOST)
        kept, again = len(held[name]), len(missing)
        logger.info("task %s: %d groups are kept, %d that were in flight are generated again", name, kept, again)


ROWS_AT_ONCE = 1000
"""Rows that are looked at between two turns of the event loop; it takes about 10 ms."""
