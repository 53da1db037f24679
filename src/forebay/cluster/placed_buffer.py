"""The replay buffer of a run as an actor: a client that counts how often it had to come back.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forebay.cluster.buffer import locate, start_buffer
from forebay.cluster.library import import_ray
from forebay.replay import RemoteReplayBuffer
from forebay.replay.server_address import Address
from forebay.stalls import ANSWER_LIMIT_S

NAME = "buffer"
FILE = "buffer.db"


class PlacedBuffer:
    """The actor, its file, and this process's client.

    >>> buffer = await PlacedBuffer.start(folder, policy="staleness", on_restart=print)
    >>> await buffer.client.put(group, "math")
    >>> await buffer.close()
    """

    def __init__(self, actor: Any, folder: Path, on_restart: Callable[[str, str], None]) -> None:
        self.client: RemoteReplayBuffer
        self._on_restart = on_restart
        self._actor = actor
        self._folder = folder
        self._address: str | None = None

    @classmethod
    async def start(
        cls, folder: Path, *, on_restart: Callable[[str, str], None], **settings: Any
    ) -> PlacedBuffer:
        """Start an empty one with its file in `folder`; `settings` as `start_buffer` has them.

        `on_restart` is told "buffer", and why, when its process was found to be another one.
        """
        _delete_files(folder)
        actor = start_buffer(name=f"forebay-buffer-{uuid.uuid4()}", store=str(folder / FILE), **settings)
        placed = cls(actor, folder, on_restart)
        placed.client = await RemoteReplayBuffer.connect_through(placed._locate)
        return placed

    async def _locate(self) -> tuple[Address, str]:
        address, token = await locate(self._actor)
        # Another process serves at another port; a connection that only broke leads to the same one.
        if self._address not in (None, str(address)):
            self._on_restart(NAME, "its process has ended")
        self._address = str(address)
        return address, token

    def pids(self) -> dict[str, int]:
        """The process of the actor, by the name of the part; a `GetTimeoutError` of Ray's if it is frozen."""
        return {NAME: import_ray().get(self._actor.__ray_call__.remote(_pid), timeout=ANSWER_LIMIT_S)}

    async def close(self) -> None:
        """End it; what it held is in the run's checkpoints."""
        await self.client.close()
        import_ray().kill(self._actor)
        _delete_files(self._folder)


def _pid(_: Any) -> int:
    return os.getpid()


def _delete_files(folder: Path) -> None:
    """Delete the database, with what SQLite keeps beside it."""
    for file in folder.glob(f"{FILE}*"):
        file.unlink()
