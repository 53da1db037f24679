"""Rows and rollouts as Arrow tables, and back.

::

    StorageItems --group_batch----> groups table:   one line per group, the row's fields
                 --rollout_batches> rollouts table: one line per rollout, token arrays as list columns

A column holds a field's value wherever it can hold it exactly. Everything else, and every nested value, is in
the column ``fields`` as JSON text (`payload`), with raw bytes in ``blobs``; there an entry takes precedence
over the column. So plain runs are plain tables, and odd values still come back as they were.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.replay.format.values import Decoder, Encoder, damage_named
from forebay.replay.groups import StoredGroup
from forebay.replay.query import FIELD_KINDS, plain_value
from forebay.replay.stores.contract import StorageItem, check_priority, check_tags, staleness_at
from forebay.types import FIELDS, ROLLOUT_SLOTS, RolloutState, Status

TEXT_FIELDS = [name for name, rule in FIELDS.items() if rule.kind == "text"]
INT_FIELDS = [name for name, rule in FIELDS.items() if rule.kind == "whole"]
ARRAY_FIELDS = {
    name: pa.from_numpy_dtype(rule.dtype) for name, rule in FIELDS.items() if rule.kind == "array"
}
NESTED_FIELDS = [name for name, rule in FIELDS.items() if rule.kind in ("params", "value")]
"""Always in the JSON column, unless None."""

_ARROW_KINDS = {int: pa.int64(), float: pa.float64(), str: pa.string()}
GROUPS_SCHEMA = pa.schema(
    {
        **{name: _ARROW_KINDS[kind] for name, kind in FIELD_KINDS.items()},
        "tags": pa.string(),
        "num_rollouts": pa.int64(),
    }
)
ROLLOUTS_SCHEMA = pa.schema(
    {
        "uid": pa.int64(),
        "member": pa.int64(),
        "status": pa.string(),
        "score": pa.float64(),
        **dict.fromkeys(TEXT_FIELDS, pa.large_string()),
        **dict.fromkeys(INT_FIELDS, pa.int64()),
        **{name: pa.large_list(kind) for name, kind in ARRAY_FIELDS.items()},
        "fields": pa.large_string(),
        "blobs": pa.large_list(pa.large_binary()),
    }
)

SCHEMAS = {"groups": GROUPS_SCHEMA, "rollouts": ROLLOUTS_SCHEMA}

OPTIONAL_COLUMNS = {
    "groups": ("oldest_model_step", "train_step", "status_before"),
    "rollouts": ("score", *TEXT_FIELDS, *INT_FIELDS),
}
"""Those of each table that may have empty places."""

BATCH_TOKENS = 500_000
"""About 4 MB of token arrays: the memory of one piece is used again for the next, and stays in the cache."""
BATCH_ROLLOUTS = 4096
BATCH_GROUPS = 8192
"""Arrow turns a piece into columns without letting other threads run; this takes about 10 ms."""


def group_batch(items: Sequence[StorageItem], train_steps: Mapping[str, int]) -> pa.RecordBatch:
    """The groups table of these rows, with their staleness as of `train_steps`."""
    lines = [
        {name: plain_value(getattr(row, name)) for name in _ROW_FIELDS}
        | {
            "staleness": staleness_at(row, train_steps.get(row.task_name)),
            "tags": json.dumps(row.tags),
            "num_rollouts": len(row.item),
        }
        for row in items
    ]
    return pa.RecordBatch.from_pylist(lines, schema=GROUPS_SCHEMA)


_ROW_FIELDS = GROUPS_SCHEMA.names[:-1]


def group_batches(items: Sequence[StorageItem], train_steps: Mapping[str, int]) -> Iterator[pa.RecordBatch]:
    """The groups table in pieces of bounded size."""
    for start in range(0, len(items), BATCH_GROUPS):
        yield group_batch(items[start : start + BATCH_GROUPS], train_steps)


def rollout_batches(items: Iterable[StorageItem]) -> Iterator[pa.RecordBatch]:
    """The rollouts table in pieces of bounded size; a group is never split.

    Raises:
        ValueError: a rollout holds a value that cannot be stored.
    """
    chunk: list[tuple[int, list[RolloutState]]] = []
    num_tokens = num_rollouts = 0
    for item in items:
        # A list, because a packed group is decoded whenever it is walked.
        group = list(item.item)
        chunk.append((item.uid, group))
        num_rollouts += len(group)
        num_tokens += sum(len(state.tokens) + len(state.response_ids) for state in group)
        if num_tokens >= BATCH_TOKENS or num_rollouts >= BATCH_ROLLOUTS:
            yield _rollout_batch(chunk)
            chunk, num_tokens, num_rollouts = [], 0, 0
    if chunk:
        yield _rollout_batch(chunk)


def _rollout_batch(groups: Sequence[tuple[int, Sequence[RolloutState]]]) -> pa.RecordBatch:
    states = [state for _, group in groups for state in group]
    nested = [pair for _, group in groups for pair in _encode_nested(group)]
    columns = {
        "uid": [uid for uid, group in groups for _ in group],
        "member": [member for _, group in groups for member in range(len(group))],
        "status": [state.status.value for state in states],
        "score": [_score(state) for state in states],
        "fields": [text for text, _ in nested],
        "blobs": [blobs for _, blobs in nested],
        **{name: [_readable_text(getattr(state, name)) for state in states] for name in TEXT_FIELDS},
        **{name: [_storable_int(getattr(state, name)) for state in states] for name in INT_FIELDS},
    }
    arrays = {name: pa.array(values, ROLLOUTS_SCHEMA.field(name).type) for name, values in columns.items()}
    for name in ARRAY_FIELDS:
        arrays[name] = _list_array([getattr(state, name) for state in states])
    ordered = [arrays[name] for name in ROLLOUTS_SCHEMA.names]
    return pa.RecordBatch.from_arrays(ordered, schema=ROLLOUTS_SCHEMA)


def _encode_nested(group: Sequence[RolloutState]) -> Iterator[tuple[str, list[bytes]]]:
    """For each member: its JSON text, and the blobs that no member before it had.

    The text has what is not None and that no column says exactly.
    """
    encoder = Encoder()
    for state in group:
        num_before = len(encoder.blobs)
        odd = [pair for pair in zip(TEXT_FIELDS, _read_texts(state), strict=True) if not _is_plain(pair[1])]
        odd += [
            (name, number) for name in INT_FIELDS if _storable_int(number := getattr(state, name)) is None
        ]
        odd += zip(NESTED_FIELDS, _read_nested(state), strict=True)
        tree = {
            name: encoder.encode(value, f"rollout {state.rollout_id!r}: {name}")
            for name, value in odd
            if value is not None
        }
        yield _to_json(tree), encoder.blobs[num_before:]


_read_texts = attrgetter(*TEXT_FIELDS)
_read_nested = attrgetter(*NESTED_FIELDS)
_to_json = json.JSONEncoder(separators=(",", ":")).encode


def _is_plain(value: Any) -> bool:
    """Whether a text column says it."""
    return value is None or (type(value) is str and (value.isascii() or _readable_text(value) == value))


def _readable_text(value: Any) -> str | None:
    """`value` as UTF-8 can say it."""
    if value is None:
        return None
    text = str(value)
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _storable_int(value: Any) -> int | None:
    return value if type(value) is int and -(2**63) <= value < 2**63 else None


def _score(state: RolloutState) -> float | None:
    score = state.reward.get("score") if isinstance(state.reward, dict) else None
    return float(score) if isinstance(score, numbers.Real) else None


def _list_array(arrays: Sequence[np.ndarray[Any, Any]]) -> pa.LargeListArray:
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays)))


def check_table(reader: pa.RecordBatchFileReader, kind: str) -> None:
    """Check every piece of the file of this kind of table: Arrow itself trusts the offsets in it.

    Raises:
        ValueError: the columns are others, their content is not sound, or a place must not be empty.
    """
    schema = SCHEMAS[kind]
    if reader.schema != schema:
        raise ValueError("it has other columns than this release reads")
    for index in range(reader.num_record_batches):
        batch = reader.get_batch(index)
        batch.validate(full=True)
        for name in schema.names:
            column = batch.column(name)
            values = column.values if isinstance(column, pa.LargeListArray) else column
            is_empty = column.null_count and name not in OPTIONAL_COLUMNS[kind]
            if is_empty or (values is not column and values.null_count):
                raise ValueError(f"column {name} has empty places")


def check_together(groups: pa.Table, rollouts: pa.RecordBatchFileReader) -> None:
    """Check that each group has its rollouts, side by side.

    Raises:
        ValueError: a group has none or not all, or its rollouts lie apart, or some have no group.
    """
    batches = [rollouts.get_batch(index).column("uid") for index in range(rollouts.num_record_batches)]
    uids = np.concatenate([np.zeros(0, np.int64), *(column.to_numpy() for column in batches)])
    starts = np.flatnonzero(np.diff(uids, prepend=uids[:1] - 1)) if len(uids) else np.zeros(0, np.int64)
    sizes = np.diff(starts, append=len(uids))
    known, expected = (groups.column(name).to_numpy() for name in ("uid", "num_rollouts"))
    found, wanted = np.argsort(uids[starts]), np.argsort(known)
    if not np.array_equal(uids[starts][found], known[wanted]):
        raise ValueError("its groups are not those of its rollouts, or a group's rollouts lie apart")
    if not np.array_equal(sizes[found], expected[wanted]) or not (sizes > 0).all():
        raise ValueError("a group does not have all its rollouts")


def read_items(groups: pa.Table, rollouts: pa.RecordBatchFileReader) -> list[StorageItem]:
    """The rows of the groups table with their rollouts; the tables belong together (`check_together`).

    Raises:
        ValueError: a place holds what no row or rollout has there.
    """
    payloads: dict[int, StoredGroup] = {}
    for index in range(rollouts.num_record_batches):
        payloads.update(read_groups(rollouts.get_batch(index)))
    items = read_rows(groups)
    for item in items:
        item.item = payloads[item.uid]
    return items


def read_rows(groups: pa.Table) -> list[StorageItem]:
    """The rows of the groups table, without their rollouts.

    Raises:
        ValueError: a place holds what no row has there.
    """
    with damage_named("the table of groups"):
        return [_read_row(line) for batch in groups.to_batches() for line in batch.to_pylist()]


def _read_row(line: dict[str, Any]) -> StorageItem:
    row = StorageItem(None, **{name: line[name] for name in _ROW_FIELDS})
    row.status = Status(row.status)
    row.status_before = None if row.status_before is None else Status(row.status_before)
    row.tags = check_tags(json.loads(line["tags"]))
    row.priority = check_priority(row.priority)
    return row


def read_groups(batch: pa.RecordBatch) -> Iterator[tuple[int, StoredGroup]]:
    """The groups in a piece of the rollouts table, each with its uid.

    Raises:
        ValueError: a place holds what no rollout has there.
    """
    with damage_named("the table of rollouts"):
        yield from _read_groups(batch)


def _read_groups(batch: pa.RecordBatch) -> Iterator[tuple[int, StoredGroup]]:
    columns = [batch.column(name).to_pylist() for name in _PLAIN_COLUMNS]
    columns += [_split_list(batch.column(name)) for name in ARRAY_FIELDS]
    # One tuple per rollout, in the order of `_WRITERS`.
    plain = list(zip(*columns, strict=True))
    nested = batch.column("fields").to_pylist()
    blobs = batch.column("blobs")
    has_blobs = len(blobs.values) > 0
    for uid, lines in groupby(enumerate(batch.column("uid").to_pylist()), key=itemgetter(1)):
        indices = [index for index, _ in lines]
        own = [blob.as_buffer() for i in indices for blob in blobs[i].values] if has_blobs else []
        decoder = Decoder(own)
        yield uid, StoredGroup([_read_rollout(plain[i], json.loads(nested[i]), decoder) for i in indices])


def _read_rollout(plain: tuple[Any, ...], nested: dict[str, Any], decoder: Decoder) -> RolloutState:
    state = RolloutState.__new__(RolloutState)
    for write, value in zip(_WRITERS, plain, strict=True):
        write(state, value)
    state.status = _STATUSES[plain[0]]
    for name in NESTED_FIELDS:
        if name not in nested:
            _JSON_WRITERS[name](state, None)
    for name, tree in nested.items():
        _JSON_WRITERS[name](state, decoder.decode(tree))
    return state


_PLAIN_COLUMNS = ("status", *TEXT_FIELDS, *INT_FIELDS)
_WRITERS = tuple(ROLLOUT_SLOTS[name].__set__ for name in (*_PLAIN_COLUMNS, *ARRAY_FIELDS))
_JSON_WRITERS = {name: ROLLOUT_SLOTS[name].__set__ for name in (*TEXT_FIELDS, *INT_FIELDS, *NESTED_FIELDS)}
_STATUSES = {status.value: status for status in Status}


def _split_list(column: pa.LargeListArray) -> list[np.ndarray[Any, Any]]:
    """One array per line: copies, so that they can be written to and do not keep the file in memory."""
    offsets = column.offsets.to_pylist()
    values = column.values.to_numpy()
    return [values[start:end].copy() for start, end in pairwise(offsets)]
