"""The check of a state before a store takes it over: every store refuses the same, and keeps what it has."""

from collections.abc import Mapping
from typing import Any

from forebay.replay.query import ARCHIVED, plain_value
from forebay.replay.stores.contract import STATE_VERSION, StorageItem, check_row


def check_state(state: Mapping[str, Any]) -> list[StorageItem]:
    """The rows of a store's state, in arrival order.

    Raises:
        ValueError: another version, ids that are doubled or not below the counters, a consumed row that
            could not be brought back, or one that `check_row` refuses.
    """
    if state.get("version") != STATE_VERSION:
        raise ValueError(f"a store's state has version {STATE_VERSION}, got {state.get('version')!r}")
    rows: list[StorageItem] = sorted(state["items"], key=lambda row: row.timestamp_id)
    for name in ("uid", "timestamp_id"):
        ids = {getattr(row, name) for row in rows}
        limit = state[f"next_{name}"]
        if len(ids) != len(rows) or any(not 0 <= id_ < limit for id_ in ids):
            raise ValueError(f"the state holds a {name} twice, or one that is not in 0..{limit - 1}")
    for row in rows:
        check_row(row)
        # One that was put as ARCHIVED was nothing before, has no train step, and is never brought back.
        if row.is_archived and row.train_step is not None and plain_value(row.status_before) in (None, ARCHIVED):
            raise ValueError(f"the state does not say what the consumed row {row.uid} was before")
    return rows
