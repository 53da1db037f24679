"""Saving and resuming beside the event loop: each step of `ReplayBuffer.save` and `resume` that takes long.

::

    save:    state_of -> (lock released) -> write        resume:    read -> (lock taken) -> load

The steps are plain functions for a thread, and the thread also imports what they need: loading Arrow for the
first time takes longer than the event loop may stand still.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from forebay.cancelling import finish
from forebay.replay.storage import StorageBackend

if TYPE_CHECKING:
    from forebay.replay.snapshot import Snapshot

Result = TypeVar("Result")


async def run_to_the_end(function: Callable[..., Result], *args: object) -> Result:
    """Run `function` in a thread; when cancelled, wait for its end first: a thread cannot be stopped."""
    return await finish(asyncio.to_thread(function, *args))


def state_of(storage: StorageBackend) -> dict[str, Any]:
    """What a snapshot keeps of the store, as fields of `Snapshot`."""
    return {"storage": storage.state_dict(), "num_evicted": dict(storage.num_evicted)}


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write the snapshot with these fields to `path`; see `write_snapshot`."""
    from forebay.replay.snapshot import Snapshot, write_snapshot

    write_snapshot(path, Snapshot(**content))


def read(path: Path, policy: str) -> Snapshot:
    """The snapshot at `path`; see `read_snapshot`."""
    from forebay.replay.snapshot import read_snapshot

    return read_snapshot(path, policy=policy)


def load(storage: StorageBackend, snapshot: Snapshot) -> None:
    """Make the store hold what the snapshot holds."""
    storage.load_state_dict(snapshot.storage)
    storage.num_evicted = dict(snapshot.num_evicted)
