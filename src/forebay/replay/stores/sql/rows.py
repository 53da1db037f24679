"""Rows of a SQL store: from items to tables and back, within a transaction that the store opened.

::

    StorageItem --prepare--> PreparedRow --give_ids, insert_rows--> groups, payloads, tags
                                         '-replace_rows---------------'
    StorageItem <--read_rows-- groups (light) <--attach_payloads-- payloads
    Removed: rows that a call took out, which can be put back

Ids are kept in the database, so that they never rewind. SQLite has one writer at a time: a table of counters,
changed in the transaction that uses the ids. PostgreSQL has many: two sequences, so that no writer waits for
another's commit; an interrupted transaction leaves a gap.
"""

import json
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from forebay.replay.query import ARCHIVED, plain_value
from forebay.replay.stores.contract import Codec, StorageItem, TagValue, check_row, staleness_at
from forebay.replay.stores.errors import DamagedRowError
from forebay.replay.stores.slices import slices_of
from forebay.replay.stores.sql.direct import Connection
from forebay.replay.stores.sql.query import INT_MAX, INT_MIN, encode_text
from forebay.replay.stores.sql.schema import (
    ID_LOCK,
    ID_NAMES,
    LIVE,
    counters,
    counts,
    groups,
    insert_missing,
    payloads,
    tags,
    tasks,
)

CHUNK = 500
"""Rows that one statement names by uid: databases limit the values of a statement."""

_TAG_COLUMNS: Mapping[type[TagValue], tuple[str, Callable[[Any], bytes | int | float]]] = {
    int: ("int_value", int),
    float: ("float_value", float),
    str: ("text_value", encode_text),
    bool: ("bool_value", int),
}
"""By the type of a tag's value: its column, and the form that the column holds."""
_NO_VALUE = dict.fromkeys(column for column, _ in _TAG_COLUMNS.values())

_FIELDS = [field.name for field in fields(StorageItem) if field.name != "item"]
_read_fields = attrgetter(*_FIELDS)
_TAGS = _FIELDS.index("tags")
SELECT_ROWS = sa.select(*(groups.c[name] for name in _FIELDS))
"""A statement whose lines `read_rows` reads: the columns in the order of the fields."""
_UIDS: sa.BindParameter[list[int]] = sa.bindparam("uids", expanding=True)
_DELETE = [table.delete().where(table.c.uid.in_(_UIDS)) for table in (groups, payloads, tags)]
_ROWS_OF = SELECT_ROWS.where(groups.c.uid.in_(_UIDS)).order_by(groups.c.uid)
_LOCK_ROWS = [_ROWS_OF.with_for_update(skip_locked=skip) for skip in (False, True)]
_PAYLOADS = sa.select(payloads).where(payloads.c.uid.in_(_UIDS))
# A row that is archived again still says what it was when it was live.
_BEFORE = sa.case((groups.c.status == ARCHIVED, groups.c.status_before), else_=groups.c.status)
_ARCHIVED = {"status": ARCHIVED, "status_before": _BEFORE, "train_step": sa.bindparam("step")}
_ARCHIVE = groups.update().where(groups.c.uid.in_(_UIDS)).values(_ARCHIVED)
_INSERT_GROUPS, _INSERT_PAYLOADS, _INSERT_TAGS = groups.insert(), payloads.insert(), tags.insert()
_ADD_COUNTS = (added := sqlite.insert(counts)).on_conflict_do_update(
    index_elements=[*counts.primary_key], set_={"number": counts.c.number + added.excluded.number}
)
_UPDATE = groups.update().where(groups.c.uid == sa.bindparam("key"))
_UPDATE_LIVE = _UPDATE.where(LIVE)


@dataclass(slots=True)
class PreparedRow:
    """A row in the form of the tables, checked: no database refuses it."""

    columns: dict[str, Any]
    """The columns of `groups`; the ids are those that the item brings, until `give_ids`."""
    data: bytes | None
    """The payload; None where the item has none."""
    checksum: int
    """CRC-32 of `data` alone."""
    tags: dict[str, TagValue]

    @property
    def uid(self) -> int:
        """The row's id, once the store has given it one."""
        uid: int = self.columns["uid"]
        return uid


