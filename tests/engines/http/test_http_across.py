"""Weights that are sent to servers which map no memory of the trainer: real processes, over gloo."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.config import Component, ConfigError
from forebay.engines import EngineSurroundings, RolloutController, build_engines
from forebay.engines.base import EngineLost
from forebay.engines.servers.engine import HTTPEngine
from forebay.io.shared import views
from forebay.models import ModelConfig, load_tokenizer
from forebay.models.config import TinyConfig
from forebay.models.live_weights import LiveWeights
from forebay.models.tiny import write_tiny
from two_hosts import Hosts
from two_hosts import two_hosts as two_hosts

LARGE = 80 << 20
"""Bytes of a weight: one slice, and more than the buffers of a connection hold."""
SLICES = 3
"""Of a hand-over: two of that weight, one of another."""


class Source:
    """Weights that differ from step to step: a large and a small one."""

    def __init__(self) -> None:
        self.step = 0
        self.live = LiveWeights(self, None, threading.Lock(), lambda: self.step)

    def sizes(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "large", torch.empty(LARGE, dtype=torch.uint8, device="meta")
        yield "small", torch.empty(3, 2, dtype=torch.bfloat16, device="meta")

    def copy_weights(self, layout: Any, memory: Any) -> None:
        for name, place in views(layout, memory.data):
            place.copy_(self.weight(name))

    def weight(self, name: str) -> torch.Tensor:
        if name == "small":
            return torch.arange(6).view(3, 2).bfloat16() * self.step
        # The first is the step, by which scripted servers name their tokens.
        large = (torch.arange(251, dtype=torch.uint8) + self.step).repeat(LARGE // 251 + 1)[:LARGE]
        large[0] = self.step
        return large


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.engines.pool._TRY_AGAIN_S", 0.01)


@pytest.fixture
async def servers(start_fake: Any, fake_kinds: Any) -> list[Any]:
    return [await start_fake(fake_kinds["FarVLLM"]) for _ in range(2)]


@pytest.fixture
async def controller(servers: list[Any], connect: Any) -> AsyncIterator[RolloutController]:
    engines = [connect(server, bucket_device="cpu", sender_device="cpu") for server in servers]
    controller = RolloutController(engines)
    yield controller
    await controller.close()


async def hand_over(source: Source, controller: Any) -> None:
    source.step += 1
    await controller.update_weights(source.live, source.step)


def assert_has(server: Any, source: Source) -> None:
    assert f"step_{source.step:06d}" in server.version
    assert all(torch.equal(server.received[name], source.weight(name)) for name in ("large", "small"))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def all_have(source: Source, controller: Any, servers: list[Any]) -> None:
    """Hand over; a server that comes up meanwhile has the weights when it is up."""
    await hand_over(source, controller)
    await until(lambda: len(controller.engines_up) == len(servers))
    for server in servers:
        assert_has(server, source)


@pytest.mark.soak
@pytest.mark.parametrize("fatal", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_worker_that_fails_within_a_bucket_costs_its_server_and_no_other(
    source, servers, controller, monkeypatch, ask, fatal
):
    failing, other = servers
    # It takes the slices of the first hand-over, and one of the second.
    await failing.start_workers(fatal, SLICES + 1)
    await all_have(source, controller, servers)
    first, second = (engine._weights.sender._process for engine in controller.engines)
    lost: list[str] = []
    lose = controller.engines[0]._lose
    controller.engines[0]._lose = lambda why: (lost.append(why), lose(why))
    if fatal == signal.SIGSTOP:
        monkeypatch.setattr("forebay.engines.servers.link.CONTROL_LIMIT_S", 20.0)
    source.step += 1
    syncing = asyncio.create_task(controller.update_weights(source.live, source.step))
    await until(lambda: f"step_{source.step:06d}" in other.version and other.state == "running")
    completion = await controller.engines[1].generate(ask(max_tokens=1))
    assert completion.model_steps.tolist() == [source.step]
    assert_has(other, source)
    await syncing
    reason = "Disconnected" if fatal == signal.SIGKILL else "/update_weights was not answered within 20 s"
    assert lost[0].startswith(failing.url)
    assert reason in lost[0]
    await first.wait()
    monkeypatch.undo()
    if fatal == signal.SIGKILL:
        await failing.kill()
        await failing.start()
    else:
        failing.workers[0].send_signal(signal.SIGCONT)
    await until(lambda: len(controller.engines_up) == 2)
    assert_has(failing, source)
    await all_have(source, controller, servers)
    assert controller.engines[1]._weights.sender._process is second, "the other kept its group"


async def test_a_server_whose_workers_were_started_anew_is_lost_once_and_gets_a_sender_of_its_own(
    source, servers, controller
):
    await all_have(source, controller, servers)
    await servers[0].start_workers()
    await all_have(source, controller, servers)
    assert controller.counts()["engine_restarts"] == 1


async def test_without_nccl_weights_go_by_gloo_and_the_log_says_so(source, servers, connect, caplog):
    # The worker has no GPU, whatever this machine has.
    servers[0].device = "cuda"
    engine = connect(servers[0], bucket_device="cpu", sender_device="cuda:0")
    source.step += 1
    await engine.bring_up()
    with pytest.raises(EngineLost, match=f"{servers[0].url}: /init_weight_transfer_engine was answered 500"):
        await engine.load_weights(source.live, source.step)
    await engine.bring_up()
    assert_has(servers[0], source)
    assert f"no weights got to {servers[0].url} by NCCL" in caplog.text


async def test_weights_cross_to_another_host_and_a_cut_link_is_a_named_loss(
    source, hosts: Hosts, start_fake, fake_kinds, connect, monkeypatch
):
    server, place = await start_fake(fake_kinds["FarVLLM"]), hosts.addresses["a"]

    async def start_anew() -> None:
        await server.stop()
        server._reset()
        with hosts.inside("a"):
            server._server = await asyncio.start_server(server._serve, place, server.port)
        await server.start_workers()

    server.inside = hosts.command("a")
    await start_anew()
    monkeypatch.setattr(type(server), "url", property(lambda self: f"http://{place}:{self.port}"))
    with hosts.inside("b"):
        engine = connect(server, bucket_device="cpu", sender_device="cpu")
        await engine.bring_up()
        source.step += 1
        await engine.load_weights(source.live, source.step)
        assert_has(server, source)
        assert engine._weights.sender._place["host"] == hosts.addresses["b"]
        source.step += 1
        # Within the next bucket.
        told = server.ask_workers

        async def cut(path: str, body: Any) -> str | None:
            if path == "/update_weights":
                hosts.cut()
            return await told(path, body)

        monkeypatch.setattr(server, "ask_workers", cut)
        monkeypatch.setattr("forebay.engines.servers.link.CONTROL_LIMIT_S", 10.0)
        with pytest.raises(EngineLost, match=f"{server.url}: /update_weights was not answered within 10 s"):
            await engine.load_weights(source.live, source.step)
        monkeypatch.setattr("forebay.engines.servers.link.CONTROL_LIMIT_S", 100.0)
        monkeypatch.setattr(server, "ask_workers", told)
        # It would wait for the rest of the bucket, until the limit of its group.
        await start_anew()
        hosts.heal()
        await engine.bring_up()
        assert_has(server, source)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny(folder, TinyConfig(), max_context=64, seed=0)
    return folder


async def build(tiny: Path, scratch: Path, *servers: Any, **arguments: Any) -> list[Any]:
    surroundings = EngineSurroundings(
        model_folder=tiny,
        model=ModelConfig(source=str(tiny), max_context=48),
        tokenizer=load_tokenizer(tiny),
        scratch=scratch,
    )
    config = Component(name="vllm", arguments={"urls": [server.url for server in servers], **arguments})
    return await asyncio.to_thread(build_engines, config, surroundings)


def is_sent(engine: HTTPEngine) -> bool:
    return engine._files.bucket_device == engine._weights.sender.device == "cpu"


async def test_weights_are_sent_where_all_servers_have_the_plugin_and_no_folder_is_named(
    tiny, tmp_path, servers, start_fake, fake_kinds, caplog, monkeypatch
):
    engines = await build(tiny, tmp_path, *servers)
    assert all(map(is_sent, engines))
    assert not any(map(is_sent, await build(tiny, tmp_path, *servers, weights_folder=str(tmp_path))))
    servers[1].has_plugin = False
    assert not caplog.records
    assert not any(map(is_sent, await build(tiny, tmp_path, *servers)))
    assert [record.getMessage() for record in caplog.records] == [
        f"all servers get weights in files, since {servers[1].url} lacks Forebay's plug-in"
    ]
    with pytest.raises(ValueError, match=f"start {servers[1].url} with Forebay's plug-in"):
        await asyncio.to_thread(engines[0].another, servers[1].url)
    plain = await start_fake(fake_kinds["FakeVLLM"])
    by_files = await build(tiny, tmp_path, plain)
    assert not any(map(is_sent, by_files))
    monkeypatch.setattr("forebay.engines.servers.build.is_loopback", lambda host: False)
    with pytest.raises(ConfigError, match=f"set weights_folder to .*, or start {plain.url} with Forebay's plug-in"):
        await build(tiny, tmp_path, servers[0], plain)
    assert all(map(is_sent, await build(tiny, tmp_path, servers[0])))
    # One with the plug-in that joins those that take files of this machine.
    with pytest.raises(ConfigError, match=r"set weights_folder to .*, or start the first ones with Forebay's plug-in"):
        await asyncio.to_thread(by_files[0].another, servers[0].url)
