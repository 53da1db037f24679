"""When to start groups, when to stop, and how stale they may get: strategies, and the synchronous one.

A strategy sees one task through a `ProduceContext` and decides; sampling, generating and storing are the
context's::

    COMPLETED in the buffer < batch?  --> start what is missing --> store each as it finishes
              ^                                                        |
              +------- replace those that did not complete <-----------+

An interrupted synchronous call leaves no task behind: what was in flight goes back to the buffer as ABORTED
and is sampled first by the next call. `forebay.produce.strategies.asynchronous` has the strategy whose groups
outlive the call.

Staleness has one definition: a token made by the weights after train step ``m`` and trained at step ``i`` is
``i - m - 1`` stale, a rollout as stale as its oldest generated token, a group as its stalest rollout; time in
the queue counts, because ``i`` is the step that trains it. Too stale is at or over the threshold
``(max_staleness + 1) * sync_weights_interval``. A rule says what becomes of that::

    rule       the buffer                     the producer                        the trainer
    drop       expires, then drops            target + over-sampling              nothing
    requeue    expires, keeps the prompt      expired prompts first               nothing
    admit      as drop                        no more than can still be fresh     nothing
    mask       keeps                          target + over-sampling              stale tokens: loss weight 0
    correct    keeps                          target + over-sampling              importance weights

Whatever the rule, nothing is produced for a train step for which the weights themselves are too old, so the
producer's lead is bounded. This module has the producer's and the buffer's part.
"""

import enum
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from pydantic import BaseModel

from forebay.aio.tasks import beside
from forebay.config import ConfigError, StrictModel, errors_about, look_up
from forebay.produce.strategies import context
from forebay.produce.strategies.pending import Ended, PendingGroups, ProductionBudget, Work
from forebay.types import Status, get_group_status, reset_rollout_response


class ProduceStrategy(ABC):
    """Decides what to generate for one task; a strategy of your own overrides `produce_batch`."""

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

    def __init__(
        self,
        is_valid_sample_fn: context.IsValidSampleFn = context.default_is_valid_sample_fn,
        should_continue_fn: context.ShouldContinueFn = context.default_should_continue_fn,
    ) -> None:
        self.is_valid_sample_fn = is_valid_sample_fn
        self.should_continue_fn = should_continue_fn
        self._pending = PendingGroups()
        self._budget = ProductionBudget()

    @abstractmethod
    async def produce_batch(self, ctx: context.ProduceContext) -> "ProduceBatchStatus":
        """Bring the buffer to this task's target."""

    async def pause_produce(self, ctx: context.ProduceContext) -> float:
        """Collect what is in flight; return the seconds it took."""
        return 0.0

    async def cut_short(self) -> None:
        """End what is in flight now; the prompts are kept."""
        await self._pending.cancel()

    def is_model_expired(self, train_step: int, model_step: int) -> bool:
        """Whether weights of `model_step` are too old for `train_step`."""
        return False

    def limit_lag(self, train_steps: int) -> None:  # noqa: B027
        """Let weights, and rollouts that can expire, be at most `train_steps` behind from now on."""

    def pending_task_count(self) -> int:
        """Groups in flight."""
        return len(self._pending)

    def pending_groups(self) -> list[context.Group]:
        """The groups in flight that have their prompt already."""
        return self._pending.groups

    def _must_stop(self, ctx: context.ProduceContext) -> "ProduceBatchStatus | None":
        """Why a call must start nothing more; None if it may."""
        return ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT if ctx.should_abort() else None

    async def _count(self, ctx: context.ProduceContext) -> tuple[int, int]:
        """The groups that are available, and the target of the call, for `should_continue_fn`."""
        return await ctx.available_count(), ctx.target_abs

    async def _fill(self, ctx: context.ProduceContext, start_missing: Callable[[int], None]) -> "ProduceBatchStatus":
        """Start groups, and wait for them, until `should_continue_fn` finds enough of them available.

        `start_missing` starts what the call still needs, given the number of groups that are available.
        """
        pending = self._pending
        async with beside(ctx.update_event.wait()) as watcher:
            # One task for the whole call: a pause then looks like one more group that has ended.
            watcher.add_done_callback(lambda _: pending.changes.note())
            while True:
                seen = pending.changes.version
                pending.raise_error()
                if (stop := self._must_stop(ctx)) is not None:
                    return stop
                available, target = await self._count(ctx)
                if pending.changes.version != seen:
                    continue  # A group ended meanwhile, and would be counted in both places or in neither.
                if not self.should_continue_fn(available, target):
                    self._budget.reset()
                    return ProduceBatchStatus.NORMAL
                self._budget.check(ctx)
                start_missing(available)
                if not len(pending):
                    # The staleness rule wants nothing more from these weights.
                    return ProduceBatchStatus.EXPIRED_BATCH
                await pending.changes.wait(seen)


