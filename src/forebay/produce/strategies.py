"""When to start groups, and when to stop: the production strategies.

A strategy sees one task through a `ProduceContext` and decides; sampling, generating and storing are the
context's. This file has the contract and the synchronous strategy::

    COMPLETED in the buffer < batch?  --> start what is missing --> store each as it finishes
              ^                                                        |
              +------- replace those that did not complete <-----------+

An interrupted call leaves no task behind: what was in flight goes back to the buffer as ABORTED and is
sampled first by the next call.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from pydantic import BaseModel, ConfigDict

from forebay.produce.context import (
    IsValidSampleFn,
    ProduceContext,
    ShouldContinueFn,
    default_is_valid_sample_fn,
    default_should_continue_fn,
)
from forebay.produce.pending import Generation, PendingGroups
from forebay.types import RolloutState, Status, get_group_status

logger = logging.getLogger(__name__)

MAX_FAILED_PER_GROUP = 2
"""Failed groups allowed per group asked for, before production gives up: more is a fault, not bad luck."""
MIN_FAILED = 8
"""Small batches may have a few failures in a row before that says anything."""
MAX_STARTED_PER_GROUP = 64
"""Groups started per group asked for. With fewer than 1 in 64 accepted, the task is far too hard, far too
easy, or the validity function is wrong; waiting longer would look like a hang."""


class ProduceBatchStatus(enum.Enum):
    """How a call to `produce_batch` ended."""

    NORMAL = enum.auto()
    UPDATE_WEIGHT_AND_ABORT = enum.auto()
    """A pause was requested."""
    EXPIRED_BATCH = enum.auto()
    """The rollout weights are too old for this train step: only a weight sync can help."""


class ProductionError(RuntimeError):
    """Production cannot go on; the message states the counters and the last reason."""


def calculate_stale_threshold(max_staleness: int, sync_weights_interval: int) -> int:
    """The staleness at which a rollout is expired: ``(max_staleness + 1) * sync_weights_interval``.

    `max_staleness` counts sync periods beyond the current one, whose lag cannot be avoided.

    Raises:
        ValueError: a negative `max_staleness` or a non-positive interval.
    """
    if max_staleness < 0:
        raise ValueError(f"max_staleness must not be negative, got {max_staleness}")
    if sync_weights_interval <= 0:
        raise ValueError(f"sync_weights_interval must be positive, got {sync_weights_interval}")
    return (max_staleness + 1) * sync_weights_interval


class ProduceStrategyConfig(BaseModel, ABC):
    """What every strategy is configured with."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    is_valid_sample_fn: IsValidSampleFn = default_is_valid_sample_fn
    should_continue_fn: ShouldContinueFn = default_should_continue_fn

    @abstractmethod
    def build(self, *, sync_weights_interval: int = 1, rollout_controller: Any = None) -> ProduceStrategy:
        """The strategy for weights that are synchronised every `sync_weights_interval` train steps."""


class ProduceStrategy(ABC):
    """Decides what to generate for one task."""

    stale_threshold: int | None = None

    def __init__(self, is_valid_sample_fn: IsValidSampleFn, should_continue_fn: ShouldContinueFn) -> None:
        self.is_valid_sample_fn = is_valid_sample_fn
        self.should_continue_fn = should_continue_fn

    @abstractmethod
    async def produce_batch(self, ctx: ProduceContext) -> ProduceBatchStatus:
        """Bring the buffer to this task's target."""

    async def pause_produce(self, ctx: ProduceContext) -> float:
        """Collect what is in flight; return the seconds it took."""
        return 0.0

    def is_model_expired(self, train_step: int, model_step: int) -> bool:
        """Whether weights of `model_step` are too old for `train_step`."""
        return False

    def pending_task_count(self) -> int:
        """Groups in flight between calls."""
        return 0


class SyncProduceStrategyConfig(ProduceStrategyConfig):
    """Builds a `SyncProduceStrategy`."""

    def build(self, *, sync_weights_interval: int = 1, rollout_controller: Any = None) -> SyncProduceStrategy:
        """The strategy; it holds nothing between calls, so the interval does not matter to it."""
        return SyncProduceStrategy(self.is_valid_sample_fn, self.should_continue_fn)


class SyncProduceStrategy(ProduceStrategy):
    """Produces exactly what one train step needs, while the trainer waits.

    Invariants: at most ``task_batch_size`` groups are in flight; nothing is in flight after the call; which
    prompts end up in the batch does not depend on which generation finishes first.

    consumes: prompts; waits for: the next group to finish; woken by: its task; produces: stored groups.
    """

    async def produce_batch(self, ctx: ProduceContext) -> ProduceBatchStatus:
        """Start what is missing and replace what does not complete, until `should_continue_fn` says stop.

        Raises:
            ProductionError: too many groups failed, or almost none was accepted.
        """
        completed = await ctx.replay_buffer.count(ctx.task_name, Status.COMPLETED)
        pending = PendingGroups()
        budget = _Budget(ctx)
        try:
            while self.should_continue_fn(completed, ctx.task_batch_size):
                budget.check()
                while len(pending) < max(1, ctx.task_batch_size - completed):
                    group = await ctx.sample_group(from_expired_pool=False)
                    pending.start(group, ctx.generate_group)
                generation, group = await pending.next_finished()
                completed += await _uninterrupted(_store(ctx, pending, generation, group))
                budget.count(group)
        finally:
            finished, interrupted = await pending.cancel()
            for group in finished:
                await ctx.put_generated_group(group)
            for group in interrupted:
                await ctx.replay_buffer.put(group, ctx.task_name)
        return ProduceBatchStatus.NORMAL


async def _store(
    ctx: ProduceContext, pending: PendingGroups, generation: Generation, group: list[RolloutState]
) -> bool:
    completed = await ctx.put_generated_group(group)
    pending.remove(generation)
    return completed


async def _uninterrupted(work: Coroutine[Any, Any, bool]) -> bool:
    """Wait for `work`; if cancelled meanwhile, let it end first: a group is stored once, or not at all."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


class _Budget:
    """Ends a call in which production only spins."""

    def __init__(self, ctx: ProduceContext) -> None:
        self.ctx = ctx
        self.outcomes: Counter[Status] = Counter()
        self.last_error: str | None = None

    def count(self, group: list[RolloutState]) -> None:
        """Enter how one group ended."""
        self.outcomes[get_group_status(group)] += 1
        self.last_error = next((state.error_msg for state in group if state.error_msg), self.last_error)

    def check(self) -> None:
        """Raise if going on makes no sense."""
        size = max(1, self.ctx.task_batch_size)
        started = (
            f"task {self.ctx.task_name!r}, train step {self.ctx.train_step}: {self._counts()} groups, "
            f"{size} are needed"
        )
        allowed = max(MIN_FAILED, MAX_FAILED_PER_GROUP * size)
        if self.outcomes[Status.FAILED] >= allowed:
            raise ProductionError(f"{started}; the last failure: {self.last_error or 'no reason given'}")
        if self.outcomes[Status.ABORTED] >= allowed and not self.outcomes[Status.COMPLETED]:
            raise ProductionError(f"{started}; the engine aborts everything: is it paused or closed?")
        if self.outcomes.total() >= MAX_STARTED_PER_GROUP * size:
            raise ProductionError(
                f"{started}; if they were filtered, nearly all prompts are too hard or too easy for the "
                f"model: use other prompts, more rollouts per prompt, or no filter"
            )

    def _counts(self) -> str:
        return ", ".join(f"{count} {status.value}" for status, count in self.outcomes.items())
