"""The content of a SQL store as a snapshot reads it: all rows at once, their payloads a few at a time.

::

    transaction: rows, counters --> StoredItems --iterated--> row with payload, ...   and let go again
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from forebay.replay.stores.contract import StorageItem, copy_row

GROUPS_AT_ONCE = 32
"""Payloads in memory beyond those that the reader holds: of long groups, of 5 MB each, 160 MB."""


class StoredItems:
    """The rows, with their payloads when they are walked; usable as long as the transaction is open.

    >>> items = StoredItems(rows, partial(attach_payloads, connection, codec=codec))
    >>> sum(len(item.item) for item in items)
    """

    def __init__(self, rows: Sequence[StorageItem], attach: Callable[[list[StorageItem]], None]) -> None:
        self._rows = rows
        self._attach = attach

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[StorageItem]:
        """The rows in order; ValueError if a payload is damaged."""
        rows = iter(self._rows)
        while items := [copy_row(row) for row in islice(rows, GROUPS_AT_ONCE)]:
            self._attach(items)
            items.reverse()
            while items:
                yield items.pop()
