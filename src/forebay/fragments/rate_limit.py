"""How far writers may run ahead of readers, and readers of writers.

::

    difference = samples_per_insert * chunks inserted - chunks sampled

    readers wait --|---------------- both go on ----------------|-- writers wait
           min_difference                                 max_difference

The rule of Reverb's rate limiter (Cassirer et al., 2021, arXiv 2102.04736), with two changes that keep it
from standing still: a chunk that left the buffer unsampled takes its share of the difference with it, and
writers never wait while a reader waits for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RateLimit:
    """The bounds, in chunks.

    >>> limit = RateLimit(samples_per_insert=2.0, min_chunks=4, error_buffer=8.0)
    >>> limit.min_difference, limit.max_difference
    (0.0, 16.0)

    Raises:
        ValueError: bounds that no insert or no sample could ever keep.
    """

    samples_per_insert: float
    """How often each chunk is to be sampled, on average."""
    min_chunks: int = 1
    """Nothing is sampled from fewer."""
    error_buffer: float = math.inf
    """How far the difference may lie from ``samples_per_insert * min_chunks``."""

    def __post_init__(self) -> None:
        if self.samples_per_insert <= 0 or self.min_chunks < 1:
            raise ValueError(
                f"samples_per_insert must be above 0 and min_chunks at least 1, got "
                f"{self.samples_per_insert} and {self.min_chunks}"
            )
        if self.error_buffer < max(1.0, self.samples_per_insert):
            raise ValueError(
                f"error_buffer must be at least 1 and samples_per_insert={self.samples_per_insert}, so that "
                f"one chunk more on either side fits, got {self.error_buffer}"
            )

    @property
    def min_difference(self) -> float:
        """Sampling must not bring the difference below this."""
        return self.samples_per_insert * self.min_chunks - self.error_buffer

    @property
    def max_difference(self) -> float:
        """Inserting must not bring the difference above this."""
        return self.samples_per_insert * self.min_chunks + self.error_buffer

    def may_insert(self, difference: float) -> bool:
        """Whether one chunk more keeps the bound."""
        return difference + self.samples_per_insert <= self.max_difference

    def may_sample(self, difference: float, count: int, num_chunks: int) -> bool:
        """Whether sampling `count` of `num_chunks` keeps the bound."""
        return num_chunks >= self.min_chunks and difference - count >= self.min_difference
