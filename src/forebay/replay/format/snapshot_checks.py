"""What a snapshot must be before anything of it is decoded; checksums say only that it is what was written.

::

    manifest.json --check_manifest--> its entries have the types and ranges that this release writes
    *.arrow --check_table-----------> columns, offsets and text are sound, no place is empty that may not be
    decoding, within `payload.damage_named`: whatever else goes wrong is one ValueError

A file made by another program may have right checksums over anything. Arrow itself trusts the offsets in a
file, and reads beyond its end if they say so.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

DATA_FILE = re.compile(r"(groups|rollouts)-[0-9a-f]{16}\.arrow")
"""Names of the files that hold tables."""

_INTS = ("next_uid", "next_timestamp_id", "num_groups", "num_rollouts")


def check_manifest(manifest: Mapping[str, Any], where: str) -> None:
    """Check what is not in the checksum's power to say.

    Raises:
        ValueError: an entry is missing or has another type or range; the message names it.
    """
    wrong = [name for name in _INTS if not _is_count(manifest.get(name))]
    wrong += [name for name in ("policy_state", "files") if not isinstance(manifest.get(name), dict)]
    if not isinstance(manifest.get("policy"), str):
        wrong.append("policy")
    for name in ("num_evicted", "train_steps"):
        entry = manifest.get(name)
        fits = _is_int64 if name == "train_steps" else _is_count
        if not isinstance(entry, dict) or not all(fits(value) for value in entry.values()):
            wrong.append(name)
    if "files" not in wrong:
        wrong += [f"files.{kind}" for kind in ("groups", "rollouts") if not _is_file(manifest["files"], kind)]
    if wrong:
        raise ValueError(f"{where} is not a manifest of this release: wrong or missing: {', '.join(wrong)}")


def check_table(reader: pa.RecordBatchFileReader, schema: pa.Schema, optional: Collection[str]) -> None:
    """Check every piece of the file; only columns in `optional` may have empty places.

    Raises:
        ValueError: the columns are others, or their content is not sound.
    """
    if reader.schema != schema:
        raise ValueError("it has other columns than this release reads")
    for index in range(reader.num_record_batches):
        batch = reader.get_batch(index)
        batch.validate(full=True)
        for name in schema.names:
            column = batch.column(name)
            values = column.values if isinstance(column, pa.LargeListArray) else column
            if (column.null_count and name not in optional) or (values is not column and values.null_count):
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


def _is_file(files: Mapping[str, Any], kind: str) -> bool:
    entry = files.get(kind)
    name = entry.get("name") if isinstance(entry, dict) else None
    found = DATA_FILE.fullmatch(name) if isinstance(name, str) else None
    return found is not None and found[1] == kind


def _is_count(value: Any) -> bool:
    return _is_int64(value) and value >= 0


def _is_int64(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63
