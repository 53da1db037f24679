"""The ranks of a trainer as actors: the same training, and an end that is told."""

import asyncio
import os
import runpy
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from forebay.cluster import feeding
from forebay.cluster import ranks as ray_ranks
from forebay.cluster import trainer as ray_trainer
from forebay.cluster.calls import blocking_actor
from forebay.cluster.feeding import Feeder
from forebay.cluster.ranks import RankActor, RayRanks
from forebay.cluster.trainer import RayTrainer
from forebay.models import load_model
from forebay.models.images import IMAGES
from forebay.models.starting_weights import BaseDiffersError
from forebay.runs.placement import PartLost
from forebay.train import TrainConfig, TrainController
from forebay.train.parallel.ranks import RankError
from forebay.types import RolloutState, Status

WHOLE = SimpleNamespace(takes_buckets=False)
"""An engine that takes weights out of the object store."""


def make_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))


def make_groups():
    random = np.random.default_rng(0)
    return [
        [
            RolloutState(
                [],
                rollout_id=f"{number}.{member}",
                group_id=number,
                task_name="task",
                prompt_ids=[3 + number, 4],
                response_ids=random.integers(3, 23, length := int(random.integers(1, 8))),
                logprobs=-random.random(length),
                response_model_steps=np.zeros(length),
                reward={"score": float(member % 2)},
                status=Status.COMPLETED,
            )
            for member in range(4)
        ]
        for number in range(3)
    ]


def trainer(ranks=None, num_ranks=1, model=None):
    config = TrainConfig(lr=1e-2, token_budget=40, ranks=num_ranks)
    return TrainController(model or make_model(), config, pad_token_id=0, ranks=ranks)


def start_ranks():
    actors = [blocking_actor(RankActor).options(num_cpus=0.1).remote() for _ in range(2)]
    return actors, RayRanks(actors, "cpu", threads=1, search_path=())


def test_two_ranks_in_actors_train_as_one_and_the_loss_of_one_is_told(ray):
    actors, ranks = start_ranks()
    alone, several = trainer(), trainer(ranks, 2)
    for _ in range(2):
        expected, metrics = alone.fit(make_groups()).metrics, several.fit(make_groups()).metrics
        for name in ("train/loss", "train/grad_norm"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6)
    # Each writes its own, or, as on several machines, the first one all.
    assert not ranks.are_apart
    for ranks.are_apart in (False, True):
        torch.testing.assert_close(
            dict(several._learner.weights()), dict(alone._learner.weights()), atol=1e-4, rtol=1e-4
        )
    ray.kill(actors[1])
    with pytest.raises(RankError, match=r"rank 1 died in"):
        several.fit(make_groups())
    with pytest.raises(RankError, match="the ranks have ended"):
        several.fit(make_groups())


def test_images_get_to_ranks_in_actors(ray, tmp_path):
    shapes = runpy.run_path(str(Path(__file__).parents[2] / "recipes" / "shapes" / "shapes.py"))
    shapes["write_model"](tmp_path)
    groups = make_groups()
    # The last group has none.
    for group, row in zip(groups[:2], shapes["questions"](size=2), strict=True):
        for state in group:
            state.prompt_ids = np.array([1, *[13] * 16, 3])
            state.mm_info = {IMAGES: [row["image"]]}
    for state in (state for group in groups for state in group):
        state.response_ids = 3 + state.response_ids % 9
    _, ranks = start_ranks()
    expected = trainer(model=load_model(tmp_path)).fit(groups).metrics
    metrics = trainer(ranks, 2, load_model(tmp_path)).fit(groups).metrics
    ranks.close()
    for name in ("train/loss", "train/grad_norm", "train/entropy"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6)


class OnNode:
    """Stands for a rank's actor on the machine of this id; as if each of its calls had ended."""

    def __init__(self, node):
        self.place = SimpleNamespace(remote=lambda: (node, f"there, {node}", f"3 of {node}"))


def test_ranks_of_one_machine_are_neighbors_by_number(monkeypatch):
    started = []
    here = SimpleNamespace(get_node_id=lambda: "b")
    fake = SimpleNamespace(get=lambda answers: answers, get_runtime_context=lambda: here)
    monkeypatch.setattr(ray_ranks, "import_ray", lambda: fake)
    monkeypatch.setattr(RayRanks, "_ask", lambda self, method, arguments: started.extend(arguments))
    actors = [OnNode(node) for node in ("b", "a", "b", "a")]
    ranks = RayRanks(actors, "cpu", threads=1, search_path=())
    # The first are on the trainer's machine, where all meet and weights are put.
    assert ranks._actors == [actors[0], actors[2], actors[1], actors[3]]
    assert [(rank, meeting) for rank, _, meeting, *_ in started] == [(n, "there, b") for n in range(4)]
    assert ranks.are_apart
    assert not RayRanks(actors[::2], "cpu", threads=1, search_path=()).are_apart


