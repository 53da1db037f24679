"""Parts of a run on Ray killed at random moments, again and again: nothing is lost or trained twice."""

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
from test_killed_separate_run import check_books
from test_ray_run import BATCH_SIZE, GROUP_SIZE, SEPARATE, run_config, train_rows

from forebay.ledger.journal import read_events
from forebay.produce import Sampler
from forebay.produce.prompts import load_prompts
from forebay.replay import AsyncReplayBufferConfig
from forebay.runs import launch as launching
from forebay.runs import steps

pytestmark = pytest.mark.xdist_group("ray")


class Killer:
    """Kills a random part a random while after a train step, until it has killed so many."""

    def __init__(self, monkeypatch, seed, num_kills):
        self.kills = Counter()
        self.num_kills = num_kills
        self._rng = random.Random(seed)
        self._stepped = asyncio.Event()
        self._cluster = None
        make_cluster, report = launching.make_cluster, steps.report

        def made(config):
            self._cluster = make_cluster(config)
            return self._cluster

        def reported(*arguments):
            report(*arguments)
            self._stepped.set()

        monkeypatch.setattr(launching, "make_cluster", made)
        monkeypatch.setattr(steps, "report", reported)

    async def run(self):
        while self.kills.total() < self.num_kills:
            await self._stepped.wait()
            self._stepped.clear()
            # Any moment of the next steps: while generating, training, syncing, saving, starting again.
            await asyncio.sleep(self._rng.uniform(0, 1.0))
            pids = await asyncio.to_thread(self._cluster.pids)
            part = self._rng.choice(sorted(pids))
            if is_ours(pids[part]):
                os.kill(pids[part], signal.SIGKILL)
                self.kills[part.split()[0]] += 1
                print(f"kill {self.kills.total()}: {part}", flush=True)


def is_ours(pid):
    """Whether the process is still one of Ray's: a part that is starting again has none yet."""
    try:
        return b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


def check_run(config):
    (task,) = config.tasks
    sampler = Sampler(
        load_prompts(task.data),
        AsyncReplayBufferConfig().build(),
        task_name=task.name,
        prompt_repeat_k=config.rollouts_per_prompt,
        seed=config.seed,
    )
    trained = {}
    for event in read_events(config.folder / "ledger.jsonl"):
        if event["event"] == "trained":
            trained.setdefault(event["train_step"], []).append(event["group"])
    check_books(config.folder, [sampler], trained, config.steps, config.batch_size)
    rows = train_rows(config.folder)
    assert [row["train_step"] for row in rows] == list(range(1, config.steps + 1))
    assert all(0 <= row["staleness"] < 2 for row in rows)
    assert config.batch_size == BATCH_SIZE
    assert config.rollouts_per_prompt == GROUP_SIZE


@pytest.mark.soak
async def test_fifty_kills_of_random_parts(ray, tmp_path, monkeypatch):
    killer = Killer(monkeypatch, seed=1, num_kills=50)
    config = run_config(
        tmp_path,
        steps=120,
        produce=SEPARATE,
        cluster={"name": "ray", "arguments": {"num_workers": 2, "num_engines": 2, "max_restarts": 50}},
    )
    async with asyncio.TaskGroup() as group:
        run = group.create_task(launching.launch(config))
        killing = group.create_task(killer.run())
        await run
        assert killing.done(), f"the run was over after {killer.kills}"
    # It runs event loops of its own.
    await asyncio.to_thread(check_run, config)
    print(dict(killer.kills), {n: v for n, v in train_rows(config.folder)[-1].items() if "cluster" in n})
