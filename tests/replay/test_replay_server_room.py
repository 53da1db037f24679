"""Back-pressure: over the limit on live groups a put waits, in order, and holds up nobody."""

import asyncio

import pytest
from replay_factory import make_group, names

from forebay.aio import virtual_time
from forebay.aio.changed import BufferClosed
from forebay.aio.gate import Gate
from forebay.replay import FIFOReplayPolicy, IndexedStorage, RemoteReplayBuffer, ReplayBuffer, SQLStorage, serve
from forebay.replay.remote.calls import MAX_REMEMBERED, Limits, Outcomes, Room, Served
from forebay.replay.stores.errors import StoreBusy
from forebay.types import Status

COMPLETED = Status.COMPLETED


@pytest.fixture(params=["memory", "sqlite"])
async def served(request, tmp_path):
    storage = IndexedStorage() if request.param == "memory" else SQLStorage(tmp_path / "b.db")
    buffer = ReplayBuffer(FIFOReplayPolicy(), storage)
    yield buffer
    await buffer.close()


@pytest.fixture
async def clients(served, tmp_path):
    """Two clients of a server that holds two groups."""
    path = tmp_path / "socket"
    async with (
        serve(served, path, max_live=2),
        await RemoteReplayBuffer.connect(path) as one,
        await RemoteReplayBuffer.connect(path) as other,
    ):
        yield one, other


def put(client, name):
    return asyncio.create_task(client.put(make_group(name), "math"))


async def test_a_put_waits_for_room_and_nothing_else_does(clients, served):
    one, other = clients
    await put(one, "a")
    await put(one, "b")
    waiting = put(one, "c")
    # A round trip of the same client after it, and one of another.
    assert await one.count("math", COMPLETED) == await other.count("math", COMPLETED) == 2
    assert not waiting.done()
    assert names(await other.get(1, "math", COMPLETED)) == ["a"]
    await waiting
    assert names(await one.get(9, "math", COMPLETED)) == ["b", "c"]
    assert (len(one), len(served)) == (0, 0)


async def test_who_came_first_is_first_whichever_client(clients):
    one, other = clients
    waiting = []
    for number, client in enumerate([one, other] * 4):
        waiting.append(put(client, number))
        # Only so is there an order between two sockets.
        await client.count("math", COMPLETED)
    taken = []
    while len(taken) < 8:
        seen = one.version
        taken += names(await one.get(1, "math", COMPLETED)) or []
        if len(taken) < 8 and not await one.count("math", COMPLETED):
            await one.wait_for_change(seen)
    assert taken == list(range(8))
    await asyncio.gather(*waiting)


async def test_a_waiting_put_can_be_cancelled(clients, served):
    one, other = clients
    await put(one, "a")
    await put(one, "b")
    cancelled, next_ = put(one, "c"), put(other, "d")
    await one.count("math", COMPLETED)
    await other.count("math", COMPLETED)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await other.get(2, "math", COMPLETED)
    await next_
    assert names(await one.get(9, "math", COMPLETED)) == ["d"]


async def test_a_client_that_leaves_gives_up_its_waiting_puts(clients, served):
    one, other = clients
    await put(one, "a")
    await put(one, "b")
    left = put(one, "c")
    await one.count("math", COMPLETED)
    next_ = put(other, "d")
    await one.close()
    with pytest.raises(ConnectionError):
        await left
    await other.get(2, "math", COMPLETED)
    await next_
    assert names(await other.get(9, "math", COMPLETED)) == ["d"]


async def test_what_is_taken_here_makes_room_too(clients, served):
    one, _ = clients
    await put(one, "a")
    await put(one, "b")
    waiting = put(one, "c")
    await one.count("math", COMPLETED)
    await served.take_batch({"math": 1}, train_step=1)
    await waiting


async def test_what_is_put_here_takes_room_too(clients, served):
    one, other = clients
    for name in "ab":
        await served.put(make_group(name), "math")
    waiting = put(one, "c")
    assert await one.count("math", COMPLETED) == await other.count("math", COMPLETED) == 2
    assert not waiting.done()
    assert names(await served.get(1, "math", COMPLETED)) == ["a"]
    await waiting
    assert len(served) == 2


async def test_a_put_that_fails_leaves_its_room(clients, served, monkeypatch):
    one, _ = clients
    await put(one, "a")

    async def fail(*_, **__):
        raise OSError("disk")

    with monkeypatch.context() as patch:
        patch.setattr(served, "_store", fail)
        for _ in range(3):
            with pytest.raises(OSError, match="disk"):
                await put(one, "x")
    await put(one, "b")
    assert len(one) == 2


