"""Rows and rollouts as Arrow tables, and back.

::

    StorageItems --group_batches--> groups table:   one line per group, the row's fields
                 --rollout_batches> rollouts table: one line per rollout, token arrays as list columns
    groups table, rollouts table --join--> one flat table for pandas and Parquet; it is not read back

A column holds a field's value wherever it can hold it exactly. Everything else, and every nested value, is in
the column ``fields`` as JSON text (`values`), with raw bytes in ``blobs``; there an entry takes precedence
over the column. So plain runs are plain tables, and odd values still come back as they were.
"""

import json
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.extras import needed_by
from forebay.replay.format.values import Decoder, Encoder, damage_named
from forebay.replay.groups import StoredGroup, build_states
from forebay.replay.query import FIELD_KINDS, plain_value
from forebay.replay.stores.contract import StorageItem, check_priority, check_tags, staleness_at
from forebay.replay.stores.frame import rows_to_frame
from forebay.types import FIELDS, ROLLOUT_FIELDS, ROLLOUT_SLOTS, RolloutState, Status

if TYPE_CHECKING:
    from pandas import DataFrame


def group_batches(items: Sequence[StorageItem], train_steps: Mapping[str, int]) -> Iterator[pa.RecordBatch]:
    """The groups table of these rows, with their staleness as of `train_steps`, in pieces of bounded size."""
    for start in range(0, len(items), BATCH_GROUPS):
        lines = [
            {name: plain_value(getattr(row, name)) for name in _ROW_FIELDS}
            | {
                "staleness": staleness_at(row, train_steps.get(row.task_name)),
                "tags": json.dumps(row.tags),
                "num_rollouts": len(row.item),
            }
            for row in items[start : start + BATCH_GROUPS]
        ]
        yield pa.RecordBatch.from_pylist(lines, schema=GROUPS_SCHEMA)


TEXT_FIELDS = [name for name, rule in FIELDS.items() if rule.kind == "text"]
INT_FIELDS = [name for name, rule in FIELDS.items() if rule.kind == "whole"]
ARRAY_FIELDS = {name: pa.from_numpy_dtype(rule.dtype) for name, rule in FIELDS.items() if rule.kind == "array"}
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

_ROW_FIELDS = GROUPS_SCHEMA.names[:-1]


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
    columns: dict[str, list[Any]] = {
        "uid": [uid for uid, group in groups for _ in group],
        "member": [member for _, group in groups for member in range(len(group))],
        "status": [state.status.value for state in states],
        "score": [],
        "fields": [],
        "blobs": [],
    }
    # Of each rollout: what no column says exactly.
    odd: list[dict[str, Any]] = [{} for _ in states]
    for name in (*TEXT_FIELDS, *INT_FIELDS):
        values = [getattr(state, name) for state in states]
        columns[name] = list(map(_readable_text if name in TEXT_FIELDS else _storable_int, values))
        for rest, value, said in zip(odd, values, columns[name], strict=True):
            # Nearly always the column has the object itself.
            if said is not value and (type(said) is not type(value) or said != value):
                rest[name] = value
    for _, group in groups:
        # Blobs that members share are with the first that has them.
        encoder = Encoder()
        for state in group:
            # Not read back: it is for readers of the table. The reward itself is in ``fields``.
            score = state.reward.get("score") if isinstance(state.reward, dict) else None
            columns["score"].append(float(score) if isinstance(score, numbers.Real) else None)
            num_before, rest = len(encoder.blobs), odd[len(columns["fields"])]
            rest |= zip(NESTED_FIELDS, _read_nested(state), strict=True)
            tree = {
                name: encoder.encode(value, f"rollout {state.rollout_id!r}: {name}")
                for name, value in rest.items()
                if value is not None
            }
            columns["fields"].append(_to_json(tree))
            columns["blobs"].append(encoder.blobs[num_before:])
    arrays = {name: pa.array(values, ROLLOUTS_SCHEMA.field(name).type) for name, values in columns.items()}
    for name in ARRAY_FIELDS:
        parts = [getattr(state, name) for state in states]
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum(list(map(len, parts)), out=offsets[1:])
        arrays[name] = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(parts)))
    ordered = [arrays[name] for name in ROLLOUTS_SCHEMA.names]
    return pa.RecordBatch.from_arrays(ordered, schema=ROLLOUTS_SCHEMA)


_read_nested = attrgetter(*NESTED_FIELDS)
_to_json = json.JSONEncoder(separators=(",", ":")).encode


