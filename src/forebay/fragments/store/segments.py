"""The rows of chunks on disk: many chunks in one row that is never rewritten, and what changes beside it.

::

    chunks completed between two commits --> segment row: the chunks            written once
    served, given a priority, gone       --> uses row, priorities row: a number for each of them
    few of its chunks are left           --> these move to the newest segment, its rows are deleted

With a row for each chunk, writing rows would cost more than all else together: a batch changes as many as it
has chunks.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from forebay.fragments.chunks import Chunk, Fragment

GONE = 2**32 - 1
"""In place of the uses of a chunk that has left."""
MAX_CHUNKS = 256
"""Of a segment: using one of them writes a kilobyte."""
MIN_SHARE = 4
"""Of its chunks, one in so many must be left: rows are at most so many times what they have to be."""

Row = tuple[int, tuple[Fragment, ...], int, float, int]
"""Of a chunk: number, fragments, oldest version, priority, uses."""
KINDS = ("segment", "uses", "priorities")
RowKey = tuple[str, int]
"""Kind and number."""


class _Segment:
    __slots__ = ("left", "number", "priorities", "size", "uses")

    def __init__(self, number: int, chunks: Sequence[Chunk]) -> None:
        self.number = number
        self.size = len(chunks)
        self.left = dict.fromkeys(chunks)
        """Chunks that are held, in order."""
        self.uses = array("I", [chunk.uses for chunk in chunks])
        self.priorities: array[float] | None = None
        """None: still those in the segment row."""


class Segments:
    """What is to be written of chunks since the last commit.

    Invariants: a chunk is in one segment, or not written yet; the rows, with the numbers beside them, hold
    exactly the chunks that are held.

    >>> segments = Segments()
    >>> segments.add([Chunk(0, (), oldest_version=3, priority=1.0)])
    >>> list(segments.take_rows())
    [('segment', 0)]
    """

    def __init__(self, replaced: Collection[int] = ()) -> None:
        """`replaced` are numbers of segments on disk whose chunks are added here anew."""
        self._num_segments = max(replaced, default=-1) + 1
        self._new: dict[int, Chunk] = {}
        self._used: dict[int, _Segment] = {}
        self._valued: dict[int, _Segment] = {}
        self._deleted = list(replaced)

    @property
    def has_changed(self) -> bool:
        """Whether there are rows to be taken."""
        return bool(self._new or self._used or self._valued or self._deleted)

    def add(self, chunks: Iterable[Chunk]) -> None:
        """`chunks` are held from now on."""
        self._new.update([(chunk.number, chunk) for chunk in chunks])

    def set_uses(self, chunks: Iterable[Chunk]) -> None:
        """Their uses have changed."""
        used = self._used
        for chunk in chunks:
            segment = chunk.segment
            if segment is not None:
                segment.uses[chunk.place] = chunk.uses
                used[segment.number] = segment

    def set_priority(self, chunk: Chunk) -> None:
        """Its priority has changed."""
        segment: _Segment | None = chunk.segment
        if segment is None:
            return
        if segment.priorities is None:
            segment.priorities = array("d", bytes(8 * segment.size))
            for other in segment.left:
                segment.priorities[other.place] = other.priority
        segment.priorities[chunk.place] = chunk.priority
        self._valued[segment.number] = segment

    def remove(self, chunks: Iterable[Chunk]) -> None:
        """They are held no longer."""
        touched: dict[int, _Segment] = {}
        for chunk in chunks:
            segment = chunk.segment
            if segment is None:
                del self._new[chunk.number]
            else:
                del segment.left[chunk]
                segment.uses[chunk.place] = GONE
                touched[segment.number] = segment
        for segment in touched.values():
            if len(segment.left) * MIN_SHARE <= segment.size:
                self._dissolve(segment)
            else:
                self._used[segment.number] = segment

    def _dissolve(self, segment: _Segment) -> None:
        for chunk in segment.left:
            chunk.segment = None
            self._new[chunk.number] = chunk
        self._used.pop(segment.number, None)
        self._valued.pop(segment.number, None)
        self._deleted.append(segment.number)

    def take_rows(self) -> dict[RowKey, Any]:
        """The rows that have changed since the last call; None: to be deleted."""
        rows: dict[RowKey, Any] = {}
        for number in self._deleted:
            rows |= {(kind, number): None for kind in KINDS}
        rows |= {("uses", number): bytes(segment.uses) for number, segment in self._used.items()}
        for number, segment in self._valued.items():
            assert segment.priorities is not None
            rows["priorities", number] = bytes(segment.priorities)
        new = list(self._new.values())
        for start in range(0, len(new), MAX_CHUNKS):
            chunks = new[start : start + MAX_CHUNKS]
            rows["segment", self._write(chunks).number] = [
                (chunk.number, chunk.fragments, chunk.oldest_version, chunk.priority, chunk.uses)
                for chunk in chunks
            ]
        for changed in (self._new, self._used, self._valued, self._deleted):
            changed.clear()
        return rows

    def _write(self, chunks: list[Chunk]) -> _Segment:
        segment = _Segment(self._num_segments, chunks)
        self._num_segments += 1
        for place, chunk in enumerate(chunks):
            chunk.segment, chunk.place = segment, place
        return segment


def read(
    segments: Mapping[int, list[Row]], uses: Mapping[int, bytes], priorities: Mapping[int, bytes]
) -> list[Chunk]:
    """The chunks that these rows hold, in the order in which they were completed."""
    held = []
    for number, rows in segments.items():
        chunks = [Chunk(*row) for row in rows]
        counts = _numbers("I", uses.get(number)) or [chunk.uses for chunk in chunks]
        values = _numbers("d", priorities.get(number)) or [chunk.priority for chunk in chunks]
        for chunk, num_uses, priority in zip(chunks, counts, values, strict=True):
            if num_uses != GONE:
                chunk.uses, chunk.priority = num_uses, priority
                held.append(chunk)
    return sorted(held, key=lambda chunk: chunk.number)


def _numbers(kind: str, row: bytes | None) -> Sequence[Any]:
    numbers = array(kind)
    numbers.frombytes(row or b"")
    return numbers
