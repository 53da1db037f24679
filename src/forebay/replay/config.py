"""A buffer as settings: the ``[replay]`` table of a run file, and the two usual buffers."""

import re
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, Field, model_validator

from forebay.config import ConfigError, StrictModel
from forebay.replay.buffer import ReplayBuffer
from forebay.replay.policies import find_policy
from forebay.replay.reuse import ReuseConfig
from forebay.replay.stores.contract import StorageBackend


class BufferConfig(BaseModel):
    """The settings of a buffer; the two presets differ in the policy that they build.

    >>> SyncReplayBufferConfig(limit=10_000).build().limit
    10000
    """

    # As a `StrictModel`, without being one more ancestor of the presets.
    model_config = StrictModel.model_config

    usual_policy: ClassVar[str] = "fifo"

    limit: int | None = Field(default=None, ge=1)
    """Live groups at most; the groups that arrived first are evicted and counted. None: no limit."""
    policy: str | None = None
    """Groups that are trained on first: ``staleness``: the most stale; ``fifo``: those that arrived first;
    ``prioritized``: drawn at random, the likelier the further apart their scores lie, by ``seed``;
    or ``package.module:Class`` of a ``ReplayPolicy``. None: ``staleness``; ``fifo`` where nothing can be stale."""
    reuse: ReuseConfig = ReuseConfig()

    def build(
        self,
        storage_backend: StorageBackend | None = None,
        *,
        sync_weights_interval: int = 1,
        compares: bool = True,
        seed: int = 0,
    ) -> ReplayBuffer:
        """The buffer; in memory unless there is a store.

        Raises:
            ConfigError: there is no such policy.
        """
        weighs = self.policy == PRIORITIZED
        reuse = self.reuse.build(sync_weights_interval, compares=compares, weighs=weighs)
        policy = find_policy(self.policy or self.usual_policy, seed=seed)
        return ReplayBuffer(policy, storage_backend, limit=self.limit, reuse=reuse)


class SyncReplayBufferConfig(BufferConfig):
    """A buffer that hands groups out in order of arrival."""


class AsyncReplayBufferConfig(BufferConfig):
    """A buffer that hands out the most stale groups first, so that none expires unused."""

    usual_policy = "staleness"


class ReplayConfig(BufferConfig):
    """Where groups wait for the trainer, and for how long they are kept."""

    store: str | None = None
    """``memory``; ``sqlite``: ``buffer.db`` in the run's folder, or ``sqlite:///PATH``, a file on a local disk
    (four slashes before an absolute path); with ``?synchronous=full`` at the end a power cut takes no group;
    ``postgresql``: the database at the URL in the environment variable ``FOREBAY_REPLAY_URL``. From the
    last two a killed run goes on with every finished group. None: ``sqlite`` in a separate run and on Ray,
    where the run's folder is on a local disk and nothing is recorded, else ``memory``."""

    @property
    def kind(self) -> str | None:
        """Of the store: ``memory``, ``sqlite`` or ``postgresql``; None: that depends on the run."""
        return self.store and re.split("[:?]", self.store)[0]

    @property
    def path(self) -> Path | None:
        """The SQLite file that the store names."""
        found = _STORE.fullmatch(self.store or "")
        return Path(found[1]) if found and found[1] else None

    @property
    def synchronous(self) -> str:
        """When SQLite syncs: with each commit (``full``), or less often (``normal``)."""
        found = _STORE.fullmatch(self.store or "")
        return (found and found[2]) or "normal"

    @model_validator(mode="after")
    def _check(self) -> "ReplayConfig":
        if self.store is not None and not _STORE.fullmatch(self.store):
            raise ConfigError(
                f"replay.store = {self.store!r} is no store: memory, sqlite, sqlite:///PATH, one of the last two "
                f"with ?synchronous=full behind it, or postgresql, whose URL is in FOREBAY_REPLAY_URL"
            )
        return self

    def check(self, correction: str, rule: str, *, compares: bool) -> None:
        """ConfigError if policy or reuse do not go with the loss and the staleness rule of the run."""
        self.reuse.check(correction, rule, compares=compares)
        find_policy(self.policy or self.usual_policy)
        if self.policy != PRIORITIZED:
            return
        if not compares:
            raise ConfigError(
                "replay.policy = 'prioritized' ranks groups by how far their scores lie apart, and train.advantage "
                "does not compare those: leave it out"
            )
        if rule in ("correct", "mask"):
            raise ConfigError(
                f"replay.policy = 'prioritized' passes groups over for any time, and produce.staleness_rule = "
                f"{rule!r} lets none expire: set that to 'drop' or 'requeue', or leave the policy out"
            )
        if self.reuse.times > 1 and self.reuse.order != "priority":
            raise ConfigError(
                f"replay.policy = 'prioritized' and replay.reuse.order = {self.reuse.order!r} rank a group "
                f"differently: set the order to 'priority'"
            )


PRIORITIZED = "prioritized"
_STORE = re.compile(r"(?:memory|postgresql|sqlite(?::///([^?]+))?(?:\?synchronous=(full|normal))?)")
