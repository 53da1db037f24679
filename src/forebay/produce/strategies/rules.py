"""The form that a generated group must have before it is stored, and the fate of failed members.

::

    COMPLETED, but the trainer cannot take it   --> FAILED, with the reason
    FAILED members, at least min_members others --> they leave; the rest goes on as the group
    FAILED members, fewer others                --> the group is FAILED: generated again, or replaced

Members are attempts: a rollout together with the further trajectories that were made with it. A production
context without `GroupRules` stores groups as they are, as long as they are well formed.
"""

import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from forebay.agents.base import split_attempts
from forebay.ledger import Ledger
from forebay.replay.arrival import GROUP_TAG as GROUP_TAG
from forebay.replay.stores.contract import TagValue
from forebay.tracebacks import raised_at
from forebay.types import (
    FAILED_AT_KEY,
    FIELDS,
    TRAJECTORY_OF_KEY,
    RolloutState,
    Status,
    fill_token_fields,
    note_place,
    reset_rollout_response,
)

logger = logging.getLogger(__name__)

WhyUntrainable = Callable[[RolloutState], str | None]
"""Why the trainer cannot take a COMPLETED rollout; None if it can."""


@dataclass(frozen=True, kw_only=True)
class GroupRules:
    """The rules of one run.

    >>> rules = GroupRules(why_untrainable=lambda state: None if state.reward else "no score")
    >>> group = [RolloutState([], rollout_id=i, status=Status.COMPLETED, reward=reward)
    ...          for i, reward in enumerate([{"score": 1.0}, None, {"score": 0.0}])]
    >>> [state.error_msg for state in rules.release_failed(group)], [state.rollout_id for state in group]
    (['rollout 1 cannot be trained: no score'], [0, 2])
    """

    why_untrainable: WhyUntrainable
    min_members: int = 2
    """A group goes on without its failed members if at least so many remain."""
    needed_members: int = 1
    """The trainer cannot compute the loss of fewer; at most `min_members`. A group that was stored before a
    resume, under other rules, may have fewer."""
    max_failed_groups: int | None = None
    """Groups of one task that may fail while a batch is made; None: twice the batch, and at least 8."""

    def release_failed(self, group: list[RolloutState]) -> list[RolloutState]:
        """Make FAILED what cannot be trained, then take the failed members out of `group`; return those.

        Returns nothing, and `group` keeps all of them, where too few others would remain.
        """
        for state in group:
            if state.status is Status.COMPLETED and (reason := self.why_untrainable(state)) is not None:
                state.status = Status.FAILED
                state.error_msg = f"rollout {state.rollout_id} cannot be trained: {reason}"
                # Its score, NaN perhaps, must not get into the means.
                state.reward = None
        attempts = split_attempts(group)
        failed: list[Sequence[RolloutState]] = []
        good: list[Sequence[RolloutState]] = []
        for attempt in attempts:
            (failed if any(state.status is Status.FAILED for state in attempt) else good).append(attempt)
        if not failed or len(good) < self.min_members:
            return []
        # In place: the agent, the strategy and displays hold this list and must see the same members.
        group[:] = chain.from_iterable(good)
        return list(chain.from_iterable(failed))

    def accepts(self, group: Sequence[RolloutState]) -> bool:
        """Whether the trainer can take all of a COMPLETED group."""
        has_enough = len(split_attempts(group)) >= self.needed_members
        return has_enough and all(self.why_untrainable(state) is None for state in group)


_ERROR_LENGTH = 200
"""Characters of an error message that the ledger's file keeps: the reason, not the traceback."""


def name_group(group: Sequence[RolloutState]) -> str | int:
    """The group's id; a group without one gets one, so that the ledger can follow it."""
    group_id = group[0].group_id
    if group_id is None:
        group_id = f"unnamed/{uuid.uuid4()}"
        for state in group:
            state.group_id = group_id
    return group_id


def book_tags(group: Sequence[RolloutState], **facts: float | None) -> dict[str, TagValue]:
    """The entry of a group in the books, as tags of its row, so the row alone tells what the entry says.

    `facts` are those of the event ``produced``; those that are not known are left out.
    """
    # A store refuses tags that are not finite.
    known = {name: value for name, value in facts.items() if value is not None and math.isfinite(value)}
    return {GROUP_TAG: name_group(group), **known}


