"""The contract of an agent loop: from a prompt to a judged rollout.

::

    generate_group(states) -> generate_sample(state), all k at once -> judge the completed -> states
                              stage "generate" of each rollout         stage "judge" of the group

Token-in, token-out: the model sees and makes token ids; text is decoded for judges and people, and what the
model wrote is never tokenized again.

Several trajectories. `generate_sample` may return a list: the given rollout, which is judged, and further
trajectories of the same attempt that are to be trained on too (the work of a sub-agent, or what came before a
history was shortened). They join the group, marked in ``extra_fields``, and have the judged one's reward
unless they bring their own. An attempt is kept only whole: where one of its trajectories is not COMPLETED,
the further ones are dropped and made anew with the first.

An error in one rollout makes it FAILED, with a reason that names the rollout and the part that failed, and
leaves its siblings alone: an engine's error (the controller's doing), an agent that raises (here), a judge
that raises or takes too long (`forebay.judges.base`)."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from forebay.aio.tasks import is_cancelled
from forebay.config import StrictModel, parse_config
from forebay.engines.base import EngineLost
from forebay.judges.base import Judge
from forebay.tracebacks import raised_at
from forebay.types import (
    TRAJECTORY_OF_KEY,
    RolloutState,
    SampleParams,
    Status,
    count_generated,
    note_place,
    reset_rollout_response,
)
from forebay.watching.activity import GENERATE, JUDGE, Activities, Activity

logger = logging.getLogger(__name__)


class NoArguments(StrictModel, strict=True):
    """An agent that has only the task's settings."""


