"""Waiting, terms and limits, on virtual time."""

import asyncio

import pytest
from fragment_factory import SETTINGS, fids, make_fragment, send
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.aio import virtual_time
from forebay.aio.gate import Gate
from forebay.fragments import BufferClosed, FragmentMetadata, FragmentStore, RateLimit, ReplayBufferActor
from forebay.fragments.rules import Rules
from forebay.fragments.state import ReplayState


@pytest.fixture
def simulate(database_config):
    """Runs `scenario(buffer, store)` with a new buffer on virtual time."""

    def run(scenario, **settings):
        async def main():
            buffer = ReplayBufferActor(database_config=database_config, **SETTINGS | settings)
            return await scenario(buffer, FragmentStore(**database_config))

        return virtual_time.run(main())

    return run


# The gate.


def test_small_requests_do_not_overtake_a_large_one(simulate):
    async def scenario(buffer, store):
        large = asyncio.create_task(buffer.fetch_fragments(4))
        await asyncio.sleep(0)
        small = [asyncio.create_task(buffer.fetch_fragments(1)) for _ in range(3)]
        await send(buffer, store, "w", range(3))
        assert not any(task.done() for task in [large, *small])
        # One that would find enough does not go before it either.
        with pytest.raises(TimeoutError):
            await buffer.fetch_fragments(1, timeout_s=1.0)
        await send(buffer, store, "w", [3])
        assert sorted(fids(await large)) == [0, 1, 2, 3]
        await send(buffer, store, "w", range(4, 7))
        assert [fids(await task) for task in small] != []

    simulate(scenario)


def test_when_the_first_in_line_gives_up_the_next_goes_on(simulate):
    async def scenario(buffer, store):
        large = asyncio.create_task(buffer.fetch_fragments(4, timeout_s=5.0))
        await asyncio.sleep(0)
        small = asyncio.create_task(buffer.fetch_fragments(1))
        await send(buffer, store, "w", [0])
        assert fids(await small) == [0]
        assert asyncio.get_running_loop().time() == 5.0
        with pytest.raises(TimeoutError):
            await large

    simulate(scenario)


def test_a_fetch_cancelled_at_the_moment_it_is_woken_takes_nothing(simulate):
    async def scenario(buffer, store):
        first = asyncio.create_task(buffer.fetch_fragments(1))
        second = asyncio.create_task(buffer.fetch_fragments(1))
        await buffer.remove_worker("nobody")  # whatever opening the buffer had to do is done
        await asyncio.sleep(0)
        # Nothing in it waits, so that `first` is woken but has not run yet.
        await buffer.add_fragment("id", FragmentMetadata("w", 0, -1, ""))
        assert not first.done()
        first.cancel()
        await asyncio.wait([first, second])
        assert first.cancelled()
        assert fids(second.result()) == [0]
        assert (await buffer.metrics())["fetches"] == 1

    simulate(scenario)


def test_what_grew_stale_between_waking_and_taking_is_not_served(simulate):
    async def scenario(buffer, store):
        fetching = asyncio.create_task(buffer.fetch_fragments(1))
        await asyncio.sleep(0)
        await asyncio.gather(send(buffer, store, "w", [0]), buffer.update_model_version("", 9))
        assert not fetching.done()
        await send(buffer, store, "w", [1], version=9)
        assert fids(await fetching) == [1]

    simulate(scenario)


def test_closing_ends_every_wait(simulate):
    async def scenario(buffer, store):
        fetching = [asyncio.create_task(buffer.fetch_fragments(n)) for n in (1, 2)]
        await asyncio.sleep(0)
        await buffer.close()
        for task in fetching:
            with pytest.raises(BufferClosed, match="was closed"):
                await task
        with pytest.raises(BufferClosed):
            await buffer.add_fragment("id", FragmentMetadata("w", 0, -1, ""))

    simulate(scenario)


STEPS = ("wait", "add", "drop", "close", "cancel", "turn")


@given(st.lists(st.sampled_from(STEPS), max_size=14))
@example(["wait", "turn", "add", "drop", "close"])
@example(["wait", "wait", "turn", "add", "cancel", "drop", "close"])
def test_a_line_that_is_closed_leaves_nobody_waiting(steps):
    """Added, taken away by a new session, closed: also when all of it falls into one turn."""

    async def play():
        gate, held, waits, is_closed = Gate(), 0, [], False

        def has_some():
            return held > 0

        for step in steps:
            if step == "wait":
                waits.append(asyncio.create_task(gate.wait(has_some)))
            elif step == "add":
                held += 1
                gate.wake()
            elif step == "drop":
                held = 0
            elif step == "close":
                gate.close("closed")
                is_closed = True
            elif step == "cancel" and waits:
                waits[-1].cancel()
            elif step == "turn":
                await asyncio.sleep(0)
        if not is_closed:
            gate.close("closed")
        # A wait that nothing ends is a `DeadlockError` of the loop.
        results = await asyncio.gather(*waits, return_exceptions=True)
        assert {type(result) for result in results} <= {BufferClosed, asyncio.CancelledError, type(None)}
        assert len(gate) == 0

    virtual_time.run(play())


