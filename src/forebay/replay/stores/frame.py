"""Rows of a store as a pandas DataFrame.

It is for analysis: one line per row, with typed, nullable columns and a column per tag. Pandas is imported
when a frame is made, never with this module.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forebay.extras import needed_by
from forebay.replay.query import FIELD_KINDS, TAG_PREFIX, plain_value
from forebay.replay.stores.contract import StorageItem

if TYPE_CHECKING:
    from pandas import DataFrame

_DTYPES = {int: "Int64", float: "Float64", bool: "boolean", str: "string[python]"}
"""Nullable, so that NA is never mistaken for a value. Text as Python has it: with any character."""


def rows_to_frame(rows: Sequence[StorageItem]) -> "DataFrame":
    """One line per row: its fields but the payload, and a column ``tags.<name>`` per tag.

    Indexed by uid; the index has no name, so that "uid" means the column. Columns are nullable and of one
    type; a tag of several kinds has a column of objects.

    Raises:
        ImportError: pandas is not installed; the message names the extra.
    """
    with needed_by("a DataFrame of a buffer"):
        import pandas as pd

    columns: dict[str, tuple[list[Any], Any]] = {
        name: ([plain_value(getattr(row, name)) for row in rows], kind) for name, kind in FIELD_KINDS.items()
    }
    for name in sorted({name for row in rows for name in row.tags}):
        values = [row.tags.get(name) for row in rows]
        kinds = {type(value) for value in values if value is not None}
        columns[TAG_PREFIX + name] = values, kinds.pop() if len(kinds) == 1 else object
    index = pd.Index([row.uid for row in rows], dtype="int64")
    series = [pd.Series(v, index=index, dtype=_DTYPES.get(kind, object)) for v, kind in columns.values()]
    # Labels as objects: pandas' own text type cannot hold every name.
    return pd.concat(series, axis=1).set_axis(pd.Index(list(columns), dtype=object), axis=1)
