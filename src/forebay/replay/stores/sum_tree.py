"""Rows in order of arrival with their priorities, so that one is found by its share of the sum in O(log n).

::

    rows in order of arrival --priority of each--> leaves of a binary tree of sums
    fraction x sum of all --down the tree--> row

The tree holds no row of the store, only ids and priorities. Every node is computed anew from its two children
and never adjusted by a difference, so rounding errors do not pile up and the sum of no priorities is 0.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable

import numpy as np


class SumTree:
    """Priorities of rows in order of arrival, with draws without replacement in proportion to them.

    Draws take rows out. The row that a fraction u of [0, 1) draws is the first, in order of arrival, at which
    the running sum of the priorities exceeds ``u * sum``. Where these sums are exact (whole numbers, or
    multiples of the same power of two, below 2**53 of them), the same fractions draw the same rows however
    the tree came to its content; else rounding may move a draw on the boundary of two rows to the other.

    >>> tree = SumTree(timestamp_ids=[0, 1, 2], uids=[10, 11, 12], priorities=[1.0, 3.0, 0.0])
    >>> tree.draw(3, iter([0.5, 0.9]).__next__)
    [11, 10, 12]
    """

    def __init__(
        self, timestamp_ids: Iterable[int], uids: Iterable[int], priorities: Iterable[float]
    ) -> None:
        """One entry per row in each, in any order of rows."""
        pairs = zip(uids, priorities, strict=True)
        self._rows: dict[int, tuple[int, float]] = dict(zip(timestamp_ids, pairs, strict=True))
        self._order: list[int] = []
        """The timestamp_id of each leaf, ascending; of rows that are gone, too."""
        # Node i has the children 2i and 2i + 1; the second half are the leaves. Empty: to be computed.
        self._sums: array[float] = array("d")
        self._first = 0
        """No row before this leaf is left."""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, timestamp_id: int, uid: int, priority: float) -> None:
        """Put in a row that is not there yet."""
        self._rows[timestamp_id] = uid, priority
        leaf = len(self._order)
        is_full = leaf >= len(self._sums) // 2
        if is_full or (self._order and timestamp_id <= self._order[-1]):
            # No leaf is free, or the row arrived before others: the next draw computes all anew.
            self._sums = array("d")
        else:
            self._order.append(timestamp_id)
            self._set(leaf, priority)

    def discard(self, timestamp_id: int) -> None:
        """Take out a row; one that is not there is ignored."""
        if self._rows.pop(timestamp_id, None) is not None and self._sums:
            self._set(bisect_left(self._order, timestamp_id), 0.0)

    def draw(self, count: int, random: Callable[[], float]) -> list[int]:
        """Take out up to `count` rows and return their uids as drawn, those of priority 0 last, as arrived.

        `random` gives a number of [0, 1) for each row of another priority.
        """
        drawn: list[int] = []
        while len(drawn) < count and self._rows:
            if not self._sums:
                self._sum_all()
            if self._sums[1] > 0:
                leaf = self._find(random() * self._sums[1])
            else:
                while self._order[self._first] not in self._rows:
                    self._first += 1
                leaf = self._first
            timestamp_id = self._order[leaf]
            drawn.append(self._rows[timestamp_id][0])
            self.discard(timestamp_id)
        return drawn

    def _find(self, target: float) -> int:
        """The leaf at which the running sum exceeds `target`; its priority is not 0."""
        node, sums = 1, self._sums
        while node < len(sums) // 2:
            node *= 2
            # A rounded difference must not lead into a part that holds nothing.
            if target >= sums[node] and sums[node + 1] > 0:
                target -= sums[node]
                node += 1
        return node - len(sums) // 2

    def _set(self, leaf: int, priority: float) -> None:
        node, sums = len(self._sums) // 2 + leaf, self._sums
        sums[node] = priority
        while node := node // 2:
            sums[node] = sums[2 * node] + sums[2 * node + 1]

    def _sum_all(self) -> None:
        self._order = sorted(self._rows)
        self._first = 0
        # As many leaves are free as are taken, so that this is done again only when the rows have doubled.
        level = np.zeros(2 << len(self._order).bit_length())
        level[: len(self._order)] = [priority for _, priority in map(self._rows.__getitem__, self._order)]
        levels = [level]
        while len(level) > 1:
            level = level[::2] + level[1::2]
            levels.append(level)
        # Node 0 is not used.
        self._sums = array("d", np.concatenate([[0.0], *reversed(levels)]).tobytes())
