"""Runs whose servers sleep while they train, all or some: a real run and trainer, scripted server processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from forebay.config import parse_config
from forebay.runs import steps
from forebay.runs.checkpoints import limit_lag
from forebay.runs.config import RunConfig
from forebay.runs.launch import launch
from forebay.train import TrainController
from sleeping_server import write_server
from warm_python import interpreter

SET_UP = """
assert ("--enable-sleep-mode" in sys.argv) is (os.environ["CUDA_VISIBLE_DEVICES"] == "0")
"""


@pytest.fixture(autouse=True)
def ranks_have_gpus(monkeypatch):
    """As if ranks were on the first GPUs; weights go by memory of the host all the same."""
    monkeypatch.setattr("forebay.runs.placement.rank_gpus", lambda config, _=None: list(range(config.train.ranks)))
    monkeypatch.setattr("forebay.runs.rollouts.shared_gpu", lambda config: None)


def config(tmp_path: Path, gpus=((0,),), **changes) -> RunConfig:
    environment = write_server(tmp_path, str(tmp_path / "state_{server}.json"), SET_UP)
    arguments = {"servers": len(gpus), "python": interpreter(tmp_path), "gpus": gpus, "environment": environment}
    task = {
        "name": "sorting",
        "data": {"source": "sorting", "arguments": {"length": 3, "letters": 5}, "size": 60},
        "judge": "exact_match",
        "sample": {"max_tokens": 3},
    }
    table = {
        "name": "run",
        "device": "cpu",
        "steps": 4,
        "batch_size": 2,
        "rollouts_per_prompt": 2,
        "output": str(tmp_path),
        "model": {"source": "tiny", "max_context": 40, "tiny": {"hidden_size": 16, "num_layers": 1, "num_heads": 1}},
        "engine": {"name": "vllm", "arguments": arguments},
        "tasks": [task],
        "train": {"lr": 1e-3, "token_budget": 256},
    }
    return parse_config(RunConfig, {**table, **changes})


def watch_moves(monkeypatch, seen):
    """Append to `seen` that a trainer moves its moments, and no weights, to the host's memory or back."""
    offload, onload = TrainController.offload, TrainController.onload

    def watched_offload(self, *, weights):
        assert weights is False
        seen.append("offload")
        offload(self, weights=weights)

    def watched_onload(self):
        seen.append("onload")
        onload(self)

    monkeypatch.setattr(TrainController, "offload", watched_offload)
    monkeypatch.setattr(TrainController, "onload", watched_onload)


@pytest.mark.parametrize("interval", [1, 2])
def test_the_server_sleeps_while_the_trainer_trains_and_is_not_started_then(tmp_path, monkeypatch, interval):
    state_file = tmp_path / "state_0.json"
    seen: list[str] = []
    train = TrainController._train

    def watched_train(self, batch):
        state = json.loads(state_file.read_text())
        assert state["asleep"] == ["kv_cache", "weights"]
        # Only weights that are replaced before the next rollout are let go.
        assert state["lacks_weights"] is ((self.train_step + 1) % interval == 0)
        if self.train_step == 1:
            # It sleeps, and is lost: it must not come back before the trainer has left.
            os.kill(state["pid"], signal.SIGKILL)
            state_file.unlink()
        result = train(self, batch)
        assert self.train_step != 2 or not state_file.exists()
        seen.append("train")
        return result

    monkeypatch.setattr(TrainController, "_train", watched_train)
    watch_moves(monkeypatch, seen)
    asyncio.run(launch(config(tmp_path, produce={"sync_weights_interval": interval})))
    assert seen == ["offload", *["onload", "train", "offload"] * 4][: len(seen)]
    assert seen.count("train") == 4
    calls = state_file.with_suffix(".calls").read_text().split()
    assert calls.count("started") == 2
    assert calls.count("/sleep") == 4
    assert "while" not in calls, "a request came while it sleeps"
    last = json.loads(state_file.read_text())["pid"]
    with pytest.raises(ProcessLookupError):
        os.kill(last, 0)


@pytest.mark.parametrize(
    "produce",
    [
        {"mode": "colocated"},
        {"mode": "separate"},
        # The second step's rollouts are made, or go on, with weights that were kept.
        {"mode": "separate", "in_flight_update": True, "sync_weights_interval": 2},
    ],
    ids=str,
)
def test_of_two_servers_the_one_on_a_rank_s_gpu_sleeps_while_two_ranks_train(tmp_path, monkeypatch, produce):
    states = [tmp_path / f"state_{number}.json" for number in range(2)]
    seen: list[str] = []
    train = TrainController._train

    def watched_train(self, batch):
        asleep = [json.loads(state.read_text())["asleep"] for state in states]
        assert asleep == [["kv_cache", "weights"], []]
        seen.append("train")
        return train(self, batch)

    monkeypatch.setattr(TrainController, "_train", watched_train)
    watch_moves(monkeypatch, seen)
    sync_weights = steps.sync_weights

    async def synced(run):
        """With both: a run begins once one is up, and the other may take longer to start."""
        await sync_weights(run)
        while len(run.controller.engines_up) < 2:
            await run.controller._change()

    monkeypatch.setattr(steps, "sync_weights", synced)
    changes = {"train": {"lr": 1e-3, "token_budget": 256, "ranks": 2}, "steps": 3, "produce": produce}
    asyncio.run(launch(config(tmp_path, gpus=[[0], [2]], **changes)))
    assert seen == ["offload", *["onload", "train", "offload"] * 3][: len(seen)]
    assert seen.count("train") == 3
    calls = [state.with_suffix(".calls").read_text() for state in states]
    assert "while it sleeps" not in calls[0]
    assert [made.count("/sleep") for made in calls] == [3, 0]
    assert [made.count("/server_info") for made in calls] == [1, 1], "one was lost and brought up again"
    assert all("generate" in made and "/finish_weight_update" in made for made in calls)


def test_weights_that_a_server_sleeps_without_are_handed_over_also_if_the_guard_changes_when(tmp_path, monkeypatch):
    """Step 3 is trained for a hand-over every three steps, and from then on there is one every two."""
    monkeypatch.setattr(steps, "guard", lambda run, train_step, _: train_step == 3 and limit_lag(run, 2))
    produce = {"mode": "separate", "sync_weights_interval": 3, "max_staleness": 4}
    asyncio.run(launch(config(tmp_path, produce=produce)))
    calls = (tmp_path / "state_0.calls").read_text().split()
    # At the start, after step 3 and after step 4.
    assert calls.count("/finish_weight_update") == 3
    assert calls.count("/server_info") == 1, "it was brought up again"
