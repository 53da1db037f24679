"""Rows of a SQL store: from items to tables and back, within a transaction that the store opened.

::

    StorageItem --prepare--> PreparedRow --insert_rows(ids)--> groups, payloads, tags
                                         '-replace_rows------'
    select_items <-- groups (light) <-- attach_payloads
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import sqlalchemy as sa

from forebay.replay.query import ARCHIVED, plain_value
from forebay.replay.stores.contract import Codec, StorageItem, TagValue, check_row, copy_row, staleness_at
from forebay.replay.stores.errors import DamagedRowError
from forebay.replay.stores.sql.query import INT_MAX, INT_MIN, encode_text
from forebay.replay.stores.sql.schema import LIVE, groups, insert_missing, payloads, tags, tasks

CHUNK = 500
"""Rows that one statement names by uid: databases limit the values of a statement."""

TAG_COLUMNS = {int: "int_value", float: "float_value", str: "text_value", bool: "bool_value"}

_ROW = sa.select(*groups.c)
_DELETE = [
    table.delete().where(table.c.uid.in_(sa.bindparam("uids", expanding=True)))
    for table in (groups, payloads, tags)
]
_UPDATE = groups.update().where(groups.c.uid == sa.bindparam("key"))


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """A row in the form of the tables, checked: no database refuses it.

    >>> insert_rows(connection, [prepare(item, codec)], [(uid, timestamp_id)])
    """

    columns: dict[str, Any]
    """Of `groups`, without the ids."""
    data: bytes | None
    """The payload; None where the item has none."""
    checksum: int
    """Of `data` alone."""
    tags: dict[str, TagValue]
    uid: int
    timestamp_id: int
    """Ids that the item brings."""


def prepare(item: StorageItem, codec: Codec, *, keep_payload: bool = False) -> PreparedRow:
    """The row of `item`; with `keep_payload` an item without payload has no bytes either.

    Raises:
        ValueError: `check_row` refuses it, or the codec refuses the payload.
    """
    check_row(item)
    columns = {
        "task_name": item.task_name,
        "status": plain_value(item.status),
        "staleness": item.staleness,
        "priority": float(item.priority),
        "oldest_model_step": item.oldest_model_step,
        "train_step": item.train_step,
        "status_before": plain_value(item.status_before),
        "tags": json.dumps(item.tags) if item.tags else "{}",
    }
    data = None if keep_payload and item.item is None else codec.encode(item.item)
    return PreparedRow(
        columns, data, 0 if data is None else zlib.crc32(data), dict(item.tags), item.uid, item.timestamp_id
    )


class StoredPayload(NamedTuple):
    """The bytes of a payload as they were read, and what was noted of them when they were written."""

    data: bytes
    checksum: int

    def checked(self, uid: int) -> bytes:
        """The bytes; DamagedRowError if they are not those that were stored for this row."""
        if self.checksum != checksum_of(uid, zlib.crc32(self.data)):
            raise DamagedRowError(uid, "its checksum does not fit")
        return self.data


def checksum_of(uid: int, checksum: int) -> int:
    """CRC-32 of a payload and the uid of its row: bytes that stand at another row do not fit either."""
    return zlib.crc32(_UID.pack(uid), checksum)


_UID = struct.Struct("<q")


def insert_rows(
    connection: sa.Connection, rows: Sequence[PreparedRow], ids: Sequence[tuple[int, int]]
) -> None:
    """Insert the rows, whose tasks are known, under these ``(uid, timestamp_id)``."""
    if not rows:
        return
    connection.execute(
        groups.insert(),
        [
            {"uid": uid, "timestamp_id": timestamp_id, **row.columns}
            for row, (uid, timestamp_id) in zip(rows, ids, strict=True)
        ],
    )
    connection.execute(
        payloads.insert(),
        [
            {"uid": uid, "data": row.data, "checksum": checksum_of(uid, row.checksum)}
            for row, (uid, _) in zip(rows, ids, strict=True)
        ],
    )
    _insert_tags(connection, {uid: row.tags for row, (uid, _) in zip(rows, ids, strict=True)})


def insert_tasks(connection: sa.Connection, names: Iterable[str]) -> None:
    """Make sure that the tasks are known; the queries of a store go task by task."""
    # In one order everywhere, so that two processes never wait for each other.
    missing = [{"task_name": name} for name in sorted(set(names))]
    if missing:
        insert_missing(connection, tasks, missing)


def replace_rows(connection: sa.Connection, rows: Sequence[PreparedRow]) -> None:
    """Replace the rows of these uids, which exist; a row without bytes keeps its payload."""
    if not rows:
        return
    insert_tasks(connection, (row.columns["task_name"] for row in rows))
    connection.execute(_UPDATE, [{"key": row.uid, **row.columns} for row in rows])
    data = [
        {"key": row.uid, "data": row.data, "checksum": checksum_of(row.uid, row.checksum)}
        for row in rows
        if row.data is not None
    ]
    if data:
        connection.execute(payloads.update().where(payloads.c.uid == sa.bindparam("key")), data)
    latest = {row.uid: row.tags for row in rows}
    for uids in chunks(latest):
        connection.execute(tags.delete().where(tags.c.uid.in_(uids)))
    _insert_tags(connection, latest)


def _insert_tags(connection: sa.Connection, of_rows: Mapping[int, dict[str, TagValue]]) -> None:
    empty = dict.fromkeys(TAG_COLUMNS.values())
    lines = [
        {
            "uid": uid,
            "name": encode_text(name),
            **empty,
            TAG_COLUMNS[type(value)]: _tag_value(value),
        }
        for uid, row_tags in of_rows.items()
        for name, value in row_tags.items()
    ]
    if lines:
        connection.execute(tags.insert(), lines)


def _tag_value(value: TagValue) -> bytes | int | float:
    if isinstance(value, str):
        return encode_text(value)
    return int(value) if isinstance(value, bool) else value


def delete_rows(connection: sa.Connection, uids: Iterable[int]) -> None:
    """Delete the rows of these uids."""
    for chunk in chunks(uids):
        for statement in _DELETE:
            connection.execute(statement, {"uids": chunk})


def archive_rows(connection: sa.Connection, uids: Iterable[int], train_step: int) -> None:
    """Make the rows of these uids ARCHIVED."""
    is_archived = groups.c.status == ARCHIVED
    before = sa.case((is_archived, groups.c.status_before), else_=groups.c.status)
    for chunk in chunks(uids):
        connection.execute(
            groups.update()
            .where(groups.c.uid.in_(chunk))
            .values(status=ARCHIVED, status_before=before, train_step=train_step)
        )


def lock_rows(
    connection: sa.Connection,
    uids: Iterable[int],
    codec: Codec,
    train_steps: Mapping[str, int | None],
    *,
    skip_locked: bool = False,
) -> dict[int, StorageItem]:
    """The rows of these uids that exist, without payload; nobody else changes them before the commit."""
    found = {}
    # By uid, so that two processes that lock the same rows do not wait for each other.
    for chunk in chunks(sorted(set(uids))):
        statement = _ROW.where(groups.c.uid.in_(chunk)).order_by(groups.c.uid)
        lines = connection.execute(statement.with_for_update(skip_locked=skip_locked))
        for item in read_rows(lines, codec, train_steps):
            found[item.uid] = item
    return found


def write_priorities(connection: sa.Connection, priorities: Mapping[int, float]) -> int:
    """Give the live rows of these uids these priorities; return how many there are."""
    uids = sorted(storable_uids(priorities))
    if not uids:
        return 0
    lines = [{"key": uid, "priority": float(priorities[uid])} for uid in uids]
    return connection.execute(_UPDATE.where(LIVE), lines).rowcount


def read_rows(
    lines: Iterable[Any], codec: Codec, train_steps: Mapping[str, int | None]
) -> Iterator[StorageItem]:
    """Items without payload, as stale as at their task's train step."""
    for line in lines:
        uid, timestamp_id, task, status, staleness, priority, oldest, train_step, before, tag_text = line
        item = StorageItem(
            None,
            uid,
            timestamp_id,
            task,
            codec.status(status),
            staleness,
            {} if tag_text == "{}" else json.loads(tag_text),
            priority,
            oldest,
            train_step,
            None if before is None else codec.status(before),
        )
        item.staleness = staleness_at(item, train_steps.get(task))
        yield item


