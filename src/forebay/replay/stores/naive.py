"""A store that scans: the reference that every other store is tested against.

It is not meant to be fast. It shows what a `StorageBackend` must do in the fewest lines: a dict of rows, a
loop over it for every question.

::

    put ----> admit -> insert a row with ids         get, take <- present <- a row, as stale as now
    update -> remove, insert the row anew            state_dict, load_state_dict <- check_state
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from operator import attrgetter
from typing import Any

from forebay.replay.query import Query, QueryLike, matches, parse_query
from forebay.replay.stores import contract
from forebay.replay.stores.state import check_state


class RowBook:
    """The methods of a store in memory: its rows, its id counters, the latest train step of each task.

    A store with indexes overrides `_insert`, `_remove` and `_ranked`, and counts in a way of its own.
    """

    def __init__(self) -> None:
        self._rows: dict[int, contract.StorageItem] = {}
        self._next_uid = 0
        self._next_timestamp_id = 0
        self._train_steps: dict[str, int] = {}
        self._may_fall: set[str] = set()

    async def put(self, item: contract.StorageItem) -> int:
        row = self._admit(item)
        self._insert(row)
        return row.uid

    async def get(
        self, query: QueryLike, *, order: str | None = None, limit: int | None = None, rows_only: bool = False
    ) -> list[contract.StorageItem]:
        rows = self._ranked(parse_query(query), *contract.parse_order(order))
        first = rows if limit is None else islice(rows, max(limit, 0))
        return [self._present(row, rows_only=rows_only) for row in first]

    async def count(self, query: QueryLike) -> int:
        return sum(1 for _ in self._ranked(parse_query(query), contract.ARRIVAL, False))

    async def take(
        self, uids: Iterable[int], *, query: QueryLike | None = None, train_step: int | None = None
    ) -> list[contract.StorageItem]:
        parsed = None if query is None else parse_query(query)
        taken, archived = [], []
        for uid in dict.fromkeys(uids):
            if (row := self._rows.get(uid)) is None:
                continue
            shown = self._present(row)
            if parsed is None or matches(parsed, shown):
                taken.append(shown)
                self._remove(row)
                if train_step is not None:
                    archived.append(contract.archive_row(row, train_step))
        # In order of arrival, so that an index gets them as one run.
        for row in sorted(archived, key=attrgetter("timestamp_id")):
            self._insert(row)
        return taken

    async def delete(self, uids: Iterable[int]) -> None:
        for uid in uids:
            if (row := self._rows.get(uid)) is not None:
                self._remove(row)

    async def update(self, items: Iterable[contract.StorageItem]) -> None:
        listed = list(items)
        # All of them before any is stored.
        for item in listed:
            contract.check_row(item)
        for item in listed:
            if (stored := self._rows.get(item.uid)) is not None:
                self._remove(stored)
                payload = stored.item if item.item is None else item.item
                self._insert(contract.copy_row(item, timestamp_id=stored.timestamp_id, item=payload))

    def __len__(self) -> int:
        return sum(1 for row in self._rows.values() if not row.is_archived)

    async def get_train_step(self, task_name: str) -> int | None:
        return self._train_steps.get(task_name)

    async def set_train_step(self, task_name: str, train_step: int) -> None:
        before = self._train_steps.get(task_name)
        if before is None or before < train_step or task_name in self._may_fall:
            self._train_steps[task_name] = train_step
            self._may_fall.discard(task_name)

    async def let_train_steps_fall(self) -> None:
        self._may_fall = set(self._train_steps)

    def state_dict(self) -> dict[str, Any]:
        """The form that `StorageBackend.state_dict` describes."""
        return {
            "version": contract.STATE_VERSION,
            "items": list(self._rows.values()),
            "next_uid": self._next_uid,
            "next_timestamp_id": self._next_timestamp_id,
            "train_steps": dict(self._train_steps),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over counters, train steps and rows, these in arrival order."""
        rows = check_state(state)
        # Never back: ids that were given before the load must not be given again.
        self._next_uid = max(self._next_uid, state["next_uid"])
        self._next_timestamp_id = max(self._next_timestamp_id, state["next_timestamp_id"])
        self._train_steps, self._may_fall = dict(state["train_steps"]), set()
        self._rows = {row.uid: contract.copy_row(row) for row in rows}

    def _insert(self, row: contract.StorageItem) -> None:
        self._rows[row.uid] = row

    def _remove(self, row: contract.StorageItem) -> None:
        del self._rows[row.uid]

    def _ranked(self, query: Query, field: str, descending: bool) -> Iterator[contract.StorageItem]:
        """Matching rows in order, ties in arrival order."""
        shown = (self._present(row, rows_only=True) for row in self._rows.values())
        found = sorted((row for row in shown if matches(query, row)), key=attrgetter("timestamp_id"))
        # Sorting keeps ties in arrival order, also with reverse=True.
        found.sort(key=attrgetter(field), reverse=descending)
        return (self._rows[row.uid] for row in found)

    def _admit(self, item: contract.StorageItem) -> contract.StorageItem:
        """A copy of `item` with the ids it will keep; ValueError if some store could not hold it."""
        contract.check_row(item)
        uid = max(item.uid, self._next_uid)
        timestamp_id = max(item.timestamp_id, self._next_timestamp_id)
        self._next_uid, self._next_timestamp_id = uid + 1, timestamp_id + 1
        return contract.copy_row(item, uid=uid, timestamp_id=timestamp_id)

    def _staleness(self, row: contract.StorageItem) -> int:
        """The row's staleness as of the latest train step of its task."""
        return contract.staleness_at(row, self._train_steps.get(row.task_name))

    def _present(self, row: contract.StorageItem, *, rows_only: bool = False) -> contract.StorageItem:
        """A copy to hand out."""
        shown = contract.copy_row(row)
        shown.staleness = self._staleness(row)
        shown.item = None if rows_only else row.item
        return shown


class NaiveStorage(RowBook, contract.StorageBackend):
    """Rows in a dict, every question a scan over all of them."""