def _readable_text(value: Any) -> str | None:
    """`value` as UTF-8 can say it."""
    if value is None:
        return None
    text = str(value)
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _storable_int(value: Any) -> int | None:
    return value if type(value) is int and -(2**63) <= value < 2**63 else None


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
    # Prepended is a uid that differs from the first: the first rollout begins a group, too.
    starts = np.flatnonzero(np.diff(uids, prepend=uids[:1] - 1)) if len(uids) else np.zeros(0, np.int64)
    sizes = np.diff(starts, append=len(uids))
    known, expected = (groups.column(name).to_numpy() for name in ("uid", "num_rollouts"))
    found, wanted = np.argsort(uids[starts]), np.argsort(known)
    if not np.array_equal(uids[starts][found], known[wanted]):
        raise ValueError("its groups are not those of its rollouts, or a group's rollouts lie apart")
    if not np.array_equal(sizes[found], expected[wanted]) or not (sizes > 0).all():
        raise ValueError("a group does not have all its rollouts")


def read_rows(groups: pa.Table) -> list[StorageItem]:
    """The rows of the groups table, without their rollouts.

    Raises:
        ValueError: a place holds what no row has there.
    """
    rows = []
    with damage_named("the table of groups"):
        for line in groups.to_pylist():
            row = StorageItem(None, **{name: line[name] for name in _ROW_FIELDS})
            row.status = Status(row.status)
            row.status_before = None if row.status_before is None else Status(row.status_before)
            row.tags = check_tags(json.loads(line["tags"]))
            row.priority = check_priority(row.priority)
            rows.append(row)
    return rows


def read_groups(batch: pa.RecordBatch) -> Iterator[tuple[int, StoredGroup]]:
    """The groups in a piece of the rollouts table, each with its uid.

    Raises:
        ValueError: a place holds what no rollout has there.
    """
    with damage_named("the table of rollouts"):
        columns: dict[str, Any] = dict.fromkeys(NESTED_FIELDS, [None] * batch.num_rows)
        columns |= {name: batch.column(name).to_pylist() for name in (*TEXT_FIELDS, *INT_FIELDS)}
        columns["status"] = list(map(Status, batch.column("status").to_pylist()))
        for name in ARRAY_FIELDS:
            column = batch.column(name)
            ends, values = column.offsets.to_pylist(), column.values.to_numpy()
            # Copies, so that they can be written to and do not keep the file in memory.
            columns[name] = [values[start:end].copy() for start, end in pairwise(ends)]
        states = build_states(columns[name] for name in ROLLOUT_FIELDS)
        nested, blobs = batch.column("fields").to_pylist(), batch.column("blobs")
        has_blobs = len(blobs.values) > 0
        for uid, lines in groupby(enumerate(batch.column("uid").to_pylist()), key=itemgetter(1)):
            indices = [index for index, _ in lines]
            own = [blob.as_buffer() for i in indices for blob in blobs[i].values] if has_blobs else []
            decoder = Decoder(own)
            for index in indices:
                for name, tree in json.loads(nested[index]).items():
                    _JSON_WRITERS[name](states[index], decoder.decode(tree))
            yield uid, StoredGroup([states[index] for index in indices])


_JSON_WRITERS = {name: ROLLOUT_SLOTS[name].__set__ for name in (*TEXT_FIELDS, *INT_FIELDS, *NESTED_FIELDS)}


_ROLLOUT_COLUMNS = {
    name: f"rollout_{name}" if name in GROUPS_SCHEMA.names else name for name in ROLLOUTS_SCHEMA.names if name != "uid"
}
JOINED_SCHEMA = pa.schema(
    [*GROUPS_SCHEMA, *(ROLLOUTS_SCHEMA.field(name).with_name(shown) for name, shown in _ROLLOUT_COLUMNS.items())]
)


def join(groups: pa.Table, rollouts: pa.RecordBatch) -> pa.RecordBatch:
    """The rollouts whose group is in `groups`, each with the columns of its group.

    Columns that both tables have (``status``, ``task_name``) are the group's; the rollout's own are called
    ``rollout_status`` and ``rollout_task_name``.
    """
    places = pc.index_in(rollouts.column("uid"), groups.column("uid").combine_chunks())
    rollouts = rollouts.filter(places.is_valid())
    lines = groups.take(places.drop_null())
    columns = [lines.column(name).combine_chunks() for name in GROUPS_SCHEMA.names]
    columns += [rollouts.column(name) for name in _ROLLOUT_COLUMNS]
    return pa.RecordBatch.from_arrays(columns, schema=JOINED_SCHEMA)


def to_frame(items: Sequence[StorageItem], *, payloads: bool) -> "DataFrame":
    """A DataFrame of the rows, or of their rollouts with the columns of `JOINED_SCHEMA`."""
    with needed_by("to_pandas"):
        if not payloads:
            return rows_to_frame(items)
        # The staleness of these rows is taken as it is.
        groups = pa.Table.from_batches(group_batches(items, {}), GROUPS_SCHEMA)
        batches = [join(groups, batch) for batch in rollout_batches(items)]
        return pa.Table.from_batches(batches, JOINED_SCHEMA).to_pandas()
