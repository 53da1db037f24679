"""Which parts were started again, how often and why: counted here, and told to whoever keeps the books.

::

    Supervisor, buffer, trainer --note(part, reason)--> counts
                                                    '-> the listener; without one, kept until there is one
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

Listener = Callable[[str, str], None]
"""Takes the name of a part, and why it was started again."""


class Restarts:
    """The restarts of a cluster.

    Invariant: each is counted once, and told once if anybody ever listens; in order.

    >>> restarts = Restarts()
    >>> restarts.note("engine 0", "its process has ended")
    >>> restarts.listener = print
    engine 0 its process has ended
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """By kind: "engine" for "engine 0"."""
        self._listener: Listener | None = None
        self._untold: list[tuple[str, str]] = []

    @property
    def listener(self) -> Listener | None:
        """Who is told; None while a run gives way to the next."""
        return self._listener

    @listener.setter
    def listener(self, listener: Listener | None) -> None:
        self._listener = listener
        if listener is not None:
            untold, self._untold = self._untold, []
            for part, reason in untold:
                listener(part, reason)

    def note(self, part: str, reason: str) -> None:
        """`part` is there again, after it was lost because of `reason`."""
        self.counts[part.split()[0]] += 1
        if self._listener is None:
            self._untold.append((part, reason))
        else:
            self._listener(part, reason)
