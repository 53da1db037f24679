"""The tasks of a run: how a batch is shared among them, and calls to all of their strategies at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral
from typing import Any

from forebay.produce.strategies.base import ProduceBatchStatus, ProduceStrategy
from forebay.produce.strategies.context import Generation, GroupGenerator, GroupSampler, ProduceContext
from forebay.produce.strategies.pending import ProductionError
from forebay.replay import ConnectionLost
from forebay.watching.stalls import ANSWER_LIMIT_S, answered

STATUS_PRECEDENCE = (ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT, ProduceBatchStatus.EXPIRED_BATCH)

CONTROLLER_LIMIT_S = 1.5 * ANSWER_LIMIT_S
"""Longer than for one engine, so that a controller can say first which engine it is."""

_NUM_NAMED = 8
"""Group ids that an error message names; the count says how many more there are."""


@dataclass(kw_only=True)
class TaskRunner:
    """One task: the source of its prompts, the agent that rolls them out, and the strategy."""

    task_name: str
    agent_loop: GroupGenerator
    produce_strategy: ProduceStrategy
    sampler: GroupSampler
    weight: float = 1.0
    """Share of the batch, relative to the other tasks; 0 disables the task."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(f"task {self.task_name!r}: weight must not be negative, got {self.weight}")

    def name_pending(self) -> str:
        """How many groups are in flight, and which, for people."""
        groups, count = self.produce_strategy.pending_groups(), self.produce_strategy.pending_task_count()
        named = ", ".join(str(group[0].group_id) for group in groups[:_NUM_NAMED])
        return f"{count} ({named}{', ...' if len(groups) > _NUM_NAMED else ''})"


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


def check_split(sizes: object, task_names: Collection[str], batch_size: int) -> dict[str, int]:
    """`sizes`, the groups of each task in a batch, in the order of `task_names`.

    `AgentLoopManager.get_task_batch_sizes` may be overridden, and its answer decides what is taken.

    Raises:
        ValueError: a task is missing or unknown, a size is negative or no whole number, or the sum is wrong.
    """
    problem = None
    if not isinstance(sizes, Mapping) or set(sizes) != set(task_names):
        problem = f"it must name the tasks {list(task_names)}, each once (0 for one without a share)"
    elif any(isinstance(size, bool) or not isinstance(size, Integral) or size < 0 for size in sizes.values()):
        problem = "the sizes must be whole numbers of at least 0"
    elif sum(sizes.values()) != batch_size:
        problem = f"the sizes must sum to the batch of {batch_size}, not to {sum(sizes.values())}"
    if problem is not None:
        raise ValueError(f"get_task_batch_sizes returned {sizes!r:.500}: {problem}")
    assert isinstance(sizes, Mapping)
    return {name: int(sizes[name]) for name in task_names}


def worst_status(statuses: Iterable[ProduceBatchStatus]) -> ProduceBatchStatus:
    """The status of several tasks together."""
    found = set(statuses)
    # A pause concerns all tasks, weights that are too old may concern one.
    return next((status for status in STATUS_PRECEDENCE if status in found), ProduceBatchStatus.NORMAL)


async def produce_tasks(
    runners: Mapping[str, TaskRunner], contexts: Mapping[str, ProduceContext]
) -> dict[str, ProduceBatchStatus]:
    """One call of every task's strategy, all at once; the first that raises ends the others.

    Raises:
        ConnectionLost: the buffer is lost.
        ProductionError: production cannot go on.
    """
    try:
        async with asyncio.TaskGroup() as group:
            calls = {
                name: group.create_task(
                    runners[name].produce_strategy.produce_batch(ctx), name=f"produce {name}"
                )
                for name, ctx in contexts.items()
            }
    except BaseExceptionGroup as errors:
        # One of the tasks ended the others: its reason is the one to show.
        reason = _reason_among(errors.exceptions)
        raise reason from reason.__cause__
    return {name: call.result() for name, call in calls.items()}


async def pause_tasks(
    runners: Mapping[str, TaskRunner],
    contexts: Mapping[str, ProduceContext],
    controller: Generation | None,
) -> dict[str, float]:
    """Stop the engines, then collect every task's groups, all at once; the seconds it took each task.

    An error of one of them keeps none of the others from stopping; it is raised when all have ended.

    Raises:
        StallError: the controller does not answer.
        ConnectionLost: the buffer is lost.
        ProductionError: a task could not be paused; the first of them.
    """
    # The engines come first: a strategy that knows no controller can only wait for its groups to end, and
    # after its time-out it throws their tokens away.
    asked: list[Awaitable[Any]] = [pause_generation(controller)]
    asked += [runners[name].produce_strategy.pause_produce(ctx) for name, ctx in contexts.items()]
    engines_error, *answers = await asyncio.gather(*asked, return_exceptions=True)
    if engines_error is not None:
        raise engines_error
    return pause_seconds(dict(zip(contexts, answers, strict=True)))


def pause_seconds(results: Mapping[str, float | BaseException]) -> dict[str, float]:
    """The `results` of the tasks' pauses, if all of them are seconds.

    Raises:
        ConnectionLost: the buffer is lost.
        ProductionError: a task could not be paused; the first of them.
    """
    errors = {name: result for name, result in results.items() if isinstance(result, BaseException)}
    if errors:
        reason = _reason_among(list(errors.values()))
        if isinstance(reason, ProductionError | ConnectionLost) or not isinstance(reason, Exception):
            raise reason
        name = next(name for name, error in errors.items() if error is reason)
        raise ProductionError(
            f"task {name!r} could not be paused: {type(reason).__name__}: {reason}"
        ) from reason
    return {name: result for name, result in results.items() if not isinstance(result, BaseException)}


def _reason_among(errors: Sequence[BaseException]) -> BaseException:
    """A lost buffer, which fails others and may be brought back; else why production cannot go on."""
    for kind in (ConnectionLost, ProductionError):
        for error in errors:
            if isinstance(error, kind):
                return error
    return errors[0]


async def pause_generation(controller: Generation | None) -> None:
    """Have `controller` pause, if there is one.

    Raises:
        StallError: it does not answer.
    """
    if controller is not None:
        what = f"{type(controller).__name__} was asked to pause"
        await answered(controller.pause_generation(), what, CONTROLLER_LIMIT_S)


async def continue_generation(controller: Generation | None) -> None:
    """Have `controller` go on, if there is one.

    Raises:
        StallError: it does not answer.
    """
    if controller is not None:
        what = f"{type(controller).__name__} was asked to go on"
        await answered(controller.continue_generation(), what, CONTROLLER_LIMIT_S)