def prepare(item: StorageItem, codec: Codec, *, data: bytes | None = None, keep_payload: bool = False) -> PreparedRow:
    """The row of `item`, whose payload may be encoded already as `data`.

    With `keep_payload` an item without payload has no bytes either.

    Raises:
        ValueError: `check_row` refuses it, or the codec refuses the payload.
    """
    check_row(item)
    columns = dict(zip(_FIELDS, _read_fields(item), strict=True))
    columns["status"], columns["status_before"] = plain_value(item.status), plain_value(item.status_before)
    columns["priority"], columns["tags"] = float(item.priority), json.dumps(item.tags) if item.tags else "{}"
    if data is None and not (keep_payload and item.item is None):
        data = codec.encode(item.item)
    return PreparedRow(columns, data, zlib.crc32(data or b""), dict(item.tags))


def give_ids(connection: Connection, rows: Sequence[PreparedRow]) -> None:
    """Give the rows new ids, in order; an id that a row brings is used if it is above all before."""
    if not rows:
        return
    if connection.dialect.name == "postgresql":
        # Ids are taken together with other writers, unless the sequences have to be moved.
        bring = any(max(row.columns["uid"], row.columns["timestamp_id"]) >= 0 for row in rows)
        _lock_ids(connection, alone=bring)
        if not bring:
            lines = connection.execute(_NEXT, {"number": len(rows)}).fetchall()
            for row, ids in zip(rows, lines, strict=True):
                row.columns["uid"], row.columns["timestamp_id"] = ids
            return
    following = next_ids(connection)
    for row in rows:
        for name, lowest in following.items():
            row.columns[name] = given = max(lowest, row.columns[name])
            following[name] = given + 1
    _set_ids(connection, following)


def next_ids(connection: Connection) -> dict[str, int]:
    """The ids above all that were given: ``uid``, ``timestamp_id``."""
    if connection.dialect.name == "postgresql":
        return dict(zip(ID_NAMES, connection.execute(_FOLLOWING).fetchall()[0], strict=True))
    return dict(connection.execute(_COUNTERS).fetchall())


def raise_ids(connection: Connection, to: Mapping[str, int]) -> None:
    """Give no id below `to` from now on."""
    if connection.dialect.name == "postgresql":
        _lock_ids(connection, alone=True)
    _set_ids(connection, {name: max(to[name], lowest) for name, lowest in next_ids(connection).items()})


def _set_ids(connection: Connection, following: dict[str, int]) -> None:
    connection.execute(_SET if connection.dialect.name == "postgresql" else _SET_COUNTERS, following)


def _lock_ids(connection: Connection, *, alone: bool) -> None:
    lock = sa.func.pg_advisory_xact_lock if alone else sa.func.pg_advisory_xact_lock_shared
    connection.execute(sa.select(lock(ID_LOCK)))


_COUNTERS = sa.select(counters)
_NEXT = sa.text("SELECT nextval('forebay_uid'), nextval('forebay_timestamp_id') FROM generate_series(1, :number)")
_FOLLOWING = sa.text(
    "SELECT u.last_value + u.is_called::int, t.last_value + t.is_called::int "
    "FROM forebay_uid u, forebay_timestamp_id t"
)
_SET = sa.text("SELECT setval('forebay_uid', :uid, false), setval('forebay_timestamp_id', :timestamp_id, false)")
_SET_COUNTERS = counters.update().values(
    next=sa.case({name: sa.bindparam(name) for name in ID_NAMES}, value=counters.c.name)
)


