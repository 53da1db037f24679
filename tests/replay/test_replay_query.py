"""The query language: what it means, and that every store agrees."""

import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_factory import make_row, uids

from forebay.replay import IndexedStorage, NaiveStorage, StorageIndices, parse_query
from forebay.replay.query import MAX_DEPTH, matches, simplify
from forebay.types import Status


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("completed", "'completed'"),
        ({"item": 1}, "'item'"),
        ({"tags": {"a": 1}}, "'tags'"),
        ({"tags.": 1}, "'tags.'"),
        ({3: 1}, "3"),
        ({"reward": 1}, "'reward'"),
        ({"$not": []}, "'\\$not'"),
        ({"status": {"$like": "a"}}, "'\\$like'"),
        ({"status": {1: "a"}}, "1"),
        ({"status": ["a"]}, "\\['a'\\]"),
        ({"status": {"$eq": ["a"]}}, "status \\$eq"),
        ({"status": {"$in": "a"}}, "status \\$in"),
        ({"status": {"$not_in": {"a": 1}}}, "status \\$not_in"),
        ({"uid": {"$in": [[1]]}}, "uid \\$in"),
        ({"uid": {"$between": [1]}}, "uid \\$between"),
        ({"uid": {"$between": 3}}, "uid \\$between"),
        ({"uid": {"$between": [2, 1]}}, "\\[2, 1\\]"),
        ({"uid": {"$between": [1, "2"]}}, "uid \\$between"),
        ({"uid": {"$between": [None, None]}}, "uid \\$between"),
        ({"priority": float("nan")}, "nan"),
        ({"$and": {}}, "\\$and"),
        ({"$or": [1]}, "1"),
        ({"$or": [{"uid": {"$gt": object()}}]}, "uid \\$gt"),
    ],
)
async def test_wrong_queries_name_the_wrong_part(store, query, named):
    for ask in (store.get, store.count):
        with pytest.raises(ValueError, match=named):
            await ask(query)


def test_a_query_too_deep_to_follow_is_an_error():
    query = {"uid": 1}
    for _ in range(MAX_DEPTH):
        query = {"$and": [query]}
    parse_query(query)
    with pytest.raises(ValueError, match="deeper"):
        parse_query({"$or": [query]})


def test_indices_are_a_shorthand_and_get_key_may_be_overridden():
    indices = StorageIndices("math", Status.COMPLETED, {"level": 3})
    assert indices.get_key() == {"task_name": "math", "status": "completed", "tags.level": 3}
    assert parse_query(indices) == parse_query(indices.get_key())
    assert StorageIndices().get_key() == {}

    class Hard(StorageIndices):
        def get_key(self):
            return super().get_key() | {"tags.level": {"$gte": 5}}

    assert parse_query(Hard("math")) == parse_query({"task_name": "math", "tags.level": {"$gte": 5}})


TASKS = ["math", "code"]
STATUSES = ["completed", "aborted", "expired"]
TAG_VALUES = st.sampled_from([0, 1, 2, 0.0, 1.0, 1.5, "0", "a", True, False])
ROWS = st.lists(
    st.builds(
        make_row,
        task=st.sampled_from(TASKS),
        status=st.sampled_from(STATUSES),
        staleness=st.integers(0, 4),
        step=st.none() | st.integers(0, 4),
        priority=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        tags=st.dictionaries(st.sampled_from(["a", "b"]), TAG_VALUES),
    ),
    max_size=25,
)
VALUES = {
    "uid": st.integers(0, 25),
    "timestamp_id": st.integers(0, 25),
    "task_name": st.sampled_from([*TASKS, "none"]),
    "status": st.sampled_from([*STATUSES, "archived", Status.COMPLETED]),
    "staleness": st.integers(-1, 5) | st.just(1.0),
    "priority": st.sampled_from([0, 0.5, 1, 1.0, 2.0]),
    "oldest_model_step": st.none() | st.integers(0, 4),
    "train_step": st.none() | st.integers(0, 9),
    "status_before": st.none() | st.sampled_from(STATUSES),
    "tags.a": TAG_VALUES | st.none(),
    "tags.b": TAG_VALUES,
}