async def test_restored_groups_may_exceed_the_limit(clients):
    one, _ = clients
    await put(one, "a")
    await put(one, "b")
    await one.take_batch({"math": 2}, train_step=1)
    await put(one, "c")
    await one.restore(0)
    assert len(one) == 3
    waiting = put(one, "d")
    await one.get(1, "math", COMPLETED)
    assert not waiting.done()
    await one.get(1, "math", COMPLETED)
    await waiting


@pytest.mark.parametrize(("limit", "max_live", "reason"), [(None, 0, "greater than 0"), (5, 5, "leave one out")])
async def test_one_of_two_limits(tmp_path, limit, max_live, reason):
    buffer = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage(), limit=limit)
    with pytest.raises(ValueError, match=reason):
        async with serve(buffer, tmp_path / "socket", max_live=max_live):
            pass


async def test_the_gate_never_lets_in_more_than_there_is_room_for():
    """With admissions, departures and cancellations in any order that the tasks find."""
    buffer = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
    gate = Room(buffer, 3)
    inside = peak = 0

    async def enter(number):
        nonlocal inside, peak
        await gate.admit(1)
        inside += 1
        peak = max(peak, inside)
        for _ in range(number % 5):
            await asyncio.sleep(0)
        inside -= 1
        gate.leave(1)

    tasks = [asyncio.create_task(enter(number)) for number in range(60)]
    await asyncio.sleep(0)
    for task in tasks[::7]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (inside, peak) == (0, 3)


async def test_a_window_lets_in_what_fits_and_what_is_larger_alone():
    window = Gate(10)
    order = []

    async def enter(name, amount):
        await window.enter(amount)
        order.append(name)

    await enter("a", 6)
    tasks = [asyncio.create_task(enter(name, amount)) for name, amount in (("b", 25), ("c", 4), ("d", 4))]
    await asyncio.sleep(0)
    assert order == ["a"]
    window.leave(6)
    await tasks[0]
    tasks[1].cancel()
    await asyncio.sleep(0)
    window.leave(25)
    await tasks[2]
    assert order == ["a", "b", "d"]
    await enter("e", 6)
    window.leave(4)
    window.leave(6)
    assert window._used == 0


async def test_the_outcome_that_came_last_is_known_whenever_its_work_began():
    outcomes, go_on, stored = Outcomes(), asyncio.Event(), []

    async def slow():
        await go_on.wait()
        stored.append("slow")

    async def quick():
        pass

    first = asyncio.create_task(outcomes.once(b"slow", slow, MAX_REMEMBERED))
    await asyncio.sleep(0)
    for number in range(3):
        await outcomes.once(b"%d" % number, quick, MAX_REMEMBERED)
    go_on.set()
    await first
    # The connection was lost before the answer, and the client asks again.
    await outcomes.once(b"slow", slow, MAX_REMEMBERED)
    assert stored == ["slow"]


class FailingStorage(IndexedStorage):
    """As one on disk, which is counted by asking it, and whose next counts fail."""

    num_failing = 0

    async def count(self, query):
        if self.num_failing:
            self.num_failing -= 1
            raise StoreBusy("another process writes")
        return await super().count(query)

    def close(self):
        self.num_failing = 0


async def full_of_one():
    """A served buffer that has room for one group and holds it, and a put that waits for room."""
    storage = FailingStorage()
    served = Served(ReplayBuffer(FIFOReplayPolicy(), storage), instance=b"", limits=Limits(max_live=1))
    await served.open()
    await served.buffer.put(make_group("a"), "math")
    entering = asyncio.create_task(served.room.admit(1))
    await asyncio.sleep(1)
    return storage, served, entering


@pytest.mark.parametrize("num_failing", [1, 3])
def test_a_count_that_fails_keeps_no_put_waiting(num_failing):
    async def run():
        storage, served, entering = await full_of_one()
        storage.num_failing = num_failing
        await served.buffer.take_batch({"math": 1})
        await entering
        assert storage.num_failing == 0
        await served.close()

    virtual_time.run(run())


def test_closing_a_buffer_whose_store_fails_ends_the_waits_for_room():
    async def run():
        storage, served, entering = await full_of_one()
        storage.num_failing = 1000
        await served.buffer.take_batch({"math": 1})
        await asyncio.sleep(10)
        assert not entering.done()
        await served.buffer.close()
        with pytest.raises(BufferClosed):
            await entering
        await served.close()

    virtual_time.run(run())
