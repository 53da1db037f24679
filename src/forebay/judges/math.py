"""Mathematical equality with math-verify: ``1/2``, ``0.5`` and ``\\frac{1}{2}`` are one answer.

The comparison runs in child processes (see `forebay.judges.processes`): it evaluates what the model wrote,
and math-verify's own time limits work by signals, in the main thread only.
"""

from __future__ import annotations

from collections.abc import Callable

from pydantic import Field

from forebay.config import StrictModel
from forebay.extras import require_library
from forebay.judges.base import DEFAULT_TIMEOUT_S, Judge
from forebay.judges.extraction import ground_truth
from forebay.judges.processes import JudgeProcesses
from forebay.types import RolloutState

_LATEX_MARKS = ("$", "\\boxed", "\\(", "\\[")


class MathVerifyArguments(StrictModel, strict=True):
    """What a run file may say of the judge ``math_verify``."""

    num_processes: int = Field(default=2, ge=1)
    """How many answers are judged at once, each in a process."""


class MathVerifyJudge(Judge):
    """Score 1.0 if the response's final expression equals the ground truth mathematically, else 0.0.

    Invariants: the ground truth may be plain or LaTeX, with or without delimiters; in the response, an answer
    in ``\\boxed{}`` or ``$ $`` counts before a bare number. A ground truth that cannot be read is an error.

    >>> judge = MathVerifyJudge(timeout_s=5.0)
    >>> # ground truth "1/2", response "so it is \\boxed{0.5}" -> {"score": 1.0}

    Raises:
        ConfigError: math-verify is not installed.
    """

    def __init__(self, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, num_processes: int = 2) -> None:
        # The child keeps the time; here a wait for a free child would count too.
        super().__init__(timeout_s=None)
        require_library("math_verify", "judge 'math_verify'")
        self._processes = JudgeProcesses(
            "forebay.judges.math:make_scorer", timeout_s=timeout_s, num_processes=num_processes
        )

    async def score(self, state: RolloutState) -> float:
        """1.0 or 0.0."""
        return float(await self._processes.run(ground_truth(state), state.response))

    def close(self) -> None:
        """End the child processes."""
        self._processes.close()


def make_scorer() -> Callable[[str, str], float]:
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
