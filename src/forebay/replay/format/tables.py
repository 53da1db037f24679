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
from forebay.replay.query import plain_value
from forebay.replay.stores.contract import StorageItem, check_priority, check_tags, staleness_at
from forebay.types import ROLLOUT_FIELDS, ROLLOUT_SLOTS, RolloutState, Status

TEXT_FIELDS = ("rollout_id", "group_id", "session_id", "task_name", "response", "finish_reason", "error_msg")
INT_FIELDS = ("num_tries", "seq_staleness")
ARRAY_FIELDS = {
    "prompt_ids": pa.int32(),
    "tokens": pa.int32(),
    "response_ids": pa.int32(),
    "logprobs": pa.float32(),
    "response_mask": pa.uint8(),
    "response_model_steps": pa.int32(),
}
_COLUMN_FIELDS = (*TEXT_FIELDS, *INT_FIELDS, *ARRAY_FIELDS, "status")
NESTED_FIELDS = tuple(name for name in ROLLOUT_FIELDS if name not in _COLUMN_FIELDS)
"""Always in the JSON column, unless None."""

GROUPS_SCHEMA = pa.schema(
    {
        "uid": pa.int64(),
        "timestamp_id": pa.int64(),
        "task_name": pa.string(),
        "status": pa.string(),
        "staleness": pa.int64(),
        "oldest_model_step": pa.int64(),
        "priority": pa.float64(),
        "train_step": pa.int64(),
        "status_before": pa.string(),
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
        {
            "uid": row.uid,
            "timestamp_id": row.timestamp_id,
            "task_name": row.task_name,
            "status": plain_value(row.status),
            "staleness": staleness_at(row, train_steps.get(row.task_name)),
            "oldest_model_step": row.oldest_model_step,
            "priority": row.priority,
            "train_step": row.train_step,
            "status_before": plain_value(row.status_before),
            "tags": json.dumps(row.tags),
            "num_rollouts": len(row.item),
        }
        for row in items
    ]
    return pa.RecordBatch.from_pylist(lines, schema=GROUPS_SCHEMA)


def group_batches(items: Sequence[StorageItem], train_steps: Mapping[str, int]) -> Iterator[pa.RecordBatch]:
    """The groups table in pieces of bounded size."""
    for start in range(0, len(items), BATCH_GROUPS):
        yield group_batch(items[start : start + BATCH_GROUPS], train_steps)


def rollout_batches(items: Iterable[StorageItem]) -> Iterator[pa.RecordBatch]:
    """The rollouts table in pieces of bounded size; a group is never split.

    Raises:
        ValueError: a rollout holds a value that cannot be stored.
    """
    chunk: list[StorageItem] = []
    num_tokens = num_rollouts = 0
    for item in items:
        chunk.append(item)
        num_rollouts += len(item.item)
        num_tokens += sum(len(state.tokens) + len(state.response_ids) for state in item.item)
        if num_tokens >= BATCH_TOKENS or num_rollouts >= BATCH_ROLLOUTS:
            yield _rollout_batch(chunk)
            chunk, num_tokens, num_rollouts = [], 0, 0
    if chunk:
        yield _rollout_batch(chunk)


def _rollout_batch(items: Sequence[StorageItem]) -> pa.RecordBatch:
    states: list[RolloutState] = [state for item in items for state in item.item]
    nested = [pair for item in items for pair in _encode_nested(item.item)]
    columns = {
        "uid": [item.uid for item in items for _ in item.item],
        "member": [member for item in items for member in range(len(item.item))],
        "status": [state.status.value for state in states],
        "score": [_score(state) for state in states],
        "fields": [text for text, _ in nested],
        "blobs": [blobs for _, blobs in nested],
    }
    for name in (*TEXT_FIELDS, *INT_FIELDS):
        show = _readable_text if name in TEXT_FIELDS else _storable_int
        columns[name] = [show(getattr(state, name)) for state in states]
    arrays = {name: pa.array(values, ROLLOUTS_SCHEMA.field(name).type) for name, values in columns.items()}
    for name in ARRAY_FIELDS:
        arrays[name] = _list_array([getattr(state, name) for state in states])
    return pa.RecordBatch.from_arrays(
        [arrays[name] for name in ROLLOUTS_SCHEMA.names], schema=ROLLOUTS_SCHEMA
    )


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


def read_items(groups: pa.Table, rollouts: pa.RecordBatchFileReader) -> list[StorageItem]:
    """The rows of the groups table with their rollouts.

    Raises:
        ValueError: the tables do not belong together.
    """
    payloads: dict[int, StoredGroup] = {}
    for index in range(rollouts.num_record_batches):
        payloads.update(read_groups(rollouts.get_batch(index)))
    items = read_rows(groups)
    for item, size in zip(items, groups.column("num_rollouts").to_pylist(), strict=True):
        item.item = payloads.get(item.uid)
        if item.item is None or len(item.item) != size:
            raise ValueError(f"group {item.uid} does not have all its rollouts in the rollouts table")
    if len(payloads) != len(items):
        raise ValueError(f"the rollouts table holds {len(payloads)} groups, the groups table {len(items)}")
    return items


def _lines(groups: pa.Table) -> Iterator[dict[str, Any]]:
    for batch in groups.to_batches():
        yield from batch.to_pylist()


def _read_row(line: dict[str, Any]) -> StorageItem:
    before = line["status_before"]
    return StorageItem(
        item=None,
        uid=line["uid"],
        timestamp_id=line["timestamp_id"],
        task_name=line["task_name"],
        status=Status(line["status"]),
        staleness=line["staleness"],
        tags=check_tags(json.loads(line["tags"])),
        priority=check_priority(line["priority"]),
        oldest_model_step=line["oldest_model_step"],
        train_step=line["train_step"],
        status_before=None if before is None else Status(before),
    )


def read_rows(groups: pa.Table) -> list[StorageItem]:
    """The rows of the groups table, without their rollouts.

    Raises:
        ValueError: a place holds what no row has there.
    """
    with damage_named("the table of groups"):
        return [_read_row(line) for line in _lines(groups)]


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
