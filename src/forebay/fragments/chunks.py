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
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

SAMPLING = ("uniform", "recency", "priority")
"""How chunks are drawn."""


class Fragment(msgspec.Struct, array_like=True, frozen=True):
    """What the buffer keeps of a fragment."""

    fragment_id: str
    worker_uuid: str
    fid_in_worker: int
    model_version: int
    number: int
    """Counts everything that arrived."""


class Chunk(msgspec.Struct, array_like=True):
    """Consecutive fragments of one worker, served together."""

    number: int
    """Counts the chunks in the order in which they were completed."""
    fragments: list[Fragment]
    oldest_version: int
    """The model version of its oldest fragment, wherever that stands in it."""
    priority: float
    uses: int = 0
    """How often it was served."""


class ChunkTable:
    """The chunks that can be served.

    >>> table = ChunkTable()
    >>> table.add(Chunk(0, [], oldest_version=3, priority=1.0))
    >>> [chunk.number for chunk in table.stale(min_version=4)]
    [0]
    """

    def __init__(self) -> None:
        # To find the first of a plain dict takes the longer the more were deleted before it.
        self._chunks: OrderedDict[int, Chunk] = OrderedDict()
        self._by_version: dict[int, dict[int, None]] = defaultdict(dict)
        self._slots: list[int] = []
        self._slot_of: dict[int, int] = {}
        # Not numpy's: one number at a time, these are three times as fast.
        self._versions = array("q")
        self._priorities = array("d")

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[Chunk]:
        """In the order of arrival."""
        return iter(self._chunks.values())

    def __contains__(self, number: int) -> bool:
        return number in self._chunks

    def add(self, chunk: Chunk) -> None:
        """Hold `chunk`."""
        assert chunk.number not in self._chunks
        self._chunks[chunk.number] = chunk
        self._by_version[chunk.oldest_version][chunk.number] = None
        self._slot_of[chunk.number] = len(self._slots)
        self._slots.append(chunk.number)
        self._versions.append(chunk.oldest_version)
        self._priorities.append(chunk.priority)

    def remove(self, chunk: Chunk) -> None:
        """Hold it no longer; the last slot takes its place."""
        del self._chunks[chunk.number]
        same_version = self._by_version[chunk.oldest_version]
        del same_version[chunk.number]
        if not same_version:
            del self._by_version[chunk.oldest_version]
        slot, last = self._slot_of.pop(chunk.number), self._slots.pop()
        version, priority = self._versions.pop(), self._priorities.pop()
        if last != chunk.number:
            self._slots[slot] = last
            self._slot_of[last] = slot
            self._versions[slot], self._priorities[slot] = version, priority

    def set_priority(self, number: int, priority: float) -> Chunk:
        """Give the chunk `number` this priority."""
        chunk = self._chunks[number]
        chunk.priority = self._priorities[self._slot_of[number]] = priority
        return chunk

    def oldest(self) -> Chunk:
        """The one that arrived first."""
        return next(iter(self._chunks.values()))

    def stale(self, min_version: int) -> list[Chunk]:
        """Those with a fragment of a version before `min_version`."""
        versions = sorted(version for version in self._by_version if version < min_version)
        return [self._chunks[number] for version in versions for number in self._by_version[version]]

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
        numbers, chunks = self._slots, self._chunks
        return [chunks[numbers[slot]] for slot in slots.tolist()]


def _draw(weights: np.ndarray[Any, Any], count: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Positions of `count` draws without replacement, each by weight among those left.

    The largest of ``log(weight) + Gumbel noise`` are such a sample (Efraimidis and Spirakis, 2006; Kool et
    al., 2019, arXiv 1903.06059).
    """
    keys = np.log(weights) + rng.gumbel(size=len(weights))
    order: np.ndarray[Any, Any] = np.argsort(-keys)[:count]
    return order
