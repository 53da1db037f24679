"""Whole runs: they learn, they go on after a stop, and they outlive their workers."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import ClassVar
from unittest.mock import Mock

import numpy as np
import pyarrow.parquet as pq
import pytest
from environment_factory import pid_of, small_run
from typer.testing import CliRunner

from forebay.cli.commands import app
from forebay.config import ConfigError
from forebay.environments import run as run_module
from forebay.environments.config import FragmentRunConfig
from forebay.environments.run import launch, load_checkpoint
from forebay.environments.workers.messages import WorkerError
from forebay.environments.workers.worker_pool import ProcessWorkers
from forebay.metrics import read_jsonl
from forebay.runs.folder import list_checkpoints, saved_as
from forebay.runs.record.history import list_parts
from warm_python import warm_python


def resumed(config, changes):
    return saved_as(FragmentRunConfig, config.folder, changes)


def rows_of(config):
    return read_jsonl(config.folder / "metrics.jsonl")


async def launch_until(config, enough):
    """Run `config`, and stop it with a signal once `enough` says so of its rows."""

    async def interrupt():
        try:
            while not (config.folder / "metrics.jsonl").exists() or not enough(rows_of(config)):
                await asyncio.sleep(0.05)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    interrupting = asyncio.ensure_future(interrupt())
    assert await launch(config)
    await interrupting


async def test_a_run_learns(tmp_path):
    config = small_run(
        tmp_path,
        steps=12,
        batch_size=2,
        eval_episodes=10,
        environment={"num_envs": 16},
        fragments={"length": 64},
        policy={"hidden_size": 32},
        train={"lr": 2e-3, "epochs": 10, "mini_batches": 4},
    )
    assert not await launch(config)
    rows = rows_of(config)
    returns = [row["return"] for row in rows if row.get("return")]
    assert returns[-1] > 2 * returns[0]
    assert rows[-1]["eval/return"] > 100
    assert max(row["lag"] for row in rows[1:]) <= config.fragments.max_staleness
    assert (config.folder / "run.toml").stat().st_size > 0
    assert not list(config.folder.glob("buffer-*"))
    # What the board reads: the books balance, and every train step is an activity.
    live = json.loads((config.folder / "live.json").read_text())
    assert (live["state"], live["unit"]) == ("finished", "fragments")
    (books,) = live["books"].values()
    assert books["trained"] >= 12 * 2
    assert books["generated"] == books["trained"] + sum(books["dropped"].values()) + books["live"]
    spans = [row for part in list_parts(config.folder, "spans") for row in pq.read_table(part.path).to_pylist()]
    assert [row["name"] for row in spans if row["stage"] == "train"] == [f"step {n}" for n in range(1, 13)]


async def test_a_resumed_run_goes_on(tmp_path):
    config = small_run(tmp_path, policy={"memory": "gru"}, checkpoint_every=2)
    await launch(config)
    first = load_checkpoint(list_checkpoints(config.folder)[-1])
    longer = resumed(config, ["steps=5"])
    await launch(longer, resume=config.folder)
    last = load_checkpoint(list_checkpoints(config.folder)[-1])
    assert [row["train_step"] for row in rows_of(config)] == [0, 1, 2, 3, 4, 5]
    assert last.counts["step"] == 5
    assert last.counts["num_steps"] > first.counts["num_steps"]
    assert last.counts["session_id"] == first.counts["session_id"]
    assert last.arrays["observations/count"] > first.arrays["observations/count"]
    assert not np.array_equal(last.arrays["policy/actor.0.weight"], first.arrays["policy/actor.0.weight"])
    # What the first run left in its buffer was still of use.
    assert rows_of(config)[-1]["buffer/dropped/session"] == 0


@pytest.mark.parametrize(
    "changes", ["environment.num_envs=2", "fragments.length=8", "fragments.fragments_per_chunk=2"]
)
async def test_fragments_of_another_shape_are_left_behind(tmp_path, changes, capsys):
    config = small_run(tmp_path, steps=1, eval_episodes=1)
    await launch(config)
    await launch(resumed(config, ["steps=3", changes]), resume=config.folder)
    assert "of another stream of steps" in capsys.readouterr().out
    assert rows_of(config)[-1]["train_step"] == 3


async def test_a_damaged_checkpoint_is_one_sentence_that_offers_the_one_before(tmp_path):
    config = small_run(tmp_path, steps=2, checkpoint_every=1, eval_episodes=1)
    await launch(config)
    newest = list_checkpoints(config.folder)[-1]
    for file in [path for path in sorted(newest.rglob("*")) if path.is_file()]:
        before = file.read_bytes()
        file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]) if before else b"x")
        with pytest.raises(ConfigError) as caught:
            await launch(resumed(config, ["steps=3"]), resume=config.folder)
        assert repr(str(file)) in str(caught.value)
        assert "step_000001 is whole" in str(caught.value)
        file.write_bytes(before)


@pytest.mark.parametrize(
    "fragments",
    [
        {"max_staleness": 0},
        {"max_reuse": 3},
        {"fragments_per_chunk": 3, "max_reuse": 2},
        {"length": 1, "max_staleness": 0, "fragments_per_chunk": 2},
    ],
    ids=str,
)
async def test_every_way_to_cut_and_keep_comes_to_an_end(tmp_path, fragments):
    config = small_run(
        tmp_path, batch_size=3, steps=4, eval_episodes=1, environment={"workers": 2}, fragments=fragments
    )
    await launch(config)
    last = rows_of(config)[-1]
    assert last["train_step"] == 4
    assert last["buffer/max_staleness"] <= config.fragments.max_staleness
    assert last["buffer/mean_reuse"] <= config.fragments.max_reuse


class Murderous(ProcessWorkers):
    """Kills each worker's first life once it has worked."""

    groups: ClassVar[list[int]] = []

    async def run(self, spec, hub):
        running = asyncio.ensure_future(super().run(spec, hub))
        if spec.worker_uuid.split("-")[2] == "0":
            while not hub.num_fragments(spec.worker_uuid):
                await asyncio.wait([running], timeout=0.05)
            pid = pid_of(spec.worker_uuid)
            # What a terminal sends to the trainer's group does not reach it.
            self.groups.append(os.getpgid(pid))
            os.kill(pid, signal.SIGKILL)
        await running