class ProduceBatchStatus(enum.Enum):
    """How a call to `produce_batch` ended; of several tasks together, the last of this order holds."""

    NORMAL = enum.auto()
    EXPIRED_BATCH = enum.auto()
    """The rollout weights are too old for this train step: only a weight sync can help."""
    # A pause concerns all tasks, weights that are too old may concern one.
    UPDATE_WEIGHT_AND_ABORT = enum.auto()
    """A pause was requested."""


def worst_status(statuses: Iterable[ProduceBatchStatus]) -> ProduceBatchStatus:
    """The status of several tasks together."""
    return max(statuses, key=lambda status: status.value, default=ProduceBatchStatus.NORMAL)


class ProduceStrategyConfig(BaseModel, ABC):
    """The settings that every strategy has."""

    model_config = StrictModel.model_config

    is_valid_sample_fn: context.IsValidSampleFn = context.default_is_valid_sample_fn
    should_continue_fn: context.ShouldContinueFn = context.default_should_continue_fn

    @abstractmethod
    def build(
        self, *, sync_weights_interval: int = 1, rollout_controller: context.Generation | None = None
    ) -> ProduceStrategy:
        """The strategy for weights that are synchronized every `sync_weights_interval` train steps."""


class SyncProduceStrategyConfig(ProduceStrategyConfig):
    """Builds a `SyncProduceStrategy`."""

    def build(
        self, *, sync_weights_interval: int = 1, rollout_controller: context.Generation | None = None
    ) -> "SyncProduceStrategy":
        """The strategy for weights that are synchronized every `sync_weights_interval` train steps."""
        return SyncProduceStrategy(self, sync_weights_interval)


class SyncProduceStrategy(ProduceStrategy):
    """Produces exactly what one train step needs, while the trainer waits.

    Invariants: at most ``task_batch_size`` groups are in flight; nothing is in flight after the call; which
    prompts end up in the batch does not depend on which generation finishes first; a group that was left over
    (`should_continue_fn` may want more than a batch) is no staler than one that is made now could be.

    consumes: prompts; waits for: the next group to finish, or a pause; woken by: the group's task, the
    update event; produces: stored groups.
    """

    def __init__(self, config: SyncProduceStrategyConfig, sync_weights_interval: int = 1) -> None:
        super().__init__(config.is_valid_sample_fn, config.should_continue_fn)
        self._max_lag = calculate_stale_threshold(0, sync_weights_interval)
        self.leftover_threshold: int = self._max_lag
        self._ctx: context.ProduceContext
        self._completed = 0
        """Groups that count for the present call: left over, or completed by it."""

    def limit_lag(self, train_steps: int) -> None:
        """It never raises the limit."""
        self._max_lag = min(self._max_lag, train_steps)

    async def produce_batch(self, ctx: context.ProduceContext) -> ProduceBatchStatus:
        """Start what is missing and replace what does not complete, until `should_continue_fn` says stop.

        Raises:
            ProductionError: too many groups failed, or almost none was accepted.
        """
        if (stop := self._must_stop(ctx)) is not None:
            return stop
        self._ctx = ctx
        # Failures of an earlier call, which may have been cancelled, are no reason to give up on this one.
        self._budget.reset()
        # Weights that were not synchronized when due make groups that are as stale: those are no worse.
        self.leftover_threshold = max(self._max_lag, ctx.train_step - ctx.model_step)
        expired = await ctx.replay_buffer.refresh_staleness(
            task_stale_thresholds={ctx.task_name: self.leftover_threshold}, current_train_step=ctx.train_step
        )
        self.num_expired += expired[ctx.task_name]
        # After the aging: groups that expired just now do not count.
        self._completed = await ctx.replay_buffer.count(ctx.task_name, Status.COMPLETED)
        try:
            return await self._fill(ctx, partial(self._start_missing, ctx))
        finally:
            await self._pending.cancel()
            self._pending.raise_error()

    async def _count(self, ctx: context.ProduceContext) -> tuple[int, int]:
        return self._completed, ctx.task_batch_size

    def _start_missing(self, ctx: context.ProduceContext, available: int) -> None:
        size = ctx.task_batch_size
        missing = size - available
        if missing <= 0:
            # `should_continue_fn` wants more than the batch; only asking it says how many more.
            more = itertools.takewhile(lambda n: self.should_continue_fn(available + n, size), range(1, size))
            missing = 1 + sum(1 for _ in more)
        for _ in range(missing - len(self._pending)):
            take = partial(ctx.sample_group, from_expired_pool=False)
            self._pending.start(Work(take, ctx.generate_group, self._store, ctx.should_abort))

    async def _store(self, group: context.Group, ended: Ended) -> None:
        """Count and store one group."""
        if ended is Ended.RETURNED:
            # In two lines: others may be stored while this one is, and all of them count.
            is_completed = await self._ctx.put_generated_group(group, before_put=_forget_aborted)
            self._completed += is_completed
            self._budget.count(get_group_status(group), group)
        else:
            await self._ctx.put_back(group, wipe=ended is Ended.INTERRUPTED)


