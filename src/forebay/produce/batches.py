"""The consumer's side of production: waits for batches, takes them whole or not at all, and keeps the books.

::

    every put, every change of the producer's state --> whole?  yes --> take --> ledger: trained
                                                          |  no, and the producer ...
           works, or is paused  (wait on) <---------------+--> has ended --> ProductionError, ConnectionLost
                                                          +--> was never started, and nothing else puts
                                                          |    groups, for a while: ProductionError
                                                          +--> has weights that are too old
                                                               newer ones exist: synchronize
                                                               none do: ProductionError

    take (ARCHIVED) --undo--> restore, ledger: requeued; unused
      '--> with reuse: past groups fill the share that is theirs, and the places of new ones without a signal
      '--> FILTERED, FAILED, SKIPPED, and EXPIRED without a tail batch: out of the buffer, ledger: dropped

It starts no production; `forebay.produce.background` does.
"""

import asyncio
import contextlib
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from forebay.aio.tasks import beside, finish
from forebay.aio.time_limits import timeout_at
from forebay.ledger import Ledger
from forebay.produce.background import BackgroundProducer, Mode, TaskRunner
from forebay.produce.progress import ProduceProgress
from forebay.produce.results import LEFTOVER_STATUSES, ProduceBatchResult, TaskResult, summarize
from forebay.produce.strategies.base import ProduceBatchStatus
from forebay.produce.strategies.pending import ProductionError
from forebay.produce.strategies.rules import GroupRules, book_tags, fail_group, name_group, record_left, why_failed
from forebay.replay import ConnectionLost, ReplayBuffer, StorageItem
from forebay.replay.arrival import NEVER_STALE
from forebay.types import RolloutState, Status, calculate_seq_staleness, get_group_status, oldest_step_of

logger = logging.getLogger(__name__)

GroupsByTask = dict[str, list[list[RolloutState]]]


