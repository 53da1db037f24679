"""Runs several tasks: splits the batch, drives the strategies, takes the batch, keeps the accounts.

One colocated step::

    produce_batch(batch_size, train_step, model_step)
        continue engines -> every task's strategy, concurrently -> pause -> take the batch (archived under
        train_step) -> dropped groups leave the buffer and enter the ledger -> ProduceBatchResult

The manager owns no device and starts no engine; it is the one writer of progress and ledger.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

from forebay.ledger import Ledger
from forebay.produce.context import GroupCallback, GroupGenerator, GroupSampler, ProduceContext, name_group
from forebay.produce.progress import ProduceProgress
from forebay.produce.results import LEFTOVER_STATUSES, ProduceBatchResult, TaskResult, summarise
from forebay.produce.strategies import ProduceBatchStatus, ProduceStrategy, ProductionError
from forebay.replay import ReplayBuffer, StorageItem
from forebay.types import RolloutState, Status

logger = logging.getLogger(__name__)

_TERMINAL = (Status.FILTERED, Status.FAILED, Status.SKIPPED)
_STATUS_PRECEDENCE = (ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT, ProduceBatchStatus.EXPIRED_BATCH)


class Generation(Protocol):
    """What the manager needs of a rollout controller."""

    async def pause_generation(self) -> None:
        """End what is running as aborted."""
        ...

    async def continue_generation(self) -> None:
        """Take requests again."""
        ...


class CheckpointedSampler(GroupSampler, Protocol):
    """A sampler whose position can be saved."""

    def state_dict(self) -> dict[str, Any]:
        """Position, epoch and seed."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to that position."""
        ...


@dataclass(kw_only=True)
class TaskRunner:
    """One task: where its prompts come from, who rolls them out, and by which strategy."""

    task_name: str
    agent_loop: GroupGenerator
    produce_strategy: ProduceStrategy
    sampler: CheckpointedSampler
    weight: float = 1.0
    """Share of the batch, relative to the other tasks; 0 disables the task."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(f"task {self.task_name!r}: weight must not be negative, got {self.weight}")


def split_batch(batch_size: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Split `batch_size` groups by weight: floor, then largest remainder, ties in order; the sum is exact.

    Raises:
        ValueError: no weight is positive.

    >>> split_batch(7, {"a": 1, "b": 2, "c": 0})
    {'a': 2, 'b': 5, 'c': 0}
    """
    # As written, not as binary fractions: equal remainders must come out equal.
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    total = sum(exact.values())
    if total <= 0:
        raise ValueError(f"at least one task needs a positive weight, got {dict(weights)}")
    shares = {name: batch_size * weight / total for name, weight in exact.items()}
    sizes = {name: math.floor(share) for name, share in shares.items()}
    # sorted() is stable: equal remainders stay in task order.
    by_remainder = sorted(
        (name for name in weights if weights[name] > 0), key=lambda name: sizes[name] - shares[name]
    )
    for name in by_remainder[: batch_size - sum(sizes.values())]:
        sizes[name] += 1
    return sizes


@dataclass
class _Production:
    """What came of one task in one call."""

    status: ProduceBatchStatus = ProduceBatchStatus.NORMAL
    pause_time_s: float = 0.0


