"""The rules of a fragment buffer: what it may hold and serve, and how far writers may run ahead.

::

    difference = samples_per_insert * chunks inserted - chunks sampled

    readers wait --|---------------- both go on ----------------|-- writers wait
        middle - error_buffer                          middle + error_buffer

The rule of Reverb's rate limiter (Cassirer et al., 2021, arXiv 2102.04736), with two changes that keep it
from standing still: a chunk that left the buffer unsampled takes its share of the difference with it, and
writers never wait while a reader waits for them. With ``samples_per_insert=2, min_chunks=1, error_buffer=6``
the difference may lie between -4 and 8: four chunks without a sample make writers wait.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """The settings of a `ReplayBufferActor` that decide what it holds and serves.

    Raises:
        ValueError: a value is not possible.
    """

    max_chunks: int
    max_staleness: int
    max_reuse: int
    fragments_per_chunk: int
    seed: int = 0
    lease_s: float = 600.0
    worker_timeout_s: float = 600.0
    rate_limit: "RateLimit | None" = None

    def __post_init__(self) -> None:
        for name, least in {"max_chunks": 1, "max_staleness": 0, "max_reuse": 1, "fragments_per_chunk": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("lease_s", "worker_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        limit = self.rate_limit
        # A chunk leaves after `max_reuse` uses, and there are never more than `max_chunks` at a time.
        if limit and (limit.samples_per_insert > self.max_reuse or limit.min_chunks > self.max_chunks):
            raise ValueError(
                f"no buffer with max_reuse={self.max_reuse} and max_chunks={self.max_chunks} can keep {limit}"
            )

    def num_chunks(self, num_fragments: int) -> int:
        """The chunks of a batch.

        Raises:
            ValueError: no such batch can ever be served.
        """
        count, rest = divmod(num_fragments, self.fragments_per_chunk)
        if rest or not 0 < count <= self.max_chunks:
            raise ValueError(
                f"num_fragments must be a multiple of fragments_per_chunk={self.fragments_per_chunk}, from "
                f"{self.fragments_per_chunk} to {self.max_chunks * self.fragments_per_chunk} (max_chunks), "
                f"got {num_fragments}"
            )
        return count


@dataclass(frozen=True, kw_only=True)
class RateLimit:
    """The bounds, in chunks.

    >>> limit = RateLimit(samples_per_insert=2.0, min_chunks=4, error_buffer=8.0)
    >>> limit.middle - limit.error_buffer, limit.middle + limit.error_buffer
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
    def middle(self) -> float:
        """The difference lies at most `error_buffer` below it, by sampling, and above it, by inserting."""
        return self.samples_per_insert * self.min_chunks
