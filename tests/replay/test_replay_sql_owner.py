"""Owners of one database: the older one is fenced off, and no group is given twice."""

import asyncio
import threading
from dataclasses import replace

import pytest
from replay_factory import make_group, make_row, names

from forebay.replay import ConnectionLost, FIFOReplayPolicy, RemoteReplayBuffer, ReplayBuffer, serve
from forebay.replay.remote.handover import PARKED, recover, take_over
from forebay.replay.remote.messages import TakeArguments
from forebay.replay.stores.errors import OwnerLost
from forebay.types import Status

COMPLETED = Status.COMPLETED


async def test_an_older_owner_changes_nothing_any_more(open_store):
    older, newer, other = open_store(), open_store(), open_store()
    await older.claim()
    await older.put(make_row("a"))
    await newer.claim()
    (row,) = await older.get({})
    changes = (
        lambda: older.put(make_row("b")),
        lambda: older.take_first(1, {}),
        lambda: older.delete([0]),
        lambda: older.update([row]),
        lambda: older.delete_where({}),
        lambda: older.set_train_step("math", 3),
        lambda: older.evict(0),
    )
    for change in changes:
        with pytest.raises(OwnerLost, match="another process owns the database"):
            await change()
    await newer.put(make_row("c"))
    # A producer that never claimed the database may go on.
    await other.put(make_row("d"))
    assert [row.item for row in await older.get({})] == ["a", "c", "d"]
    await older.claim()
    await older.put(make_row("e"))
    with pytest.raises(OwnerLost):
        await newer.put(make_row("f"))


async def test_a_take_that_an_owner_lost_in_the_middle_comes_back(open_store, monkeypatch):
    """It is cancelled after its commit, when another owner has come."""
    older, newer = open_store(), open_store()
    await older.claim()
    await older.put_many([make_row("a"), make_row("b")])
    decoding, go_on = threading.Event(), threading.Event()
    decode = older.codec.decode

    def wait_for_the_test(data):
        decoding.set()
        assert go_on.wait(timeout=300)
        return decode(data)

    monkeypatch.setattr(older.codec, "decode", wait_for_the_test)
    taking = asyncio.create_task(older.take_first(1, {}))
    await asyncio.to_thread(decoding.wait)
    # Nobody waits for the decoding.
    await newer.claim()
    assert len(newer) == 1
    taking.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert [row.item for row in await newer.get({})] == ["a", "b"]


async def test_of_two_servers_on_one_database_only_the_second_gives_groups(open_store, tmp_path):
    buffers = [ReplayBuffer(FIFOReplayPolicy(), open_store()) for _ in range(2)]
    for name in "abcd":
        await buffers[0].put(make_group(name), "math")
    async with serve(buffers[0], tmp_path / "one"), await RemoteReplayBuffer.connect(tmp_path / "one") as one:
        groups, _ = await one.take_batch({"math": 1}, train_step=1)
        assert names(groups["math"]) == ["a"]
        async with serve(buffers[1], tmp_path / "two"), await RemoteReplayBuffer.connect(tmp_path / "two") as two:
            with pytest.raises(OwnerLost, match="another process owns the database"):
                await one.take_batch({"math": 1}, train_step=1)
            with pytest.raises(OwnerLost, match="another process owns the database"):
                await one.put(make_group("e"), "math")
            groups, _ = await two.take_batch({"math": 9}, train_step=1)
            assert names(groups["math"]) == ["b", "c", "d"]


@pytest.mark.parametrize("train_step", [None, 4])
async def test_what_a_later_server_recovered_is_not_kept(open_store, train_step):
    """Half a hand-over is no hand-over: its groups are live again, and the client is told."""
    buffer = ReplayBuffer(FIFOReplayPolicy(), open_store())
    for name in "abc":
        await buffer.put(make_group(name), "math")
    handover = await take_over(buffer, TakeArguments(b"", {"math": 2}, COMPLETED, train_step), max_bytes=1 << 20)
    rival = ReplayBuffer(FIFOReplayPolicy(), open_store())
    (row, _) = await rival.storage.get(PARKED, rows_only=True)
    await rival.storage.delete([row.uid])
    assert not await handover.keep(b"k" * 16)
    assert names(await rival.get(9, "math", COMPLETED)) == ["b", "c"]


@pytest.mark.parametrize("train_step", [0, None, PARKED["train_step"]])
async def test_what_a_server_left_parked_is_recovered(open_store, train_step):
    """Also one of version 0.2.0, whose groups were of step 0 for a moment, and then of none."""
    buffer = ReplayBuffer(FIFOReplayPolicy(), open_store())
    for name in "ab":
        await buffer.put(make_group(name), "math")
    await take_over(buffer, TakeArguments(b"", {"math": 1}, COMPLETED), max_bytes=1 << 20)
    (row,) = await buffer.storage.get(PARKED)
    await buffer.storage.update([replace(row, train_step=train_step)])
    if train_step != 0:
        # A way back to a checkpoint, and a later one, pass over it.
        await buffer.restore(0)
        await buffer.commit(99)
    assert names(await buffer.get(9, "math", COMPLETED)) == ["b"]
    assert await recover(buffer) == 1
    assert names(await buffer.get(9, "math", COMPLETED)) == ["a"]


async def test_a_batch_that_is_given_back_leaves_alone_what_is_live_again(open_store):
    """The trainer has gone back to a checkpoint before the batch failed."""
    buffer, rival = (ReplayBuffer(FIFOReplayPolicy(), open_store()) for _ in range(2))
    for name in "ab":
        await buffer.put(make_group(name), "math")
    policy_get = buffer.policy.get

    async def fail(*args):
        await policy_get(*args)
        await rival.restore(0)
        assert names(await rival.get(1, "math", COMPLETED)) == ["a"]
        raise ConnectionLost("in the middle")

    buffer.policy.get = fail
    with pytest.raises(ConnectionLost):
        await buffer.take_batch({"math": 2}, train_step=1)
    assert names(await rival.get(9, "math", COMPLETED)) == ["b"]
