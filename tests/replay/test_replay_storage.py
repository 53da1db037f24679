"""What stores in memory share, and what only they promise; `forebay.testing` has what every store must do."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_factory import make_row, uids

from forebay.replay import IndexedStorage, StorageItem
from forebay.replay.query import QUERY_FIELDS
from forebay.replay.stores.contract import check_priority, check_tags
from forebay.types import Status


async def test_stores_in_memory_hand_out_what_was_put(store):
    payload = object()
    uid = await store.put(make_row(payload, status=Status.ABORTED))
    (row,) = await store.take([uid], train_step=1)
    assert row.item is payload
    assert row.status is Status.ABORTED
    (archived,) = await store.get({"status": "archived"})
    assert archived.status is Status.ARCHIVED


async def test_rows_that_come_back_newest_first_have_their_old_places():
    store, num_rows = IndexedStorage(), 32
    ids = [await store.put(make_row(i)) for i in range(num_rows)]
    rows = await store.get({})
    for row in rows:
        row.status = "aborted"
    await store.update(rows[:-1])
    for row in reversed(rows[:-1]):
        row.status = "completed"
        await store.update([row])
    assert uids(await store.get({"status": "completed"})) == ids


def test_queries_may_name_every_row_field_but_the_payload_and_the_dict_of_tags():
    assert set(QUERY_FIELDS) == {field.name for field in fields(StorageItem)} - {"item", "tags"}


@pytest.mark.parametrize("tags", [{"a": None}, {"a": [1]}, {1: "a"}, {"": 1}, {"a": float("nan")}, {"a": 2**63}])
def test_bad_tags(tags):
    with pytest.raises(ValueError, match="tag"):
        check_tags(tags)


@pytest.mark.parametrize("priority", [-0.1, float("nan"), float("inf"), True])
def test_bad_priorities(priority):
    with pytest.raises(ValueError, match="priority"):
        check_priority(priority)


@given(st.dictionaries(st.text(min_size=1), st.text() | st.booleans() | st.integers(-(2**63), 2**63 - 1)))
def test_good_tags(tags):
    assert check_tags(tags) == tags
