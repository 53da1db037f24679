"""The SQL store on its own: files, versions, takers, cancelling, a free event loop."""

import asyncio
import contextlib
import sqlite3
import threading
from random import Random

import numpy as np
import pytest
import sqlalchemy as sa
from replay_factory import make_group, make_row, make_state, names, same, statements, uids

from forebay.replay import (
    FIFOReplayPolicy,
    IndexedStorage,
    PrioritizedReplayPolicy,
    RemoteReplayBuffer,
    ReplayBuffer,
    SQLStorage,
    serve,
)
from forebay.replay.format.packed import GroupCodec
from forebay.replay.stores.sql import ranking, rows, schema
from forebay.types import Status

COMPLETED = Status.COMPLETED


@pytest.fixture
def store(open_store):
    return open_store()


async def test_content_ids_steps_and_evictions_outlive_the_store(open_store):
    first = open_store()
    await first.set_train_step("math", 4)
    for name in "abcd":
        await first.put(make_row(name, step=1, tags={"name": name}))
    await first.evict(3)
    await first.take([1], train_step=4)
    first.close()
    second = open_store()
    assert [(row.item, row.staleness, row.tags) for row in await second.get({})] == [
        ("c", 2, {"name": "c"}),
        ("d", 2, {"name": "d"}),
    ]
    assert [row.item for row in await second.get({"status": "archived", "train_step": 4})] == ["b"]
    assert second.num_evicted == {"math": 1}
    assert await second.put(make_row("e")) == 4


async def test_two_stores_see_each_other(open_store):
    one, other = open_store(), open_store()
    await one.put(make_row("a", step=0))
    await other.set_train_step("math", 3)
    await other.put(make_row("b", staleness=5))
    assert [(row.item, row.staleness) for row in await one.get({}, order="-staleness")] == [("b", 5), ("a", 2)]
    assert [row.item for row in await one.take_first(1, {})] == ["a"]
    assert [row.item for row in await other.get({})] == ["b"]
    assert len(one) == len(other) == 1


async def test_rivals_in_two_stores_get_each_row_once(open_store):
    stores = [open_store() for _ in range(3)]
    for number in range(40):
        await stores[0].put(make_row(number, staleness=number % 3, step=number if number % 2 else None))
    await stores[0].set_train_step("math", 50)

    async def take(store):
        taken = []
        while rows := await store.take_first(3, {"status": "completed"}, order="-staleness", train_step=1):
            taken += rows
        return taken

    taken = [row.item for rows in await asyncio.gather(*map(take, stores)) for row in rows]
    assert sorted(taken) == list(range(40))


async def test_rivals_that_draw_from_two_stores_get_each_row_once(open_store):
    stores = [open_store() for _ in range(3)]
    for number in range(40):
        await stores[0].put(make_row(number, priority=float(number % 4)))

    async def take(store, random):
        taken = []
        while rows := await store.take_drawn(3, {"status": "completed"}, random.random, train_step=1):
            taken += rows
        return taken

    takers = [take(store, Random(seed)) for seed, store in enumerate(stores)]
    taken = [row.item for rows in await asyncio.gather(*takers) for row in rows]
    assert sorted(taken) == list(range(40))


async def test_priorities_are_written_to_live_rows_only(store):
    for number in range(4):
        await store.put(make_row(number))
    await store.take([1], train_step=1)
    assert await store.update_priorities({0: 2.5, 1: 9.0, 3: 0.0, 77: 1.0, 2**70: 1.0}) == 2
    rows = await store.get({"status": {"$in": ["completed", "archived"]}})
    assert [row.priority for row in rows] == [2.5, 1.0, 1.0, 0.0]
    assert await store.update_priorities({}) == 0


async def test_what_matches_is_deleted_with_its_payload_and_tags(store):
    await store.set_train_step("math", 9)
    for number in range(6):
        await store.put(make_row(number, step=number, tags={"x": number}))
    await store.take([0, 1, 2], train_step=4)
    assert await store.delete_where({"status": "archived", "train_step": {"$lte": 3}}) == 0
    assert await store.delete_where({"status": "archived", "train_step": {"$lte": 4}}) == 3
    assert await store.delete_where({"staleness": {"$gt": 4}}) == 1
    assert [row.item for row in await store.get({})] == [4, 5]
    too_many = {"uid": {"$in": list(range(20_000))}}
    assert await store.delete_where(too_many) == 2
    with store._engine.connect() as connection:
        for table in ("groups", "payloads", "tags"):
            assert connection.scalar(sa.text(f"SELECT count(*) FROM forebay_{table}")) == 0