def fail_group(group: Sequence[RolloutState], reason: str, place: str | None = None) -> None:
    """Make the group FAILED, by what raised at `place`; members that failed before keep their own reason."""
    for state in group:
        if not state.error_msg:
            note_place(state, place)
        # Read before the reset, which wipes it.
        own_reason = state.error_msg
        reset_rollout_response(state)
        state.status = Status.FAILED
        state.error_msg = own_reason or reason


def record_left(ledger: Ledger, task_name: str, group_id: str | int, left: Sequence[RolloutState]) -> None:
    """Enter the rollouts that left their group because they failed."""
    for state in left:
        details = {"reason": Status.FAILED.value, "rollout": state.rollout_id, **why_failed([state])}
        ledger.record(group_id, task_name, "left", **details)


def why_failed(group: Sequence[RolloutState]) -> dict[str, Any]:
    """The first error in `group` and where it was raised, as details of an entry in the ledger."""
    state = next((state for state in group if state.error_msg), group[0])
    error = state.error_msg and state.error_msg[:_ERROR_LENGTH]
    return {"error": error, "at": state.extra_fields.get(FAILED_AT_KEY)}


async def generated(
    generate: Callable[..., Awaitable[object]], given: list[RolloutState], task_name: str, **how: Any
) -> list[RolloutState]:
    """The group that `generate` of an agent loop makes of `given`; `given` as a FAILED one, if it raises."""
    lengths = [len(state.response_ids) for state in given]
    try:
        return check_form(await generate(given, **how), given, lengths)
    # Agent loops are user code; this is the one place where what they raise becomes a FAILED group.
    except Exception as error:
        logger.exception("task %s: group %s failed", task_name, given[0].group_id)
        fail_group(given, f"{type(error).__name__}: {error}", raised_at(error))
        return given


def check_form(returned: object, given: Sequence[RolloutState], lengths: Sequence[int]) -> list[RolloutState]:
    """The group that an agent loop `returned`, its token fields filled.

    `given` is the group that the loop got, with responses of these `lengths`.

    Raises:
        TypeError: it is not a list of rollouts.
        ValueError: other rollouts than the given ones, one without a status, or token-level fields of different
            lengths.
    """
    if not isinstance(returned, list) or not all(isinstance(state, RolloutState) for state in returned):
        raise TypeError(f"the agent loop must return a list of RolloutState, got {returned!r:.80}")
    # Further trajectories may come and go; the rollouts that they were made with must be the given ones.
    firsts = [state for state in returned if TRAJECTORY_OF_KEY not in state.extra_fields]
    earlier = [
        (state, length)
        for state, length in zip(given, lengths, strict=True)
        if TRAJECTORY_OF_KEY not in state.extra_fields
    ]
    if len(firsts) != len(earlier):
        raise ValueError(f"the agent loop returned {len(firsts)} rollouts for a group of {len(earlier)}")
    for state, (original, length) in zip(firsts, earlier, strict=True):
        ids, expected = (state.rollout_id, state.group_id), (original.rollout_id, original.group_id)
        if ids != expected:
            raise ValueError(
                f"the agent loop returned rollout {ids[0]!r} of group {ids[1]!r} in place of {expected[0]!r} "
                f"of {expected[1]!r}; return the given ones, in their order"
            )
        if 0 < length < len(state.response_ids):
            _extend_token_fields(state, length)
    for state in returned:
        if state.status is Status.INIT:
            raise ValueError(f"the agent loop left rollout {state.rollout_id!r} without a status: set how it ended")
        fill_token_fields(state)
    return returned


def _extend_token_fields(state: RolloutState, length: int) -> None:
    """Where a continuation extended ``response_ids`` only, fill the other fields as for a new response."""
    for name, rule in FIELDS.items():
        if rule.fill is not None and len(array := getattr(state, name)) == length:
            rest = np.full(len(state.response_ids) - length, rule.fill, array.dtype)
            setattr(state, name, np.concatenate([array, rest]))
