"""Chunks of consecutive fragments: those that can be sampled, and those that are not complete yet.

::

    worker's stream:   f0 f1 | f2 f3 | f4 ...         fragments_per_chunk = 2
                       chunk 0 chunk 1 partial

    ChunkTable: arrival order --> oldest()      evicted when the buffer is full
                by version    --> stale(v)      whatever lies in front of it or behind it
                dense slots   --> sample(n)     one draw costs what it draws, not what is held

    Sequences:  f4, f5 | f6 arrives: one more            | fragments_per_chunk of them: a chunk
                       | f8 arrives: f4, f5 are dropped, f8 is the new start
                       | the worker falls silent, its session ends, or they grow stale: dropped
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import msgspec
import numpy as np

MIN_TIDY = 64
"""Chunks that have left may stay in the lists of a small table."""


class Fragment(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A fragment as the buffer knows it."""

    fragment_id: str
    worker_uuid: str
    fid_in_worker: int
    model_version: int


class Chunk(msgspec.Struct, eq=False, array_like=True):
    """Consecutive fragments of one worker, served together."""

    number: int
    """Counts the chunks in the order in which they were completed."""
    fragments: tuple[Fragment, ...]
    oldest_version: int
    """The model version of its oldest fragment, wherever that stands in it."""
    uses: int = 0
    """How often it was served."""
    slot: int = -1
    """Its place in `ChunkTable`; -1: it is not there."""


class ChunkTable:
    """The chunks that can be served.

    >>> table = ChunkTable()
    >>> table.add([Chunk(0, (), oldest_version=3)])
    >>> [chunk.number for chunk in table.stale(min_version=4)]
    [0]
    """

    def __init__(self) -> None:
        self._slots: list[Chunk] = []
        # These also name chunks that have left, at most as many as are here: `_tidy`.
        self._arrived: deque[Chunk] = deque()
        self._by_version: dict[int, list[Chunk]] = {}
        self._num_listed = 0
        """In `_by_version`, and at least as many as in `_arrived`."""

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks in order of arrival."""
        return (chunk for chunk in self._arrived if chunk.slot >= 0)

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Hold `chunks`, which arrived in this order."""
        for slot, chunk in enumerate(chunks, len(self._slots)):
            assert chunk.slot < 0
            chunk.slot = slot
            self._by_version.setdefault(chunk.oldest_version, []).append(chunk)
        self._slots += chunks
        self._arrived += chunks
        self._num_listed += len(chunks)

    def remove(self, chunks: Iterable[Chunk]) -> None:
        """Hold them no longer; the last slot takes the place of each."""
        slots = self._slots
        for chunk in chunks:
            slot, last = chunk.slot, slots.pop()
            if last is not chunk:
                slots[slot] = last
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

    def oldest(self, count: int) -> list[Chunk]:
        """The `count` chunks that arrived first."""
        arrived = self._arrived
        # A full buffer asks at every addition, and must not pass over the same ones again.
        while arrived and arrived[0].slot < 0:
            arrived.popleft()
        return list(islice(self, count))

    def stale(self, min_version: int) -> list[Chunk]:
        """The chunks with a fragment of a version before `min_version`."""
        # By version, of which there are a few, and not by chunk: every new version asks.
        versions = sorted(version for version in self._by_version if version < min_version)
        return [chunk for version in versions for chunk in self._by_version[version] if chunk.slot >= 0]

    def sample(self, count: int, seed: tuple[int, ...]) -> list[Chunk]:
        """`count` distinct chunks; the same ones for the same history and `seed`."""
        size = len(self._slots)
        assert count <= size
        # A generator for each draw: the seed counts the draws, so a restart has no other state to keep.
        slots = np.random.default_rng(seed).choice(size, count, replace=False)
        return [self._slots[slot] for slot in slots.tolist()]


class Sequences:
    """The partial chunk of every worker that has one.

    Invariants: the fragments of one worker here follow each other without a gap, and are fewer than make a
    chunk.

    >>> sequences = Sequences(fragments_per_chunk=2)
    >>> sequences.add(Fragment("a", "w", 0, -1), now_s=0.0)
    ([], [])
    >>> useless, complete = sequences.add(Fragment("b", "w", 2, -1), now_s=1.0)  # 1 was lost
    >>> [fragment.fragment_id for fragment in useless], complete
    (['a'], [])
    """

    def __init__(self, fragments_per_chunk: int) -> None:
        self._fragments_per_chunk = fragments_per_chunk
        # With the time of the last; the worker that has been silent for longest comes first.
        self._partials: dict[str, tuple[list[Fragment], float]] = {}

    def __iter__(self) -> Iterator[Fragment]:
        for fragments, _ in self._partials.values():
            yield from fragments

    def __len__(self) -> int:
        return sum(len(fragments) for fragments, _ in self._partials.values())

    def add(self, fragment: Fragment, now_s: float) -> tuple[list[Fragment], list[Fragment]]:
        """The fragments dropped at a gap, and the chunk that `fragment` completes; each may be empty."""
        # Taken out and put in again, its worker is behind all others: it was heard last.
        partial = self.drop_worker(fragment.worker_uuid)
        useless: list[Fragment] = []
        if partial and partial[-1].fid_in_worker + 1 != fragment.fid_in_worker:
            partial, useless = [], partial
        partial.append(fragment)
        if len(partial) == self._fragments_per_chunk:
            return useless, partial
        self._partials[fragment.worker_uuid] = partial, now_s
        return useless, []

    def drop_stale(self, min_version: float) -> list[Fragment]:
        """Remove those of older versions, and what precedes them: no chunk without them can hold it."""
        dropped = []
        for worker, (partial, heard_s) in list(self._partials.items()):
            stale = [i for i, fragment in enumerate(partial) if fragment.model_version < min_version]
            if stale:
                dropped += partial[: stale[-1] + 1]
                if rest := partial[stale[-1] + 1 :]:
                    # With its old time, in its old place: the worker has not said anything.
                    self._partials[worker] = rest, heard_s
                else:
                    del self._partials[worker]
        return dropped

    def drop_worker(self, worker_uuid: str) -> list[Fragment]:
        """Remove those of this worker."""
        return self._partials.pop(worker_uuid, ([], 0.0))[0]

    def heard_last(self) -> tuple[str, float] | None:
        """The worker silent for longest, and when it was heard; None: there is no partial chunk."""
        return next(((worker, heard_s) for worker, (_, heard_s) in self._partials.items()), None)

    def hear_all(self, now_s: float) -> None:
        """Count all workers as heard now."""
        self._partials = {worker: (partial, now_s) for worker, (partial, _) in self._partials.items()}
