"""The query language of the stores: dicts in, one small tree out, evaluated in memory.

::

    {"staleness": {"$gte": 2}} --parse_query--> Condition | All | AnyOf --matches(query, row)--> bool
                                                        \\--simplify(query, known)--> bool | smaller query

A query names fields of a `StorageItem` and tags (``tags.<name>``). Values are compared with values of their
own kind only: numbers with numbers, text with text, bools with bools. Another kind is unequal and unordered.

Rows that are ARCHIVED match only a query that names that status by ``$eq`` or ``$in``; every other query is
parsed with the condition ``status != archived`` in front, so no store has to know this rule.

This module holds no rows and knows no store. A store that does not evaluate in Python compiles the tree.
"""

import math
import numbers
import operator
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from enum import Enum
from functools import lru_cache
from typing import Any

Scalar = str | int | float | bool | None

ARCHIVED = "archived"
"""The status of rows that a train step consumed."""

FIELD_KINDS: Mapping[str, type] = {
    "uid": int,
    "timestamp_id": int,
    "task_name": str,
    "status": str,
    "staleness": int,
    "oldest_model_step": int,
    "priority": float,
    "train_step": int,
    "status_before": str,
}
"""The fields of a `StorageItem` that a query may name, besides ``tags.<name>``, and the kind of each."""

QUERY_FIELDS = tuple(FIELD_KINDS)

TAG_PREFIX = "tags."

MAX_DEPTH = 64
"""The deepest nesting of ``$and`` and ``$or`` that is taken: every database and Python can bear it."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One comparison of one field.

    >>> parse_query({"uid": {"$in": [1, 2]}}).parts[1]
    Condition(field='uid', op='$in', value=(1, 2))
    """

    field: str
    """A name from `QUERY_FIELDS`, or ``tags.<name>``."""
    op: str
    """``$eq $ne $gt $gte $lt $lte $in $not_in``; ``$between`` is parsed into two conditions."""
    value: Scalar | tuple[Scalar, ...]
    """A tuple for ``$in`` and ``$not_in``, else one value."""
    choices: frozenset[tuple[type, Scalar]] | None = dataclass_field(init=False, repr=False, compare=False)
    """The tuple as a set: a row is compared with thousands of values as quickly as with one."""

    def __post_init__(self) -> None:
        several = self.value if isinstance(self.value, tuple) else None
        choices = None if several is None else frozenset((_kind(value), value) for value in several)
        object.__setattr__(self, "choices", choices)


