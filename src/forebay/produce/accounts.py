"""Takes batches out of the buffer, whole or not at all, and keeps the books of what becomes of groups.

::

    age --> take (ARCHIVED) --> ledger: trained      --undo--> restore, ledger: requeued
                |
                '--> FILTERED, FAILED, SKIPPED, EXPIRED that nobody regenerates: out, ledger: dropped

It decides nothing about production and waits for nothing but the buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forebay.ledger import Ledger
from forebay.produce.results import LEFTOVER_STATUSES
from forebay.produce.strategies.base import ProduceStrategy
from forebay.produce.strategies.context import fail_group, name_group, record_left, why_failed
from forebay.produce.strategies.rules import GroupRules
from forebay.produce.tasks import TaskRunner, in_flight
from forebay.replay import ReplayBuffer, StorageItem
from forebay.types import (
    RolloutState,
    Status,
    calculate_seq_staleness,
    get_group_status,
    oldest_step_of,
)

GroupsByTask = dict[str, list[list[RolloutState]]]

_TERMINAL = (Status.FILTERED, Status.FAILED, Status.SKIPPED)

_NEVER_STALE = 2**31 - 1
"""A threshold that nothing reaches: the groups of a task without one are aged all the same."""


class Accounts:
    """The books of several tasks over one buffer.

    Invariant: between two calls, every group that was ever taken up is live (in the buffer or in flight),
    trained or dropped in the ledger.

    >>> accounts = Accounts(runners, buffer, Ledger())
    >>> groups_by_task = await accounts.take({"math": 16}, train_step=3)
    """

    def __init__(
        self,
        runners: Mapping[str, TaskRunner],
        replay_buffer: ReplayBuffer,
        ledger: Ledger,
        rules: GroupRules | None = None,
    ) -> None:
        """With `rules`, a batch holds only what the trainer can take."""
        self.ledger = ledger
        self.num_untrainable = 0
        """Groups that were found in the buffer and dropped, because they cannot be trained."""
        self.rules = rules
        self._runners = runners
        self._buffer = replay_buffer
        self._on_evict = replay_buffer.on_evict
        replay_buffer.on_evict = self._enter_eviction

    async def age(self, train_step: int) -> None:
        """Give every group its staleness at `train_step`; what is too stale for its task expires."""
        expired = await self._buffer.refresh_staleness(
            task_stale_thresholds={name: self._threshold(name) for name in self._runners},
            current_train_step=train_step,
        )
        for name, count in expired.items():
            strategy = self._runners[name].produce_strategy
            if isinstance(strategy, ProduceStrategy):
                strategy.num_expired += count

    async def take(self, sizes: Mapping[str, int], train_step: int) -> GroupsByTask | None:
        """The batch of `train_step`, entered as trained; None, and nothing is taken, if it is not whole."""
        if not await self._buffer.is_ready(sizes):
            return None
        groups_by_task, counts = await self._buffer.take_batch(dict(sizes), train_step=train_step)
        if any(counts[name] < size for name, size in sizes.items()):
            # Something expired or was evicted between the look and the grasp.
            await self._buffer.restore(train_step - 1)
            return None
        if not self._are_fresh(groups_by_task, train_step):
            # A put that began in an earlier step came after the aging: a store may take its time.
            await self._buffer.restore(train_step - 1)
            await self.age(train_step)
            return None
        if await self._drop_untrainable(groups_by_task, train_step):
            return await self.take(sizes, train_step)
        for name, groups in groups_by_task.items():
            for group in groups:
                self.ledger.record(name_group(group), name, "trained", train_step=train_step)
        return groups_by_task

    def _are_fresh(self, groups_by_task: GroupsByTask, train_step: int) -> bool:
        """Whether nothing that was taken is too stale at `train_step`; rollouts get their staleness then."""
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
        await self._buffer.restore(train_step - 1)
        for name in affected:
            # All of them: put back in the order they come in, they keep it.
            num_completed = await self._buffer.count(name, Status.COMPLETED)
            for group in await self._buffer.get(num_completed, name, Status.COMPLETED):
                group_id, left = name_group(group), rules.release_failed(group)
                record_left(self.ledger, name, group_id, left)
                is_completed = get_group_status(group) is Status.COMPLETED
                if is_completed and rules.accepts(group):
                    await self._buffer.put(group, name)
                    continue
                if is_completed:
                    fail_group(group, f"the trainer needs {rules.needed_members} rollouts of each group")
                self._record_drop(group, name, Status.FAILED)
                self.num_untrainable += 1
        return True

    def _record_drop(self, group: Sequence[RolloutState], task_name: str, status: Status) -> None:
        self.ledger.record(name_group(group), task_name, "dropped", reason=status.value, **why_failed(group))

    def _threshold(self, task_name: str) -> int:
        strategy = self._runners[task_name].produce_strategy
        thresholds = (getattr(strategy, name, None) for name in ("leftover_threshold", "stale_threshold"))
        return next(filter(None, thresholds), _NEVER_STALE)

    async def give_back(
        self, groups_by_task: Mapping[str, Sequence[Sequence[RolloutState]]], train_step: int
    ) -> None:
        """Undo `take`: the groups are live again, as they were."""
        await self._buffer.restore(train_step - 1)
        for name, groups in groups_by_task.items():
            for group in groups:
                self.ledger.record(name_group(group), name, "requeued")

    async def drop_terminal(self) -> None:
        """Nothing will ever train or retry these: out of the buffer, into the ledger."""
        # One question for all: there is seldom anything.
        cells = await self._buffer.count_statuses(self._runners, (*_TERMINAL, Status.EXPIRED))
        for name, runner in self._runners.items():
            keeps_expired = getattr(runner.produce_strategy, "keeps_expired", False)
            for status in _TERMINAL if keeps_expired else (*_TERMINAL, Status.EXPIRED):
                for group in await self._buffer.get(cells[name][status], name, status):
                    self._record_drop(group, name, status)

    async def count_leftovers(self) -> dict[str, dict[Status, int]]:
        """The groups of each task in the buffer, by status."""
        return await self._buffer.count_statuses(self._runners, LEFTOVER_STATUSES)

    async def count_live(self) -> dict[str, int]:
        """The groups of each task in the buffer and in flight."""
        cells = await self.count_leftovers()
        # Nothing may be awaited from here on: a group must not move between the two counts.
        return {
            name: sum(cells[name].values()) + len(in_flight(runner)) for name, runner in self._runners.items()
        }

    def _enter_eviction(self, evicted: StorageItem) -> None:
        self.ledger.record(name_group(evicted.item), evicted.task_name, "dropped", reason="evicted")
        if self._on_evict is not None:
            self._on_evict(evicted)
