"""The asynchronous strategy: production goes on while the trainer trains, and groups outlive the call.

::

    produce_batch(target):  available + in flight < limit?  --> start groups
             ^                                                      |
             +-- woken by a finished group, or by a pause <---------+--> each stored when it ends

    pause_produce:  ask agents and engines to stop, again every 5 s
                    --> what ends is stored, COMPLETED or ABORTED --> after a time-out, the rest is cut short

Counts are absolute: available are the groups that the trainer has taken and the COMPLETED ones that wait.
Groups in flight at the end of a call go on; each is stored as it finishes and counted by the next call.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from forebay.aio.time_limits import timeout_at
from forebay.config import checked_by
from forebay.produce.strategies import base
from forebay.produce.strategies.context import COUNTED_TOKENS_KEY, Generation, Group, ProduceContext
from forebay.produce.strategies.pending import Ended, Work
from forebay.types import (
    Status,
    calculate_seq_staleness,
    get_group_status,
    reset_rollout_response,
    update_sample_version,
)
from forebay.watching.stalls import StallError, answered

logger = logging.getLogger(__name__)

PAUSE_REPEAT_S = 5.0
"""An engine may start what was queued somewhere after it was asked to stop, so it is asked again."""

NUM_FAILURES_KEY = "num_failures"
"""Key in ``extra_fields``: how often this rollout failed and was generated again."""
LAST_FAILURE_KEY = "last_failure"
"""Key in ``extra_fields``: why it failed the last time."""


class AsyncProduceStrategy(base.ProduceStrategy):
    """Keeps groups in flight up to a limit that its staleness rule sets.

    Invariants: at any instant a group is in flight, or in the buffer, or the trainer's, and in one of them
    only; while the update event is set nothing is started; tokens without a label get the model step
    that their generation started with.

    consumes: prompts; waits for: the next group to finish, or a pause; woken by: the group's task, the
    update event; produces: stored groups.
    """

    works_ahead = True

    def __init__(
        self,
        config: "AsyncProduceStrategyConfig",
        sync_weights_interval: int = 1,
        rollout_controller: Generation | None = None,
    ) -> None:
        super().__init__(config.is_valid_sample_fn, config.should_continue_fn)
        self.config = config
        self.rule = base.find_staleness_rule(config.staleness_rule)
        self.rollout_controller = rollout_controller
        self.max_lag: int = base.calculate_stale_threshold(config.max_staleness, sync_weights_interval)
        """In train steps: weights that lag this much are too old, and so are rollouts that may expire."""
        self.stale_threshold = self.max_lag if self.rule.expires else None
        self.keeps_expired = self.rule.regenerates or config.tail_batch_trigger_size > 0
        self._ctx: ProduceContext

    def is_model_expired(self, train_step: int, model_step: int) -> bool:
        """Whether weights of `model_step` are at or over the limit for `train_step`."""
        return calculate_seq_staleness(model_step, train_step) >= self.max_lag

    def limit_lag(self, train_steps: int) -> None:
        """It never raises the limit."""
        self.max_lag = min(self.max_lag, train_steps)
        self.stale_threshold = self.max_lag if self.rule.expires else None

    async def produce_batch(self, ctx: ProduceContext) -> base.ProduceBatchStatus:
        """Start groups until `should_continue_fn` finds enough of them available.

        Raises:
            KeyError: the progress does not know the task.
            ProductionError: too many groups failed, or almost none was accepted, since the last full batch.
        """
        self._ctx = ctx
        # Both counts are read now: a task that the progress does not know is an error and not a wait.
        target, _ = ctx.target_abs, ctx.progress.consumed_samples[ctx.task_name]
        if target <= 0:
            return base.ProduceBatchStatus.NORMAL
        if (stop := self._must_stop(ctx)) is not None:
            return stop
        trigger, num_expired = self.config.tail_batch_trigger_size, await ctx.expired_count()
        # Also without a limit of tries: agents, or a run with other settings, may have made such groups.
        num_exhausted = await ctx.replay_buffer.count(ctx.task_name, Status.MAX_TRIES)
        # Without a trigger, nothing else would ever take up groups that have exhausted their tries.
        is_tail = num_expired + num_exhausted >= trigger if trigger else num_exhausted > 0
        from_expired_pool = is_tail or (self.rule.regenerates and num_expired > 0)
        over_sample = math.ceil(self.config.over_sample_threshold * ctx.task_batch_size)
        take = partial(ctx.sample_group, from_expired_pool=from_expired_pool)

        def start_missing(available: int) -> None:
            in_flight, progress = len(self._pending), ctx.progress
            # Train steps beyond those of the target for which a group that starts now is fresh enough.
            fresh_steps = ctx.model_step + self.max_lag - progress.target_upto_future_step
            outlook = base.Outlook(
                # `should_continue_fn` may want more than the target.
                target=max(ctx.target_abs, available + 1),
                available=available,
                in_flight=in_flight,
                over_sample=0 if is_tail else over_sample,
                fresh_limit=ctx.target_abs + max(0, fresh_steps) * ctx.task_batch_size,
                num_expired=self.num_expired,
            )
            for _ in range(self.rule.limit(outlook) - available - in_flight):
                generate = partial(self._generate, ctx, ctx.model_step)
                self._pending.start(Work(take, generate, self._store, ctx.should_abort))

        return await self._fill(ctx, start_missing)

    def _must_stop(self, ctx: ProduceContext) -> base.ProduceBatchStatus | None:
        if self.is_model_expired(ctx.train_step, ctx.model_step) and not ctx.should_abort():
            return base.ProduceBatchStatus.EXPIRED_BATCH
        return super()._must_stop(ctx)

    async def _generate(self, ctx: ProduceContext, model_step: int, group: Group) -> Group:
        group = await ctx.generate_group(group, enable_partial_rollout=self.config.enable_partial_rollout)
        if model_step != self._ctx.model_step:
            # The put would label with the weights of now, but these tokens began with older ones.
            for state in group:
                update_sample_version(state, model_step)
        return group

    async def _store(self, group: Group, ended: Ended) -> None:
        """Store a group through the context of the latest call."""
        ctx = self._ctx
        if ended is Ended.NOT_STARTED:
            await ctx.put_back(group)
        elif ended is Ended.INTERRUPTED:
            for state in group:
                state.status = Status.ABORTED
            if not self.config.enable_partial_rollout:
                self._start_over(group)
            # Cut short half-way, the tokens of a partial rollout may not fit together.
            await ctx.put_back(group, wipe=self.config.enable_partial_rollout)
        elif await ctx.put_generated_group(group, before_put=self._prepare):
            self._budget.count(Status.COMPLETED, group)
        elif group[0].status is Status.EXPIRED:
            self._budget.count(Status.EXPIRED, group)
            self.num_expired += 1

    def _prepare(self, group: Group) -> None:
        """Count a group that did not complete, and let it start over or be retried, before it is stored."""
        status = get_group_status(group)
        # A pause aborts by request; only unasked aborts say that something is wrong.
        if status is not Status.ABORTED or not self._ctx.should_abort():
            self._budget.count(status, group)
        if status is Status.FAILED:
            self._retry(group)
        elif status is Status.ABORTED and not self.config.enable_partial_rollout:
            self._start_over(group)

    def _start_over(self, group: Group) -> None:
        """Wipe aborted rollouts: they will not be continued, and must not grow old meanwhile."""
        aborted = [state for state in group if state.status is Status.ABORTED]
        for state in aborted:
            reset_rollout_response(state)
            state.extra_fields.pop(COUNTED_TOKENS_KEY, None)
            state.num_tries += 1
        limit = self.config.tail_batch_max_tries
        if limit and max(state.num_tries for state in aborted) >= limit:
            for state in aborted:
                state.status = Status.MAX_TRIES

    def _retry(self, group: Group) -> None:
        """Let failed rollouts be generated again, if the budget allows it; completed ones are kept."""
        tries = max(state.extra_fields.get(NUM_FAILURES_KEY, 0) for state in group)
        if tries >= self.config.max_retries:
            return
        for state in group:
            if state.status is Status.FAILED:
                state.extra_fields[NUM_FAILURES_KEY] = tries + 1
                state.extra_fields[LAST_FAILURE_KEY] = state.error_msg
                state.extra_fields.pop(COUNTED_TOKENS_KEY, None)
                reset_rollout_response(state)
                # Other tries draw other random numbers, so the same fault need not come again.
                state.num_tries += 1
                state.status = Status.ABORTED

    async def pause_produce(self, ctx: ProduceContext) -> float:
        """Have everything in flight stored, COMPLETED or ABORTED; the seconds it took.

        Set the update event first: otherwise a call to `produce_batch` starts more meanwhile.
        """
        self._ctx = ctx
        clock = asyncio.get_running_loop().time
        started_s = clock()
        ask_s, deadline_s = started_s, started_s + self.config.pause_timeout_s
        while len(self._pending):
            # Read before the clock: a group that ends from here on ends the wait below at once.
            seen = self._pending.changes.version
            if clock() >= deadline_s:
                logger.warning(
                    "task %s: %d groups did not stop within %g s and are cut short",
                    ctx.task_name,
                    len(self._pending),
                    self.config.pause_timeout_s,
                )
                await self._pending.cancel()
                break
            if clock() >= ask_s:
                await self._ask_to_stop(ctx)
                ask_s = clock() + PAUSE_REPEAT_S
            with contextlib.suppress(TimeoutError):
                async with timeout_at(min(ask_s, deadline_s)):
                    await self._pending.changes.wait(seen)
        self._pending.raise_error()
        return clock() - started_s

    async def _ask_to_stop(self, ctx: ProduceContext) -> None:
        """Ask the agent loop and the engines; without an answer, they are asked again later."""
        asked: list[tuple[object, Callable[[], Awaitable[Any]]]] = [(ctx.agent_loop, ctx.agent_loop.pause)]
        if self.rollout_controller is not None:
            asked.append((self.rollout_controller, self.rollout_controller.pause_generation))
        for asked_one, stop in asked:
            try:
                await answered(stop(), f"{type(asked_one).__name__} was asked to stop", PAUSE_REPEAT_S)
            except StallError as error:
                logger.warning("task %s: %s", ctx.task_name, error)
            # Agents are user code and engines are remote: after any exception the rest has to stop too.
            except Exception:
                logger.exception("task %s: asking to stop failed", ctx.task_name)


class AsyncProduceStrategyConfig(base.ProduceStrategyConfig):
    """Builds an `AsyncProduceStrategy`.

    >>> config = AsyncProduceStrategyConfig(max_staleness=1, over_sample_threshold=0.5)
    >>> config.build(sync_weights_interval=2).stale_threshold        # (1 + 1) * 2 train steps
    4
    """

    over_sample_threshold: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Groups kept in flight beyond the target, as a share of the task's batch."""
    enable_partial_rollout: bool = False
    """An interrupted rollout keeps its tokens and goes on from them; else it starts over."""
    max_staleness: int = Field(default=0, ge=0)
    """Sync periods that a rollout may lag behind, beyond the current one."""
    staleness_rule: Annotated[str | base.StalenessRule, checked_by(base.find_staleness_rule)] = "drop"
    """A name of `produce.strategies.base` (drop, requeue, admit, mask, correct), or your own rule, also as
    ``package.module:Class``."""
    tail_batch_trigger_size: int = Field(default=0, ge=0)
    """With this many EXPIRED and MAX_TRIES groups waiting, the next round generates those, and no more."""
    tail_batch_max_tries: int = Field(default=0, ge=0)
    """Aborts without partial rollout after which a group waits for the tail batch; 0: no limit."""
    max_retries: int = Field(default=0, ge=0)
    """How often the rollouts of a group that failed are generated again; its completed ones are kept."""
    pause_timeout_s: float = Field(default=60.0, ge=0)
    """A group that has not stopped this long after the request is cut short: its prompt is kept."""

    def build(
        self, *, sync_weights_interval: int = 1, rollout_controller: Generation | None = None
    ) -> AsyncProduceStrategy:
        """The strategy for weights that are synchronized every `sync_weights_interval` train steps.

        `rollout_controller` is asked to stop by a pause, besides the agent loop.
        """
        return AsyncProduceStrategy(self, sync_weights_interval, rollout_controller)
