"""The part that stores in memory share: ids, train steps, and the changes of a row.

::

    put ----> admit -> a row with ids                get, take <- present <- a row, as stale as now
    update -> replace_row                            state_dict, load_state_dict <- check_state
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from forebay.replay.query import ARCHIVED, plain_value
from forebay.replay.stores.contract import STATE_VERSION, StorageItem, check_row, copy_row, staleness_at


class RowBook:
    """The rows of a store in memory, its id counters, and the latest train step of each task."""

    def __init__(self) -> None:
        self._rows: dict[int, StorageItem] = {}
        self._next_uid = 0
        self._next_timestamp_id = 0
        self._train_steps: dict[str, int] = {}
        self._may_fall: set[str] = set()

    async def get_train_step(self, task_name: str) -> int | None:
        """As `StorageBackend.get_train_step`."""
        return self._train_steps.get(task_name)

    async def set_train_step(self, task_name: str, train_step: int) -> None:
        """As `StorageBackend.set_train_step`."""
        before = self._train_steps.get(task_name)
        if before is None or before < train_step or task_name in self._may_fall:
            self._train_steps[task_name] = train_step
            self._may_fall.discard(task_name)

    async def let_train_steps_fall(self) -> None:
        """As `StorageBackend.let_train_steps_fall`."""
        self._may_fall = set(self._train_steps)

    def state_dict(self) -> dict[str, Any]:
        """The form that `StorageBackend.state_dict` describes."""
        return {
            "version": STATE_VERSION,
            "items": list(self._rows.values()),
            "next_uid": self._next_uid,
            "next_timestamp_id": self._next_timestamp_id,
            "train_steps": dict(self._train_steps),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over counters, train steps and rows, these in arrival order."""
        rows = check_state(state)
        self._next_uid = max(self._next_uid, state["next_uid"])
        self._next_timestamp_id = max(self._next_timestamp_id, state["next_timestamp_id"])
        self._train_steps, self._may_fall = dict(state["train_steps"]), set()
        self._rows = {row.uid: copy_row(row) for row in rows}

    def _admit(self, item: StorageItem) -> StorageItem:
        """A copy of `item` with the ids it will keep; ValueError if some store could not hold it."""
        check_row(item)
        uid = max(item.uid, self._next_uid)
        timestamp_id = max(item.timestamp_id, self._next_timestamp_id)
        self._next_uid, self._next_timestamp_id = uid + 1, timestamp_id + 1
        return copy_row(item, uid=uid, timestamp_id=timestamp_id)

    def _staleness(self, row: StorageItem) -> int:
        """The row's staleness as of the latest train step of its task."""
        return staleness_at(row, self._train_steps.get(row.task_name))

    def _present(self, row: StorageItem, *, rows_only: bool = False) -> StorageItem:
        """A copy to hand out."""
        # Written out, and not `replace`, because every row that leaves the store passes here.
        return StorageItem(
            None if rows_only else row.item,
            row.uid,
            row.timestamp_id,
            row.task_name,
            row.status,
            self._staleness(row),
            dict(row.tags),
            row.priority,
            row.oldest_model_step,
            row.train_step,
            row.status_before,
        )


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
        if (
            row.is_archived
            and row.train_step is not None
            and plain_value(row.status_before) in (None, ARCHIVED)
        ):
            raise ValueError(f"the state does not say what the consumed row {row.uid} was before")
    return rows


def checked(items: Iterable[StorageItem]) -> list[StorageItem]:
    """`items`, all of which every store can hold; ValueError before any of them is stored."""
    listed = list(items)
    for item in listed:
        check_row(item)
    return listed


def replace_row(stored: StorageItem, item: StorageItem) -> StorageItem:
    """The row after an `update`: `item` under the ids of `stored`, with its payload if it brings none."""
    payload = stored.item if item.item is None else item.item
    return copy_row(item, timestamp_id=stored.timestamp_id, item=payload)
