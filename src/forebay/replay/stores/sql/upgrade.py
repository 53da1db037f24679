"""A database of version 0.1, brought to the present schema in its place.

Schema 1 had no checksums of payloads, no counts by task and status (SQLite), no receipts, and no mark of a
train step that may fall. All of it can be made from the rows, in one transaction.
"""

from __future__ import annotations

import os
import zlib

import sqlalchemy as sa

from forebay.replay.stores.sql.connections import make_engine, shown
from forebay.replay.stores.sql.rows import checksum_of, chunks, read_payloads
from forebay.replay.stores.sql.schema import SCHEMA_VERSION, counts, groups, meta, metadata, payloads

_ADD_COLUMNS = (
    "ALTER TABLE forebay_payloads ADD COLUMN checksum BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE forebay_tasks ADD COLUMN may_fall SMALLINT NOT NULL DEFAULT 0",
)


def upgrade(url: str | os.PathLike[str]) -> int:
    """Convert the store of version 0.1 at `url`, which no process has open; return its number of groups.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a store of version 0.1.
    """
    engine = make_engine(url, create=False)
    try:
        with engine.connect().execution_options(forebay_write=True) as connection, connection.begin():
            is_store = sa.inspect(connection).has_table(meta.name)
            version = connection.scalar(_VERSION) if is_store else None
            if version != "1":
                raise ValueError(f"{shown(engine)} is not a replay store of version 0.1: nothing to convert")
            for statement in _ADD_COLUMNS:
                connection.exec_driver_sql(statement)
            metadata.create_all(connection)
            if engine.dialect.name == "sqlite":
                counts.create(connection)
                cells = sa.select(groups.c.task_name, groups.c.status, sa.func.count())
                by_cell = cells.group_by(groups.c.task_name, groups.c.status)
                connection.execute(counts.insert().from_select(list(counts.c), by_cell))
            uids = list(connection.scalars(sa.select(groups.c.uid)))
            for chunk in chunks(uids):
                found = read_payloads(connection, chunk)
                sums = [{"key": uid, "sum": checksum_of(uid, zlib.crc32(found[uid].data))} for uid in chunk]
                connection.execute(_SET_CHECKSUM, sums)
            connection.execute(meta.update().where(_IS_VERSION).values(value=str(SCHEMA_VERSION)))
            return len(uids)
    finally:
        engine.dispose()


_IS_VERSION = meta.c.name == "version"
_VERSION = sa.select(meta.c.value).where(_IS_VERSION)
_SET_CHECKSUM = (
    payloads.update().where(payloads.c.uid == sa.bindparam("key")).values(checksum=sa.bindparam("sum"))
)
