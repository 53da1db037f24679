"""What was taken from one shard, so that it can be given back as long as the others have not given theirs.

::

    take_from(shard) --> ShardTake --keep--> it stays taken --done--> nobody can give it back any more
                             '-- release, before or after keep --> as it was

Each group comes back with what its row had: status, tags, priority, ages; an ARCHIVED one is ARCHIVED again.
It has its old place, unless it had been removed from the store by then: in a shard of this process, and in
another one after `keep`, if it was taken without a train step. Then it is the newest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Protocol

from forebay.cancelling import finish
from forebay.replay.archiving import taking
from forebay.replay.server_handover import Handover
from forebay.types import RolloutState, Status

if TYPE_CHECKING:
    from forebay.replay.buffer import ReplayBuffer
    from forebay.replay.client import RemoteReplayBuffer
    from forebay.replay.shard_rows import Shard
    from forebay.replay.storage import TagValue

Group = list[RolloutState]


class ShardTake(Protocol):
    """The groups that one shard gave.

    >>> take = await take_from(shard, {"math": 8}, Status.COMPLETED, None, train_step=4)
    >>> await take.keep()
    >>> take.done()
    """

    groups: dict[str, list[Group]]
    """By task."""

    async def keep(self) -> None:
        """They stay taken, also if this process dies.

        Raises:
            ConnectionLost: the connection broke; they are in the shard again.
        """
        ...

    async def release(self) -> None:
        """Nobody has them."""
        ...

    def done(self) -> None:
        """They are with whoever asked; to be called after `keep`."""
        ...


class _LocalTake:
    """From a shard in this process."""

    def __init__(self, groups: dict[str, list[Group]], handover: Handover) -> None:
        self.groups = groups
        self._handover = handover

    async def keep(self) -> None:
        """See `ShardTake.keep`; they are removed or ARCHIVED already."""

    async def release(self) -> None:
        """See `ShardTake.release`."""
        await finish(self._handover.release())

    def done(self) -> None:
        """See `ShardTake.done`."""


async def take_from(
    shard: Shard,
    sizes: Mapping[str, int],
    status: Status,
    tags: Mapping[str, TagValue] | None,
    train_step: int | None,
) -> ShardTake:
    """Take as `ReplayBuffer.take_batch` does; with `tags`, as `ReplayBuffer.get`, which is for one task."""
    from forebay.replay.client import RemoteReplayBuffer

    if isinstance(shard, RemoteReplayBuffer):
        return await _take_remote(shard, sizes, status, tags, train_step)
    return await _take_local(shard, sizes, status, tags, train_step)


async def _take_remote(
    shard: RemoteReplayBuffer,
    sizes: Mapping[str, int],
    status: Status,
    tags: Mapping[str, TagValue] | None,
    train_step: int | None,
) -> ShardTake:
    if tags is None:
        return await shard.begin_take(sizes, status, train_step)
    [(task, size)] = sizes.items()
    return await shard.begin_get(size, task, status, tags)


async def _take_local(
    shard: ReplayBuffer,
    sizes: Mapping[str, int],
    status: Status,
    tags: Mapping[str, TagValue] | None,
    train_step: int | None,
) -> ShardTake:
    held = None if train_step is None else {"status": Status.ARCHIVED, "train_step": train_step}
    async with shard._lock.alone(), taking(shard.storage, train_step) as view:
        groups: dict[str, list[Group]] = {
            task: await shard._take(size, task, status, view, tags=tags, still_held=train_step is not None)
            for task, size in sizes.items()
        }
        if view.taken:
            shard._changes.note()
    return _LocalTake(groups, Handover(shard, {}, view.taken, held, train_step, is_kept=True))


async def release_all(takes: Iterable[tuple[int, ShardTake]], cause: BaseException | None = None) -> None:
    """Give back what these shards gave, each of them whatever becomes of the others.

    What cannot be given back is noted in `cause`.

    Raises:
        BaseException: there is no `cause`: the first error, with the others as notes.
    """
    numbered = sorted(takes, key=itemgetter(0))
    results = await asyncio.gather(*(take.release() for _, take in numbered), return_exceptions=True)
    errors = [
        (number, result)
        for (number, _), result in zip(numbered, results, strict=True)
        if isinstance(result, BaseException)
    ]
    raised = cause if cause is not None or not errors else errors.pop(0)[1]
    if raised is None:
        return
    for number, error in errors:
        raised.add_note(f"and shard {number} did not take back what it had given: {error!r}")
    if raised is not cause:
        raise raised


def merge_taken(
    plan: Mapping[str, Sequence[int]], taken: Mapping[int, ShardTake], groups: Mapping[str, list[Group]]
) -> int:
    """Append what the shards gave to `groups`, in the order of the plan; return how many there are."""
    number_taken = 0
    for task, numbers in plan.items():
        following = {number: iter(take.groups.get(task, ())) for number, take in taken.items()}
        found = [group for number in numbers if (group := next(following[number], None)) is not None]
        groups[task].extend(found)
        number_taken += len(found)
    return number_taken
