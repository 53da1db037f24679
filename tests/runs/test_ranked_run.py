"""A run whose trainer is on several ranks, in one process otherwise."""

import asyncio
import os
import signal

import pytest
from test_colocated_run import config

from forebay.metrics import read_jsonl
from forebay.runs import launch as launching
from forebay.runs.launch import launch
from forebay.runs.placement import PartLost
from forebay.train.parallel.ranks import LocalRanks


@pytest.mark.soak
def test_a_run_that_loses_a_rank_goes_back_to_its_checkpoint_and_ends_as_it_would_have(tmp_path, monkeypatch):
    """One rank is killed once, in the third step; without a limit on restarts it would go unnoticed."""
    calls = {"update": 0}
    call = LocalRanks.call

    def kill_once(self, method, arguments):
        calls["update"] += method == "update"
        if method == "update" and calls["update"] == 3:
            os.kill(self.pids[1], signal.SIGKILL)
        return call(self, method, arguments)

    monkeypatch.setattr(LocalRanks, "call", kill_once)
    train = {"lr": 1e-3, "token_budget": 512, "ranks": 2}
    lost = config(tmp_path, name="lost", train=train, checkpoint_every=1, steps=3, warmup=None)
    asyncio.run(launch(lost))
    assert calls["update"] == 4
    one = config(tmp_path, name="one", train={**train, "ranks": 1}, steps=3, warmup=None)
    asyncio.run(launch(one))
    for with_two, with_one in zip(
        read_jsonl(lost.folder / "metrics.jsonl"), read_jsonl(one.folder / "metrics.jsonl"), strict=False
    ):
        if "train/loss" in with_one:
            assert with_two["train/loss"] == pytest.approx(with_one["train/loss"], abs=1e-5)
    monkeypatch.setattr(launching, "MAX_RESTARTS", 0)
    calls["update"] = 0
    with pytest.raises(PartLost, match="rank 1 died in update"):
        asyncio.run(launch(lost.model_copy(update={"name": "again"})))
