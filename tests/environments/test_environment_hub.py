"""The hub, without workers and policies."""

import asyncio

import pytest

from forebay.environments.hub import Hub
from forebay.environments.messages import Orders, Report
from forebay.environments.sockets import SocketLink
from forebay.fragments import RateLimit, ReplayBufferActor


@pytest.fixture
async def buffer(tmp_path):
    buffer = ReplayBufferActor(
        max_chunks=8,
        max_staleness=1,
        max_reuse=1,
        database_config={"path": str(tmp_path / "store"), "max_bytes": 1 << 24},
        fragments_per_chunk=2,
        rate_limit=RateLimit(samples_per_insert=1.0, min_chunks=1, error_buffer=1.0),
    )
    yield buffer
    await buffer.close()


def report(worker="w", fid=None, version=0, episodes=()):
    fragment_id = None if fid is None else f"{worker}-{fid}"
    return Report(worker, version, fragment_id, fid or 0, version, 8, list(episodes))


async def test_workers_get_weights_they_do_not_have(buffer):
    hub = Hub(buffer, "run")
    first = asyncio.ensure_future(hub.answer(report(version=-1)))
    await asyncio.wait([first], timeout=0.02)
    assert not first.done()  # there are none yet
    await hub.publish(0, b"zero")
    assert await first == Orders(False, 0, b"zero")
    assert await hub.answer(report(fid=0, version=0)) == Orders(False, 0, b"")
    await hub.publish(1, b"one")
    assert await hub.answer(report(fid=1, version=0)) == Orders(False, 1, b"one")


async def test_the_account_counts_what_the_buffer_took(buffer):
    hub = Hub(buffer, "run")
    await hub.publish(0, b"zero")
    await hub.answer(report(fid=0, episodes=[(9.0, 9), (11.0, 11)]))
    assert (hub.num_steps, hub.num_episodes, list(hub.recent)) == (8, 2, [(9.0, 9), (11.0, 11)])
    other = Hub(buffer, "run")
    other.load(hub.counts())
    assert other.counts() == hub.counts()


async def test_who_is_too_far_ahead_waits_and_goes_on_with_newer_weights(buffer):
    hub = Hub(buffer, "run")
    await hub.publish(0, b"zero")
    for fid in range(3):
        await hub.answer(report(fid=fid))
    waiting = asyncio.ensure_future(hub.answer(report(fid=3)))
    await asyncio.wait([waiting], timeout=0.02)
    assert not waiting.done()
    assert hub.num_fragments("w") == 4  # taken, but the worker is not to begin the next one
    await hub.publish(1, b"one")
    await buffer.fetch_fragments(4)
    assert await waiting == Orders(False, 1, b"one")


async def test_nothing_of_a_forgotten_worker_reaches_the_buffer(buffer):
    hub = Hub(buffer, "run")
    await hub.publish(0, b"zero")
    await hub.answer(report(fid=0))
    assert (await buffer.metrics())["partial_fragments"] == 1
    await hub.forget("w")
    assert (await hub.answer(report(fid=1))).stop
    metrics = await buffer.metrics()
    assert (metrics["partial_fragments"], metrics["dropped/silent_worker"]) == (0, 1)


async def test_a_waiting_worker_can_be_forgotten(buffer):
    hub = Hub(buffer, "run")
    await hub.publish(0, b"zero")
    for fid in range(3):
        await hub.answer(report(fid=fid))
    waiting = asyncio.ensure_future(hub.answer(report(fid=3)))
    await asyncio.wait([waiting], timeout=0.02)
    await hub.forget("w")
    await waiting
    assert (await buffer.metrics())["waiting_additions"] == 0


async def test_the_end_reaches_those_who_wait_and_those_who_ask(buffer):
    hub = Hub(buffer, "run")
    await hub.publish(0, b"zero")
    for fid in range(3):
        await hub.answer(report(fid=fid))
    waiting = asyncio.ensure_future(hub.answer(report(fid=3)))
    await asyncio.sleep(0)
    hub.stop()
    await buffer.close()
    assert (await waiting).stop
    assert (await hub.answer(report("late", fid=0))).stop


async def test_a_socket_carries_reports_and_orders_and_tells_of_the_end(buffer):
    hub = Hub(buffer, "run")
    weights = bytes(range(256)) * 1000
    await hub.publish(3, weights)

    def ask(link):
        return link.report(report(version=-1))

    async with hub.listening():
        link = SocketLink(hub.address)
        assert await asyncio.to_thread(ask, link) == Orders(False, 3, weights)
    with link, pytest.raises(EOFError, match="the trainer is gone"):
        await asyncio.to_thread(ask, link)


async def test_a_hub_is_reachable_however_long_the_path_for_temporary_files(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    hub = Hub(buffer=None, session_id="run")
    async with hub.listening():
        _, writer = await asyncio.open_unix_connection(hub.address)
        writer.close()
        await writer.wait_closed()
