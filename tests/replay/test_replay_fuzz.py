"""Queries and tags that nobody meant to write: a clear error or the right answer, on every store.

The right answer is what the scan finds. A clear error is a ValueError. Nothing else may come out, and no
value may ever become part of a SQL statement.
"""

import asyncio
import json
from collections import OrderedDict
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replay_factory import make_group, make_row, refusal, statements, uids
from typer.testing import CliRunner

from forebay.cli.buffer import parse_json_query
from forebay.cli.commands import app
from forebay.replay import FIFOReplayPolicy, IndexedStorage, NaiveStorage, ReplayBuffer, SQLStorage, parse_query
from forebay.replay.query import QUERY_FIELDS
from forebay.types import Status

# A failing example may be long; it is to be shown all the same.
pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")

MARK = "mArK"
"""In every text value and tag name that is generated: SQL text that holds it was made from a value."""

TEXTS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(
        [
            "completed",
            "archived",
            "math",
            "' OR '1'='1",
            "'; DROP TABLE forebay_groups; --",
            '") OR 1=1 --',
            "%s %(x)s :name ? $1 {0} \\",
            "a\0b",
            "\ud800\udfff",
            "\u202e\U0010ffff",
            "$and",
        ]
    ),
    st.just(5000).map("x".__mul__),
).map(lambda text: text if text in ("completed", "archived", "math") else MARK + text)
NUMBERS = st.one_of(
    st.integers(-3, 9),
    st.integers(),
    st.sampled_from([2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1]),
    st.sampled_from([10, -10, Fraction(10)]).map(lambda base: base**401),
    st.floats(),
    st.sampled_from(
        [
            np.int64(3),
            np.float32(0.1),
            np.float16("inf"),
            np.longdouble("1e4000"),
            Fraction(1, 3),
            Decimal("1.5"),
            np.bool_(True),
            1j,
        ]
    ),
)
OTHERS = st.sampled_from([None, True, False, Status.COMPLETED, Status.ARCHIVED, b"bytes", ..., object, {1}])
SCALARS = TEXTS | NUMBERS | OTHERS
FIELDS = st.one_of(
    st.sampled_from([*QUERY_FIELDS, "tags.level", "tags.kind", "tags.", "tags", "item", "", "$and", "$or"]),
    TEXTS.map(lambda text: "tags." + text),
    SCALARS.filter(lambda value: value.__hash__ is not None),
)
OPERATORS = st.sampled_from(
    ["$eq", "$ne", "$gt", "$gte", "$lt", "$lte", "$in", "$not_in", "$between", "$like", "", None, 3]
)
OPERANDS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(OPERATORS, inner, max_size=2),
        st.dictionaries(OPERATORS, inner, max_size=2).map(MappingProxyType),
        st.builds(np.asarray, st.lists(st.integers(0, 3), max_size=2)),
    ),
    max_leaves=5,
)
CONDITIONS = st.dictionaries(OPERATORS, SCALARS | st.lists(SCALARS, max_size=3), min_size=1, max_size=2)
QUERIES = st.recursive(
    st.dictionaries(FIELDS, SCALARS | CONDITIONS | OPERANDS, max_size=2),
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(["$and", "$or"]), st.lists(inner, max_size=3), min_size=1),
        st.dictionaries(st.sampled_from(["$and", "$or", "uid"]), inner, max_size=2),
        inner.map(OrderedDict),
    ),
    max_leaves=5,
)


def nested(make):
    """`make` applied far more often than Python recurses."""
    value = {"uid": 1}
    for _ in range(20_000):
        value = make(value)
    return value


ABYSSES = [
    lambda: nested(lambda inner: {"$and": [inner]}),
    lambda: nested(lambda inner: {"$or": inner}),
    lambda: nested(lambda inner: {"uid": inner}),
    lambda: {"uid": {"$in": nested(lambda inner: [inner])}},
    lambda: {"uid": {"$between": [nested(lambda inner: (inner,)), 1]}},
    lambda: nested(lambda inner: [inner]),
    lambda: {"uid": {"$between": [10**5000, 1]}},
    lambda: {10**5000: 1},
    lambda: {"uid": {"$like": 10**5000}},
    lambda: {"tags.a": [10**5000]},
]


async def fill(store):
    await store.set_train_step("math", 5)
    tags = [{"level": 3, "kind": "a"}, {"level": True}, {"level": 0.5, MARK: "x"}, {"kind": MARK + "a\0b"}]
    for number, row_tags in enumerate([*tags, {}]):
        step, status = (None, number)[number % 2], ("completed", "aborted")[number == 3]
        await store.put(make_row(number, status=status, step=step, tags=row_tags, priority=number / 2))
    await store.take([4], train_step=2)


async def answer(store, query):
    """The uids, or the error's text."""

    async def ask():
        found.extend(uids(await store.get(query, rows_only=True)))
        assert await store.count(query) == len(found)

    found = []
    return await refusal(ask()) or found