def test_a_fetch_ends_when_its_chunk_is_added_dropped_and_the_buffer_closed_in_one_turn(simulate):
    async def scenario(buffer, store):
        fetch = asyncio.create_task(buffer.fetch_fragments(1))
        await asyncio.sleep(0)
        # Each begins in the turn after this one, in this order, before the fetch goes on.
        others = [
            asyncio.create_task(send(buffer, store, "w", [0])),
            asyncio.create_task(buffer.update_model_version("another session", 0)),
            asyncio.create_task(buffer.close()),
        ]
        with pytest.raises(BufferClosed):
            await fetch
        await asyncio.gather(*others)

    simulate(scenario)


async def test_nobody_in_line_is_woken_out_of_turn():
    gate, order, room = Gate(), [], 0

    async def want(name, amount):
        nonlocal room
        await gate.wait(lambda: room >= amount)
        room -= amount
        order.append(name)
        gate.wake()

    tasks = [asyncio.create_task(want(*args)) for args in [("a", 3), ("b", 1), ("c", 2)]]
    for _ in range(6):
        await asyncio.sleep(0)
        room += 1
        gate.wake()
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c"]
    assert room == 0


# Terms.


def test_a_lease_ends_with_its_term(simulate):
    async def scenario(buffer, store):
        await send(buffer, store, "w", [0, 1])
        long, short = [await buffer.fetch_fragments(1) for _ in range(2)]
        await asyncio.sleep(9.0)
        assert await buffer.renew(short.lease)
        assert await buffer.renew(long.lease)
        await asyncio.sleep(5.0)
        assert await buffer.renew(long.lease)
        await asyncio.sleep(4.0)
        assert len(store) == 2
        await asyncio.sleep(2.0)
        assert short[0][1] not in store
        assert not await buffer.renew(short.lease)
        assert long[0][1] in store
        metrics = await buffer.metrics()
        assert (metrics["expired_leases"], metrics["leases"]) == (1, 1)

    simulate(scenario, lease_s=10.0)


def test_several_consumers_hold_leases_of_their_own(simulate):
    async def scenario(buffer, store):
        await send(buffer, store, "w", range(8))
        held = [await buffer.fetch_fragments(2) for _ in range(4)]
        for number, batch in enumerate(held):
            assert len(store) == 8 - 2 * number
            assert store.stack(batch.fragment_ids).fid_in_worker == fids(batch)
            await buffer.release(batch.lease)

    simulate(scenario)


def test_a_silent_worker_gives_up_its_partial_chunk(simulate):
    async def scenario(buffer, store):
        await send(buffer, store, "silent", [0])
        await asyncio.sleep(6.0)
        await send(buffer, store, "slow", [0])
        await asyncio.sleep(6.0)
        metrics = await buffer.metrics()
        assert (metrics["dropped/silent_worker"], metrics["partial_fragments"], len(store)) == (1, 1, 1)
        await send(buffer, store, "slow", [1])
        assert fids(await buffer.fetch_fragments(2)) == [0, 1]

    simulate(scenario, fragments_per_chunk=2, worker_timeout_s=10.0)


def test_payloads_that_nobody_announced_are_deleted_after_the_grace(simulate, store, database_config):
    orphan, late = store.add_fragments([make_fragment(), make_fragment()])

    async def scenario(buffer, store):
        await buffer.metrics()
        await send(buffer, store, "w", [1])
        await asyncio.sleep(9.0)
        assert orphan in store
        await buffer.add_fragment(late, FragmentMetadata("late", 0, -1, ""))
        await asyncio.sleep(2.0)
        assert orphan not in store
        assert late in store
        # One that a worker leaves behind later goes too, when the buffer is used.
        left = store.add_fragment(make_fragment())
        await send(buffer, store, "w", [2])
        await asyncio.sleep(11.0)
        await send(buffer, store, "w", [3])
        assert left not in store
        assert (await buffer.metrics())["orphans_deleted"] == 2

    simulate(scenario, orphan_grace_s=10.0)


def test_the_next_buffer_takes_over_and_leases_get_their_whole_term_again(simulate, make_plain):
    async def scenario(buffer, store):
        await send(buffer, store, "w", [0, 1, 2])
        batch = await buffer.fetch_fragments(1)
        await asyncio.sleep(9.0)
        other = make_plain(lease_s=10.0, fragments_per_chunk=1)
        with pytest.raises(BufferClosed, match="another buffer has opened"):
            await buffer.fetch_fragments(1)
        assert await other.prepared_fragments() == batch
        assert not set(fids(batch)) & set(fids(await other.fetch_fragments(2)))
        await asyncio.sleep(9.0)
        assert batch[0][1] in store
        await asyncio.sleep(2.0)
        assert len(store) == 0

    simulate(scenario, lease_s=10.0)