def insert_rows(connection: Connection, rows: Sequence[PreparedRow]) -> None:
    """Insert the rows, whose tasks are known, under their ids."""
    if not rows:
        return
    connection.execute(_INSERT_GROUPS, [row.columns for row in rows])
    connection.execute(_INSERT_PAYLOADS, [_payload("uid", row) for row in rows])
    _insert_tags(connection, rows)
    if connection.dialect.name == "sqlite":
        # Once for all rows: a trigger runs for each, and adds 14 us to the 4 us that a row takes.
        cells = Counter((row.columns["task_name"], row.columns["status"]) for row in rows)
        connection.execute(
            _ADD_COUNTS,
            [{"task_name": task, "status": status, "number": cells[task, status]} for task, status in cells],
        )


def _payload(key: str, row: PreparedRow) -> dict[str, Any]:
    return {key: row.uid, "data": row.data, "checksum": checksum_of(row.uid, row.checksum)}


def insert_tasks(connection: Connection, names: Iterable[str]) -> None:
    """Make sure that the tasks are known; the queries of a store go task by task."""
    # In one order everywhere, so that two processes never wait for each other.
    if missing := [{"task_name": name} for name in sorted(set(names))]:
        insert_missing(connection, tasks, missing)


_UPDATE_PAYLOADS = payloads.update().where(payloads.c.uid == sa.bindparam("key"))


def replace_rows(connection: Connection, rows: Sequence[PreparedRow]) -> None:
    """Replace the rows of these uids, which exist; a row without bytes keeps its payload."""
    if not rows:
        return
    insert_tasks(connection, (row.columns["task_name"] for row in rows))
    # The ids stay.
    columns = [{name: row.columns[name] for name in _FIELDS[2:]} for row in rows]
    connection.execute(_UPDATE, [{"key": row.uid, **new} for row, new in zip(rows, columns, strict=True)])
    if data := [_payload("key", row) for row in rows if row.data is not None]:
        connection.execute(_UPDATE_PAYLOADS, data)
    for chunk in slices_of([row.uid for row in rows], CHUNK):
        connection.execute(_DELETE[-1], {"uids": chunk})
    # Of rows with the same uid the last one counts.
    _insert_tags(connection, list({row.uid: row for row in rows}.values()))


def _insert_tags(connection: Connection, rows: Sequence[PreparedRow]) -> None:
    lines = []
    for row in rows:
        for name, value in row.tags.items():
            column, form = _TAG_COLUMNS[type(value)]
            # Every line names all columns, so that one statement inserts them together.
            lines.append({"uid": row.uid, "name": encode_text(name), **_NO_VALUE, column: form(value)})
    if lines:
        connection.execute(_INSERT_TAGS, lines)


def delete_rows(connection: Connection, uids: Iterable[int]) -> None:
    """Delete the rows of these uids."""
    for chunk in slices_of(uids, CHUNK):
        for statement in _DELETE:
            connection.execute(statement, {"uids": chunk})


def archive_rows(connection: Connection, uids: Iterable[int], train_step: int) -> None:
    """Make the rows of these uids ARCHIVED."""
    for chunk in slices_of(uids, CHUNK):
        connection.execute(_ARCHIVE, {"uids": chunk, "step": train_step})


def lock_rows(
    connection: Connection,
    uids: Iterable[int],
    codec: Codec,
    train_steps: Mapping[str, int | None],
    *,
    skip_locked: bool = False,
) -> dict[int, StorageItem]:
    """The rows of these uids that exist, without payload; no other process changes them before the commit."""
    found: dict[int, StorageItem] = {}
    # By uid, so that two processes that lock the same rows do not wait for each other.
    for chunk in slices_of(sorted(set(uids)), CHUNK):
        lines = connection.execute(_LOCK_ROWS[skip_locked], {"uids": chunk})
        found.update((item.uid, item) for item in read_rows(lines, codec, train_steps))
    return found


def write_priorities(connection: Connection, priorities: Mapping[int, float]) -> int:
    """Give the live rows of these uids these priorities; return how many there are."""
    # By uid, as everything that locks rows.
    lines = [{"key": uid, "priority": float(priorities[uid])} for uid in sorted(storable_uids(priorities))]
    return connection.execute(_UPDATE_LIVE, lines).rowcount if lines else 0


