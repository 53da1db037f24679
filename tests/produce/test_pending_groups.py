"""Groups in flight: each is stored once, by its own task, whatever interrupts it."""

import asyncio

import pytest

from forebay.aio import virtual_time
from forebay.produce.strategies.pending import (
    CANCEL_REPEAT_S,
    GIVE_UP_AFTER_S,
    Ended,
    PendingGroups,
    ProductionError,
    Work,
)
from forebay.replay import ConnectionLost
from forebay.types import RolloutState, Status


def make_group(index):
    return [RolloutState([], group_id=index, rollout_id=f"{index}/{j}") for j in range(2)]


class Bench:
    """Takes groups 0, 1, 2, ... each of which is generated for as long as `seconds` says."""

    def __init__(self, seconds=lambda index: 1.0, store_s=0.0, take_s=0.0):
        self.seconds, self.store_s, self.take_s = seconds, store_s, take_s
        self.pending = PendingGroups()
        self.num_taken = 0
        self.stored = []
        self.stopped = False

    async def take(self):
        self.num_taken += 1
        group = make_group(self.num_taken - 1)
        await asyncio.sleep(self.take_s)
        return group

    async def generate(self, group):
        await asyncio.sleep(self.seconds(group[0].group_id))
        return group

    async def store(self, group, ended):
        await asyncio.sleep(self.store_s)
        self.stored.append((group[0].group_id, ended))

    def start(self, number, **options):
        for _ in range(number):
            self.pending.start(Work(self.take, self.generate, self.store, is_stopped=lambda: self.stopped, **options))


def test_groups_are_stored_as_they_finish_and_wake_who_waits():
    async def main():
        bench = Bench(lambda index: 3.0 - index)
        bench.start(3)
        seen = bench.pending.changes.version
        await bench.pending.changes.wait(seen)
        assert bench.stored == [(2, Ended.RETURNED)]
        assert len(bench.pending) == 2
        assert [group[0].group_id for group in bench.pending.groups] == [0, 1]
        while len(bench.pending):
            await bench.pending.changes.wait(bench.pending.changes.version)
        assert [index for index, _ in bench.stored] == [2, 1, 0]

    virtual_time.run(main())


@pytest.mark.parametrize("at_s", [None, 0.0, 0.25, 0.75, 1.25, 1.75, 2.25])
def test_cancel_stores_everything_once_whatever_it_strikes(at_s):
    """Taking lasts until 0.5 s, generating until 1.5 s, storing until 2 s."""

    async def main():
        bench = Bench(take_s=0.5, store_s=0.5)
        bench.start(3)
        if at_s is not None:
            await asyncio.sleep(at_s)
        await bench.pending.cancel()
        assert len(bench.pending) == 0
        if at_s is None:
            assert (bench.num_taken, bench.stored) == (0, [])
            return
        expected = Ended.NOT_STARTED if at_s < 0.5 else Ended.INTERRUPTED if at_s < 1.5 else Ended.RETURNED
        assert sorted(bench.stored, key=str) == [(index, expected) for index in range(3)]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual_time.run(main())


def test_what_is_stopped_before_it_generates_comes_back_unstarted():
    async def main():
        bench = Bench(take_s=1.0)
        bench.start(1)
        await asyncio.sleep(0.5)
        bench.stopped = True
        bench.start(1)
        while len(bench.pending):
            await bench.pending.changes.wait(bench.pending.changes.version)
        assert bench.stored == [(0, Ended.NOT_STARTED)]
        assert bench.num_taken == 1

    virtual_time.run(main())


def test_a_cancellation_from_within_fails_the_group():
    async def main():
        bench = Bench()
        groups = []

        async def generate(group):
            groups.append(group)
            raise asyncio.CancelledError

        bench.generate = generate
        bench.start(1)
        await bench.pending.changes.wait(bench.pending.changes.version)
        assert bench.stored == [(0, Ended.RETURNED)]
        assert all(state.status is Status.FAILED for state in groups[0])
        assert "from within" in groups[0][0].error_msg

    virtual_time.run(main())


