"""Weights from a trainer's actor straight to servers that engines' actors start, by processes of their own."""

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from test_nodes import Nodes
from test_ray_run import SEPARATE, check_books, run_config, train_rows

from forebay.cluster import ray_cluster
from forebay.cluster.calls import blocking_actor
from forebay.cluster.engines import EngineActor, EngineSpec
from forebay.cluster.trainer import RayTrainer, TrainerActor, TrainerSpec
from forebay.engines.base import WeightsGone
from forebay.io.shared import views
from forebay.metrics import read_jsonl
from forebay.models import load_model, resolve_model
from forebay.runs.folder import list_checkpoints
from forebay.runs.launch import launch
from forebay.runs.placement import PartLost
from warm_python import stand_in, warm_python, warm_workers

VLLM = os.environ.get("FOREBAY_VLLM_PYTHON")
SERVER = Path(__file__).with_name("plugin_server.py")


def server_config(folder, **changes):
    """A run with a scripted server for each engine, which writes to `given` what it is given."""
    (given := folder / "given").mkdir(exist_ok=True)
    program = folder / "python"
    # Without `-m` and the name of vLLM's own program.
    program.write_text(f'#!/bin/sh\nshift 2\nexec {shlex.join(stand_in([str(SERVER)]))} "$@"\n')
    program.chmod(0o755)
    arguments = {"servers": 1, "python": str(program), "environment": {"GIVEN": str(given)}}
    return run_config(folder, engine={"name": "vllm", "arguments": arguments}, **changes)


def small_trainer(is_far):
    """A trainer's actor with buckets of 4 KB, whose train step adds something to the weights.

    To one that `is_far` the engine is on another machine.
    """

    class Small(TrainerActor):
        def start(self, spec):
            from forebay.engines.weights import buckets

            buckets.BUCKET_BYTES = 4096
            return super().start(spec)

        def train(self):
            with self._trainer._turn, torch.no_grad():
                for weight in self._trainer.model.parameters():
                    weight.add_(torch.randn_like(weight))
                self._trainer.train_step += 1
            return self._trainer.train_step

        def feed(self, link, *others):
            link.node = "another" if is_far else link.node
            return super().feed(link, *others)

        def senders(self):
            return [sender._process.pid for sender in self._feeder._senders.values() if sender._process]

    return blocking_actor(Small).options(num_cpus=0.1).remote()


class Parts:
    """A trainer and an engine, and the server that it starts."""

    def __init__(self, ray, folder, is_far):
        self.ray, self.given, self.is_far = ray, folder / "given", is_far
        config = server_config(folder)
        model_folder = resolve_model(config.model, seed=config.seed)
        self.own = {"config": config, "model_folder": model_folder, "search_path": tuple(sys.path), "device": "cpu"}
        self.trainer = small_trainer(is_far)
        options = {"num_cpus": 0.1, "max_restarts": -1, "max_concurrency": 100}
        self.engine = ray.remote(EngineActor).options(**options).remote()

    async def start(self):
        spec = TrainerSpec(name="trainer", ranks=(), **self.own)
        _, self.pid = await asyncio.gather(self.trainer.start.remote(spec), self.start_engine())
        return self

    async def start_engine(self):
        spec = EngineSpec(name="engine 0", serves_at_once=False, **self.own)
        pid = await self.engine.start.options(max_task_retries=-1).remote(spec)
        await self.engine.resume.remote()
        return pid

    async def load(self):
        """Have the trainer give the engine's server its weights."""
        step, _ = await self.trainer.offer.remote()
        await self.engine.load_weights.remote(self.trainer, step)

    async def is_stuck(self):
        """The server has been told of a bucket, and does not take it."""
        while not (self.given / "waits").exists():
            await asyncio.sleep(0.01)
        (self.given / "waits").unlink()

    def newest(self):
        """The weights that the server was given last, and what is known of them."""
        file = max(self.given.glob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
        with safe_open(file, framework="pt") as opened:
            return load_file(file), opened.metadata()

    async def check(self, step):
        """The server has the trainer's weights of now, bit by bit, labeled as those of `step`."""
        _, ref = self.trainer.weights.options(num_returns=2).remote(False)
        layout, data = await ref
        found, facts = self.newest()
        expected = dict(views(layout, torch.from_numpy(data.copy())))
        assert expected.keys() <= found.keys()
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())
        assert json.loads(facts["is_sent"]) is self.is_far
        assert f"{step:06d}" in facts["version"].rpartition("_")[2].partition("-")[0]
        return facts

    def close(self):
        for actor in (self.engine, self.trainer):
            self.ray.kill(actor)


