"""When to start groups, and when to stop: the contract of a production strategy, and the synchronous one.

A strategy sees one task through a `ProduceContext` and decides; sampling, generating and storing are the
context's::

    COMPLETED in the buffer < batch?  --> start what is missing --> store each as it finishes
              ^                                                        |
              +------- replace those that did not complete <-----------+

An interrupted call leaves no task behind: what was in flight goes back to the buffer as ABORTED and is
sampled first by the next call. `forebay.produce.strategies.asynchronous` has the strategy whose groups
outlive the call.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict

from forebay.produce.pending import Ended, Group, PendingGroups
from forebay.produce.strategies.budget import ProductionBudget
from forebay.produce.strategies.context import (
    IsValidSampleFn,
    ProduceContext,
    ShouldContinueFn,
    default_is_valid_sample_fn,
    default_should_continue_fn,
)
from forebay.produce.strategies.staleness import calculate_stale_threshold
from forebay.types import Status, get_group_status, reset_rollout_response


class ProduceBatchStatus(enum.Enum):
    """How a call to `produce_batch` ended."""

    NORMAL = enum.auto()
    UPDATE_WEIGHT_AND_ABORT = enum.auto()
    """A pause was requested."""
    EXPIRED_BATCH = enum.auto()
    """The rollout weights are too old for this train step: only a weight sync can help."""


class ProduceStrategyConfig(BaseModel, ABC):
    """What every strategy is configured with."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    is_valid_sample_fn: IsValidSampleFn = default_is_valid_sample_fn
    should_continue_fn: ShouldContinueFn = default_should_continue_fn

    @abstractmethod
    def build(self, *, sync_weights_interval: int = 1, rollout_controller: Any = None) -> ProduceStrategy:
        """The strategy for weights that are synchronized every `sync_weights_interval` train steps."""


class ProduceStrategy(ABC):
    """Decides what to generate for one task."""

    stale_threshold: int | None = None
    """Groups this stale expire in the buffer; None: never."""
    leftover_threshold: int | None = None
    """Groups this stale expire where they were left over from a batch; None: as `stale_threshold` says."""
    max_lag: int | None = None
    """Weights that are so many train steps behind the step they produce for are too old; None: never."""
    keeps_expired = False
    """Expired groups stay in the buffer, because this strategy generates them again."""
    works_ahead = False
    """Can produce for train steps after the one that the trainer waits for."""
    num_expired = 0
    """Groups of the task that expired so far, in the buffer or on their way into it."""

    def __init__(self, is_valid_sample_fn: IsValidSampleFn, should_continue_fn: ShouldContinueFn) -> None:
        self.is_valid_sample_fn = is_valid_sample_fn
        self.should_continue_fn = should_continue_fn

    @abstractmethod
    async def produce_batch(self, ctx: ProduceContext) -> ProduceBatchStatus:
        """Bring the buffer to this task's target."""

    async def pause_produce(self, ctx: ProduceContext) -> float:
        """Collect what is in flight; return the seconds it took."""
        return 0.0

    async def cut_short(self) -> None:
        """End what is in flight now; the prompts are kept."""
        return

    def is_model_expired(self, train_step: int, model_step: int) -> bool:
        """Whether weights of `model_step` are too old for `train_step`."""
        return False

    def limit_lag(self, train_steps: int) -> None:  # noqa: B027
        """Let weights, and rollouts that can expire, be at most `train_steps` behind from now on."""

    def pending_task_count(self) -> int:
        """Groups in flight."""
        return 0

    def pending_groups(self) -> list[Group]:
        """Those of them that have their prompt already."""
        return []


@asynccontextmanager
async def woken_by(event: asyncio.Event, pending: PendingGroups) -> AsyncIterator[None]:
    """In here, who waits for `pending` is woken when `event` is set too; one task, however many waits."""
    watcher = asyncio.create_task(event.wait(), name="watch for a pause")
    watcher.add_done_callback(pending.wake)
    try:
        yield
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


class SyncProduceStrategyConfig(ProduceStrategyConfig):
    """Builds a `SyncProduceStrategy`."""

    def build(self, *, sync_weights_interval: int = 1, rollout_controller: Any = None) -> SyncProduceStrategy:
        """The strategy for weights that are synchronized every `sync_weights_interval` train steps."""
        return SyncProduceStrategy(
            self.is_valid_sample_fn, self.should_continue_fn, sync_weights_interval=sync_weights_interval
        )


