"""The replay buffer of a run as one actor or several: a client that counts how often it had to come back.

::

    PlacedBuffer.start: buffer actor on an SQLite file --killed--> Ray makes it anew on the same file
                             ^                                        |
    RemoteReplayBuffer ------+---- asks where it is now, once more ---+--> counted

    of several shards: an actor, a file and a client each, under one ShardedReplayBuffer

The files serve one run, or the rest of one: a run that goes on from a checkpoint has its groups there, and
begins with empty files.
"""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from forebay.cluster.buffer import locate, start_buffer
from forebay.cluster.library import import_ray
from forebay.replay import RemoteReplayBuffer, ShardedReplayBuffer
from forebay.replay.server_address import Address
from forebay.replay.server_command import POLICIES

FILE = "buffer.db"
_FILES = ("buffer.db*", "buffer-[0-9]*.db*")
"""Of one shard, of several; with what the database keeps beside them."""


class PlacedBuffer:
    """The actors, their files, and this process's client.

    >>> buffer = await PlacedBuffer.start(folder, policy="staleness", on_restart=print, num_shards=2)
    >>> await buffer.client.put(group, "math")
    >>> await buffer.close()
    """

    def __init__(self, actors: list[Any], folder: Path, on_restart: Callable[[str, str], None]) -> None:
        self.client: RemoteReplayBuffer | ShardedReplayBuffer
        self._on_restart = on_restart
        names = ["buffer"] if len(actors) == 1 else [f"buffer {number}" for number in range(len(actors))]
        self._actors = dict(zip(names, actors, strict=True))
        self._folder = folder
        self._addresses: dict[str, str] = {}

    @classmethod
    async def start(
        cls,
        folder: Path,
        *,
        policy: str,
        on_restart: Callable[[str, str], None],
        num_shards: int = 1,
        limit: int | None = None,
        **settings: Any,
    ) -> PlacedBuffer:
        """Start an empty one with its files in `folder`; `settings` as `start_buffer` has them.

        `limit` is that of all shards together; each has an equal part of it. `on_restart` is told "buffer",
        or "buffer 1" of several, and why, when its process was found to be another one.
        """
        _delete_files(folder)
        actors = start_buffer(
            name=f"forebay-buffer-{uuid.uuid4()}",
            store=str(folder / FILE),
            policy=policy,
            num_shards=num_shards,
            limit=None if limit is None else math.ceil(limit / num_shards),
            **settings,
        )
        placed = cls(actors, folder, on_restart)
        async with AsyncExitStack() as stack:
            shards = []
            for name in placed._actors:
                client = await RemoteReplayBuffer.connect_through(partial(placed._locate, name))
                shards.append(await stack.enter_async_context(client))
            # From here on `close` ends them.
            stack.pop_all()
        placed.client = shards[0] if num_shards == 1 else ShardedReplayBuffer(shards, POLICIES[policy]())
        return placed

    async def _locate(self, name: str) -> tuple[Address, str]:
        address, token = await locate(self._actors[name])
        # Another process serves at another port; a connection that only broke leads to the same one.
        if self._addresses.get(name, str(address)) != str(address):
            self._on_restart(name, "its process has ended")
        self._addresses[name] = str(address)
        return address, token

    def pids(self) -> dict[str, int]:
        """The process of each part, by its name."""
        asked = [actor.__ray_call__.remote(_pid) for actor in self._actors.values()]
        return dict(zip(self._actors, import_ray().get(asked), strict=True))

    async def close(self) -> None:
        """End it; what it held is in the run's checkpoints."""
        await self.client.close()
        for actor in self._actors.values():
            import_ray().kill(actor)
        _delete_files(self._folder)


def _pid(_: Any) -> int:
    return os.getpid()


def _delete_files(folder: Path) -> None:
    for pattern in _FILES:
        for file in folder.glob(pattern):
            file.unlink()