async def test_a_killed_worker_is_started_again(tmp_path):
    # Without an end of its own: a first life that is quick could have made all batches of a short run.
    config = small_run(tmp_path, steps=10_000, environment={"mode": f"{__name__}:Murderous"}, eval_episodes=1)
    with warm_python():
        await launch_until(config, lambda rows: any(row.get("worker_restarts") == 1 for row in rows))
    assert len(Murderous.groups) == 1
    assert os.getpgrp() not in Murderous.groups


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration(3)], ids=["SystemExit", "StopIteration"])
async def test_an_environment_that_exits_while_it_is_evaluated_is_an_error(tmp_path, monkeypatch, error):
    monkeypatch.setattr(run_module.evaluation, "measure", Mock(side_effect=error))
    with pytest.raises(RuntimeError, match=f"{type(error).__name__}: 3"):
        await asyncio.wait_for(launch(small_run(tmp_path)), 60)


class Stillborn:
    async def run(self, spec, hub):
        from forebay.environments.workers.messages import WorkerDied

        raise WorkerDied("exit status 3\nno licence for this simulator")


async def test_workers_that_cannot_begin_end_the_run(tmp_path):
    config = small_run(tmp_path, environment={"mode": f"{__name__}:Stillborn"}, eval_episodes=1)
    with pytest.raises(WorkerError, match=r"3 times without a fragment.*\n.*no licence"):
        await launch(config)


async def test_no_batch_for_long_is_an_error(tmp_path, monkeypatch):
    class Idle:
        async def run(self, spec, hub):
            await asyncio.get_running_loop().create_future()

    monkeypatch.setattr("forebay.environments.run.build_mode", lambda config: Idle())
    monkeypatch.setattr(run_module, "STALL_S", 0.01)
    with pytest.raises(WorkerError, match=r"no batch arrived within 0\.01 s"):
        await launch(small_run(tmp_path, eval_episodes=1))


async def test_a_run_that_is_stopped_saves_first(tmp_path):
    config = small_run(tmp_path, steps=10_000)
    await launch_until(config, lambda rows: len(rows) >= 3)
    assert load_checkpoint(list_checkpoints(config.folder)[-1]).counts["step"] >= 2