async def test_what_is_deleted_from_a_file_is_not_written_over(tmp_path):
    """Distributions build SQLite so that it writes zeros there."""
    store, log = SQLStorage(tmp_path / "buffer.db"), tmp_path / "buffer.db-wal"
    uid = await store.put(make_row("x" * 1_000_000))
    size = log.stat().st_size
    await store.delete([uid])
    assert size > 1_000_000
    assert 0 < log.stat().st_size - size < 500_000
    store.close()


async def test_the_event_loop_is_free_while_the_database_works(store, monkeypatch):
    go_on = threading.Event()
    loop = asyncio.get_running_loop()
    working = asyncio.Event()
    write = rows.insert_rows

    def wait_for_the_test(*args):
        loop.call_soon_threadsafe(working.set)
        assert go_on.wait(timeout=300)
        return write(*args)

    monkeypatch.setattr(rows, "insert_rows", wait_for_the_test)
    putting = asyncio.create_task(store.put(make_row("a")))
    await working.wait()
    go_on.set()
    await putting
    assert len(store) == 1


class Held:
    """Holds the store's thread until the test lets go."""

    def __init__(self, store):
        self.go_on, self.holding = threading.Event(), threading.Event()
        self.task = asyncio.create_task(store._worker.call(self.hold))

    def hold(self):
        self.holding.set()
        assert self.go_on.wait(timeout=300)

    async def begun(self):
        await asyncio.to_thread(self.holding.wait)

    async def let_go(self):
        self.go_on.set()
        await self.task


async def test_a_call_that_is_cancelled_while_it_waits_never_happens(store):
    await store.put(make_row("a"))
    held = Held(store)
    await held.begun()
    calls = [
        asyncio.create_task(call)
        for call in (store.put(make_row("b")), store.take_first(1, {}), store.set_train_step("math", 3))
    ]
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert all(call.cancelled() for call in calls)
    await held.let_go()
    assert [row.item for row in await store.get({})] == ["a"]
    assert await store.get_train_step("math") is None


@pytest.mark.parametrize("train_step", [None, 3])
async def test_a_take_that_is_cancelled_too_late_is_undone(store, train_step, monkeypatch):
    await store.put(make_row("a", status="aborted", tags={"x": 1}))
    before = await store.get({})
    go_on, taking = threading.Event(), threading.Event()
    ranked = ranking.ranked_rows

    def wait_for_the_test(*args, **options):
        taking.set()
        assert go_on.wait(timeout=300)
        return ranked(*args, **options)

    monkeypatch.setattr(ranking, "ranked_rows", wait_for_the_test)
    take = asyncio.create_task(store.take_first(1, {}, train_step=train_step))
    await asyncio.to_thread(taking.wait)
    take.cancel()
    await asyncio.sleep(0)
    assert not take.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await take
    monkeypatch.undo()
    assert await store.get({}) == before
    assert await store.count({"status": "archived"}) == 0


async def test_a_closed_store_says_so(store):
    put = asyncio.create_task(store.put(make_row("a")))
    await asyncio.sleep(0)
    store.close()
    assert await put == 0
    with pytest.raises(RuntimeError, match="closed"):
        await store.put(make_row("b"))
    store.close()


async def test_a_payload_of_another_codec_costs_no_group(open_store, sql_url):
    await open_store().put(make_row({"no": "group"}))
    buffer = ReplayBuffer(FIFOReplayPolicy(), open_store())
    with pytest.raises(ValueError, match=r"the row with uid 0: .* group of rollouts"):
        await buffer.get(1, "math", COMPLETED)
    assert [row.item for row in await open_store().get({})] == [{"no": "group"}]
    await buffer.put(make_group("a"), "code")
    [row] = await open_store().get({"task_name": "code"})
    assert row.item[0].group_id == make_group("a")[0].group_id


