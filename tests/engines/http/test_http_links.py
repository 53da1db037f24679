"""An inference server on another host, with a link between that is slow, loses packets, or is cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from forebay.engines.base import EngineLost
from forebay.engines.servers.engine import HTTPEngine
from two_hosts import Hosts, delayed
from two_hosts import two_hosts as two_hosts

WEIGHTS = [("weight", torch.zeros(2))]


@pytest.fixture(name="server")
async def server_on_a(start_fake: Any, hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """The server is on host a, and the test on host b; both see the folder of weights."""
    vllm = await start_fake()
    await vllm.stop()
    place = hosts.addresses["a"]
    with hosts.inside("a"):
        vllm._server = await asyncio.start_server(vllm._serve, place, 0)
    vllm.port = vllm._server.sockets[0].getsockname()[1]
    monkeypatch.setattr(type(vllm), "url", property(lambda self: f"http://{place}:{self.port}"))
    for name, limit_s in (("_HEALTH_EVERY_S", 0.2), ("_HEALTH_LIMIT_S", 2.0), ("CONTROL_LIMIT_S", 2.0)):
        monkeypatch.setattr(f"forebay.engines.servers.link.{name}", limit_s)
    with hosts.inside("b"):
        yield vllm


@pytest.mark.parametrize("how", ["silent", "unplugged"])
async def test_a_cut_link_is_a_named_loss_and_the_server_is_used_again(
    how: str, server: Any, hosts: Hosts, connect: Callable[..., HTTPEngine], ask: Any
) -> None:
    engine = connect(server)
    await engine.bring_up()
    await engine.load_weights(WEIGHTS, 1)
    server.auto = False
    running = asyncio.create_task(engine.generate(ask(max_tokens=50)))
    await server.has_jobs(1)
    server.make(1)
    while not engine.num_made("r0"):
        await asyncio.sleep(0)
    hosts.lose(100) if how == "silent" else hosts.cut()
    async with asyncio.timeout(300):
        completion = await running
        # Its token is kept, for the engine that goes on with it.
        assert (completion.lost, completion.response_ids.tolist()) == (True, [11])
        assert server.url in completion.error_msg
        with pytest.raises(EngineLost, match=server.url):
            await engine.load_weights(WEIGHTS, 2)
    hosts.lose(0) if how == "silent" else hosts.heal()
    server.auto = True
    async with asyncio.timeout(300):
        await engine.bring_up()
        again = await engine.generate(ask())
    # With the weights that it missed.
    assert again.response_ids.tolist() == [12] * 4


async def test_a_link_that_falls_silent_over_a_load_is_noticed_although_no_request_runs(
    server: Any, hosts: Hosts, connect: Callable[..., HTTPEngine], ask: Any
) -> None:
    engine = connect(server)
    await engine.bring_up()
    server.stuck = asyncio.Event()
    loading = asyncio.create_task(engine.load_weights(WEIGHTS, 1))
    # A load that takes long is none: the server answers meanwhile.
    await asyncio.sleep(1)
    assert not loading.done()
    hosts.lose(100)
    async with asyncio.timeout(300):
        with pytest.raises(EngineLost, match=f"{server.url}: it does not answer any more"):
            await loading
    hosts.lose(0)
    server.stuck.set()
    async with asyncio.timeout(300):
        await engine.bring_up()
        assert (await engine.generate(ask())).response_ids.tolist() == [11] * 4


async def test_requests_and_weights_cross_a_slow_and_lossy_link(
    server: Any, hosts: Hosts, connect: Callable[..., HTTPEngine], ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_HEALTH_LIMIT_S", "CONTROL_LIMIT_S"):
        monkeypatch.setattr(f"forebay.engines.servers.link.{name}", 200.0)
    hosts.lose(5)
    async with delayed(hosts.addresses["a"], server.port, 0.05) as port:
        monkeypatch.setattr(type(server), "url", property(lambda _: f"http://127.0.0.1:{port}"))
        engine = connect(server)
        await engine.bring_up()
        for step in (1, 2):
            await engine.load_weights(WEIGHTS, step)
            found = await asyncio.gather(*(engine.generate(ask()) for _ in range(4)))
            assert [each.response_ids.tolist() for each in found] == [[10 + step] * 4] * 4
        await engine.close()
