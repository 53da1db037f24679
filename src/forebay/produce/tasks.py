"""A task of a run, and how a batch is shared among tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Protocol

from forebay.produce.context import GroupGenerator, GroupSampler
from forebay.produce.strategies import ProduceStrategy
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