@pytest.mark.parametrize(("sees_any", "device"), [(True, "cuda:0"), (False, "cpu")])
def test_weights_leave_by_the_first_rank_s_gpu_which_ray_hides_from_the_trainer(sees_any, device, monkeypatch, caplog):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    seen = []
    monkeypatch.setattr(
        torch.cuda, "is_available", lambda: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]) or sees_any
    )
    here = SimpleNamespace(get_node_id=lambda: "b")
    fake = SimpleNamespace(get=lambda answers: answers, get_runtime_context=lambda: here)
    monkeypatch.setattr(ray_ranks, "import_ray", lambda: fake)
    monkeypatch.setattr(RayRanks, "_ask", lambda *_: [])
    # Those of ranks on a CPU say nothing.
    RayRanks([OnNode("b")], "cpu", threads=1, search_path=())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    RayRanks([OnNode("a"), OnNode("b")], "cuda", threads=1, search_path=())
    feeder = Feeder("cuda")
    feeder.loop.call_soon_threadsafe(feeder.loop.stop)
    for thread in threading.enumerate():
        if thread.name == "forebay-feeder":
            thread.join()
    feeder.loop.close()
    assert (feeder._device, seen) == (device, ["3 of b"])
    monkeypatch.setattr(feeding, "import_ray", lambda: fake)
    monkeypatch.setattr(feeding, "Sender", Mock(side_effect=LookupError))
    for is_far in (False, True, True):
        # A server that maps the memory is sent nothing.
        assert not caplog.records or is_far
        with pytest.raises(LookupError):
            asyncio.run(feeder.feed(Mock(is_far=is_far), {}, False))
    assert [record.getMessage().rpartition(" ")[2] for record in caplog.records] == ["gloo"] * (not sees_any)


def test_a_rank_that_fails_alone_is_told_with_its_trace_and_all_are_ended(ray):
    _, ranks = start_ranks()
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 failed in close: TypeError: .*line .* in call"):
        ranks.call("close", [[], ["too much"]])
    assert not any(is_there(pid) for pid in ranks.pids)


def is_there(pid):
    """Whether it lives on: Ray ends processes in its own time."""
    for _ in range(3000):
        if not os.path.exists(f"/proc/{pid}"):
            return False
        time.sleep(0.1)
    return True


@pytest.fixture
def give_up_soon(monkeypatch):
    """From when it is called: actors may take long to start."""

    def give_up_soon():
        for module in (ray_trainer, ray_ranks):
            monkeypatch.setattr(module, "BEAT_EVERY_S", 0.2)
            monkeypatch.setattr(module, "SILENCE_LIMIT_S", 1.0)

    return give_up_soon


def test_a_frozen_rank_is_named_and_all_are_ended(ray, give_up_soon):
    _, ranks = start_ranks()
    give_up_soon()
    os.kill(ranks.pids[1], signal.SIGSTOP)
    with pytest.raises(RankError, match="rank 1 gave no sign of life for 1 s in begin_resume: it hangs"):
        ranks.call("begin_resume", [["nowhere"], ["nowhere"]])
    with pytest.raises(RankError, match="the ranks have ended"):
        ranks.call("begin_resume", [["nowhere"], ["nowhere"]])


async def test_a_frozen_trainer_is_lost_and_one_at_work_is_not(ray, give_up_soon):
    class Sleeping:
        def pid(self):
            return os.getpid()

        def call(self, method, *arguments):
            time.sleep(3)

        def weights(self, adapters):
            time.sleep(1000)

    actor = blocking_actor(Sleeping).options(num_cpus=0.1).remote()
    pid = await actor.pid.remote()
    there = RayTrainer(actor, [pid])
    give_up_soon()
    # Longer than the limit, and the interpreter is free.
    assert await asyncio.to_thread(there.begin_save, "nowhere") is None
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(PartLost, match=r"called to begin_save, .*no answer within 1 s"):
        await asyncio.to_thread(there.begin_save, "nowhere")
    assert "no answer" in there.lost_because
    with pytest.raises(PartLost, match="called to weights, was asked for a sign of life"):
        await there.sync_weights(SimpleNamespace(takes_adapters=True, engines=(WHOLE,)))
    os.kill(pid, signal.SIGKILL)


async def test_engines_that_refuse_adapters_get_merged_weights_from_then_on(ray):
    class Source:
        def weights(self, adapters):
            return (3, 8 if adapters else 100, {"r": 1} if adapters else None), b"weights"

    class Controller:
        takes_adapters, engines = True, (WHOLE,)

        def __init__(self):
            self.given = []

        async def update_weights(self, published, step):
            self.given.append((step, published.adapters))
            if published.adapters:
                self.takes_adapters = False
                raise BaseDiffersError("another base")

    actor, controller = blocking_actor(Source).options(num_cpus=0.1).remote(), Controller()
    # Also of another trainer, in place of a lost one: the engines are those that refused.
    assert [await RayTrainer(actor, [1]).sync_weights(controller) for _ in range(2)] == [100, 100]
    assert controller.given == [(3, {"r": 1}), (3, None), (3, None)]
