"""A store whose rows are a pandas DataFrame: for looking at a buffer while working with it.

::

    put --> waiting rows --(the next question)--> frame: one line per row, typed columns, a column per tag
    query --parse_query--> tree --_mask--> one bool per line --argsort of the order--> rows

It is for analysis and moderate sizes: taking rows copies what is left of the frame. Pandas is imported when a
store is made, never with this module.

Types. Every column holds one kind of value, with NA where there is none, so that a comparison is one
vectorised operation and still exact: numbers meet only numbers, text only text, bools only bools. A tag may
hold different kinds in different rows and has a column for each (``tags."level":int``).
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from forebay.extras import needed_by
from forebay.replay.query import (
    TAG_PREFIX,
    All,
    Condition,
    Query,
    QueryLike,
    Scalar,
    holds,
    parse_query,
    plain_value,
)
from forebay.replay.row_book import RowBook, checked, replace_row
from forebay.replay.storage import (
    StorageBackend,
    StorageItem,
    archive_row,
    check_priority,
    check_tags,
    parse_order,
)

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Mask = NDArray[np.bool_]

_DTYPES = {"int": "Int64", "float": "Float64", "bool": "boolean", "text": "string[python]"}
"""Nullable, so that NA is never mistaken for a value. Text as Python has it: with any character."""

_FIELD_KINDS = {
    "uid": "int",
    "timestamp_id": "int",
    "task_name": "text",
    "status": "text",
    "staleness": "int",
    "priority": "float",
    "oldest_model_step": "int",
    "train_step": "int",
    "status_before": "text",
}
_TAG_KINDS: Mapping[type, str] = {int: "int", float: "float", bool: "bool", str: "text"}

_ROW = "row"
"""The column with the `StorageItem` itself."""

_EXACT = 2**53
"""Below it every int is a float, so that ints and floats compare exactly in a column of either."""

_ORDERINGS: Mapping[str, Callable[[Any, Any], Any]] = {
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}


class PandasStorage(StorageBackend):
    """Rows in a DataFrame.

    Tags and priorities are checked when they are stored: a column could not hold others.

    >>> store = PandasStorage()
    >>> await store.count({"staleness": {"$gte": 2}})
    0
    >>> store.frame.groupby(["task_name", "status"]).size()
    """

    def __init__(self) -> None:
        self._book = RowBook()
        self._waiting: list[StorageItem] = []
        with needed_by("PandasStorage"):
            self._frame = _build([])
        self._num_archived = 0

    @property
    def frame(self) -> DataFrame:
        """A copy of all rows in order of arrival, ARCHIVED ones too, with their staleness of now.

        One column per field of a row (no payload) and one per tag, ``tags.<name>``.
        """
        frame = self._settled().sort_values("timestamp_id")
        return rows_to_frame([self._book.present(row, rows_only=True) for row in frame[_ROW]])

    async def put(self, item: StorageItem) -> int:
        """See `StorageBackend.put`."""
        _check(item)
        row = self._book.admit(item)
        self._insert([row])
        return row.uid

    async def get(
        self, query: QueryLike, *, order: str | None = None, limit: int | None = None, rows_only: bool = False
    ) -> list[StorageItem]:
        """See `StorageBackend.get`."""
        field, descending = parse_order(order)
        frame = self._aged()
        places = _mask(parse_query(query), frame).nonzero()[0]
        arrival = places[np.argsort(frame["timestamp_id"].to_numpy(np.int64)[places], kind="stable")]
        keys = frame[field].to_numpy(np.float64 if field == "priority" else np.int64)[arrival]
        # Stable, so that ties stay in order of arrival, also downwards.
        ranks = arrival[np.argsort(-keys if descending else keys, kind="stable")]
        first = ranks if limit is None else ranks[: max(limit, 0)]
        return [self._book.present(row, rows_only=rows_only) for row in frame[_ROW].to_numpy()[first]]

    async def count(self, query: QueryLike) -> int:
        """See `StorageBackend.count`."""
        return int(_mask(parse_query(query), self._aged()).sum())

    async def take(
        self, uids: Iterable[int], *, query: QueryLike | None = None, train_step: int | None = None
    ) -> list[StorageItem]:
        """See `StorageBackend.take`."""
        rows = self._rows_with(uids, query)
        taken = [self._book.present(row) for row in rows]
        self._remove(rows)
        if train_step is not None:
            self._insert([archive_row(row, train_step) for row in rows])
        return taken

    async def delete(self, uids: Iterable[int]) -> None:
        """See `StorageBackend.delete`."""
        self._remove(self._rows_with(uids))

    async def update(self, items: Iterable[StorageItem]) -> None:
        """See `StorageBackend.update`."""
        # Where a uid comes twice the last one counts.
        changes = {item.uid: item for item in checked(items)}
        for item in changes.values():
            _check(item)
        stored = self._rows_with(changes)
        self._remove(stored)
        self._insert([replace_row(row, changes[row.uid]) for row in stored])

    async def get_train_step(self, task_name: str) -> int | None:
        """See `StorageBackend.get_train_step`."""
        return self._book.train_steps.get(task_name)

    async def set_train_step(self, task_name: str, train_step: int) -> None:
        """See `StorageBackend.set_train_step`."""
        self._book.set_train_step(task_name, train_step)

    async def let_train_steps_fall(self) -> None:
        """See `StorageBackend.let_train_steps_fall`."""
        self._book.let_train_steps_fall()

    def __len__(self) -> int:
        return len(self._frame) + len(self._waiting) - self._num_archived

    def state_dict(self) -> dict[str, Any]:
        """See `StorageBackend.state_dict`."""
        return self._book.state_dict(self._settled()[_ROW])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `StorageBackend.load_state_dict`."""
        for row in state.get("items", ()):
            _check(row)
        rows = self._book.load_state_dict(state)
        self._frame, self._waiting, self._num_archived = _build([]), [], 0
        self._insert(rows)

    def _insert(self, rows: Sequence[StorageItem]) -> None:
        self._waiting += rows
        self._num_archived += sum(row.is_archived for row in rows)

    def _remove(self, rows: Sequence[StorageItem]) -> None:
        if rows:
            self._frame = self._frame.drop(index=[row.uid for row in rows])
            self._num_archived -= sum(row.is_archived for row in rows)

    def _settled(self) -> DataFrame:
        """The frame with all rows in it."""
        if self._waiting:
            self._frame = _append(self._frame, _build(self._waiting))
            self._waiting = []
        return self._frame

    def _rows_with(self, uids: Iterable[int], query: QueryLike | None = None) -> list[StorageItem]:
        """The rows with these uids that match, in the order of the uids, each once."""
        parsed = None if query is None else parse_query(query)
        wanted = list(dict.fromkeys(uids))
        if not wanted:
            return []
        frame = self._settled() if parsed is None else self._aged()
        places = frame.index.get_indexer(wanted)
        places = places[places >= 0]
        if parsed is not None:
            places = places[_mask(parsed, frame)[places]]
        return list(frame[_ROW].to_numpy()[places])

    def _aged(self) -> DataFrame:
        """The frame with the staleness of now: what `RowBook.staleness` says, for every line at once."""
        frame = self._settled()
        staleness, steps = frame["staleness"], frame["oldest_model_step"]
        for task, train_step in self._book.train_steps.items():
            aging = frame["task_name"].isin([task]) & steps.notna()
            staleness = staleness.mask(aging, train_step - 1 - steps)
        return frame.assign(staleness=staleness) if self._book.train_steps else frame


