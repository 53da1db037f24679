"""What workers and the trainer say to each other, and what a kind of worker has to be able to do.

::

    worker --Report(fragment stored, episodes, version it has)--> hub --buffer.add_fragment--> waits its turn
    worker <--Orders(go on, newer weights if there are any)------ hub <----------------------'

    over a socket: the worker's uuid first; empty messages, both ways, are signs of life

One question, one answer: the worker goes on when the buffer has taken its fragment, so whoever is too far
ahead waits, and begins the next fragment with the newest weights.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

import msgspec
from pydantic import BaseModel

from forebay.environments.workers.vector import EnvironmentConfig
from forebay.io.heartbeat import SILENCE_LIMIT_S


class WorkerDied(RuntimeError):
    """A worker ended without having been told to; the message says what is known of it."""


class WorkerError(RuntimeError):
    """Workers cannot go on: they die before their first fragment, or nothing arrives any more."""


class WorkerSpec(BaseModel, extra="forbid", frozen=True):
    """Everything a worker needs to begin; goes through JSON to another process.

    >>> WorkerSpec.model_validate_json(spec.model_dump_json()) == spec
    True
    """

    worker_uuid: str
    """Of this life of it: a worker that is started again has another one."""
    environment: EnvironmentConfig
    policy: dict[str, Any]
    """A `PolicyConfig`; as a dict, so that whoever only starts workers does not load torch."""
    length: int
    """Steps of a fragment."""
    database_config: dict[str, Any]
    """Of the store, which is on the same machine."""
    session_id: str
    seed: int
    limit_s: float = SILENCE_LIMIT_S
    """A trainer that gives no sign of life for so long is gone; it expects one of the worker as often."""


class Report(msgspec.Struct, array_like=True):
    """A worker to the hub: this fragment is in the store; `episodes` ended since the last report."""

    worker_uuid: str
    version: int
    """Of the weights it has; -1: none yet."""
    fragment_id: str | None = None
    """None: it has only begun, and asks for weights."""
    fid_in_worker: int = 0
    oldest_version: int = -1
    """Of the weights that acted in the fragment."""
    num_steps: int = 0
    """Of all its environments, those that only reset left out."""
    episodes: list[tuple[float, int]] = []
    """Sum of rewards and number of steps of each."""


class Orders(msgspec.Struct, array_like=True):
    """The hub's answer."""

    stop: bool
    version: int
    weights: bytes
    """Of `version`; empty: the worker has the newest."""


class Link(Protocol):
    """A worker's way to the hub."""

    def report(self, report: Report) -> Orders:
        """Send the report and wait for the answer, however long the buffer keeps writers waiting.

        Raises:
            EOFError: the trainer is gone.
        """
        ...


class Answering(Protocol):
    """What a worker talks to, seen from whoever starts it."""

    @property
    def address(self) -> str:
        """Path of the Unix socket it listens at."""
        ...

    async def answer(self, report: Report) -> Orders:
        """For a worker of this process."""
        ...

    async def while_heard(self, worker_uuid: str, life: Coroutine[Any, Any, None]) -> None:
        """Run `life`, of a worker that uses the socket; cancel it once the worker gives no sign of life.

        Raises:
            WorkerDied: the worker is frozen, or its process hangs before its connection or after it.
        """
        ...


class WorkerMode(Protocol):
    """Runs workers in a certain way."""

    async def run(self, spec: WorkerSpec, hub: Answering) -> None:
        """Run one worker until it is told to stop; a cancelled call ends it at once.

        Raises:
            WorkerDied: it ended in another way.
        """
        ...
