"""The ids of a SQL store, kept in the database so that they never rewind.

SQLite has one writer at a time: a table of counters, changed in the transaction that uses the ids. PostgreSQL
has many: two sequences, so that nobody waits for another's commit; an interrupted transaction leaves a gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from forebay.replay.stores.sql.schema import ID_LOCK, ID_NAMES, counters

Ids = tuple[int, int]
"""``(uid, timestamp_id)``."""

_NEXT = sa.text(
    "SELECT nextval('forebay_uid'), nextval('forebay_timestamp_id') FROM generate_series(1, :number)"
)
_MOVE_AND_NEXT = sa.text(
    "SELECT setval('forebay_uid', GREATEST(:uid, nextval('forebay_uid'))), "
    "setval('forebay_timestamp_id', GREATEST(:timestamp_id, nextval('forebay_timestamp_id')))"
)
_SET = sa.text(
    "SELECT setval('forebay_uid', :uid, false), setval('forebay_timestamp_id', :timestamp_id, false)"
)

_SET_COUNTERS = counters.update().values(
    next=sa.case({name: sa.bindparam(name) for name in ID_NAMES}, value=counters.c.name)
)


def reserve_ids(connection: sa.Connection, brought: Sequence[Ids]) -> list[Ids]:
    """New ids for that many rows, in order; an id that is brought is used if it is above all before."""
    if connection.dialect.name == "postgresql":
        return _reserve_from_sequences(connection, brought)
    following = next_ids(connection)
    reserved = []
    for wanted in brought:
        ids = tuple(max(want, following[name]) for want, name in zip(wanted, ID_NAMES, strict=True))
        following = {name: used + 1 for name, used in zip(ID_NAMES, ids, strict=True)}
        reserved.append((ids[0], ids[1]))
    _set_counters(connection, following)
    return reserved


def next_ids(connection: sa.Connection) -> dict[str, int]:
    """The ids above all that were given, by name."""
    if connection.dialect.name != "postgresql":
        return {
            line.name: line.next for line in connection.execute(sa.select(counters.c.name, counters.c.next))
        }
    return {
        name: connection.scalar(
            sa.text(f"SELECT last_value + CASE WHEN is_called THEN 1 ELSE 0 END FROM forebay_{name}")
        )
        or 0
        for name in ID_NAMES
    }


def raise_ids(connection: sa.Connection, to: Mapping[str, int]) -> None:
    """Give no id below `to` from now on."""
    if connection.dialect.name == "postgresql":
        _lock(connection, alone=True)
    raised = {name: max(to[name], following) for name, following in next_ids(connection).items()}
    if connection.dialect.name == "postgresql":
        connection.execute(_SET, raised)
    else:
        _set_counters(connection, raised)


def _set_counters(connection: sa.Connection, following: Mapping[str, int]) -> None:
    connection.execute(_SET_COUNTERS, dict(following))


def _reserve_from_sequences(connection: sa.Connection, brought: Sequence[Ids]) -> list[Ids]:
    bring = any(max(wanted) >= 0 for wanted in brought)
    _lock(connection, alone=bring)
    if not bring:
        return [
            (uid, timestamp_id) for uid, timestamp_id in connection.execute(_NEXT, {"number": len(brought)})
        ]
    reserved = []
    for uid, timestamp_id in brought:
        line = connection.execute(_MOVE_AND_NEXT, {"uid": uid, "timestamp_id": timestamp_id}).one()
        reserved.append((line[0], line[1]))
    return reserved


def _lock(connection: sa.Connection, *, alone: bool) -> None:
    """Until the commit: take ids together with others, or, to set a sequence, with nobody else."""
    lock = sa.func.pg_advisory_xact_lock if alone else sa.func.pg_advisory_xact_lock_shared
    connection.execute(sa.select(lock(ID_LOCK)))
