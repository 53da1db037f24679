"""A store that scans: the reference that every other store is tested against.

It is not meant to be fast. It shows what a `StorageBackend` must do in the fewest lines: a dict of rows, a
loop over it for every question.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from forebay.replay.query import QueryLike, matches, parse_query
from forebay.replay.stores.contract import StorageBackend, StorageItem, archive_row, parse_order
from forebay.replay.stores.row_book import RowBook, checked, replace_row


class NaiveStorage(StorageBackend):
    """Rows in a dict, every question a scan over all of them."""

    def __init__(self) -> None:
        self._rows: dict[int, StorageItem] = {}
        self._book = RowBook()

    async def put(self, item: StorageItem) -> int:
        row = self._book.admit(item)
        self._rows[row.uid] = row
        return row.uid

    async def get(
        self, query: QueryLike, *, order: str | None = None, limit: int | None = None, rows_only: bool = False
    ) -> list[StorageItem]:
        field, descending = parse_order(order)
        found = sorted(self._matching(query, rows_only=rows_only), key=lambda row: row.timestamp_id)
        # Sorting keeps ties in arrival order, also with reverse=True.
        found.sort(key=lambda row: getattr(row, field), reverse=descending)
        return found if limit is None else found[: max(limit, 0)]

    async def count(self, query: QueryLike) -> int:
        return sum(1 for _ in self._matching(query, rows_only=True))

    async def take(
        self, uids: Iterable[int], *, query: QueryLike | None = None, train_step: int | None = None
    ) -> list[StorageItem]:
        matching = None if query is None else {row.uid for row in self._matching(query, rows_only=True)}
        taken = []
        for uid in dict.fromkeys(uids):
            if uid in self._rows and (matching is None or uid in matching):
                row = self._rows.pop(uid)
                taken.append(self._book.present(row))
                if train_step is not None:
                    self._rows[uid] = archive_row(row, train_step)
        return taken

    async def delete(self, uids: Iterable[int]) -> None:
        for uid in uids:
            self._rows.pop(uid, None)

    async def update(self, items: Iterable[StorageItem]) -> None:
        for item in checked(items):
            if item.uid in self._rows:
                self._rows[item.uid] = replace_row(self._rows[item.uid], item)

    async def get_train_step(self, task_name: str) -> int | None:
        return self._book.train_steps.get(task_name)

    async def set_train_step(self, task_name: str, train_step: int) -> None:
        self._book.set_train_step(task_name, train_step)

    async def let_train_steps_fall(self) -> None:
        self._book.let_train_steps_fall()

    def __len__(self) -> int:
        return sum(1 for row in self._rows.values() if not row.is_archived)

    def state_dict(self) -> dict[str, Any]:
        return self._book.state_dict(self._rows.values())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rows = {row.uid: row for row in self._book.load_state_dict(state)}

    def _matching(self, query: QueryLike, *, rows_only: bool) -> Iterator[StorageItem]:
        parsed = parse_query(query)
        rows = (self._book.present(row, rows_only=rows_only) for row in self._rows.values())
        return (row for row in rows if matches(parsed, row))