@pytest.fixture(params=[False, True], ids=["near", "far"])
async def parts(ray, tmp_path, request):
    parts = await Parts(ray, tmp_path, request.param).start()
    yield parts
    await parts.engine.close.remote()
    parts.close()


async def ended(pid):
    while os.path.exists(f"/proc/{pid}"):
        await asyncio.sleep(0.01)


async def overtaken(parts):
    """A hand-over in whose buckets a train step comes, stuck in its second try, and the step after that."""
    (parts.given / "stuck").touch()
    loading = asyncio.ensure_future(parts.load())
    await parts.is_stuck()
    await parts.trainer.train.remote()
    (parts.given / "one").touch()
    await parts.is_stuck()
    return loading, asyncio.ensure_future(parts.trainer.train.remote())


async def test_a_server_has_the_weights_of_now_whatever_ends_and_the_trainer_goes_on(parts):
    assert await parts.engine.facts.remote() == (512, False, True)
    for step in (1, 2):
        assert await parts.trainer.train.remote() == step
        await parts.load()
        await parts.check(step=step)
    senders = await parts.trainer.senders.remote()
    assert len(senders) == parts.is_far, "the same for both"
    # A train step in the middle of the buckets: the server is given all of them again, and the next step waits.
    loading, training = await overtaken(parts)
    (parts.given / "stuck").unlink()
    await loading
    await training
    assert "-at_000003" in parts.newest()[1]["version"]
    # The same, and the engine's process ends with its server.
    loading, training = await overtaken(parts)
    assert (await asyncio.wait([training], timeout=0.5))[1], "it is held"
    os.kill(parts.pid, signal.SIGKILL)
    with pytest.raises(parts.ray.exceptions.RayActorError):
        await loading
    assert await training == 6
    (parts.given / "stuck").unlink()
    # Started again between two steps, it is offered those of an earlier one.
    parts.pid = await parts.start_engine()
    await parts.engine.load_weights.remote(parts.trainer, 2)
    await parts.check(step=6)
    if parts.is_far:
        await ended(senders[0])
        assert len(await parts.trainer.senders.remote()) == 1


async def test_a_trainer_that_ends_within_a_bucket_costs_no_server(parts):
    await parts.load()
    server = (await parts.check(step=0))["pid"]
    (parts.given / "stuck").touch()
    loading = asyncio.ensure_future(parts.load())
    await parts.is_stuck()
    parts.ray.kill(parts.trainer)
    (parts.given / "stuck").unlink()
    with pytest.raises(WeightsGone, match="the trainer"):
        await loading
    parts.trainer = small_trainer(parts.is_far)
    await parts.trainer.start.remote(TrainerSpec(name="trainer", ranks=(), **parts.own))
    await parts.trainer.train.remote()
    await parts.load()
    assert (await parts.check(step=1))["pid"] == server
    assert (await parts.engine.health.remote()).ok


async def test_engines_that_find_the_trainer_gone_have_the_run_go_back(ray):
    class Gone:
        def offer(self):
            return 3, 8

    class Controller:
        engines = (SimpleNamespace(takes_buckets=True),)

        async def update_weights(self, published, step):
            assert (published.ref, published.model_step, step) == (actor, 3, 3)
            raise PartLost("the weights of step 3 are lost")

    actor = blocking_actor(Gone).options(num_cpus=0.1).remote()
    with pytest.raises(PartLost, match="of step 3"):
        await RayTrainer(actor, [1]).sync_weights(Controller())