@dataclass(kw_only=True)
class AgentLoopManager:
    """Produces training batches from weighted tasks.

    Invariants: task names are unique; every group that leaves the buffer is in the ledger as trained or
    dropped with a reason. Override `get_task_batch_sizes` for another split of the batch.
    """

    task_runners: Sequence[TaskRunner]
    replay_buffer: ReplayBuffer
    rollout_controller: Generation | None = None
    ledger: Ledger = field(default_factory=Ledger)
    on_group: GroupCallback | None = None

    def __post_init__(self) -> None:
        names = [runner.task_name for runner in self.task_runners]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"tasks need unique names and there must be at least one, got {names}")
        self._runners = {runner.task_name: runner for runner in self.task_runners}
        self._update_event = asyncio.Event()
        self._on_evict = self.replay_buffer.on_evict
        self.replay_buffer.on_evict = self._enter_eviction

    @property
    def task_names(self) -> list[str]:
        """In configured order."""
        return list(self._runners)

    def get_task_batch_sizes(self, global_batch_size: int, train_step: int) -> dict[str, int]:
        """Groups per task in the batch of `train_step`."""
        return split_batch(global_batch_size, {name: r.weight for name, r in self._runners.items()})

    async def produce_batch(self, batch_size: int, train_step: int, model_step: int) -> ProduceBatchResult:
        """One batch of `batch_size` groups for `train_step`, made by the weights of `model_step`.

        Raises:
            ValueError: `batch_size` is less than 1.
            ProductionError: production cannot go on, or a task came back short; nothing was taken then.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1 group, got {batch_size}")
        clock = asyncio.get_running_loop().time
        started = clock()
        sizes = self.get_task_batch_sizes(batch_size, train_step)
        progress = ProduceProgress.build_local(self.task_names, sizes, train_step)
        contexts = {
            name: self._context(self._runners[name], size, train_step, model_step, progress)
            for name, size in sizes.items()
            if size > 0
        }
        productions = await self._produce(contexts)
        groups_by_task = await self._take(sizes, train_step)
        progress.add_produce_time(clock() - started)
        return await self._result(sizes, groups_by_task, productions, progress)

    def _context(
        self, runner: TaskRunner, size: int, train_step: int, model_step: int, progress: ProduceProgress
    ) -> ProduceContext:
        strategy = runner.produce_strategy
        return ProduceContext(
            agent_loop=runner.agent_loop,
            sampler=runner.sampler,
            replay_buffer=self.replay_buffer,
            task_batch_size=size,
            task_name=runner.task_name,
            train_step=train_step,
            update_event=self._update_event,
            model_step=model_step,
            progress=progress,
            is_valid_sample_fn=strategy.is_valid_sample_fn,
            stale_threshold=strategy.stale_threshold,
            ledger=self.ledger,
            on_group=self.on_group,
        )

    async def _produce(self, contexts: Mapping[str, ProduceContext]) -> dict[str, _Production]:
        """Continue, produce every task at once, pause. Engines are paused also when a task raises."""
        productions = {name: _Production() for name in contexts}

        async def produce(name: str, ctx: ProduceContext) -> None:
            productions[name].status = await self._runners[name].produce_strategy.produce_batch(ctx)

        if self.rollout_controller is not None:
            await self.rollout_controller.continue_generation()
        try:
            async with asyncio.TaskGroup() as tasks:
                for name, ctx in contexts.items():
                    tasks.create_task(produce(name, ctx))
        except BaseExceptionGroup as group:
            # One of the tasks ended the others: its reason is the one to show.
            reasons = [error for error in group.exceptions if isinstance(error, ProductionError)]
            raise (reasons or group.exceptions)[0] from None
        finally:
            for name, ctx in contexts.items():
                strategy = self._runners[name].produce_strategy
                productions[name].pause_time_s = await strategy.pause_produce(ctx)
            if self.rollout_controller is not None:
                await self.rollout_controller.pause_generation()
        return productions

    async def _take(self, sizes: Mapping[str, int], train_step: int) -> dict[str, list[list[RolloutState]]]:
        thresholds = {
            name: threshold
            for name, runner in self._runners.items()
            if (threshold := runner.produce_strategy.stale_threshold) is not None
        }
        if thresholds:
            await self.replay_buffer.refresh_staleness(
                task_stale_thresholds=thresholds, current_train_step=train_step
            )
        if not await self.replay_buffer.is_ready(dict(sizes)):
            counts = await self.replay_buffer.count_statuses(self.task_names, list(Status))
            held = {n: {s.value: c for s, c in cells.items() if c} for n, cells in counts.items()}
            raise ProductionError(
                f"train step {train_step} needs {dict(sizes)} groups but the buffer holds {held}"
            )
        groups_by_task, _ = await self.replay_buffer.take_batch(dict(sizes), train_step=train_step)
        for name, groups in groups_by_task.items():
            for group in groups:
                self.ledger.record(name_group(group), name, "trained", train_step=train_step)
        return groups_by_task

    async def _result(
        self,
        sizes: dict[str, int],
        groups_by_task: Mapping[str, list[list[RolloutState]]],
        productions: Mapping[str, _Production],
        progress: ProduceProgress,
    ) -> ProduceBatchResult:
        leftovers = await self.replay_buffer.count_statuses(self.task_names, list(LEFTOVER_STATUSES))
        await self._drop_terminal_groups()
        results = {
            name: TaskResult.build(
                groups=groups_by_task.get(name, []),
                leftovers=leftovers[name],
                status=productions.get(name, _Production()).status,
                pause_time_s=productions.get(name, _Production()).pause_time_s,
                produced=progress.consume_produced(name),
                raw_rewards=progress.consume_raw_rewards(name),
            )
            for name in self.task_names
        }
        statuses = {production.status for production in productions.values()}
        status = next((s for s in _STATUS_PRECEDENCE if s in statuses), ProduceBatchStatus.NORMAL)
        return summarise(results, sizes, status, progress.consume_produce_time())

    async def _drop_terminal_groups(self) -> None:
        """Nothing will ever train or retry these: out of the buffer, into the ledger."""
        for name, runner in self._runners.items():
            keeps_expired = getattr(runner.produce_strategy, "tail_batch_trigger_size", 0) > 0
            for status in _TERMINAL if keeps_expired else (*_TERMINAL, Status.EXPIRED):
                count = await self.replay_buffer.count(name, status)
                for group in await self.replay_buffer.get(count, name, status):
                    self.ledger.record(name_group(group), name, "dropped", reason=status.value)

    def _enter_eviction(self, evicted: StorageItem) -> None:
        self.ledger.record(name_group(evicted.item), evicted.task_name, "dropped", reason="evicted")
        if self._on_evict is not None:
            self._on_evict(evicted)

    async def save(self, path: Path | str) -> None:
        """Samplers, buffer and ledger into the folder `path`.

        Raises:
            RuntimeError: groups are in flight; pause production first.
        """
        path = Path(path)
        pending = {n: c for n, r in self._runners.items() if (c := r.produce_strategy.pending_task_count())}
        if pending:
            raise RuntimeError(f"cannot save while groups are in flight: {pending}; pause production first")
        await asyncio.to_thread(path.mkdir, parents=True, exist_ok=True)
        await self.replay_buffer.save(path / "buffer")
        state = {
            "samplers": {name: runner.sampler.state_dict() for name, runner in self._runners.items()},
            "ledger": self.ledger.state_dict(),
        }
        await asyncio.to_thread(_write_json, path / "manager.json", state)

    async def resume(self, path: Path | str) -> None:
        """Go back to what `save` wrote.

        Raises:
            ValueError: the checkpoint has other tasks, or a part of it does not fit.
        """
        path = Path(path)
        state = json.loads(await asyncio.to_thread((path / "manager.json").read_text, "utf-8"))
        if set(state["samplers"]) != set(self._runners):
            raise ValueError(
                f"the checkpoint at {str(path)!r} has tasks {sorted(state['samplers'])}, "
                f"the run has {sorted(self._runners)}"
            )
        await self.replay_buffer.resume(path / "buffer")
        for name, runner in self._runners.items():
            runner.sampler.load_state_dict(state["samplers"][name])
        self.ledger.load_state_dict(state["ledger"])


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
