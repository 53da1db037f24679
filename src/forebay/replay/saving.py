"""Saving and resuming beside the event loop: each step of `ReplayBuffer.save` and `resume` that takes long.

::

    save:    opened_state -> (lock released) -> write        resume:    read -> (lock taken) -> load

The steps run in threads, which also import what they need: loading Arrow for the first time takes longer than
the event loop may stand still. A store on disk is read while the snapshot is written, as of the moment at
which the lock was held: a few groups at a time, so that a save does not need memory for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from forebay.aio.cancellation import finish
from forebay.replay.stores.contract import StorageBackend

if TYPE_CHECKING:
    from forebay.replay.format.snapshot import Snapshot

Result = TypeVar("Result")


async def run_to_the_end(function: Callable[..., Result], *args: object) -> Result:
    """Run `function` in a thread; when cancelled, wait for its end first: a thread cannot be stopped."""
    return await finish(asyncio.to_thread(function, *args))


@runtime_checkable
class ReadInPieces(Protocol):
    """A store whose content need not be in memory at once."""

    def reading_state(self) -> AbstractContextManager[dict[str, Any]]:
        """As `StorageBackend.state_dict`, for the time of a block."""
        ...


@asynccontextmanager
async def opened_state(storage: StorageBackend) -> AsyncIterator[dict[str, Any]]:
    """What a snapshot keeps of the store as it is now, as fields of `Snapshot`, for the time of the block.

    >>> async with opened_state(storage) as state:
    ...     await run_to_the_end(write, path, state | {"policy": "FIFOReplayPolicy", "policy_state": {}})
    """
    stack = ExitStack()
    try:
        yield await run_to_the_end(_open_state, storage, stack)
    finally:
        await run_to_the_end(stack.close)


def _open_state(storage: StorageBackend, stack: ExitStack) -> dict[str, Any]:
    if isinstance(storage, ReadInPieces):
        state = stack.enter_context(storage.reading_state())
    else:
        state = storage.state_dict()
    return {"storage": state, "num_evicted": dict(storage.num_evicted)}


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write the snapshot with these fields to `path`; see `write_snapshot`."""
    from forebay.replay.format.snapshot import Snapshot, write_snapshot

    write_snapshot(path, Snapshot(**content))


def read(path: Path, policy: str) -> Snapshot:
    """The snapshot at `path`; see `read_snapshot`."""
    from forebay.replay.format.snapshot import read_snapshot

    return read_snapshot(path, policy=policy)


def load(storage: StorageBackend, snapshot: Snapshot) -> None:
    """Make the store hold what the snapshot holds."""
    storage.load_state_dict(snapshot.storage)
    storage.num_evicted = dict(snapshot.num_evicted)
