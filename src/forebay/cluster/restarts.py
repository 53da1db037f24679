"""Which parts were started again, how often and why: counted here, and told to whoever keeps the books.

::

    Supervisor, buffer, trainer --note(part, reason)--> counts
                                                    '-> the listener; without one, kept until there is one
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

logger = logging.getLogger(__name__)

Listener = Callable[[str, str], None]
"""Takes the name of a part, and why it was started again."""


class Restarts:
    """The restarts of a cluster.

    Invariants: each is counted once, and told once if anybody ever listens; in order. What a listener raises
    is logged: books that cannot be written are no reason to give up a part that is back.

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
                _tell(listener, part, reason)

    def note(self, part: str, reason: str) -> None:
        """`part` is there again, after it was lost because of `reason`."""
        self.counts[part.split()[0]] += 1
        if self._listener is None:
            self._untold.append((part, reason))
        else:
            _tell(self._listener, part, reason)


def _tell(listener: Listener, part: str, reason: str) -> None:
    try:
        listener(part, reason)
    # Whatever it is: see the class.
    except Exception:
        logger.exception("the restart of %s (%s) could not be noted", part, reason)
