"""What callers of a SQL store share: commits, train steps, evictions and a limit."""

import asyncio
import threading
from collections import Counter

import pytest
import sqlalchemy as sa
from replay_factory import make_group, make_row, names, statements

from forebay.replay import FIFOReplayPolicy, NaiveStorage, ReplayBuffer, SQLStorage
from forebay.replay.stores.sql import store as sql_store
from forebay.replay.stores.sql import writes
from forebay.replay.stores.sql.worker import SETTLED_AT_ONCE
from forebay.types import Status


@pytest.fixture
def store(open_store):
    return open_store()


async def test_puts_that_wait_together_share_a_commit(store):
    with statements() as sent:
        ids = await asyncio.gather(*(store.put(make_row(number)) for number in range(60)))
    assert 0 < [text for text, _ in sent].count("COMMIT") < 5
    assert sorted(ids) == list(range(60))
    assert [row.item for row in await store.get({})] == list(range(60))


async def test_a_put_that_fails_does_not_fail_its_neighbors(store):
    good, bad, also_good = await asyncio.gather(
        store.put(make_row("a")), store.put(make_row(object())), store.put(make_row("b")), return_exceptions=True
    )
    assert "JSON" in str(bad)
    assert [row.item for row in await store.get({"uid": {"$in": [good, also_good]}})] == ["a", "b"]
    assert len(store) == 2


async def test_callers_that_shared_a_commit_go_on_a_few_at_a_time(store):
    turn, went_on = 0, Counter()

    async def put(number):
        await store.put(make_row(number))
        went_on[turn] += 1

    putting = asyncio.gather(*map(put, range(60)))
    while not putting.done():
        await asyncio.sleep(0)
        turn += 1
    assert went_on.total() == 60
    assert max(went_on.values()) <= SETTLED_AT_ONCE


async def test_a_train_step_is_written_when_it_is_new(open_store):
    store, rival = open_store(), open_store()
    with statements() as sent:
        for step in (3, 3, 4, 4, 3, 3):
            await store.set_train_step("math", step)
        assert sum(text.startswith("UPDATE") for text, _ in sent) == 2
    await rival.set_train_step("math", 9)
    with statements() as sent:
        await store.set_train_step("math", 5)
        assert await store.get_train_step("math") == 9, "the latest that was seen by anybody"
        await asyncio.gather(*(store.set_train_step("math", step) for step in (10, 12, 11)))
        assert sum(text.startswith("UPDATE") for text, _ in sent) == 1
    assert await rival.get_train_step("math") == 12
    store.load_state_dict(NaiveStorage().state_dict())
    await store.set_train_step("math", 5)
    assert await store.get_train_step("math") == 5


async def test_a_lagging_producer_hands_nobody_a_group_that_is_too_old(open_store):
    """Weights of step 7 are 2 behind at train step 10, where that is too much; the producer is at 9."""
    trainer, producer = (ReplayBuffer(FIFOReplayPolicy(), open_store()) for _ in range(2))
    await producer.put(make_group("a", steps=[7]), "math", current_train_step=9, stale_threshold=2)
    assert await trainer.refresh_staleness({"math": 2}, 10) == {"math": 1}
    await producer.put(late := make_group("b", steps=[7]), "math", current_train_step=9, stale_threshold=2)
    assert [(state.status, state.seq_staleness) for state in late] == [(Status.EXPIRED, 2)] * 2
    await trainer.put(make_group("c", steps=[9]), "math", current_train_step=10, stale_threshold=2)
    await producer.put(make_group("d", steps=[9]), "math", current_train_step=9, stale_threshold=2)
    assert await trainer.refresh_staleness({"math": 2}, 10) == {"math": 0}
    groups, _ = await trainer.take_batch({"math": 9}, train_step=10)
    assert names(groups["math"]) == ["c", "d"]
    assert [group[0].seq_staleness for group in groups["math"]] == [0, 0]
    await trainer.restore(8)
    await producer.put(make_group("e", steps=[7]), "math", current_train_step=9, stale_threshold=2)
    assert names(await trainer.get(9, "math", Status.COMPLETED)) == ["c", "d", "e"]
    assert await trainer.storage.get_train_step("math") == 9


async def test_a_step_that_is_named_while_rows_are_written_waits_for_them(postgres_url):
    """Else it would be set, and what is too old expired, before those rows can be seen."""
    store, rival = SQLStorage(postgres_url), SQLStorage(postgres_url)
    await store.set_train_step("math", 9)
    putting = store._engine.connect()
    putting.begin()
    assert writes.raise_steps(putting, [writes.Write(frozenset(["math"]), train_step=9)]) == {"math": 9}
    naming = asyncio.create_task(rival.set_train_step("math", 10))
    waiting = sa.text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    with store._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        while not connection.scalar(waiting):
            await asyncio.sleep(0)
    putting.commit()
    putting.close()
    await naming
    assert await store.get_train_step("math") == 10
    store.close()
    rival.close()


