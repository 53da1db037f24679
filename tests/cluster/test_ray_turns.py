"""A run whose ranks and servers share GPUs by Ray: who sleeps when, whatever ends. Ray alone knows the GPUs."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module

import pytest
from test_nodes import Nodes, Watched
from test_ray_run import check_books, run_config

from forebay.cluster.arguments import RayArguments
from forebay.cluster.calls import blocking_actor
from forebay.cluster.engines import EngineActor
from forebay.cluster.placement import Room, plan_parts
from forebay.cluster.ranks import RankActor
from forebay.cluster.trainer import RayTrainer
from forebay.runs import placement, steps
from forebay.runs.launch import launch
from forebay.runs.placement import PartLost
from sleeping_server import write_server
from warm_python import interpreter, warm_python, warm_workers

ASLEEP = ["kv_cache", "weights"]
SET_UP = """
server.token = lambda job: random.randrange(3, 30)
server.context = option("--max-model-len")
assert "--enable-sleep-mode" in sys.argv
"""


def config(folder, asked=(), options=(), **changes):
    """Two ranks, and an engine with a server on the GPU of each, or as `asked`."""
    (folder / "states").mkdir(exist_ok=True)
    environment = write_server(folder, str(folder / "states/GPUS"), SET_UP)
    arguments = {"servers": 1, "python": interpreter(folder), "environment": environment, "memory_share": 0.5}
    arguments["options"] = list(options)
    asked = {"num_engines": 2, "gpus_per_engine": 1, "gpus_per_trainer": 1, **dict(asked)}
    return run_config(
        folder,
        cluster={"name": "ray", "arguments": asked},
        engine={"name": "vllm", "arguments": arguments},
        train={"lr": 1e-3, "ranks": 2},
        checkpoint_every=1,
        **changes,
    )


class Turns:
    """Watches the turns of a run, and ends parts of it in them."""

    def __init__(self, folder, patch):
        self.folder, self.patch, self.seen, self.cluster = folder, patch, [], None
        make_cluster = placement.make_cluster

        def made(config):
            self.cluster = make_cluster(config)
            return self.cluster

        patch.setattr(placement, "make_cluster", made)
        for name in ("offload", "onload"):
            patch.setattr(RayTrainer, name, self.noted(name, getattr(RayTrainer, name)))
        # The machine has none.
        patch.setattr(Room, "device", "cpu")

    def noted(self, name, method):
        def call(trainer, **arguments):
            self.seen.append(name)
            method(trainer, **arguments)

        return call

    def asleep(self):
        """By GPU, the parts of its memory that each server has given back."""
        return {gpu: json.loads((self.folder / gpu).read_text()) for gpu in ("0", "1") if (self.folder / gpu).exists()}

    def kill_server(self, gpu):
        os.kill(self.asleep()[gpu]["pid"], signal.SIGKILL)
        (self.folder / gpu).unlink()

    def restart_engine(self, number):
        """End an engine's process, and with it its server; return once there is another, which is set up."""
        engine = self.cluster._engines[number]
        before, gpu = engine.incarnation, str(number)
        os.kill(engine.pid, signal.SIGKILL)
        (self.folder / gpu).unlink()
        while engine.incarnation == before or not engine.is_up:
            time.sleep(0.05)

    def calls(self, gpu):
        return (self.folder / f"{gpu}.calls").read_text().splitlines()


@pytest.fixture
def turns(tmp_path, monkeypatch):
    return Turns(tmp_path / "states", monkeypatch)


def test_ranks_see_a_gpu_each_of_those_that_their_engine_has_also_if_it_starts_again(ray):
    asked = RayArguments(num_engines=1, gpus_per_engine=2, gpus_per_trainer=1)
    plan = plan_parts(asked, cpus=0.1, num_ranks=2, sharing=1)
    bundles = import_module("ray.util.placement_group").placement_group(plan.bundles["trainer"])
    options = [room.options({"trainer": bundles}) for room in (*plan.engines, *plan.ranks)]
    engine = ray.remote(EngineActor).options(max_restarts=-1, **options[0]).remote()

    def seen():
        ranks = [
            blocking_actor(RankActor).options(**own).remote((engine, room.lender[1]))
            for own, room in zip(options[1:], plan.ranks, strict=True)
        ]
        found = [gpus for *_, gpus in ray.get([rank.place.remote() for rank in ranks])]
        for rank in ranks:
            ray.kill(rank)
        return found

    before = seen()
    assert sorted(ray.get(engine.gpus.remote()).split(",")) == before
    assert len(set(before)) == 2
    ray.kill(engine, no_restart=False)
    assert seen() == before
    ray.kill(engine)
    import_module("ray.util.placement_group").remove_placement_group(bundles)


