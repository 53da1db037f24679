"""Whose turn it is to write to an SQLite file, among processes.

SQLite lets a writer that finds the file locked sleep and try again, for up to 100 ms each time; under
competition some wait for seconds while others write. Here they wait in the kernel's queue for a lock on a
file beside the database, and are woken when the one before them is done. The death of a process gives its
lock back.

It protects nothing (SQLite's own lock does that) and orders only those who ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import sqlalchemy as sa

from forebay.replay.sql_schema import is_in_memory

try:
    import fcntl
except ImportError:  # not a POSIX system: SQLite's own waiting has to do
    fcntl = None  # type: ignore[assignment]

SUFFIX = "-turn"


def turns_of(url: sa.URL) -> Callable[[], AbstractContextManager[None]]:
    """A context in which it is one's turn to write to the database of `url`.

    >>> my_turn = turns_of(sa.make_url("sqlite:///runs/buffer.db"))
    >>> with my_turn(), engine.begin() as connection: ...
    """
    if fcntl is None or url.get_backend_name() != "sqlite" or is_in_memory(url):
        return nullcontext
    path = f"{url.database}{SUFFIX}"

    @contextmanager
    def turn() -> Iterator[None]:
        with open(path, "wb") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            # Closing the file unlocks it.
            yield

    return turn
