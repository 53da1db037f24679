"""Queries as SQL: the tree of `query` compiled to conditions with bound values.

::

    query --plan_arms--> one arm per task, status and age rule --compile_condition--> WHERE, ORDER BY

Exactness. A database compares a 64-bit integer with a float by rounding, or refuses integers it cannot hold;
Python compares exactly. So a comparison is first turned into one of the column's own kind: for integers into
an interval of integers, for floats into a bound that is a float. A value of another kind is settled here.

Age. The staleness of a labeled row moves with the train step of its task. Within one task it is
``train_step - 1 - oldest_model_step``, so a condition on it is one on `oldest_model_step`, and "most stale
first" is "oldest step first": an index serves both. Rows without a label have a staleness of their own, and
another index. Hence the arms; the store merges what they find.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from forebay.replay.query import (
    ARCHIVED,
    TAG_PREFIX,
    All,
    Condition,
    Query,
    Scalar,
    allowed_values,
    is_storable_text,
    simplify,
)
from forebay.replay.stores.sql.schema import LIVE, groups, tags

Clause = sa.ColumnElement[bool]

INT_MIN, INT_MAX = -(2**63), 2**63 - 1

MAX_CONDITIONS = 300
MAX_VALUES = 10_000
"""Beyond these a query is not compiled: SQLite takes expressions 1,000 deep and 32,766 values."""

_TEXT_FIELDS = ("task_name", "status", "status_before")
_FLOAT_FIELD = "priority"
"""All other fields are integers."""


@dataclass(frozen=True)
class Arm:
    """Rows that one index ranks by age: of one task, one status and one age rule (or all, unranked)."""

    where: Clause
    age: sa.ColumnElement[Any]
    age_grows: bool
    """Whether a larger `age` is more stale."""

    def order_by(self, field: str, descending: bool) -> list[sa.ColumnElement[Any]]:
        """The order of the rows, ties in arrival order."""
        column: sa.ColumnElement[Any] = groups.c[field]
        down = descending
        if field == "staleness":
            column, down = self.age, descending == self.age_grows
        ranked = column.desc() if down else column.asc()
        return [ranked] if field == "timestamp_id" else [ranked, groups.c.timestamp_id.asc()]


def is_too_large(query: Query) -> bool:
    """Whether no database would take `query`."""
    sizes = [len(leaf.value) if isinstance(leaf.value, tuple) else 1 for leaf in leaves(query)]
    return len(sizes) > MAX_CONDITIONS or sum(sizes) > MAX_VALUES


def asks_age(query: Query) -> bool:
    """Whether it depends on the train steps which rows match."""
    return any(leaf.field == "staleness" for leaf in leaves(query))


def plan_arms(query: Query, train_steps: Mapping[str, int | None], *, by_age: bool) -> list[Arm]:
    """The arms that together hold the rows that match `query`, each row in one of them.

    `train_steps` has every task of the store, and is of no use if age plays no part; `by_age` says that the
    rows will be ranked by staleness.
    """
    if not by_age and not asks_age(query):
        return [Arm(compile_condition(query), groups.c.staleness, True)]
    return [
        arm
        for task, train_step in train_steps.items()
        for cell, rest in _cells(query, task)
        for arm in _arms_of_cell(cell, rest, train_step)
    ]


def _cells(query: Query, task_name: str) -> Iterator[tuple[Clause, Query | bool]]:
    """The rows of the task, apart by status if the query names some: ``(condition, rest of the query)``."""
    of_task = groups.c.task_name == task_name
    rest = simplify(query, {"task_name": task_name})
    statuses = None if isinstance(rest, bool) else allowed_values(rest, "status")
    if isinstance(rest, bool) or statuses is None:
        if rest is not False:
            yield of_task, rest
        return
    for status in dict.fromkeys(statuses):
        left = simplify(rest, {"status": status})
        if isinstance(status, str) and is_storable_text(status) and left is not False:
            yield sa.and_(of_task, groups.c.status == status), left


def _arms_of_cell(cell: Clause, rest: Query | bool, train_step: int | None) -> Iterator[Arm]:
    if train_step is None:
        yield Arm(sa.and_(cell, compile_condition(rest)), groups.c.staleness, True)
        return
    oldest = groups.c.oldest_model_step
    yield Arm(sa.and_(cell, oldest.is_not(None), compile_condition(rest, train_step)), oldest, False)
    unlabeled = rest if isinstance(rest, bool) else simplify(rest, {"oldest_model_step": None})
    if unlabeled is not False:
        where = sa.and_(cell, oldest.is_(None), compile_condition(unlabeled))
        yield Arm(where, groups.c.staleness, True)


def compile_condition(query: Query | bool, train_step: int | None = None) -> Clause:
    """`query` as a condition on `groups`.

    With `train_step`, the rows are labeled ones of one task, as stale as at that train step.
    """
    if isinstance(query, bool):
        return sa.true() if query else sa.false()
    if isinstance(query, Condition):
        return _compile_leaf(query, train_step)
    parts = [compile_condition(part, train_step) for part in query.parts]
    return sa.and_(sa.true(), *parts) if isinstance(query, All) else sa.or_(sa.false(), *parts)


def leaves(query: Query) -> Iterator[Condition]:
    """All conditions in it."""
    if isinstance(query, Condition):
        yield query
    else:
        for part in query.parts:
            yield from leaves(part)


def _compile_leaf(leaf: Condition, train_step: int | None) -> Clause:
    if leaf == Condition("status", "$ne", ARCHIVED):
        return LIVE
    if leaf.op in ("$eq", "$ne", "$in", "$not_in"):
        values = leaf.value if isinstance(leaf.value, tuple) else (leaf.value,)
        found = _is_one_of(leaf.field, values, train_step)
        if leaf.op in ("$eq", "$in"):
            return found
        # An empty place compares as unknown, which is "not equal" here.
        return sa.not_(sa.func.coalesce(found, sa.false(), type_=sa.Boolean()))
    assert not isinstance(leaf.value, tuple)
    return _is_ordered(leaf.field, leaf.op, leaf.value, train_step)


def _is_one_of(field: str, values: tuple[Scalar, ...], train_step: int | None) -> Clause:
    ints, floats = _exact_ints(values), _exact_floats(values)
    texts = [value for value in values if isinstance(value, str)]
    if field.startswith(TAG_PREFIX):
        return _tag_where(
            field,
            _in(tags.c.int_value, ints),
            _in(tags.c.float_value, floats),
            _in(tags.c.text_value, list(map(encode_text, texts))),
            _in(tags.c.bool_value, [int(value) for value in values if isinstance(value, bool)]),
        )
    if field == "staleness" and train_step is not None:
        return _in(groups.c.oldest_model_step, _exact_ints(tuple(train_step - 1 - value for value in ints)))
    if field in _TEXT_FIELDS:
        found = _in(groups.c[field], list(filter(is_storable_text, texts)))
    else:
        found = _in(groups.c[field], floats if field == _FLOAT_FIELD else ints)
    return sa.or_(found, groups.c[field].is_(None)) if None in values else found


def _in(column: sa.ColumnElement[Any], values: list[Any]) -> Clause:
    return column == values[0] if len(values) == 1 else column.in_(values) if values else sa.false()


def _is_ordered(field: str, op: str, value: Scalar, train_step: int | None) -> Clause:
    if field.startswith(TAG_PREFIX):
        return _tag_where(field, _tag_is_ordered(op, value))
    if isinstance(value, str):
        return _text_is_ordered(groups.c[field], op, value) if field in _TEXT_FIELDS else sa.false()
    if value is None or isinstance(value, bool) or field in _TEXT_FIELDS:
        return sa.false()
    if field == _FLOAT_FIELD:
        return _float_is_ordered(groups.c[field], op, value)
    low, high = _interval(op, value)
    if field == "staleness" and train_step is not None:
        return _is_between(groups.c.oldest_model_step, train_step - 1 - high, train_step - 1 - low)
    return _is_between(groups.c[field], low, high)


def _tag_is_ordered(op: str, value: Scalar) -> Clause:
    if value is None:
        return sa.false()
    if isinstance(value, bool):
        return _is_between(tags.c.bool_value, *_interval(op, int(value)))
    if isinstance(value, str):
        return _compare(tags.c.text_value, op, encode_text(value))
    ints = _is_between(tags.c.int_value, *_interval(op, value))
    return sa.or_(ints, _float_is_ordered(tags.c.float_value, op, value))


def _tag_where(field: str, *any_of: Clause) -> Clause:
    name = encode_text(field[len(TAG_PREFIX) :])
    of_row = sa.and_(tags.c.uid == groups.c.uid, tags.c.name == name)
    return sa.exists().where(of_row, sa.or_(sa.false(), *any_of)).correlate(groups)


def _compare(column: sa.ColumnElement[Any], op: str, value: Any) -> Clause:
    return column.op(_OPERATORS[op], is_comparison=True)(value)


_OPERATORS = {"$gt": ">", "$gte": ">=", "$lt": "<", "$lte": "<="}

_BEYOND = 2**64
"""Stands for infinity among integers: beyond every stored integer, whichever train step is added."""


def _interval(op: str, value: int | float) -> tuple[int, int]:
    """The integers x, from low to high, for which ``x op value``."""
    if isinstance(value, float) and math.isinf(value):
        value = 4 * _BEYOND if value > 0 else -4 * _BEYOND
    if op in ("$gt", "$gte"):
        return (math.floor(value) + 1 if op == "$gt" else math.ceil(value)), 2 * _BEYOND
    return -2 * _BEYOND, (math.ceil(value) - 1 if op == "$lt" else math.floor(value))


def _is_between(column: sa.ColumnElement[Any], low: int, high: int) -> Clause:
    if low > min(high, INT_MAX) or high < INT_MIN:
        return sa.false()
    bounds = [column >= low] if low > INT_MIN else []
    if high < INT_MAX:
        bounds.append(column <= high)
    return sa.and_(*bounds) if bounds else column.is_not(None)


def _float_is_ordered(column: sa.ColumnElement[Any], op: str, value: int | float) -> Clause:
    bound = _nearest_float(value)
    # Between `value` and its nearest float lies no other float, so on one side both bounds count.
    if bound < value:
        op = {"$gt": "$gt", "$gte": "$gt", "$lt": "$lte", "$lte": "$lte"}[op]
    elif bound > value:
        op = {"$gt": "$gte", "$gte": "$gte", "$lt": "$lt", "$lte": "$lt"}[op]
    return _compare(column, op, bound)


def _nearest_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _exact_ints(values: tuple[Scalar, ...]) -> list[int]:
    """Of the numbers among `values`, those that an integer column can hold."""
    return [
        int(value)
        for value in values
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and INT_MIN <= value <= INT_MAX
        and value == math.floor(value)
    ]


def _exact_floats(values: tuple[Scalar, ...]) -> list[float]:
    """Of the numbers among `values`, those that a float column can hold."""
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return [_nearest_float(value) for value in numbers if _nearest_float(value) == value]


def _text_is_ordered(column: sa.ColumnElement[Any], op: str, value: str) -> Clause:
    """Compared by code point, also where `value` holds what a text column cannot.

    Stored text holds neither NUL nor a surrogate. So what is greater than ``"ab\\0..."`` is what is greater
    than ``"ab"``, and what is greater than ``"ab\\ud800..."`` begins with ``"ab"`` and goes on above the
    surrogates, or is greater anyway.
    """
    stop = next((i for i, char in enumerate(value) if not is_storable_text(char)), None)
    if stop is None:
        return _compare(column, op, value)
    above = op in ("$gt", "$gte")
    if value[stop] == "\0":
        return _compare(column, "$gt" if above else "$lte", value[:stop])
    return _compare(column, "$gte" if above else "$lt", value[:stop] + "\ue000")


def encode_text(text: str) -> bytes:
    """Text as bytes, in the same order; surrogates too."""
    return text.encode("utf-8", "surrogatepass")
