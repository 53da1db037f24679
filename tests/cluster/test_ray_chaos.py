"""Parts of a run on Ray killed at random moments, again and again: nothing is lost or trained twice."""

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
from test_killed_separate_run import check_books
from test_ray_run import BATCH_SIZE, GROUP_SIZE, SEPARATE, events, pids_of, run_config, train_rows

from forebay.ledger.journal import read_events
from forebay.produce import Sampler
from forebay.produce.prompts.dataset import load_prompts
from forebay.replay import AsyncReplayBufferConfig
from forebay.runs import launch as launching
from forebay.runs import placement, steps
from forebay.runs.store import STORE_FILE, URL_VARIABLE
from postgres_server import empty_place, restart, running_server

SOAK_SEED = int(os.environ.get("FOREBAY_SOAK_SEED", "1"))


class Killer:
    """Kills a random part again and again, until it has killed so many.

    Every other kill is a random while after a train step; the others come right after one another, as soon as
    there is a process to kill, so that they hit parts that are starting again, and a run that goes back. With
    a `database`, every third one is a restart of its server.
    """

    def __init__(self, monkeypatch, seed, num_kills, database=None):
        self.kills = Counter()
        self.num_kills, self.database = num_kills, database
        self.cluster = None
        self._rng = random.Random(seed)
        self._stepped = asyncio.Event()
        make_cluster, report = placement.make_cluster, steps.report

        def made(config):
            self.cluster = make_cluster(config)
            return self.cluster

        def reported(*arguments):
            report(*arguments)
            self._stepped.set()

        monkeypatch.setattr(placement, "make_cluster", made)
        monkeypatch.setattr(steps, "report", reported)

    async def run(self):
        await self._stepped.wait()
        while self.kills.total() < self.num_kills:
            if self.kills.total() % 2:
                self._stepped.clear()
                await self._stepped.wait()
            # Any moment of the next steps: while generating, training, syncing, saving, starting again.
            await asyncio.sleep(self._rng.uniform(0, 1.0))
            pids = await self._pids()
            if self.database is not None and self._rng.random() < 1 / 3:
                await asyncio.to_thread(restart, self.database)
                self.kills["database"] += 1
                print(f"kill {self.kills.total()}: database", flush=True)
            elif pids:
                part = self._rng.choice(sorted(pids))
                os.kill(pids[part], signal.SIGKILL)
                self.kills[part.split()[0]] += 1
                print(f"kill {self.kills.total()}: {part}", flush=True)

    async def _pids(self):
        """Of the parts that have a process just now."""
        pids = await asyncio.to_thread(pids_of, self.cluster)
        return {part: pid for part, pid in pids.items() if is_ours(pid)}


def is_ours(pid):
    """Whether the process is still one of Ray's: a part that is starting again has none yet."""
    try:
        return b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


def check_run(config, store):
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
    check_books(config.folder, [sampler], trained, config.steps, config.batch_size, store)
    rows = train_rows(config.folder)
    assert [row["train_step"] for row in rows] == list(range(1, config.steps + 1))
    assert all(0 <= row["staleness"] < 2 for row in rows)
    assert config.batch_size == BATCH_SIZE
    assert config.rollouts_per_prompt == GROUP_SIZE


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgresql", "restarted postgresql"])
async def test_fifty_kills_of_random_parts(ray, tmp_path, monkeypatch, kind):
    config = run_config(
        tmp_path,
        steps=120,
        produce=SEPARATE,
        replay={"store": kind.split()[-1]},
        cluster={"name": "ray", "arguments": {"num_workers": 2, "num_engines": 2, "max_restarts": 50}},
    )
    with contextlib.ExitStack() as stack:
        store = {"memory": "memory", "sqlite": str(config.folder / STORE_FILE)}.get(kind)
        if store is None:
            store = stack.enter_context(empty_place(stack.enter_context(running_server())))
            monkeypatch.setenv(URL_VARIABLE, store)
        database = store if kind.startswith("restarted") else None
        killer = Killer(monkeypatch, seed=SOAK_SEED, num_kills=50, database=database)
        async with asyncio.TaskGroup() as group:
            run = group.create_task(launching.launch(config))
            killing = group.create_task(killer.run())
            await run
            assert killing.done(), f"the run was over after {killer.kills}"
        # It runs event loops of its own.
        await asyncio.to_thread(check_run, config, store)
    last = train_rows(config.folder)[-1]
    restarts = {kind: last[f"cluster/{kind}_restarts"] for kind in ("engine", "worker", "trainer")}
    print(dict(killer.kills), restarts)
    noted = Counter(event["part"].split()[0] for event in events(config.folder, "restarted"))
    assert noted == Counter({kind: int(count) for kind, count in restarts.items() if count})
    for kind in ("engine", "worker"):
        assert restarts[kind] == killer.kills[kind]
    # A trainer that gives no answer as the run goes back is made anew as well.
    assert restarts["trainer"] >= killer.kills["trainer"]
