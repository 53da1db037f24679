"""An environment for tasks with an answer: a judge looks at every try, and the model may try again.

::

    turn -> judge(the rollout with this turn as its response) -> solved, or no tries left: done, with reward
                                                             '-> "not right", the next turn

Any judge will do: exact match, math, code against tests, the scorers of reasoning-gym.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from pydantic import Field, field_validator

from forebay.agents.environments.contract import Environment, Memory, Reply
from forebay.config import StrictModel, parse_config
from forebay.judges.build import JudgeConfig, build_judge
from forebay.types import RolloutState, Status

SOLVED_SCORE = 1.0
"""A try at or over this score ends the episode; as in evaluations."""

NOT_RIGHT = "That is not right. Try again."


class SecondChances(Environment):
    """Has every turn judged, and gives the model further tries.

    Invariants: the rewards of an episode add up to the best score of any try, times `discount` for every try
    before it (a negative score is not discounted), however the episode ends; a judge that fails, fails the
    rollout.

    >>> environment = SecondChances(judge={"name": "reasoning_gym"}, num_tries=3, discount=0.8)

    Args:
        arguments: those of `Arguments`, by name.

    Raises:
        ConfigError: an argument does not fit, or the judge is unknown or does not take its own.
    """

    class Arguments(StrictModel, strict=True):
        """Keys of a ``second_chances`` environment in a run file."""

        judge: JudgeConfig
        """The judge of every try, as a task's ``judge``."""
        num_tries: int = Field(default=3, ge=1)
        """Turns that are judged."""
        discount: float = Field(default=1.0, gt=0, le=1)
        """Factor of a success for every try before it; 1.0: later ones are worth as much."""
        says: str = NOT_RIGHT
        """The model's next message after a try that was not right."""

        @field_validator("judge")
        @classmethod
        def _can_be_built(cls, judge: JudgeConfig) -> JudgeConfig:
            build_judge(judge)
            return judge

    def __init__(self, **arguments: Any) -> None:
        self._arguments = parse_config(self.Arguments, arguments, source="second_chances")
        self._judge = build_judge(self._arguments.judge)

    async def reset(self, state: RolloutState) -> Memory:
        """No try so far."""
        return {"num_tries": 0, "best": None}

    async def step(self, state: RolloutState, memory: Memory, text: str) -> Reply:
        """Judge the try.

        Raises:
            RuntimeError: the judge failed.
        """
        tried = copy(state)
        tried.response, tried.status, tried.reward = text, Status.COMPLETED, None
        judged = await self._judge.judge(tried)
        if judged.reward is None:
            raise RuntimeError(judged.error_msg or "the judge gave no verdict")
        score = float(judged.reward["score"])
        worth = score * self._arguments.discount ** memory["num_tries"] if score > 0 else score
        best = memory["best"]
        # The gain, try by try: the episode may end by a limit before the last one.
        gain = worth if best is None else max(worth - best, 0.0)
        memory["best"] = worth if best is None else max(best, worth)
        memory["num_tries"] += 1
        if score >= SOLVED_SCORE or memory["num_tries"] == self._arguments.num_tries:
            return Reply(done=True, reward=gain)
        return Reply(self._arguments.says, reward=gain)

    async def shut_down(self) -> None:
        """Close the judge."""
        close = getattr(self._judge, "aclose", None)
        if close is not None:
            await close()
