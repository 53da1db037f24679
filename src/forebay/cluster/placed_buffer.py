"""The replay buffer of a run as an actor: a client of it that counts how often it had to come back.

::

    PlacedBuffer.start: buffer actor on an SQLite file --killed--> Ray makes it anew on the same file
                             ^                                        |
    RemoteReplayBuffer ------+---- asks where it is now, once more ---+--> counted

The file serves one run, or the rest of one: a run that goes on from a checkpoint has its groups there, and
begins with an empty file.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from forebay.cluster.buffer import start_buffer
from forebay.cluster.library import import_ray
from forebay.replay import RemoteReplayBuffer
from forebay.replay.server_address import Address

FILE = "buffer.db"


class PlacedBuffer:
    """The actor, its file, and this process's client.

    >>> buffer = await PlacedBuffer.start(folder, policy="staleness")
    >>> await buffer.client.put(group, "math")
    >>> await buffer.close()
    """

    def __init__(self, actor: Any, path: Path) -> None:
        self.client: RemoteReplayBuffer
        self.num_restarts = 0
        self._actor = actor
        self._path = path
        self._address = ""

    @classmethod
    async def start(cls, folder: Path, *, policy: str, **settings: Any) -> PlacedBuffer:
        """Start an empty one with its file in `folder`; `settings` as `start_buffer` has them."""
        path = folder / FILE
        _delete(path)
        name = f"forebay-buffer-{uuid.uuid4()}"
        (actor,) = start_buffer(name=name, store=str(path), policy=policy, **settings)
        placed = cls(actor, path)
        placed.client = await RemoteReplayBuffer.connect_through(placed._locate)
        return placed

    async def _locate(self) -> tuple[Address, str]:
        # Ray answers when the actor runs: a call during a restart waits for its end.
        address, token = await self._actor.place.remote()
        # Another process serves at another port; a connection that only broke leads to the same one.
        self.num_restarts += self._address not in ("", address)
        self._address = address
        return Address.parse(address), token

    def pid(self) -> int:
        """The process it is in."""
        found: int = import_ray().get(self._actor.__ray_call__.remote(_pid))
        return found

    async def close(self) -> None:
        """End it; what it held is in the run's checkpoints."""
        await self.client.close()
        import_ray().kill(self._actor)
        _delete(self._path)


def _pid(_: Any) -> int:
    return os.getpid()


def _delete(path: Path) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
