"""Runs on a Ray cluster of two hosts, network namespaces, with a slow, a lossy and a cut link between them.

::

    host a: Ray's head                 host b: another node
            the run's own process,             engines, which need its GPUs (that Ray only counts),
            the trainer, a worker              a worker

Also on a cluster that Ray's autoscaler makes larger.
"""

import asyncio
import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from test_ray_chaos import check_run
from test_ray_run import SEPARATE, events, pids_of, run_config, train_rows

from forebay.runs import launch as launching
from forebay.runs import placement, steps
from forebay.runs.record.history import read_spans
from forebay.runs.show.surroundings import ask_to_scale
from forebay.runs.store import STORE_FILE
from two_hosts import Line, make_hosts
from warm_python import ADDRESS, warm_workers

pytestmark = pytest.mark.soak

PORT = 6379
TOKEN = "a token that programs of this test have, and no others"
SOON = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
    "gcs_rpc_server_reconnect_timeout_s": 20,
}
"""A lost node is found lost after some seconds, and a lost head too; by Ray's own settings it takes longer."""
NEAR = {"delay_s": 0.0, "bits_per_s": 1e9}
SLOW = {"delay_s": 0.05, "bits_per_s": 20e6}
ONE_AWAY = {"gpus_per_engine": 1}
"""All engines are on host b, the only one with GPUs."""
HELD_AT = 3


def odd(state):
    """A score that differs within a group, so that there is something to learn."""
    return float(sum(state.response_ids) % 2)


def config_on(folder, address, arguments, changes):
    """Of a run whose weights take a while on a slow link."""
    arguments = {"num_engines": 2, "num_workers": 2, "max_restarts": 50, "cpus": 1.0, "address": address, **arguments}
    table = {
        "model": {"source": "tiny", "tiny": {"hidden_size": 128, "num_layers": 2, "num_heads": 2}},
        "engine": {"name": "transformers", "dtype": "float32", "arguments": {"device": "cpu"}},
        "tasks": [{**run_config(folder).tasks[0].model_dump(), "judge": f"{__name__}:odd"}],
        "cluster": {"name": "ray", "arguments": arguments},
        "produce": {**SEPARATE, "stall_after_s": 40.0},
        "verify_weights": True,
    }
    return run_config(Path(folder), **{**table, **changes})


# Programs on the hosts


def serve(*arguments):
    """``ray start`` with these arguments; it ends when it is killed."""
    from ray.scripts.scripts import cli

    with warm_workers():
        cli(["start", *arguments, "--block", "--disable-usage-stats", "--object-store-memory=100000000"])


def train(ip, resumes, *told):
    """The run, held at a step until it is told to go on; says then where its parts are, all of which are up."""
    import ray
    from ray._private.state import actors

    clusters, make_cluster, fit = [], placement.make_cluster, steps.fit

    def made(config):
        clusters.append(make_cluster(config))
        return clusters[0]

    async def held(run, groups):
        while run.train_step == HELD_AT and not resumes and clusters:
            while run.controller.away():
                await asyncio.sleep(0.05)
            known = {each["Pid"]: each["Address"] for each in actors().values()}
            at = {part: known[pid] for part, pid in pids_of(clusters[0]).items()}
            places = {part: [place["IPAddress"], place["NodeID"]] for part, place in at.items()}
            print(json.dumps(places), flush=True)
            if await asyncio.to_thread(sys.stdin.readline) == "go on\n":
                clusters.clear()
        return await fit(run, groups)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "make_cluster", made)
        patch.setattr(steps, "fit", held)
        # Ray looks for its node among all processes, which here are those of both hosts.
        patch.setattr(ray, "init", functools.partial(ray.init, _node_ip_address=ip))
        config = config_on(*told)
        asyncio.run(launching.launch(config, resume=config.folder if resumes else None))