async def test_concurrent_puts_of_a_buffer_keep_its_limit(open_store):
    evicted = []
    buffer = ReplayBuffer(FIFOReplayPolicy(), open_store(), limit=4, on_evict=evicted.append)
    await asyncio.gather(*(buffer.put(make_group(number), "math") for number in range(20)))
    assert len(buffer) == 4
    left = names(await buffer.get(9, "math", Status.COMPLETED))
    assert sorted(left + names([row.item for row in evicted])) == list(range(20))
    assert buffer.num_evicted == {"math": 16}


async def test_buffers_on_one_database_share_a_limit(open_store):
    evicted = []
    buffers = [ReplayBuffer(FIFOReplayPolicy(), open_store(), limit=5, on_evict=evicted.append) for _ in range(3)]
    await asyncio.gather(*(buffers[i % 3].put(make_group(i), "math") for i in range(30)))
    assert len(buffers[0]) == 5
    assert buffers[1].num_evicted == {"math": 25}
    left = names(await buffers[2].get(9, "math", Status.COMPLETED))
    assert sorted(left + names([row.item for row in evicted])) == list(range(30))


async def test_an_eviction_that_is_cancelled_too_late_is_undone(store, monkeypatch):
    for name in "abc":
        await store.put(make_row(name))
    go_on, evicting = threading.Event(), threading.Event()
    ranked = writes.ranked_rows

    def wait_for_the_test(*args, **options):
        evicting.set()
        assert go_on.wait(timeout=300)
        return ranked(*args, **options)

    monkeypatch.setattr(writes, "ranked_rows", wait_for_the_test)
    evict = asyncio.create_task(store.evict(1))
    await asyncio.to_thread(evicting.wait)
    evict.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await evict
    monkeypatch.undo()
    assert [row.item for row in await store.get({})] == ["a", "b", "c"]
    assert store.num_evicted == {}


async def test_an_eviction_waits_for_a_taker_of_the_same_rows(postgres_url):
    """Else it would remove others, and leave fewer than the limit."""
    store = SQLStorage(postgres_url)
    for number in range(5):
        await store.put(make_row(number))
    taking = store._engine.connect()
    taking.begin()
    taking.execute(sa.text("DELETE FROM forebay_groups WHERE uid < 2"))
    evicting = asyncio.create_task(store.evict(3))
    waiting = sa.text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    with store._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        while not connection.scalar(waiting):
            await asyncio.sleep(0)
    taking.commit()
    taking.close()
    assert await evicting == []
    assert [row.item for row in await store.get({})] == [2, 3, 4]
    store.close()


async def test_limits_that_wait_together_are_each_kept_and_each_row_is_told_of_once(store):
    await store.put_many([make_row(number) for number in range(9)])
    limits = [6, 6, 8, 4, 6]
    evicted = await asyncio.gather(*map(store.evict, limits))
    assert [[row.item for row in rows] for rows in evicted] == [[0, 1, 2], [], [], [3, 4], []]
    assert (len(store), store.num_evicted) == (4, {"math": 5})


async def test_short_questions_to_a_small_file_wait_for_no_thread(tmp_path, monkeypatch):
    store = SQLStorage(tmp_path / "buffer.db")
    await store.put_many([make_row(number, step=number % 3) for number in range(9)])
    await store.set_train_step("math", 3)
    old = {"task_name": "math", "status": "completed", "staleness": {"$gte": 1}}

    async def ask():
        rows = await store.get(old, order="-staleness", limit=4, rows_only=True)
        return (
            [row.uid for row in rows],
            await store.count(old),
            await store.get({**old, "uid": 99}, limit=4, rows_only=True),
        )

    begun, go_on = threading.Event(), threading.Event()

    def hold():
        begun.set()
        assert go_on.wait(timeout=300)

    held = asyncio.create_task(store._reader.call(hold))
    await asyncio.to_thread(begun.wait)
    answers = await ask()
    assert answers == ([0, 3, 6, 1], 6, [])
    # Of a large one they do, and the answers are the same.
    monkeypatch.setattr(sql_store, "FEW_ROWS", 8)
    asking = asyncio.create_task(ask())
    await asyncio.sleep(0.02)
    assert not asking.done()
    go_on.set()
    assert await asking == answers
    await held
    store.close()
