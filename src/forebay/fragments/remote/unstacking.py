"""Takes apart payloads of many fragments that came as one: made by `forebay.fragments.remote.codec.stack`.

::

    batch: arrays [N, ...] --> row i of each --+
           lists of N      --> value i --------+--> payload i
           plain values    --> for every one --'

Looking at the nesting of each fragment costs more than anything else that is done to a small one; here it is
looked at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from forebay.fragments.records import SampleFragment
from forebay.fragments.remote.codec import (
    ALIGNMENT,
    FIELDS,
    PLAIN,
    SMALL_BYTES,
    VALUE,
    Packed,
    assemble,
    dtype_text,
    schema_of,
)

_Columns = list[Sequence[Any]]


def unstack(batch: SampleFragment, compression: str | None = None) -> list[Packed]:
    """The payload of every fragment in `batch`.

    Raises:
        ValueError: its arrays and lists differ in length, there are none, or it holds something else.
    """
    arrays: list[np.ndarray[Any, Any]] = []
    values: list[Any] = []
    nodes = tuple([_split(getattr(batch, name), name, arrays, values) for name in FIELDS])
    lengths = {len(column) for column in (*arrays, *values) if type(column) not in PLAIN}
    if len(lengths) != 1:
        raise ValueError(
            f"the arrays and lists of a stacked batch have one length, that of its fragments; got "
            f"{sorted(lengths)}"
        )
    (count,) = lengths
    schema, schema_id = schema_of(nodes)
    columns = [[column] * count if type(column) in PLAIN else column for column in values]
    rows = zip(*columns, strict=True) if columns else [()] * count
    bodies = _bodies(arrays, count)
    return [
        assemble(schema, schema_id, list(row), body, compression)
        for row, body in zip(rows, bodies, strict=True)
    ]


def _split(value: Any, where: str, arrays: list[np.ndarray[Any, Any]], values: list[Any]) -> tuple[Any, ...]:
    """The node of `value` in a single fragment; what it stands for goes to `arrays` and `values`."""
    kind = type(value)
    if kind is np.ndarray and value.ndim:
        arrays.append(value)
        return ("array", dtype_text(value.dtype, where), value.shape[1:])
    if kind in PLAIN or (kind is list and value and PLAIN.issuperset(map(type, value))):
        values.append(value)
        return VALUE
    if isinstance(value, dict):
        nodes = [_split(item, f"{where}[{key!r}]", arrays, values) for key, item in value.items()]
        return ("dict", tuple(value), tuple(nodes))
    if kind is list or kind is tuple:
        nodes = [_split(item, f"{where}[{i}]", arrays, values) for i, item in enumerate(value)]
        return (kind.__name__, tuple(nodes))
    raise ValueError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}; a stacked batch holds arrays with a leading "
        f"axis, lists of plain values, plain values, and dicts, lists or tuples of them"
    )


def _bodies(arrays: list[np.ndarray[Any, Any]], count: int) -> list[list[Any]]:
    """The parts of every body."""
    flat = [np.ascontiguousarray(array).reshape(count, -1).view(np.uint8) for array in arrays]
    padded = []
    for rows in flat:
        padded.append(rows)
        if rest := -rows.shape[1] % ALIGNMENT:
            padded.append(np.zeros((count, rest), np.uint8))
    row_bytes = sum(rows.shape[1] for rows in padded)
    if row_bytes < SMALL_BYTES:
        data = np.concatenate(padded, axis=1).tobytes() if padded else b""
        return [[data[start : start + row_bytes]] for start in range(0, count * row_bytes, row_bytes or 1)]
    return [[rows[i] for rows in padded] for i in range(count)]