class OnHosts:
    """A cluster whose head is on host a, and programs of this file on both hosts."""

    def __init__(self, folder, *arguments, **environment):
        self.folder, self.line = folder, Line(**NEAR)
        self.hosts = make_hosts(self.line)
        self.address, self.environment = f"{self.hosts.addresses['a']}:{PORT}", environment
        # The paths of sockets in it have to be short.
        self.scratch = Path(tempfile.mkdtemp(prefix="hosts", dir="/tmp"))
        self.programs, self.numbers, self.run = [], itertools.count(), None
        try:
            self.serve("a", "--head", f"--port={PORT}", "--include-dashboard=false", *arguments)
        except BaseException:
            self.close()
            raise

    def serve(self, host, *arguments):
        """Have the host be one of the cluster."""
        ip, own = self.hosts.addresses[host], self.scratch / str(next(self.numbers))
        program = self.start(host, serve, f"--node-ip-address={ip}", f"--temp-dir={own}", *arguments)
        assert any("Ray runtime started" in line for line in program.stdout), self.log(host, serve)

    def join(self, num_cpus):
        """Have another host b, the link to which is near and whole."""
        self.hosts.end("b")
        self.hosts.heal()
        self.hosts.lose(0)
        vars(self.line).update(NEAR)
        self.serve("b", f"--address={self.address}", f"--num-cpus={num_cpus}", "--num-gpus=2")

    def start(self, host, what, *arguments):
        code = f"import {__name__} as tests; tests.{what.__name__}(*{arguments!r})"
        # Workers are forked from a process of their own host, and have its network.
        environment = {name: value for name, value in os.environ.items() if name != ADDRESS} | self.environment
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "PYTHONUNBUFFERED": "1"}
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with self._log(host, what).open("w") as log:
            command = self.hosts.command(host, sys.executable, "-c", code)
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            self.programs.append(subprocess.Popen(command, env=environment, text=True, **pipes))
        return self.programs[-1]

    def _log(self, host, what):
        return self.folder / f"{host}_{what.__name__}.log"

    def log(self, host, what):
        """The errors that the last such program said."""
        return self._log(host, what).read_text()

    def close(self):
        self.hosts.close()
        for program in self.programs:
            program.communicate()
        shutil.rmtree(self.scratch)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    made = OnHosts(tmp_path_factory.mktemp("hosts"), "--num-cpus=8", f"--system-config={json.dumps(SOON)}")
    yield made
    made.close()


class Trained:
    """A run's program on a host, up to the step at which it is held."""

    def __init__(self, cluster, folder, arguments, host="a", resumes=False, **changes):
        told = str(folder), cluster.address, arguments, changes
        self.cluster, self.host, self.config = cluster, host, config_on(*told)
        if cluster.run is not None:
            # A test that failed may have left it.
            cluster.run.kill()
        self.program = cluster.run = cluster.start(host, train, cluster.hosts.addresses[host], resumes, *told)
        self.lines, self.places = [], {}
        if not resumes:
            self.look()

    def look(self):
        """Find out where its parts are."""
        for line in self.program.stdout:
            self.lines.append(line)
            if line.startswith("{"):
                self.places = json.loads(line)
                return
        raise AssertionError(self.said())

    def tell(self, what):
        self.program.stdin.write(f"{what}\n")
        self.program.stdin.flush()

    def go_on(self):
        """To its end; its status."""
        if self.places:
            self.tell("go on")
        self.lines += self.program.stdout
        return self.program.wait()

    def said(self):
        return "".join(self.lines) + self.cluster.log(self.host, train)

    def on(self, host):
        """The kinds of the parts that were there."""
        ip = self.cluster.hosts.addresses[host]
        return Counter(part.split()[0] for part, place in self.places.items() if place[0] == ip)

    def check(self):
        """Every batch is whole, and no group is lost or trained twice; weights, metrics and spans are there."""
        check_run(self.config, str(self.config.folder / STORE_FILE))
        rows = train_rows(self.config.folder)
        # The last weights are those of engines that answered as the trainer does, which has learned.
        assert rows[-1]["sync/engines_unchecked"] == 0
        assert rows[-1]["sync/logprob_difference"] < 1e-5
        assert any(row["train/grad_norm"] > 0 for row in rows)
        assert {span.stage for span in read_spans(self.config.folder)} >= {"generate", "train", "sync"}

    def restarts(self):
        return Counter(event["part"].split()[0] for event in events(self.config.folder, "restarted"))


@pytest.mark.parametrize("how", ["slow", "lossy"])
def test_a_run_works_over_a_link(how, cluster, tmp_path):
    cluster.join(num_cpus=4)
    if how == "slow":
        vars(cluster.line).update(SLOW)
    else:
        cluster.hosts.lose(2)
    before = cluster.line.num_bytes
    run = Trained(cluster, tmp_path, ONE_AWAY)
    assert run.go_on() == 0, run.said()
    assert run.on("a")["trainer"] == 1
    assert run.on("b")["engine"] == 2
    run.check()
    assert not run.restarts()
    # Engines of one host share their weights, which crossed once for each step.
    sizes = [row["sync/bytes"] for row in train_rows(run.config.folder)]
    assert sum(sizes) < cluster.line.num_bytes - before < 3 * sum(sizes)


RANKS = {"num_engines": 1, "num_workers": 1}
"""With three ranks such a run asks for six CPUs, four of them for the ranks: on hosts of three these are apart."""


@pytest.fixture
def small_cluster(tmp_path):
    made = OnHosts(tmp_path, "--num-cpus=3", f"--system-config={json.dumps(SOON)}")
    yield made
    made.close()


