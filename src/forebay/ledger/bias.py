"""Whether what was dropped differs from what was trained on: in length, in latency, in first-try score.

A run that drops its long, slow or hard groups more often than others trains on what is left, and no loss
curve says so. The comparison is per group: response tokens of all its rollouts as last produced, seconds of
generation over all tries, and the mean score of the first try that was judged (a dropped group's rollouts are
wiped; the ledger is what remembers). It shows a difference and how sure it is, not its cause: a filter that
drops groups of equal scores is meant to differ in score.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.ledger.accounts import Ledger
from forebay.ledger.histories import DROPPED, TRAINED

QUANTITIES = ("num_tokens", "latency_s", "score")
AGED = (f"{DROPPED}:expired", f"{DROPPED}:evicted")
"""Where groups are that are not to blame for it: they grew too old, or had no room. To reject one for what it
is (``filtered``, ``failed``) is meant to choose."""


@dataclass(frozen=True)
class Summary:
    """Some groups' values of one quantity; NaN where there are none.

    >>> Summary.of(np.array([1.0, 2.0, 6.0]))
    Summary(count=3, mean=3.0, median=2.0, variance=7.0)
    """

    count: int
    """Groups whose value is known."""
    mean: float
    median: float
    variance: float
    """Sample variance; NaN for fewer than two groups."""

    @classmethod
    def of(cls, values: NDArray[np.floating]) -> "Summary":
        """The summary of `values` (N, no NaN)."""
        count = len(values)
        if count == 0:
            return cls(0, math.nan, math.nan, math.nan)
        variance = float(np.var(values, ddof=1)) if count > 1 else math.nan
        return cls(count, float(np.mean(values)), float(np.median(values)), variance)

    @classmethod
    def of_sums(cls, count: int, total: int, squares: int) -> "Summary":
        """That of `count` integers by their sum and that of their squares; it knows no median."""
        variance = (count * squares - total**2) / (count * (count - 1)) if count > 1 else math.nan
        return cls(count, total / count if count else math.nan, math.nan, variance)


@dataclass(frozen=True)
class Comparison:
    """One quantity of the groups dropped for one reason (or any), against that of the trained groups.

    >>> trained, dropped = Summary.of(np.array([90.0, 110.0])), Summary.of(np.array([300.0]))
    >>> Comparison("num_tokens", trained, dropped).difference
    200.0
    """

    quantity: str
    """``num_tokens``, ``latency_s`` or ``score``."""
    trained: Summary
    dropped: Summary

    @property
    def difference(self) -> float:
        """Mean of the dropped minus mean of the trained."""
        return self.dropped.mean - self.trained.mean

    @property
    def standard_error(self) -> float:
        """The error of `difference`, with a variance for each side (Welch 1947); NaN if one has below two."""
        if min(self.trained.count, self.dropped.count) < 2:
            return math.nan
        return math.sqrt(self.trained.variance / self.trained.count + self.dropped.variance / self.dropped.count)

    @property
    def is_notable(self) -> bool:
        """Whether the difference is more than three standard errors, which chance alone hardly makes."""
        # With too few groups the error is NaN, and nothing is notable.
        return abs(self.difference) > 3 * self.standard_error


def compare_dropped(ledger: Ledger, task_name: str | None = None) -> dict[str, list[Comparison]]:
    """For ``all`` dropped groups and for each reason, a `Comparison` per quantity; of one task or of all.

    Tasks differ in length and score by themselves, so a comparison over several of them mixes that in.
    """
    tasks = list(ledger.histories(task_name))
    dropped = sorted({place for groups in tasks for place in groups.counts if place.startswith(DROPPED)})

    def summaries(*places: str) -> list[Summary]:
        return [
            Summary.of(np.concatenate([np.empty(0), *(g.values(p, quantity) for g in tasks for p in places)]))
            for quantity in QUANTITIES
        ]

    trained = summaries(TRAINED)
    places = {"all": dropped} | {place.partition(":")[2]: [place] for place in dropped}
    return {
        reason: [Comparison(*parts) for parts in zip(QUANTITIES, trained, summaries(*which), strict=True)]
        for reason, which in places.items()
    }


def length_bias(ledger: Ledger, task_name: str) -> float | None:
    """How many times longer, in tokens, groups of the task that aged are than those trained on.

    None unless they are longer, by more than chance makes. A group that grew too old before it was finished
    counts with the tokens it had, so the true ratio is larger.
    """
    ratios = list[float]()
    for groups in ledger.histories(task_name):
        trained, *aged = (Summary.of_sums(*groups.token_powers(place)) for place in (TRAINED, *AGED))
        notable = [old.mean for old in aged if Comparison("num_tokens", trained, old).is_notable]
        ratios += [mean / trained.mean for mean in notable if 0 < trained.mean < mean]
    return max(ratios, default=None)