@pytest.fixture(params=["sqlite", "postgres"])
def place(request, tmp_path):
    """Where a SQL store keeps its content."""
    return tmp_path / "fuzz.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture
def stores(place):
    """The scan first; all with the same rows. The examples only ask."""
    stores = [NaiveStorage(), IndexedStorage(), SQLStorage(place)]
    for store in stores:
        asyncio.run(fill(store))
    yield stores
    stores[-1].close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(query=QUERIES)
async def test_any_query_is_answered_alike_or_refused_alike(stores, query):
    await check(stores, query)


async def check(stores, query):
    with statements() as sent:
        expected, *answers = [await answer(store, query) for store in stores]
    assert answers == [expected] * (len(stores) - 1)
    assert not any(MARK in text for text, _ in sent)


@pytest.mark.parametrize(
    "query",
    [
        {"$or": [{"tags." + MARK + "'": MARK + "'"}] * 2000},
        {"uid": {"$in": list(range(100_000))}},
        {"tags." + MARK * 10_000: {"$not_in": [MARK * number for number in range(500)]}},
        {"$and": [{"tags." + MARK: {"$ne": {"$eq": MARK}}} for _ in range(2000)]},
    ],
    ids=range(4),
)
async def test_large_queries_too(stores, query):
    await check(stores, query)


@pytest.mark.parametrize("make_query", ABYSSES, ids=range(len(ABYSSES)))
async def test_nothing_is_too_deep_or_too_large_to_refuse(stores, make_query):
    query = make_query()
    for store in stores:
        assert isinstance(await answer(store, query), str)


@given(value=SCALARS | st.lists(SCALARS, max_size=2), field=st.sampled_from(QUERY_FIELDS))
async def test_an_error_names_the_field(value, field):
    for query in ({field: value}, {"$or": [{field: {"$in": [1, value]}}]}, {field: {"$between": value}}):
        assert field in (await refusal(parsed(query)) or field)


async def parsed(query):
    return parse_query(query)


@given(text=QUERIES.map(lambda query: json.dumps(query, default=str, skipkeys=True)) | st.text(max_size=20))
async def test_any_text_is_a_query_or_refused(text):
    await refusal(read(text))


async def read(text):
    return parse_query(parse_json_query(text))


ODD_JSON = [
    "[" * 20_000,
    '{"$and": [' * 20_000,
    '{"$and": [' * 900 + "]}" * 900,
    '{"uid": ' * 20_000 + "1" + "}" * 20_000,
    '{"uid": ' + "9" * 5000 + "}",
    '{"uid": NaN}',
    '{"uid": 1e999}',
    '{"task_name": "\\ud800\\u0000"}',
    "\0",
    "",
]


@pytest.mark.parametrize("text", ODD_JSON, ids=range(len(ODD_JSON)))
def test_the_command_says_what_is_wrong_or_answers(tmp_path, text):
    asyncio.run(refusal(read(text)))

    async def save():
        buffer = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
        await buffer.put(make_group("a"), "math")
        await buffer.save(tmp_path)

    asyncio.run(save())
    result = CliRunner().invoke(app, ["buffer", "query", str(tmp_path), text], catch_exceptions=False)
    assert result.exit_code in (0, 2)
    assert (result.exit_code == 2) == result.stderr.startswith("error: ")


NAMES = TEXTS | SCALARS.filter(lambda value: value.__hash__ is not None)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tags=st.dictionaries(NAMES, SCALARS, max_size=3), task=TEXTS, priority=NUMBERS | OTHERS)
async def test_any_tag_is_kept_exactly_or_refused(sql_buffer, tags, task, priority):
    """What a store takes it also finds, by that tag and that task, and gives back as it was."""
    buffers = [sql_buffer, *(ReplayBuffer(FIFOReplayPolicy(), kind()) for kind in (NaiveStorage, IndexedStorage))]
    with statements() as sent:
        for buffer in buffers:
            put = buffer.put(make_group("g", 1), task, tags=tags, priority=priority)
            if refused := await refusal(put):
                assert any(word in refused for word in ("tag", "priority", "task_name"))
                assert len(buffer) == 0
                continue
            (row,) = await buffer.storage.get({"task_name": task})
            assert (row.task_name, row.tags) == (task, tags)
            assert {name: type(row.tags[name]) for name in tags} == {name: type(tags[name]) for name in tags}
            for name, value in tags.items():
                assert await buffer.count(task, Status.COMPLETED, tags={name: value}) == 1
            assert len(await buffer.get(2, task, Status.COMPLETED, tags=tags)) == 1
    assert not any(MARK in text for text, _ in sent)


@pytest.fixture
def sql_buffer(place):
    store = SQLStorage(place)
    yield ReplayBuffer(FIFOReplayPolicy(), store)
    store.close()
