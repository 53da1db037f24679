"""Calls whose connection broke, or whose server was started anew, are made again: nothing lost or doubled."""

import asyncio
import time

import pytest
import sqlalchemy as sa
from replay_factory import make_group, make_row, names

from forebay.io.address import Address
from forebay.replay import (
    ConnectionLost,
    FIFOReplayPolicy,
    IndexedStorage,
    RemoteReplayBuffer,
    ReplayBuffer,
    SQLStorage,
    serve,
)
from forebay.replay.remote import calls
from forebay.replay.remote.calls import Served
from forebay.replay.remote.connection import ClientConnection
from forebay.replay.remote.handover import Handover, take_over
from forebay.replay.remote.link import BufferLink
from forebay.replay.remote.messages import TakeArguments
from forebay.replay.stores.errors import OwnerLost, StoreBusy
from forebay.replay.stores.sql import writes
from forebay.replay.stores.sql.schema import receipts
from forebay.types import Status

COMPLETED, EXPIRED, ARCHIVED = Status.COMPLETED, Status.EXPIRED, Status.ARCHIVED


@pytest.fixture
def path(tmp_path):
    return tmp_path / "socket"


@pytest.fixture(params=["memory", "sqlite"])
async def buffer(request, tmp_path):
    storage = IndexedStorage() if request.param == "memory" else SQLStorage(tmp_path / "b.db")
    buffer = ReplayBuffer(FIFOReplayPolicy(), storage)
    yield buffer
    await buffer.close()


async def live_names(buffer):
    rows = await buffer.storage.get({})
    return sorted(row.item[0].group_id for row in rows)


def break_once(monkeypatch, method, when):
    """The connection ends at the first call of that method for which `when` says so, before it is done."""
    original = getattr(ClientConnection, method)
    broken = []

    def run(self, *args):
        if not broken and when(*args):
            broken.append(self)
            self.channel.end()
            raise BrokenPipeError("broken by the test")
        return original(self, *args)

    monkeypatch.setattr(ClientConnection, method, run)
    return broken


TAKES = {
    "get": lambda client: client.get(2, "math", COMPLETED),
    "take": lambda client: client.take_batch({"math": 2}),
    "take for a step": lambda client: client.take_batch({"math": 2}, train_step=4),
}


@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES)
@pytest.mark.parametrize("moment", ["taken", "sent", "to be kept", "kept"])
async def test_a_take_at_whose_every_moment_the_connection_breaks(buffer, path, monkeypatch, take, moment):
    await buffer.put_groups([make_group(name, num_tokens=9) for name in "abcd"], "math")
    method, when = {
        "taken": ("_send_groups", lambda *_: True),
        "sent": ("_reply", lambda value: isinstance(value, dict)),
        "to be kept": ("_keep", lambda *_: True),
        # The answer to `keep` is the first one after a batch that is not a batch.
        "kept": ("_reply", lambda value: value is None),
    }[moment]
    async with serve(buffer, path), await RemoteReplayBuffer.connect(path) as client:
        broken = break_once(monkeypatch, method, when)
        result = await take(client)
        assert broken
        groups = result if isinstance(result, list) else result[0]["math"]
        taken = names(groups)
        assert len(taken) == 2
        if moment == "kept":
            assert taken == ["a", "b"]
        # What the lost connection had is live again when the server has found out.
        seen = buffer.version
        while len(await live_names(buffer)) != 2:
            seen = await buffer.wait_for_change(seen)
        assert sorted([*taken, *await live_names(buffer)]) == ["a", "b", "c", "d"]
        await buffer.restore(3)
        assert len(await live_names(buffer)) == (4 if take is TAKES["take for a step"] else 2)


async def test_what_comes_too_late_on_a_lost_connection_is_refused(buffer, path):
    await buffer.put(make_group("a"), "math")
    async with serve(buffer, path) as server:
        served = server._served
        handover = await take_over(buffer, TakeArguments(b"", {"math": 1}, COMPLETED), max_bytes=1 << 20)
        with pytest.raises(ConnectionLost, match="in the buffer again"):
            await served.keep(b"key", None)
        with pytest.raises(ConnectionLost, match="in the buffer again"):
            await served.keep(b"key", handover)
        await served.release(b"key", handover)
        assert await live_names(buffer) == ["a"]
        # Asked twice at the same time, it is done once.
        handover = await take_over(buffer, TakeArguments(b"", {"math": 1}, COMPLETED), max_bytes=1 << 20)
        await asyncio.gather(served.keep(b"other", handover), served.keep(b"other", None))
        assert await live_names(buffer) == []


@pytest.mark.parametrize("train_step", [None, 3])
async def test_what_is_given_back_while_it_is_being_confirmed_is_live_again(buffer, path, train_step):
    await buffer.put(make_group("a"), "math")
    async with serve(buffer, path) as server:
        served = server._served
        handover = await served.take(TakeArguments(b"key", {"math": 1}, COMPLETED, train_step))
        # As of a client that was cancelled and does not wait: the second comes before the first is done.
        await asyncio.gather(served.keep(b"key", handover), served.release(b"key", handover))
        assert await live_names(buffer) == ["a"]
        assert served.room.num_live == 1


