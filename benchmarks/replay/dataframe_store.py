"""The comparison store of ``scan_design.py``: a DataFrame that is filtered, sorted and put together anew.

It is what one writes with pandas in an afternoon: every put is a `concat`, every count a mask, every take a
filter, a stable sort and a drop, every refresh a new column. It is vectorized throughout (no loop over rows)
and ranks and removes in one pass. Queries are those that a `ReplayBuffer` asks: conditions that all hold.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd

from forebay.replay import StorageBackend, StorageItem, parse_query
from forebay.replay.query import Condition, Query, QueryLike, plain_value
from forebay.replay.stores.contract import parse_order

FIELDS = ("uid", "timestamp_id", "task_name", "status", "staleness", "oldest_model_step", "priority", "item")
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "$eq": operator.eq,
    "$ne": operator.ne,
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}


class FrameStore(StorageBackend):
    """One DataFrame, a line per group, the group itself in an object column."""

    def __init__(self) -> None:
        self._frame = pd.DataFrame(columns=list(FIELDS))
        self._next_id = 0
        self._steps: dict[str, int] = {}

    async def put(self, item: StorageItem) -> int:
        uid = self._next_id
        self._next_id += 1
        self._frame = pd.concat([self._frame, _frame_of([item], [uid])], ignore_index=True)
        return uid

    async def get(
        self, query: QueryLike, *, order: str | None = None, limit: int | None = None, rows_only: bool = False
    ) -> list[StorageItem]:
        return _items_of(self._ranked(query, order, limit), rows_only=rows_only)

    async def count(self, query: QueryLike) -> int:
        return int(_mask(self._frame, parse_query(query)).sum())

    async def take(
        self, uids: Iterable[int], *, query: QueryLike | None = None, train_step: int | None = None
    ) -> list[StorageItem]:
        assert query is None, "only what is measured is written"
        assert train_step is None, "only what is measured is written"
        mask = self._frame["uid"].isin(list(uids))
        taken, self._frame = self._frame[mask], self._frame[~mask]
        return _items_of(taken)

    async def take_first(
        self, count: int, query: QueryLike, *, order: str | None = None, train_step: int | None = None
    ) -> list[StorageItem]:
        assert train_step is None, "only what is measured is written"
        taken = self._ranked(query, order, count)
        self._frame = self._frame.drop(taken.index)
        return _items_of(taken)

    async def delete(self, uids: Iterable[int]) -> None:
        self._frame = self._frame[~self._frame["uid"].isin(list(uids))]

    async def update(self, items: Iterable[StorageItem]) -> None:
        raise NotImplementedError("only what is measured is written")

    async def get_train_step(self, task_name: str) -> int | None:
        return self._steps.get(task_name)

    async def set_train_step(self, task_name: str, train_step: int) -> None:
        if self._steps.get(task_name) == train_step:
            return
        self._steps[task_name] = train_step
        mask = self._frame["task_name"] == task_name
        self._frame.loc[mask, "staleness"] = train_step - 1 - self._frame.loc[mask, "oldest_model_step"]

    def __len__(self) -> int:
        return len(self._frame)

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError("only what is measured is written")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Fill the frame at once: 100,000 single puts would take half an hour."""
        items = state["items"]
        self._frame = _frame_of(items, [item.uid for item in items])
        self._next_id = state["next_uid"]
        self._steps = dict(state["train_steps"])

    def _ranked(self, query: QueryLike, order: str | None, limit: int | None) -> pd.DataFrame:
        field, descending = parse_order(order)
        found = self._frame[_mask(self._frame, parse_query(query))]
        found = found.sort_values(field, ascending=not descending, kind="stable")
        return found if limit is None else found.head(limit)


def _mask(frame: pd.DataFrame, query: Query) -> pd.Series:
    if isinstance(query, Condition):
        if query.op == "$in":
            assert isinstance(query.value, tuple)
            return frame[query.field].isin(query.value)
        return _COMPARE[query.op](frame[query.field], query.value)
    mask = pd.Series(True, index=frame.index)
    for part in query.parts:
        mask &= _mask(frame, part)
    return mask


def _frame_of(items: list[StorageItem], uids: list[int]) -> pd.DataFrame:
    lines = zip(uids, items, strict=True)
    return pd.DataFrame(
        [
            (
                uid,
                uid,
                item.task_name,
                plain_value(item.status),
                item.staleness,
                item.oldest_model_step,
                item.priority,
                item.item,
            )
            for uid, item in lines
        ],
        columns=list(FIELDS),
    )


def _items_of(frame: pd.DataFrame, *, rows_only: bool = False) -> list[StorageItem]:
    return [
        StorageItem(
            None if rows_only else line.item,
            line.uid,
            line.timestamp_id,
            line.task_name,
            line.status,
            line.staleness,
            oldest_model_step=line.oldest_model_step,
        )
        for line in frame.itertuples(index=False)
    ]
