"""Rows in order of arrival with their priorities, so that one is found by its share of the sum in O(log n).

::

    blocks of up to BLOCK_ROWS rows, in order --sum of each--> leaves of a binary tree of sums
    fraction x sum of all --down the tree--> block --running sum--> row

The tree holds no row of the store, only ids and priorities. Every node is computed anew from its two children
and never adjusted by a difference, so rounding errors do not pile up and the sum of no priorities is 0.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

BLOCK_ROWS = 512
"""A full block is split in two. A change sums one block (2 us at this size) and log2(blocks) nodes."""


class _Block:
    """Neighboring rows in three arrays, side by side in memory: a block is summed as a whole, and often."""

    __slots__ = ("priorities", "timestamp_ids", "total", "uids")

    def __init__(self, timestamp_ids: array[int], uids: array[int], priorities: array[float]) -> None:
        self.timestamp_ids = timestamp_ids
        self.uids = uids
        self.priorities = priorities
        self.total = sum(priorities)


class SumTree:
    """Priorities of rows in order of arrival, with draws without replacement in proportion to them.

    Draws take rows out. The row that a fraction u of [0, 1) draws is the first, in order of arrival, at which
    the running sum of the priorities exceeds ``u * sum``. Where these sums are exact (whole numbers, or
    multiples of the same power of two, below 2**53 of them), the same fractions draw the same rows however
    the tree came to its content; else rounding may move a draw on the very boundary of two rows to the other.

    >>> tree = SumTree(timestamp_ids=[0, 1, 2], uids=[10, 11, 12], priorities=[1.0, 3.0, 0.0])
    >>> tree.draw(3, iter([0.5, 0.9]).__next__)
    [11, 10, 12]
    """

    def __init__(
        self, timestamp_ids: Sequence[int], uids: Sequence[int], priorities: Sequence[float]
    ) -> None:
        """One entry per row in each, in any order of rows."""
        order = np.argsort(np.asarray(timestamp_ids, np.int64), kind="stable")
        ids, names = (np.asarray(column, np.int64)[order] for column in (timestamp_ids, uids))
        weights = np.asarray(priorities, np.float64)[order]
        self._blocks: list[_Block] = []
        for start in range(0, len(order), BLOCK_ROWS):
            part = slice(start, start + BLOCK_ROWS)
            columns = array("q", ids[part].tobytes()), array("q", names[part].tobytes())
            self._blocks.append(_Block(*columns, array("d", weights[part].tobytes())))
        # Node i has the children 2i and 2i + 1; the second half are the blocks. Empty: to be computed.
        self._sums: list[float] = []

    def __len__(self) -> int:
        return sum(len(block.uids) for block in self._blocks)

    def add(self, timestamp_id: int, uid: int, priority: float) -> None:
        """Put in a row that is not there yet."""
        number = self._block_of(timestamp_id)
        if number == len(self._blocks):
            if not number or len(self._blocks[-1].uids) >= BLOCK_ROWS:
                self._blocks.append(_Block(array("q"), array("q"), array("d")))
                self._sums = []
            number = len(self._blocks) - 1
        block = self._blocks[number]
        place = bisect_left(block.timestamp_ids, timestamp_id)
        block.timestamp_ids.insert(place, timestamp_id)
        block.uids.insert(place, uid)
        block.priorities.insert(place, priority)
        if len(block.uids) > BLOCK_ROWS:
            self._split(number)
        else:
            self._sum_up(number)

    def discard(self, timestamp_id: int) -> None:
        """Take out a row; one that is not there is ignored."""
        number = self._block_of(timestamp_id)
        if number == len(self._blocks):
            return
        block = self._blocks[number]
        place = bisect_left(block.timestamp_ids, timestamp_id)
        if block.timestamp_ids[place] == timestamp_id:
            self._remove(number, place)

    def draw(self, count: int, random: Callable[[], float]) -> list[int]:
        """Take out up to `count` rows and return their uids as drawn, those of priority 0 last, as arrived.

        `random` gives a number of [0, 1) for each row of another priority.
        """
        drawn: list[int] = []
        while len(drawn) < count and self._blocks:
            if not self._sums:
                self._sum_all()
            number, place = self._find(random() * self._sums[1]) if self._sums[1] > 0 else (0, 0)
            drawn.append(self._blocks[number].uids[place])
            self._remove(number, place)
        return drawn

    def _block_of(self, timestamp_id: int) -> int:
        """The first block that ends at or after this row; the number of blocks if none does."""
        return bisect_left(self._blocks, timestamp_id, key=lambda block: block.timestamp_ids[-1])

    def _find(self, target: float) -> tuple[int, int]:
        """Block and place of the row at which the running sum exceeds `target`; its priority is not 0."""
        node = 1
        while node < len(self._sums) // 2:
            node *= 2
            # A rounded difference must not lead into a part that holds nothing.
            if target >= self._sums[node] and self._sums[node + 1] > 0:
                target -= self._sums[node]
                node += 1
        number = node - len(self._sums) // 2
        running = list(accumulate(self._blocks[number].priorities))
        place = bisect_right(running, target)
        return number, place if place < len(running) else bisect_left(running, running[-1])

    def _remove(self, number: int, place: int) -> None:
        block = self._blocks[number]
        del block.timestamp_ids[place], block.uids[place], block.priorities[place]
        if block.uids:
            self._sum_up(number)
        else:
            del self._blocks[number]
            self._sums = []

    def _split(self, number: int) -> None:
        whole, half = self._blocks[number], BLOCK_ROWS // 2
        self._blocks[number : number + 1] = [
            _Block(whole.timestamp_ids[part], whole.uids[part], whole.priorities[part])
            for part in (slice(half), slice(half, None))
        ]
        self._sums = []

    def _sum_up(self, number: int) -> None:
        """The sum of this block, and those that it is part of unless they are to be computed anyway."""
        block = self._blocks[number]
        block.total = sum(block.priorities)
        if self._sums:
            node = len(self._sums) // 2 + number
            self._sums[node] = block.total
            while node := node // 2:
                self._sums[node] = self._sums[2 * node] + self._sums[2 * node + 1]

    def _sum_all(self) -> None:
        width = 1 << (len(self._blocks) - 1).bit_length()
        leaves = [block.total for block in self._blocks]
        self._sums = [0.0] * width + leaves + [0.0] * (width - len(leaves))
        for node in range(width - 1, 0, -1):
            self._sums[node] = self._sums[2 * node] + self._sums[2 * node + 1]