def fail_next(monkeypatch, storage, methods, number, error=StoreBusy):
    """The next calls of these methods fail before anything is changed, so many in all; those made."""
    failed = []

    def failing(method):
        original = getattr(storage, method)

        async def run(*args, **keywords):
            if len(failed) < number:
                failed.append(method)
                raise error("another process writes")
            return await original(*args, **keywords)

        return run

    for method in methods:
        monkeypatch.setattr(storage, method, failing(method))
    return failed


@pytest.mark.parametrize("number", [1, 2, 4])
async def test_what_a_store_that_fails_does_not_take_back_it_takes_back_later(buffer, path, monkeypatch, number):
    monkeypatch.setattr(calls, "AGAIN_S", 0.01)
    await buffer.put_groups([make_group(name) for name in "abc"], "math")
    async with serve(buffer, path) as server:
        link = await BufferLink.open(Address.parse(path), None)
        for key in (b"1", b"2"):
            await link.ask("take_batch", TakeArguments(key, {"math": 1}, COMPLETED))
        failed = fail_next(monkeypatch, buffer.storage, ["update_if"], number)
        seen = buffer.version
        await link.close()
        while len(await live_names(buffer)) != 3:
            seen = await buffer.wait_for_change(seen)
        assert len(failed) == number
        # A change is in the store before it is counted, and counted before its share of the lock ends.
        async with server._served.room._lock.alone():
            assert server._served.room.num_live == 3


async def test_groups_that_a_later_owner_has_are_not_given_back(buffer, path, monkeypatch):
    monkeypatch.setattr(calls, "AGAIN_S", 0.0)
    await buffer.put(make_group("a"), "math")
    async with serve(buffer, path) as server:
        served = server._served
        handover = await served.take(TakeArguments(b"key", {"math": 1}, COMPLETED))
        failed = fail_next(monkeypatch, buffer.storage, ["update_if"], 9, OwnerLost)
        await served.release(b"key", handover)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(failed) == 1


@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES)
async def test_what_a_store_that_fails_does_not_hand_over_is_live_again(buffer, path, monkeypatch, take):
    await buffer.put_groups([make_group(name) for name in "abc"], "math")
    async with serve(buffer, path), await RemoteReplayBuffer.connect(path) as client:
        failed = fail_next(monkeypatch, Handover, ["keep"], 1)
        with pytest.raises(StoreBusy):
            await take(client)
        assert failed == ["keep"]
        assert await live_names(buffer) == ["a", "b", "c"]
        result = await take(client)
        assert names(result if isinstance(result, list) else result[0]["math"]) == ["a", "b"]


@pytest.mark.parametrize("train_step", [None, 4])
async def test_what_was_being_confirmed_when_the_connection_broke_is_taken_once(buffer, path, monkeypatch, train_step):
    """The confirmation comes to its end, and the client learns of it on its next connection."""
    await buffer.put_groups([make_group(name) for name in "ab"], "math")
    keep = Handover.keep

    async def keep_when_the_connection_is_gone(handover, key):
        for connection in list(server._connections):
            connection.channel.end()
        # Enough for the server to find out, and to give back what was not confirmed.
        for _ in range(20):
            await asyncio.sleep(0)
        return await keep(handover, key)

    monkeypatch.setattr(Handover, "keep", keep_when_the_connection_is_gone)
    async with serve(buffer, path) as server, await RemoteReplayBuffer.connect(path) as client:
        taken, _ = await client.take_batch({"math": 2}, train_step=train_step)
        assert names(taken["math"]) == ["a", "b"]
        assert await live_names(buffer) == []


class Answerless(ClientConnection):
    """A server that stores what it is given and dies before it says so."""

    async def _put(self, arguments, buffers):
        await super()._put(arguments, buffers)
        self.channel.end()
        raise BrokenPipeError("killed by the test")


class Deaf(ClientConnection):
    """A server that dies before it has stored anything."""

    async def _put(self, arguments, buffers):
        self.channel.end()
        raise BrokenPipeError("killed by the test")


@pytest.mark.parametrize("kind", [Answerless, Deaf])
async def test_a_put_goes_on_with_a_server_that_was_started_anew(tmp_path, path, kind):
    storage = SQLStorage(tmp_path / "b.db")
    buffer = ReplayBuffer(FIFOReplayPolicy(), storage)
    async with serve(buffer, path) as first, await RemoteReplayBuffer.connect(path) as client:
        for connection in first._connections:
            connection.__class__ = kind
        first._path.unlink()
        async with serve(ReplayBuffer(FIFOReplayPolicy(), storage), path, max_live=3):
            groups = [make_group(name, steps=[step]) for name, step in (("old", 0), ("new", 4))]
            # There would be no room for them a second time.
            await client.put_groups(groups, "math", current_train_step=5, stale_threshold=2)
            assert [group[0].status for group in groups] == [EXPIRED, COMPLETED]
            assert [group[0].seq_staleness for group in groups] == [4, 0]
            assert await live_names(buffer) == ["new", "old"]
            await client.put(make_group("next"), "math")
            assert len(client) == 3
    storage.close()


