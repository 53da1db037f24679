"""The messages between workers and the trainer.

::

    worker --Note(its uuid)-------------------------------------> hub
    worker --Report(fragment stored, episodes, version it has)--> hub --buffer.add_fragment--> waits its turn
    worker <--Orders(go on, newer weights if there are any)------ hub <----------------------'

One question, one answer: the worker goes on when the buffer has taken its fragment, so a worker that is too
far ahead waits, and begins the next fragment with the newest weights.
"""

from typing import Any, NamedTuple

import msgspec
from pydantic import BaseModel

from forebay.environments.config import EnvironmentConfig, PolicyConfig
from forebay.io.messages import SILENCE_LIMIT_S


class WorkerDied(RuntimeError):
    """A worker ended without having been told to; the message says what is known of it."""


class WorkerError(RuntimeError):
    """Workers cannot go on: they die before their first fragment, or nothing arrives any more."""


class WorkerSpec(BaseModel, extra="forbid", frozen=True):
    """Everything a worker needs to begin; goes through JSON to another process.

    >>> spec = WorkerSpec(worker_uuid="w", environment={"id": "CartPole-v1"}, policy={}, length=64,
    ...     database_config={"path": "store"}, session_id="run", seed=0)
    >>> WorkerSpec.model_validate_json(spec.model_dump_json()) == spec
    True
    """

    worker_uuid: str
    """The name of this life of the worker: one that is started again has another."""
    environment: EnvironmentConfig
    policy: PolicyConfig
    length: int
    """Steps of a fragment."""
    database_config: dict[str, Any]
    """The settings of the store, which is on the same machine."""
    session_id: str
    seed: int
    limit_s: float = SILENCE_LIMIT_S
    """A trainer that gives no sign of life for so long is gone; it expects one of the worker as often."""


class Episode(NamedTuple):
    """An episode that ended."""

    reward: float
    """The sum of its rewards, not discounted."""
    num_steps: int


class Report(msgspec.Struct, array_like=True):
    """A worker to the hub: this fragment is in the store; `episodes` ended since the last report."""

    worker_uuid: str
    version: int
    """The version of the weights it has; -1: none yet."""
    fragment_id: str | None = None
    """None: it has only begun, and asks for weights."""
    fid_in_worker: int = 0
    oldest_version: int = -1
    """The oldest version of the weights that acted in the fragment."""
    num_steps: int = 0
    """Steps of all its environments; steps that only reset are left out."""
    episodes: list[Episode] = []


class Orders(NamedTuple):
    """The hub's answer to a worker: what to do next."""

    stop: bool
    version: int
    weights: bytes
    """The weights of `version`; empty: the worker has the newest."""
