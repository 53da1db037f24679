"""Judges that leave the verdict to a library: math-verify, and the scorers of reasoning-gym.

The comparison runs in child processes (see `forebay.judges.processes`): both libraries compute with text that
the model wrote, several scorers ``eval`` it, and math-verify's own time limits work by signals, in the main
thread only.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from pydantic import Field

from forebay.config import StrictModel, parse_config
from forebay.extras import require_library
from forebay.judges.answers import compile_pattern, find_answer, ground_truth
from forebay.judges.base import DEFAULT_TIMEOUT_S, Judge
from forebay.judges.processes import JudgeProcesses
from forebay.types import RolloutState


class MathVerifyJudge(Judge):
    """Score 1.0 if the response's final expression equals the ground truth mathematically, else 0.0.

    Invariants: the ground truth may be plain or LaTeX, with or without delimiters; in the response, an answer
    in ``\\boxed{}`` or ``$ $`` counts before a bare number. A ground truth that cannot be read is an error.

    A ground truth of ``1/2`` and the response ``so it is \\boxed{0.5}`` give 1.0.

    Raises:
        ConfigError: math-verify is not installed.
    """

    class Arguments(StrictModel, strict=True):
        """The arguments of the judge ``math_verify`` in a run file."""

        num_processes: int = Field(default=2, ge=1)
        """How many answers are judged at once, each in a process."""

    def __init__(self, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, **arguments: Any) -> None:
        # The child keeps the time; here a wait for a free child would count too.
        super().__init__(timeout_s=None)
        settings = parse_config(self.Arguments, arguments, source="judge 'math_verify'")
        require_library("math_verify", "judge 'math_verify'")
        self._processes = JudgeProcesses(f"{__name__}:make_math_scorer", timeout_s, settings.num_processes)

    async def score(self, state: RolloutState) -> float:
        """1.0 or 0.0."""
        return float(await self._processes.run(ground_truth(state), state.response))

    def close(self) -> None:
        """End the child processes."""
        self._processes.close()


class ReasoningGymJudge(Judge):
    """The generator's own score of the answer, from 0.0 to 1.0; many generators give partial credit.

    Invariants: the answer is the last match of `extract`, or the whole response, stripped, where there is no
    match. Prompts must come from a ``reasoning_gym:NAME`` source.

    The problem ``Solve for e: 56 - 98*e = -1218`` and the response ``... <answer>13</answer>`` give 1.0.

    Args:
        timeout_s: for one answer.
        arguments: those of `Arguments`, by name.

    Raises:
        ConfigError: reasoning-gym is not installed.
    """

    class Arguments(StrictModel, strict=True):
        """The arguments of the judge ``reasoning_gym`` in a run file."""

        extract: str = "answer_tag"
        """``answer_tag``, ``last_number`` or a regular expression with one group, whose last match is the
        answer."""
        num_processes: int = Field(default=2, ge=1)
        """How many answers are judged at once, each in a process."""

    def __init__(self, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, **arguments: Any) -> None:
        # As above, the child keeps the time.
        super().__init__(timeout_s=None)
        settings = parse_config(self.Arguments, arguments, source="judge 'reasoning_gym'")
        require_library("reasoning_gym", "judge 'reasoning_gym'")
        self._pattern = compile_pattern(settings.extract)
        self._processes = JudgeProcesses(f"{__name__}:make_gym_scorer", timeout_s, settings.num_processes)

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


# Text with one of these is LaTeX with its delimiters.
_LATEX_MARKS = ("$", "\\boxed", "\\(", "\\[")
# A group's rollouts are judged close together; a few hundred groups are the most that are under way at once.
_NUM_CACHED_PROBLEMS = 512


def make_math_scorer() -> Callable[[str, str], float]:
    """The scoring function ``(ground truth, response) -> 1.0 | 0.0``; imports math-verify."""
    import math_verify
    import math_verify.grader
    import math_verify.parser

    # It warns once that without its time limits one must keep the time oneself, as is done here.
    math_verify.parser.TIMEOUT_WARNING_SHOWN = True
    math_verify.grader.TIMEOUT_WARNING_SHOWN = True

    def score(truth: str, response: str) -> float:
        # Bare "x^2+1" is not recognized as an expression; inside \boxed it is.
        marked = truth if any(mark in truth for mark in _LATEX_MARKS) else f"\\boxed{{{truth}}}"
        gold = math_verify.parse(marked, parsing_timeout=None)
        if not gold:
            raise ValueError(f"math-verify cannot read the ground truth {truth!r}")
        answer = math_verify.parse(response, parsing_timeout=None)
        return float(math_verify.verify(gold, answer, timeout_seconds=None))

    return score


def make_gym_scorer() -> Callable[[str, dict[str, Any], int, str], float]:
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
