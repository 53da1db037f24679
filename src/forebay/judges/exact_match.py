"""Exact match: the response, or a part of it, is the right answer. Fast, so it runs on the event loop."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

from forebay.config import StrictModel
from forebay.judges.base import DEFAULT_TIMEOUT_S, Judge
from forebay.judges.extraction import compile_pattern, find_answer, ground_truth
from forebay.types import RolloutState


class ExactMatchArguments(StrictModel, strict=True):
    """What a run file may say of the judge ``exact_match``."""

    extract: str | None = None
    """``last_number``, ``answer_tag`` or a regular expression with one group, whose last match is the answer;
    None takes the whole response."""
    partial_credit: bool = False
    """Score the share of places at which answer and truth have the same character; the verdict then also says
    whether it is ``exact`` (1.0 or 0.0)."""


class ExactMatchJudge(Judge):
    """Score 1.0 if the answer equals the ground truth, both stripped, else 0.0.

    Invariants: a response in which `extract` finds nothing scores 0.0; with ``last_number`` numbers are
    compared by value (``1,000.0`` is ``1000``).

    >>> judge = ExactMatchJudge(extract="last_number")
    >>> # ground truth "46", response "12 + 34 = 46." -> {"score": 1.0}

    Args:
        extract, partial_credit: see `ExactMatchArguments`.
        timeout_s: unused here; every judge takes it.
    """

    def __init__(
        self,
        *,
        extract: str | None = None,
        partial_credit: bool = False,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        self._pattern = None if extract is None else compile_pattern(extract)
        self._by_value = extract == "last_number"
        self._partial_credit = partial_credit

    async def score(self, state: RolloutState) -> float | dict[str, float]:
        """1.0 or 0.0, or the share of right places."""
        truth = ground_truth(state)
        answer = (
            state.response.strip() if self._pattern is None else find_answer(self._pattern, state.response)
        )
        exact = float(answer is not None and self._equal(answer, truth))
        if not self._partial_credit:
            return exact
        return {"score": exact or _share_of_places(answer or "", truth), "exact": exact}

    def _equal(self, answer: str, truth: str) -> bool:
        if answer == truth:
            return True
        return self._by_value and _number(answer) is not None and _number(answer) == _number(truth)


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None


def _share_of_places(answer: str, truth: str) -> float:
    num_places = max(len(answer), len(truth))
    return sum(a == b for a, b in zip(answer, truth, strict=False)) / num_places if num_places else 0.0
