"""The DataFrame store: the same answers as the reference, and a frame to look at."""

import asyncio
import random

import numpy as np
import pandas as pd
import pytest
from replay_factory import make_group, make_row, uids

from forebay.replay import (
    FIFOReplayPolicy,
    IndexedStorage,
    NaiveStorage,
    PandasStorage,
    ReplayBuffer,
    SyncReplayBufferConfig,
)
from forebay.types import Status

NUM_STORES, NUM_QUERIES = 40, 75

STATUSES = ["completed", "aborted", "expired"]
TAGS = [0, 1, 2, 2**53, 2**53 + 1, -(2**63), 0.0, -0.0, 1.0, 1.5, 2.0**53, 1e300, "0", "a", "\ud800", True, False]
OPERANDS = [*TAGS, None, 0.5, -1, 5, 2**70, -(2**70), float("inf"), -1e300, 10**400, "completed", "archived", "math"]
FIELDS = [
    "uid",
    "timestamp_id",
    "task_name",
    "status",
    "staleness",
    "priority",
    "oldest_model_step",
    "train_step",
    "status_before",
    "tags.a",
    "tags.b",
    "tags.none",
]
ORDERS = [None, "timestamp_id", "-timestamp_id", "staleness", "-staleness", "priority", "-priority"]


def draw_row(rng, payload):
    return make_row(
        payload,
        rng.choice(["math", "code", "\U0001f600"]),
        rng.choice([*STATUSES, Status.COMPLETED]),
        staleness=rng.randrange(5),
        step=rng.choice([None, 0, 1, 2, 3]),
        tags={name: rng.choice(TAGS) for name in ("a", "b") if rng.random() < 0.7},
        priority=rng.choice([0.0, 0.5, 1.0, 2.0**53, 1e300]),
    )


def draw_condition(rng):
    operators = {}
    for op in rng.sample(["$eq", "$ne", "$gt", "$gte", "$lt", "$lte", "$in", "$not_in"], rng.choice([1, 1, 2])):
        several = op in ("$in", "$not_in")
        operators[op] = rng.choices(OPERANDS, k=rng.randrange(4)) if several else rng.choice(OPERANDS)
    return operators if rng.random() < 0.8 else rng.choice(OPERANDS)


def draw_query(rng, depth=0):
    query = {rng.choice(FIELDS): draw_condition(rng) for _ in range(rng.choice([0, 1, 1, 2]))}
    if depth < 2 and rng.random() < 0.4:
        key = rng.choice(["$and", "$or"])
        query[key] = [draw_query(rng, depth + 1) for _ in range(rng.randrange(4))]
    if rng.random() < 0.15:
        query["status"] = {"$in": [*STATUSES, "archived"]}
    return query


@pytest.mark.parametrize("seed", range(NUM_STORES))
async def test_thousands_of_queries_match_the_same_rows_as_in_the_reference(seed):
    rng = random.Random(seed)
    reference, store = NaiveStorage(), IndexedStorage()
    rows = [draw_row(rng, i) for i in range(rng.choice([0, 1, 12, 25]))]
    consumed, train_step = rng.sample(range(25), 4), rng.randrange(7)
    for one in (reference, store):
        for row in rows:
            await one.put(row)
        await one.take(consumed, train_step=3)
        if seed % 3:
            await one.set_train_step("math", train_step)
    for _ in range(NUM_QUERIES):
        query, order, limit = draw_query(rng), rng.choice(ORDERS), rng.choice([None, 3])
        assert await store.get(query, order=order, limit=limit) == await reference.get(
            query, order=order, limit=limit
        ), query
        assert await store.count(query) == await reference.count(query)
    query = draw_query(rng)
    assert await store.take(range(-2, 30), query=query) == await reference.take(range(-2, 30), query=query)
    assert len(store) == len(reference)


def test_the_older_name_is_the_same_store():
    assert PandasStorage is IndexedStorage


async def test_lines_can_be_grouped_by_any_field():
    store = IndexedStorage()
    await store.put(make_row("a"))
    await store.put(make_row("b"))
    buffer = ReplayBuffer(FIFOReplayPolicy(), store)
    for frame in (store.frame, await buffer.to_pandas()):
        assert frame.groupby("uid").size().tolist() == [1, 1]
        assert frame.sort_values("uid").loc[1, "task_name"] == "math"


