"""The contract of an agent loop: from a prompt to a judged rollout.

::

    generate_group(states) -> generate_sample(state), all k at once -> judge the completed -> states
                              stage "generate" of each rollout         stage "judge" of the group

Token-in, token-out: the model sees and makes token ids; text is decoded for judges and people, and what the
model wrote is never tokenised again.

Whatever goes wrong with one rollout makes it FAILED, with a reason that names it and who failed, and leaves
its siblings alone: an engine's error (the controller's doing), an agent that raises (here), a judge that
raises or takes too long (`forebay.judges.base`).
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Protocol

from forebay.activity import GENERATE, JUDGE, Activities
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
    """Turns prompts into judged rollouts. Subclasses write `generate_sample`.

    Invariants: every rollout leaves with a status other than INIT; one that is COMPLETED is generated and
    judged once, however often its aborted siblings are continued.

    >>> class Shout(AgentLoop):
    ...     async def generate_sample(self, state):
    ...         await self.rollout_controller.generate_sample(state)
    ...         state.response = state.response.upper()
    ...         return state

    Stages are marked here, so that displays and stall reports see what a subclass does without its help. One
    that waits for tools may say so: ``with self.activities.span("tool", state.rollout_id): ...``.

    Args:
        rollout_controller: makes the tokens.
        judger: gives the rewards; None leaves them out.
        activities: where to note what is being done; may also be assigned later. None: nobody looks.
    """

    def __init__(
        self,
        rollout_controller: Generator,
        judger: GroupJudger | None = None,
        *,
        activities: Activities | None = None,
    ) -> None:
        self.rollout_controller = rollout_controller
        self.judger = judger
        self.activities = Activities() if activities is None else activities

    @abstractmethod
    async def generate_sample(self, state: RolloutState) -> RolloutState:
        """Produce one rollout, unjudged, in place (or return another); its status says how it ended."""

    async def generate_group(
        self, states: list[RolloutState], *, enable_partial_rollout: bool = False
    ) -> list[RolloutState]:
        """Produce and judge the k rollouts of one prompt, and return them in the given order.

        A rollout that is COMPLETED already (its siblings were aborted) is kept. An ABORTED one continues
        from its tokens if `enable_partial_rollout`, else it starts over from its prompt.
        """
        group = await asyncio.gather(*(self._run_one(state, enable_partial_rollout) for state in states))
        unjudged = [state for state in group if state.status is Status.COMPLETED and state.reward is None]
        if self.judger is not None and unjudged:
            await self._judge(self.judger, unjudged)
        return group

    async def pause(self) -> None:
        """Ask for what is running to end as ABORTED."""
        await self.rollout_controller.pause_generation()

    async def _run_one(self, state: RolloutState, enable_partial_rollout: bool) -> RolloutState:
        if state.status is Status.COMPLETED and len(state.response_ids):
            return state
        if not (enable_partial_rollout and state.status is Status.ABORTED):
            reset_rollout_response(state)
        state.status = Status.INIT
        with self.activities.span(
            GENERATE, state.rollout_id, task=state.task_name, group=state.group_id
        ) as activity:
            try:
                # Working in place and returning nothing is as clear as returning the state.
                state = await self.generate_sample(state) or state
                if state.status is Status.INIT:
                    raise RuntimeError("generate_sample left the rollout without a status")
            # Agents are user code: whatever one raises fails this rollout, and only this one.
            except (Exception, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                    raise
                logger.exception("rollout %s failed", state.rollout_id)
                _fail(state, type(self).__name__, error)
            activity.note = f"{state.status.value}, {len(state.response_ids)} tokens"
        return state

    async def _judge(self, judger: GroupJudger, states: list[RolloutState]) -> None:
        first = states[0]
        group = first.rollout_id if first.group_id is None else first.group_id
        with self.activities.span(JUDGE, group, task=first.task_name, group=first.group_id):
            try:
                await judger.judge(states)
            # `Judger` lets nothing out; this one is the user's own.
            except Exception as error:
                logger.exception("the judger failed on group %s", group)
                for state in states:
                    if state.reward is None:
                        _fail(state, f"judger {type(judger).__name__}", error)


def _is_cancelled() -> bool:
    """Whether somebody cancelled this rollout; else the agent let a cancellation of its own escape.

    Passed on, that one would end the group while the siblings still write into it.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _fail(state: RolloutState, who: str, error: BaseException) -> None:
    state.status = Status.FAILED
    state.error_msg = f"rollout {state.rollout_id}: {who}: {type(error).__name__}: {error}"
