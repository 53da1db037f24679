"""Copies of unfinished groups that workers push, on virtual time: no cluster, and everything else is real."""

import asyncio
import copy
from types import SimpleNamespace

import pytest
from production_world import PromptLoop
from test_supervised_parts import Method, Ref
from test_unfinished import AGE_S, BATCH_SIZE, TOKEN_S, check_copies, make_world

from forebay.aio import virtual_time
from forebay.cluster import supervisor
from forebay.cluster.rollout_worker import Job, Report, RolloutWorker
from forebay.cluster.workers import PlacedWorker, RayAgentLoop, Workers
from forebay.types import Status
from forebay.watching.activity import Activities

exceptions = pytest.importorskip("ray").exceptions


class Said:
    """Ray's stream of what a process says: a wait for its next item may be cancelled."""

    def __init__(self, items, end):
        self._items, self._end, self._next = items, end, None

    async def __anext__(self):
        self._next = self._next or asyncio.ensure_future(anext(self._items))
        await asyncio.wait([self._next, self._end], return_when=asyncio.FIRST_COMPLETED)
        if self._end.done():
            await self._end
        said, self._next = self._next.result(), None
        return Ref(copy.deepcopy(said))


class Process:
    """Ray's handle of a `RolloutWorker`, in whose place `kill` puts a new one; nothing is shared with it."""

    def __init__(self, make):
        self._make, self.pid = make, 0
        for name in ("start", "live", "generate", "cancel", "pause", "resume", "close"):
            setattr(self, name, Method(getattr(self, f"_{name}", None) or self._call(name)))
        self.__ray_ready__ = Method(self._call("prepare"))
        self.begin()

    def begin(self):
        self.pid += 1
        self.worker, self.end = self._make(), asyncio.get_running_loop().create_future()

    def kill(self):
        self.end.set_exception(exceptions.ActorDiedError())
        self.end.exception()
        for job in self.worker._jobs.values():
            job.task.cancel()
        self.begin()

    def _call(self, name):
        async def call(*arguments):
            return None if name == "prepare" else await getattr(self.worker, name)(*arguments)

        return call

    async def _start(self, spec):
        return self.pid

    def _live(self):
        return Said(self.worker.live(), self.end)

    async def _generate(self, told):
        end = self.end
        work = asyncio.ensure_future(self.worker.generate(told))
        await asyncio.wait([work, end], return_when=asyncio.FIRST_COMPLETED)
        if end.done():
            await end
        return work.result()

    def _cancel(self, number):
        self.cancelling = asyncio.ensure_future(self.worker.cancel(number))


def far_world(storage=None):
    """A world whose groups are generated in the processes of two workers."""
    world = make_world(storage, AGE_S / 4)

    def make():
        worker = RolloutWorker()
        worker._controller, worker._copy_every_s = world.controller, AGE_S / 4
        worker._loops = {("t", False): world.loops["t"]}
        return worker

    world.processes = [Process(make), Process(make)]
    world.workers = Workers([PlacedWorker(SimpleNamespace(name=f"worker {n}")) for n in range(2)])
    for placed, process in zip(world.workers.all, world.processes, strict=True):
        placed.begin(process, process.pid)
    runner = world.manager.task_runners[0]
    runner.agent_loop = RayAgentLoop(world.workers, ("t", False), Activities())
    return world


def working(world):
    """The groups as they are in the workers."""
    return [job.states for process in world.processes for job in process.worker._jobs.values()]


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch):
    monkeypatch.setattr(PromptLoop, "is_whole_at_awaits", True)
    ray = SimpleNamespace(exceptions=exceptions, cancel=lambda stream: None)
    monkeypatch.setattr(supervisor, "import_ray", lambda: ray)


@pytest.mark.parametrize("seed", range(3))
def test_no_token_of_a_worker_is_unsaved_for_longer_and_a_killed_run_goes_on(seed):
    check_copies(seed, far_world, working)


def test_a_worker_that_ends_costs_its_groups_half_of_the_interval_at_most():
    async def main():
        world, told, lost = far_world(), [], []
        world.workers.on_retry = lambda *what: told.append(what)
        engine, process = world.engine, world.processes[0]
        producing = asyncio.create_task(world.manager.produce_loop(BATCH_SIZE))
        await world.controller.update_weights([], 0)
        await world.manager.continue_produce(0)
        for _ in range(8):
            # So long that each has been copied, if it is not new.
            await asyncio.sleep(2.3 * AGE_S)
            there = [job.states for job in process.worker._jobs.values()]
            made = {
                state.rollout_id: len(state.response_ids) + engine_tokens(world, state)
                for group in there
                for state in group
                if state.status is Status.INIT
            }
            num_before = len(engine.requests)
            process.kill()
            await asyncio.sleep(0.5 * AGE_S)
            again = {}
            for request in engine.requests[num_before:]:
                name, _, length = request.request_id.rsplit(":", 2)
                again.setdefault(name, int(length))
            lost += [made[name] - again[name] for name in made.keys() & again.keys()]
        assert len(told) >= 8
        assert {reason for *_, reason in told} == {"worker died"}
        assert 0 < max(lost) <= AGE_S / 2 / TOKEN_S
        assert len(lost) >= 8
        await world.check_balance()
        await world.manager.shutdown()
        await asyncio.gather(producing, return_exceptions=True)
        await world.workers.close()

    virtual_time.run(main())


def engine_tokens(world, state):
    request = world.controller._running.get(state.rollout_id)
    return 0 if request is None else world.engine.num_made(request.request_id)


def test_a_copy_is_pushed_when_a_group_has_got_further_and_to_whoever_listens_anew():
    async def main():
        world, worker = make_world(), RolloutWorker()
        worker._controller, worker._copy_every_s = world.controller, 2.0
        group = await world.manager.task_runners[0].sampler.sample("t")
        loop, program = (SimpleNamespace(is_whole_at_awaits=whole, sample_params=None) for whole in (True, False))
        worker._jobs = {7: Job(None, loop, group), 8: Job(None, program, copy.deepcopy(group))}
        said = worker.live()
        assert isinstance(await anext(said), Report)
        for states in (group, worker._jobs[8].states):
            states[0].append([5, 6], logprobs=[-1.0] * 2, model_step=3)
        (number, copied), *others = (await anext(said)).items()
        assert (number, others, asyncio.get_running_loop().time()) == (7, [], 2.0)
        assert [(s.status, s.response_ids.tolist()) for s in copied] == [
            (Status.ABORTED, [5, 6]),
            (Status.ABORTED, []),
        ]
        # Nothing is new for half a minute but that it lives.
        assert isinstance(await anext(said), Report)
        assert asyncio.get_running_loop().time() == supervisor.BEAT_EVERY_S
        anew = worker.live()
        assert isinstance(await anext(anew), Report)
        assert (await anext(anew)).keys() == {7}

    virtual_time.run(main())