def _check(item: StorageItem) -> None:
    check_tags(item.tags)
    check_priority(item.priority)


def rows_to_frame(rows: Sequence[StorageItem]) -> DataFrame:
    """One line per row: its fields but the payload, and a column ``tags.<name>`` per tag.

    Indexed by uid; the index has no name, so that "uid" means the column. Columns are nullable and of one
    type; a tag of several kinds has a column of objects.
    """
    import pandas as pd

    frame = _build(rows)
    names = sorted({name for row in rows for name in row.tags})
    tags = [_tag_series([row.tags.get(name) for row in rows], frame.index) for name in names]
    labels = [*_FIELD_KINDS, *(TAG_PREFIX + name for name in names)]
    # Labels as objects: pandas' own text type cannot hold every name.
    whole = pd.concat([frame[list(_FIELD_KINDS)], *tags], axis=1)
    return whole.set_axis(pd.Index(labels, dtype=object), axis=1).rename_axis(index=None)


def _tag_series(values: Sequence[Any], index: Any) -> Series:
    import pandas as pd

    kinds = {_TAG_KINDS[type(value)] for value in values if value is not None}
    return pd.Series(values, index=index, dtype=_DTYPES[kinds.pop()] if len(kinds) == 1 else object)


def _series(values: Sequence[Any], index: Any) -> Series:
    from pandas import Series

    return Series(values, index=index, dtype=object)