class Reversed(GroupCodec):
    """A codec of one's own, as for encrypted payloads."""

    def encode(self, payload):
        return super().encode(payload)[::-1]

    def decode(self, data):
        return super().decode(data[::-1])


async def test_a_codec_of_one_s_own_stays_in_a_buffer_and_in_a_server(open_store, tmp_path):
    store = open_store()
    store.use_codec(codec := Reversed())
    buffer = ReplayBuffer(FIFOReplayPolicy(), store)
    await buffer.put(make_group("a"), "math")
    async with serve(buffer, tmp_path / "socket"):
        client = await RemoteReplayBuffer.connect(tmp_path / "socket")
        await client.put(make_group("b"), "math")
        assert names(await client.get(1, "math", COMPLETED)) == ["a"]
        await client.close()
    assert store.codec is codec
    other = open_store()
    other.use_codec(Reversed())
    assert names(row.item for row in await other.get({})) == ["b"]


async def test_a_store_that_no_buffer_has_holds_groups_too(open_store):
    store = open_store()
    assert await store.put(make_row(make_group("a"), status=COMPLETED)) == 0
    [row] = await store.take([0])
    assert (row.status, names([row.item])) == (COMPLETED, ["a"])
    other = IndexedStorage()
    await other.put(make_row(make_group("b"), status=COMPLETED))
    store.load_state_dict(other.state_dict())
    [row] = await open_store().get({})
    assert same(list(row.item), make_group("b"))


async def test_a_train_step_of_numpy_is_a_number_in_the_database(open_store):
    buffer = ReplayBuffer(FIFOReplayPolicy(), open_store())
    steps = {"model_step": np.int64(1), "current_train_step": np.int64(3)}
    await buffer.put(make_group("a", num_tokens=1), "math", **steps)
    await buffer.refresh_staleness({"math": np.int64(9)}, np.int64(4))
    [row] = await open_store().get({}, rows_only=True)
    assert row.staleness == 2
    groups, _ = await buffer.take_batch({"math": np.int64(1)}, train_step=np.int64(5))
    assert names(groups["math"]) == ["a"]
    await buffer.restore(np.int64(4))
    assert names(await buffer.get(1, "math", COMPLETED)) == ["a"]


async def test_draws_by_priority(store):
    for number, priority in enumerate([0.0, 1.0, 2.0, 5.0]):
        await store.put(make_row(number, priority=priority))
    memory = IndexedStorage()
    memory.load_state_dict(store.state_dict())
    drawn = await PrioritizedReplayPolicy(seed=3).get(4, {}, store)
    assert drawn == await PrioritizedReplayPolicy(seed=3).get(4, {}, memory)
    assert drawn[-1] == 0


async def test_a_buffer_on_disk_goes_on_where_it_was(open_store):
    """A crash of the trainer: what it took after its checkpoint comes back, on another store object."""
    buffer = ReplayBuffer(FIFOReplayPolicy(), open_store(), limit=5)
    for name in "abcdef":
        await buffer.put(make_group(name, steps=[0]), "math", current_train_step=1, tags={"name": name})
    await buffer.take_batch({"math": 1}, train_step=1)
    await buffer.commit(1)
    await buffer.take_batch({"math": 2}, train_step=2)
    await buffer.close()
    again = ReplayBuffer(FIFOReplayPolicy(), open_store(), limit=5)
    assert again.num_evicted == {"math": 1}
    await again.restore(1)
    rows = await again.storage.get({})
    assert [(row.status, row.tags["name"], row.staleness) for row in rows] == [(COMPLETED, name, 0) for name in "cdef"]
    assert await again.refresh_staleness({"math": 2}, 3) == {"math": 4}
    assert names(await again.get(9, "math", Status.EXPIRED)) == list("cdef")