@pytest.mark.parametrize("how", ["slow", "lossy", "cut", "silent"])
def test_ranks_on_both_hosts_train_over_a_link(how, small_cluster, tmp_path):
    hosts, is_lost = small_cluster.hosts, how in ("cut", "silent")
    small_cluster.join(num_cpus=3)
    if how == "slow":
        vars(small_cluster.line).update(SLOW)
    elif how == "lossy":
        hosts.lose(2)
    run = Trained(small_cluster, tmp_path, RANKS, train={"ranks": 3})
    assert run.on("a")["rank"]
    assert run.on("b")["rank"]
    if is_lost:
        hosts.cut() if how == "cut" else hosts.lose(100)
        # Another host takes its place.
        small_cluster.join(num_cpus=3)
    assert run.go_on() == 0, run.said()
    run.check()
    assert run.restarts()["trainer"] == is_lost


def test_a_run_goes_on_with_what_is_on_this_side_of_a_link_that_fell_silent(cluster, tmp_path):
    cluster.join(num_cpus=4)
    run = Trained(cluster, tmp_path, {})
    lost = run.on("b")
    cluster.hosts.lose(100)
    assert run.go_on() == 0, run.said()
    assert lost == {"engine": 1, "worker": 1}
    run.check()
    assert run.restarts() == lost
    for part in ("engine", "worker"):
        assert any(line.startswith(f"warning: {part}") and "cannot be reached" in line for line in run.lines)


def test_a_run_whose_engines_are_all_behind_a_cut_ends_and_names_them(cluster, tmp_path):
    cluster.join(num_cpus=4)
    run = Trained(cluster, tmp_path, ONE_AWAY)
    cluster.hosts.cut()
    assert run.go_on() == 1
    *_, error = run.said().strip().splitlines()
    assert "StallError: no progress for 40 s; engine 0, engine 1 not up; " in error
    # Nothing is lost: with another host it goes on.
    cluster.join(num_cpus=4)
    again = Trained(cluster, tmp_path, ONE_AWAY, resumes=True)
    assert again.go_on() == 0, again.said()
    again.check()


def test_a_run_that_lost_trainer_and_engines_to_a_cut_goes_on_with_another_host(cluster, tmp_path):
    cluster.join(num_cpus=16)
    run = Trained(cluster, tmp_path, ONE_AWAY)
    assert run.on("b") >= Counter({"trainer": 1, "engine": 2})
    cluster.hosts.cut()
    cluster.join(num_cpus=16)
    assert run.go_on() == 0, run.said()
    run.check()
    assert run.restarts() >= Counter({"trainer": 1, "engine": 2})
    assert "the trainer is lost: its machine, 10.77.0.2, has ended or cannot be reached" in run.said()


def test_a_run_that_is_cut_off_from_the_head_ends_and_is_resumed(cluster, tmp_path):
    cluster.join(num_cpus=16)
    run = Trained(cluster, tmp_path, ONE_AWAY, host="b")
    cluster.hosts.cut()
    assert run.go_on() == 1
    assert "Failed to connect to GCS within 20 seconds" in run.said()
    cluster.join(num_cpus=16)
    again = Trained(cluster, tmp_path, ONE_AWAY, resumes=True)
    assert again.go_on() == 0, again.said()
    again.check()


def test_ray_s_autoscaler_adds_a_node_for_an_engine_and_a_worker_that_join(tmp_path):
    node = {"node_config": {}, "min_workers": 0}
    kinds = {
        "ray.head.default": {**node, "max_workers": 0, "resources": {"CPU": 3}},
        "more": {**node, "max_workers": 3, "resources": {"CPU": 2, "object_store_memory": 100_000_000}},
    }
    commands = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    config = {
        **{f"{name}_commands": [] for name in commands},
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "upscaling_speed": 1.0,
        "cluster_name": "fake_multinode",
        "max_workers": 3,
        "idle_timeout_minutes": 10,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": f"10.77.0.1:{PORT}",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": kinds,
        "head_node_type": "ray.head.default",
    }
    (tmp_path / "nodes.yaml").write_text(json.dumps(config))
    # Not by Ray's `AutoscalingCluster`, which ends everything of Ray's on this machine first.
    cluster = OnHosts(
        tmp_path,
        "--num-cpus=3",
        f"--autoscaling-config={tmp_path / 'nodes.yaml'}",
        RAY_FAKE_CLUSTER="1",
        AUTOSCALER_UPDATE_INTERVAL_S="1",
    )
    try:
        arguments = {"num_engines": 1, "num_workers": 1, "placement_timeout_s": 400}
        run = Trained(cluster, tmp_path, arguments)
        (head,) = {node for _, node in run.places.values()}
        said = [ask_to_scale(run.config.folder, change) for change in ("engines=+1", "workers=+1")]
        run.tell("look again")
        run.look()
        assert said == ["2 now, 1 of them up"] * 2
        assert {part for part, (_, node) in run.places.items() if node == head} == {"trainer", "engine 0", "worker 0"}
        assert run.places["engine 1"] == run.places["worker 1"]
        # The number that the autoscaler gives its first node.
        assert run.places["engine 1"][1].endswith("f00001")
        assert run.go_on() == 0, run.said()
        run.check()
    finally:
        cluster.close()
