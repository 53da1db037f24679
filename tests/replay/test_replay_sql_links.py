"""A PostgreSQL that does not answer: no caller waits for it for ever, and every caller can be cancelled."""

import asyncio
import os
import signal
import threading

import pytest
import sqlalchemy as sa
from replay_factory import make_row

from forebay.replay import SQLStorage
from forebay.replay.stores.sql import postgres
from forebay.replay.stores.sql import worker as sql_worker


@pytest.fixture
def store(postgres_url):
    opened = SQLStorage(postgres_url)
    yield opened
    opened.close()


@pytest.fixture
def freeze(postgres_server):
    """Stops the processes that serve the store; at the end they go on, and are waited for."""
    server = sa.create_engine(
        postgres_server.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT"
    )
    others = "FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
    frozen = []

    def stop():
        with server.connect() as connection:
            frozen.extend(connection.scalars(sa.text(f"SELECT pid {others}")))
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)

    def go_on():
        while frozen:
            os.kill(frozen.pop(), signal.SIGCONT)

    stop.go_on = go_on
    yield stop
    go_on()
    server.dispose()


# A call for each server that is frozen: the next call would connect anew, and the new connection answers.
@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.count({}),
        lambda store: store.get({}),
        lambda store: store.put(make_row("c")),
        lambda store: store.take([0], train_step=1),
    ],
    ids=["count", "get", "put", "take"],
)
async def test_a_caller_of_a_frozen_server_can_be_cancelled(store, freeze, call, monkeypatch):
    monkeypatch.setattr(sql_worker, "GRACE_S", 0.02)
    await store.put(make_row("a"))
    await asyncio.gather(store.count({}), store.put(make_row("b")))
    for _ in range(5):
        freeze()
        calling = asyncio.create_task(call(store))
        await asyncio.sleep(0.01)
        if calling.cancel():
            break
        # It had to connect anew, and what connects after the freezing is served: now it is connected.
        freeze.go_on()
        await store.restore(0)
    with pytest.raises(asyncio.CancelledError):
        await calling
    freeze.go_on()
    # The store connects anew. Of a put that was cut off nobody knows; a take comes back.
    assert [row.item for row in await store.get({})][:2] == ["a", "b"]
    assert await store.count({"status": "archived"}) == 0


@pytest.mark.parametrize("train_step", [None, 3])
async def test_a_take_whose_commit_got_no_answer_comes_back(store, train_step, monkeypatch):
    await store.put_many([make_row("a"), make_row("b")])
    dialect = store._engine.dialect
    commit = dialect.do_commit

    def lose_the_answer(connection):
        monkeypatch.undo()
        commit(connection)
        connection.dbapi_connection.close()
        connection.execute("SELECT 1")

    monkeypatch.setattr(dialect, "do_commit", lose_the_answer)
    with pytest.raises(sa.exc.OperationalError):
        await store.take([0], train_step=train_step)
    assert [row.item for row in await store.get({})] == ["a", "b"]
    assert await store.count({"status": "archived"}) == 0


async def test_a_server_that_is_silent_for_too_long_is_lost(store, freeze, monkeypatch):
    await asyncio.gather(store.count({}), store.put(make_row("a")))
    for _ in range(5):
        freeze()
        with monkeypatch.context() as patched:
            patched.setattr(postgres, "SILENT_S", 0.05)
            calls = store.put(make_row("b")), store.count({})
            put, counted = await asyncio.gather(*calls, return_exceptions=True)
        if isinstance(put, sa.exc.OperationalError):
            break
        # It had to connect anew, and what connects after the freezing is served: now it is connected.
        freeze.go_on()
    assert isinstance(put, sa.exc.OperationalError)
    # A count that began only after the put had failed has a new connection, and its answer.
    assert isinstance(counted, sa.exc.OperationalError) or counted == 1
    freeze.go_on()
    assert [row.item for row in await store.take_first(1, {})] == ["a"], "it connects anew"


async def test_what_a_caller_left_is_undone_by_the_thread(store, monkeypatch):
    """The thread may be in a place that nobody can cut off: connecting, say."""
    monkeypatch.setattr(sql_worker, "GRACE_S", 0.01)
    monkeypatch.setattr(sql_worker, "CUT_S", 0.01)
    go_on, begun = threading.Event(), threading.Event()
    undone = []

    def work():
        begun.set()
        assert go_on.wait(timeout=300)
        return "result"

    calling = asyncio.create_task(store._worker.call(work, undo=undone.append))
    await asyncio.to_thread(begun.wait)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert undone == []
    go_on.set()
    # The thread does one thing after the other.
    assert await store.put(make_row("a")) == 0
    assert undone == ["result"]


async def test_a_partition_is_noticed_by_the_link_and_a_long_statement_by_the_server(store):
    with store._reading() as connection:
        parameters = connection.connection.dbapi_connection.info.get_parameters()
        for name, value in postgres.LINK.items():
            assert parameters[name] == str(value)
        assert connection.scalar(sa.text("SHOW statement_timeout")) == "50s"
        assert postgres.STATEMENT_S < postgres.SILENT_S


def test_limits_that_the_url_names_stand(postgres_url):
    store = SQLStorage(f"{postgres_url}%20-cstatement_timeout%3D7000&connect_timeout=3")
    with store._reading() as connection:
        assert connection.scalar(sa.text("SHOW statement_timeout")) == "7s"
        assert connection.connection.dbapi_connection.info.get_parameters()["connect_timeout"] == "3"
    store.close()