def _conditions(field):
    value = VALUES[field] | TAG_VALUES
    single = st.sampled_from(["$eq", "$ne", "$gt", "$gte", "$lt", "$lte"])
    several = st.sampled_from(["$in", "$not_in"])
    bounds = st.tuples(st.integers(0, 2), st.integers(2, 5)).map(list)
    operators = (
        st.tuples(single, value)
        | st.tuples(several, st.lists(value, max_size=3))
        | st.tuples(st.just("$between"), bounds)
    )
    return value | st.lists(operators, max_size=2).map(dict)


FLAT = st.lists(
    st.sampled_from(sorted(VALUES)).flatmap(lambda field: st.tuples(st.just(field), _conditions(field))), max_size=3
).map(dict)
QUERIES = st.recursive(
    FLAT,
    lambda inner: st.builds(
        lambda flat, key, parts: {**flat, key: parts},
        FLAT,
        st.sampled_from(["$and", "$or"]),
        st.lists(inner, max_size=3),
    ),
    max_leaves=6,
)
ORDERS = st.sampled_from([None, "-timestamp_id", "staleness", "-staleness", "priority", "-priority"])


def _kind(value):
    return "number" if type(value) in (int, float) else type(value).__name__


def _row_value(row, field):
    """The value of a field; a missing tag is a lone object, equal to nothing."""
    if field.startswith("tags."):
        return row.tags.get(field[5:], object())
    value = getattr(row, field)
    return getattr(value, "value", value)


def _expected(query, row):
    """The language once more, straight from its description, on the dict itself."""

    def equal(a, b):
        return _kind(a) == _kind(b) and a == b

    def compare(op, value, operand):
        if op in ("$eq", "$ne"):
            return equal(value, operand) == (op == "$eq")
        if op in ("$in", "$not_in"):
            return any(equal(value, getattr(one, "value", one)) for one in operand) == (op == "$in")
        if op == "$between":
            return compare("$gte", value, operand[0]) and compare("$lte", value, operand[1])
        order = {"$gt": operator.gt, "$gte": operator.ge, "$lt": operator.lt, "$lte": operator.le}[op]
        return _kind(value) == _kind(operand) and value is not None and order(value, operand)

    verdicts = []
    for key, wanted in query.items():
        if key == "$and":
            verdicts.append(all(_expected(part, row) for part in wanted))
        elif key == "$or":
            verdicts.append(any(_expected(part, row) for part in wanted))
        else:
            operators = wanted if isinstance(wanted, dict) else {"$eq": wanted}
            verdicts += [
                compare(op, _row_value(row, key), getattr(one, "value", one)) for op, one in operators.items()
            ]
    return all(verdicts)


def _asks_for_archived(query):
    for key, wanted in query.items():
        if key in ("$and", "$or") and any(_asks_for_archived(part) for part in wanted):
            return True
        if key == "status":
            operators = wanted if isinstance(wanted, dict) else {"$eq": wanted}
            if operators.get("$eq") == "archived" or "archived" in operators.get("$in", []):
                return True
    return False


@given(ROWS, QUERIES, ORDERS, st.none() | st.integers(0, 9), st.data())
async def test_every_store_gives_the_same_rows_as_the_description(rows, query, order, limit, data):
    stores = [NaiveStorage(), IndexedStorage()]
    train_step = data.draw(st.none() | st.integers(0, 7))
    consumed = data.draw(st.lists(st.integers(0, 25), max_size=5))
    answers = []
    for store in stores:
        for row in rows:
            await store.put(row)
        await store.take(consumed, train_step=3)
        if train_step is not None:
            await store.set_train_step("math", train_step)
        everything = await store.get({"status": {"$in": [*STATUSES, "archived"]}})
        expected = [
            row.uid
            for row in everything
            if _expected(query, row) and (row.status != "archived" or _asks_for_archived(query))
        ]
        assert uids(await store.get(query)) == expected
        assert await store.count(query) == len(expected)
        answers.append(uids(await store.get(query, order=order, limit=limit)))
        assert uids(await store.take(range(26), query=query)) == expected
    assert answers[0] == answers[1]


@given(QUERIES, ROWS)
def test_simplifying_with_known_fields_changes_no_answer(query, rows):
    parsed = parse_query(query)
    for row in rows:
        known = {"task_name": row.task_name, "status": row.status, "staleness": row.staleness}
        rest = simplify(parsed, known)
        assert matches(parsed, row) == (rest if isinstance(rest, bool) else matches(rest, row))
