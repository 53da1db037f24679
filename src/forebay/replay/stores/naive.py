"""A store that scans: the reference that every other store is tested against.

It is not meant to be fast. It shows what a `StorageBackend` must do in the fewest lines: a dict of rows, a
loop over it for every question.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from forebay.replay.query import QueryLike, matches, parse_query
from forebay.replay.stores.contract import StorageBackend, StorageItem, archive_row, parse_order
from forebay.replay.stores.row_book import RowBook, checked, replace_row


class NaiveStorage(RowBook, StorageBackend):
    """Rows in a dict, every question a scan over all of them."""

    async def put(self, item: StorageItem) -> int:
        row = self._admit(item)
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
                taken.append(self._present(row))
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

    def __len__(self) -> int:
        return sum(1 for row in self._rows.values() if not row.is_archived)

    def _matching(self, query: QueryLike, *, rows_only: bool) -> Iterator[StorageItem]:
        parsed = parse_query(query)
        rows = (self._present(row, rows_only=rows_only) for row in self._rows.values())
        return (row for row in rows if matches(parsed, row))