@dataclass(frozen=True, slots=True)
class All:
    """Matches where every part matches; without parts it matches everything."""

    parts: "tuple[Query, ...]"


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Matches where some part matches; without parts it matches nothing."""

    parts: "tuple[Query, ...]"


Query = Condition | All | AnyOf


@dataclass(frozen=True)
class StorageIndices:
    """Typed shorthand for the common query: this task, this status, these tags; None leaves a field open.

    >>> StorageIndices(task_name="math", tags={"level": 3}).get_key()
    {'task_name': 'math', 'tags.level': 3}
    """

    task_name: str | None = None
    group_status: Enum | str | None = None
    tags: Mapping[str, str | int | float | bool] | None = None

    def get_key(self) -> dict[str, Any]:
        """The query; a subclass may return another."""
        key: dict[str, Any] = {}
        if self.task_name is not None:
            key["task_name"] = self.task_name
        if self.group_status is not None:
            key["status"] = plain_value(self.group_status)
        return key | {TAG_PREFIX + name: value for name, value in (self.tags or {}).items()}


QueryLike = Mapping[str, Any] | StorageIndices | Query


def parse_query(query: QueryLike) -> Query:
    """The tree of `query`; a tree is returned as it is.

    Raises:
        ValueError: unknown field or operator, or a value the operator cannot take; the message names it.
    """
    if isinstance(query, Condition | All | AnyOf):
        return query
    if isinstance(query, StorageIndices):
        query = query.get_key()
    # The query of every count and take of a buffer: parsing it would cost more than the answer.
    if type(query) is dict and len(query) == 2 and type(query.get("task_name")) is type(query.get("status")) is str:
        return _parse_cell(query["task_name"], query["status"])
    return _parse_tree(query)


@lru_cache(maxsize=1024)
def _parse_cell(task_name: str, status: str) -> Query:
    return _parse_tree({"task_name": task_name, "status": status})


def _parse_tree(query: Mapping[str, Any]) -> Query:
    parsed = _parse_dict(query)
    if _asks_for_archived(parsed):
        return parsed
    return All((Condition("status", "$ne", ARCHIVED), parsed))


def matches(query: Query, row: Any) -> bool:
    """Whether `row`, a `StorageItem` or anything with its attributes, fulfils `query`."""
    if isinstance(query, Condition):
        return holds(query, read_field(row, query.field))
    if isinstance(query, All):
        return all(matches(part, row) for part in query.parts)
    return any(matches(part, row) for part in query.parts)


def simplify(query: Query, known: Mapping[str, Any]) -> Query | bool:
    """`query` for rows that all have the field values `known`: True, False, or the rest to be checked."""
    if isinstance(query, Condition):
        return holds(query, known[query.field]) if query.field in known else query
    # The verdict of one part that settles the whole: False settles "all", True settles "any".
    settles = isinstance(query, AnyOf)
    rest: list[Query] = []
    for part in query.parts:
        verdict = simplify(part, known)
        if verdict is settles:
            return settles
        if not isinstance(verdict, bool):
            rest.append(verdict)
    if not rest:
        return not settles
    return rest[0] if len(rest) == 1 else type(query)(tuple(rest))


def allowed_values(query: Query, field: str) -> tuple[Scalar, ...] | None:
    """The only values of `field` that a matching row can have; None if the query does not say."""
    if isinstance(query, All):
        found = [values for part in query.parts if (values := allowed_values(part, field)) is not None]
        # All of them hold for a row that matches, so the shortest list is enough.
        return min(found, key=len) if found else None
    if isinstance(query, Condition) and query.field == field:
        if query.op == "$eq":
            return (query.value,)  # type: ignore[return-value]
        if query.op == "$in":
            return tuple(dict.fromkeys(query.value))  # type: ignore[arg-type]
    return None


def plain_value(value: Any) -> Any:
    """An Enum member's value; everything else as it is."""
    return value.value if isinstance(value, Enum) else value


def read_field(row: Any, field: str) -> Any:
    """The value that conditions on `field` compare; for a tag that `row` lacks one that equals nothing."""
    if field.startswith(TAG_PREFIX):
        return row.tags.get(field[len(TAG_PREFIX) :], _NO_TAG)
    return plain_value(getattr(row, field))


_NO_TAG = object()


def holds(condition: Condition, value: Any) -> bool:
    """Whether a field with `value` fulfils `condition`."""
    if condition.choices is not None:
        return ((_kind(value), value) in condition.choices) is (condition.op == "$in")
    return _OPERATORS[condition.op](value, condition.value)


def is_storable_text(text: str) -> bool:
    """Whether the text columns of every database can hold it: no NUL, no lone surrogate."""
    return "\0" not in text and (text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text))


def check_whole(name: str, value: Any, *, needed: bool = False) -> Any:
    """`value` as an int, numpy's whole numbers too; None is None, unless it is `needed`.

    Raises:
        ValueError: it is no whole number. A database would keep it, and no later call could read it.
    """
    is_left_out = value is None and not needed
    if not is_left_out and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
        raise ValueError(f"{name} must be a whole number, got {show_value(value)}; give an int")
    return None if is_left_out else int(value)


def check_sizes(sizes: Mapping[str, Any]) -> dict[str, int]:
    """The groups of a batch by task, from 0 to as many as databases count.

    Raises:
        ValueError: one is no whole number.
    """
    whole = {task: check_whole(f"the batch size of task {task!r}", size, needed=True) for task, size in sizes.items()}
    return {task: max(0, min(size, 2**63 - 1)) for task, size in whole.items()}


