"""The lock that puts share and everything else has alone."""

import asyncio

from forebay.aio.gate import SharedLock


class Holder:
    """A task that holds the lock until it is let go."""

    def __init__(self, lock, name, log, *, alone):
        self.name, self.log, self.end = name, log, asyncio.Event()
        self.task = asyncio.create_task(self.hold(lock.alone() if alone else lock.shared()))

    async def hold(self, held):
        async with held:
            self.log.append(self.name)
            await self.end.wait()


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_sharers_share_and_who_waits_is_served_in_order():
    lock, log = SharedLock(), []
    holders = [Holder(lock, name, log, alone=name.isupper()) for name in "abCdeF"]
    await settle()
    assert log == ["a", "b"]
    for holder in holders[:2]:
        holder.end.set()
    await settle()
    assert log == ["a", "b", "C"]
    holders[2].end.set()
    await settle()
    assert log == ["a", "b", "C", "d", "e"]
    for holder in holders:
        holder.end.set()
    await asyncio.gather(*(holder.task for holder in holders))
    assert log[-1] == "F"


async def test_a_waiter_that_is_cancelled_blocks_nobody():
    lock, log = SharedLock(), []
    a, b, c, d = (Holder(lock, name, log, alone=name.isupper()) for name in "aBcD")
    await settle()
    b.task.cancel()
    await settle()
    assert log == ["a", "c"]
    a.end.set()
    c.end.set()
    await asyncio.sleep(0)
    # Granted or not yet: both ways the next one gets it.
    d.task.cancel()
    await settle()
    async with lock.alone():
        log.append("free")
    assert log[-1] == "free"
    assert b.task.cancelled()
    assert d.task.cancelled()


async def test_a_grant_in_the_moment_of_a_cancel_is_passed_on():
    lock, log = SharedLock(), []
    async with lock.alone():
        b, c = (Holder(lock, name, log, alone=True) for name in "BC")
        await settle()
    # It is B's now, but B has not run yet.
    b.task.cancel()
    await settle()
    assert log == ["C"]
    c.end.set()
    await c.task


async def test_errors_release_it():
    lock = SharedLock()
    for held in (lock.alone, lock.shared, lock.alone):
        try:
            async with held():
                raise KeyError
        except KeyError:
            pass
    async with lock.alone():
        pass
