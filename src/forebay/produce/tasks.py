"""A task of a run, and how a batch is shared among tasks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral
from pathlib import Path
from typing import Protocol

from forebay.produce.strategies.base import ProduceStrategy
from forebay.produce.strategies.context import GroupGenerator, GroupSampler
from forebay.types import RolloutState

_NUM_NAMED = 8
"""Group ids that an error message names; the count says how many more there are."""


class CheckpointedSampler(GroupSampler, Protocol):
    """A sampler whose position can be saved."""

    def save(self, path: Path, /) -> None:
        """Write position, epoch and seed to `path`."""
        ...

    def resume(self, path: Path, /) -> None:
        """Go to the position in `path`."""
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


def check_split(sizes: object, task_names: Collection[str], batch_size: int) -> dict[str, int]:
    """`sizes`, the groups of each task in a batch, in the order of `task_names`.

    `AgentLoopManager.get_task_batch_sizes` may be overridden, and what it gives decides what is taken.

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


def check_batch_size(batch_size: int) -> None:
    """Raise unless a batch has at least one group.

    Raises:
        ValueError: it has none.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1 group, got {batch_size}")


def count_pending(runner: TaskRunner) -> int:
    """The groups that the task's strategy has in flight."""
    count = getattr(runner.produce_strategy, "pending_task_count", None)
    return count() if count is not None else 0


def in_flight(runner: TaskRunner) -> list[list[RolloutState]]:
    """Those of them that have their prompt already."""
    groups = getattr(runner.produce_strategy, "pending_groups", None)
    return groups() if groups is not None else []


def name_pending(runner: TaskRunner) -> str:
    """How many groups are in flight, and which, for people."""
    groups = in_flight(runner)
    named = ", ".join(str(group[0].group_id) for group in groups[:_NUM_NAMED])
    return f"{count_pending(runner)} ({named}{', ...' if len(groups) > _NUM_NAMED else ''})"
