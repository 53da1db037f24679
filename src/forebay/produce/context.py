"""What one strategy needs to produce for one task, and the one way a generated group is stored.

::

    sample_group -> generate_group -> put_generated_group
                    stamps wall time   COMPLETED: count rewards, then the validity function
                                       (rejected: FILTERED, response wiped)
                                       buffer.put with model step, consumer step and threshold

A group counts as completed only if it still is after the put: the put may find it too stale.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from forebay.ledger import Ledger
from forebay.produce.progress import ProduceProgress
from forebay.replay import ReplayBuffer
from forebay.types import (
    RolloutState,
    Status,
    fill_token_fields,
    get_group_status,
    reset_rollout_response,
)

logger = logging.getLogger(__name__)

GROUP_GENERATE_TIME_KEY = "group_generate_time_s"
"""Key in ``extra_fields``: seconds from the start of a group's generation to its last verdict."""


@runtime_checkable
class IsValidSampleFn(Protocol):
    """Says whether a completed group may be trained on."""

    def __call__(self, samples: list[RolloutState]) -> bool:
        """False makes the group FILTERED."""
        ...


@runtime_checkable
class ShouldContinueFn(Protocol):
    """Says whether production should go on."""

    def __call__(self, completed_count: int, batch_size: int, **kwargs: Any) -> bool:
        """False ends the call to `produce_batch`."""
        ...


class GroupGenerator(Protocol):
    """What a context needs of an agent loop."""

    async def generate_group(
        self, states: list[RolloutState], *, enable_partial_rollout: bool = False
    ) -> list[RolloutState]:
        """Generate and judge one group."""
        ...

    async def pause(self) -> None:
        """End what is running as ABORTED."""
        ...


class GroupSampler(Protocol):
    """What a context needs of a sampler."""

    async def sample(
        self, task_name: str, group_status: Status | list[Status] | None = None
    ) -> list[RolloutState]:
        """A group of the listed statuses from the buffer, else the next prompt."""
        ...


def default_is_valid_sample_fn(samples: list[RolloutState]) -> bool:
    """Every completed group is valid."""
    return True


def has_reward_variance(samples: list[RolloutState]) -> bool:
    """Whether the group's scores differ: equal scores give zero advantage (DAPO's dynamic sampling).

    Yu et al. 2025, "DAPO", section 3.2.
    """
    scores = [float(state.reward["score"]) for state in samples if state.reward is not None]
    return bool(np.ptp(scores) > 0) if scores else False


def default_should_continue_fn(completed_count: int, batch_size: int, **kwargs: Any) -> bool:
    """Go on until the batch is complete."""
    return completed_count < batch_size


def name_group(group: Sequence[RolloutState]) -> str | int:
    """The group's id; a group that has none gets one, so that it can be accounted for."""
    group_id = group[0].group_id
    if group_id is None:
        group_id = f"unnamed/{uuid.uuid4()}"
        for state in group:
            state.group_id = group_id
    return group_id


GroupCallback = Callable[[str, Sequence[RolloutState]], None]
"""Told of every stored group: task name and group; for displays, never for decisions."""