def read_rows(lines: Iterable[Any], codec: Codec, train_steps: Mapping[str, int | None]) -> Iterator[StorageItem]:
    """Items without payload, as stale as at their task's train step."""
    # Looked up once for each status, and without the search for blanks of `loads`: a resume reads all rows.
    status_of, decode = cache(codec.status), json.JSONDecoder().raw_decode
    for line in lines:
        item = StorageItem(None, *line)
        item.status = status_of(item.status)
        item.tags = {} if line[_TAGS] == "{}" else decode(line[_TAGS])[0]
        if item.status_before is not None:
            item.status_before = status_of(item.status_before)
        item.staleness = staleness_at(item, train_steps.get(item.task_name))
        yield item


def attach_payloads(connection: Connection, items: Sequence[StorageItem], codec: Codec) -> None:
    """Load the payloads of these rows.

    Raises:
        ValueError: a payload is damaged or of another codec.
    """
    for chunk in slices_of(items, CHUNK):
        Removed(chunk, read_payloads(connection, [item.uid for item in chunk])).decode(codec)


def read_payloads(connection: Connection, uids: Iterable[int]) -> "dict[int, StoredPayload]":
    """The bytes of the payloads of these rows, unchecked."""
    found = {uid: StoredPayload(None, 0) for uid in uids}
    for chunk in slices_of(list(found), CHUNK):
        lines = connection.execute(_PAYLOADS, {"uids": chunk})
        found.update((uid, StoredPayload(data, sum_)) for uid, data, sum_ in lines)
    return found


class StoredPayload(NamedTuple):
    """The bytes of a payload as they were read, and the checksum that was noted when they were written."""

    data: bytes | None
    """None for a row without a payload."""
    checksum: int | None
    """None once it was compared."""

    def checked(self, uid: int) -> bytes:
        """The bytes; DamagedRowError if they are not those that were stored for this row."""
        if self.data is None:
            raise DamagedRowError(uid, "it is missing")
        if self.checksum is not None and self.checksum != checksum_of(uid, zlib.crc32(self.data)):
            raise DamagedRowError(uid, "its checksum does not fit")
        return self.data


def checksum_of(uid: int, checksum: int) -> int:
    """CRC-32 of a payload and the uid of its row: bytes that stand at another row do not fit either."""
    return zlib.crc32(_UID.pack(uid), checksum)


_UID = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class Removed:
    """Rows that a call removed, or archived for a train step, and the bytes of those not yet decoded."""

    rows: list[StorageItem]
    data: dict[int, StoredPayload]
    train_step: int | None = None
    is_evicted: bool = False

    def decode(self, codec: Codec) -> None:
        """Give the rows their payloads.

        Raises:
            DamagedRowError: one is not what was stored.
            ValueError: one is of another codec; the message names the row.
        """
        for row in self.rows:
            data = self.data[row.uid].checked(row.uid)
            try:
                row.item = codec.decode(data)
            except ValueError as error:
                raise ValueError(f"the row with uid {row.uid}: {error}") from error
            # Bytes and objects of many groups are not in memory together.
            del self.data[row.uid], data

    def put_back(self, connection: Connection, codec: Codec) -> None:
        """Undo the removal; rows that another call has changed since are left alone."""
        # Payloads that were not decoded yet go back as the bytes they were; one that is missing, as none.
        rows = [
            prepare(row, codec, data=(self.data[row.uid].data or b"") if row.uid in self.data else None)
            for row in self.rows
        ]
        found = lock_rows(connection, [row.uid for row in rows], codec, {})
        if self.train_step is None:
            insert_rows(connection, [row for row in rows if row.uid not in found])
        else:
            held = {row.uid for row in found.values() if row.is_archived and row.train_step == self.train_step}
            replace_rows(connection, [row for row in rows if row.uid in held])


def storable_uids(uids: Iterable[int]) -> list[int]:
    """The uids that a database can look up, each once."""
    return [uid for uid in dict.fromkeys(uids) if INT_MIN <= uid <= INT_MAX]
