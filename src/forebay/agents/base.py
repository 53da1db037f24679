"""The contract of an agent loop: from a prompt to a judged rollout.

::

    generate_group(states) -> generate_sample(state), all k at once -> judge the group -> states

Token-in, token-out: the model sees and makes token ids; text is decoded for judges and people, and what the
model wrote is never tokenised again. One raising rollout becomes FAILED and leaves its siblings alone.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Protocol

from forebay.types import RolloutState, Status, reset_rollout_response

logger = logging.getLogger(__name__)


class Generator(Protocol):
    """What an agent loop needs of a rollout controller."""

    async def generate_sample(self, state: RolloutState) -> RolloutState:
        """Continue ``state.tokens`` within the remaining budget, in place."""
        ...

    async def pause_generation(self) -> None:
        """End what is running as aborted."""
        ...


class GroupJudger(Protocol):
    """What an agent loop needs of a judger."""

    async def judge(self, target: list[RolloutState]) -> list[RolloutState]:
        """Set ``reward`` on every COMPLETED rollout."""
        ...


class AgentLoop(ABC):
    """Turns prompts into judged rollouts. Subclasses write `generate_sample`."""

    def __init__(self, rollout_controller: Generator, judger: GroupJudger | None = None) -> None:
        self.rollout_controller = rollout_controller
        self.judger = judger

    @abstractmethod
    async def generate_sample(self, state: RolloutState) -> RolloutState:
        """Produce one rollout in place, unjudged; its status says how it ended."""

    async def generate_group(
        self, states: list[RolloutState], *, enable_partial_rollout: bool = False
    ) -> list[RolloutState]:
        """Produce and judge the k rollouts of one prompt, and return them in the given order.

        A rollout that is COMPLETED already (its siblings were aborted) is kept. An ABORTED one continues
        from its tokens if `enable_partial_rollout`, else it starts over from its prompt.
        """
        await asyncio.gather(*(self._run_one(state, enable_partial_rollout) for state in states))
        if self.judger is not None:
            unjudged = [s for s in states if s.status is Status.COMPLETED and s.reward is None]
            await self.judger.judge(unjudged)
        return states

    async def pause(self) -> None:
        """Ask for what is running to end as ABORTED."""
        await self.rollout_controller.pause_generation()

    async def _run_one(self, state: RolloutState, enable_partial_rollout: bool) -> None:
        if state.status is Status.COMPLETED and len(state.response_ids):
            return
        if not (enable_partial_rollout and state.status is Status.ABORTED):
            reset_rollout_response(state)
        state.status = Status.INIT
        try:
            await self.generate_sample(state)
        # Agents are user code: whatever one raises fails this rollout, and only this one.
        except Exception as error:
            logger.exception("rollout %s failed", state.rollout_id)
            state.status = Status.FAILED
            state.error_msg = f"{type(self).__name__}: {type(error).__name__}: {error}"
