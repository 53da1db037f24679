"""How many hold each payload: a chunk or partial chunk counts once, every lease once.

::

    hold --> count 1, 2, ... --let_go--> 0: the payload is free, and nobody can come to hold it again
"""

from __future__ import annotations

from collections.abc import Iterable

from forebay.fragments.chunks import Fragment


class References:
    """Explicit counts; nothing depends on the garbage collector.

    >>> references = References()
    >>> references.hold([fragment])
    >>> references.let_go([fragment])
    ['id']
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, fragment_id: str) -> bool:
        return fragment_id in self._counts

    def hold(self, fragments: Iterable[Fragment]) -> None:
        """One holder more for each."""
        for fragment in fragments:
            self._counts[fragment.fragment_id] = self._counts.get(fragment.fragment_id, 0) + 1

    def let_go(self, fragments: Iterable[Fragment]) -> list[str]:
        """One holder less for each; the ids that nothing holds now."""
        free = []
        for fragment in fragments:
            self._counts[fragment.fragment_id] -= 1
            if not self._counts[fragment.fragment_id]:
                del self._counts[fragment.fragment_id]
                free.append(fragment.fragment_id)
        return free
