"""Chunks of consecutive fragments, ready to be sampled: by arrival, by age, and at random.

::

    worker's stream:   f0 f1 | f2 f3 | f4 ...         fragments_per_chunk = 2
                       chunk 0 chunk 1 (partial: `sequences`)

    ChunkTable: arrival order --> oldest()      evicted when the buffer is full
                by version    --> stale(v)      whatever lies in front of it or behind it
                dense slots   --> sample(n)     one draw costs what it draws, not what is held
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np

SAMPLING = ("uniform", "recency", "priority")
"""How chunks are drawn."""
MIN_TIDY = 64
"""Chunks that have left may stay in the lists of a small table."""


class Fragment(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What the buffer keeps of a fragment."""

    fragment_id: str
    worker_uuid: str
    fid_in_worker: int
    model_version: int
    number: int
    """Counts everything that arrived."""


class Chunk(msgspec.Struct, eq=False):
    """Consecutive fragments of one worker, served together."""

    number: int
    """Counts the chunks in the order in which they were completed."""
    fragments: tuple[Fragment, ...]
    oldest_version: int
    """The model version of its oldest fragment, wherever that stands in it."""
    priority: float
    uses: int = 0
    """How often it was served."""
    slot: int = -1
    """In `ChunkTable`; -1: it is not there."""
    segment: Any = None
    """In `Segments`; None: it is in no row yet."""
    place: int = 0
    """In its segment."""


class ChunkTable:
    """The chunks that can be served.

    >>> table = ChunkTable()
    >>> table.add([Chunk(0, (), oldest_version=3, priority=1.0)])
    >>> [chunk.number for chunk in table.stale(min_version=4)]
    [0]
    """

    def __init__(self) -> None:
        self._slots: list[Chunk] = []
        # Not numpy's: one number at a time, these are three times as fast.
        self._versions = array("q")
        self._priorities = array("d")
        # These also name chunks that have left, at most as many as are here: `_tidy`.
        self._arrived: deque[Chunk] = deque()
        self._by_version: dict[int, list[Chunk]] = {}
        self._num_listed = 0
        """In `_by_version`, and at least as many as in `_arrived`."""

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Chunk]:
        """In the order of arrival."""
        return (chunk for chunk in self._arrived if chunk.slot >= 0)

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Hold `chunks`, which arrived in this order."""
        by_version = self._by_version
        for slot, chunk in enumerate(chunks, len(self._slots)):
            assert chunk.slot < 0
            chunk.slot = slot
            same_version = by_version.get(chunk.oldest_version)
            if same_version is None:
                by_version[chunk.oldest_version] = [chunk]
            else:
                same_version.append(chunk)
        self._slots += chunks
        self._versions.extend([chunk.oldest_version for chunk in chunks])
        self._priorities.extend([chunk.priority for chunk in chunks])
        self._arrived += chunks
        self._num_listed += len(chunks)

    def remove(self, chunks: Iterable[Chunk]) -> None:
        """Hold them no longer; the last slot takes the place of each."""
        slots, versions, priorities = self._slots, self._versions, self._priorities
        for chunk in chunks:
            slot, last, version, priority = chunk.slot, slots.pop(), versions.pop(), priorities.pop()
            if last is not chunk:
                slots[slot], versions[slot], priorities[slot] = last, version, priority
                last.slot = slot
            chunk.slot = -1
        if self._num_listed > 2 * len(slots) + MIN_TIDY:
            self._tidy()

    def _tidy(self) -> None:
        self._arrived = deque(self)
        self._num_listed = len(self._arrived)
        self._by_version = {}
        for chunk in self._arrived:
            self._by_version.setdefault(chunk.oldest_version, []).append(chunk)

    def set_priority(self, chunk: Chunk, priority: float) -> None:
        """Give the chunk this priority."""
        chunk.priority = self._priorities[chunk.slot] = priority

    def oldest(self, count: int) -> list[Chunk]:
        """Those that arrived first."""
        arrived = self._arrived
        # A full buffer asks at every addition, and must not pass over the same ones again.
        while arrived and arrived[0].slot < 0:
            arrived.popleft()
        return list(islice(self, count))

    def stale(self, min_version: int) -> list[Chunk]:
        """Those with a fragment of a version before `min_version`."""
        versions = sorted(version for version in self._by_version if version < min_version)
        return [chunk for version in versions for chunk in self._by_version[version] if chunk.slot >= 0]

    def sample(self, count: int, rule: str, model_version: int, seed: tuple[int, ...]) -> list[Chunk]:
        """`count` distinct chunks; the same ones for the same history and `seed`.

        By recency the weight of a chunk is 1 / (1 + its staleness), by priority it is its priority.
        """
        size = len(self._slots)
        assert count <= size
        rng = np.random.default_rng(seed)
        if rule == "uniform":
            slots = rng.choice(size, count, replace=False)
        elif rule == "recency":
            staleness = np.maximum(0, model_version - np.array(self._versions))
            slots = _draw(1 / (1 + staleness), count, rng)
        else:
            slots = _draw(np.array(self._priorities), count, rng)
        return [self._slots[slot] for slot in slots.tolist()]


def _draw(weights: np.ndarray[Any, Any], count: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Positions of `count` draws without replacement, each by weight among those left.

    The largest of ``log(weight) + Gumbel noise`` are such a sample (Efraimidis and Spirakis, 2006; Kool et
    al., 2019, arXiv 1903.06059).
    """
    keys = np.log(weights) + rng.gumbel(size=len(weights))
    order: np.ndarray[Any, Any] = np.argsort(-keys)[:count]
    return order
