"""The tables of a SQL store, and what SQLite and PostgreSQL do differently.

::

    forebay_groups    one light row per group     forebay_payloads  its rollouts, as bytes
    forebay_tags      one row per tag             forebay_tasks     last train step, evictions
    forebay_meta      format and schema version   forebay_counters  the next ids (PostgreSQL: two sequences)
    forebay_receipts  what a server has done for its clients, for an hour

Payloads have a table of their own, so that ranking reads light rows and archiving rewrites no payload. The
value of a tag is in the one column of its kind, so that a comparison is always of one kind; `groups.tags` has
all of them once more, as JSON, for reading. Text of tags is stored as UTF-8 bytes, which every database
compares in the order of Python.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import CreateSequence

from forebay.replay.stores.sql.connections import postgres_engine

FORMAT = "forebay-replay"
SCHEMA_VERSION = 2
"""1 had neither checksums nor counts."""

PAGE_BYTES = 16_384
"""SQLite's page. Of 4, 16 and 64 KiB, 64 writes groups of 127 KB fastest and 4 small rows; measured per group
in batches of 50: 770, 510 and 380 us."""
CHECKPOINT_BYTES = 64 * 2**20
"""The write-ahead log is copied into the file when it has grown by this: two syncs for 500 large groups."""
BUSY_S = 60.0
"""How long a process waits for another's write before it gives up; a write takes milliseconds."""

_int = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")

metadata = sa.MetaData()

meta = sa.Table(
    "forebay_meta",
    metadata,
    sa.Column("name", sa.Text(), primary_key=True),
    sa.Column("value", sa.Text(), nullable=False),
)
tasks = sa.Table(
    "forebay_tasks",
    metadata,
    sa.Column("task_name", _text, primary_key=True),
    sa.Column("train_step", _int),
    sa.Column("may_fall", sa.SmallInteger(), nullable=False, server_default="0"),
    sa.Column("num_evicted", _int, nullable=False, server_default="0"),
)
groups = sa.Table(
    "forebay_groups",
    metadata,
    sa.Column("uid", _int, primary_key=True, autoincrement=False),
    sa.Column("timestamp_id", _int, nullable=False),
    sa.Column("task_name", _text, nullable=False),
    sa.Column("status", _text, nullable=False),
    sa.Column("staleness", _int, nullable=False),
    sa.Column("priority", sa.Double(), nullable=False),
    sa.Column("oldest_model_step", _int),
    sa.Column("train_step", _int),
    sa.Column("status_before", _text),
    sa.Column("tags", sa.Text(), nullable=False),
)
payloads = sa.Table(
    "forebay_payloads",
    metadata,
    sa.Column("uid", _int, primary_key=True, autoincrement=False),
    sa.Column("data", sa.LargeBinary(), nullable=False),
    sa.Column("checksum", _int, nullable=False),
)
counts = sa.Table(
    "forebay_counts",
    # Apart from the others: SQLite alone has it.
    sa.MetaData(),
    sa.Column("task_name", _text, primary_key=True),
    sa.Column("status", _text, primary_key=True),
    sa.Column("number", _int, nullable=False),
    sqlite_with_rowid=False,
)
"""Rows by task and status, kept by triggers: SQLite would count by reading them all, 19 ms for 200,000.

PostgreSQL has none: every put would wait for the put before it that changed the same line.
"""
tags = sa.Table(
    "forebay_tags",
    metadata,
    sa.Column("uid", _int, primary_key=True, autoincrement=False),
    sa.Column("name", sa.LargeBinary(), primary_key=True),
    sa.Column("int_value", _int),
    sa.Column("float_value", sa.Double()),
    sa.Column("text_value", sa.LargeBinary()),
    sa.Column("bool_value", sa.SmallInteger()),
    sqlite_with_rowid=False,
)
counters = sa.Table(
    "forebay_counters",
    metadata,
    sa.Column("name", sa.Text(), primary_key=True),
    sa.Column("next", _int, nullable=False),
)