async def test_what_a_rival_takes_is_neither_expired_nor_revived(open_store):
    """Another process is faster between the reading and the writing of a refresh."""
    buffer, rival = (ReplayBuffer(FIFOReplayPolicy(), open_store()) for _ in range(2))
    for name in "abc":
        await buffer.put(make_group(name, steps=[0]), "math", current_train_step=1)
    update_if = buffer.storage.update_if

    async def too_late(items, query):
        await rival.take_batch({"math": 2}, train_step=7)
        buffer.storage.update_if = update_if
        return await update_if(items, query)

    buffer.storage.update_if = too_late
    assert await buffer.refresh_staleness({"math": 3}, 9) == {"math": 1}
    rows = await buffer.storage.get({"status": "archived", "train_step": 7})
    assert names(row.item for row in rows) == ["a", "b"]
    assert names(await buffer.get(9, "math", Status.EXPIRED)) == ["c"]


async def test_groups_come_back_as_they_were(open_store):
    group = [
        make_state("g", 0, steps=[1, 2], extra_fields={"deep": {"tuple": (1, None)}}),
        make_state("g", 1, num_tokens=0, error_msg="text \ud800"),
    ]
    buffer = ReplayBuffer(FIFOReplayPolicy(), open_store())
    await buffer.put(group, "math")
    (stored,) = await buffer.get(1, "math", COMPLETED)
    assert same(stored, group)
    stored[0].response_ids[0] = 5


async def test_takes_over_a_snapshot_and_gives_one(open_store, tmp_path):
    memory = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage(), limit=3)
    for name in "abcd":
        await memory.put(make_group(name, steps=[0]), "math", current_train_step=2)
    await memory.take_batch({"math": 1}, train_step=2)
    await memory.save(tmp_path / "one")
    buffer = ReplayBuffer(FIFOReplayPolicy(), open_store(), limit=3)
    await buffer.resume(tmp_path / "one")
    with pytest.raises(RuntimeError, match="2 groups"):
        await buffer.resume(tmp_path / "one")
    assert buffer.num_evicted == {"math": 1}
    await buffer.save(tmp_path / "two")
    other = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage(), limit=3)
    await other.resume(tmp_path / "two")
    await other.restore(0)
    assert names(await other.get(9, "math", COMPLETED)) == ["b", "c", "d"]


@pytest.mark.parametrize("kind", ["a file", "an empty file", "an empty place"])
def test_nothing_is_created_unless_asked(tmp_path, request, kind):
    url = request.getfixturevalue("postgres_url") if kind == "an empty place" else tmp_path / "new" / "x.db"
    if kind == "an empty file":
        url.parent.mkdir()
        url.touch()
    with pytest.raises(FileNotFoundError if kind == "a file" else ValueError, match=r"no file|no replay store"):
        SQLStorage(url, create=False)
    assert kind != "a file" or not url.parent.exists()
    SQLStorage(url).close()
    SQLStorage(url, create=False).close()


def test_a_url_says_whether_sqlite_waits_for_the_disk_at_each_commit(tmp_path):
    for ending, level in (("", 1), ("?synchronous=normal", 1), ("?synchronous=full", 2)):
        store = SQLStorage(f"sqlite:///{tmp_path / 'buffer.db'}{ending}")
        with store._engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == level
        store.close()
    with pytest.raises(ValueError, match=r"synchronous=OFF in .*normal or full"):
        SQLStorage(f"sqlite:///{tmp_path / 'buffer.db'}?synchronous=off")


def test_other_databases_are_refused(tmp_path):
    for url, kind in {"mysql://host/db": "mysql", "sqlite://": "sqlite", ":memory:": "sqlite"}.items():
        with pytest.raises(ValueError, match=f"is a file or .*IndexedStorage.*, got a URL of '{kind}'"):
            SQLStorage(url)
    (tmp_path / "text").write_text("no database " * 1000)
    with pytest.raises(ValueError, match="not an SQLite database"):
        SQLStorage(tmp_path / "text")
    foreign = sqlite3.connect(tmp_path / "foreign.db")
    foreign.execute("CREATE TABLE accounts (id)")
    foreign.close()
    before = (tmp_path / "foreign.db").read_bytes()
    with pytest.raises(ValueError, match="accounts"):
        SQLStorage(tmp_path / "foreign.db")
    assert (tmp_path / "foreign.db").read_bytes() == before