def test_a_buffer_that_was_replaced_deletes_nothing_that_the_next_one_holds(simulate, store, make_plain):
    late = store.add_fragment(make_fragment())

    async def scenario(buffer, store):
        await send(buffer, store, "w", [1])
        await asyncio.sleep(9.0)
        await send(buffer, store, "w", [2])
        other = make_plain()
        await other.add_fragment(late, FragmentMetadata("late", 0, -1, ""))
        # The first has heard of nobody who announced it, and its grace ends here.
        await asyncio.sleep(2.0)
        assert late in store

    simulate(scenario, orphan_grace_s=10.0)


def test_a_buffer_goes_on_under_narrower_rules(simulate, make_plain):
    async def scenario(buffer, store):
        await send(buffer, store, "w", range(6))
        await buffer.fetch_fragments(1)
        lost = (await buffer.fetch_fragments(1))[0][1]
        store.delete_fragments([lost])
        other = make_plain(max_chunks=2, max_reuse=1)
        metrics = await other.metrics()
        assert metrics["chunks"] == 2
        assert metrics["used_up_fragments"] + metrics["dropped/lost_payload"] >= 1
        assert metrics["dropped/evicted"] >= 1
        with pytest.raises(ValueError, match="chunks of 1 fragments, got fragments_per_chunk=3"):
            make_plain(fragments_per_chunk=3)

    simulate(scenario, max_reuse=3)


# The rate limit.


def test_writers_wait_for_readers(simulate):
    async def scenario(buffer, store):
        sending = asyncio.create_task(send(buffer, store, "w", range(8)))
        await asyncio.sleep(1.0)
        # 2 * 4 is the most the difference may be: min_chunks * 2 + 6.
        metrics = await buffer.metrics()
        assert (metrics["chunks"], metrics["waiting_additions"]) == (4, 1)
        for _ in range(2):
            await buffer.fetch_fragments(1)
        await asyncio.sleep(1.0)
        assert (await buffer.metrics())["added_fragments"] == 5
        # A reader that needs more than there is gets it.
        await buffer.fetch_fragments(6)
        sending.cancel()

    limit = RateLimit(samples_per_insert=2.0, error_buffer=6.0)
    simulate(scenario, rate_limit=limit, max_reuse=2)


def test_readers_wait_for_writers(simulate):
    async def scenario(buffer, store):
        await send(buffer, store, "w", range(2))
        with pytest.raises(TimeoutError):  # below min_chunks
            await buffer.fetch_fragments(1, timeout_s=1.0)
        await send(buffer, store, "w", [2])
        # The difference is 3 and may fall to 0.
        for _ in range(3):
            await buffer.fetch_fragments(1)
        fetching = asyncio.create_task(buffer.fetch_fragments(1))
        await asyncio.sleep(1.0)
        assert not fetching.done()
        await send(buffer, store, "w", [3])
        await fetching

    limit = RateLimit(samples_per_insert=1.0, min_chunks=3, error_buffer=3.0)
    simulate(scenario, rate_limit=limit, max_reuse=10)


def test_chunks_that_leave_unsampled_do_not_hold_writers_back(simulate):
    async def scenario(buffer, store):
        for version in range(20):
            await buffer.update_model_version("", version)
            await asyncio.wait_for(send(buffer, store, "w", [2 * version, 2 * version + 1], version), 1.0)
        assert (await buffer.metrics())["dropped/stale"] == 38

    limit = RateLimit(samples_per_insert=1.0, error_buffer=4.0)
    simulate(scenario, rate_limit=limit, max_staleness=0)


def test_chunks_that_leave_after_more_samples_than_their_share_leave_the_others_theirs():
    limit = RateLimit(samples_per_insert=0.5, min_chunks=4, error_buffer=8.0)
    rules = Rules(max_chunks=20, max_staleness=0, max_reuse=1, fragments_per_chunk=1, rate_limit=limit)
    state, num_added, num_served = ReplayState(rules), 0, 0
    for turn in range(4_000):
        if state.may_insert():
            state.add([(str(turn), FragmentMetadata("w", turn, -1, ""))], now_s=0.0)
            num_added += 1
        if state.can_serve(2):
            num_served += len(state.serve(2, now_s=0.0).fragment_ids)
    assert num_added == 4_000
    assert abs(num_served - 0.5 * num_added) <= 10


@pytest.mark.parametrize(
    "values",
    [
        {"samples_per_insert": 0.0},
        {"samples_per_insert": 1.0, "min_chunks": 0},
        {"samples_per_insert": 3.0, "error_buffer": 2.0},
    ],
)
def test_a_limit_nobody_could_keep_is_refused(values):
    with pytest.raises(ValueError, match="must be"):
        RateLimit(**values)


def test_a_limit_that_the_buffer_could_never_keep_is_refused(make_plain):
    with pytest.raises(ValueError, match="no buffer with max_reuse=1"):
        make_plain(rate_limit=RateLimit(samples_per_insert=2.0))