def never_stored():
    """Actors of a trainer whose weights never go into the object store."""

    class Unread(TrainerActor):
        def weights(self, adapters):
            raise AssertionError("the object store was asked for")

    return Unread


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["colocated", "separate"])
def test_a_run_gives_its_servers_the_weights_of_each_step_and_no_store_has_them(ray, tmp_path, monkeypatch, mode):
    monkeypatch.setattr(ray_cluster, "TrainerActor", never_stored())
    cluster = {"name": "ray", "arguments": {"num_engines": 2}}
    produce = SEPARATE if mode == "separate" else {}
    config = server_config(tmp_path, cluster=cluster, steps=3, checkpoint_every=1, keep_checkpoints=9, produce=produce)
    asyncio.run(launch(config))
    check_books(config.folder, num_steps=3)
    check_given(config, tmp_path / "given", are_sent={False}, num_steps=3)


def main(folder):
    """A run on two nodes, simulated on this machine, each with one of its engines."""
    with warm_workers(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_cluster, "TrainerActor", never_stored())
        nodes = Nodes(2)
        cluster = {"num_engines": 2, "num_workers": 1, "address": nodes.address, "cpus": 1.0}
        asyncio.run(launch(nodes_config(folder, cluster)))
        nodes.close()


def nodes_config(folder, cluster):
    return server_config(
        folder, cluster={"name": "ray", "arguments": cluster}, steps=3, checkpoint_every=1, keep_checkpoints=9
    )


@pytest.mark.soak
def test_of_two_engines_the_one_on_another_node_is_sent_its_weights(tmp_path):
    code = f"import {__name__} as tests; from pathlib import Path; tests.main(Path({str(tmp_path)!r}))"
    with warm_python(), warm_workers():
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", code], env=environment, timeout=1800, check=True)
    config = nodes_config(tmp_path, {})
    check_books(config.folder, num_steps=3)
    check_given(config, tmp_path / "given", are_sent={False, True}, num_steps=3)


@pytest.mark.skipif(VLLM is None, reason="FOREBAY_VLLM_PYTHON names no interpreter with vLLM")
@pytest.mark.parametrize("is_far", [False, True], ids=["near", "far"])
def test_vllm_computes_with_what_the_trainer_gave_it(ray, tmp_path, monkeypatch, is_far):
    """As checked in the run after each sync: the server's log probabilities are the trainer's."""

    class There(TrainerActor):
        def feed(self, link, *others):
            link.node = "another" if is_far else link.node
            return super().feed(link, *others)

        def weights(self, adapters):
            raise AssertionError("the object store was asked for")

    monkeypatch.setattr(ray_cluster, "TrainerActor", There)
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    arguments = {"servers": 1, "python": VLLM, "options": ["--enforce-eager"], "environment": environment}
    # Few letters, so that some answers are right in part.
    tiny = {"hidden_size": 128, "num_layers": 2, "num_heads": 2, "alphabet": "abcdefgh= "}
    config = run_config(
        tmp_path,
        cluster="ray",
        steps=3,
        engine={"name": "vllm", "arguments": arguments},
        model={"source": "tiny", "tiny": tiny},
        verify_weights=True,
        train={"lr": 1e-2},
        rollouts_per_prompt=8,
    )
    asyncio.run(launch(config))
    rows = [row for row in read_jsonl(config.folder / "metrics.jsonl") if "sync/logprob_difference" in row]
    assert len(rows) >= 3
    assert any(row["train/grad_norm"] for row in train_rows(config.folder)[:-1]), "they were others"


def check_given(config, given, *, are_sent, num_steps):
    """Each step's weights were given to both servers, as they are in its checkpoint."""
    saved = list_checkpoints(config.folder)
    found = {int(folder.name[-6:]): load_model(folder / "trainer/model").state_dict() for folder in saved}
    assert list(found) == [*range(num_steps + 1)]
    assert any(not torch.equal(found[0][name], weight) for name, weight in found[num_steps].items())
    sent, num_given = set(), dict.fromkeys(found, 0)
    for file in given.glob("*.safetensors"):
        weights, step = load_file(file), int(file.stem.partition("step_")[2][:6])
        with safe_open(file, framework="pt") as opened:
            sent.add(json.loads(opened.metadata()["is_sent"]))
        if step in found:
            num_given[step] += 1
            assert all(torch.equal(weights[name], weight) for name, weight in found[step].items())
    assert sent == are_sent
    assert set(num_given.values()) == {2}
