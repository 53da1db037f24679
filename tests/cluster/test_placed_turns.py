"""Engines' processes and their servers on GPUs of ranks: who sleeps when, whatever ends; virtual time, no Ray."""

import asyncio
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_supervised_parts import Actor, exceptions, kill  # noqa: F401  (a fixture that each test has)
from test_turns import BOTH, SHARED, Server, World

from forebay.aio import virtual_time
from forebay.cluster.calls import built
from forebay.cluster.engines import EngineActor, PlacedEngine
from forebay.cluster.library import Published
from forebay.cluster.workers import ClusterController, Workers
from forebay.engines.base import EngineLost, WeightsGone
from forebay.engines.pool import EnginePool

METHODS = ("pause", "resume", "load_weights", "sleep", "wake")


class OwnServer(Server):
    """One that ends with the process that started it."""

    has_ended = False

    def take(self, *parts):
        if self.has_ended:
            raise EngineLost("its process has ended")
        super().take(*parts)

    async def bring_up(self):
        while self.world.are_gone and not self.has_ended:
            # It is there, and waits for them.
            self.take(*BOTH)
            await asyncio.sleep(1.0)
        await super().bring_up()


class OwnEngine(EngineActor):
    """It takes weights of which there is nothing but their step."""

    async def load_weights(self, weights, model_step, adapters=None):
        if self.world.are_gone:
            built(self._pool)._start()
            raise WeightsGone("the trainer ended")
        try:
            await built(self._pool).update_weights([], model_step)
        except EngineLost as error:
            self._lose(error)
            raise
        self._has_weights = True
        if not built(self._pool).is_paused:
            self._serving.set()


class Process(Actor):
    """An engine's actor on the first GPU, whose process takes `start_s` to be there again."""

    def __init__(self, world, number, start_s):
        self.world, self.number, self.start_s = world, number, start_s
        super().__init__(start=self._start, generate=None, **{name: partial(self._call, name) for name in METHODS})
        self._begin()

    def _begin(self):
        self.engine, self.server = OwnEngine(), OwnServer(self.world, SHARED, start_s=self.start_s)
        self.engine.world, self.world.servers[self.number] = self.world, self.server

    def kill(self, **how):
        self.server.has_ended = self.server.is_away = True
        self.server.holds.clear()
        super().kill(**how)
        self._begin()

    async def _start(self, spec):
        await self._in_process(asyncio.sleep(self.start_s))
        if self.engine._pool is None:
            self.engine._pool = EnginePool([self.server])
        return self.pid

    async def _call(self, name, *arguments):
        # On its way there and back other things happen.
        await self._in_process(asyncio.sleep(0.1))
        result = await self._in_process(getattr(self.engine, name)(*arguments))
        await self._in_process(asyncio.sleep(0.1))
        return result

    async def _in_process(self, work):
        call, end = asyncio.ensure_future(work), self._end
        await asyncio.wait([call, end], return_when=asyncio.FIRST_COMPLETED)
        if end.done():
            call.cancel()
            raise exceptions.ActorDiedError
        return call.result()


class PlacedWorld(World):
    are_gone = False
    """The weights, with the trainer that gave them."""

    def __init__(self, starts_s):
        super().__init__([0], [SHARED] * len(starts_s))
        self.engines = [PlacedEngine(SimpleNamespace(name=f"engine {number}")) for number in range(len(starts_s))]
        for number, (engine, start_s) in enumerate(zip(self.engines, starts_s, strict=True)):
            process = Process(self, number, start_s)
            process.engine._pool = EnginePool([process.server])
            engine.begin(process, process.pid)
            engine.sleeps = True
        self.pool = self.turns.controller = ClusterController(self.engines, Workers([]), None)

    async def sync(self):
        await self.turns.leave()
        await self.pool.update_weights(Published(None, self.step), self.step)
        self.is_dropped = False


async def later(end):
    await asyncio.sleep(0.1)
    end()


