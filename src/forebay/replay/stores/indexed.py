"""The default store: in memory, indexed by task, status and age.

::

    task -> status -> cell -> (oldest model step, staleness as given, train step that consumed) -> bucket
                                                                        bucket: rows in arrival order

All rows of a bucket have the same task, status, staleness and train step, so a query is first simplified with
these known: buckets that cannot match are skipped, buckets that wholly match are counted by their length and
walked without looking at a row, and only the rest of the query is checked row by row. Age needs no upkeep: a
train step moves the staleness of all labeled buckets of its task at once, and "most stale first" is a merge
of buckets. Cost: `count` by task and status is O(1), `put` and `take` O(log n), `get` with a limit reads
about as many rows as it returns. Rows that come back to an older place (restored, or with a changed status)
are sorted in at the next read of their bucket. Orders by priority sort the matching rows.

Priority draws from one task and status keep a sum tree of that cell, built on the first draw. Callers that
never draw pay nothing; draws, puts and takes then cost O(log n). Other queries read the rows they match.
"""

import heapq
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

from forebay.replay.query import Query, QueryLike, allowed_values, matches, parse_query, plain_value, simplify
from forebay.replay.stores.contract import StorageBackend, StorageItem
from forebay.replay.stores.frame import rows_to_frame
from forebay.replay.stores.naive import RowBook
from forebay.replay.stores.sum_tree import SumTree

if TYPE_CHECKING:
    from pandas import DataFrame


class IndexedStorage(RowBook, StorageBackend):
    """Rows in memory, ranked and counted without a scan.

    Rows of model step 1 have staleness 5 at train step 7 (7 - 1 - 1):

    >>> import asyncio
    >>> async def example(store):
    ...     await store.put(StorageItem("payload", -1, -1, "math", "completed", 0, oldest_model_step=1))
    ...     await store.set_train_step("math", 7)
    ...     return await store.count({"task_name": "math", "staleness": 5})
    >>> asyncio.run(example(IndexedStorage()))
    1
    """

    rows_at_once = 128

    def __init__(self) -> None:
        super().__init__()
        self._cells: dict[str, dict[str, _Cell]] = defaultdict(partial(defaultdict, _Cell))
        self._num_archived = 0

    async def count(self, query: QueryLike) -> int:
        parsed = parse_query(query)
        if (uids := allowed_values(parsed, "uid")) is not None:
            return sum(1 for _ in self._rows_with(uids, parsed))
        count = 0
        for cell, train_step, rest in self._cells_for(parsed):
            if rest is True:
                count += cell.size
                continue
            for part in self._matching_buckets(cell, train_step, rest):
                _, bucket, left = part
                count += len(bucket) if left is True else sum(1 for _ in self._merge_parts([part]))
        return count

    def __len__(self) -> int:
        return len(self._rows) - self._num_archived

    @property
    def frame(self) -> "DataFrame":
        """A copy of all rows in order of arrival, ARCHIVED ones too, with their staleness of now.

        One column per field of a row (no payload) and one per tag, ``tags.<name>``; it needs pandas.
        """
        rows = sorted(self._rows.values(), key=attrgetter("timestamp_id"))
        return rows_to_frame([self._present(row, rows_only=True) for row in rows])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._cells.clear()
        self._num_archived = 0
        for row in self._rows.values():
            self._index(row)

    def _insert(self, row: StorageItem) -> None:
        self._rows[row.uid] = row
        self._index(row)

    def _index(self, row: StorageItem) -> None:
        self._num_archived += row.is_archived
        self._cells[row.task_name][plain_value(row.status)].add(row)

    def _remove(self, row: StorageItem) -> None:
        del self._rows[row.uid]
        self._num_archived -= row.is_archived
        self._cells[row.task_name][plain_value(row.status)].remove(row)

    async def _priorities(self, query: QueryLike) -> SumTree:
        cells = list(self._cells_for(parse_query(query)))
        # Only the tree of a whole cell is kept: puts and takes of the cell keep it up to date.
        cell = cells[0][0] if len(cells) == 1 and cells[0][2] is True else None
        if cell is not None and cell.priorities is not None:
            return cell.priorities
        timestamp_ids: list[int] = []
        uids: list[int] = []
        for _, bucket, rest in (part for found in cells for part in self._matching_buckets(*found)):
            rows = bucket.rows if rest is True else dict(self._iter_bucket(bucket, rest, descending=False))
            timestamp_ids += rows
            uids += rows.values()
        tree = SumTree(timestamp_ids, uids, [self._rows[uid].priority for uid in uids])
        if cell is not None:
            cell.priorities = tree
        return tree

    def _cells_for(self, query: Query) -> "Iterator[tuple[_Cell, int | None, Query | bool]]":
        """The cells that may hold matching rows: ``(cell, its task's train step, rest of the query)``."""
        tasks = allowed_values(query, "task_name")
        statuses = allowed_values(query, "status")
        for task in self._cells if tasks is None else tasks:
            cells = self._cells.get(task, {})  # type: ignore[arg-type]
            for status in cells if statuses is None else statuses:
                cell = cells.get(status)  # type: ignore[arg-type]
                if cell is None or not cell.size:
                    continue
                rest = simplify(query, {"task_name": task, "status": status})
                if rest is not False:
                    yield cell, self._train_steps.get(task), rest  # type: ignore[arg-type]

    def _matching_buckets(self, cell: "_Cell", train_step: int | None, query: Query | bool) -> "Iterator[_Part]":
        for known, bucket in cell.buckets(train_step):
            rest = query if isinstance(query, bool) else simplify(query, known)
            if rest is not False:
                yield known["staleness"], bucket, rest

    def _ranked(self, query: Query, field: str, descending: bool) -> Iterator[StorageItem]:
        """Matching rows in order, read as far as they are asked for."""
        if (uids := allowed_values(query, "uid")) is not None:
            found = sorted(self._rows_with(uids, query), key=lambda row: row.timestamp_id)
            if field == "staleness":
                return iter(sorted(found, key=self._staleness, reverse=descending))
            return iter(sorted(found, key=lambda row: getattr(row, field), reverse=descending))
        parts = [part for cell in self._cells_for(query) for part in self._matching_buckets(*cell)]
        if field == "timestamp_id":
            return self._merge_parts(parts, descending)
        if field == "staleness":
            parts.sort(key=itemgetter(0), reverse=descending)
            groups = groupby(parts, key=itemgetter(0))
            return (row for _, group in groups for row in self._merge_parts(group))
        return iter(sorted(self._merge_parts(parts), key=lambda row: row.priority, reverse=descending))

    def _rows_with(self, uids: Iterable[Any], query: Query) -> Iterator[StorageItem]:
        rows = (self._rows[uid] for uid in uids if uid in self._rows)
        return (row for row in rows if matches(query, self._present(row, rows_only=True)))

    def _merge_parts(self, parts: "Iterable[_Part]", descending: bool = False) -> Iterator[StorageItem]:
        streams = [self._iter_bucket(bucket, rest, descending) for _, bucket, rest in parts]
        merged = streams[0] if len(streams) == 1 else heapq.merge(*streams, reverse=descending)
        return (self._rows[uid] for _, uid in merged)

    def _iter_bucket(self, bucket: "_Bucket", rest: Query | bool, descending: bool) -> Iterator[tuple[int, int]]:
        """``(timestamp_id, uid)`` of the rows of a bucket that fulfill the rest of the query."""
        entries = iter(reversed(bucket.rows.items()) if descending else bucket.rows.items())
        if isinstance(rest, bool):
            return entries
        # The rest names no staleness (the bucket settled that), so the stored row will do.
        return (entry for entry in entries if matches(rest, self._rows[entry[1]]))