class SyncProduceStrategy(ProduceStrategy):
    """Produces exactly what one train step needs, while the trainer waits.

    Invariants: at most ``task_batch_size`` groups are in flight; nothing is in flight after the call; which
    prompts end up in the batch does not depend on which generation finishes first; a group that was left over
    (`should_continue_fn` may want more than a batch) is no staler than one that is made now could be.

    consumes: prompts; waits for: the next group to finish, or a pause; woken by: the group's task, the
    update event; produces: stored groups.
    """

    def __init__(
        self,
        is_valid_sample_fn: IsValidSampleFn,
        should_continue_fn: ShouldContinueFn,
        *,
        sync_weights_interval: int = 1,
    ) -> None:
        super().__init__(is_valid_sample_fn, should_continue_fn)
        self._max_lag = calculate_stale_threshold(0, sync_weights_interval)
        self.leftover_threshold: int = self._max_lag
        self._pending = PendingGroups()

    def limit_lag(self, train_steps: int) -> None:
        """See `ProduceStrategy.limit_lag`; it never raises the limit."""
        self._max_lag = min(self._max_lag, train_steps)

    async def produce_batch(self, ctx: ProduceContext) -> ProduceBatchStatus:
        """Start what is missing and replace what does not complete, until `should_continue_fn` says stop.

        Raises:
            ProductionError: too many groups failed, or almost none was accepted.
        """
        if ctx.should_abort():
            return ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
        batch = _SyncBatch(ctx, self._pending, self.should_continue_fn)
        batch.completed = await self._count_fresh(ctx)
        try:
            async with woken_by(ctx.update_event, self._pending):
                while self.should_continue_fn(batch.completed, ctx.task_batch_size):
                    if ctx.should_abort():
                        return ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
                    seen = self._pending.version
                    batch.fill()
                    await self._pending.wait(seen)
        finally:
            await self._pending.cancel()
            self._pending.raise_error()
        return ProduceBatchStatus.NORMAL

    async def _count_fresh(self, ctx: ProduceContext) -> int:
        """The COMPLETED groups that were left over, once those that are too stale have expired."""
        # Weights that were not synchronized when due make groups that are as stale: those are no worse.
        self.leftover_threshold = max(self._max_lag, ctx.train_step - ctx.model_step)
        buffer, name = ctx.replay_buffer, ctx.task_name
        expired = await buffer.refresh_staleness(
            task_stale_thresholds={name: self.leftover_threshold}, current_train_step=ctx.train_step
        )
        self.num_expired += expired[name]
        return await buffer.count(name, Status.COMPLETED)

    def pending_task_count(self) -> int:
        """See `ProduceStrategy.pending_task_count`."""
        return len(self._pending)

    def pending_groups(self) -> list[Group]:
        """See `ProduceStrategy.pending_groups`."""
        return self._pending.groups


class _SyncBatch:
    """The groups of one call."""

    def __init__(
        self, ctx: ProduceContext, pending: PendingGroups, should_continue_fn: ShouldContinueFn
    ) -> None:
        self.ctx = ctx
        self.pending = pending
        self.should_continue_fn = should_continue_fn
        self.completed = 0
        self.budget = ProductionBudget()

    def fill(self) -> None:
        """Start what is missing."""
        ctx = self.ctx
        self.pending.raise_error()
        self.budget.check(
            ctx.task_name, train_step=ctx.train_step, batch_size=ctx.task_batch_size, rules=ctx.rules
        )
        for _ in range(self._num_missing() - len(self.pending)):
            self.pending.start(
                partial(ctx.sample_group, from_expired_pool=False),
                ctx.generate_group,
                self.store,
                is_stopped=ctx.should_abort,
            )

    def _num_missing(self) -> int:
        size = self.ctx.task_batch_size
        if self.completed < size:
            return size - self.completed
        # `should_continue_fn` wants more than the batch. How many more, it alone knows.
        more = itertools.takewhile(
            lambda count: self.should_continue_fn(self.completed + count, size), range(1, size)
        )
        return 1 + sum(1 for _ in more)

    async def store(self, group: Group, ended: Ended) -> None:
        """Count and store one group."""
        if ended is Ended.RETURNED:
            # In two lines: others may be stored while this one is, and all of them count.
            is_completed = await self.ctx.put_generated_group(group, before_put=_forget_aborted)
            self.completed += is_completed
            self.budget.count(get_group_status(group), group)
        else:
            await self.ctx.put_back(group, wipe=ended is Ended.INTERRUPTED)


def _forget_aborted(group: Group) -> None:
    """Wipe what was aborted: it will start over, and must not grow old meanwhile."""
    for state in group:
        if state.status is Status.ABORTED:
            reset_rollout_response(state)