RECIPE = """
name = "small"
steps = 1
batch_size = 1
output = "OUTPUT"
eval_episodes = 2
environment = { id = "CartPole-v1", num_envs = 2, workers = 1, mode = "threads" }
fragments = { length = 8 }
"""


def forebay(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_trains_resumes_and_evaluates(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.replace("OUTPUT", str(tmp_path)))
    dry = forebay("train", recipe, "--dry-run", "train.lr=1e-2")
    assert "lr = 0.01" in dry.stdout
    assert not (tmp_path / "small").exists()
    assert "mean return" in forebay("train", recipe).stdout
    again = forebay("train", recipe)
    assert again.exit_code == 2
    assert "--overwrite" in again.stderr
    assert forebay("train", recipe, "--overwrite").exit_code == 0
    assert forebay("train", "--resume", tmp_path / "small", "steps=2").exit_code == 0
    assert json.loads((tmp_path / "small/checkpoints/step_000002/run.json").read_text())["num_resumes"] == 1
    assert "step 2" in forebay("eval", tmp_path / "small").stdout
    lost = forebay("train", "--resume", tmp_path / "small", "--without-groups")
    assert lost.exit_code == 2
    assert "--without-groups is for --resume of a run that trains a language model" in lost.stderr
    unrecorded = forebay("replay", tmp_path / "small")
    assert unrecorded.exit_code == 2
    assert "has no record: a language model's run begun with record = true has one" in unrecorded.stderr
    both = forebay("train", "--resume", tmp_path / "small", "--overwrite")
    assert both.exit_code == 2
    assert "--resume goes on with a run, and --overwrite replaces one" in both.stderr
    # Of a recipe, and of the run that was made from it.
    cluster = Path(__file__).parents[2] / "recipes/clusters/example.toml"
    commands = [("plan", recipe), ("simulate", recipe, "--cluster", cluster), ("warmup", recipe)]
    for command in [*commands, ("card", tmp_path / "small")]:
        refused = forebay(*command)
        assert refused.exit_code == 2
        assert refused.stderr.count("\n") == 1
        assert (
            "[environment] is of a run in environments: forebay train, eval and board work with it" in refused.stderr
        )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.lrr=1"], "did you mean 'lr'"),
        (["environment.id=CartPole-v9"], "CartPole"),
        (["environment.mode=process"], "did you mean 'processes'"),
        (["environment.arguments={gravity=1}"], "gravity"),
        (["policy.memory=gru", "train.mini_batches=9"], "is more than the 2 streams"),
        (["environment.arguments={max_episode_steps=0}"], "to be positive"),
        (["fragments.length=0"], "greater than or equal to 1"),
        (["fragments.length=1"], "streams of a single step"),
    ],
)
def test_what_does_not_fit_is_said_in_one_message(tmp_path, overrides, message):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.replace("OUTPUT", str(tmp_path)))
    done = forebay("train", recipe, *overrides)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert not (tmp_path / "small").exists()


async def test_a_checkpoint_of_another_policy_is_refused(tmp_path):
    config = small_run(tmp_path, steps=1)
    await launch(config)
    before = (config.folder / "run.toml").read_text()
    with pytest.raises(ConfigError, match=r"step_.*keep \[policy\]"):
        await launch(resumed(config, ["policy.hidden_size=8"]), resume=config.folder)
    assert (config.folder / "run.toml").read_text() == before


async def test_two_processes_do_not_work_in_one_folder(tmp_path):
    config = small_run(tmp_path, steps=1, eval_episodes=1)
    holds = f"""
from pathlib import Path
from forebay.runs.folder import occupied
with occupied(Path({str(config.folder)!r})):
    print("mine", flush=True)
    input()
"""
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-c", holds, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert await other.stdout.readline() == b"mine\n"
    with pytest.raises(ConfigError, match=rf"at work in .*process {other.pid}\)"):
        await launch(config)
    other.kill()
    await other.communicate()
    assert not await launch(config)


def test_check_acts_once_and_keeps_nothing(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.replace("OUTPUT", str(tmp_path)))
    said = forebay("train", recipe, "--check").stdout
    assert [line.split()[0] for line in said.splitlines()] == ["folder", "policy", "workers", "step", "all"]
    assert "CartPole-v1: reward 1" in said
    assert list(tmp_path.iterdir()) == [recipe]
    assert "No-v7" in forebay("train", recipe, "--check", "environment.id=No-v7").stderr