receipts = sa.Table(
    "forebay_receipts",
    metadata,
    sa.Column("receipt", sa.LargeBinary(), primary_key=True),
    sa.Column("at", _int, nullable=False, index=True),
    sqlite_with_rowid=False,
)

ID_NAMES = ("uid", "timestamp_id")
sequences = {name: sa.Sequence(f"forebay_{name}", start=0, minvalue=0) for name in ID_NAMES}

LIVE = groups.c.status != sa.literal_column("'archived'")
"""Written out and not bound, because a partial index is only used for the very condition it was made with."""


def _partial_index(name: str, *columns: Any, where: Any) -> None:
    sa.Index(name, *columns, sqlite_where=where, postgresql_where=where)


_ADD = """INSERT INTO forebay_counts VALUES (new.task_name, new.status, 1)
    ON CONFLICT (task_name, status) DO UPDATE SET number = number + 1;"""
_SUBTRACT = """UPDATE forebay_counts SET number = number - 1
    WHERE task_name = old.task_name AND status = old.status;"""
_COUNTING = (
    f"CREATE TRIGGER forebay_added AFTER INSERT ON forebay_groups BEGIN {_ADD} END",
    f"CREATE TRIGGER forebay_removed AFTER DELETE ON forebay_groups BEGIN {_SUBTRACT} END",
    "CREATE TRIGGER forebay_moved AFTER UPDATE OF task_name, status ON forebay_groups "
    "WHEN old.task_name <> new.task_name OR old.status <> new.status "
    f"BEGIN {_SUBTRACT} {_ADD} END",
)

_c = groups.c
sa.Index("forebay_by_arrival", _c.task_name, _c.status, _c.timestamp_id)
_partial_index("forebay_live", _c.timestamp_id, where=LIVE)
_partial_index(
    "forebay_by_step",
    _c.task_name,
    _c.status,
    _c.oldest_model_step,
    _c.timestamp_id,
    where=_c.oldest_model_step.is_not(None),
)
_partial_index(
    "forebay_by_staleness",
    _c.task_name,
    _c.status,
    _c.staleness.desc(),
    _c.timestamp_id,
    where=_c.oldest_model_step.is_(None),
)
_partial_index("forebay_by_train_step", _c.status, _c.train_step, where=_c.train_step.is_not(None))


def open_engine(url: str | os.PathLike[str], *, create: bool = True) -> sa.Engine:
    """An engine for the database at `url`, whose tables are made if there are none; not without `create`.

    Raises:
        FileNotFoundError: there is no such file, and it is not to be created.
        ValueError: `url` is neither a path nor of SQLite or PostgreSQL, or the database is not a replay store
            of this version.
    """
    parsed = _parse_url(url)
    is_file = parsed.get_backend_name() == "sqlite"
    is_file = is_file and not is_in_memory(parsed)
    if is_file and not create and not Path(str(parsed.database)).exists():
        raise FileNotFoundError(f"there is no file {parsed.database!r}")
    engine = _engine(parsed)
    try:
        with engine.connect() as connection, connection.begin():
            is_there = _is_checked(connection)
        if not is_there and not create:
            raise ValueError(f"{_shown(engine)} holds no replay store")
        if not is_there:
            _create(engine)
    except sa.exc.DatabaseError as error:
        engine.dispose()
        if "not a database" in str(error):
            raise ValueError(f"{str(url)!r} is not an SQLite database; name another path") from None
        raise
    except BaseException:
        engine.dispose()
        raise
    return engine


CREATE_LOCK, ID_LOCK, EVICT_LOCK = (0x666F7265 + number for number in range(3))
"""PostgreSQL's advisory locks are numbers that all users of a database share; these spell "fore"."""


def insert_missing(connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    """Insert the rows whose primary key is not there yet."""
    connection.execute(_insert(connection)(table).on_conflict_do_nothing(), rows)


def insert_or_update(
    connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]], changed: str
) -> None:
    """Insert the rows; of those whose primary key is there already, replace the column `changed`."""
    statement = _insert(connection)(table)
    key = [column.name for column in table.primary_key]
    new = {changed: statement.excluded[changed]}
    connection.execute(statement.on_conflict_do_update(index_elements=key, set_=new), rows)


