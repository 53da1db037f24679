"""What a run asks of a generated group before it is stored.

::

    COMPLETED, but the trainer cannot take it --> FAILED, with the reason
    FAILED members, at least min_members others --> they leave; the rest goes on as the group
    FAILED members, fewer others                --> the group is FAILED: generated again, or replaced

Members are attempts: a rollout together with the further trajectories that were made with it. A production
context without rules stores groups as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from forebay.agents.base import split_attempts
from forebay.types import RolloutState, Status

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
    """Of fewer the trainer cannot compute the loss; at most `min_members`. A group that was stored before a
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
                state.reward = None
        attempts = split_attempts(group)
        failed = [attempt for attempt in attempts if _has_failed(attempt)]
        if not failed or len(attempts) - len(failed) < self.min_members:
            return []
        # In place: whoever holds the group (the agent, the strategy, displays) must see the same members.
        group[:] = chain.from_iterable(attempt for attempt in attempts if not _has_failed(attempt))
        return list(chain.from_iterable(failed))

    def accepts(self, group: Sequence[RolloutState]) -> bool:
        """Whether the trainer can take all of a COMPLETED group."""
        has_enough = len(split_attempts(group)) >= self.needed_members
        return has_enough and all(self.why_untrainable(state) is None for state in group)


def _has_failed(attempt: Sequence[RolloutState]) -> bool:
    return any(state.status is Status.FAILED for state in attempt)