def to_float(value: Any) -> float:
    """The float nearest to a number; infinity beyond the largest."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def show_value(value: Any) -> str:
    """`value` for an error message: like repr, but short, whatever it is and however deep it nests."""
    try:
        text = _shortener.repr(value)
    except ValueError:
        # Python writes no integer of more than some thousand digits.
        return f"{type(value).__name__} too large to show"
    return text if len(text) <= 300 else text[:300] + "..."


_shortener = reprlib.Repr()
_shortener.maxstring = _shortener.maxother = _shortener.maxlong = 100
_shortener.maxlevel = 4


def _kind(value: Any) -> type:
    """Values of one kind can be compared; bool is a kind of its own, int and float are one."""
    return float if type(value) is int else type(value)


def _equal(a: Any, b: Any) -> bool:
    return bool(_kind(a) is _kind(b) and a == b)


def _ordered(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def check(a: Any, b: Any) -> bool:
        # Two Nones are of one kind, and still have no order.
        return _kind(a) is _kind(b) and a is not None and compare(a, b)

    return check


_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "$eq": _equal,
    "$ne": lambda a, b: not _equal(a, b),
    "$gt": _ordered(operator.gt),
    "$gte": _ordered(operator.ge),
    "$lt": _ordered(operator.lt),
    "$lte": _ordered(operator.le),
}

_MEMBERSHIP = ("$in", "$not_in")


def _parse_dict(query: Any, depth: int = 0) -> Query:
    if not isinstance(query, Mapping):
        raise ValueError(f"a query is a dict like {{'status': 'completed'}}, got {show_value(query)}")
    if depth > MAX_DEPTH:
        raise ValueError(f"the query nests $and / $or deeper than {MAX_DEPTH}; write it flatter")
    parts: list[Query] = []
    for key, value in query.items():
        if key in ("$and", "$or"):
            if not isinstance(value, list):
                raise ValueError(f"{key} takes a list of queries, got {show_value(value)}")
            parsed = tuple(_parse_dict(part, depth + 1) for part in value)
            parts.append(All(parsed) if key == "$and" else AnyOf(parsed))
        else:
            parts.append(_parse_field(key, value))
    return parts[0] if len(parts) == 1 else All(tuple(parts))


def _parse_field(field: Any, value: Any) -> Query:
    if isinstance(field, str) and field.startswith("$"):
        raise ValueError(f"unknown operator {show_value(field)} in place of a field; only $and and $or stand there")
    is_tag = isinstance(field, str) and field.startswith(TAG_PREFIX) and field != TAG_PREFIX
    if not is_tag and field not in QUERY_FIELDS:
        raise ValueError(f"unknown field {show_value(field)}; known: {', '.join(QUERY_FIELDS)}, tags.<name>")
    if not isinstance(value, Mapping):
        return Condition(field, "$eq", _scalar(field[:100], value))
    parts = [part for op, operand in value.items() for part in _parse_operator(field, op, operand)]
    return parts[0] if len(parts) == 1 else All(tuple(parts))


def _parse_operator(field: str, op: Any, operand: Any) -> list[Condition]:
    if op not in (*_OPERATORS, *_MEMBERSHIP, "$between"):
        known = " ".join((*_OPERATORS, *_MEMBERSHIP, "$between"))
        raise ValueError(f"unknown operator {show_value(op)} for field {show_value(field)}; known: {known}")
    where = f"{field[:100]} {op}"
    if op == "$between":
        if not isinstance(operand, list | tuple) or len(operand) != 2:
            raise ValueError(f"{where} takes two values [low, high], got {show_value(operand)}")
        low, high = (_scalar(where, bound) for bound in operand)
        if not _OPERATORS["$lte"](low, high):
            raise ValueError(f"{where} takes [low, high] of one kind with low <= high, got {show_value(operand)}")
        return [Condition(field, "$gte", low), Condition(field, "$lte", high)]
    if op not in _MEMBERSHIP:
        return [Condition(field, op, _scalar(where, operand))]
    if not isinstance(operand, list):
        raise ValueError(f"{where} takes a list, got {show_value(operand)}")
    return [Condition(field, op, tuple(_scalar(where, item) for item in operand))]


def _scalar(where: str, value: Any) -> Scalar:
    """`value` as a plain Python scalar (numpy numbers and Enum members become one)."""
    value = plain_value(value)
    if value is None or type(value) in (bool, int):
        return value  # type: ignore[no-any-return]
    if isinstance(value, str):
        return str(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real) and not math.isnan(number := to_float(value)):
        return number
    raise ValueError(f"{where} takes text, a number, a bool or None, got {show_value(value)}")


def _asks_for_archived(query: Query) -> bool:
    if isinstance(query, Condition):
        if query.field != "status" or query.op not in ("$eq", "$in"):
            return False
        return ARCHIVED in (query.value if isinstance(query.value, tuple) else (query.value,))
    return any(_asks_for_archived(part) for part in query.parts)
