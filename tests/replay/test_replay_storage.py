"""Conformance: what every store must do (`forebay.replay.storage`)."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_factory import make_row, uids

from forebay.replay import IndexedStorage, NaiveStorage, StorageItem
from forebay.replay.indexed import MAX_RUNS
from forebay.replay.query import QUERY_FIELDS
from forebay.replay.storage import check_priority, check_tags
from forebay.types import Status


async def put_all(store, *rows):
    return [await store.put(row) for row in rows]


async def test_put_gives_growing_ids_and_get_returns_arrival_order(store):
    ids = await put_all(store, make_row("a"), make_row("b", task="code"), make_row("c"))
    assert ids == sorted(set(ids))
    rows = await store.get({})
    assert uids(rows) == ids
    assert [row.item for row in rows] == ["a", "b", "c"]
    assert [row.timestamp_id for row in rows] == sorted(row.timestamp_id for row in rows)
    assert len(store) == 3


async def test_an_id_that_is_brought_along_is_kept_if_it_is_new(store):
    row = make_row("a")
    row.uid, row.timestamp_id = 7, 9
    assert await store.put(row) == 7
    assert await store.put(row) == 8
    assert [stored.timestamp_id for stored in await store.get({})] == [9, 10]


async def test_ids_do_not_rewind_when_drained_saved_and_loaded(store, make_store):
    ids = await put_all(store, make_row(), make_row())
    await store.take(ids)
    assert len(store) == 0
    fresh = make_store()
    fresh.load_state_dict(store.state_dict())
    assert await fresh.put(make_row()) > max(ids)
    assert await store.put(make_row()) > max(ids)


async def test_loading_an_older_state_does_not_rewind_ids(store):
    state = store.state_dict()
    ids = await put_all(store, make_row(), make_row())
    store.load_state_dict(state)
    assert len(store) == 0
    assert await store.put(make_row()) > max(ids)


async def test_rows_only_leaves_the_payload_out(store):
    await store.put(make_row("a", tags={"level": 3}))
    (row,) = await store.get({}, rows_only=True)
    assert row.item is None
    assert row.tags == {"level": 3}


async def test_what_is_returned_is_a_copy(store):
    given_row = make_row("a", tags={"x": 1})
    uid = await store.put(given_row)
    given_row.tags["x"] = 2
    given_row.status = "failed"
    (row,) = await store.get({})
    row.tags["x"] = 3
    row.priority = 9.0
    (again,) = await store.get({"uid": uid})
    assert (again.tags, again.priority, again.status) == ({"x": 1}, 1.0, "completed")


async def test_status_members_and_their_values_are_the_same(store):
    uid = await store.put(make_row(status=Status.ABORTED))
    assert await store.count({"status": "aborted"}) == 1
    assert await store.count({"status": Status.ABORTED}) == 1
    (row,) = await store.take([uid], train_step=1)
    assert row.status is Status.ABORTED
    (archived,) = await store.get({"status": "archived"})
    assert archived.status is Status.ARCHIVED


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (None, "abcd"),
        ("timestamp_id", "abcd"),
        ("-timestamp_id", "dcba"),
        ("staleness", "adbc"),
        ("-staleness", "bcad"),
        ("priority", "cabd"),
        ("-priority", "dabc"),
    ],
)
async def test_orders_with_ties_in_arrival_order(store, order, expected):
    await put_all(
        store,
        make_row("a", staleness=1),
        make_row("b", staleness=2, task="code"),
        make_row("c", staleness=2, priority=0.5),
        make_row("d", staleness=1, priority=2.0),
    )
    for limit in (None, 0, 1, 2, 3, 4, 5, -1):
        rows = await store.get({}, order=order, limit=limit)
        wanted = expected if limit is None else expected[: max(limit, 0)]
        assert "".join(row.item for row in rows) == wanted
    by_uid = await store.get({"uid": {"$lte": 99}}, order=order)
    listed = await store.get({"uid": {"$in": [3, 1, 0, 2, 77]}}, order=order)
    assert uids(by_uid) == uids(listed) == uids(await store.get({}, order=order))


async def test_an_unknown_order_is_an_error(store):
    with pytest.raises(ValueError, match="'reward'"):
        await store.get({}, order="reward")


async def test_staleness_is_as_given_until_a_train_step_is_known(store):
    await put_all(store, make_row("a", staleness=5, step=8), make_row("b", staleness=1, step=2))
    assert [row.item for row in await store.get({}, order="-staleness")] == ["a", "b"]
    await store.set_train_step("math", 10)
    rows = await store.get({}, order="-staleness")
    assert [(row.item, row.staleness) for row in rows] == [("b", 7), ("a", 1)]
    assert await store.get_train_step("math") == 10
    assert await store.get_train_step("code") is None


async def test_labelled_and_unlabelled_rows_are_ranked_together_at_every_train_step(store):
    await put_all(
        store,
        make_row("given 3", staleness=3),
        make_row("step 2", step=2),
        make_row("step 0", step=0),
        make_row("given 1", staleness=1),
    )
    expected = {
        3: [("given 3", 3), ("step 0", 2), ("given 1", 1), ("step 2", 0)],
        4: [("given 3", 3), ("step 0", 3), ("step 2", 1), ("given 1", 1)],
        6: [("step 0", 5), ("given 3", 3), ("step 2", 3), ("given 1", 1)],
        2: [("given 3", 3), ("step 0", 1), ("given 1", 1), ("step 2", -1)],
    }
    for train_step, order in expected.items():
        await store.set_train_step("math", train_step)
        rows = await store.get({}, order="-staleness")
        assert [(row.item, row.staleness) for row in rows] == order
        assert await store.count({"staleness": {"$gte": 3}}) == sum(age >= 3 for _, age in order)


async def test_tasks_age_on_their_own(store):
    await put_all(store, make_row("m", step=0), make_row("c", task="code", step=0))
    await store.set_train_step("math", 5)
    rows = {row.item: row.staleness for row in await store.get({})}
    assert rows == {"m": 4, "c": 0}


async def test_take_removes_each_row_once_and_ignores_unknown_uids(store):
    a, b = await put_all(store, make_row("a"), make_row("b"))
    assert [row.item for row in await store.take([b, 99, a, b])] == ["b", "a"]
    assert await store.take([a, b]) == []
    assert len(store) == 0


async def test_take_leaves_rows_that_do_not_match_any_more(store):
    a, b = await put_all(store, make_row("a"), make_row("b"))
    await store.take([a], train_step=1)
    taken = await store.take([a, b], query={"status": "completed"})
    assert [row.item for row in taken] == ["b"]
    assert await store.count({"status": "archived"}) == 1


async def test_take_for_a_train_step_archives(store):
    a, b = await put_all(store, make_row("a", status="aborted", tags={"x": 1}), make_row("b"))
    (taken,) = await store.take([a], train_step=4)
    assert (taken.item, taken.status, taken.train_step) == ("a", "aborted", None)
    assert len(store) == 1
    assert uids(await store.get({})) == [b]
    (row,) = await store.get({"status": "archived"})
    assert (row.uid, row.item, row.train_step, row.status_before, row.tags) == (
        a,
        "a",
        4,
        "aborted",
        {"x": 1},
    )
    await store.take([a], train_step=6)
    (row,) = await store.get({"status": "archived"})
    assert (row.train_step, row.status_before) == (6, "aborted")


async def test_delete_ignores_unknown_uids(store):
    a, b = await put_all(store, make_row("a"), make_row("b"))
    await store.delete([a, a, 99])
    assert uids(await store.get({})) == [b]


async def test_update_keeps_ids_and_payload_and_ignores_unknown_uids(store):
    a, b = await put_all(store, make_row("a"), make_row("b"))
    (row,) = await store.get({"uid": a}, rows_only=True)
    row.status, row.timestamp_id, row.priority = "expired", 50, 2.0
    unknown = make_row("z")
    unknown.uid = 99
    await store.update([row, unknown])
    rows = await store.get({})
    assert [(r.uid, r.timestamp_id, r.status, r.item) for r in rows] == [
        (a, 0, "expired", "a"),
        (b, 1, "completed", "b"),
    ]
    row.item = "new"
    await store.update([row])
    assert [r.item for r in await store.get({"status": "expired"})] == ["new"]


async def test_rows_that_come_back_take_their_old_place(store):
    """Also when so many come back, one by one and newest first, that the index has to merge its runs."""
    num_rows = 4 * MAX_RUNS
    ids = await put_all(store, *(make_row(i) for i in range(num_rows)))
    rows = await store.get({})
    for row in rows:
        row.status = "aborted"
    await store.update(rows[:-1])
    for row in reversed(rows[:-1]):
        row.status = "completed"
        await store.update([row])
    assert uids(await store.get({"status": "completed"})) == ids
    assert uids(await store.get({}, order="-timestamp_id", limit=3)) == ids[:-4:-1]
    await store.delete(ids[1::2])
    assert uids(await store.get({})) == ids[::2]


@pytest.mark.parametrize("target", [NaiveStorage, IndexedStorage])
async def test_a_state_moves_to_any_store(store, target):
    await store.set_train_step("math", 6)
    ids = await put_all(
        store,
        make_row("a", step=1),
        make_row("b", staleness=2, tags={"x": True}),
        make_row("c", priority=0.0),
    )
    await store.take(ids[:1], train_step=6)
    other = target()
    other.load_state_dict(store.state_dict())
    everything = {"status": {"$in": ["completed", "archived"]}}
    assert await other.get(everything) == await store.get(everything)
    assert len(other) == len(store) == 2
    assert await other.get_train_step("math") == 6
    (row,) = await other.get({"uid": ids[1]})
    row.priority = 5.0
    await other.update([row])
    assert (await store.get({"uid": ids[1]}))[0].priority == 1.0


async def test_a_state_that_contradicts_itself_leaves_the_store_as_it_was(store, make_store):
    await put_all(store, make_row("a"), make_row("b"))
    state = store.state_dict()
    target = make_store()
    await target.put(make_row("kept"))
    for wrong in (
        {"version": 99},
        {"items": state["items"] * 2},
        {"next_uid": 1},
        {"next_timestamp_id": 0},
    ):
        with pytest.raises(ValueError, match=r"version|twice"):
            target.load_state_dict({**state, **wrong})
        assert [row.item for row in await target.get({})] == ["kept"]


def test_queries_may_name_every_row_field_but_the_payload_and_the_dict_of_tags():
    assert set(QUERY_FIELDS) == {field.name for field in fields(StorageItem)} - {"item", "tags"}


@pytest.mark.parametrize(
    "tags", [{"a": None}, {"a": [1]}, {1: "a"}, {"": 1}, {"a": float("nan")}, {"a": 2**63}]
)
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
