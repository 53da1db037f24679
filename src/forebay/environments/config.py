"""The recipe of a run in environments: every table of it; importing it loads no torch."""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from forebay.config import ArgumentPaths, ConfigError
from forebay.fragments import RateLimit
from forebay.runs.config import RunFile


class EnvironmentConfig(BaseModel, extra="forbid", frozen=True):
    """A recipe's ``[environment]`` table: the task, and how many work on it.

    >>> EnvironmentConfig(id="CartPole-v1").num_envs
    8
    """

    id: str
    """Of a registered gymnasium environment; ``my_module:MyEnv-v0`` imports the module first."""
    arguments: Annotated[dict[str, Any], ArgumentPaths] = {}
    """Further keyword arguments of ``gymnasium.make``."""
    num_envs: int = Field(default=8, ge=1)
    """Environments that each worker steps together."""
    workers: int = Field(default=2, ge=1)
    """Processes or threads that act at the same time."""
    mode: str = "processes"
    """``processes``, ``threads``, or ``package.module:Class``."""


class FragmentsConfig(BaseModel, extra="forbid", frozen=True):
    """A recipe's ``[fragments]`` table: how the stream is cut, and how long the buffer keeps the pieces.

    >>> FragmentsConfig(length=64, max_staleness=2).fragments_per_chunk
    1
    """

    length: int = Field(default=64, ge=1)
    """Steps that a worker takes before it sends them and asks for newer weights."""
    fragments_per_chunk: int = Field(default=1, ge=1)
    """Consecutive fragments that are trained as one stream."""
    max_staleness: int = Field(default=4, ge=0)
    """Train steps that the oldest fragment of a chunk may be behind."""
    max_reuse: int = Field(default=1, ge=1)
    """Batches that a chunk may be part of."""


class PolicyConfig(BaseModel, extra="forbid", frozen=True):
    """A recipe's ``[policy]`` table.

    >>> PolicyConfig(memory="gru").hidden_size
    64
    """

    hidden_size: int = Field(default=64, ge=1)
    """Units of every hidden layer, and H."""
    memory: Literal["none", "gru", "lstm"] = "none"
    """The memory from step to step: none, or the state of a GRU or an LSTM."""


class PPOConfig(BaseModel, extra="forbid", frozen=True):
    """A recipe's ``[train]`` table.

    >>> PPOConfig(lr=1e-3).clip
    0.2
    """

    lr: float = Field(default=3e-4, gt=0)
    """Of Adam; it falls linearly to 0 over the steps of the run."""
    clip: float = Field(default=0.2, gt=0)
    """The probability ratio counts from ``1 - clip`` to ``1 + clip``."""
    epochs: int = Field(default=10, ge=1)
    """Passes over a batch."""
    mini_batches: int = Field(default=8, ge=1)
    """Optimizer steps that one pass is split into; with memory whole streams stay together."""
    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount of a reward one step later."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """The lambda of generalized advantage estimation."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""


class FragmentRunConfig(RunFile):
    """A whole run, as ``forebay train`` takes it; `environment` is what tells it from other run files.

    >>> FragmentRunConfig(name="mine", steps=10, batch_size=4, environment={"id": "CartPole-v1"}).folder
    PosixPath('runs/mine')
    """

    batch_size: int = Field(ge=1)
    """Chunks per train step."""
    checkpoint_every: int = Field(default=20, ge=0)
    """Train steps between checkpoints, each with an evaluation; 0: only at the end or when stopped."""
    eval_episodes: int = Field(default=100, ge=1)
    """Episodes of an evaluation, which takes the likeliest actions."""
    environment: EnvironmentConfig
    fragments: FragmentsConfig = FragmentsConfig()
    policy: PolicyConfig = PolicyConfig()
    train: PPOConfig = PPOConfig()

    @property
    def steps_per_batch(self) -> int:
        """Environment steps in a batch, those that only reset included."""
        return self.fragments_per_batch * self.fragments.length * self.environment.num_envs

    @property
    def fragments_per_batch(self) -> int:
        """Fragments that a train step fetches."""
        return self.batch_size * self.fragments.fragments_per_chunk

    @property
    def stream(self) -> dict[str, Any]:
        """All that fragments must have in common to be trained together, as plain values."""
        environment = self.environment.model_dump(mode="json", include={"id", "arguments", "num_envs"})
        shape = self.fragments.model_dump(include={"length", "fragments_per_chunk"})
        # Buffers of other formats cannot be read: their fragments stay behind.
        return {"format": 3} | environment | shape

    def buffer_settings(self) -> dict[str, Any]:
        """Of the `ReplayBufferActor`, but the database.

        The rate limit lets workers be half a batch ahead of the trainer: enough to work while it trains, and
        little to be trained late. While the trainer waits for a batch, they are not held back.
        """
        reuse, quarter = self.fragments.max_reuse, math.ceil(self.batch_size / 4)
        return {
            # Every chunk is there until its last use; one batch more for what is being fetched.
            "max_chunks": (reuse + 2) * self.batch_size,
            "max_staleness": self.fragments.max_staleness,
            "max_reuse": reuse,
            "fragments_per_chunk": self.fragments.fragments_per_chunk,
            "seed": self.seed,
            # The difference may lie between 0 and half a batch of chunks, each used `reuse` times.
            "rate_limit": RateLimit(samples_per_insert=reuse, min_chunks=quarter, error_buffer=float(reuse * quarter)),
        }

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.fragments.length * self.fragments.fragments_per_chunk < 2:
            raise ConfigError(
                "fragments.length = 1 and fragments.fragments_per_chunk = 1 make streams of a single step, "
                "which may be one that only resets; raise one of them"
            )
        memory, mini_batches = self.policy.memory, self.train.mini_batches
        streams = self.batch_size * self.environment.num_envs
        if memory != "none" and mini_batches > streams:
            raise ConfigError(
                f"train.mini_batches = {mini_batches} is more than the {streams} streams of a batch "
                f"(batch_size x environment.num_envs), which policy.memory = {memory!r} keeps whole; lower it"
            )
        return self
