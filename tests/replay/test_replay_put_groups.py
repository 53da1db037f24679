"""Many groups in one call: as if put one after the other, and all of them or none."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_factory import make_group, make_row, make_state, names, same

from forebay.replay import (
    FIFOReplayPolicy,
    IndexedStorage,
    RemoteReplayBuffer,
    ReplayBuffer,
    SQLStorage,
    StalenessReplayPolicy,
    StorageIndices,
    serve,
)
from forebay.replay.arrival import LABEL_AT_ONCE
from forebay.types import Status

COMPLETED, ABORTED, EXPIRED = Status.COMPLETED, Status.ABORTED, Status.EXPIRED


async def content(buffer):
    """Everything a buffer holds, in order, as it can be compared."""
    fields = ("task_name", "status", "staleness", "tags", "priority", "oldest_model_step")
    rows = await buffer.storage.get({})
    return [([getattr(row, name) for name in fields], list(row.item)) for row in rows]


def make_groups(specs):
    return [
        [make_state(str(number), member, status=status, steps=[step] if step >= 0 else []) for member in range(2)]
        if status
        else []
        for number, (status, step) in enumerate(specs)
    ]


STATUSES = st.sampled_from([COMPLETED, ABORTED, Status.FAILED, None])
SMALL = st.none() | st.integers(1, 4)


@given(st.lists(st.tuples(STATUSES, st.integers(-1, 5)), max_size=6), st.none() | st.integers(3, 7), SMALL, SMALL)
def test_is_the_same_as_one_put_after_the_other(specs, step, threshold, limit):
    async def run():
        options = {"model_step": 2, "current_train_step": step, "stale_threshold": threshold}
        evicted = [], []
        one, other = (
            ReplayBuffer(StalenessReplayPolicy(), IndexedStorage(), limit=limit, on_evict=gone.append)
            for gone in evicted
        )
        for group in make_groups(specs):
            await one.put(group, "math", priority=3.0, tags={"x": 1}, **options)
        await other.put_groups(make_groups(specs), "math", priority=3.0, tags={"x": 1}, **options)
        assert same(await content(one), await content(other))
        assert [row.uid for row in evicted[0]] == [row.uid for row in evicted[1]]
        assert one.num_evicted == other.num_evicted

    asyncio.run(run())


async def test_a_group_that_is_refused_keeps_the_others_out(buffer):
    for wrong in (
        {"groups": [make_group("a"), [make_state("b", response_mask=[1])]]},
        {"groups": [make_group("a")], "stale_threshold": 0},
        {"groups": [make_group("a")], "priority": -1},
    ):
        with pytest.raises(ValueError, match=r"response_mask|threshold|priority"):
            await buffer.put_groups(wrong.pop("groups"), "math", **wrong)
    await buffer.put_groups([], "math")
    await buffer.put_groups([[]], "math")
    assert (len(buffer), buffer.version) == (0, 0)


async def test_a_policy_with_a_put_of_its_own_sees_every_group(make_store):
    class Notes(FIFOReplayPolicy):
        async def put(self, item, storage_backend):
            seen.append(item.item[0].group_id)
            await super().put(item, storage_backend)

    seen = []
    buffer = ReplayBuffer(Notes(), make_store())
    await buffer.put_groups([make_group("a"), make_group("b")], "math")
    assert (seen, len(buffer)) == (["a", "b"], 2)


@pytest.mark.parametrize("place", ["first", "last"])
async def test_a_policy_with_a_put_of_its_own_that_fails_stores_nothing(make_store, place):
    class Fails(FIFOReplayPolicy):
        async def put(self, item, storage_backend):
            if item.item[0].group_id == "wrong":
                raise OSError("no")
            # Such a policy may also make room.
            await storage_backend.take([row.uid for row in await storage_backend.get({"tags.old": True})])
            await super().put(item, storage_backend)

    buffer = ReplayBuffer(Fails(), make_store())
    await buffer.put(make_group("there"), "math", tags={"old": True}, priority=2.5)
    groups = [make_group(name) for name in ("a", "b")]
    groups.insert(0 if place == "first" else 2, make_group("wrong"))
    with pytest.raises(OSError, match="no"):
        await buffer.put_groups(groups, "math")
    [row] = await buffer.storage.get({})
    assert (row.item[0].group_id, row.tags, row.priority) == ("there", {"old": True}, 2.5)
    await buffer.put_groups(groups[1:] if place == "first" else groups[:2], "math")
    assert len(buffer) == 2


async def test_many_groups_are_labeled_without_keeping_others_waiting():
    groups = [make_group(str(number), size=1, num_tokens=1) for number in range(2000)]
    labeled, seen = 0, [0]
    done = asyncio.Event()

    async def watch():
        nonlocal labeled
        while not done.is_set():
            while labeled < len(groups) and len(groups[labeled][0].response_model_steps):
                labeled += 1
            seen.append(labeled)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    buffer = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
    await buffer.put_groups(iter(groups), "math", model_step=7)
    done.set()
    await watching
    assert seen[-1] == len(buffer) == 2000
    assert max(after - before for before, after in pairwise(seen)) <= LABEL_AT_ONCE


async def test_stores_put_many_rows_in_order(store):
    first = await store.put(make_row("a"))
    rest = await store.put_many([make_row("b", tags={"x": 1}), make_row("c", "code")])
    assert [row.item for row in await store.get({})] == ["a", "b", "c"]
    assert [row.uid for row in await store.get({})] == [first, *rest]
    assert await store.put_many([]) == []


async def test_a_database_takes_all_or_none_in_one_commit(open_store):
    store = open_store()
    writes = 0
    begin = store._transactions.writing

    def count_writes(*args, **keywords):
        nonlocal writes
        writes += 1
        return begin(*args, **keywords)

    store._transactions.writing = count_writes
    uids = await store.put_many([make_row(str(number)) for number in range(200)])
    assert (len(uids), len(store), writes) == (200, 200, 1)
    with pytest.raises(ValueError, match="no JSON value"):
        await store.put_many([make_row("fine"), make_row(object())])
    # Others that wait at the same time are not concerned.
    results = await asyncio.gather(
        store.put_many([make_row("x"), make_row(object())]),
        store.put_many([make_row("y"), make_row("z")]),
        return_exceptions=True,
    )
    assert isinstance(results[0], ValueError)
    assert [row.item for row in await store.get({"uid": {"$in": results[1]}})] == ["y", "z"]
    assert len(store) == 202


@pytest.fixture(params=["memory", "sqlite"])
async def served(request, tmp_path):
    storage = IndexedStorage() if request.param == "memory" else SQLStorage(tmp_path / "buffer.db")
    buffer = ReplayBuffer(StalenessReplayPolicy(), storage)
    yield buffer
    await buffer.close()


@pytest.fixture
async def client(served, tmp_path):
    async with (
        serve(served, tmp_path / "socket") as server,
        await RemoteReplayBuffer.connect(server.address) as client,
    ):
        client.server = server
        yield client


async def test_through_a_server(served, client):
    groups = [make_group(str(number), steps=[number] * 50) for number in range(30)]
    await client.put_groups(groups, "math", current_train_step=31, stale_threshold=20, tags={"x": 1})
    assert [group[0].status for group in groups] == [EXPIRED] * 11 + [COMPLETED] * 19
    assert groups[12][0].seq_staleness == 18
    assert len(client) == len(served) == 30
    assert await served.storage.count({"tags.x": 1}) == 30
    assert not next(iter(client.server._connections))._put_bytes
    taken, _ = await client.take_batch({"math": 19})
    assert names(taken["math"]) == [str(number) for number in range(11, 30)]
    assert all(same(taken["math"][n], groups[11 + n]) for n in range(19))


async def test_of_a_put_with_a_value_that_cannot_be_sent_nothing_is_stored(served, client):
    groups = [make_group(str(number), steps=[1]) for number in range(5)]
    groups[3][0].extra_fields["x"] = object()
    with pytest.raises(ValueError, match="extra_fields"):
        await client.put_groups(groups, "math")
    assert await client.count("math", COMPLETED) == 0
    assert client.server._served.put_bytes == 0
    # The connection is as good as before.
    await client.put_groups(groups[:3], "math")
    assert (len(client), client._link._puts._used) == (3, 0)


async def test_more_than_a_call_may_have_is_refused(served, tmp_path):
    async with (
        serve(served, tmp_path / "socket", max_frame_bytes=20_000) as server,
        await RemoteReplayBuffer.connect(server.address) as client,
    ):
        with pytest.raises(ValueError, match="max_frame_bytes"):
            await client.put_groups([make_group(str(n), num_tokens=500) for n in range(9)], "math")
        await client.put_groups([make_group(str(n), num_tokens=500) for n in range(2)], "math")
        assert await client.count("math", COMPLETED) == 2


async def test_a_connection_that_breaks_while_groups_come(served, client):
    """The client sends all of them again, and they are stored once."""
    came = asyncio.Event()
    connection = next(iter(client.server._connections))
    reserve = connection.reserve

    def note(*args):
        came.set()
        return reserve(*args)

    connection.reserve = note
    # The server waits for this message with the rule from before.
    await client.count("math", COMPLETED)
    groups = [make_group(str(number), steps=[1]) for number in range(8)]
    putting = asyncio.create_task(client.put_groups(groups, "math"))
    await came.wait()
    connection.channel.end()
    await putting
    assert names(await client.get(20, "math", COMPLETED)) == [str(number) for number in range(8)]


async def test_room_is_for_all_of_them(served, tmp_path):
    async with (
        serve(served, tmp_path / "socket", max_live=4) as server,
        await RemoteReplayBuffer.connect(server.address) as client,
        await RemoteReplayBuffer.connect(server.address) as other,
    ):
        with pytest.raises(ValueError, match="never fit"):
            await client.put_groups([make_group(name) for name in "abcde"], "math")
        await client.put_groups([make_group(name) for name in "ab"], "math")
        putting = asyncio.create_task(client.put_groups([make_group(name) for name in "cde"], "math"))
        assert names(await other.get(1, "math", COMPLETED)) == ["a"]
        await putting
        assert await other.count("math", COMPLETED) == 4
        waiting = asyncio.create_task(client.put_groups([make_group(name) for name in "xy"], "math"))
        await other.count("math", COMPLETED)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert await other.count("math", COMPLETED) == 4


@pytest.mark.parametrize("others", [0, 3])
async def test_large_puts_share_the_window(served, client, others):
    """A put that is larger than the window waits for the others and then goes alone."""
    window = client._link._puts
    window._size = 3000
    await asyncio.gather(
        *(
            client.put_groups([make_group(f"{number}/{n}", num_tokens=100) for n in range(6)], "math")
            for number in range(others + 1)
        )
    )
    rows = await served.storage.get(StorageIndices("math", COMPLETED).get_key())
    assert sorted(row.item[0].group_id for row in rows) == sorted(
        f"{number}/{n}" for number in range(others + 1) for n in range(6)
    )
    assert window._used == 0
