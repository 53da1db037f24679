"""The answer in a response, the right one of its prompt, and the judge that compares the two as text.

Fast, so the judge runs on the event loop.
"""

import contextlib
import re
from decimal import Decimal, InvalidOperation
from typing import Any

from forebay.config import StrictModel, errors_about, parse_config
from forebay.judges.base import DEFAULT_TIMEOUT_S, Judge
from forebay.types import RolloutState


class ExactMatchJudge(Judge):
    """Score 1.0 if the answer equals the ground truth, both stripped, else 0.0.

    Invariants: a response in which `extract` finds nothing scores 0.0; with ``last_number`` numbers are
    compared by value (``1,000.0`` is ``1000``).

    >>> import asyncio
    >>> state = RolloutState([], response="12 + 34 = 46.", reward_model={"ground_truth": "46"})
    >>> asyncio.run(ExactMatchJudge(extract="last_number").score(state))
    1.0

    Args:
        timeout_s: unused here; every judge takes it.
        arguments: those of `Arguments`, by name.
    """

    class Arguments(StrictModel, strict=True):
        """The arguments of the judge ``exact_match`` in a run file."""

        extract: str | None = None
        """``last_number``, ``answer_tag`` or a regular expression with one group, whose last match is the
        answer; None takes the whole response."""
        partial_credit: bool = False
        """Score the share of places at which answer and truth have the same character; the verdict then also
        says whether it is ``exact`` (1.0 or 0.0)."""

    waits = False

    def __init__(self, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, **arguments: Any) -> None:
        super().__init__(timeout_s=timeout_s)
        self._arguments = parse_config(self.Arguments, arguments, source="judge 'exact_match'")
        extract = self._arguments.extract
        self._pattern = None if extract is None else compile_pattern(extract)

    async def score(self, state: RolloutState) -> float | dict[str, float]:
        """1.0 or 0.0, or the share of right places."""
        truth = ground_truth(state)
        answer = state.response.strip() if self._pattern is None else find_answer(self._pattern, state.response)
        exact = float(answer == truth)
        if answer is not None and not exact and self._arguments.extract == "last_number":
            # Compared by value; what is not a number is not equal.
            with contextlib.suppress(InvalidOperation):
                exact = float(Decimal(answer.replace(",", "")) == Decimal(truth.replace(",", "")))
        if not self._arguments.partial_credit:
            return exact
        answer = answer or ""
        num_right = sum(a == b for a, b in zip(answer, truth, strict=False))
        # An answer of the same value is all right, even if places differ.
        return {"score": exact or num_right / max(len(answer), len(truth), 1), "exact": exact}


PATTERNS = {
    # A minus belongs to the number unless something is subtracted from: "= -4" but not "10-4".
    "last_number": r"((?:(?<![\w)])-)?\d[\d,]*(?:\.\d+)?)",
    "answer_tag": r"<answer>(.*?)</answer>",
    # Cut off in its middle, a block has no end.
    "code_block": r"```[\w+-]*[ \t]*\n(.*?)(?:```|\Z)",
}
"""Named patterns; any regular expression with one group may be written instead."""


def compile_pattern(extract: str) -> re.Pattern[str]:
    """The named pattern or regular expression `extract`, matching across lines.

    Raises:
        ValueError: it is not a regular expression with exactly one group.
    """
    with errors_about(f"extract = {extract!r} is not a regular expression", re.error):
        pattern = re.compile(PATTERNS.get(extract, extract), re.DOTALL)
    if pattern.groups != 1:
        raise ValueError(
            f"extract = {extract!r} has {pattern.groups} groups; write one ( ) around the answer, "
            f"or one of {', '.join(PATTERNS)}"
        )
    return pattern


def find_answer(pattern: re.Pattern[str], text: str) -> str | None:
    """The group of the last match, stripped; None without a match. The last, since models think aloud."""
    found = pattern.findall(text)
    return found[-1].strip() if found else None


def ground_truth(state: RolloutState) -> str:
    """The right answer of the rollout's prompt, stripped.

    Raises:
        ValueError: the prompt brought none.
    """
    truth = (state.reward_model or {}).get("ground_truth")
    if truth is None:
        raise ValueError("the prompt has no reward_model['ground_truth']; set columns.answer of its data")
    return str(truth).strip()
