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

from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite

from forebay.replay.stores.sql.direct import Connection

FORMAT = "forebay-replay"
SCHEMA_VERSION = 2
"""1 had neither checksums nor counts."""

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
"""Rows by task and status, kept with every change: SQLite would count by reading them all, 19 ms for 200,000.

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
for _name in ID_NAMES:
    # Databases without sequences make none; SQLite has `counters`.
    sa.Sequence(f"forebay_{_name}", start=0, minvalue=0, metadata=metadata)

LIVE = groups.c.status != sa.literal_column("'archived'")
"""Written out and not bound, because a partial index is used only for the condition it was made with."""


def _partial_index(name: str, *columns: Any, where: Any) -> None:
    sa.Index(name, *columns, sqlite_where=where, postgresql_where=where)


# Puts count for themselves, many rows at a time (`rows.insert_rows`).
_ADD = """INSERT INTO forebay_counts VALUES (new.task_name, new.status, 1)
    ON CONFLICT (task_name, status) DO UPDATE SET number = number + 1;"""
_SUBTRACT = """UPDATE forebay_counts SET number = number - 1
    WHERE task_name = old.task_name AND status = old.status;"""
for _trigger in (
    f"CREATE TRIGGER forebay_removed AFTER DELETE ON forebay_groups BEGIN {_SUBTRACT} END",
    "CREATE TRIGGER forebay_moved AFTER UPDATE OF task_name, status ON forebay_groups "
    "WHEN old.task_name <> new.task_name OR old.status <> new.status "
    f"BEGIN {_SUBTRACT} {_ADD} END",
):
    event.listen(counts, "after_create", sa.DDL(_trigger))  # type: ignore[no-untyped-call]
# Token ids and logprobs hardly compress; trying costs more than writing them.
_uncompressed = sa.DDL(  # type: ignore[no-untyped-call]
    "ALTER TABLE forebay_payloads ALTER COLUMN data SET STORAGE EXTERNAL"
)
event.listen(payloads, "after_create", _uncompressed.execute_if(dialect="postgresql"))

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


CREATE_LOCK, ID_LOCK, EVICT_LOCK = (0x666F7265 + number for number in range(3))
"""PostgreSQL's advisory locks are numbers that all users of a database share; these spell "fore"."""


def insert_missing(connection: Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    """Insert the rows whose primary key is not there yet."""
    connection.execute(_insert(connection.dialect.name, table), rows)


def insert_or_update(connection: Connection, table: sa.Table, rows: list[dict[str, Any]], changed: str) -> None:
    """Insert the rows; of those whose primary key is there already, replace the column `changed`."""
    connection.execute(_insert(connection.dialect.name, table, changed), rows)


@cache
def _insert(dialect: str, table: sa.Table, changed: str | None = None) -> Any:
    statement = (postgresql if dialect == "postgresql" else sqlite).insert(table)
    if changed is None:
        return statement.on_conflict_do_nothing()
    new = {changed: statement.excluded[changed]}
    return statement.on_conflict_do_update(index_elements=[*table.primary_key], set_=new)