@pytest.mark.soak
def test_servers_sleep_while_ranks_train_and_start_when_these_have_left(ray, tmp_path, turns, monkeypatch):
    fit, report, start = RayTrainer.fit, steps.report, RayTrainer.__init__
    went_back = []

    def watched_fit(trainer, groups, **more):
        step = trainer.model_step + 1
        places = ray.get([actor.place.remote() for actor in turns.cluster._trainer_actors[1:]])
        assert sorted(gpus for *_, gpus in places) == ["0", "1"]
        states = turns.asleep()
        # One that was started again while ranks had its GPU has not come back before its turn.
        assert {gpu: state["asleep"] for gpu, state in states.items()} == {"0": ASLEEP, "1": ASLEEP}
        # Weights that the next rollouts are made with are kept.
        assert {state["lacks_weights"] for state in states.values()} == {step % 2 == 0}
        if step == 1:
            turns.restart_engine(1)
            assert set(turns.asleep()) == {"0"}, "it has begun to start its server"
        if step == 2 and not went_back:
            turns.kill_server("0")
        batch = fit(trainer, groups, **more)
        away = {1: "1", 2: "0"}.get(step) if not went_back else None
        assert set(turns.asleep()) == {"0", "1"} - {away}, "a server came back in a train step"
        turns.seen.append(f"train {step}")
        return batch

    def reported(run, train_step, *others):
        report(run, train_step, *others)
        if train_step == 2 and not went_back:
            # They have just been given weights.
            assert all(state["asleep"] != ASLEEP for state in turns.asleep().values())
            went_back.append(train_step)
            os.kill(run.trainer.pids["rank 1"], signal.SIGKILL)
            raise PartLost("a rank was killed")

    def made(trainer, *arguments):
        if went_back:
            # Ranks are made anew, and load their models.
            assert {state["asleep"] == ASLEEP for state in turns.asleep().values()} == {True}
            went_back.append("slept")
        start(trainer, *arguments)

    monkeypatch.setattr(RayTrainer, "fit", watched_fit)
    monkeypatch.setattr(RayTrainer, "__init__", made)
    monkeypatch.setattr(steps, "report", reported)
    run = config(tmp_path, steps=4, produce={"sync_weights_interval": 2})
    asyncio.run(launch(run))
    check_books(run.folder, num_steps=4)
    assert went_back == [2, "slept"]
    trained = [each for each in turns.seen if each.startswith("train")]
    assert trained == ["train 1", "train 2", "train 2", "train 3", "train 4"]
    # New ranks begin with all that they have on their GPUs.
    moved = ["offload", "onload", "offload", "onload", "offload", *["offload", "onload"] * 3, "offload"]
    assert [each for each in turns.seen if not each.startswith("train")] == moved
    for gpu in ("0", "1"):
        calls = turns.calls(gpu)
        assert "generate while it sleeps" not in calls
        assert calls.count("started") == 2
        assert calls.count("/sleep") >= 4
        assert calls.count("generate") > 8


def split_config(folder, **asked):
    """Two ranks, and a server that splits its model over the GPUs of both."""
    asked = {"num_engines": 1, "gpus_per_engine": 2, "cpus": 1.0, **asked}
    # Who generates with weights of a trainer that is lost, and asks it for nothing, waits until then.
    produce = {"stall_after_s": 40}
    return config(folder, asked, ["--tensor-parallel-size", "2"], steps=4, produce=produce)


def main(folder):
    """A run whose ranks and server are on one node, which is lost after a step; then another joins."""
    trained = []
    with warm_workers(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray._private.utils.set_sigterm_handler", lambda handler: None)
        patch.setattr(Room, "device", "cpu")
        fit, nodes = RayTrainer.fit, Nodes(0)
        nodes.join(num_cpus=1)

        def watched_fit(trainer, groups, **more):
            batch = fit(trainer, groups, **more)
            last = max((folder / "states").glob("?,?"), key=lambda file: file.stat().st_mtime_ns)
            gpus = sorted(last.name.split(","))
            trained.append([trainer.model_step, gpus, json.loads(last.read_text())["asleep"]])
            return batch

        patch.setattr(RayTrainer, "fit", watched_fit)
        lost = nodes.join(num_cpus=4, num_gpus=2, env_vars={"CUDA_VISIBLE_DEVICES": "3,4"})

        async def use():
            watched = Watched(patch, limit=1)
            run = asyncio.create_task(launch(split_config(folder, address=nodes.address)))
            await watched.step()
            await watched.kill(nodes, lost)
            joining = {"num_cpus": 4, "num_gpus": 2, "env_vars": {"CUDA_VISIBLE_DEVICES": "5,6"}}
            await asyncio.to_thread(nodes.join, **joining)
            watched.go_on(float("inf"))
            await run

        asyncio.run(use())
        nodes.close()
    print(json.dumps(trained))


@pytest.mark.soak
def test_a_lost_machine_s_ranks_and_server_come_back_together_on_the_gpus_of_another(tmp_path):
    code = f"import {__name__} as tests; from pathlib import Path; tests.main(Path({str(tmp_path)!r}))"
    with warm_python(), warm_workers():
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=1200, check=True)
    trained = json.loads(done.stdout.splitlines()[-1])
    check_books(split_config(tmp_path).folder, num_steps=4)
    assert all(asleep == ASLEEP for *_, asleep in trained)
    assert trained[0][:2] == [1, ["3", "4"]]
    assert [step for step, gpus, _ in trained if gpus == ["5", "6"]][-3:] == [2, 3, 4]
