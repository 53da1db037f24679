"""Engines that all rollout workers share, on virtual time: spread, what waits there, stragglers; no cluster."""

import asyncio
import logging
import math
from types import SimpleNamespace

import pytest
from test_supervised_parts import Method, Ref

from forebay.aio import virtual_time
from forebay.cluster import supervisor
from forebay.cluster.engines import EngineActor, PlacedEngine
from forebay.cluster.ray_cluster import RayCluster
from forebay.cluster.rollout_worker import RolloutWorker, WorkerSpec
from forebay.cluster.workers import PlacedWorker, RayAgentLoop, Workers, shares
from forebay.engines import RolloutController, ScriptedEngine
from forebay.engines.pool import EnginePool
from forebay.types import RolloutState, SampleParams, Status
from forebay.watching.activity import GENERATE, QUEUED, Activities

ray = pytest.importorskip("ray")
MEMBERS = 8


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 8, 16, 31, 50, 64])
def test_requests_of_workers_that_know_only_their_own_load_are_spread_evenly(num_workers):
    for num_engines in (1, 2, 3, 5, 8, 25, 32, 50, 100, 333, 1000):
        orders = [[engine for engine, _ in order] for order in shares(num_workers, [1.0] * num_engines)]
        assert all(sorted(order) == list(range(num_engines)) for order in orders)
        for by_engine in (0.1, 0.25, 0.5, 1, 2, 4, 16, 17):
            num_groups = max(1, round(by_engine * num_engines / MEMBERS))
            loads = [0] * num_engines
            for number, order in enumerate(orders):
                # The run gives each group to the first of the least busy workers.
                groups = num_groups // num_workers + (number < num_groups % num_workers)
                for place in range(groups * MEMBERS):
                    loads[order[place % num_engines]] += 1
            mean = num_groups * MEMBERS / num_engines
            assert max(loads) <= math.ceil(mean) + 2, (num_engines, num_groups)
            assert min(loads) >= math.floor(mean) - 2


def rollout(name, max_tokens=10):
    params = SampleParams(max_tokens=max_tokens)
    return RolloutState([], rollout_id=name, group_id="g", task_name="t", prompt_ids=[5], sample_params=params)


def test_no_engine_of_a_thousand_is_idle_and_one_that_joins_gets_its_share():
    async def main():
        engines = [ScriptedEngine(lambda request: [7] * 10, token_latency_s=0.1) for _ in range(101)]
        controllers = [RolloutController(engines[:100]) for _ in range(10)]

        def rank(num_engines):
            for controller, share in zip(controllers, shares(10, [1.0] * num_engines), strict=True):
                controller.rank({engines[place]: times for place, times in share})

        async def keep_busy(controller, lane):
            for number in range(4):
                await controller.generate_sample(rollout(f"{lane}/{number}"))

        rank(100)
        lanes = [asyncio.create_task(keep_busy(each, lane)) for each in controllers for lane in range(32)]
        await asyncio.sleep(0.5)
        assert {len(engine._running) for engine in engines[:100]} <= {3, 4}
        for controller in controllers:
            controller.add(engines[100])
        rank(101)
        await asyncio.sleep(1)
        running = [len(engine._running) for engine in engines]
        assert set(running) <= {2, 3, 4}
        await asyncio.gather(*lanes)

    virtual_time.run(main())


class Said:
    """Ray's stream of what an actor says."""

    def __init__(self, items):
        self._items = items

    def __aiter__(self):
        return self

    async def __anext__(self):
        return Ref(await anext(self._items))


class Handle:
    """Ray's handle of an actor, which is in this process."""

    def __init__(self, actor, pid=1):
        self.__ray_ready__ = Method(self._ready)
        for name in ("start", "serving", "pause", "resume", "abort", "close", "cancel"):
            if hasattr(actor, name):
                setattr(self, name, self._method(getattr(actor, name)))
        self.live = Method(lambda: Said(actor.live()))
        if isinstance(actor, EngineActor):
            self.generate = Method(lambda *arguments: Said(actor.generate(*arguments)))
        else:
            self.generate = self._method(actor.generate)

    async def _ready(self):
        pass

    def _method(self, method):
        return Method(lambda *arguments: asyncio.ensure_future(method(*arguments)))


class Lane:
    """An agent loop without a judge."""

    def __init__(self, controller, activities):
        self.controller, self.activities = controller, activities

    async def generate_group(self, states, **_):
        for state in states:
            with self.activities.span(GENERATE, state.rollout_id):
                await self.controller.generate_sample(state)
        return states


