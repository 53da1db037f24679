"""Runs on several nodes of Ray, simulated on this machine, of which some are killed and others join.

A simulated node is a raylet with its workers. The cluster and the run on it have a program of their own: the
process of the other tests is on their cluster.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
from collections import Counter

import psutil
import pytest
from test_ray_chaos import check_run
from test_ray_run import SEPARATE, events, pids_of, run_config, train_rows

from forebay.cluster import ray_cluster
from forebay.config import ConfigError
from forebay.runs import launch as launching
from forebay.runs import placement, steps
from forebay.runs.store import STORE_FILE
from warm_python import warm_python, warm_workers

SOON = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}
"""Ray finds a node lost after some seconds; by its own settings it takes longer."""
FEW_STEPS = 6
SOAK_SEED = int(os.environ.get("FOREBAY_SOAK_SEED", "1"))
SOAK_KILLS, STEPS_A_KILL = 20, 15


class Nodes:
    """A cluster: a head without room for parts, and nodes beside it, each with room for three."""

    def __init__(self, num_nodes):
        from ray.cluster_utils import Cluster

        self._shared = {"include_dashboard": False, "object_store_memory": 100 << 20}
        head = {**self._shared, "num_cpus": 0, "_system_config": SOON}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = self._cluster.address
        self.all = []
        for _ in range(num_nodes):
            self.join()

    def join(self, num_cpus=3, **arguments):
        node = self._cluster.add_node(**self._shared, num_cpus=num_cpus, **arguments)
        self.all.append(node)
        return node

    def kill(self, node):
        """Everything on it ends at once, and says nothing."""
        (raylet,) = node.all_processes["raylet"]
        raylet = psutil.Process(raylet.process.pid)
        for process in [raylet, *raylet.children(recursive=True)]:
            process.kill()
        self._cluster.remove_node(node, allow_graceful=False)
        self.all.remove(node)

    def close(self):
        self._cluster.shutdown()


def places(cluster):
    """The node of each part that has a process just now."""
    from ray._private.state import actors

    known = {each["Pid"]: each["Address"]["NodeID"] for each in actors().values() if each["State"] == "ALIVE"}
    return {part: known[pid] for part, pid in pids_of(cluster).items() if pid in known}


class Watched:
    """A run: its cluster, as soon as it is made, and its train steps, which are held up at a limit."""

    def __init__(self, patch, limit):
        self.cluster, self.stepped, self.limit, self.raised = None, asyncio.Event(), limit, asyncio.Event()
        make_cluster, report, fit = placement.make_cluster, steps.report, steps.fit

        def made(config):
            self.cluster = make_cluster(config)
            return self.cluster

        def reported(*arguments):
            report(*arguments)
            self.stepped.set()

        async def held(run, groups):
            while run.train_step >= self.limit:
                await self.raised.wait()
            return await fit(run, groups)

        patch.setattr(placement, "make_cluster", made)
        patch.setattr(steps, "report", reported)
        patch.setattr(steps, "fit", held)

    def go_on(self, limit):
        """Train up to this step."""
        self.limit = limit
        self.raised.set()
        self.raised = asyncio.Event()

    async def step(self):
        self.stepped.clear()
        await self.stepped.wait()

    async def places(self):
        return await asyncio.to_thread(places, self.cluster)

    async def kill(self, nodes, node):
        """The parts that were on it."""
        there = [part for part, place in (await self.places()).items() if place == node.node_id]
        await asyncio.to_thread(nodes.kill, node)
        return there


def config_on(folder, address, **changes):
    arguments = {"num_workers": 2, "num_engines": 2, "max_restarts": 50, "address": address, "cpus": 1.0}
    return run_config(folder, produce=SEPARATE, cluster={"name": "ray", "arguments": arguments}, **changes)


async def lose_one_and_gain_one(nodes, watched, found):
    """The node with the trainer is killed; then the others have no room for all parts until another joins."""
    await watched.step()
    before = await watched.places()
    found["engines"] = len({before["engine 0"], before["engine 1"]})
    (node,) = [node for node in nodes.all if node.node_id == before["trainer"]]
    found["lost"] = await watched.kill(nodes, node)
    newcomer = await asyncio.to_thread(nodes.join)
    async with asyncio.timeout(500):
        # Ray itself takes a while to notice the loss.
        while len(after := await watched.places()) < len(before) or node.node_id in after.values():
            await asyncio.sleep(0.1)
    found["on the newcomer"] = [part for part, place in after.items() if place == newcomer.node_id]
    watched.go_on(float("inf"))


async def lose_random_ones(nodes, watched, found):
    """Each a while after a train step, at any moment of the next ones; another joins a while later."""
    rng, lost = random.Random(SOAK_SEED), Counter()
    for kill in range(1, SOAK_KILLS + 1):
        # However fast the machine is, the run is not over before the last kill.
        watched.go_on(kill * STEPS_A_KILL - 1)
        await watched.step()
        await asyncio.sleep(rng.uniform(0, 1.0))
        parts = await watched.kill(nodes, rng.choice(nodes.all))
        print(f"kill {kill}: a node with {', '.join(parts) or 'nothing'}", flush=True)
        lost.update(part.split()[0] for part in parts)
        await asyncio.sleep(rng.uniform(0, 2.0))
        await asyncio.to_thread(nodes.join)
    found["lost"] = lost
    watched.go_on(float("inf"))


async def note_places(nodes, watched, found):
    await watched.step()
    found["places"] = await watched.places()
    watched.go_on(float("inf"))


RANKS = {"train": {"lr": 1e-3, "ranks": 3}, "verify_weights": True}


def refused(config):
    """What a run says when nodes whose environment says so see none of the files that they are asked for."""

    def missing(sizes):
        return next(iter(sizes)) if os.environ.get("SEES_NOTHING") else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_cluster, "missing", missing)
        with pytest.raises(ConfigError) as error:
            asyncio.run(launching.launch(config))
    return str(error.value)


def main(folder, num_steps, num_nodes, what):
    """A run during which `what` happens; prints what was found."""
    found = {}
    with warm_workers(), pytest.MonkeyPatch.context() as patch:
        # Nodes that join do so in a thread, where Python sets no handlers.
        patch.setattr("ray._private.utils.set_sigterm_handler", lambda handler: None)
        nodes = Nodes(num_nodes)
        changes = RANKS if what is note_places else {}
        config = config_on(folder, nodes.address, steps=num_steps, **changes)
        if what is lose_one_and_gain_one:
            blind = nodes.join(num_cpus=0, env_vars={"SEES_NOTHING": "1"})
            found["refused"], found["blind"] = refused(config), blind.node_id
            found["left"] = config.folder.exists()

        async def use():
            watched = Watched(patch, limit=num_steps - 1)
            async with asyncio.TaskGroup() as group:
                run = group.create_task(launching.launch(config))
                happening = group.create_task(what(nodes, watched, found))
                await run
                happening.cancel()

        asyncio.run(use())
        nodes.close()
    print(json.dumps(found))


def run_main(folder, num_steps, num_nodes, what):
    arguments = f"{str(folder)!r}, {num_steps}, {num_nodes}, tests.{what.__name__}"
    code = f"import {__name__} as tests; tests.main({arguments})"
    with warm_python(), warm_workers():
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=1800)
    print(done.stdout)
    assert done.returncode == 0
    config = config_on(folder, "127.0.0.1:1", steps=num_steps)
    # Every batch whole, and no group lost or trained twice.
    check_run(config, str(config.folder / STORE_FILE))
    return json.loads(done.stdout.splitlines()[-1]), config


def check_restarts(config, lost):
    """What was on the nodes came back, and is in the books; how often each kind."""
    noted = Counter(event["part"].split()[0] for event in events(config.folder, "restarted"))
    assert noted["engine"] == lost["engine"]
    assert noted["worker"] == lost["worker"]
    # One that gives no answer as the run goes back is made anew as well.
    assert noted["trainer"] >= lost["trainer"]
    return noted


def test_a_run_outlives_the_node_of_its_trainer_and_uses_one_that_joins(tmp_path):
    found, config = run_main(tmp_path, FEW_STEPS, 2, lose_one_and_gain_one)
    blind = f"(node {found['blind'][:8]}) does not see the folder {str(config.folder)!r} as this machine does"
    assert blind in found["refused"]
    assert not found["left"]
    # The engines were apart, so one of them is lost; the node that is left has room for three parts of five.
    assert found["engines"] == 2
    assert "trainer" in found["lost"]
    assert len(found["on the newcomer"]) >= 2
    check_restarts(config, Counter(part.split()[0] for part in found["lost"]))


@pytest.mark.soak
def test_ranks_of_two_nodes_hand_their_weights_over(tmp_path):
    """As checked in the run: with them engines find the trainer's log probabilities."""
    found, _ = run_main(tmp_path, FEW_STEPS, 3, note_places)
    places = found["places"]
    assert places["rank 0"] == places["trainer"]
    assert len({place for part, place in places.items() if part.startswith("rank")}) == 2


@pytest.mark.soak
def test_a_run_outlives_twenty_nodes_that_are_killed(tmp_path):
    found, config = run_main(tmp_path, SOAK_KILLS * STEPS_A_KILL, 3, lose_random_ones)
    print(check_restarts(config, Counter(found["lost"])), train_rows(config.folder)[-1])
