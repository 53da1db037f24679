"""Whose turn it is to write to an SQLite file, among processes.

SQLite lets a writer that finds the file locked sleep and try again, for up to 100 ms each time; under
competition some wait for seconds while others write. Here they wait in the kernel's queue for a lock on a
file beside the database, and are woken when the one before them is done. The death of a process gives its
lock back; one that is stopped or hangs keeps it, so nobody waits longer than `LIMIT_S`.

It protects nothing (SQLite's own lock does that) and orders only those who ask.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import IO

import sqlalchemy as sa

from forebay.replay.stores.errors import StoreBusy
from forebay.replay.stores.sql.schema import is_in_memory

try:
    import fcntl
except ImportError:  # not a POSIX system: SQLite's own waiting has to do
    fcntl = None  # type: ignore[assignment]

SUFFIX = "-turn"

LIMIT_S = 60.0
"""A turn takes milliseconds; SQLite's own lock is waited for as long (`sql_schema.BUSY_S`)."""


def turns_of(url: sa.URL) -> Callable[[], AbstractContextManager[None]]:
    """A context in which it is one's turn to write to the database of `url`; `StoreBusy` if it does not come.

    >>> my_turn = turns_of(sa.make_url("sqlite:///runs/buffer.db"))
    >>> with my_turn(), engine.begin() as connection: ...
    """
    if fcntl is None or url.get_backend_name() != "sqlite" or is_in_memory(url):
        return nullcontext
    path = f"{url.database}{SUFFIX}"

    @contextmanager
    def turn() -> Iterator[None]:
        file = open(path, "wb")  # noqa: SIM115
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            _wait_in_line(file, path)
        # Closing the file unlocks it.
        with file:
            yield

    return turn


def _wait_in_line(file: IO[bytes], path: str) -> None:
    """Lock the file when those before are done; in a thread, because the kernel's queue knows no limit."""
    turn: Future[None] = Future()

    def wait() -> None:
        fcntl.lockf(file, fcntl.LOCK_EX)
        if turn.set_running_or_notify_cancel():
            turn.set_result(None)
        else:
            file.close()

    threading.Thread(target=wait, name="forebay-sql-turn", daemon=True).start()
    try:
        turn.result(LIMIT_S)
    except TimeoutError:
        if turn.cancel():
            raise StoreBusy(
                f"another process has kept {path!r} locked for {LIMIT_S:g} s: it hangs or was stopped while "
                f"it wrote; end it (fuser {path} names it)"
            ) from None