def attach_payloads(connection: sa.Connection, items: Sequence[StorageItem], codec: Codec) -> None:
    """Load the payloads of these rows.

    Raises:
        ValueError: a payload is damaged or of another codec.
    """
    for chunk in chunks(items):
        data = read_payloads(connection, [item.uid for item in chunk])
        for item in chunk:
            # Each is let go when it is decoded.
            item.item = decode_payload(item.uid, data.pop(item.uid), codec)


def decode_payload(uid: int, payload: StoredPayload, codec: Codec) -> Any:
    """The payload of the row.

    Raises:
        DamagedRowError: it is not what was stored.
        ValueError: it is of another codec; the message names the row.
    """
    data = payload.checked(uid)
    try:
        return codec.decode(data)
    except ValueError as error:
        raise ValueError(f"the row with uid {uid}: {error}") from error


def read_payloads(connection: sa.Connection, uids: Iterable[int]) -> dict[int, StoredPayload]:
    """The bytes of the payloads of these rows, unchecked; DamagedRowError if there are none."""
    found: dict[int, StoredPayload] = {}
    for chunk in chunks(uids):
        statement = sa.select(payloads).where(payloads.c.uid.in_(chunk))
        found.update((uid, StoredPayload(data, sum_)) for uid, data, sum_ in connection.execute(statement))
        for uid in chunk:
            if uid not in found:
                raise DamagedRowError(uid, "it is missing")
    return found