def _insert(connection: sa.Connection) -> Any:
    return postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert


def _parse_url(url: str | os.PathLike[str]) -> sa.URL:
    if isinstance(url, os.PathLike) or "://" not in url:
        return sa.URL.create("sqlite", database=os.fspath(url))
    parsed = sa.make_url(url)
    if parsed.get_backend_name() in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() != "sqlite":
        raise ValueError(
            f"a SQL store is a path, sqlite:///path or postgresql://..., got {parsed.get_backend_name()!r}"
        )
    return parsed


def _engine(url: sa.URL) -> sa.Engine:
    if url.get_backend_name() == "postgresql":
        return postgres_engine(url)
    if is_in_memory(url):
        # A name of its own, by which all connections of this engine find it.
        database = f"file:/forebay-{next(_in_memory)}"
        return _sqlite_engine(url.set(database=database, query={"vfs": "memdb", "uri": "true"}))
    Path(str(url.database)).parent.mkdir(parents=True, exist_ok=True)
    return _sqlite_engine(url)


_in_memory = itertools.count()


def is_in_memory(url: sa.URL) -> bool:
    """Whether it names a SQLite database that is gone with the store."""
    is_named = url.database not in (None, "", ":memory:") and url.query.get("vfs") != "memdb"
    return url.get_backend_name() == "sqlite" and not is_named


def _sqlite_engine(url: sa.URL) -> sa.Engine:
    engine = sa.create_engine(url, connect_args={"timeout": BUSY_S})
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _: object) -> None:
    # Python's driver begins transactions on its own unless told not to; `_begin_sqlite` does.
    connection.isolation_level = None
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and meta.name not in tables:
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
    ):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: sa.Connection) -> None:
    # A transaction that begins as a reader and then writes fails if another process wrote in between.
    write = connection.get_execution_options().get("forebay_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _shown(engine: sa.Engine) -> str:
    # A password may also be among the options.
    return engine.url.difference_update_query(["password"]).render_as_string(hide_password=True)


def _is_checked(connection: sa.Connection) -> bool:
    """Whether the tables are there, and of this version; False if nothing is.

    Raises:
        ValueError: there is something else.
    """
    found = set(sa.inspect(connection).get_table_names())
    where = _shown(connection.engine)
    if meta.name in found:
        about = {line.name: line.value for line in connection.execute(meta.select())}
        version = about.get("version")
        if about.get("format") != FORMAT or version != str(SCHEMA_VERSION):
            raise ValueError(
                f"{where} holds a replay store of schema version {version!r}; this release reads "
                f"{SCHEMA_VERSION}: export it with the release that wrote it (forebay buffer migrate), and "
                f"name another database"
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
    with engine.connect().execution_options(forebay_write=True) as connection, connection.begin():
        if engine.dialect.name == "postgresql":
            # Two processes that create the tables at once: one waits for the other.
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(CREATE_LOCK)))
        if not _is_checked(connection):
            _create_tables(connection)


def _create_tables(connection: sa.Connection) -> None:
    metadata.create_all(connection)
    if connection.dialect.name == "postgresql":
        for sequence in sequences.values():
            connection.execute(CreateSequence(sequence))
        # Token ids and logprobs hardly compress; trying costs more than writing them.
        connection.execute(sa.text("ALTER TABLE forebay_payloads ALTER COLUMN data SET STORAGE EXTERNAL"))
    else:
        connection.execute(counters.insert(), [{"name": name, "next": 0} for name in ID_NAMES])
        counts.create(connection)
        for trigger in _COUNTING:
            connection.exec_driver_sql(trigger)
    connection.execute(
        meta.insert(),
        [{"name": "format", "value": FORMAT}, {"name": "version", "value": str(SCHEMA_VERSION)}],
    )