async def test_a_keep_that_a_killed_server_has_done_is_known_to_the_next(tmp_path, path, monkeypatch):
    storage = SQLStorage(tmp_path / "b.db")
    buffer = ReplayBuffer(FIFOReplayPolicy(), storage)
    await buffer.put_groups([make_group(name) for name in "abc"], "math")
    async with serve(buffer, path) as first, await RemoteReplayBuffer.connect(path) as client:
        break_once(monkeypatch, "_reply", lambda value: value is None)
        first._path.unlink()
        async with serve(ReplayBuffer(FIFOReplayPolicy(), storage), path):
            assert names(await client.get(2, "math", COMPLETED)) == ["a", "b"]
            assert await live_names(buffer) == ["c"]
    storage.close()


async def test_what_does_the_same_twice_is_done_again(buffer, path):
    await buffer.put_groups([make_group(name, steps=[0]) for name in "abc"], "math")
    async with serve(buffer, path) as server, await RemoteReplayBuffer.connect(path) as client:
        await client.take_batch({"math": 2}, train_step=2)
        for call, result in (
            (client.commit(1), None),
            (client.restore(1), None),
            (client.refresh_staleness({"math": 9}, 3), {"math": 0}),
            (client.update_priorities({0: 2.0}), 1),
            (client.count("math", Status.COMPLETED), 3),
        ):
            for connection in list(server._connections):
                connection.channel.end()
            assert await call == result


async def test_receipts_are_kept_with_what_they_are_of(open_store):
    store = open_store()
    assert store.keeps_receipts
    assert not await store.has_receipt(b"1" * 16)
    await store.put_many([make_row("a"), make_row("b")], receipt=b"1" * 16)
    with pytest.raises(ValueError, match="no JSON"):
        await store.put_many([make_row(object())], receipt=b"2" * 16)
    assert await store.delete_where({"uid": 0}, receipt=b"3" * 16) == 1
    [row] = await store.get({})
    await store.update_if([row], {}, receipt=b"4" * 16)
    await store.put_many([], receipt=b"5" * 16)
    # Another process asks.
    other = open_store()
    found = [await other.has_receipt(str(number).encode() * 16) for number in range(1, 6)]
    assert found == [True, False, True, True, True]
    with pytest.raises(NotImplementedError, match="keeps no receipts"):
        await IndexedStorage().has_receipt(b"1")


async def test_old_receipts_are_forgotten(open_store, monkeypatch):
    store = open_store()
    await store.put_many([], receipt=b"old")
    later = time.time() + writes.RECEIPT_S + 10
    monkeypatch.setattr(writes.time, "time", lambda: later)
    await store.put_many([], receipt=b"new")
    assert await store.has_receipt(b"old")
    await store.put_many([], receipt=b"last\0")
    assert [await store.has_receipt(key) for key in (b"old", b"new", b"last\0")] == [False, True, True]
    with store._reading() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(receipts)) == 2


@pytest.mark.parametrize("moment", ["connecting", "asking", "before the server knows"])
@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES)
async def test_a_take_cancelled_while_it_is_confirmed_again_loses_nothing(buffer, path, monkeypatch, take, moment):
    await buffer.put_groups([make_group(name) for name in "abc"], "math")
    reached, go_on = asyncio.Event(), asyncio.Event()
    keep, connect = Served.keep, RemoteReplayBuffer._open_again

    async def keep_slowly(served, key, handover):
        await keep(served, key, handover)
        # The second time it is the client's next connection.
        if handover is None:
            reached.set()
            await go_on.wait()

    async def connect_slowly(client):
        if moment == "connecting":
            reached.set()
            await asyncio.sleep(0.05)
        return await connect(client)

    monkeypatch.setattr(Served, "keep", keep_slowly)
    monkeypatch.setattr(RemoteReplayBuffer, "_open_again", connect_slowly)
    async with serve(buffer, path) as server, await RemoteReplayBuffer.connect(path) as client:
        broken = break_once(monkeypatch, "_reply", lambda value: value is None)
        if moment == "before the server knows":
            release = Served.release

            async def release_late(served, key, handover, *, unless_kept=False):
                if unless_kept:
                    await go_on.wait()
                await release(served, key, handover, unless_kept=unless_kept)

            monkeypatch.setattr(Served, "release", release_late)
        taking = asyncio.create_task(take(client))
        await reached.wait()
        assert broken
        taking.cancel()
        asyncio.get_running_loop().call_later(0.1, go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await taking
        seen = buffer.version
        while len(await live_names(buffer)) != 3:
            seen = await buffer.wait_for_change(seen)
        go_on.set()
        await client.count("math", COMPLETED)
        while server.num_clients != 1:
            await asyncio.sleep(0)
        assert await live_names(buffer) == ["a", "b", "c"]
        assert server._served.takes == {}