@dataclass(frozen=True, slots=True)
class Removed:
    """Rows that a call removed, or archived for a train step, and the bytes of those not yet decoded."""

    rows: list[StorageItem]
    data: dict[int, StoredPayload]
    train_step: int | None = None

    def decode(self, codec: Codec) -> None:
        """Give the rows their payloads; ValueError if one is damaged or of another codec."""
        for row in self.rows:
            row.item = decode_payload(row.uid, self.data[row.uid], codec)
            # Each is let go when it is decoded.
            del self.data[row.uid]

    def prepared(self, codec: Codec) -> list[PreparedRow]:
        """The rows as they were, to be put back."""
        keep = self.train_step is not None
        rows = []
        for item in self.rows:
            left = self.data.get(item.uid)
            bare = keep or left is not None
            row = prepare(copy_row(item, item=None) if bare else item, codec, keep_payload=bare)
            if left is not None and not keep:
                row = replace(row, data=left.data, checksum=zlib.crc32(left.data))
            rows.append(row)
        return rows


def put_back(connection: sa.Connection, removed: Removed, rows: Sequence[PreparedRow], codec: Codec) -> None:
    """Undo a removal; rows that somebody has changed since are left alone."""
    found = lock_rows(connection, [row.uid for row in rows], codec, {})
    if removed.train_step is None:
        missing = [row for row in rows if row.uid not in found]
        insert_rows(connection, missing, [(row.uid, row.timestamp_id) for row in missing])
        return
    held = {uid for uid, row in found.items() if row.is_archived and row.train_step == removed.train_step}
    replace_rows(connection, [row for row in rows if row.uid in held])


def select_rows() -> sa.Select[Any]:
    """A statement whose lines `read_rows` reads."""
    return _ROW


def chunks(values: Iterable[Any]) -> Iterator[list[Any]]:
    """The values in lists that a statement can take."""
    iterator = iter(values)
    while chunk := list(islice(iterator, CHUNK)):
        yield chunk


def storable_uids(uids: Iterable[int]) -> list[int]:
    """Those uids that a database can look up, each once."""
    return [uid for uid in dict.fromkeys(uids) if INT_MIN <= uid <= INT_MAX]