KINDS = ("train", "drop", "sync", "generate", "pause", "continue", "kill", "kill soon", "lose", "wait")


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(KINDS), max_size=16), st.randoms(use_true_random=False))
@example(["generate", "train", "kill", "wait", "generate"], SimpleNamespace(choice=lambda among: among[-1]))
@example(["generate", "kill", "train", "kill soon", "train"], SimpleNamespace(choice=lambda among: among[-1]))
def test_no_rank_trains_beside_servers_whatever_process_ends_and_all_serve_in_the_end(doings, random):
    async def main():
        world, ends = PlacedWorld([random.choice([0.0, 0.5, 3.0]) for _ in range(2)]), []
        await world.sync()
        for doing in doings:
            process = random.choice(world.engines).actor
            await world.do(doing)
            if doing == "kill":
                process.kill(no_restart=False)
            elif doing == "kill soon":
                # Maybe in the middle of what it is asked next, or of what sets it up.
                ends.append(asyncio.create_task(later(partial(process.kill, no_restart=False))))
            elif doing == "lose":
                await process.server.lose()
            await asyncio.sleep(random.choice([0.0, 0.1, 2.0, 20.0]) if doing == "wait" else 0)
            world.check()
        await asyncio.gather(*ends)
        await world.generate()
        await world.pool.continue_generation()
        await asyncio.sleep(1000.0)
        for engine in world.engines:
            server = engine.actor.server
            assert engine.is_up
            assert engine.actor.engine._serving.is_set(), "it was given no weights"
            assert server.is_away or server.holds == BOTH, "it sleeps on"
            assert server.is_away or server.model_step == engine.model_step
            await engine.stop()

    virtual_time.run(asyncio.wait_for(main(), 100_000))


@pytest.mark.parametrize("turn", ["train", "generate"])
def test_a_process_that_starts_meanwhile_has_its_server_in_its_turn_alone(turn):
    async def main():
        world = PlacedWorld([1.0])
        await world.sync()
        await world.generate()
        if turn == "train":
            await world.fit(keep_weights=True)
        process = world.engines[0].actor
        process.kill(no_restart=False)
        await asyncio.sleep(100.0)
        assert world.engines[0].is_up
        assert process.server.holds == (BOTH if turn == "generate" else set())
        # The same weights, which no hand-over brings.
        await world.generate()
        await asyncio.sleep(100.0)
        assert process.server.holds == BOTH
        assert process.engine._serving.is_set()
        await world.engines[0].stop()

    virtual_time.run(main())


@pytest.mark.parametrize("turn", ["train", "generate"])
def test_a_turn_that_comes_at_any_moment_of_a_start_is_kept(turn):
    async def main():
        for delay in range(40):
            world = PlacedWorld([1.0])
            await world.sync()
            await world.generate()
            if turn == "generate":
                await world.fit(keep_weights=True)
            world.engines[0].actor.kill(no_restart=False)
            await asyncio.sleep(0.1 * delay)
            await (world.fit(keep_weights=True) if turn == "train" else world.generate())
            await asyncio.sleep(100.0)
            world.check()
            process = world.engines[0].actor
            assert process.server.holds == (BOTH if turn == "generate" else set())
            await world.generate()
            await asyncio.sleep(100.0)
            assert process.server.holds == BOTH
            assert process.engine._serving.is_set(), "it has no weights"
            await world.engines[0].stop()

    virtual_time.run(main())


def test_a_server_that_waits_for_weights_of_a_lost_trainer_gives_its_memory_back_at_once():
    async def main():
        world = PlacedWorld([1.0])
        await world.sync()
        await world.generate()
        engine, world.are_gone = world.engines[0], True
        engine.actor.kill(no_restart=False)
        await asyncio.sleep(10.0)
        assert engine.is_up
        assert engine.actor.server.holds == BOTH
        async with asyncio.timeout(60):
            # As the run goes back.
            await world.pool.sleep(keep_weights=True)
        assert engine.actor.server.holds == set()
        world.are_gone = False
        await world.sync()
        await world.generate()
        await asyncio.sleep(100.0)
        assert engine.actor.server.holds == BOTH
        assert engine.actor.engine._serving.is_set()
        await engine.stop()

    virtual_time.run(main())
