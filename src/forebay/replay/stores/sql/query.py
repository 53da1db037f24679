"""Queries as SQL: the tree of `query` compiled to conditions with bound values.

::

    query --plan_arms--> one arm per task, status and age rule --compile_condition--> WHERE, ORDER BY

Exactness. A database compares a 64-bit integer with a float by rounding, or refuses integers it cannot hold;
Python compares exactly. So a comparison is first turned into one of the column's own kind: a bound of
integers is rounded to the one that says the same. A value of another kind is settled here; a query with a
value that no column holds exactly is not compiled (`needs_scan`).

Age. The staleness of a labeled row moves with the train step of its task. Within one task it is
``train_step - 1 - oldest_model_step``, so a condition on it is one on `oldest_model_step`, and "most stale
first" is "oldest step first": an index serves both. Rows without a label have a staleness of their own, and
another index. Hence the arms; the store merges what they find.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import sqlalchemy as sa

from forebay.replay import query as queries
from forebay.replay.stores.sql.schema import LIVE, groups, tags

Clause = sa.ColumnElement[bool]
Step = sa.ColumnElement[int]
"""The train step of a task: bound, and not written out, so that a statement serves every step."""

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


def needs_scan(query: queries.Query) -> bool:
    """Whether rows are to be matched here: no database would take `query`, or compare as Python does."""
    found = list(leaves(query))
    several = [leaf.value if isinstance(leaf.value, tuple) else (leaf.value,) for leaf in found]
    values = [(leaf.field, value) for leaf, some in zip(found, several, strict=True) for value in some]
    return len(found) > MAX_CONDITIONS or len(values) > MAX_VALUES or not all(starmap(_is_exact, values))


def _is_exact(field: str, value: queries.Scalar) -> bool:
    if isinstance(value, str):
        return queries.is_storable_text(value)
    # Beyond 2**53, floats skip integers; infinity and NaN are no integers at all. Groups that no step
    # consumed have train steps of about 2**62 (`archiving`).
    return value is None or abs(value) <= (2**62 if field == "train_step" and type(value) is int else 2**53)


def asks_age(query: queries.Query) -> bool:
    """Whether it depends on the train steps which rows match."""
    return any(leaf.field == "staleness" for leaf in leaves(query))


def plan_arms(query: queries.Query, train_steps: Mapping[str, Step | None], *, by_age: bool) -> list[Arm]:
    """The arms that together hold the rows that match `query`, each row in one of them.

    `train_steps` has every task of the store, those with a step as a value to be bound, and is of no use if
    age plays no part; `by_age` says that the rows will be ranked by staleness.
    """
    if not by_age and not asks_age(query):
        return [Arm(compile_condition(query), groups.c.staleness, True)]
    return [
        arm
        for task, train_step in train_steps.items()
        for cell, rest in _cells(query, task)
        for arm in _arms_of_cell(cell, rest, train_step)
    ]


def _cells(query: queries.Query, task_name: str) -> Iterator[tuple[Clause, queries.Query | bool]]:
    """The rows of the task, apart by status if the query names some: ``(condition, rest of the query)``."""
    of_task = groups.c.task_name == task_name
    rest = queries.simplify(query, {"task_name": task_name})
    statuses = None if isinstance(rest, bool) else queries.allowed_values(rest, "status")
    if isinstance(rest, bool) or statuses is None:
        if rest is not False:
            yield of_task, rest
        return
    for status in dict.fromkeys(statuses):
        left = queries.simplify(rest, {"status": status})
        # No row has another kind of status, and a database might refuse the text.
        if isinstance(status, str) and queries.is_storable_text(status) and left is not False:
            yield sa.and_(of_task, groups.c.status == status), left


def _arms_of_cell(cell: Clause, rest: queries.Query | bool, train_step: Step | None) -> Iterator[Arm]:
    if train_step is None:
        yield Arm(sa.and_(cell, compile_condition(rest)), groups.c.staleness, True)
        return
    oldest = groups.c.oldest_model_step
    yield Arm(sa.and_(cell, oldest.is_not(None), compile_condition(rest, train_step)), oldest, False)
    # Rows without a label have the staleness that they were given, whatever the train step.
    unlabeled = rest if isinstance(rest, bool) else queries.simplify(rest, {"oldest_model_step": None})
    if unlabeled is not False:
        where = sa.and_(cell, oldest.is_(None), compile_condition(unlabeled))
        yield Arm(where, groups.c.staleness, True)


def compile_condition(query: queries.Query | bool, train_step: Step | None = None) -> Clause:
    """`query` as a condition on `groups`.

    With `train_step`, the rows are labeled ones of one task, as stale as at that train step.
    """
    if isinstance(query, bool):
        return sa.true() if query else sa.false()
    if isinstance(query, queries.Condition):
        return _compile_leaf(query, train_step)
    parts = [compile_condition(part, train_step) for part in query.parts]
    return sa.and_(sa.true(), *parts) if isinstance(query, queries.All) else sa.or_(sa.false(), *parts)


def leaves(query: queries.Query) -> Iterator[queries.Condition]:
    """The conditions of `query`, those of its parts included."""
    if isinstance(query, queries.Condition):
        yield query
    else:
        for part in query.parts:
            yield from leaves(part)


def _compile_leaf(leaf: queries.Condition, train_step: Step | None) -> Clause:
    # In the words of the partial index, or that would not be used.
    if leaf == queries.Condition("status", "$ne", queries.ARCHIVED):
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


def _is_one_of(field: str, values: tuple[queries.Scalar, ...], train_step: Step | None) -> Clause:
    # A bool is no number here, although Python and SQL take True for 1.
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    ints, floats = [int(value) for value in numbers if value == int(value)], list(map(float, numbers))
    texts = [value for value in values if isinstance(value, str)]
    if field.startswith(queries.TAG_PREFIX):
        return _tag_where(
            field,
            _in(tags.c.int_value, ints),
            _in(tags.c.float_value, floats),
            _in(tags.c.text_value, list(map(encode_text, texts))),
            _in(tags.c.bool_value, [int(value) for value in values if isinstance(value, bool)]),
        )
    if field == "staleness" and train_step is not None:
        return _in(groups.c.oldest_model_step, [train_step - 1 - value for value in ints])
    in_column = texts if field in _TEXT_FIELDS else floats if field == _FLOAT_FIELD else ints
    found = _in(groups.c[field], in_column)
    return sa.or_(found, groups.c[field].is_(None)) if None in values else found


def _in(column: sa.ColumnElement[Any], values: list[Any]) -> Clause:
    return column == values[0] if len(values) == 1 else column.in_(values) if values else sa.false()


def _is_ordered(field: str, op: str, value: queries.Scalar, train_step: Step | None) -> Clause:
    if field.startswith(queries.TAG_PREFIX):
        return _tag_where(field, _tag_is_ordered(op, value))
    # Values of different kinds have no order.
    if value is None or isinstance(value, bool) or isinstance(value, str) != (field in _TEXT_FIELDS):
        return sa.false()
    column: sa.ColumnElement[Any] = groups.c[field]
    if isinstance(value, str) or field == _FLOAT_FIELD:
        return _compare(column, op, value)
    bound = _whole_bound(op, value)
    if field == "staleness" and train_step is not None:
        # staleness > b is oldest_model_step < train_step - 1 - b.
        return _compare(groups.c.oldest_model_step, _MIRRORED[op], train_step - 1 - bound)
    if INT_MIN <= bound <= INT_MAX:
        return _compare(column, op, bound)
    return column.is_not(None) if (op in ("$lt", "$lte")) == (bound > 0) else sa.false()


def _tag_is_ordered(op: str, value: queries.Scalar) -> Clause:
    if value is None:
        return sa.false()
    if isinstance(value, bool):
        return _compare(tags.c.bool_value, op, int(value))
    if isinstance(value, str):
        return _compare(tags.c.text_value, op, encode_text(value))
    ints = _compare(tags.c.int_value, op, _whole_bound(op, value))
    return sa.or_(ints, _compare(tags.c.float_value, op, float(value)))


def _tag_where(field: str, *any_of: Clause) -> Clause:
    name = encode_text(field[len(queries.TAG_PREFIX) :])
    of_row = sa.and_(tags.c.uid == groups.c.uid, tags.c.name == name)
    return sa.exists().where(of_row, sa.or_(sa.false(), *any_of)).correlate(groups)


def _compare(column: sa.ColumnElement[Any], op: str, value: Any) -> Clause:
    return column.op(_OPERATORS[op], is_comparison=True)(value)


_OPERATORS = {"$gt": ">", "$gte": ">=", "$lt": "<", "$lte": "<="}
_MIRRORED = {"$gt": "$lt", "$gte": "$lte", "$lt": "$gt", "$lte": "$gte"}


def _whole_bound(op: str, value: int | float) -> int:
    """The integer b for which ``x op b`` says the same of every integer x as ``x op value``."""
    return math.floor(value) if op in ("$gt", "$lte") else math.ceil(value)


def encode_text(text: str) -> bytes:
    """Text as bytes, in the same order; surrogates too."""
    return text.encode("utf-8", "surrogatepass")
