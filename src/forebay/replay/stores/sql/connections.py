"""How a SQL store reaches its database: the engine for a path or a URL, its tables, its transactions.

::

    path, sqlite:///path --> write-ahead log; a transaction that may write takes the file at once (`direct`)
    postgresql://...     --> `postgres`: connections that notice when the server is lost

    claim ------> a new owner in the database
    writing ----> (its turn) -> is this store, which has claimed it, the owner still? -> changes -> commit

The turn. SQLite lets a writer that finds the file locked sleep and try again, for up to 100 ms each time;
under competition some writers wait for seconds while others write. Here they wait in the kernel's queue for a
lock on a file beside the database, and are woken when the one before them is done. The death of a process
gives its lock back. One that is stopped or hangs keeps it, so no writer waits longer than `LIMIT_S`. This
lock only orders the writers; SQLite's own lock protects the content.
"""

import fcntl
import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from forebay.aio.time_limits import start_thread
from forebay.replay.stores.errors import OwnerLost, StoreBusy
from forebay.replay.stores.sql import schema
from forebay.replay.stores.sql.direct import Connection, Direct

LIMIT_S = 60.0
"""How long a writer waits for its turn, and for SQLite's own lock, before it gives up; a write takes milliseconds."""


class Transactions:
    """Transactions of one store; any thread may begin one."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._owner: str | None = None
        self._kept: dict[str, sa.PoolProxiedConnection] = {}
        """Connections to SQLite by how they begin: to ask the pool for each transaction takes longer than a count."""

    def close(self) -> None:
        """Give the kept connections back to the pool, once no thread uses them."""
        while self._kept:
            self._kept.popitem()[1].close()

    def claim(self) -> None:
        """Fence off every earlier owner of the content."""
        owner = secrets.token_hex(16)
        with self.writing(is_fenced=False) as connection:
            schema.insert_or_update(connection, schema.meta, [{"name": "owner", "value": owner}], "value")
        self._owner = owner

    def reading(self) -> AbstractContextManager[Connection]:
        """A transaction that sees one moment of the database."""
        return self._begin("BEGIN", isolation_level="REPEATABLE READ")

    @contextmanager
    def _begin(self, sqlite: str, **postgresql: Any) -> Iterator[Connection]:
        """A transaction that SQLite begins with this statement, and PostgreSQL with these options.

        One that begins as a reader of SQLite and then writes would fail if another process wrote in between.
        """
        if self._engine.dialect.name == "postgresql":
            with self._engine.connect().execution_options(**postgresql) as connection, connection.begin():
                yield connection
            return
        try:
            pooled = self._kept.pop(sqlite, None) or self._engine.raw_connection()
            try:
                with closing(Direct(pooled.driver_connection)) as direct:
                    direct.exec_driver_sql(sqlite)
                    yield direct
                    direct.exec_driver_sql("COMMIT")
            except BaseException:
                # The pool rolls it back.
                pooled.close()
                raise
            if self._kept.setdefault(sqlite, pooled) is not pooled:
                pooled.close()
        except sqlite3.Error as error:
            raise sa.exc.DBAPIError.instance(None, None, error, sqlite3.Error) from error

    @contextmanager
    def writing(self, *, is_fenced: bool = True) -> Iterator[Connection]:
        """A transaction that is committed at the end, or rolled back by an error.

        Raises:
            OwnerLost: this store has claimed the content, and another one has done so since.
            StoreBusy: another process writes and does not come to an end.
        """
        with write_turn(self._engine.url), self._begin("BEGIN IMMEDIATE") as connection:
            if is_fenced and self._owner is not None and connection.scalar(_OWNER) != self._owner:
                raise OwnerLost(
                    "another process owns the database of the replay buffer by now, and this one must not "
                    "change it any more; end this process"
                )
            yield connection


_OWNER = sa.select(schema.meta.c.value).where(schema.meta.c.name == "owner").with_for_update(read=True)
"""Locked, so that a claim waits for the transaction, or is seen by it."""


@contextmanager
def write_turn(url: sa.URL) -> Iterator[None]:
    """A block in which it is this thread's turn to write to the database of `url`.

    Raises:
        StoreBusy: the turn does not come.
    """
    if url.get_backend_name() != "sqlite":
        yield
        return
    path = f"{url.database}-turn"
    file = open(path, "ab", buffering=0)  # noqa: SIM115
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        # In a thread, because the kernel's queue knows no limit.
        turn = start_thread(fcntl.lockf, file, fcntl.LOCK_EX)
        try:
            turn.result(LIMIT_S)
        except TimeoutError:
            # The turn may come later, and goes on to the next at once.
            turn.add_done_callback(lambda _: file.close())
            raise StoreBusy(
                f"another process has kept {path!r} locked for {LIMIT_S:g} s: it hangs or was stopped "
                f"while it wrote; end it (fuser {path} names it)"
            ) from None
    # Closing the file unlocks it.
    with file:
        yield


def open_engine(url: str | os.PathLike[str] | sa.URL, *, create: bool = True) -> sa.Engine:
    """An engine for the database at `url`, whose tables are made if there are none; not without `create`.

    Raises:
        FileNotFoundError: there is no such file, and it is not to be created.
        ValueError: `url` is neither of a file nor of PostgreSQL, or the database is not a replay store
            of this version.
    """
    engine = make_engine(url, create=create)
    try:
        with engine.connect() as connection, connection.begin():
            is_there = _is_checked(connection)
        if not is_there and not create:
            raise ValueError(f"{shown(engine)} holds no replay store")
        if not is_there:
            _create(engine)
        elif create and engine.dialect.name == "sqlite":
            # Puts count for themselves; in a file of version 0.2.0, which has it, each would count twice.
            # Where there is none, SQLite locks nothing.
            with engine.begin() as connection:
                connection.exec_driver_sql("DROP TRIGGER IF EXISTS forebay_added")
    except BaseException as error:
        engine.dispose()
        if isinstance(error, sa.exc.DatabaseError) and "not a database" in str(error):
            raise ValueError(f"{str(url)!r} is not an SQLite database; name another path") from None
        raise
    return engine


def _is_checked(connection: sa.Connection) -> bool:
    """Whether the tables are there, and of this version; False if nothing is.

    Raises:
        ValueError: there is something else.
    """
    found = set(sa.inspect(connection).get_table_names())
    where = shown(connection.engine)
    if schema.meta.name in found:
        about = {line.name: line.value for line in connection.execute(schema.meta.select())}
        version = about.get("version")
        if (about.get("format"), version) != (schema.FORMAT, str(schema.SCHEMA_VERSION)):
            raise ValueError(
                f"{where} holds a replay store of schema version {version!r}; this release reads "
                f"{schema.SCHEMA_VERSION}: save it in a folder with the release that wrote it (buffer "
                f"migrate)"
            )
        return True
    ours = {name for name in found if name.startswith("forebay_")}
    if ours or (found and connection.dialect.name == "sqlite"):
        raise ValueError(
            f"{where} holds the table {sorted(ours or found)[0]!r}, which is not of a replay store; "
            f"name another database"
        )
    return False


def _create(engine: sa.Engine) -> None:
    """Make the tables, unless another process has done so meanwhile."""
    with write_turn(engine.url), engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            # Two processes that create the tables at once: one waits for the other.
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(schema.CREATE_LOCK)))
        if not _is_checked(connection):
            schema.metadata.create_all(connection)
            if engine.dialect.name == "sqlite":
                schema.counts.create(connection)
                connection.execute(schema.counters.insert(), [{"name": name, "next": 0} for name in schema.ID_NAMES])
            about = {"format": schema.FORMAT, "version": str(schema.SCHEMA_VERSION)}
            connection.execute(schema.meta.insert(), [{"name": name, "value": about[name]} for name in about])


PAGE_BYTES = 16_384
"""SQLite's page. Of 16, 32 and 64 KiB, a put of 83 KB costs least with 64 (CPU 170, 142 and 110 us), and a take of
16 small rows from 100,000 with 16 (1.0, 1.4 and 2.1 ms)."""
CHECKPOINT_BYTES = 128 * 2**20
"""The write-ahead log is copied into the file when it has grown by this: two syncs for 1,500 groups of 83 KB."""


def parsed_url(url: str | os.PathLike[str] | sa.URL) -> sa.URL:
    """`url`, or the path of an SQLite file, in its parts.

    Raises:
        ValueError: it cannot be read; the message has nothing of it, since any part may be of a password.
    """
    if isinstance(url, sa.URL):
        return url
    if isinstance(url, os.PathLike) or "://" not in url:
        return sa.URL.create("sqlite", database=os.fspath(url))
    try:
        parsed = sa.make_url(url)
        # A password ends at its first @, and the rest of it counts as the host, which errors name.
        place, user = f"{parsed.host}{parsed.database}", f"{parsed.username}{parsed.password}"
        if parsed.get_backend_name() != "sqlite" and ("@" in place or "password=" in user):
            raise ValueError
    except (ValueError, sa.exc.ArgumentError):
        raise ValueError("the database URL cannot be read: write @ : / # of a password as %40 %3A %2F %23") from None
    return parsed


def make_engine(url: str | os.PathLike[str] | sa.URL, *, create: bool) -> sa.Engine:
    """An engine for the database at `url`; nothing was asked of it yet.

    Raises:
        FileNotFoundError: there is no such file, and it is not to be created.
        ValueError: `url` is neither of a file nor of PostgreSQL.
    """
    parsed = parsed_url(url)
    kind = parsed.get_backend_name()
    if kind in ("postgresql", "postgres"):
        # Here, because SQLite needs no driver of PostgreSQL.
        from forebay.replay.stores.sql.postgres import postgres_engine

        return postgres_engine(parsed.set(drivername="postgresql+psycopg"))
    if kind != "sqlite" or parsed.database in (None, "", ":memory:"):
        raise ValueError(f"a SQL store is a file or postgresql:// (in memory: IndexedStorage), got a URL of {kind!r}")
    synchronous = str(parsed.query.get("synchronous", "normal")).upper()
    if synchronous not in ("NORMAL", "FULL"):
        raise ValueError(f"synchronous={synchronous} in {url!r}: SQLite is opened with normal or full")
    parsed = parsed.difference_update_query(["synchronous"])
    if create:
        Path(str(parsed.database)).parent.mkdir(parents=True, exist_ok=True)
    elif not Path(str(parsed.database)).exists():
        raise FileNotFoundError(f"there is no file {parsed.database!r}")
    engine = sa.create_engine(parsed, connect_args={"timeout": LIMIT_S})
    event.listen(engine, "connect", partial(_prepare_sqlite, synchronous))
    # Python's driver begins transactions on its own unless told not to, as `_prepare_sqlite` does.
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return engine


def shown(engine: sa.Engine) -> str:
    """The engine's URL as it may be shown."""
    # A password may also be among the options.
    return engine.url.difference_update_query(["password", "sslpassword"]).render_as_string(hide_password=True)


def _prepare_sqlite(synchronous: str, connection: Any, _: object) -> None:
    connection.isolation_level = None
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and "forebay_meta" not in tables:
        # Another program's file, which is about to be refused, and not to be changed before: the journal's
        # mode is kept in it.
        return
    for pragma in (
        f"page_size={PAGE_BYTES}",
        "journal_mode=WAL",
        f"synchronous={synchronous}",
        f"wal_autocheckpoint={CHECKPOINT_BYTES // PAGE_BYTES}",
        # While a save reads, the log cannot be cut; it need not keep that size for ever.
        f"journal_size_limit={CHECKPOINT_BYTES}",
        # A trigger notes the pages that its statement changes; in a file, that is half of the time of a row.
        "temp_store=MEMORY",
        # Debian builds SQLite to write zeros over what is deleted: as many bytes as a put writes, once more.
        "secure_delete=OFF",
    ):
        connection.execute(f"PRAGMA {pragma}").close()
