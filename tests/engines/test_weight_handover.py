"""Weights on their way to several engines: written or sent once, whole or not at all."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from forebay.engines.base import EngineLost
from forebay.engines.weight_handover import BroadcastHandOver, SharedMemoryHandOver, WeightInbox
from forebay.engines.weight_layout import WeightsCorruptError


class Engine:
    """Keeps what it is given; a member of hand-overs whose messages go through no process border."""

    def __init__(self) -> None:
        self.inbox = WeightInbox(self)
        self.weights: dict[str, torch.Tensor] = {}
        self.model_step = -1
        self.num_messages = 0
        self.hold: asyncio.Event | None = None
        self.lost = False

    async def send_weights(self, message: dict[str, Any]) -> None:
        self.num_messages += 1
        if self.lost:
            raise EngineLost("gone")
        await self.inbox.handle(message)

    async def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], model_step: int) -> None:
        given = list(weights)
        if self.hold is not None:
            await self.hold.wait()
        self.weights, self.model_step = {name: tensor.clone() for name, tensor in given}, model_step


def some_weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(f"layer.{i}", torch.randn(7, i + 1, generator=generator)) for i in range(4)]


def same(engine: Engine, weights: list[tuple[str, torch.Tensor]]) -> bool:
    return all(torch.equal(engine.weights[name], tensor) for name, tensor in weights)


@pytest.fixture(params=["memory", "broadcast"])
async def hand_over(request: pytest.FixtureRequest) -> Any:
    kind = SharedMemoryHandOver if request.param == "memory" else BroadcastHandOver
    made = kind(checksum=True)
    yield made
    made.close()


async def test_all_engines_get_the_weights_of_each_step(hand_over: Any) -> None:
    engines = [Engine(), Engine()]
    for engine in engines:
        hand_over.join(engine)
    for step in range(3):
        weights = some_weights(step)
        await asyncio.gather(*(hand_over.load(engine, weights, step) for engine in engines))
        assert [engine.model_step for engine in engines] == [step, step]
        assert all(same(engine, weights) for engine in engines)
    assert [engine.num_messages for engine in engines] == [3, 3]


async def test_a_lost_engine_does_not_cost_the_others_theirs() -> None:
    hand_over = SharedMemoryHandOver()
    engines = [Engine(), Engine()]
    engines[0].lost = True
    weights = some_weights(0)
    results = await asyncio.gather(
        *(hand_over.load(engine, weights, 0) for engine in engines), return_exceptions=True
    )
    assert isinstance(results[0], EngineLost)
    assert same(engines[1], weights)
    engines[0].lost = False
    await hand_over.again(engines[0])
    assert same(engines[0], weights)
    hand_over.close()


async def test_after_a_lost_member_the_next_broadcast_goes_to_those_left() -> None:
    hand_over = BroadcastHandOver(timeout_s=2)
    engines = [Engine(), Engine()]
    for engine in engines:
        hand_over.join(engine)
    engines[0].lost = True
    first, second = some_weights(0), some_weights(1)
    results = await asyncio.gather(
        *(hand_over.load(engine, first, 0) for engine in engines), return_exceptions=True
    )
    assert isinstance(results[0], EngineLost)
    assert isinstance(results[1], Exception)
    assert engines[1].model_step == -1
    hand_over.leave(engines[0])
    await hand_over.load(engines[1], second, 1)
    assert same(engines[1], second)
    hand_over.close()


async def test_memory_is_not_written_again_while_an_engine_reads_it() -> None:
    hand_over = SharedMemoryHandOver()
    slow = Engine()
    slow.hold = asyncio.Event()
    first, second = some_weights(0), some_weights(1)
    reading = asyncio.create_task(hand_over.load(slow, first, 0))
    while slow.num_messages == 0:
        await asyncio.sleep(0)
    other = Engine()
    writing = asyncio.create_task(hand_over.load(other, second, 1))
    await asyncio.sleep(0.05)
    assert other.num_messages == 0
    slow.hold.set()
    await asyncio.gather(reading, writing)
    assert same(slow, first)
    assert same(other, second)
    hand_over.close()


async def test_a_torn_copy_is_refused_and_the_old_weights_stay() -> None:
    hand_over = SharedMemoryHandOver(checksum=True)
    engine = Engine()
    weights = some_weights(0)
    await hand_over.load(engine, weights, 0)
    sent: list[dict[str, Any]] = []

    class Tearing(Engine):
        async def send_weights(self, message: dict[str, Any]) -> None:
            sent.append(message)
            torch.from_file(message["path"], shared=True, size=8, dtype=torch.uint8)[3] += 1
            await engine.inbox.handle(message)

    with pytest.raises(WeightsCorruptError, match=r"layer\.0"):
        await hand_over.load(Tearing(), some_weights(1), 1)
    assert engine.model_step == 0
    assert same(engine, weights)
    hand_over.close()


async def test_the_memory_goes_with_the_hand_over() -> None:
    hand_over = SharedMemoryHandOver()
    engine = Engine()
    before = set(os.listdir("/proc/self/fd"))
    await hand_over.load(engine, some_weights(0), 0)
    hand_over.close()
    assert set(os.listdir("/proc/self/fd")) <= before
