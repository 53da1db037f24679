"""A run that is killed at any moment, and goes on: the same training as if nothing had happened."""

import asyncio
import os
import random
import signal
import subprocess
import sys

import pytest

from forebay.config import load_config
from forebay.ledger import Ledger
from forebay.metrics import read_jsonl
from forebay.produce import ProductionError
from forebay.runs.config import RunConfig
from forebay.runs.folder import list_checkpoints, saved_config
from forebay.runs.launch import launch

STEPS, BATCH_SIZE = 6, 2

RUN_FILE = f"""
name = "run"
seed = 5
steps = {STEPS}
batch_size = {BATCH_SIZE}
rollouts_per_prompt = 2
checkpoint_every = 1
model = {{ source = "tiny", tiny = {{ hidden_size = 16, num_layers = 1, num_heads = 1 }} }}
train = {{ lr = 1e-3 }}

[[tasks]]
name = "sorting"
data = {{ source = "sorting", arguments = {{ length = 3, letters = 5 }}, size = 60 }}
judge = {{ name = "exact_match", arguments = {{ partial_credit = true }} }}
sample = {{ max_tokens = 4 }}
"""


def start(*arguments):
    command = [sys.executable, "-c", "from forebay.cli import main; main()", "train", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def losses(folder):
    return {row["train_step"]: row["train/loss"] for row in read_jsonl(folder / "metrics.jsonl")}


def kill(run_file, folder, rng):
    """Kill after some step was reported, within the time that about two steps take; whether it was killed."""
    step = rng.randint(2, STEPS - 2)
    with start(run_file, f"output={folder.parent}", "--overwrite") as child:
        for line in child.stdout:
            if line.split()[:1] == [f"{step}/{STEPS}"]:
                break
        try:
            child.wait(rng.uniform(0.0, 0.06))
        except subprocess.TimeoutExpired:
            os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert child.returncode in (0, -signal.SIGKILL)
    return child.returncode != 0


def kill_and_go_on(run_file, folder, seed):
    rng = random.Random(seed)
    # On a busy machine the run may be at its end before this process is told of the step.
    while not kill(run_file, folder, rng):
        pass
    asyncio.run(launch(saved_config(folder), resume=folder))


def check_rounds(tmp_path, seeds):
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN_FILE)
    asyncio.run(launch(load_config(RunConfig, run_file, [f"output={tmp_path / 'whole'}"])))
    whole = losses(tmp_path / "whole" / "run")
    assert sorted(whole) == list(range(1, STEPS + 1))
    for seed in seeds:
        folder = tmp_path / str(seed) / "run"
        kill_and_go_on(run_file, folder, seed)
        assert losses(folder) == whole
        ledger = Ledger.read(folder / "ledger.jsonl")
        balance = ledger.balance(ledger.count_live())
        assert balance.ok
        assert balance.trained == STEPS * BATCH_SIZE


@pytest.mark.usefixtures("warm")
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path):
    check_rounds(tmp_path, seeds=[0])


@pytest.mark.soak
def test_a_run_killed_at_ten_moments_goes_on_each_time(tmp_path):
    check_rounds(tmp_path, seeds=range(10))


BROKEN = {"from_call": 0, "calls": 0}


def breaking_judge(state):
    BROKEN["calls"] += 1
    if BROKEN["calls"] > BROKEN["from_call"]:
        raise RuntimeError("the judge broke down")
    return float(state.response_ids[0] % 2)


def test_a_run_whose_judge_breaks_down_is_saved_and_goes_on_once_it_is_mended(tmp_path):
    (tmp_path / "run.toml").write_text(RUN_FILE)
    judge = [f"tasks.0.judge.name={__name__}:breaking_judge", "tasks.0.judge.arguments={}"]
    changes = [f"output={tmp_path}", "checkpoint_every=0", *judge]
    # Breaks in the third step, with one of its groups judged.
    BROKEN.update(from_call=(2 * BATCH_SIZE + 1) * 2, calls=0)
    with pytest.raises(ProductionError, match="the judge broke down"):
        asyncio.run(launch(load_config(RunConfig, tmp_path / "run.toml", changes)))
    folder = tmp_path / "run"
    assert [path.name for path in list_checkpoints(folder)] == ["step_000002"]
    BROKEN["from_call"] = 10_000
    asyncio.run(launch(saved_config(folder), resume=folder))
    assert sorted(losses(folder)) == list(range(1, STEPS + 1))
    ledger = Ledger.read(folder / "ledger.jsonl")
    balance = ledger.balance(ledger.count_live())
    assert balance.ok
    assert balance.trained == STEPS * BATCH_SIZE