async def test_the_frame_shows_rows_tags_and_the_staleness_of_now():
    store = IndexedStorage()
    assert store.frame.empty
    await store.put(make_row("a", step=2, tags={"level": 3, "kind": "add"}))
    await store.put(make_row("b", "code", Status.ABORTED, staleness=1, tags={"level": True}))
    await store.set_train_step("math", 6)
    await store.take([1], train_step=7)
    frame = store.frame
    assert frame.index.tolist() == frame["uid"].tolist() == [0, 1]
    assert frame["staleness"].tolist() == [3, 1]
    assert frame["status"].tolist() == ["completed", "archived"]
    assert frame["train_step"].tolist() == [pd.NA, 7]
    assert frame["tags.level"].tolist() == [3, True]
    assert type(frame["tags.level"].iloc[1]) is bool
    assert frame["tags.kind"].isna().tolist() == [False, True]
    assert not {"item", "row"} & set(frame.columns)
    frame["staleness"] = 99
    assert await store.count({"staleness": 3}) == 1


async def test_the_frame_takes_any_name_and_text():
    store = IndexedStorage()
    await store.put(make_row(tags={"\ud800": "\udfff", "n": 1}))
    await store.put(make_row(tags={"\\ud800": "x"}))
    assert await store.count({"tags.\ud800": "\udfff"}) == 1
    assert await store.count({"tags.\\ud800": "x"}) == 1
    assert store.frame["tags.\ud800"].tolist() == ["\udfff", pd.NA]
    assert store.frame["tags.n"].dtype == "Int64"


async def test_a_tag_of_another_kind_widens_the_frame_and_loses_nothing():
    store = IndexedStorage()
    values = [1, "1", True, 1.0, 2**53 + 1]
    for value in values:
        await store.put(make_row(tags={"x": value}))
        assert await store.count({"tags.x": value}) >= 1
    assert [row.tags["x"] for row in await store.get({})] == values
    assert [type(row.tags["x"]) for row in await store.get({})] == [int, str, bool, float, int]
    assert uids(await store.get({"tags.x": 1})) == [0, 3]
    assert uids(await store.get({"tags.x": 2.0**53})) == []


@pytest.mark.parametrize("wrong", [{"tags": {"a": [1]}}, {"tags": {"a": 2**63}}, {"priority": float("nan")}])
async def test_what_no_column_holds_is_refused_and_changes_nothing(wrong):
    store = IndexedStorage()
    await store.put(make_row("kept"))
    with pytest.raises(ValueError, match=r"tag|priority"):
        await store.put(make_row("refused", **wrong))
    (row,) = await store.get({})
    for name, value in wrong.items():
        setattr(row, name, value)
    with pytest.raises(ValueError, match=r"tag|priority"):
        await store.update([row])
    state = store.state_dict()
    setattr(state["items"][0], *next(iter(wrong.items())))
    with pytest.raises(ValueError, match=r"tag|priority"):
        IndexedStorage().load_state_dict(state)


async def test_uids_that_are_no_uids_are_unknown():
    store = IndexedStorage()
    uid = await store.put(make_row())
    assert await store.take([]) == []
    assert await store.take([2**70, -1]) == []
    await store.delete([2**70])
    assert uids(await store.take([np.int64(uid)])) == [uid]


async def test_any_buffer_gives_a_frame_of_rows_or_of_rollouts():
    for store in (NaiveStorage, IndexedStorage):
        buffer = ReplayBuffer(FIFOReplayPolicy(), store())
        await buffer.put(make_group("a", 2, steps=[1, 2]), "math", current_train_step=5, tags={"level": 2})
        await buffer.put(make_group("b", 1, status=Status.ABORTED), "code")
        rows = await buffer.to_pandas()
        assert rows["staleness"].tolist() == [3, 0]
        assert rows["tags.level"].tolist()[0] == 2
        rollouts = await buffer.to_pandas({"task_name": "math"}, payloads=True)
        assert rollouts["uid"].tolist() == [0, 0]
        assert rollouts["member"].tolist() == [0, 1]
        assert rollouts["rollout_id"].tolist() == ["a/0", "a/1"]
        assert rollouts["response_ids"].iloc[0].tolist() == [10, 11]
        assert rollouts["rollout_status"].tolist() == ["completed"] * 2
        assert rollouts["task_name"].tolist() == ["math"] * 2
        assert rollouts["score"].tolist() == [1.0, 1.0]
        assert rollouts["tags"].tolist() == ['{"level": 2}'] * 2
        assert len(buffer) == 2


async def test_an_empty_buffer_gives_empty_frames():
    buffer = SyncReplayBufferConfig().build()
    assert (await buffer.to_pandas()).empty
    frame = await buffer.to_pandas(payloads=True)
    assert frame.empty
    assert {"uid", "staleness", "response_ids"} <= set(frame.columns)


def test_a_store_can_be_read_while_the_loop_runs_elsewhere():
    """The frame is built in the caller's thread, without awaiting anything."""
    store = IndexedStorage()
    asyncio.run(store.put(make_row()))
    assert len(store.frame) == 1