def swallowing(bench, times):
    """An agent that goes on after being cancelled, so often."""

    async def generate(group):
        for _ in range(times):
            try:
                await asyncio.sleep(10**6)
            except asyncio.CancelledError:
                group[0].response_ids = [*group[0].response_ids, 7]
        await asyncio.sleep(10**6)

    bench.generate = generate


def test_a_cancellation_that_is_swallowed_is_repeated_and_named(caplog):
    async def main():
        bench = Bench()
        swallowing(bench, 2)
        bench.start(1)
        await asyncio.sleep(100)
        await bench.pending.cancel()
        bench.pending.raise_error()
        assert bench.stored == [(0, Ended.INTERRUPTED)]
        assert asyncio.get_running_loop().time() == 100 + 2 * CANCEL_REPEAT_S
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual_time.run(main())
    assert [record.getMessage() for record in caplog.records] == [
        "not ended 5 s after it was cancelled: group 0, being generated, 105 s old",
        "not ended 10 s after it was cancelled: group 0, being generated, 110 s old",
    ]


def test_who_swallows_every_cancellation_is_given_up_and_the_prompt_is_stored_once():
    async def main():
        bench, groups = Bench(), []
        store = bench.store

        async def remember(group, ended):
            groups.append(group)
            await store(group, ended)

        bench.store = remember
        swallowing(bench, 20)
        bench.start(2)
        await asyncio.sleep(100)
        originals = list(bench.pending.groups)
        await bench.pending.cancel()
        assert asyncio.get_running_loop().time() == 100 + GIVE_UP_AFTER_S
        assert sorted(bench.stored, key=str) == [(0, Ended.INTERRUPTED), (1, Ended.INTERRUPTED)]
        assert len(bench.pending) == 0
        with pytest.raises(ProductionError, match=r"swallow every cancellation.*group 0, .*group 1, "):
            bench.pending.raise_error()
        # What is still at work has nothing to do with what was stored, and is not heard of again.
        assert all(stored is not state for g in groups for stored in g for o in originals for state in o)
        length = len(groups[0][0].response_ids)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert len(left) == 2
        for _ in range(20):
            for task in left:
                task.cancel()
            await asyncio.sleep(1)
        assert all(task.done() for task in left)
        assert len(bench.stored) == 2
        assert len(groups[0][0].response_ids) == length
        bench.pending.raise_error()

    virtual_time.run(main())


def test_storing_that_hangs_is_an_error_that_names_the_group():
    async def main():
        bench = Bench(store_s=10**6)
        bench.start(1)
        await asyncio.sleep(10)
        with pytest.raises(ProductionError, match=r"not ended 600 s .*group 0, being stored, 610 s old"):
            await bench.pending.cancel()
        await asyncio.sleep(10**6)
        assert bench.stored == [(0, Ended.RETURNED)]

    virtual_time.run(main())


def test_what_escapes_from_taking_or_storing_is_raised_once():
    async def main():
        bench = Bench()

        async def store(group, ended):
            raise OSError("no space")

        bench.store = store
        bench.start(2)
        await bench.pending.changes.wait(bench.pending.changes.version)
        with pytest.raises(ProductionError, match="OSError: no space") as caught:
            bench.pending.raise_error()
        assert isinstance(caught.value.__cause__, OSError)
        bench.pending.raise_error()

    virtual_time.run(main())


def test_a_lost_buffer_is_told_as_it_is_and_before_other_errors():
    async def main():
        bench = Bench(lambda index: 1.0 + index)
        errors = {0: OSError("no disk"), 1: ConnectionLost("gone"), 2: OSError("no disk")}

        async def store(group, ended):
            raise errors[group[0].group_id]

        bench.store = store
        bench.start(3)
        while len(bench.pending):
            await bench.pending.changes.wait(bench.pending.changes.version)
        with pytest.raises(ConnectionLost, match="gone"):
            bench.pending.raise_error()
        bench.pending.raise_error()

    virtual_time.run(main())