class AgentLoop(ABC):
    """Turns prompts into judged rollouts. Subclasses write `generate_sample`.

    Invariants: every rollout leaves with a status other than INIT; one that is COMPLETED is generated and
    judged once, however often its aborted siblings are continued. Only a judge that compares the members
    judges all of them again where some came later.

    >>> class Shout(AgentLoop):
    ...     async def generate_sample(self, state):
    ...         await self.rollout_controller.generate_sample(state)
    ...         state.response = state.response.upper()
    ...         return state

    Stages are marked here, so that displays and stall reports see what a subclass does without its help. One
    that waits for tools may say so: ``with self.activities.span("tool", state.rollout_id): ...``.

    Keywords of its own, which a run file gives as the agent's ``arguments``, are fields of a model
    ``Arguments`` in the class, whose values are then in ``self.arguments``; or those of its own constructor.

    Args:
        rollout_controller: makes the tokens.
        judge: gives the rewards; None leaves them out.
        tokenizer: of the model.
        sample_params: for rollouts that bring none; None: the defaults.
        activities: where to note what is being done; may also be assigned later.
        arguments: those of ``Arguments``, by name.

    Raises:
        ConfigError: an argument is unknown or does not fit.
    """

    Arguments: ClassVar[type[StrictModel] | None] = NoArguments
    """The model of the keywords of its own; None: those of the constructor that the class defines."""

    is_whole_at_awaits: ClassVar[bool] = False
    """Whether a rollout has all that is needed to go on with it whenever `generate_sample` waits, and is
    COMPLETED only at its end: then copies of it are saved while it is generated."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # A subclass that generates in its own way has to promise it anew.
        if "generate_sample" in vars(cls) and "is_whole_at_awaits" not in vars(cls):
            cls.is_whole_at_awaits = False
        if "__init__" in vars(cls) and "Arguments" not in vars(cls):
            cls.Arguments = None

    def __init__(
        self,
        rollout_controller: "Generator",
        judge: Judge | None = None,
        tokenizer: Any = None,
        *,
        sample_params: SampleParams | None = None,
        activities: Activities | None = None,
        **arguments: Any,
    ) -> None:
        self.rollout_controller = rollout_controller
        self.judge = judge
        self.tokenizer = tokenizer
        self.sample_params = SampleParams() if sample_params is None else sample_params
        self.activities = Activities() if activities is None else activities
        self.arguments: Any = parse_config(self.Arguments or NoArguments, arguments, source=type(self).__name__)
        self.set_up()

    def set_up(self) -> None:  # noqa: B027 (most need nothing)
        """Make the parts that need the arguments; the last thing that the constructor does."""

    @classmethod
    def prompt_tools(cls, arguments: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """The tools that a loop made with `arguments` tells prompts of, where the data names none.

        Prompts are measured, and demonstrations rendered, with them before there is a loop.
        """
        return None

    @abstractmethod
    async def generate_sample(self, state: RolloutState) -> RolloutState | list[RolloutState]:
        """Produce one rollout, unjudged, in place (or return another); its status says how it ended.

        A list is the rollout and the further trajectories of the same attempt.
        """

    async def generate_group(
        self, states: list[RolloutState], *, enable_partial_rollout: bool = False
    ) -> list[RolloutState]:
        """Produce and judge the k rollouts of one prompt, and return them in the given order.

        A rollout that is COMPLETED already (its siblings were aborted) is kept. An ABORTED one continues
        from its tokens if `enable_partial_rollout`, else it starts over from its prompt. Further
        trajectories follow the one that they were made with.
        """
        self.go_on()
        attempts = await asyncio.gather(
            *(self._run_one(attempt, enable_partial_rollout) for attempt in split_attempts(states))
        )
        firsts = [attempt[0] for attempt in attempts]
        unjudged = [state for state in firsts if state.status is Status.COMPLETED and state.reward is None]
        rewards = [state.reward for state in firsts]
        # A judge that compares the members of a group needs all of them, also where some were judged before.
        compares = getattr(self.judge, "needs_whole_group", False)
        waits = compares and any(state.status is Status.ABORTED for state in firsts)
        if self.judge is not None and unjudged and not waits:
            completed = [state for state in firsts if state.status is Status.COMPLETED]
            await self._judge(self.judge, completed if compares else unjudged)
        for (first, *further), earlier in zip(attempts, rewards, strict=True):
            # They share the first one's reward, or its failure, unless they have a reward of their own.
            for state in further:
                if state.status is not Status.COMPLETED or state.reward not in (None, earlier):
                    continue
                if first.status is Status.FAILED:
                    state.status, state.error_msg = Status.FAILED, first.error_msg
                elif first.reward is not None:
                    state.reward = dict(first.reward)
        return [state for attempt in attempts for state in attempt]

    def go_on(self) -> None:  # noqa: B027
        """End a pause: a group begins."""

    async def pause(self) -> None:
        """Ask for what is running to end as ABORTED."""
        await self.rollout_controller.pause_generation()

    async def close(self) -> None:
        """Free what the loop and its judge hold; nothing is generated any more."""
        closing = getattr(self.judge, "aclose", None)
        if closing is not None:
            await closing()

    def span(self, stage: str, state: RolloutState) -> Activity:
        """The block ``with loop.span(stage, state):``, in which the rollout is at this stage."""
        return self.activities.span(stage, state.rollout_id, task=state.task_name, group=state.group_id)

    async def _run_one(self, attempt: "Attempt", enable_partial_rollout: bool) -> "Attempt":
        if all(state.status is Status.COMPLETED and len(state.response_ids) for state in attempt):
            return attempt
        state = attempt[0]
        if not (enable_partial_rollout and state.status is Status.ABORTED):
            reset_rollout_response(state)
        state.status = Status.INIT
        state.sample_params = state.sample_params or self.sample_params
        attempt = [state]
        with self.span(GENERATE, state) as activity:
            try:
                # Working in place and returning nothing is as clear as returning the state.
                made = await self.generate_sample(state) or state
                attempt = _joined(state, made) if isinstance(made, list) else [made]
                if any(member.status is Status.INIT for member in attempt):
                    raise RuntimeError("generate_sample left the rollout without a status")
            # Agents are user code: whatever one raises, sys.exit() included, fails this rollout alone.
            except (Exception, asyncio.CancelledError, SystemExit) as error:
                # Passed on, the agent's own would end the group while the siblings still write into it.
                if isinstance(error, asyncio.CancelledError) and is_cancelled():
                    raise
                # Where no engine is left, all rollouts fail, and the engines' pool has told why.
                if not isinstance(error, EngineLost):
                    logger.exception("rollout %s failed", state.rollout_id)
                attempt = attempt[:1]
                _fail(attempt[0], type(self).__name__, error)
            first = attempt[0]
            activity.note = f"{first.status.value}, {count_generated(first)} tokens"
        return attempt

    async def _judge(self, judge: Judge, states: list[RolloutState]) -> None:
        first = states[0]
        group = first.rollout_id if first.group_id is None else first.group_id
        with self.activities.span(JUDGE, group, task=first.task_name, group=first.group_id) as activity:
            try:
                await judge.judge(states)
            # `Judge` lets nothing out; this one is the user's own.
            except (Exception, SystemExit) as error:
                logger.exception("the judge failed on group %s", group)
                for state in states:
                    if state.reward is None:
                        _fail(state, f"judge {type(judge).__name__}", error)
            activity.note = next((s.error_msg or "" for s in states if s.status is Status.FAILED), "")


Attempt = list[RolloutState]
"""A rollout and the further trajectories that were made with it."""


class Generator(Protocol):
    """The part of a rollout controller that an agent loop uses."""

    async def generate_sample(self, state: RolloutState) -> RolloutState:
        """Continue ``state.tokens`` within the remaining budget, in place."""

    async def pause_generation(self) -> None:
        """End what is running as aborted."""


def split_attempts(group: Sequence[RolloutState]) -> list[Attempt]:
    """The rollouts of a group in their order, each with the further trajectories that were made with it."""
    attempts: list[Attempt] = []
    for state in group:
        if TRAJECTORY_OF_KEY in state.extra_fields and attempts:
            attempts[-1].append(state)
        else:
            attempts.append([state])
    return attempts


def _joined(first: RolloutState, made: Sequence[RolloutState]) -> Attempt:
    """`made`, beginning with `first`, the others marked and named after it.

    Raises:
        ValueError: the given rollout is not the first of them.
    """
    if not made or made[0].rollout_id != first.rollout_id:
        raise ValueError(
            f"generate_sample must return the given rollout {first.rollout_id!r} first, then further "
            f"trajectories; got {[state.rollout_id for state in made]}"
        )
    failed = next((state for state in made if state.status is Status.FAILED), None)
    if failed is not None:
        # The attempt is kept only whole: made again, all of it draws other random numbers.
        first.status, first.error_msg = Status.FAILED, failed.error_msg
    for number, state in enumerate(made[1:], start=1):
        state.extra_fields[TRAJECTORY_OF_KEY] = first.rollout_id
        state.rollout_id = f"{first.rollout_id}/{number}"
        for name in ("group_id", "task_name", "num_tries", "data_source", "reward_model"):
            setattr(state, name, getattr(first, name))
        state.session_id = state.session_id or first.session_id
        state.sample_params = state.sample_params or first.sample_params
    return list(made)


def _fail(state: RolloutState, part: str, error: BaseException) -> None:
    state.status = Status.FAILED
    state.error_msg = f"rollout {state.rollout_id}: {part}: {type(error).__name__}: {error}"
    note_place(state, raised_at(error))