def _forget_aborted(group: context.Group) -> None:
    """Wipe aborted rollouts: they will start over, and must not grow old meanwhile."""
    for state in group:
        if state.status is Status.ABORTED:
            reset_rollout_response(state)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """The groups of one task, counted since the start of the run, on which a rule decides."""

    target: int
    """Groups that should be available: consumed ones and COMPLETED ones in the buffer together."""
    available: int
    in_flight: int
    over_sample: int
    """Groups that the configuration wants in flight beyond the target; 0 in a tail batch."""
    fresh_limit: int
    """The groups that the consumer will have taken by the last train step for which a group started now is
    not too stale; more groups than these would wait until they are."""
    num_expired: int
    """Groups that expired since the start, as far as this producer has seen."""


@dataclass(frozen=True, kw_only=True)
class StalenessRule:
    """The rule `drop`, and the base of the others: override `limit`, or set the fields.

    Invariant for a rule of your own: `limit` must reach ``outlook.target``, or production ends with
    EXPIRED_BATCH, which is right only where newer weights help.

    >>> class NoOverSampling(StalenessRule):
    ...     def limit(self, outlook):
    ...         return outlook.target
    >>> NoOverSampling().limit(Outlook(
    ...     target=8, available=3, in_flight=2, over_sample=4, fresh_limit=16, num_expired=0))
    8
    """

    expires: bool = True
    """Groups at or over the threshold expire in the buffer, their responses wiped."""
    regenerates: bool = False
    """Expired groups stay in the buffer and are generated again, before all others; else they are dropped."""

    def limit(self, outlook: Outlook) -> int:
        """How many groups may be available or in flight."""
        return outlook.target + outlook.over_sample


@dataclass(frozen=True, kw_only=True)
class AdmitRule(StalenessRule):
    """Starts only what can still be fresh enough when it is trained.

    The count is AReaL's (Fu et al. 2025, "AReaL", section 5.1), with absolute numbers of groups. It reaches
    the target of every step for which the weights are fresh enough, so it cannot starve the trainer; what it
    cuts is over-sampling.
    """

    def limit(self, outlook: Outlook) -> int:
        """The target and the over-sampling, cut to the groups that will be fresh enough."""
        return min(outlook.target + outlook.over_sample, outlook.fresh_limit)


STALENESS_RULES: Mapping[str, StalenessRule] = {
    "drop": StalenessRule(),
    "requeue": StalenessRule(regenerates=True),
    "admit": AdmitRule(),
    # These two differ only in what the trainer does with stale tokens.
    "mask": StalenessRule(expires=False),
    "correct": StalenessRule(expires=False),
}


def find_staleness_rule(rule: str | StalenessRule) -> StalenessRule:
    """The rule of that name, or of that ``package.module:Class``; or the object itself.

    Raises:
        ConfigError: there is no such rule, or it is something else.
    """
    found = look_up("staleness_rule", rule, STALENESS_RULES) if isinstance(rule, str) else rule
    with errors_about(f"staleness_rule {rule!r} is made without arguments", TypeError):
        made: StalenessRule = found() if isinstance(found, type) else found
    if not isinstance(made, StalenessRule):
        raise ConfigError(f"staleness_rule {rule!r} is no StalenessRule; derive its class from that")
    return made