def test_a_store_can_be_opened_while_another_process_writes(tmp_path):
    SQLStorage(tmp_path / "b.db").close()
    writer = sqlite3.connect(tmp_path / "b.db", isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    store = SQLStorage(tmp_path / "b.db")
    assert len(store) == 0
    store.close()
    writer.close()


@pytest.mark.parametrize("change", ["value = '99' WHERE name = 'version'", "value = 'x' WHERE name = 'format'"])
def test_another_schema_is_refused(open_store, change):
    store = open_store()
    with store._writing() as connection:
        connection.execute(sa.text(f"UPDATE forebay_meta SET {change}"))
    with pytest.raises(ValueError, match="schema version"):
        open_store()


def test_a_foreign_table_among_ours_is_refused(postgres_url):
    engine = sa.create_engine(postgres_url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE accounts (id int); CREATE TABLE forebay_groups (id int)"))
    engine.dispose()
    with pytest.raises(ValueError, match="forebay_groups"):
        SQLStorage(postgres_url)


async def test_the_common_questions_use_an_index(tmp_path):
    """Ranking, expiry and eviction read as far as their limit and sort nothing."""
    store = SQLStorage(tmp_path / "buffer.db")
    await store.put(make_row("a", step=1))
    await store.set_train_step("math", 5)
    of_task = {"task_name": "math", "status": "completed"}
    with statements() as sent:
        await store.get(of_task, order="timestamp_id", limit=5, rows_only=True)
        await store.get(of_task, order="-staleness", limit=5, rows_only=True)
        await store.get({**of_task, "staleness": {"$gte": 3}}, order="-staleness", limit=5, rows_only=True)
        await store.get({}, limit=5, rows_only=True)
        await store.count(of_task)
        len(store)
        await store.evict(5)
        assert sum("FROM forebay_groups" in text for text, _ in sent) == 7, "counts by task and status read no groups"
        await store.delete_where({"status": "archived", "train_step": {"$lte": 3}})
    store.close()
    found = [(text, values) for text, values in sent if "FROM forebay_groups" in text]
    assert len(found) == 8
    database = sqlite3.connect(tmp_path / "buffer.db")
    for statement, parameters in found:
        plan = " ".join(line[3] for line in database.execute(f"EXPLAIN QUERY PLAN {statement}", parameters))
        assert "INDEX forebay_" in plan, statement
        # What a commit deletes is found by its train step and then locked by uid.
        assert ("TEMP B-TREE" in plan) == ("INDEX forebay_by_train_step" in plan), (statement, plan)
    database.close()


async def test_counts_follow_every_change(store):
    """They are kept beside the rows, so they are compared with the rows."""
    rng = Random(3)
    statuses = ["completed", "aborted", "failed", "archived"]
    for step in range(25):
        uids_now = uids(await store.get({"status": {"$in": statuses}}, rows_only=True))
        chosen = rng.sample(uids_now, min(3, len(uids_now)))
        kind = rng.randrange(6)
        if kind < 2 or not chosen:
            await store.put_many([make_row(step, rng.choice("ab"), rng.choice(statuses[:3])) for _ in range(3)])
        elif kind == 2:
            await store.take(chosen[:2], train_step=rng.choice([None, step]))
        elif kind == 3:
            rows = await store.get({"uid": {"$in": chosen}})
            for row in rows:
                row.task_name, row.status = rng.choice("abc"), rng.choice(statuses[:3])
            await store.update(rows)
        elif kind == 4:
            await store.delete(chosen[:1])
        else:
            await store.evict(rng.randrange(5, 20))
        for task in "abc":
            for status in statuses:
                query = {"task_name": task, "status": status}
                assert await store.count(query) == len(await store.get(query, rows_only=True))
        for query in ({}, {"status": {"$in": ["failed", "archived"]}}, {"task_name": {"$gte": "b"}}):
            assert await store.count(query) == len(await store.get(query, rows_only=True)), query
        assert len(store) == await store.count({})
    store.load_state_dict(store.state_dict())
    assert len(store) == await store.count({}) == len(await store.get({}, rows_only=True))


async def test_a_read_that_failed_half_way_keeps_no_later_call_from_the_file(tmp_path):
    store = SQLStorage(tmp_path / "buffer.db")
    for number in range(20):
        await store.put(make_row(payload=[number]))
    with contextlib.closing(sqlite3.connect(tmp_path / "buffer.db")) as other:
        other.execute("UPDATE forebay_groups SET tags = '{no JSON' WHERE uid = 0")
        other.commit()
        # Kept, and with it the place where the rows were being read.
        with pytest.raises(ValueError, match=r"no JSON|Expecting|damaged") as kept:
            await store.get({}, limit=10, rows_only=True)
        other.execute("UPDATE forebay_groups SET tags = '{}' WHERE uid = 0")
        other.commit()
        await store.put(make_row(payload=[20]))
        assert await store.count({}) == 21
        assert len(await store.get({}, limit=30, rows_only=True)) == 21
    assert kept is not None
    store.close()


async def test_a_look_waits_for_no_write(store):
    """Reads have a thread of their own, and see the last commit."""
    await store.put(make_row("a"))
    held = Held(store)
    await held.begun()
    putting = asyncio.create_task(store.put(make_row("b")))
    assert await store.count({"task_name": "math", "status": "completed"}) == 1
    assert [row.item for row in await store.get({})] == ["a"]
    await held.let_go()
    await putting
    assert len(store) == 2


async def test_values_are_bound_and_never_written_into_a_statement(store):
    evil = "'; DROP TABLE forebay_groups; --"
    with statements() as sent:
        uid = await store.put(make_row(evil, evil, evil, tags={evil: evil}))
        query = {"task_name": evil, "status": {"$in": [evil, "x"]}, f"tags.{evil}": {"$gte": evil}}
        assert uids(await store.get(query, order="-staleness")) == [uid]
        assert await store.count({"$or": [{"status_before": evil}, {"task_name": {"$ne": evil}}]}) == 0
    assert sent
    assert not any("DROP" in text for text, _ in sent)


async def test_a_file_whose_trigger_counted_puts_counts_each_once(tmp_path):
    """Files of version 0.2.0 have it."""
    store = SQLStorage(tmp_path / "buffer.db")
    await store.put(make_row("a"))
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "buffer.db")) as file, file:
        file.execute(
            "CREATE TRIGGER forebay_added AFTER INSERT ON forebay_groups BEGIN "
            "INSERT INTO forebay_counts VALUES (new.task_name, new.status, 1) "
            "ON CONFLICT (task_name, status) DO UPDATE SET number = number + 1; END"
        )
    again = SQLStorage(tmp_path / "buffer.db")
    await again.put(make_row("b"))
    assert await again.count({}) == len(await again.get({})) == 2
    again.close()


