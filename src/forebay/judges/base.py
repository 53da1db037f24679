"""The contract of a judger, and the one place where a judge's failure becomes a FAILED rollout.

::

    judge(state | group) -> score(state) --> reward = {"score": ..., ...}, status kept
                                | raises, or takes longer than timeout_s
                                v
                            status FAILED, error_msg says which rollout, judger and why; reward stays None

A failure is never a zero reward: a rollout without a verdict must not be trained on.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

from forebay.types import RolloutState, Status

Target = TypeVar("Target", RolloutState, list[RolloutState])

DEFAULT_TIMEOUT_S = 30.0
"""Long enough for any rule-based judge on a busy machine, short enough to notice one that hangs."""


class Judger(ABC):
    """Gives rollouts their reward. Subclasses write `score`; everything else is here.

    >>> class Length(Judger):
    ...     async def score(self, state):
    ...         return float(len(state.response_ids))
    """

    def __init__(self, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> None:
        if timeout_s is not None and timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive or None, got {timeout_s}")
        self.timeout_s = timeout_s

    @property
    def name(self) -> str:
        """What error messages call this judger."""
        return type(self).__name__

    @abstractmethod
    async def score(self, state: RolloutState) -> float | Mapping[str, Any]:
        """The score of one completed rollout, or a mapping with ``score`` and whatever should be logged."""

    async def judge(self, target: Target) -> Target:
        """Judge one COMPLETED rollout or all COMPLETED rollouts of a group, in place, and return it.

        Rollouts of any other status are left as they are.
        """
        states = [target] if isinstance(target, RolloutState) else target
        await asyncio.gather(
            *(self._judge_one(state) for state in states if state.status is Status.COMPLETED)
        )
        return target

    async def _judge_one(self, state: RolloutState) -> None:
        limit = asyncio.timeout(self.timeout_s)
        try:
            async with limit:
                verdict = await self.score(state)
            state.reward = _checked_reward(verdict)
        # Judges are user code: whatever they raise fails this rollout, and only this one.
        except Exception as error:
            state.reward = None
            state.status = Status.FAILED
            reason = (
                f"no verdict within {self.timeout_s} s"
                if limit.expired()
                else f"{type(error).__name__}: {error}"
            )
            state.error_msg = f"rollout {state.rollout_id}: judger {self.name}: {reason}"


def _checked_reward(verdict: float | Mapping[str, Any]) -> dict[str, Any]:
    reward = dict(verdict) if isinstance(verdict, Mapping) else {"score": verdict}
    if "score" not in reward:
        raise ValueError(f"the verdict has no 'score', only {sorted(reward)}")
    score = float(reward["score"])
    if not math.isfinite(score):
        raise ValueError(f"the score is {score}; it must be finite")
    reward["score"] = score
    return reward
