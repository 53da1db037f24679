"""How a SQL store begins its transactions: to read one moment, or to write, if it is still the owner.

::

    claim ------> a new owner in the database
    writing ----> (its turn) -> is this store, which has claimed it, the owner still? -> changes -> commit

The turn. SQLite lets a writer that finds the file locked sleep and try again, for up to 100 ms each time;
under competition some writers wait for seconds while others write. Here they wait in the kernel's queue for a
lock on a file beside the database, and are woken when the one before them is done. The death of a process
gives its lock back. One that is stopped or hangs keeps it, so no writer waits longer than `LIMIT_S`. This
lock only orders the writers; SQLite's own lock protects the content.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext

import sqlalchemy as sa

from forebay.replay.stores.errors import OwnerLost, StoreBusy
from forebay.replay.stores.sql.connections import is_in_memory
from forebay.replay.stores.sql.schema import insert_or_update, meta

try:
    import fcntl
except ImportError:  # not a POSIX system: SQLite's own waiting has to do
    fcntl = None  # type: ignore[assignment]

LIMIT_S = 60.0
"""A turn takes milliseconds; SQLite's own lock is waited for as long (`connections.BUSY_S`)."""


class Transactions:
    """Transactions of one store; any thread may begin one."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._owner: str | None = None

    def claim(self) -> None:
        """Fence off every earlier owner of the content."""
        owner = secrets.token_hex(16)
        with self.writing(is_fenced=False) as connection:
            insert_or_update(connection, meta, [{"name": "owner", "value": owner}], "value")
        self._owner = owner

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A transaction that sees one moment of the database."""
        with self._engine.connect() as connection:
            if connection.dialect.name == "postgresql":
                connection = connection.execution_options(isolation_level="REPEATABLE READ")
            with connection.begin():
                yield connection

    @contextmanager
    def writing(self, *, is_fenced: bool = True) -> Iterator[sa.Connection]:
        """A transaction that is committed at the end, or rolled back by an error.

        Raises:
            OwnerLost: this store has claimed the content, and another one has done so since.
            StoreBusy: another process writes and does not come to an end.
        """
        with (
            write_turn(self._engine.url),
            self._engine.connect().execution_options(forebay_write=True) as connection,
            connection.begin(),
        ):
            if is_fenced and self._owner is not None:
                # Locked, so that a claim waits for this transaction, or is seen by it.
                owner = sa.select(meta.c.value).where(meta.c.name == "owner").with_for_update(read=True)
                if connection.scalar(owner) != self._owner:
                    raise OwnerLost(
                        "another process owns the database of the replay buffer by now, and this one must "
                        "not change it any more; end this process"
                    )
            yield connection


def write_turn(url: sa.URL) -> AbstractContextManager[None]:
    """A block in which it is this thread's turn to write to the database of `url`.

    Raises:
        StoreBusy: the turn does not come.
    """
    if fcntl is None or url.get_backend_name() != "sqlite" or is_in_memory(url):
        return nullcontext()
    return _turn(f"{url.database}-turn")


@contextmanager
def _turn(path: str) -> Iterator[None]:
    file = open(path, "wb")  # noqa: SIM115
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        turn: Future[None] = Future()

        def wait() -> None:
            fcntl.lockf(file, fcntl.LOCK_EX)
            if turn.set_running_or_notify_cancel():
                turn.set_result(None)
            else:
                file.close()

        # In a thread, because the kernel's queue knows no limit.
        threading.Thread(target=wait, name="forebay-sql-turn", daemon=True).start()
        try:
            turn.result(LIMIT_S)
        except TimeoutError:
            if turn.cancel():
                raise StoreBusy(
                    f"another process has kept {path!r} locked for {LIMIT_S:g} s: it hangs or was stopped "
                    f"while it wrote; end it (fuser {path} names it)"
                ) from None
    # Closing the file unlocks it.
    with file:
        yield