class _Bucket:
    """Rows of the same task, status, staleness and train step, as ``{timestamp_id: uid}`` in that order."""

    __slots__ = ("_is_sorted", "_rows")

    def __init__(self) -> None:
        # OrderedDict: taking from the front of a large plain dict gets slower with each row taken.
        self._rows: OrderedDict[int, int] = OrderedDict()
        self._is_sorted = True

    def add(self, row: StorageItem) -> None:
        if self._rows and next(reversed(self._rows)) > row.timestamp_id:
            self._is_sorted = False
        self._rows[row.timestamp_id] = row.uid

    def discard(self, row: StorageItem) -> None:
        del self._rows[row.timestamp_id]

    @property
    def rows(self) -> OrderedDict[int, int]:
        """Uids by timestamp id, in order of arrival."""
        if not self._is_sorted:
            # Once for many rows: they come back in batches, and draws consume them in any order.
            self._rows, self._is_sorted = OrderedDict(sorted(self._rows.items())), True
        return self._rows

    def __len__(self) -> int:
        return len(self._rows)


class _Cell:
    """The rows of one task and status, in buckets of one staleness each."""

    __slots__ = ("_buckets", "priorities", "size")

    def __init__(self) -> None:
        self.size = 0
        self._buckets: dict[tuple[int | None, int, int | None], _Bucket] = defaultdict(_Bucket)
        self.priorities: SumTree | None = None

    def add(self, row: StorageItem) -> None:
        self.size += 1
        self._buckets[row.oldest_model_step, row.staleness, row.train_step].add(row)
        if self.priorities is not None:
            self.priorities.add(row.timestamp_id, row.uid, row.priority)

    def remove(self, row: StorageItem) -> None:
        self.size -= 1
        key = (row.oldest_model_step, row.staleness, row.train_step)
        self._buckets[key].discard(row)
        # Every train step makes new buckets: queries would walk the empty ones of all past steps.
        if not len(self._buckets[key]):
            del self._buckets[key]
        if self.priorities is not None:
            self.priorities.discard(row.timestamp_id)

    def buckets(self, train_step: int | None) -> Iterator[tuple[dict[str, Any], _Bucket]]:
        """Each bucket with the field values that all its rows share at `train_step`."""
        for (step, given, consumed), bucket in self._buckets.items():
            is_given = step is None or train_step is None
            staleness = given if is_given else train_step - 1 - step  # type: ignore[operator]
            yield {"staleness": staleness, "oldest_model_step": step, "train_step": consumed}, bucket


_Part = tuple[int, _Bucket, Query | bool]
"""``(staleness, bucket, rest of the query for its rows)``."""


PandasStorage = IndexedStorage
"""An older name, from when a DataFrame held the rows."""
