"""What one strategy needs to produce for one task, and the one way a generated group is stored.

::

    sample_group -> generate_group -> put_generated_group
                 |  stamps wall time   with rules: failed members leave (`forebay.produce.strategies.rules`)
                 |  checks members     count new tokens
                 |                     COMPLETED: count rewards, then the validity function
                 |                     (rejected: FILTERED, response wiped)
                 |                     buffer.put with model step, consumer step and threshold
                 '-> put_back          as it was taken, or without its response: ABORTED

A group counts as completed only if it still is after the put: the put may find it too stale.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from forebay.ledger import Ledger
from forebay.produce.progress import ProduceProgress
from forebay.produce.strategies.rules import GroupRules
from forebay.replay import ReplayBuffer
from forebay.tracebacks import raised_at
from forebay.types import (
    FAILED_AT_KEY,
    TOKEN_FIELDS,
    TRAJECTORY_OF_KEY,
    UNLABELED,
    RolloutState,
    Status,
    fill_token_fields,
    get_group_status,
    note_place,
    reset_rollout_response,
)
from forebay.watching.activity import PUT, Activities

logger = logging.getLogger(__name__)

GROUP_GENERATE_TIME_KEY = "group_generate_time_s"
"""Key in ``extra_fields``: seconds from the start of a group's generation to its last verdict."""

COUNTED_TOKENS_KEY = "counted_tokens"
"""Key in ``extra_fields`` of an interrupted rollout: how many of its tokens are in the statistics already."""


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


