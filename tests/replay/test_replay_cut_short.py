"""Calls that are cancelled when the store has begun them: no change is missed, nothing is left half done."""

import asyncio
import threading

import pytest
from replay_factory import make_group, names

from forebay.aio.tasks import run_to_the_end
from forebay.io.address import Address
from forebay.replay import FIFOReplayPolicy, IndexedStorage, RemoteReplayBuffer, ReplayBuffer, SQLStorage, serve
from forebay.replay.remote import messages
from forebay.replay.remote.link import BufferLink
from forebay.replay.stores.sql import rows as sql_rows
from forebay.types import Status

COMPLETED, ARCHIVED = Status.COMPLETED, Status.ARCHIVED


@pytest.fixture
async def buffer(tmp_path):
    made = ReplayBuffer(FIFOReplayPolicy(), SQLStorage(tmp_path / "b.db"))
    yield made
    await made.close()


def held_commits(storage, monkeypatch):
    """The store's transactions wait in its thread until the test lets them go."""
    begun, go_on = threading.Event(), threading.Event()
    writing = storage._writing

    def wait_for_the_test():
        begun.set()
        assert go_on.wait(timeout=300)
        return writing()

    monkeypatch.setattr(storage, "_writing", wait_for_the_test)
    monkeypatch.setattr(storage._transactions, "writing", wait_for_the_test)
    return begun, go_on


@pytest.mark.parametrize("method", ["put", "restore", "commit", "refresh"])
async def test_a_change_whose_caller_was_cancelled_wakes_who_waits(buffer, monkeypatch, method):
    for name in "ab":
        await buffer.put(make_group(name, steps=[0]), "math", current_train_step=1)
    await buffer.take_batch({"math": 1}, train_step=1)
    call = {
        "put": lambda: buffer.put(make_group("c"), "math"),
        "restore": lambda: buffer.restore(0),
        "commit": lambda: buffer.commit(1),
        # The train step is known already, so the first thing that is written are the groups.
        "refresh": lambda: buffer.refresh_staleness({"math": 1}, 2),
    }[method]
    if method == "refresh":
        await buffer.storage.set_train_step("math", 2)
    waiting = asyncio.create_task(buffer.wait_for_change(buffer.version))
    begun, go_on = held_commits(buffer.storage, monkeypatch)
    calling = asyncio.create_task(call())
    await asyncio.to_thread(begun.wait)
    calling.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await calling
    await waiting
    found = await buffer.count_statuses(["math"], [COMPLETED, ARCHIVED, Status.EXPIRED])
    live, archived, expired = found["math"].values()
    assert (live, archived, expired) == {
        "put": (2, 1, 0),
        "restore": (2, 0, 0),
        "commit": (1, 0, 0),
        "refresh": (0, 1, 1),
    }[method]


async def test_evicted_groups_of_which_nobody_was_told_are_back(buffer, monkeypatch):
    for name in "abc":
        await buffer.put(make_group(name), "math")
    decoding, go_on = threading.Event(), threading.Event()
    decode = sql_rows.Removed.decode

    def wait_for_the_test(evicted, codec):
        decoding.set()
        assert go_on.wait(timeout=300)
        decode(evicted, codec)

    monkeypatch.setattr(sql_rows.Removed, "decode", wait_for_the_test)
    evicting = asyncio.create_task(buffer.storage.evict(1))
    await asyncio.to_thread(decoding.wait)
    evicting.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await evicting
    assert buffer.num_evicted == {}
    assert names(await buffer.get(9, "math", COMPLETED)) == ["a", "b", "c"]


async def test_a_thread_is_waited_for_however_often_the_caller_is_cancelled():
    begun, go_on, done = threading.Event(), threading.Event(), []

    def work():
        begun.set()
        assert go_on.wait(timeout=300)
        done.append(True)

    running = asyncio.create_task(run_to_the_end(work))
    await asyncio.to_thread(begun.wait)
    for _ in range(3):
        running.cancel()
        await asyncio.sleep(0)
    assert not running.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert done


async def test_a_confirmation_that_comes_after_a_resume_removes_nothing_of_the_snapshot(tmp_path):
    buffer = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
    await buffer.put(make_group("a"), "math")
    await buffer.save(tmp_path / "snapshot")
    async with serve(buffer, tmp_path / "socket") as server:
        link = await BufferLink.open(Address.parse(server.address), None)
        await link.ask("take_batch", messages.TakeArguments(b"key", {"math": 1}, COMPLETED, None))
        async with await RemoteReplayBuffer.connect(server.address) as other:
            await other.resume(tmp_path / "snapshot")
            with pytest.raises(messages.ConnectionLost, match="in the buffer again"):
                await link.ask("keep", {"key": b"key"})
            assert names(await other.get(9, "math", COMPLETED)) == ["a"]
        await link.close()


async def test_a_group_that_was_put_as_archived_is_no_obstacle_for_a_server(tmp_path):
    buffer = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
    await buffer.put(make_group("a", status=ARCHIVED), "math")
    path = tmp_path / "socket"
    async with serve(buffer, path), await RemoteReplayBuffer.connect(path) as client:
        assert await client.count("math", ARCHIVED) == 1
