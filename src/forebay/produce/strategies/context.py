"""Everything that a strategy needs to produce for one task, and the one way a generated group is stored.

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

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from forebay.ledger import Ledger
from forebay.produce.progress import ProduceProgress
from forebay.produce.sampler import Sampler
from forebay.produce.strategies.rules import GroupRules, book_tags, fail_group, generated, name_group, record_left
from forebay.replay import ReplayBuffer
from forebay.tracebacks import raised_at
from forebay.types import RolloutState, Status, get_group_status, note_place, reset_rollout_response, scores_of
from forebay.watching.activity import PUT, Activities

logger = logging.getLogger(__name__)

Group = list[RolloutState]

IsValidSampleFn = Callable[[Group], bool]
"""Says whether a completed group may be trained on; False makes it FILTERED."""

GroupCallback = Callable[[str, Sequence[RolloutState]], None]
"""Told of every stored group: task name and group; for displays, never for decisions."""


def default_is_valid_sample_fn(samples: Group) -> bool:
    """Every completed group is valid."""
    return True


@dataclass
class ProduceContext:
    """Everything a production strategy may touch for one task during one call."""

    agent_loop: "GroupGenerator"
    sampler: Sampler
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
    ledger: Ledger = field(default_factory=Ledger)
    on_group: GroupCallback = lambda *_: None
    activities: Activities = field(default_factory=Activities)
    rules: GroupRules | None = None
    """The demands of a run on its groups; None: they are stored as they are."""
    num_past: int = 0
    """Groups of the next batch that earlier steps trained on: no new ones are made for them."""

    @property
    def consumer_step(self) -> int:
        """The train step that a group stored now is for."""
        return self.progress.next_consumer_step

    @property
    def target_abs(self) -> int:
        """Groups of this task that should be available, counted since the start.

        Raises:
            KeyError: the progress does not know the task.
        """
        return self.progress.target_samples[self.task_name] - self.num_past

    def should_abort(self) -> bool:
        """Whether a pause was requested."""
        return self.update_event.is_set()

    async def expired_count(self) -> int:
        """EXPIRED groups of this task in the buffer."""
        return await self.replay_buffer.count(self.task_name, Status.EXPIRED)

    async def available_count(self) -> int:
        """Groups consumed so far plus COMPLETED ones in the buffer."""
        completed = await self.replay_buffer.count(self.task_name, Status.COMPLETED)
        # Read after the count: a batch that is taken meanwhile moves from one number to the other.
        return self.progress.consumed_samples[self.task_name] + completed

    async def sample_group(self, *, from_expired_pool: bool) -> Group:
        """The next group to generate: an interrupted one first, else the next prompt of the dataset.

        `from_expired_pool` puts EXPIRED and MAX_TRIES groups (the tail batch) before everything else.
        """
        # An interrupted group comes before new prompts: it holds tokens, and its age grows.
        tail = [Status.EXPIRED, Status.MAX_TRIES] if from_expired_pool else []
        group = await self.sampler.sample(self.task_name, group_status=[*tail, Status.ABORTED])
        group_id = name_group(group)
        is_known = self.ledger.life(group_id, self.task_name) is not None
        self.ledger.record(group_id, self.task_name, "retried" if is_known else "admitted")
        return group

    async def generate_group(self, rollout_state: Group, *, enable_partial_rollout: bool = False) -> Group:
        """Generate and judge a group; any exception of the agent loop makes it FAILED with the reason."""
        clock = asyncio.get_running_loop().time
        started = clock()
        for state in rollout_state:
            note_place(state, None)
            goes_on = enable_partial_rollout or state.status is Status.COMPLETED
            if not (goes_on and len(state.response_ids)):
                # It starts over, perhaps because it had expired: all its tokens will be new.
                state.extra_fields.pop(COUNTED_TOKENS_KEY, None)
        group = await generated(
            self.agent_loop.generate_group,
            rollout_state,
            self.task_name,
            enable_partial_rollout=enable_partial_rollout,
        )
        elapsed_s = clock() - started
        for state in group:
            state.extra_fields[GROUP_GENERATE_TIME_KEY] = elapsed_s
        return group

    async def put_generated_group(self, group: Group, *, before_put: Callable[[Group], None] | None = None) -> bool:
        """Count, filter and store a generated group; return whether it may be trained on.

        By the `rules` of a run, failed members leave the list `group`. `before_put` may change what is stored
        of a group that did not complete, or was rejected.
        """
        # Members that leave count too: groups must be comparable by their length.
        generated = list(group)
        if self.rules is not None:
            left = self.rules.release_failed(group)
            record_left(self.ledger, self.task_name, name_group(generated), left)
        is_completed = get_group_status(group) is Status.COMPLETED
        tokens = _count_new_tokens(generated, may_come_again=not is_completed)
        # Read before the validity function and the put, which wipe what they reject.
        scores = scores_of(group)
        entry: dict[str, Any] = {
            "num_tokens": sum(len(state.response_ids) for state in generated),
            "latency_s": group[0].extra_fields.get(GROUP_GENERATE_TIME_KEY),
            "score": sum(scores) / len(scores) if scores else None,
        }
        if is_completed:
            for state in group:
                if not scores_of([state]):
                    logger.warning(
                        "task %s: rollout %s is completed but has no score; it is left out of the statistics",
                        self.task_name,
                        state.rollout_id,
                    )
            self.progress.add_raw_rewards(self.task_name, sum(scores), len(scores))
            is_completed = self._filter(group)
        if not is_completed and before_put is not None:
            before_put(group)
        # Before the put: once stored, another put may evict the group, and that is entered at once.
        self.ledger.record(name_group(group), self.task_name, "produced", **entry)
        with self.activities.span(PUT, group[0].group_id, task=self.task_name, group=group[0].group_id):
            await self.replay_buffer.put(
                group,
                self.task_name,
                model_step=self.model_step,
                current_train_step=self.consumer_step,
                stale_threshold=self.stale_threshold,
                tags=book_tags(group, **entry),
            )
        self.progress.add_produced(self.task_name, samples=len(generated), tokens=tokens)
        self.on_group(self.task_name, group)
        # A put that finds it too stale expires every member.
        return is_completed and group[0].status is Status.COMPLETED

    async def put_back(self, group: Group, *, wipe: bool = False) -> None:
        """Store a group that was taken but not generated, ABORTED; with `wipe`, only its prompt."""
        for state in group:
            if wipe:
                reset_rollout_response(state)
                state.extra_fields.pop(COUNTED_TOKENS_KEY, None)
            if wipe or state.status is Status.INIT:
                state.status = Status.ABORTED
        await self.replay_buffer.put(group, self.task_name, tags=book_tags(group))

    def _filter(self, group: Group) -> bool:
        """Whether the validity function accepts the group."""
        try:
            is_valid = self.is_valid_sample_fn(group)
            if is_valid is None:
                raise TypeError("it returned None; return True or False")
        # User code, as an agent loop is.
        except Exception as error:
            name = getattr(self.is_valid_sample_fn, "__name__", repr(self.is_valid_sample_fn))
            logger.exception("task %s: validity function %s failed", self.task_name, name)
            reason = f"validity function {name}: {type(error).__name__}: {error}"
            fail_group(group, reason, raised_at(error))
            return False
        if not is_valid:
            for state in group:
                reset_rollout_response(state)
                state.status = Status.FILTERED
        return bool(is_valid)


GROUP_GENERATE_TIME_KEY = "group_generate_time_s"
"""Key in ``extra_fields``: seconds from the start of a group's generation to its last verdict."""

COUNTED_TOKENS_KEY = "counted_tokens"
"""Key in ``extra_fields`` of an interrupted rollout: how many of its tokens are in the statistics already."""


class GroupGenerator(Protocol):
    """The part of an agent loop that a context calls."""

    async def generate_group(self, states: Group, *, enable_partial_rollout: bool = False) -> Group:
        """Generate and judge one group."""

    async def pause(self) -> None:
        """End what is running as ABORTED."""


class Generation(Protocol):
    """The part of a rollout controller that production calls."""

    async def pause_generation(self) -> None:
        """End what is running as aborted."""

    async def continue_generation(self) -> None:
        """Take requests again."""


def has_reward_variance(samples: Group) -> bool:
    """Whether the group's scores differ: equal scores give zero advantage (DAPO's dynamic sampling).

    Yu et al. 2025, "DAPO", section 3.2.
    """
    scores = scores_of(samples)
    return bool(np.ptp(scores) > 0) if scores else False


ShouldContinueFn = Callable[[int, int], bool]
"""Says whether production should go on, given the completed groups and the number that is wanted."""


def default_should_continue_fn(completed_count: int, batch_size: int, **kwargs: Any) -> bool:
    """Go on until the batch is complete."""
    return completed_count < batch_size


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
