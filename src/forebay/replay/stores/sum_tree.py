"""Rows in order of arrival with their priorities, so that one is found by its share of the sum in O(log n).

::

    rows in order of arrival --priority of each--> leaves of a binary tree of sums
    fraction x sum of all --down the tree--> row

The tree holds no row of the store, only ids and priorities. Every node is computed anew from its two children
and never adjusted by a difference, so rounding errors do not pile up and the sum of no priorities is 0.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


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

    def __init__(self, timestamp_ids: Sequence[int], uids: Sequence[int], priorities: Sequence[float]) -> None:
        """One entry per row in each, in any order of rows."""
        self._late: dict[int, tuple[int, float]] = {}
        """Rows that came back to a place for which there is no leaf; the next draw makes all leaves anew."""
        self._build(np.array(timestamp_ids, np.int64), np.array(uids, np.int64), np.array(priorities, float))

    def _build(self, ids: NDArray[np.int64], uids: NDArray[np.int64], priorities: NDArray[Any]) -> None:
        order = np.argsort(ids, kind="stable")
        self._ids, self._uids = (array("q", column[order].tobytes()) for column in (ids, uids))
        """The timestamp_id, ascending, and the uid of each leaf."""
        self._is_there = bytearray(b"\1") * len(order)
        """Whether the row of each leaf is not taken out."""
        # As many leaves are free as are taken, so that this is done again only when the rows have doubled.
        level = np.zeros(2 << len(order).bit_length())
        level[: len(order)] = priorities[order]
        levels = [level]
        while len(level) > 1:
            level = level[::2] + level[1::2]
            levels.append(level)
        # Node i has the children 2i and 2i + 1; the second half are the leaves. Node 0 is not used.
        self._sums = array("d", np.concatenate([[0.0], *reversed(levels)]).tobytes())

    def add(self, timestamp_id: int, uid: int, priority: float) -> None:
        """Put in a row that is not there yet."""
        leaf = bisect_left(self._ids, timestamp_id)
        if leaf == len(self._ids) < len(self._sums) // 2:
            self._ids.append(timestamp_id)
            self._uids.append(uid)
            self._is_there.append(1)
        # No leaf is free for it: its place is between two others, or all are in use.
        elif leaf == len(self._ids) or self._ids[leaf] != timestamp_id:
            self._late[timestamp_id] = uid, priority
            return
        self._uids[leaf], self._is_there[leaf] = uid, 1
        self._set(leaf, priority)

    def discard(self, timestamp_id: int) -> None:
        """Take out a row; one that is not there is ignored."""
        if self._late.pop(timestamp_id, None) is not None:
            return
        leaf = bisect_left(self._ids, timestamp_id)
        if leaf < len(self._ids) and self._ids[leaf] == timestamp_id:
            self._take_out(leaf)

    def draw(self, count: int, random: Callable[[], float]) -> list[int]:
        """Take out up to `count` rows and return their uids as drawn, those of priority 0 last, as arrived.

        `random` gives a number of [0, 1) for each row of another priority.
        """
        if self._late:
            self._merge_late()
        drawn: list[int] = []
        while len(drawn) < count:
            leaf = self._find(random() * self._sums[1]) if self._sums[1] > 0 else self._is_there.find(1)
            if leaf < 0:
                break
            drawn.append(self._uids[leaf])
            self._take_out(leaf)
        return drawn

    def _merge_late(self) -> None:
        kept = np.frombuffer(self._is_there, bool)
        leaves = np.frombuffer(self._sums)[len(self._sums) // 2 :][: len(kept)]
        new = list(self._late), *zip(*self._late.values(), strict=True)
        self._late = {}
        columns = zip((self._ids, self._uids, leaves), new, strict=True)
        self._build(*(np.concatenate([np.asarray(old)[kept], late]) for old, late in columns))

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

    def _take_out(self, leaf: int) -> None:
        self._is_there[leaf] = 0
        self._set(leaf, 0.0)

    def _set(self, leaf: int, priority: float) -> None:
        node, sums = len(self._sums) // 2 + leaf, self._sums
        sums[node] = priority
        while node := node // 2:
            sums[node] = sums[2 * node] + sums[2 * node + 1]
