"""Weights on their way to several engines: written or sent once, whole or not at all."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from forebay.engines.base import EngineLost
from forebay.engines.pool import EnginePool
from forebay.engines.weights.between_processes import SharedMemoryHandOver, WeightInbox
from forebay.io.shared import LentTensors
from forebay.models.starting_weights import AdaptersRefusedError


class Engine:
    """Keeps what it is given; a member of hand-overs whose messages go through no process border."""

    def __init__(self, *, uses: bool = False) -> None:
        """With `uses` it keeps no copy."""
        self.uses = uses
        self.begin()

    def begin(self) -> None:
        """A process begins."""
        self.lost = False
        self.handling: list[asyncio.Future[bool]] = []
        self.inbox = WeightInbox(EnginePool([self]))
        self.weights: dict[str, torch.Tensor] = {}
        self.model_step = -1
        self.num_messages = 0
        self.hold: asyncio.Event | None = None
        self.adapters: tuple[dict[str, torch.Tensor], int, Any] | None = None
        self.refuses = False
        self.latest: dict[str, Any] = {}

    def let_go(self) -> None:
        if self.hold is not None:
            self.hold.set()
            self.hold = None

    def die(self) -> None:
        """The process ends, with all that it had."""
        for handling in self.handling:
            handling.cancel()
        self.begin()
        self.lost = True

    async def send_weights(self, message: dict[str, Any]) -> bool:
        self.num_messages += 1
        self.latest = message
        if self.lost:
            raise EngineLost("gone")
        # As in a process of its own, which goes on where the caller gives up.
        handling = asyncio.ensure_future(self.inbox.handle(message))
        self.handling.append(handling)
        await asyncio.wait([handling])
        if handling.cancelled():
            raise EngineLost("gone")
        return handling.result()

    async def load_weights(self, weights: LentTensors, model_step: int) -> None:
        given = list(weights)
        if self.hold is not None:
            await self.hold.wait()
        self.weights, self.model_step = dict(given), model_step
        weights.are_in_use = self.uses
        if not self.uses:
            self.weights = {name: tensor.clone() for name, tensor in given}
        self.adapters = None

    async def load_adapters(
        self, adapters: Iterable[tuple[str, torch.Tensor]], model_step: int, *, config: Any
    ) -> None:
        if self.refuses:
            raise AdaptersRefusedError("of another kind")
        self.adapters, self.model_step = ({n: t.clone() for n, t in adapters}, model_step, config), model_step


def some_weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(f"layer.{i}", torch.randn(7, i + 1, generator=generator)) for i in range(4)]


def same(engine: Engine, weights: list[tuple[str, torch.Tensor]]) -> bool:
    return all(torch.equal(engine.weights[name], tensor) for name, tensor in weights)


@pytest.fixture
async def hand_over() -> Any:
    made = SharedMemoryHandOver()
    yield made
    made.close()


async def test_all_engines_get_the_weights_of_each_step(hand_over: Any) -> None:
    engines = [Engine(), Engine()]
    for _ in engines:
        hand_over.join()
    for step in range(3):
        weights = some_weights(step)
        await asyncio.gather(*(hand_over.load(engine.send_weights, weights, step) for engine in engines))
        assert [engine.model_step for engine in engines] == [step, step]
        assert all(same(engine, weights) for engine in engines)
    assert [engine.num_messages for engine in engines] == [3, 3]


def has_adapters(engine: Engine, adapters: list[tuple[str, torch.Tensor]], config: Any) -> bool:
    assert engine.adapters is not None
    given, _, told = engine.adapters
    return told == config and all(torch.equal(given[name], tensor) for name, tensor in adapters)


async def test_adapters_are_handed_over_with_their_config_and_leave_the_weights(hand_over: Any) -> None:
    engines = [Engine(), Engine()]
    for _ in engines:
        hand_over.join()
    weights = some_weights(0)
    await asyncio.gather(*(hand_over.load(engine.send_weights, weights, 0) for engine in engines))
    for step in (1, 2):
        adapters, config = some_weights(step)[:2], {"r": 4, "target_modules": ["a", "b"], "bias": None}
        await asyncio.gather(
            *(hand_over.load(engine.send_weights, adapters, step, adapters=config) for engine in engines)
        )
        assert [engine.model_step for engine in engines] == [step, step]
        assert all(has_adapters(engine, adapters, config) and same(engine, weights) for engine in engines)
    await asyncio.gather(*(hand_over.load(engine.send_weights, weights, 3) for engine in engines))
    assert [engine.adapters for engine in engines] == [None, None]


async def test_an_engine_that_begins_anew_gets_the_last_adapters_on_the_last_whole_weights() -> None:
    hand_over = SharedMemoryHandOver()
    weights, first, second = some_weights(0), some_weights(1)[:2], some_weights(2)[:2]
    engine, begun_anew, on_its_own = Engine(), Engine(), Engine()
    await hand_over.load(engine.send_weights, first, 1, adapters={"r": 1})
    # No whole weights were given: its own are the ones that the adapters are for.
    await hand_over.again(on_its_own.send_weights)
    assert (on_its_own.num_messages, on_its_own.weights) == (1, {})
    assert has_adapters(on_its_own, first, {"r": 1})
    await hand_over.load(engine.send_weights, weights, 0)
    await hand_over.load(engine.send_weights, second, 2, adapters={"r": 2})
    await hand_over.again(begun_anew.send_weights)
    assert same(begun_anew, weights)
    assert has_adapters(begun_anew, second, {"r": 2})
    assert begun_anew.model_step == 2
    # Whole weights end the adapters before them.
    await hand_over.load(engine.send_weights, some_weights(3), 3)
    await hand_over.again(begun_anew.send_weights)
    assert (begun_anew.model_step, begun_anew.adapters) == (3, None)
    hand_over.close()


async def test_refused_adapters_are_not_given_to_an_engine_that_begins_anew() -> None:
    hand_over = SharedMemoryHandOver()
    refusing, begun_anew = Engine(), Engine()
    weights = some_weights(0)
    await hand_over.load(refusing.send_weights, weights, 4)
    refusing.refuses = True
    with pytest.raises(AdaptersRefusedError):
        await hand_over.load(refusing.send_weights, some_weights(1)[:2], 5, adapters={"r": 1})
    await hand_over.again(begun_anew.send_weights)
    assert same(begun_anew, weights)
    assert (begun_anew.model_step, begun_anew.adapters) == (4, None)
    hand_over.close()


async def test_an_engine_that_begins_anew_and_refuses_what_others_have_is_lost() -> None:
    hand_over = SharedMemoryHandOver()
    engine, differs, begun_anew = Engine(), Engine(), Engine()
    adapters = some_weights(1)[:2]
    await hand_over.load(engine.send_weights, adapters, 1, adapters={"r": 1})
    differs.refuses = True
    with pytest.raises(EngineLost, match="adapters of step 1: of another kind"):
        await hand_over.again(differs.send_weights)
    # They are kept for those that can use them.
    await hand_over.again(begun_anew.send_weights)
    assert has_adapters(begun_anew, adapters, {"r": 1})
    hand_over.close()


async def test_a_lost_engine_does_not_cost_the_others_theirs() -> None:
    hand_over = SharedMemoryHandOver()
    engines = [Engine(), Engine()]
    engines[0].lost = True
    weights = some_weights(0)
    results = await asyncio.gather(
        *(hand_over.load(engine.send_weights, weights, 0) for engine in engines), return_exceptions=True
    )
    assert isinstance(results[0], EngineLost)
    assert same(engines[1], weights)
    engines[0].lost = False
    await hand_over.again(engines[0].send_weights)
    assert same(engines[0], weights)
    hand_over.close()


@pytest.mark.parametrize("given_up", [False, True])
async def test_an_engine_that_hangs_holds_nobody_up_and_its_memory_is_not_written_again(given_up: bool) -> None:
    hand_over = SharedMemoryHandOver()
    slow, other = Engine(), Engine()
    slow.hold = asyncio.Event()
    first = some_weights(0)
    reading = asyncio.create_task(hand_over.load(slow.send_weights, first, 0))
    while slow.num_messages == 0:
        await asyncio.sleep(0)
    handling = asyncio.create_task(slow.inbox.handle(slow.latest))
    if given_up:
        reading.cancel()
        await asyncio.wait([reading])
    for step in (1, 2):
        weights = some_weights(step)
        await hand_over.load(other.send_weights, weights, step)
        assert same(other, weights)
    slow.hold.set()
    await asyncio.gather(reading, return_exceptions=True)
    # It still had what was announced to it, if its sender is there; never a part of what came later.
    await handling
    assert same(slow, first)
    await hand_over.load(slow.send_weights, weights, 2)
    assert same(slow, weights)
    hand_over.close()


async def test_hand_overs_that_nobody_waits_for_do_not_mix() -> None:
    """Three at once, two of them given up at different moments: what arrives is whole and what was said."""
    hand_over = SharedMemoryHandOver()
    engines = [Engine() for _ in range(3)]
    given = [some_weights(step) for step in range(3)]
    loads = [asyncio.create_task(hand_over.load(engines[i].send_weights, given[i], i)) for i in range(3)]
    await asyncio.sleep(0)
    loads[0].cancel()
    await asyncio.sleep(0)
    loads[1].cancel()
    await asyncio.gather(*loads, return_exceptions=True)
    assert same(engines[2], given[2])
    await asyncio.gather(*(hand_over.load(engine.send_weights, given[2], 2) for engine in engines))
    assert all(same(engine, given[2]) for engine in engines)
    hand_over.close()


async def test_one_engine_that_leaves_takes_no_memory_from_the_others() -> None:
    hand_over = SharedMemoryHandOver()
    stays, leaves = Engine(), Engine()
    for _ in (stays, leaves):
        hand_over.join()
    first, second = some_weights(0), some_weights(1)
    await asyncio.gather(*(hand_over.load(engine.send_weights, first, 0) for engine in (stays, leaves)))
    hand_over.leave(leaves.send_weights)
    await hand_over.again(stays.send_weights)
    assert same(stays, first)
    # The descriptor of memory that was given back has a number that new memory gets: it is no other's.
    hand_over.close()
    await hand_over.load(stays.send_weights, second, 1)
    assert same(stays, second)
    hand_over.leave(stays.send_weights)


async def test_the_memory_goes_with_the_hand_over() -> None:
    hand_over = SharedMemoryHandOver()
    engine = Engine()
    before = set(os.listdir("/proc/self/fd"))
    await hand_over.load(engine.send_weights, some_weights(0), 0)
    hand_over.close()
    assert set(os.listdir("/proc/self/fd")) <= before


async def test_engines_that_use_the_memory_have_it_in_turns(hand_over: Any) -> None:
    engines, paths = [Engine(uses=True), Engine(uses=True)], []
    for step in range(5):
        weights = some_weights(step)
        await asyncio.gather(*(hand_over.load(engine.send_weights, weights, step) for engine in engines))
        assert all(same(engine, weights) for engine in engines)
        paths.append(engines[0].latest["path"])
    assert len(set(paths)) == 2
    assert all(one != other for one, other in pairwise(paths))
    # One that copies has no part in it: there is memory to spare, whatever it does.
    copies = Engine()
    await hand_over.again(copies.send_weights)
    assert same(copies, weights)
    # One that leaves holds nothing back.
    hand_over.join()
    hand_over.leave(engines[1].send_weights)
    await hand_over.load(engines[0].send_weights, some_weights(5), 5)
    await hand_over.load(engines[0].send_weights, some_weights(6), 6)
    assert {engines[0].latest["path"]} < set(paths)


@pytest.mark.parametrize("seed", range(300 if os.environ.get("FOREBAY_SOAK") == "1" else 20))
async def test_no_engine_ever_sees_weights_change_under_it(hand_over: Any, seed: int) -> None:
    """Hand-overs to some engines, given up, held up, lost and repeated: each has whole weights of one step."""
    random = np.random.default_rng(seed)
    engines = [Engine(uses=bool(random.random() < 0.7)) for _ in range(4)]
    given: dict[int, list[tuple[str, torch.Tensor]]] = {}
    loads: list[asyncio.Task[Any]] = []

    def all_are_whole() -> bool:
        return all(engine.model_step < 0 or same(engine, given[engine.model_step]) for engine in engines)

    for step in range(30):
        given[step] = some_weights(step)
        for engine in engines:
            match int(random.integers(6)):
                case 0 if engine.hold is None:
                    engine.hold = asyncio.Event()
                case 1:
                    engine.let_go()
                case 2 if not engine.lost:
                    engine.die()
                case 2:
                    hand_over.forget(engine.send_weights)
                    engine.begin()
            if random.random() < 0.7:
                loads.append(asyncio.create_task(hand_over.load(engine.send_weights, given[step], step)))
            elif random.random() < 0.3:
                loads.append(asyncio.create_task(hand_over.again(engine.send_weights)))
        if loads and random.random() < 0.3:
            loads[int(random.integers(len(loads)))].cancel()
        for _ in range(int(random.integers(8))):
            await asyncio.sleep(0.0005)
            assert all_are_whole()
    for engine in engines:
        engine.lost = False
        engine.let_go()
    await asyncio.gather(*loads, return_exceptions=True)
    assert all_are_whole()
    await asyncio.gather(*(hand_over.load(engine.send_weights, given[29], 29) for engine in engines))
    assert all(same(engine, given[29]) for engine in engines)