def _build(rows: Sequence[StorageItem]) -> DataFrame:
    """The lines of `rows`: the typed columns of their fields and tags, and the rows themselves."""
    import pandas as pd

    columns: dict[str, Any] = {
        name: pd.array([plain_value(getattr(row, name)) for row in rows], dtype=_DTYPES[kind])
        for name, kind in _FIELD_KINDS.items()
    }
    tags: dict[str, list[Any]] = {}
    for place, row in enumerate(rows):
        for name, value in row.tags.items():
            column = _tag_column(name, _TAG_KINDS[type(value)])
            tags.setdefault(column, [None] * len(rows))[place] = value
    for column, values in tags.items():
        columns[column] = pd.array(values, dtype=_DTYPES[_kind_of(column)])
    index = pd.Index([row.uid for row in rows], dtype="int64", name="uid")
    return pd.DataFrame(columns, index=index).assign(**{_ROW: _series(rows, index)})


def _append(frame: DataFrame, added: DataFrame) -> DataFrame:
    """The lines of both; a tag's column that one of them lacks is NA there."""
    import pandas as pd

    columns = list(dict.fromkeys([*frame.columns, *added.columns]))
    return pd.concat([_widened(part, columns) for part in (frame, added)])


def _widened(frame: DataFrame, columns: Sequence[str]) -> DataFrame:
    """`frame` with all of `columns`, the new ones typed and empty."""
    import pandas as pd

    missing = [column for column in columns if column not in frame.columns]
    empty = {column: pd.array([None] * len(frame), dtype=_DTYPES[_kind_of(column)]) for column in missing}
    return pd.concat([frame, pd.DataFrame(empty, index=frame.index)], axis=1)[columns] if missing else frame


def _tag_column(name: str, kind: str) -> str:
    # As JSON, because pandas' own text type, which labels are, cannot hold every name.
    return f"{TAG_PREFIX}{json.dumps(name)}:{kind}"


def _kind_of(column: str) -> str:
    return _FIELD_KINDS[column] if column in _FIELD_KINDS else column.rpartition(":")[2]


def _mask(query: Query, frame: DataFrame) -> Mask:
    """For each line, whether it fulfils `query`: what `forebay.replay.query.matches` says."""
    if not isinstance(query, Condition):
        masks = [_mask(part, frame) for part in query.parts]
        if isinstance(query, All):
            return reduce(operator.and_, masks, np.ones(len(frame), bool))
        return reduce(operator.or_, masks, np.zeros(len(frame), bool))
    if query.op == "$ne":
        return ~_is_one_of(frame, query.field, (query.value,))
    if query.op == "$not_in":
        return ~_is_one_of(frame, query.field, query.value)
    if query.op in ("$eq", "$in"):
        return _is_one_of(frame, query.field, query.value if query.op == "$in" else (query.value,))
    return _is_ordered(frame, query)


def _columns_of(frame: DataFrame, field: str) -> Iterable[tuple[str, Series]]:
    """The columns that hold `field`, each with its kind of value."""
    names = [_tag_column(field.removeprefix(TAG_PREFIX), kind) for kind in _DTYPES]
    for name in [field] if field in _FIELD_KINDS else names:
        if name in frame.columns:
            yield _kind_of(name), frame[name]


def _is_one_of(frame: DataFrame, field: str, values: Any) -> Mask:
    """Equality with some value; one of another kind, or that the column cannot hold, equals nothing."""
    found = np.zeros(len(frame), bool)
    for kind, column in _columns_of(frame, field):
        fitting = [fit for value in values if (fit := _fit(value, kind)) is not None]
        if fitting:
            found |= column.isin(fitting).to_numpy(bool)
        # A missing field is None and can be asked for; a missing tag equals nothing.
        if None in values and not field.startswith(TAG_PREFIX):
            found |= column.isna().to_numpy(bool)
    return found


def _fit(value: Scalar, kind: str) -> Any:
    """`value` in the type of a column of that kind; None if no entry there can equal it."""
    if kind in ("bool", "text"):
        return value if type(value) is (bool if kind == "bool" else str) else None
    if type(value) not in (int, float):
        return None
    try:
        number = int(value) if kind == "int" else float(value)  # type: ignore[arg-type]
    except OverflowError:
        return None
    fits = number == value and (kind == "float" or -(2**63) <= number < 2**63)
    return number if fits else None


def _is_ordered(frame: DataFrame, condition: Condition) -> Mask:
    found = np.zeros(len(frame), bool)
    operand = condition.value
    kinds = {bool: ("bool",), str: ("text",), int: ("int", "float"), float: ("int", "float")}
    for kind, column in _columns_of(frame, condition.field):
        if kind not in kinds.get(type(operand), ()):
            continue
        if kind in ("int", "float") and not abs(operand) < _EXACT:  # type: ignore[arg-type]
            values = column.to_numpy(object, na_value=None)
            found |= np.array([value is not None and holds(condition, value) for value in values], bool)
        else:
            compared = _ORDERINGS[condition.op](column, operand)
            found |= compared.fillna(False).to_numpy(bool)
    return found
