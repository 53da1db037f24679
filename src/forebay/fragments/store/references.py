"""How many hold each payload: a chunk or partial chunk counts once, every lease once.

::

    hold --> count 1, 2, ... --let_go--> 0: the payload is free, and the id is remembered for a while:
                                            who announces it again comes too late
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from forebay.fragments.chunks import Fragment

NUM_REMEMBERED = 1 << 15
"""Ids that are remembered at least when nothing holds them any more: 3 MB, and longer than a caller takes to
send an addition again whose answer was lost."""


class References:
    """Explicit counts; nothing depends on the garbage collector.

    >>> references = References()
    >>> references.hold([fragment])
    >>> references.let_go([fragment])
    ['id']
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._gone: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, fragment_id: str) -> bool:
        return fragment_id in self._counts

    def take(self, fragment_id: str) -> bool:
        """Hold what arrives; False: it is held already, or was one of the last that were."""
        if fragment_id in self._counts or fragment_id in self._gone:
            return False
        self._counts[fragment_id] = 1
        return True

    def hold(self, fragments: Iterable[Fragment]) -> None:
        """One holder more for each."""
        counts = self._counts
        for fragment in fragments:
            fragment_id = fragment.fragment_id
            counts[fragment_id] = counts.get(fragment_id, 0) + 1

    def let_go(self, fragments: Iterable[Fragment]) -> list[str]:
        """One holder less for each; the ids that nothing holds now."""
        counts, free = self._counts, []
        for fragment in fragments:
            fragment_id = fragment.fragment_id
            count = counts.pop(fragment_id) - 1
            if count:
                counts[fragment_id] = count
            else:
                free.append(fragment_id)
        self._gone |= dict.fromkeys(free)
        self._forget()
        return free

    def _forget(self) -> None:
        """Of what has gone, remember the last ones only."""
        if len(self._gone) > 2 * NUM_REMEMBERED:
            for fragment_id in list(islice(self._gone, NUM_REMEMBERED)):
                del self._gone[fragment_id]
