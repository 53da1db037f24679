"""The hub, without workers and policies."""

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest
from environment_factory import pid_of, small_run

from forebay.environments.run import build_trainer
from forebay.environments.workers import hub as hub_module
from forebay.environments.workers.hub import Hub
from forebay.environments.workers.messages import Orders, Report, WorkerDied, WorkerSpec
from forebay.environments.workers.worker import HubLink
from forebay.environments.workers.worker_pool import ProcessWorkers, WorkerPool
from forebay.fragments import RateLimit, ReplayBufferActor
from forebay.io.address import Address, dial
from forebay.io.channel import Channel
from forebay.io.messages import Alive, Call, Note, encode_value


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
        link = await asyncio.to_thread(HubLink, hub.address, "w")
        assert await asyncio.to_thread(ask, link) == Orders(False, 3, weights)
    with pytest.raises(EOFError, match="the trainer is gone"):
        await asyncio.to_thread(ask, link)
    link.close()


async def test_a_hub_is_reachable_however_long_the_path_for_temporary_files(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    hub = Hub(buffer=None, session_id="run")
    async with hub.listening():
        _, writer = await asyncio.open_unix_connection(hub.address)
        writer.close()
        await writer.wait_closed()


def test_a_worker_gives_up_a_trainer_that_is_frozen(tmp_path):
    # What a stopped process leaves to its clients: the kernel lets them connect and send.
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(tmp_path / "hub"))
        frozen.listen()
        link = HubLink(str(tmp_path / "hub"), "w", limit_s=0.05)
        with pytest.raises(EOFError, match=r"the trainer is gone: it has been silent for 0\.05 s"):
            link.report(report(version=-1))
        link.close()


async def test_a_worker_that_waits_hears_that_its_trainer_lives(buffer):
    hub = Hub(buffer, "run", limit_s=0.04)
    async with hub.listening():
        channel = await connect(hub)
        await channel.send(Call(1, "report", encode_value(report(version=-1))))
        messages = [(await channel.receive())[0] for _ in range(2)]
        assert [type(message) for message in messages] == [Alive, Alive]
        channel.close()


async def connect(hub):
    channel = Channel(await dial(Address(Path(hub.address))))
    await channel.send(Note(encode_value("w")))
    return channel


async def forever():
    await asyncio.get_running_loop().create_future()


async def test_a_worker_that_does_not_connect_is_lost(monkeypatch):
    monkeypatch.setattr(hub_module, "START_LIMIT_S", 0.01)
    hub = Hub(buffer=None, session_id="run")
    with pytest.raises(WorkerDied, match=r"did not connect to its trainer within 0\.01 s"):
        await hub.while_heard("w", forever())


@pytest.mark.parametrize("end", ["silence", "close", "hanging environment"])
async def test_a_worker_without_a_sign_of_life_is_lost(monkeypatch, end):
    hub = Hub(buffer=None, session_id="run", limit_s=0.04)
    async with hub.listening():
        living = asyncio.ensure_future(hub.while_heard("w", forever()))
        reason = r"no sign of life for 0\.04 s"
        if end == "hanging environment":
            monkeypatch.setattr(hub_module, "WORK_LIMIT_S", 0.5)
            link = await asyncio.to_thread(HubLink, hub.address, "w", limit_s=0.04)
            reason = r"has worked for 0\.5 s without a report"
            await asyncio.wait([living])
            link.close()
        else:
            channel = await connect(hub)
            if end == "close":
                channel.end()
                reason = r"closed its connection and did not end within 0\.04 s"
            await asyncio.wait([living])
            channel.close()
        with pytest.raises(WorkerDied, match=reason):
            await living


class Watched(ProcessWorkers):
    """Knows the process of the worker that it started last."""

    async def run(self, spec, hub):
        self.uuid = spec.worker_uuid
        await super().run(spec, hub)


async def test_a_frozen_worker_is_replaced_and_counted(tmp_path):
    config = small_run(tmp_path)
    database = {"path": str(tmp_path / "store"), "max_bytes": 1 << 24}
    buffer = ReplayBufferActor(database_config=database, **config.buffer_settings())
    # Long enough for a busy machine; a healthy worker that is replaced as well spoils nothing here.
    hub = Hub(buffer, "run", limit_s=2.0)
    mode = Watched()

    def make_spec(worker_uuid, seed):
        return WorkerSpec(
            worker_uuid=worker_uuid,
            environment=config.environment,
            policy=config.policy.model_dump(),
            length=config.fragments.length,
            database_config=database,
            session_id="run",
            seed=seed,
            limit_s=2.0,
        )

    pool = WorkerPool(hub, mode, make_spec=make_spec, seed=0)
    await hub.publish(0, build_trainer(config).policy.weights())
    async with hub.listening(), asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(pool.keep(0))
        batch = await buffer.fetch_fragments(1)
        frozen = mode.uuid
        os.kill(pid_of(frozen), signal.SIGSTOP)
        while mode.uuid == frozen or not hub.num_fragments(mode.uuid):
            await buffer.release(batch.lease)
            batch = await buffer.fetch_fragments(1)
        assert pool.num_restarts >= 1
        with pytest.raises(AssertionError, match="no process"):
            pid_of(frozen)
        hub.stop()
        await buffer.close()
        await keeping