_ERROR_LENGTH = 200
"""Characters of an error message that the ledger's file keeps: the reason, not the traceback."""

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
    activities: Activities | None = None
    rules: GroupRules | None = None
    """What a run asks of its groups; None: they are stored as they are."""

    @property
    def consumer_step(self) -> int:
        """The train step that a group stored now is for."""
        return self.progress.next_consumer_step

    @property
    def target_abs(self) -> int:
        """Groups of this task that should be available, counted since the start."""
        return self._count_of("target_samples")

    @property
    def consumed(self) -> int:
        """Groups of this task that the consumer has taken."""
        return self._count_of("consumed_samples")

    def should_abort(self) -> bool:
        """Whether a pause was requested."""
        return self.update_event.is_set()

    async def expired_count(self) -> int:
        """EXPIRED groups of this task in the buffer."""
        return await self.replay_buffer.count(self.task_name, Status.EXPIRED)

    async def available_count(self) -> int:
        """Groups consumed so far plus COMPLETED ones in the buffer."""
        completed = await self.replay_buffer.count(self.task_name, Status.COMPLETED)
        return self.consumed + completed

    async def sample_group(self, *, from_expired_pool: bool) -> list[RolloutState]:
        """The next group to generate: an interrupted one first, else the next prompt of the dataset.

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
        lengths = [len(state.response_ids) for state in rollout_state]
        for state in rollout_state:
            note_place(state, None)
            goes_on = enable_partial_rollout or state.status is Status.COMPLETED
            if not (goes_on and len(state.response_ids)):
                # It starts over, perhaps because it had expired: whatever it will hold is new.
                state.extra_fields.pop(COUNTED_TOKENS_KEY, None)
        try:
            returned = await self.agent_loop.generate_group(
                rollout_state, enable_partial_rollout=enable_partial_rollout
            )
            group = _well_formed(returned, rollout_state, lengths)
        # Agent loops are user code; this is the one place where what they raise becomes a FAILED group.
        except Exception as error:
            logger.exception("task %s: group %s failed", self.task_name, rollout_state[0].group_id)
            group = rollout_state
            fail_group(group, f"{type(error).__name__}: {error}", raised_at(error))
        elapsed_s = clock() - started
        for state in group:
            state.extra_fields[GROUP_GENERATE_TIME_KEY] = elapsed_s
        return group

    async def put_generated_group(
        self, group: list[RolloutState], *, before_put: Callable[[list[RolloutState]], None] | None = None
    ) -> bool:
        """Count, filter and store a generated group; return whether it may be trained on.

        By the `rules` of a run, failed members leave the list `group`. `before_put` may change what is stored
        of a group that did not complete, or was rejected.
        """
        # What was generated counts whole, whoever leaves: groups must be comparable by their length.
        generated = list(group)
        if self.rules is not None:
            left = self.rules.release_failed(group)
            if self.ledger is not None and left:
                record_left(self.ledger, self.task_name, name_group(generated), left)
        is_completed = get_group_status(group) is Status.COMPLETED
        tokens = _count_new_tokens(generated, may_come_again=not is_completed)
        # Read before the validity function and the put, which wipe what they reject.
        score, latency_s = _mean_score(group), group[0].extra_fields.get(GROUP_GENERATE_TIME_KEY)
        length = sum(len(state.response_ids) for state in generated)
        if is_completed:
            self._count_rewards(group)
            is_completed = self._filter(group)
        if not is_completed and before_put is not None:
            before_put(group)
        # Before the put: once stored, another put may evict the group, and that is entered at once.
        if self.ledger is not None:
            self.ledger.record(
                name_group(group),
                self.task_name,
                "produced",
                num_tokens=length,
                latency_s=latency_s,
                score=score,
            )
        await self._put(group)
        self.progress.add_produced(self.task_name, samples=len(generated), tokens=tokens)
        if self.on_group is not None:
            self.on_group(self.task_name, group)
        # A put that finds it too stale expires every member.
        return is_completed and group[0].status is Status.COMPLETED

    def _count_of(self, table: Literal["target_samples", "consumed_samples"]) -> int:
        counts: dict[str, int] = getattr(self.progress, table)
        if self.task_name not in counts:
            raise KeyError(f"{table} has no task {self.task_name!r}, only {sorted(counts)}")
        return counts[self.task_name]

    async def _put(self, group: list[RolloutState]) -> None:
        stored = self.replay_buffer.put(
            group,
            self.task_name,
            model_step=self.model_step,
            current_train_step=self.consumer_step,
            stale_threshold=self.stale_threshold,
        )
        if self.activities is None:
            await stored
        else:
            with self.activities.span(PUT, group[0].group_id, task=self.task_name, group=group[0].group_id):
                await stored

    async def put_back(self, group: list[RolloutState], *, wipe: bool = False) -> None:
        """Store a group that was taken but not generated, ABORTED; with `wipe`, only its prompt."""
        for state in group:
            if wipe:
                reset_rollout_response(state)
                state.extra_fields.pop(COUNTED_TOKENS_KEY, None)
            if wipe or state.status is Status.INIT:
                state.status = Status.ABORTED
        await self.replay_buffer.put(group, self.task_name)

    def _filter(self, group: list[RolloutState]) -> bool:
        """Whether the validity function accepts the group."""
        try:
            valid = self.is_valid_sample_fn(group)
        # User code, as an agent loop is.
        except Exception as error:
            name = getattr(self.is_valid_sample_fn, "__name__", repr(self.is_valid_sample_fn))
            logger.exception("task %s: validity function %s failed", self.task_name, name)
            reason = f"validity function {name}: {type(error).__name__}: {error}"
            fail_group(group, reason, raised_at(error))
            return False
        if not valid:
            for state in group:
                reset_rollout_response(state)
                state.status = Status.FILTERED
        return bool(valid)

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


def record_left(ledger: Ledger, task_name: str, group_id: str | int, left: Sequence[RolloutState]) -> None:
    """Enter the rollouts that left their group because they failed."""
    for state in left:
        ledger.record(
            group_id,
            task_name,
            "left",
            reason=Status.FAILED.value,
            rollout=state.rollout_id,
            **why_failed([state]),
        )


def why_failed(group: Sequence[RolloutState]) -> dict[str, Any]:
    """The first error in `group` and where it was raised, as details of an entry in the ledger."""
    state = next((state for state in group if state.error_msg), group[0])
    return {
        "error": state.error_msg and state.error_msg[:_ERROR_LENGTH],
        "at": state.extra_fields.get(FAILED_AT_KEY),
    }


def fail_group(group: Sequence[RolloutState], reason: str, place: str | None = None) -> None:
    """Make the group FAILED, by what raised at `place`; members that failed before keep their own reason."""
    for state in group:
        if not state.error_msg:
            note_place(state, place)
        reason_of_its_own = state.error_msg
        reset_rollout_response(state)
        state.status = Status.FAILED
        state.error_msg = reason_of_its_own or reason


def _well_formed(
    group: list[RolloutState], given: Sequence[RolloutState], lengths: Sequence[int]
) -> list[RolloutState]:
    """`group`, if it can be stored; `given` is what the agent loop got, with responses of these `lengths`.

    Raises:
        TypeError: an agent loop returned something else than a list of rollouts.
        ValueError: other rollouts than the given ones, or token-level fields of different lengths.
    """
    if not isinstance(group, list) or not group or not all(isinstance(s, RolloutState) for s in group):
        raise TypeError(f"the agent loop must return a non-empty list of RolloutState, got {group!r:.80}")
    # Further trajectories come and go with the rollouts that they were made with, which must be the given.
    firsts = [state for state in group if TRAJECTORY_OF_KEY not in state.extra_fields]
    earlier = [
        (state, length)
        for state, length in zip(given, lengths, strict=True)
        if TRAJECTORY_OF_KEY not in state.extra_fields
    ]
    if group is not given:
        _check_members(firsts, [state for state, _ in earlier])
    for state, (_, length) in zip(firsts, earlier, strict=True):
        if 0 < length < len(state.response_ids):
            _extend_token_fields(state, length)
    for state in group:
        fill_token_fields(state)
    return group


def _check_members(group: Sequence[RolloutState], given: Sequence[RolloutState]) -> None:
    if len(group) != len(given):
        raise ValueError(f"the agent loop returned {len(group)} rollouts for a group of {len(given)}")
    for state, original in zip(group, given, strict=True):
        if state is not original and (state.rollout_id, state.group_id) != (
            original.rollout_id,
            original.group_id,
        ):
            raise ValueError(
                f"the agent loop returned rollout {state.rollout_id!r} of group {state.group_id!r} in place "
                f"of {original.rollout_id!r} of {original.group_id!r}; return the given ones, in their order"
            )


def _extend_token_fields(state: RolloutState, length: int) -> None:
    """Where a continuation extended ``response_ids`` only, fill the other fields as for a new response."""
    defaults = {"logprobs": np.nan, "response_mask": 1, "response_model_steps": UNLABELED}
    for name in TOKEN_FIELDS:
        array = getattr(state, name)
        if name in defaults and len(array) == length:
            rest = np.full(len(state.response_ids) - length, defaults[name], array.dtype)
            setattr(state, name, np.concatenate([array, rest]))


def _count_new_tokens(group: Sequence[RolloutState], *, may_come_again: bool) -> int:
    """The response tokens that no earlier put has counted."""
    total = 0
    for state in group:
        length, counted = len(state.response_ids), state.extra_fields.pop(COUNTED_TOKENS_KEY, 0)
        # Shorter than before: the agent loop started over where it could have continued.
        total += length - counted if counted <= length else length
        if may_come_again and length:
            state.extra_fields[COUNTED_TOKENS_KEY] = length
    return total


def _mean_score(group: Sequence[RolloutState]) -> float | None:
    scores = [float(state.reward["score"]) for state in group if state.reward and "score" in state.reward]
    return sum(scores) / len(scores) if scores else None