@dataclass(eq=False)
class Batches:
    """The batches of several tasks over one buffer.

    Invariants: between two calls, every group that was ever taken up is live (in the buffer or in flight),
    trained or dropped in the ledger; a wait ends with the put that completes the batch, and no state in which
    nothing can complete it goes unnoticed.
    """

    runners: Mapping[str, TaskRunner]
    """The tasks, by name."""
    buffer: ReplayBuffer
    ledger: Ledger
    producer: BackgroundProducer
    """Fills the buffer in a separate run."""
    progress: ProduceProgress
    """Counts of a separate run, shared with the producer."""
    rules: GroupRules | None = None
    """With rules, a batch holds only groups that the trainer can take."""
    keeps_dropped: bool = False
    """Groups that are dropped stay ARCHIVED, as consumed ones do, until a checkpoint covers it."""

    def __post_init__(self) -> None:
        self.num_untrainable = 0
        """Groups that were found in the buffer and dropped, because they cannot be trained."""
        self._aged: tuple[int, dict[str, int]] | None = None
        """The train step and the thresholds of the last aging."""
        self._num_hungry = dict.fromkeys(self.runners, 0)
        self._consumed: dict[int, dict[str, int]] = {}
        """Groups of each task in the latest batch of the separate run, by its train step."""
        self._past: set[tuple[str, str | int]] = set()
        self._replaced: GroupsByTask = {}
        """Of the latest batch: the groups that were used again, and those that gave their places to some."""
        self.on_drop: Callable[[Sequence[RolloutState], str, str], object] = lambda *_: None
        """Told of every group that is dropped, its task and the reason; for displays, never for decisions."""
        self._on_evict, self.buffer.on_evict = self.buffer.on_evict, self._enter_eviction

    async def age(self, train_step: int, *, anew: bool = True) -> None:
        """Give every group its staleness at `train_step`; what is too stale for its task expires.

        Not `anew`, nothing is done where the last aging was the same: each put since then has looked by itself.
        """
        thresholds = {name: self._threshold(name) for name in self.runners}
        if not anew and self._aged == (train_step, thresholds):
            return
        expired = await self.buffer.refresh_staleness(task_stale_thresholds=thresholds, current_train_step=train_step)
        self._aged = train_step, thresholds
        for name, count in expired.items():
            self.runners[name].produce_strategy.num_expired += count

    async def fresh_sizes(self, sizes: Mapping[str, int], train_step: int) -> dict[str, int]:
        """Of a batch of these sizes, the groups of each task that have to be new."""
        if (reuse := self.buffer.reuse) is None:
            return dict(sizes)
        usable = await self.buffer.count_usable(sizes, train_step)
        return {n: size - min(math.floor(size * reuse.share), usable[n]) for n, size in sizes.items()}

    async def wait_for(self, sizes: Mapping[str, int], train_step: int) -> bool:
        """True once the buffer has the batch; False if only newer weights, which exist, can help.

        waits for: puts, and the producer's state; woken by: both, and timers (a warning, the grace of a
        producer that was not started); produces: nothing.

        Raises:
            BufferClosed: the buffer was closed.
            ConnectionLost: the buffer is lost, for this process or for the producer.
            ProductionError: there will be no batch.
        """
        producer, buffer = self.producer, self.buffer
        now_s, asked_at = asyncio.get_running_loop().time, None
        held_up_s, started_s = HELD_UP_S, now_s()
        has_siblings = sum(size > 0 for size in sizes.values()) > 1
        async with beside(self._relay_puts(buffer.version)) as relay:
            while True:
                seen = producer.changes.version
                counts = await buffer.count_statuses(sizes, [Status.COMPLETED])
                ready = {name: cells[Status.COMPLETED] for name, cells in counts.items()}
                lacking = [name for name, size in sizes.items() if ready[name] < size]
                if not lacking:
                    return True
                if relay.done():
                    # It ends only by an error: there will be no further put.
                    relay.result()
                if producer.has_ended:
                    await self._raise_end(sizes, train_step)
                if producer.mode is Mode.EXHAUSTED:
                    # Where nothing expires, groups in flight can complete the batch, however old they are.
                    strategies = [self.runners[name].produce_strategy for name in lacking]
                    if asked_at != buffer.version:
                        # The producer may have looked before the last change, or before this call.
                        asked_at = buffer.version
                        producer.reconsider()
                    elif not any(s.pending_task_count() and s.stale_threshold is None for s in strategies):
                        if train_step - 1 <= producer.model_step:
                            raise ProductionError(
                                f"production stands still, and there are no newer weights to help it: "
                                f"{await self.describe(sizes, train_step)}"
                            )
                        return False
                # One timer for both: the next warning, and the grace since the latest change.
                warn_s = started_s + held_up_s if has_siblings else math.inf
                grace_s = math.inf if producer.was_started else now_s() + START_GRACE_S
                until_s = min(warn_s, grace_s)
                with contextlib.suppress(TimeoutError):
                    async with timeout_at(None if math.isinf(until_s) else until_s):
                        await producer.changes.wait(seen)
                        continue
                if grace_s <= warn_s and not producer.was_started:
                    raise ProductionError(
                        f"produce_loop was never started, and nothing else has changed the buffer for "
                        f"{START_GRACE_S:g} s; start it as a task before get_batch: "
                        f"{await self.describe(sizes, train_step)}"
                    )
                counts_of = {name: f"{ready[name]} of {size}" for name, size in sizes.items() if size > 0}
                if len(lacking) < len(counts_of):
                    logger.warning(
                        f"the batch of train step {train_step} has waited {held_up_s:.0f} s for "
                        f"{', '.join(lacking)} while others are ready: {counts_of}"
                    )
                held_up_s *= 2

    async def _relay_puts(self, version: int) -> None:
        """Make changes of the buffer changes of the producer, so that one wait is woken by both."""
        try:
            while True:
                version = await self.buffer.wait_for_change(version)
                self.producer.changes.note()
        finally:
            self.producer.changes.note()

    async def _raise_end(self, sizes: Mapping[str, int], train_step: int) -> NoReturn:
        failure = None if self.producer.mode is Mode.SHUT_DOWN else self.producer.failure
        if isinstance(failure, ConnectionLost):
            raise ConnectionLost(str(failure)) from failure
        counters = await self.describe(sizes, train_step)
        if failure is not None:
            reason = str(failure) or type(failure).__name__
            raise ProductionError(f"production has failed: {reason}; {counters}") from failure
        raise ProductionStopped(f"production was shut down; {counters}")

    async def describe(self, sizes: Mapping[str, int], train_step: int) -> str:
        """Every counter that may explain why a batch does not come."""
        leftovers = await self.buffer.count_statuses(self.runners, LEFTOVER_STATUSES)
        held = {name: {s.value: n for s, n in cells.items() if n} for name, cells in leftovers.items()}
        pending = {name: runner.produce_strategy.pending_task_count() for name, runner in self.runners.items()}
        producer, progress = self.producer, self.progress
        return (
            f"train step {train_step} needs {dict(sizes)} groups; the buffer holds {held}; in flight "
            f"{pending}; consumed {progress.consumed_samples} of targets "
            f"{progress.target_samples} up to step {progress.target_upto_future_step}; "
            f"dropped {self.ledger.balance({}).dropped}; the producer works for step "
            f"{progress.producer_future_step} with weights of step {producer.model_step}, status "
            f"{producer.status.name}, running: {producer.is_running}"
        )

    async def take(
        self, sizes: dict[str, int], train_step: int, done: "ColocatedRound | None" = None
    ) -> ProduceBatchResult | None:
        """The batch of `train_step`, entered as trained; None, and nothing is taken, if it is not whole.

        `done` is how a colocated step was produced; None takes a batch of the separate run. Cancelled, the
        call has taken nothing.
        """
        task = asyncio.create_task(self._take(sizes, train_step, done))
        try:
            return await finish(task)
        except asyncio.CancelledError:
            if not task.cancelled() and task.exception() is None and (result := task.result()) is not None:
                await finish(self.give_back(result.rollout_states, train_step))
            raise

    async def _take(
        self, sizes: dict[str, int], train_step: int, done: "ColocatedRound | None"
    ) -> ProduceBatchResult | None:
        groups_by_task = await self._take_whole(await self.fresh_sizes(sizes, train_step), train_step)
        if groups_by_task is None:
            return None
        self._count_shares(sizes, train_step)
        if done is None:
            # Before anything is awaited: the producer must not take consumed groups for missing ones. Past
            # groups fill places, too.
            self.progress.mark_consumed(sizes)
            self.progress.finish_consume(train_step)
            self._consumed = {train_step: sizes}
        uses = await self._use_past(groups_by_task, sizes, train_step)
        # Counted before they are dropped: the result tells how many groups ended badly.
        leftovers = await self._drop_terminal(train_step)
        progress = self.progress if done is None else done.progress
        pauses_s = self.producer.consume_pauses() if done is None else done.pauses_s
        results = {
            name: TaskResult(rollout_states=groups_by_task.get(name, []), leftovers=leftovers[name], reuse=uses[name])
            for name in self.runners
        }
        for name, result in results.items():
            if done is not None:
                result.status = done.statuses.get(name, ProduceBatchStatus.NORMAL)
            result.produced_samples, result.produced_tokens = progress.consume_produced(name)
            result.raw_rewards_sum, result.raw_rewards_count = progress.consume_raw_rewards(name)
            result.group_gen_pause_time_s = pauses_s.get(name, 0.0)
        batch = summarize(results, sizes)
        batch.produce_time_s = progress.consume_produce_time()
        if done is None:
            # Now rather than with the next call: groups that expire are replaced while the trainer trains.
            await self.age(train_step + 1)
            self.producer.reconsider()
        return batch

    async def _drop_terminal(self, train_step: int) -> dict[str, dict[Status, int]]:
        """Drop what will never be trained; the groups of each task and status that there were before."""
        leftovers = await self.buffer.count_statuses(self.runners, LEFTOVER_STATUSES)
        for name, runner in self.runners.items():
            keeps_expired = runner.produce_strategy.keeps_expired
            for status in _TERMINAL if keeps_expired else (*_TERMINAL, Status.EXPIRED):
                if not (number := leftovers[name][status]):
                    continue
                if self.keeps_dropped:
                    sizes = {name: number}
                    taken, _ = await self.buffer.take_batch(sizes, group_status=status, train_step=train_step)
                    dropped = taken[name]
                else:
                    dropped = await self.buffer.get(number, name, status)
                for group in dropped:
                    # One that a batch which is given back had dropped is in the books already.
                    life = self.ledger.life(name_group(group), name)
                    if life is None or life.place != "dropped":
                        self._record_drop(group, name, status.value)
        return leftovers

    async def report_expired(self, sizes: dict[str, int]) -> ProduceBatchResult:
        """A result without groups, because only newer weights can help; the windows stay for the next one."""
        leftovers = await self.buffer.count_statuses(self.runners, LEFTOVER_STATUSES)
        results = {
            name: TaskResult(
                status=ProduceBatchStatus.EXPIRED_BATCH, leftovers=leftovers[name], group_gen_pause_time_s=pause_s
            )
            for name, pause_s in self.producer.pauses_s.items()
        }
        return summarize(results, sizes)

    async def _take_whole(self, sizes: Mapping[str, int], train_step: int) -> GroupsByTask | None:
        """The new groups of a batch; None if it is not whole."""
        # Asked first, because a batch that is taken and restored costs much more.
        if not await self.buffer.is_ready(sizes):
            return None
        groups_by_task, counts = await self.buffer.take_batch(dict(sizes), train_step=train_step)
        is_short = any(counts[name] < size for name, size in sizes.items())
        if is_short or not self._are_fresh(groups_by_task, train_step):
            # Something expired or was evicted after the look, or a put that began in an earlier step, or had no
            # threshold, came after the aging: a store may take its time.
            await self.buffer.restore(train_step - 1)
            await self.age(train_step)
            return None
        if await self._drop_untrainable(groups_by_task, train_step):
            return await self._take_whole(sizes, train_step)
        return groups_by_task

    async def _use_past(
        self, groups_by_task: GroupsByTask, sizes: Mapping[str, int], train_step: int
    ) -> Mapping[str, Counter[str]]:
        """Complete a batch of new groups by past ones, and enter all of it; counts as `TaskResult.reuse`."""
        missing = {name: sizes[name] - len(groups) for name, groups in groups_by_task.items()}
        past: GroupsByTask = {}
        dull: GroupsByTask = {name: [] for name in groups_by_task}
        if (reuse := self.buffer.reuse) is not None:
            dull = {n: [g for g in groups if not reuse.rank(g)] for n, groups in groups_by_task.items()}
            wanted = {name: missing[name] + len(groups) for name, groups in dull.items()}
            past = await self.buffer.use_again(wanted, train_step)
        self._past, self._replaced, uses = set(), {}, defaultdict[str, Counter[str]](Counter)
        for name, groups in groups_by_task.items():
            again = past.get(name, [])
            replaced = self._replaced[name] = dull[name][: max(0, len(again) - missing[name])]
            groups[:] = [group for group in groups if not any(group is other for other in replaced)]
            for group in groups:
                self.ledger.record(name_group(group), name, "trained", train_step=train_step)
            for group in replaced:
                self._record_drop(group, name, NO_SIGNAL)
            for group in again:
                self.ledger.record(name_group(group), name, "reused", train_step=train_step)
                self._past.add((name, name_group(group)))
            groups += again
            staleness = sum(max(state.seq_staleness for state in group) for group in again)
            uses[name].update(past_groups=len(again), past_staleness=staleness, replaced_groups=len(replaced))
        return uses

    def _are_fresh(self, groups_by_task: GroupsByTask, train_step: int) -> bool:
        """Whether no group of these is too stale at `train_step`; rollouts get their staleness then."""
        are_fresh = True
        for name, groups in groups_by_task.items():
            threshold = self._threshold(name)
            for state in [state for group in groups for state in group]:
                if (model_step := oldest_step_of(state)) is not None:
                    state.seq_staleness = calculate_seq_staleness(model_step, train_step)
                are_fresh = are_fresh and state.seq_staleness < threshold
        return are_fresh

    async def _drop_untrainable(self, groups_by_task: GroupsByTask, train_step: int) -> bool:
        """Whether the trainer cannot take some group: then the batch is live again, without such groups.

        The producer stores none. They come from the checkpoint of an older version, or of a run that is
        resumed with an advantage that compares more rollouts. The trainer would refuse the batch, and after
        every resume it would meet it again.
        """
        rules = self.rules
        if rules is None:
            return False
        affected = [n for n, groups in groups_by_task.items() if not all(map(rules.accepts, groups))]
        if not affected:
            return False
        await self.buffer.restore(train_step - 1)
        for name in affected:
            # All of them: put back in the order they come in, they keep it.
            num_completed = await self.buffer.count(name, Status.COMPLETED)
            for group in await self.buffer.get(num_completed, name, Status.COMPLETED):
                group_id, left = name_group(group), rules.release_failed(group)
                record_left(self.ledger, name, group_id, left)
                is_completed = get_group_status(group) is Status.COMPLETED
                if is_completed and rules.accepts(group):
                    await self.buffer.put(group, name, tags=book_tags(group))
                    continue
                if is_completed:
                    fail_group(group, f"the trainer needs {rules.needed_members} rollouts of each group")
                self._record_drop(group, name, Status.FAILED.value)
                self.num_untrainable += 1
        return True

    def _threshold(self, task_name: str) -> int:
        strategy = self.runners[task_name].produce_strategy
        return strategy.leftover_threshold or strategy.stale_threshold or NEVER_STALE

    async def give_back(self, groups: Sequence[Sequence[RolloutState]], train_step: int) -> None:
        """Undo `take`: the groups are live again, as they were."""
        await self.buffer.restore(train_step - 1)
        for group in groups:
            task_name = group[0].task_name
            assert task_name is not None, f"group {group[0].group_id!r} names no task"
            is_past = (task_name, name_group(group)) in self._past
            self.ledger.record(name_group(group), task_name, "unused" if is_past else "requeued")
        for task_name, replaced in self._replaced.items():
            for group in replaced:
                self.ledger.record(name_group(group), task_name, "requeued")
        if (counts := self._consumed.pop(train_step, None)) is not None:
            self.progress.mark_consumed({name: -count for name, count in counts.items()})
            self.progress.begin_consume(train_step)
        if self.keeps_dropped:
            # They came back with the batch.
            await self._drop_terminal(train_step)

    async def count_live(self) -> dict[str, int]:
        """The groups of each task in the buffer, in flight, and to be taken up again after a resume."""
        cells = await self.buffer.count_statuses(self.runners, LEFTOVER_STATUSES)
        # Nothing may be awaited from here on: a group must not move between the two counts.
        return {
            name: sum(cells[name].values())
            + len(runner.produce_strategy.pending_groups())
            # A sampler of the user's own may owe none.
            + getattr(runner.sampler, "num_owed", 0)
            for name, runner in self.runners.items()
        }

    def _count_shares(self, sizes: Mapping[str, int], train_step: int) -> None:
        """Note how the batch of `train_step` is shared; warn of a task that has had nothing for long."""
        for name, runner in self.runners.items():
            is_hungry = runner.weight > 0 and sizes[name] == 0
            self._num_hungry[name] = num = self._num_hungry[name] + 1 if is_hungry else 0
            if num and num % HUNGRY_BATCHES == 0:
                logger.warning(
                    f"task {name} (weight {runner.weight:g}) had no share of the last {num} batches; train "
                    f"step {train_step} is shared as {dict(sizes)}: raise its weight or the batch size"
                )

    def _record_drop(self, group: Sequence[RolloutState], task_name: str, reason: str) -> None:
        self.ledger.record(name_group(group), task_name, "dropped", reason=reason, **why_failed(group))
        self.on_drop(group, task_name, reason)

    def _enter_eviction(self, evicted: StorageItem) -> None:
        self._record_drop(evicted.item, evicted.task_name, "evicted")
        if self._on_evict is not None:
            self._on_evict(evicted)


@dataclass(frozen=True, kw_only=True)
class ColocatedRound:
    """How the groups of one colocated step were produced."""

    progress: ProduceProgress
    statuses: Mapping[str, ProduceBatchStatus]
    """How production ended for each task that has a share of the batch."""
    pauses_s: Mapping[str, float]


class ProductionStopped(ProductionError):
    """Production was shut down: there will be no further batch."""


START_GRACE_S = 10.0
"""Time for the task of a producer to start, or for something else to fill the buffer in its place."""
HUNGRY_BATCHES = 20
"""Batches in a row without a group of the task: with fewer, small weights take their turns."""
HELD_UP_S = 60.0
"""How long a batch waits for some tasks while others are ready, before a warning; then twice as long."""
NO_SIGNAL = "no_signal"
"""Why a group is dropped whose scores do not differ, and whose place a past group has."""
_TERMINAL = (Status.FILTERED, Status.FAILED, Status.SKIPPED)
"""Groups that will never be trained or retried."""