@dataclass
class ProduceContext:
    """Everything a production strategy may touch for one task during one call."""

    agent_loop: GroupGenerator
    sampler: GroupSampler
    replay_buffer: ReplayBuffer
    task_batch_size: int
    task_name: str
    train_step: int
    update_event: asyncio.Event
    """Set when the manager wants production to pause."""
    model_step: int
    progress: ProduceProgress
    is_valid_sample_fn: IsValidSampleFn = default_is_valid_sample_fn
    stale_threshold: int | None = None
    ledger: Ledger | None = None
    on_group: GroupCallback | None = None

    @property
    def consumer_step(self) -> int:
        """The train step that a group stored now is for."""
        return self.progress.next_consumer_step

    @property
    def target_abs(self) -> int:
        """Groups of this task that should be available, counted since the start."""
        return self.progress.target_samples[self.task_name]

    def should_abort(self) -> bool:
        """Whether a pause was requested."""
        return self.update_event.is_set()

    async def expired_count(self) -> int:
        """EXPIRED groups of this task in the buffer."""
        return await self.replay_buffer.count(self.task_name, Status.EXPIRED)

    async def available_count(self) -> int:
        """Groups consumed so far plus COMPLETED ones in the buffer."""
        completed = await self.replay_buffer.count(self.task_name, Status.COMPLETED)
        return self.progress.consumed_samples[self.task_name] + completed

    async def sample_group(self, *, from_expired_pool: bool) -> list[RolloutState]:
        """The next group to generate: an interrupted one first, else the next prompt of the data set.

        `from_expired_pool` puts EXPIRED and MAX_TRIES groups (the tail batch) before everything else.
        """
        statuses = [Status.ABORTED]
        if from_expired_pool:
            statuses = [Status.EXPIRED, Status.MAX_TRIES, Status.ABORTED]
        group = await self.sampler.sample(self.task_name, group_status=statuses)
        if self.ledger is not None:
            group_id = name_group(group)
            known = self.ledger.life(group_id, self.task_name) is not None
            self.ledger.record(group_id, self.task_name, "retried" if known else "admitted")
        return group

    async def generate_group(
        self, rollout_state: list[RolloutState], *, enable_partial_rollout: bool = False
    ) -> list[RolloutState]:
        """Generate and judge a group; whatever the agent loop raises makes it FAILED with the reason."""
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            group = _well_formed(
                await self.agent_loop.generate_group(
                    rollout_state, enable_partial_rollout=enable_partial_rollout
                )
            )
        # Agent loops are user code; this is the one place where what they raise becomes a FAILED group.
        except Exception as error:
            logger.exception("task %s: group %s failed", self.task_name, rollout_state[0].group_id)
            group = rollout_state
            fail_group(group, f"{type(error).__name__}: {error}")
        for state in group:
            state.extra_fields[GROUP_GENERATE_TIME_KEY] = clock() - started
        return group

    async def put_generated_group(self, group: list[RolloutState]) -> bool:
        """Count, filter and store a generated group; return whether it may be trained on."""
        tokens = sum(len(state.response_ids) for state in group)
        # Read before the validity function and the put, which wipe what they reject.
        score, latency_s = _mean_score(group), group[0].extra_fields.get(GROUP_GENERATE_TIME_KEY)
        if get_group_status(group) is Status.COMPLETED:
            self._count_rewards(group)
            self._filter(group)
        # Before the put: once stored, another put may evict the group, and that is entered at once.
        if self.ledger is not None:
            self.ledger.record(
                name_group(group),
                self.task_name,
                "produced",
                num_tokens=tokens,
                latency_s=latency_s,
                score=score,
            )
        await self.replay_buffer.put(
            group,
            self.task_name,
            model_step=self.model_step,
            current_train_step=self.consumer_step,
            stale_threshold=self.stale_threshold,
        )
        self.progress.add_produced(self.task_name, samples=len(group), tokens=tokens)
        if self.on_group is not None:
            self.on_group(self.task_name, group)
        return get_group_status(group) is Status.COMPLETED

    def _filter(self, group: list[RolloutState]) -> None:
        try:
            valid = self.is_valid_sample_fn(group)
        # User code, as an agent loop is.
        except Exception as error:
            name = getattr(self.is_valid_sample_fn, "__name__", repr(self.is_valid_sample_fn))
            logger.exception("task %s: validity function %s failed", self.task_name, name)
            fail_group(group, f"validity function {name}: {type(error).__name__}: {error}")
            return
        if not valid:
            for state in group:
                reset_rollout_response(state)
                state.status = Status.FILTERED

    def _count_rewards(self, group: list[RolloutState]) -> None:
        scores = []
        for state in group:
            if state.reward is None or "score" not in state.reward:
                logger.warning(
                    "task %s: rollout %s is completed but has no score; it is left out of the statistics",
                    self.task_name,
                    state.rollout_id,
                )
                continue
            scores.append(float(state.reward["score"]))
        self.progress.add_raw_rewards(self.task_name, sum(scores), len(scores))


def fail_group(group: Sequence[RolloutState], reason: str) -> None:
    """Make the group FAILED; members that failed by themselves keep their own reason."""
    for state in group:
        reason_of_its_own = state.error_msg
        reset_rollout_response(state)
        state.status = Status.FAILED
        state.error_msg = reason_of_its_own or reason


def _well_formed(group: list[RolloutState]) -> list[RolloutState]:
    """`group`, if it can be stored.

    Raises:
        TypeError: an agent loop returned something else than a list of rollouts.
        ValueError: token-level fields of different lengths.
    """
    if not isinstance(group, list) or not group or not all(isinstance(s, RolloutState) for s in group):
        raise TypeError(f"the agent loop must return a non-empty list of RolloutState, got {group!r:.80}")
    for state in group:
        fill_token_fields(state)
    return group


def _mean_score(group: Sequence[RolloutState]) -> float | None:
    scores = [float(state.reward["score"]) for state in group if state.reward and "score" in state.reward]
    return sum(scores) / len(scores) if scores else None
