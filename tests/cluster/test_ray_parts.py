"""Parts of a run on a real cluster, a few at a time: lost, replaced, blocked, joined and started alone."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from replay_factory import make_group
from test_engine_actor import NOTHING, ask, frail_config, spec_of
from test_ray_run import pids_of, run_config

from forebay.cluster import supervisor
from forebay.cluster.buffer import connect_buffer, start_buffer, stop_buffer
from forebay.cluster.calls import ActorLost, NotBuilt
from forebay.cluster.engines import EngineActor, PlacedEngine, RayEngine
from forebay.cluster.library import Given, Published
from forebay.cluster.rollout_worker import RolloutWorker
from forebay.cluster.supervisor import Restarts, all_started
from forebay.cluster.workers import PlacedWorker, RayAgentLoop, Workers
from forebay.config import ConfigError
from forebay.engines import RolloutController, ScriptedEngine
from forebay.engines.pool import EnginePool
from forebay.models import resolve_model
from forebay.runs.placement import make_cluster
from forebay.types import RolloutState, SampleParams, Status
from forebay.watching.activity import QUEUED, Activities
from warm_python import warm_python, warm_workers


async def test_engines_that_are_given_up_come_back_in_a_new_process(ray, tmp_path):
    config, restarts = frail_config(tmp_path), Restarts()
    actor = ray.remote(EngineActor).options(max_restarts=-1, max_concurrency=100, num_cpus=0.1).remote()
    spec = spec_of(config)
    placed = PlacedEngine(spec, restarts.note)
    placed.begin(actor, await actor.start.remote(spec))
    weights = ray.put(NOTHING)
    await placed.load_weights(Published(weights, 1), 1)
    pool = EnginePool([RayEngine(actor, caller="worker 0", max_context_tokens=100)])
    completions = await asyncio.gather(pool.complete(ask("a")), pool.complete(ask("b")))
    # What the lost engine had made of the first one is kept.
    assert [len(completion.response_ids) for completion in completions] == [3, 3]
    assert not [completion for completion in completions if completion.lost]
    assert pool.counts()["retries"] == 2
    assert restarts.counts == {"engine": 1}
    told = []
    restarts.listen(lambda *what: told.append(what))
    assert [(part, "does not start any more" in reason) for part, reason in told] == [("engine 0", True)]
    await pool.close()
    await placed.close()
    ray.kill(actor)


def scripted_engines(surroundings):
    return [ScriptedEngine(lambda request: [7, 8])]


def small_config(output, **arguments):
    return run_config(output, engine=f"{__name__}:scripted_engines", cluster={"name": "ray", "arguments": arguments})


async def generate_group(cluster, *names, max_tokens, activities=None):
    loop = cluster.agent_loop("sorting", held_out=False, activities=activities or Activities())
    states = [
        RolloutState(
            [{"role": "user", "content": "c a b"}],
            rollout_id=name,
            group_id="g",
            task_name="sorting",
            sample_params=SampleParams(max_tokens=max_tokens),
            reward_model={"ground_truth": "a b c"},
        )
        for name in names
    ]
    return await asyncio.wait_for(loop.generate_group(states), 500)


async def generate(cluster):
    (done,) = await generate_group(cluster, "a", max_tokens=2)
    return done


async def test_an_actor_that_is_gone_is_replaced_at_once_and_parts_join_and_leave(ray, tmp_path):
    config, told = small_config(tmp_path), []
    folder = resolve_model(config.model, seed=config.seed)
    cluster = make_cluster(config)
    await cluster.open(trains=False)
    cluster.listen(on_restart=lambda part, reason: told.append(part))
    try:
        await asyncio.to_thread(cluster.start, folder)
        controller = cluster.controller()
        await controller.continue_generation()
        (first,) = controller.engines
        before = first.actor
        # For good: Ray makes no other process of it.
        ray.kill(before)
        # The rollout waits for the actor in its place.
        assert (await generate(cluster)).response_ids.tolist() == [7, 8]
        # It serves a moment before the run hears that.
        await until(lambda: first.is_up and told == ["engine 0"])
        assert first.actor is not before
        assert (await controller.scale("workers", "+1")) == "2 now, 1 of them up"
        assert (await controller.scale("engines", "+1")) == "2 now, 1 of them up"
        _, newcomer = controller.engines
        await until(lambda: newcomer.is_up and all(pids_of(cluster).values()))
        assert pids_of(cluster).keys() == {"engine 0", "engine 1", "worker 0", "worker 1"}
        # The first is away: the newcomer has the work, wherever that is.
        first.watch()
        ray.kill(first.actor)
        assert (await generate(cluster)).response_ids.tolist() == [7, 8]
        assert newcomer.is_up
        await until(lambda: first.is_up and told == ["engine 0"] * 2)
        assert (await controller.scale("engines", "1")) == "1 now, 1 of them up"
        assert (await controller.scale("workers", "-1")) == "1 now, 1 of them up"
        assert controller.engines == (first,)
        assert (await generate(cluster)).response_ids.tolist() == [7, 8]
        with pytest.raises(ValueError, match="see urls"):
            await controller.scale("engines", "+http://gpu7:8000")
    finally:
        await cluster.close()


def engines_that_differ(surroundings):
    """The token says which engine made it; only the first engine ever gets to the end."""
    number = int(surroundings.scratch.name)
    latency_s = 4.0 if number else 0.001
    return [ScriptedEngine(lambda request: [7 + number] * request.max_tokens, token_latency_s=latency_s)]


async def test_a_rollout_takes_its_tokens_along_from_an_engine_that_leaves(ray, tmp_path):
    config = run_config(tmp_path, engine=f"{__name__}:engines_that_differ", cluster="ray")
    cluster = make_cluster(config)
    await cluster.open(trains=False)
    try:
        await asyncio.to_thread(cluster.start, resolve_model(config.model, seed=config.seed))
        controller = cluster.controller()
        await controller.continue_generation()
        assert (await controller.scale("engines", "+1")) == "2 now, 1 of them up"
        newcomer = controller.engines[1]
        await until(lambda: newcomer.is_up)
        names = ("a", "b")
        group = asyncio.create_task(generate_group(cluster, *names, max_tokens=50))
        # The one at the newcomer has a token, and the other is done.
        made = [0]
        await until(lambda: made.append(controller.count_tokens_made()) or made[-1] > 50)
        saying = asyncio.create_task(controller.scale("engines", "-1"))
        await until(lambda: made.append(controller.count_tokens_made()) or saying.done())
        assert saying.result() == "1 now, 1 of them up"
        done = sorted(((state.response_ids == 8).sum(), len(state.response_ids)) for state in await group)
        assert (done[0], done[1][1]) == ((0, 50), 50)
        assert 0 < done[1][0] < 50
        assert made == sorted(made)
        assert newcomer.room.group not in cluster._groups
    finally:
        await cluster.close()


def engines_of_one_place(surroundings):
    return [ScriptedEngine(lambda request: [7] * request.max_tokens, token_latency_s=0.5, max_running=1)]


async def test_what_waits_in_an_engine_s_process_is_queued_in_the_run(ray, tmp_path):
    config = run_config(
        tmp_path,
        engine=f"{__name__}:engines_of_one_place",
        cluster={"name": "ray", "arguments": {"num_workers": 2}},
    )
    cluster, activities = make_cluster(config), Activities()
    await cluster.open(trains=False)
    try:
        await asyncio.to_thread(cluster.start, resolve_model(config.model, seed=config.seed))
        controller = cluster.controller()
        await controller.continue_generation()
        # Each worker has one, which is what the engine has room for.
        groups = [
            asyncio.create_task(generate_group(cluster, name, max_tokens=60, activities=activities)) for name in "ab"
        ]

        def queued():
            return [one for one in activities.in_flight() if one.stage == QUEUED]

        await until(queued)
        (waits,) = queued()
        assert controller.describe(waits).startswith("queued, 0 tokens for ")
        await until(lambda: not queued())
        assert [len(state.response_ids) for (state,) in await asyncio.gather(*groups)] == [60, 60]
        assert not activities.in_flight()
    finally:
        await cluster.close()


async def until(happened):
    async with asyncio.timeout(500):
        while not happened():
            await asyncio.sleep(0.05)


async def place_worker(ray, tmp_path, *, blocks):
    """A worker of a class that needs no module there; and what is told of its restarts."""

    class Blocking:
        async def start(self, spec):
            self._marker = Path(spec.marker)
            return os.getpid()

        async def live(self):
            await asyncio.Event().wait()
            yield

        async def generate(self, *job):
            await asyncio.Event().wait()

        async def pause(self):
            # As a judge that blocks the event loop, in the first process.
            if not self._marker.exists():
                self._marker.touch()
                time.sleep(1000)

        async def resume(self):
            pass

    marker, told = tmp_path / "marker", []
    if not blocks:
        marker.touch()
    actor = ray.remote(Blocking).options(max_restarts=-1, max_concurrency=9, num_cpus=0.1).remote()
    spec = SimpleNamespace(name="worker 0", marker=str(marker))
    pid = await actor.start.remote(spec)
    worker = PlacedWorker(spec, on_restart=lambda *what: told.append(what))
    worker.begin(actor, pid)
    worker.watch()
    await asyncio.sleep(0)
    return worker, told


async def test_a_worker_that_does_not_answer_is_ended_and_started_again(ray, tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "TELL_LIMIT_S", 0.5)
    worker, told = await place_worker(ray, tmp_path, blocks=True)
    pid, group = worker.pid, asyncio.ensure_future(worker.generate(0, ("sorting", False), [RolloutState([])], False))
    await worker.pause()
    with pytest.raises(ActorLost):
        await group
    await until(lambda: worker.is_up)
    assert worker.pid != pid
    assert told == [("worker 0", "worker 0 was asked to pause: no answer within 0.5 s")]
    await worker.stop()
    ray.kill(worker.actor)


async def test_a_process_that_was_only_out_of_reach_is_no_restart(ray, tmp_path):
    worker, told = await place_worker(ray, tmp_path, blocks=False)
    worker.suspect(worker.incarnation, NotBuilt("it said so"))
    assert not worker.is_up
    await until(lambda: worker.is_up)
    assert told == []
    await worker.stop()
    ray.kill(worker.actor)


async def test_of_several_groups_in_a_worker_one_is_given_up_and_the_others_outlive_its_process(ray, tmp_path):
    class Waiting(RolloutWorker):
        """Its agent loop waits for a file; it notes what begins and is cancelled. Its module need not be there."""

        async def start(self, spec):
            self._folder, self._loops = spec.folder, {SORTING: self}
            self._controller = RolloutController(ScriptedEngine(lambda request: [7]))
            self.is_whole_at_awaits = False
            return os.getpid()

        async def generate_group(self, states, enable_partial_rollout):
            name = states[0].group_id
            (self._folder / f"{name} began in {os.getpid()}").touch()
            try:
                while not (self._folder / "door").exists():
                    await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                (self._folder / f"{name} was cancelled").touch()
                raise
            for state in states:
                state.append([7], model_step=0)
                state.status = Status.COMPLETED
            return states

    kind = ray.remote(Waiting).options(max_restarts=-1, max_concurrency=9, num_cpus=0.1)
    placed = []
    for number in range(2):
        spec = SimpleNamespace(name=f"worker {number}", folder=tmp_path)
        placed.append(PlacedWorker(spec))
        placed[-1].begin(actor := kind.remote(), await actor.start.remote(spec))
    workers, told = Workers(placed), []
    workers.on_retry = lambda *what: told.append(what)
    loop, names = RayAgentLoop(workers, SORTING, Activities()), [f"g{number}" for number in range(6)]
    running = {name: asyncio.create_task(loop.generate_group(pair(name))) for name in names}

    def began():
        return sorted(path.name for path in tmp_path.glob("* began in *"))

    await until(lambda: len(began()) == 6)
    assert [worker.num_in_flight for worker in placed] == [3, 3]
    killed = placed[0].pid
    there = [name for name in names if f"{name} began in {killed}" in began()]
    running.pop(there[0]).cancel()
    await until(lambda: (tmp_path / f"{there[0]} was cancelled").exists())
    os.kill(killed, signal.SIGKILL)
    await until(lambda: len(began()) == 8)
    (tmp_path / "door").touch()
    done = {name: await task for name, task in running.items()}
    assert {name: [(s.rollout_id, s.response_ids.tolist()) for s in group] for name, group in done.items()} == {
        name: [(f"{name}/{n}", [7]) for n in range(2)] for name in names if name != there[0]
    }
    again = sorted(name.split()[0] for name in began())
    assert again == sorted([*names, *there[1:]])
    assert sorted(told) == [(None, name, "worker died") for name in sorted(there[1:])]
    assert [path.name for path in tmp_path.glob("* was cancelled")] == [f"{there[0]} was cancelled"]
    for worker in placed:
        await worker.stop()
        ray.kill(worker.actor)


SORTING = "sorting", False


def pair(name):
    return [RolloutState([], rollout_id=f"{name}/{member}", group_id=name) for member in range(2)]


def test_the_first_part_that_cannot_be_built_is_told_at_once(ray):
    @ray.remote(num_cpus=0.1)
    def fails():
        raise ValueError("no such model")

    @ray.remote(num_cpus=0.1)
    def hangs():
        time.sleep(1000)

    late = hangs.remote()
    with pytest.raises(ConfigError, match="engine 0 cannot be built: ValueError: no such model"):
        all_started({"worker 0": late, "engine 0": fails.remote()})
    ray.cancel(late, force=True)


def main(folder):
    """A program of its own: a cluster as its environment says, with parts only where it starts one."""
    joins = Given.find(None) is not None
    config = small_config(folder)
    found = {}

    async def use():
        cluster = make_cluster(config)
        await cluster.open(trains=False)
        ray = sys.modules["ray"]
        found["address"] = ray.get_runtime_context().gcs_address
        try:
            if joins:
                async with await connect_buffer("shared") as buffer:
                    found["waiting"] = len(buffer)
            else:
                cluster.start(resolve_model(config.model, seed=config.seed))
                await cluster.controller().continue_generation()
                found["tokens"] = (await generate(cluster)).response_ids.tolist()
                found["pids"] = list(pids_of(cluster).values())
        finally:
            await cluster.close()
        found["is_on"] = ray.is_initialized()

    with warm_workers():
        asyncio.run(use())
    print(json.dumps(found))


def run_main(folder, address):
    code = f"import {__name__} as tests; tests.main({str(folder)!r})"
    with warm_python(), warm_workers():
        environment = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=500
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_program_without_a_cluster_starts_one_and_ends_it(tmp_path):
    found = run_main(tmp_path, "local")
    assert found["tokens"] == [7, 8]
    assert found["is_on"] is False
    assert found["pids"]
    assert not [pid for pid in found["pids"] if Path(f"/proc/{pid}").exists()]


async def test_a_program_joins_a_cluster_by_its_address_and_leaves_it_there(ray, tmp_path):
    address = ray.get_runtime_context().gcs_address
    handle = start_buffer(name="shared")
    async with await connect_buffer("shared") as buffer:
        await buffer.put(make_group("a"), "math")
        found = await asyncio.to_thread(run_main, tmp_path, address)
    assert found == {"address": address, "waiting": 1, "is_on": False}
    await stop_buffer("shared")
    del handle
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} <= {"REMOVED"}
    assert ray.get(ray.put(1)) == 1
