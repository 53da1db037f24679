"""Queries on every store against the same queries on the scan: some 280 each, 11,000 in the long version."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replay_factory import make_row
from test_replay_query import ORDERS, QUERIES, VALUES

from forebay.replay import IndexedStorage, NaiveStorage, SQLStorage

EVERYTHING = {"status": {"$in": ["completed", "aborted", "expired", "archived"]}}

# Where a database's arithmetic, order or text differs from Python's if nobody takes care.
ODD_NUMBERS = st.sampled_from(
    [0, -0.0, 0.1, 0.5, -1, 2**53, 2**53 + 1, float(2**53), 2**63 - 1, -(2**63), float(2**63), 1e300, 5e-324]
)
BEYOND = st.sampled_from([2**63, -(2**63) - 1, 10**400, float("inf"), float("-inf")])
ODD_TEXTS = st.sampled_from(
    ["", "a", "A", "a\0", "a\0b", "\ud800", "a\udfff", "\ue000", "\ud7ff", "\U0001f600", "%", "'", "Z", "b"]
)
TAGS = st.dictionaries(st.sampled_from(["a", "b"]), ODD_NUMBERS | ODD_TEXTS | st.booleans())
ROWS = st.lists(
    st.builds(
        make_row,
        task=st.sampled_from(["math", "code", "a", "", "\ue000", "\U0001f600"]),
        status=st.sampled_from(["completed", "aborted", "expired"]),
        staleness=st.integers(-1, 4),
        step=st.none() | st.integers(0, 4),
        priority=st.sampled_from([0.0, 0.5, 1.0, float(2**53), 5e-324]),
        tags=TAGS,
    ),
    max_size=20,
)
ODD = ODD_NUMBERS | BEYOND | ODD_TEXTS | st.none() | st.booleans()
ODD_QUERIES = st.tuples(
    st.sampled_from(sorted(VALUES)),
    st.dictionaries(st.sampled_from(["$eq", "$ne", "$gt", "$gte", "$lt", "$lte"]), ODD, min_size=1, max_size=2)
    | st.dictionaries(st.sampled_from(["$in", "$not_in"]), st.lists(ODD, max_size=4), min_size=1),
).map(lambda pair: dict([pair]))
ASKED = st.lists(st.tuples(QUERIES | ODD_QUERIES, ORDERS, st.none() | st.integers(0, 9)), min_size=30, max_size=40)


@pytest.fixture(params=["sqlite", "postgres"])
def stores(request, tmp_path):
    """Every store but the scan; with PostgreSQL, where it is, on its own."""
    if request.param == "postgres":
        stores = [SQLStorage(request.getfixturevalue("postgres_url"))]
    else:
        stores = [SQLStorage(tmp_path / "buffer.db"), IndexedStorage()]
    yield stores
    stores[0].close()


# The same stores for all examples: each loads its own content.
@settings(
    max_examples=settings().max_examples // 6,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    rows=ROWS,
    asked=ASKED,
    consumed=st.lists(st.integers(0, 20), max_size=5),
    train_steps=st.dictionaries(st.sampled_from(["math", "code", "nobody's"]), st.integers(0, 7)),
)
async def test_every_store_finds_what_the_scan_finds(stores, rows, asked, consumed, train_steps):
    scan = NaiveStorage()
    for row in rows:
        await scan.put(row)
    await scan.take(consumed, train_step=3)
    for task, step in train_steps.items():
        await scan.set_train_step(task, step)
    state = scan.state_dict()
    for store in stores:
        store.load_state_dict(state)
    for query, order, limit in asked:
        expected = await scan.get(query, order=order, limit=limit, rows_only=True)
        for store in stores:
            assert await store.get(query, order=order, limit=limit, rows_only=True) == expected, query
            assert await store.count(query) == await scan.count(query), query
    for query, order, limit in asked[:3]:
        expected = await scan.take_first(limit or 2, query, order=order, train_step=limit)
        for store in stores:
            taken = await store.take_first(limit or 2, query, order=order, train_step=limit)
            assert taken == expected
    for store in stores:
        assert await store.get(EVERYTHING) == await scan.get(EVERYTHING)
