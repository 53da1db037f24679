"""Scores of reasoning-gym: each generator knows how to judge answers to its own problems.

The prompt carries the generator's name, arguments and the problem's index; the problem is made again where it
is judged. Scoring runs in child processes (see `forebay.judges.processes`): several of the scorers ``eval``
what the model wrote.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from pydantic import Field

from forebay.config import StrictModel
from forebay.extras import require_library
from forebay.judges.base import DEFAULT_TIMEOUT_S, Judge
from forebay.judges.extraction import compile_pattern, find_answer
from forebay.judges.processes import JudgeProcesses
from forebay.types import RolloutState

# A group's rollouts are judged close together; a few hundred groups are the most that are under way at once.
_NUM_CACHED_PROBLEMS = 512


class ReasoningGymArguments(StrictModel, strict=True):
    """What a run file may say of the judge ``reasoning_gym``."""

    extract: str = "answer_tag"
    """``answer_tag``, ``last_number`` or a regular expression with one group, whose last match is the
    answer."""
    num_processes: int = Field(default=2, ge=1)
    """How many answers are judged at once, each in a process."""


class ReasoningGymJudge(Judge):
    """The generator's own score of the answer, from 0.0 to 1.0; many generators give partial credit.

    Invariants: the answer is the last match of `extract`, or the whole response, stripped, where there is no
    match. Prompts must come from a ``reasoning_gym:NAME`` source.

    >>> judge = ReasoningGymJudge()
    >>> # problem "Solve for e: 56 - 98*e = -1218", response "... <answer>13</answer>" -> {"score": 1.0}

    Args:
        extract, num_processes: see `ReasoningGymArguments`.
        timeout_s: for one answer.

    Raises:
        ConfigError: reasoning-gym is not installed.
    """

    def __init__(
        self,
        *,
        extract: str = "answer_tag",
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        num_processes: int = 2,
    ) -> None:
        # The child keeps the time; here a wait for a free child would count too.
        super().__init__(timeout_s=None)
        require_library("reasoning_gym", "judge 'reasoning_gym'")
        self._pattern = compile_pattern(extract)
        self._processes = JudgeProcesses(
            "forebay.judges.reasoning_gym:make_scorer", timeout_s=timeout_s, num_processes=num_processes
        )

    async def score(self, state: RolloutState) -> float:
        """The generator's score."""
        problem = (state.reward_model or {}).get("reasoning_gym")
        if problem is None:
            raise ValueError(
                "the prompt names no reasoning-gym problem; its source must be reasoning_gym:NAME"
            )
        answer = find_answer(self._pattern, state.response)
        if answer is None:
            answer = state.response.strip()
        return float(
            await self._processes.run(problem["name"], problem["arguments"], problem["index"], answer)
        )

    def close(self) -> None:
        """End the child processes."""
        self._processes.close()


def make_scorer() -> Callable[[str, dict[str, Any], int, str], float]:
    """The scoring function ``(name, arguments, index, answer) -> score``; imports reasoning-gym."""
    from reasoning_gym.factory import create_dataset

    @functools.lru_cache(maxsize=64)
    def dataset(name: str, arguments: str) -> Any:
        return create_dataset(name, **json.loads(arguments))

    @functools.lru_cache(maxsize=_NUM_CACHED_PROBLEMS)
    def problem(name: str, arguments: str, index: int) -> dict[str, Any]:
        made: dict[str, Any] = dataset(name, arguments)[index]
        return made

    def score(name: str, arguments: dict[str, Any], index: int, answer: str) -> float:
        key = json.dumps(arguments, sort_keys=True)
        return float(dataset(name, key).score_answer(answer, problem(name, key, index)))

    return score
