"""Connections of a SQL store: an engine for a path or a URL, and how SQLite is set up.

::

    path, sqlite:///path --> write-ahead log; a transaction that may write takes the file at once
    postgresql://...     --> `postgres`: connections that notice when the server is lost
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

PAGE_BYTES = 16_384
"""SQLite's page. Of 4, 16 and 64 KiB, 64 writes groups of 127 KB fastest and 4 small rows; measured per group
in batches of 50: 770, 510 and 380 us."""
CHECKPOINT_BYTES = 64 * 2**20
"""The write-ahead log is copied into the file when it has grown by this: two syncs for 500 large groups."""
BUSY_S = 60.0
"""How long a process waits for another's write before it gives up; a write takes milliseconds."""
_in_memory = itertools.count()


def make_engine(url: str | os.PathLike[str], *, create: bool) -> sa.Engine:
    """An engine for the database at `url`; nothing was asked of it yet.

    A transaction of it that is going to write says so: ``execution_options(forebay_write=True)``.

    Raises:
        FileNotFoundError: there is no such file, and it is not to be created.
        ValueError: `url` is neither a path nor of SQLite or PostgreSQL.
    """
    if isinstance(url, os.PathLike) or "://" not in url:
        parsed = sa.URL.create("sqlite", database=os.fspath(url))
    else:
        parsed = sa.make_url(url)
    kind = parsed.get_backend_name()
    if kind in ("postgresql", "postgres"):
        # Here, because SQLite needs no driver of PostgreSQL.
        from forebay.replay.stores.sql.postgres import postgres_engine

        return postgres_engine(parsed.set(drivername="postgresql+psycopg"))
    if kind != "sqlite":
        raise ValueError(f"a SQL store is a path, sqlite:///path or postgresql://..., got {kind!r}")
    if is_in_memory(parsed):
        # A name of its own, by which all connections of this engine find it.
        database = f"file:/forebay-{next(_in_memory)}"
        parsed = parsed.set(database=database, query={"vfs": "memdb", "uri": "true"})
    elif create:
        Path(str(parsed.database)).parent.mkdir(parents=True, exist_ok=True)
    elif not Path(str(parsed.database)).exists():
        raise FileNotFoundError(f"there is no file {parsed.database!r}")
    engine = sa.create_engine(parsed, connect_args={"timeout": BUSY_S})
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def is_in_memory(url: sa.URL) -> bool:
    """Whether it names a SQLite database that is gone with the store."""
    is_named = url.database not in (None, "", ":memory:") and url.query.get("vfs") != "memdb"
    return url.get_backend_name() == "sqlite" and not is_named


def shown(engine: sa.Engine) -> str:
    """The engine's URL as it may be shown."""
    # A password may also be among the options.
    return engine.url.difference_update_query(["password"]).render_as_string(hide_password=True)


def _prepare_sqlite(connection: Any, _: object) -> None:
    # Python's driver begins transactions on its own unless told not to; `_begin_sqlite` does.
    connection.isolation_level = None
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and "forebay_meta" not in tables:
        # Another program's file, which is about to be refused, and not to be changed before: the journal's
        # mode is kept in it.
        return
    for pragma in (
        f"page_size={PAGE_BYTES}",
        "journal_mode=WAL",
        "synchronous=NORMAL",
        f"wal_autocheckpoint={CHECKPOINT_BYTES // PAGE_BYTES}",
        # While a save reads, the log cannot be cut; it need not keep that size for ever.
        f"journal_size_limit={CHECKPOINT_BYTES}",
        # A trigger notes the pages that its statement changes; in a file, that is half of the time of a row.
        "temp_store=MEMORY",
    ):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: sa.Connection) -> None:
    # A transaction that begins as a reader and then writes fails if another process wrote in between.
    write = connection.get_execution_options().get("forebay_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