class World:
    """Engines and workers as a run on Ray has them, their processes' objects in this process."""

    def __init__(self, engines, num_workers):
        self.engines, self.activities = engines, Activities()
        cluster = self.cluster = object.__new__(RayCluster)
        cluster._judged_s, cluster._engines, cluster._eval_engines = -math.inf, [], []
        cluster._workers, cluster._eval_workers = Workers([]), Workers([])
        for number, engine in enumerate(engines):
            actor = EngineActor()
            actor._pool = EnginePool([engine])
            actor._serving.set()
            part = PlacedEngine(SimpleNamespace(name=f"engine {number}"))
            part.begin(Handle(actor), 1)
            part.on_work, part.max_context_tokens = cluster._judge, 1000
            cluster._engines.append(part)
        self.workers = []
        for number in range(num_workers):
            worker = RolloutWorker()
            worker._tokenizer = "none"
            worker._build = self._build(worker)
            self.workers.append(worker)
            spec = WorkerSpec(config=None, model_folder=None, name=f"worker {number}", search_path=())
            part = PlacedWorker(spec)
            part.use(Handle(worker))
            cluster._workers.all.append(part)
        self.loop = RayAgentLoop(cluster._workers, ("t", False), self.activities)

    def _build(self, worker):
        def build(spec):
            controller = RolloutController(list(worker._engines.values()), activities=worker._activities)
            worker._loops = {("t", False): Lane(controller, worker._activities)}
            return controller

        return build

    async def start(self):
        self.cluster._have_workers_follow()
        for part in self.cluster._workers.all:
            await part.actor.start.remote(part.spec)
            part.begin(part.actor, 1)
        for part in self.cluster._engines:
            part.watch()

    def queued(self):
        return {one.name for one in self.activities.in_flight() if one.stage == QUEUED}

    async def stop(self):
        for part in (*self.cluster._engines, *self.cluster._workers.all):
            await part.stop()


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch):
    used = SimpleNamespace(exceptions=ray.exceptions, cloudpickle=ray.cloudpickle, cancel=lambda stream: None)
    for module in ("supervisor", "engines", "calls"):
        monkeypatch.setattr(f"forebay.cluster.{module}.import_ray", lambda: used)


def test_what_waits_in_an_engine_s_process_is_queued_and_the_engine_has_no_more_than_it_runs():
    async def main():
        engine = ScriptedEngine(lambda request: [7] * request.max_tokens, token_latency_s=1.0, max_running=2)
        world = World([engine], 3)
        await world.start()
        names = [f"{number}" for number in range(9)]
        running = [asyncio.create_task(world.loop.generate_group([rollout(name, 60)])) for name in names]
        await asyncio.sleep(2.1 * supervisor.BEAT_EVERY_S / 6)
        # Each worker sent two, which is what the engine runs of all.
        assert (len(engine._running), len(engine._waiting)) == (2, 0)
        at_engine = {request.request_id.split(":")[0] for request in engine.requests}
        assert world.queued() == set(names) - at_engine
        waits = sorted(world.queued())
        notes = [world.cluster._workers.note_of(name) for name in waits]
        assert all(note.startswith("queued, 0 tokens for ") for note in notes), notes
        assert {one.name for one in world.activities.in_flight() if one.stage == GENERATE} == set(names)
        # One that is not waited for any more leaves the register too.
        running[int(waits[0])].cancel()
        await asyncio.sleep(0.1)
        assert world.queued() == set(waits[1:])
        done = await asyncio.gather(*running, return_exceptions=True)
        assert sum(isinstance(one, asyncio.CancelledError) for one in done) == 1
        assert not world.activities.in_flight()
        await world.stop()

    virtual_time.run(main())


@pytest.mark.parametrize("num_workers", [1, 8])
def test_a_straggler_that_workers_share_is_named_once_gets_less_and_is_forgiven(num_workers, caplog):
    async def main():
        engines = [
            ScriptedEngine(lambda request: [7] * request.max_tokens, token_latency_s=0.2, max_running=4)
            for _ in range(16)
        ]
        slow = engines[5]
        slow.token_latency_s = 4.0
        world, loop = World(engines, num_workers), asyncio.get_running_loop()
        await world.start()

        async def keep_busy(lane, until_s):
            number = 0
            while loop.time() < until_s:
                number += 1
                (done,) = await world.loop.generate_group([rollout(f"{lane}/{number}", 20)])
                assert done.status is Status.COMPLETED

        lanes = [asyncio.create_task(keep_busy(lane, 600.0)) for lane in range(48)]
        await asyncio.sleep(2.2 * supervisor.BEAT_EVERY_S)
        named = [message for message in caplog.messages if "straggler" in message]
        assert len(named) == 1
        assert named[0].startswith("engine 5 is a straggler: 0.2")
        assert "the median of 16 engines is 5;" in named[0]
        await asyncio.sleep(120)
        counts = []
        for _ in range(100):
            counts.append(len(slow._running) + len(slow._waiting))
            await asyncio.sleep(3.0)
        # Three of each, were it as fast as the others.
        assert sum(counts) / len(counts) < 1.2
        slow.token_latency_s = 0.2
        await asyncio.gather(*lanes)
        before = len(slow.requests)
        await asyncio.gather(*(keep_busy(lane, loop.time() + 200.0) for lane in range(48)))
        assert [message for message in caplog.messages if "straggler" in message] == [
            named[0],
            "engine 5 is no straggler any more",
        ]
        await asyncio.gather(*(keep_busy(lane, loop.time() + 100.0) for lane in range(48)))
        assert len(slow.requests) - before > 0.5 * 3 * 300 / 4
        await world.stop()

    with caplog.at_level(logging.WARNING, logger="forebay"):
        virtual_time.run(main())
