"""Two hosts with a slow, a lossy and a cut link between them: what crosses it, and what is said of a cut."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import numpy as np
import pytest

from forebay.io.address import Address
from forebay.replay import ConnectionLost, RemoteReplayBuffer
from forebay.replay.remote.link import BufferLink
from forebay.replay.remote.messages import TakeArguments
from forebay.types import RolloutState, Status
from two_hosts import Hosts, delayed
from two_hosts import two_hosts as two_hosts

COMPLETED = Status.COMPLETED
TOKEN = "a token of some length"
LIMIT_S = 3.0
"""Of silence, after which a peer is given up."""


def group(number: int, length: int = 4000) -> list[RolloutState]:
    """Two rollouts, which take several packets."""
    return [
        RolloutState(
            [],
            rollout_id=f"{number}.{member}",
            group_id=number,
            task_name="math",
            prompt_ids=np.arange(8),
            response_ids=np.full(length, number),
            logprobs=np.full(length, -0.5),
            response_model_steps=np.zeros(length),
            reward={"score": 1.0},
            status=COMPLETED,
        )
        for member in range(2)
    ]


def numbers(groups: list[list[RolloutState]]) -> list[int]:
    for each in groups:
        assert all((state.response_ids == each[0].group_id).all() for state in each)
    return sorted(int(each[0].group_id) for each in groups)


@pytest.fixture(name="address")
async def served_address(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Address]:
    """Of ``forebay buffer serve`` on host a; the test is on host b."""
    monkeypatch.setenv("FOREBAY_BUFFER_TOKEN", TOKEN)
    serve = ("-c", "from forebay.cli import main; main()", "buffer", "serve")
    place = f"tcp://{hosts.addresses['a']}:0"
    process = await asyncio.create_subprocess_exec(
        *hosts.command("a", sys.executable, *serve, place, "--policy", "fifo"), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode()
        assert line.startswith("listening on "), line
        with hosts.inside("b"):
            yield Address.parse(line.split()[-1])
    finally:
        process.kill()
        await process.communicate()


async def put_and_take(buffer: RemoteReplayBuffer, count: int) -> None:
    await asyncio.gather(*(buffer.put(group(number), "math") for number in range(count)))
    taken = await buffer.get(count // 2, "math", COMPLETED) + await buffer.get(count, "math", COMPLETED)
    assert numbers(taken) == list(range(count))
    assert await buffer.count("math", COMPLETED) == 0


async def test_groups_cross_a_slow_link(address: Address) -> None:
    async with (
        delayed(address.host, address.port, 0.1) as port,
        await RemoteReplayBuffer.connect(f"tcp://127.0.0.1:{port}", TOKEN, limit_s=60.0) as buffer,
    ):
        await put_and_take(buffer, 20)


async def test_groups_cross_a_link_that_loses_packets(hosts: Hosts, address: Address) -> None:
    async with await RemoteReplayBuffer.connect(str(address), TOKEN, limit_s=60.0) as buffer:
        hosts.lose(5)
        await put_and_take(buffer, 10)


@pytest.mark.parametrize("how", ["silent", "unplugged"])
async def test_a_cut_link_is_a_named_loss_and_what_was_not_confirmed_comes_back(
    how: str, hosts: Hosts, address: Address
) -> None:
    """Groups on their way to a consumer that the cut takes away are those of the next one, once."""
    buffer = await RemoteReplayBuffer.connect(str(address), TOKEN, limit_s=LIMIT_S)
    for number in range(4):
        await buffer.put(group(number), "math")
    consumer = await BufferLink.open(address, TOKEN, limit_s=LIMIT_S)
    # Taken and not confirmed.
    _, taken = await consumer.ask("take_batch", TakeArguments(b"consumer", {"math": 2}, COMPLETED, None))
    assert numbers(taken) == [0, 1]
    assert await buffer.count("math", COMPLETED) == 2
    hosts.lose(100) if how == "silent" else hosts.cut()
    with pytest.raises(ConnectionLost) as lost:
        await asyncio.wait_for(buffer.put(group(4), "math"), 300)
    assert f"{address} has been silent for {LIMIT_S:g} s" in str(lost.value)
    assert "whether put_groups has happened is not known" in str(lost.value)
    with pytest.raises(ConnectionLost, match=f"{address}.*silent for {LIMIT_S:g} s"):
        await consumer.ask("keep", {"key": b"consumer"})
    hosts.lose(0) if how == "silent" else hosts.heal()
    await consumer.close()
    # The same client goes on.
    seen = -1
    async with asyncio.timeout(300):
        while await buffer.count("math", COMPLETED) < 4:
            seen = await buffer.wait_for_change(seen)
    # The bytes of the put may have come once the link was back.
    found = numbers(await buffer.get(9, "math", COMPLETED))
    assert found in ([0, 1, 2, 3], [0, 1, 2, 3, 4])
    assert await buffer.count("math", COMPLETED) == 0
    await buffer.close()


async def test_puts_and_takes_outlive_cuts_once_each(hosts: Hosts, address: Address) -> None:
    """The link is cut and comes back while both sides work: shorter than the limit, and longer."""
    count, taken = 30, []
    async with (
        await RemoteReplayBuffer.connect(str(address), TOKEN, limit_s=2.0) as producer,
        await RemoteReplayBuffer.connect(str(address), TOKEN, limit_s=2.0) as consumer,
        asyncio.timeout(300),
    ):

        async def produce() -> None:
            for number in range(count):
                await producer.put(group(number), "math")

        async def consume() -> None:
            seen = 0
            while len(taken) < count:
                if found := await consumer.get(3, "math", COMPLETED):
                    taken.extend(found)
                else:
                    seen = await consumer.wait_for_change(seen)

        async def disturb() -> None:
            for silent_s in (0.3, 2.3):
                await asyncio.to_thread(hosts.lose, 100)
                # The link's own time, which a peer's patience is measured against.
                await asyncio.sleep(silent_s)
                await asyncio.to_thread(hosts.lose, 0)

        await asyncio.gather(produce(), consume(), disturb())
        assert numbers(taken) == list(range(count))
        assert await producer.count("math", COMPLETED) == 0