def test_an_error_of_sqlite_is_one_of_sqlalchemy_and_undoes_the_transaction(tmp_path):
    store = SQLStorage(tmp_path / "buffer.db")

    def fail_late():
        with store._writing() as connection:
            connection.execute(schema.tasks.insert(), [{"task_name": "a"}, {"task_name": "b"}])
            connection.exec_driver_sql("SELECT * FROM nowhere")

    with pytest.raises(sa.exc.OperationalError, match="no such table: nowhere"):
        fail_late()
    names = sa.select(schema.tasks.c.task_name)
    with store._writing() as connection:
        assert connection.execute(names).fetchall() == []
        connection.execute(schema.tasks.insert(), [{"task_name": "a"}, {"task_name": "b"}, {"task_name": "c"}])
    # Values of the statement, one that is named, and two lists, of which one is named.
    name, wanted_names = schema.tasks.c.task_name, sa.bindparam("wanted", expanding=True)
    some = names.where(name.in_(wanted_names), name.in_(["a", "c"]))
    limited = some.where(schema.tasks.c.may_fall == sa.bindparam("may_fall")).order_by(name).limit(2)
    for wanted, found in ((["a", "b", "c"], "ac"), (["c"], "c"), (["b"], "")):
        with store._reading() as connection:
            lines = connection.execute(limited, {"wanted": wanted, "may_fall": 0})
            assert "".join(task for (task,) in lines) == found
    with pytest.raises(sa.exc.DBAPIError, match="may_fall"), store._reading() as connection:
        connection.execute(limited, {"wanted": ["a"]})
    store.close()
