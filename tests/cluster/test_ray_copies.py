"""Unfinished rollouts of a run on Ray: a worker is killed, then the run itself, and copies of them go on."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from test_ray_run import SEPARATE, events, pids_of, run_config

from forebay.engines import ScriptedEngine
from forebay.ledger import Ledger
from forebay.produce import unfinished
from forebay.produce.unfinished import COPIES
from forebay.replay import SQLStorage
from forebay.replay.format.packed import GroupCodec
from forebay.runs import placement
from forebay.runs.folder import saved_config
from forebay.runs.launch import launch
from warm_python import warm_python, warm_workers

LONGEST, BATCH_SIZE = 400, 2


class Noting(ScriptedEngine):
    """Writes down every request; slow until the file ``hurry`` is there."""

    def __init__(self, folder):
        self._log = Path(folder) / "requests"
        is_slow = not (Path(folder) / "hurry").exists()
        super().__init__(lambda request: [7] * LONGEST, token_latency_s=0.05 if is_slow else 0.0001)

    async def generate(self, request):
        with self._log.open("a") as file:
            print(request.request_id, file=file)
        return await super().generate(request)


def noting_engines(surroundings, folder):
    return [Noting(folder)]


def first_requests(folder, since=0):
    """The length at which each rollout was first asked to go on, of the requests after the first `since`."""
    found = {}
    for line in (folder / "requests").read_text().splitlines()[since:]:
        name, _, length = line.rsplit(":", 2)
        found.setdefault(name, int(length))
    return found


def lengths(groups):
    return {state.rollout_id: len(state.response_ids) for group in groups for state in group}


def main(folder):
    """The run that is killed: says which copies it has saved, and kills its worker after the first."""
    make_cluster, save, clusters = placement.make_cluster, unfinished.save_copies, []

    def made(config):
        clusters.append(make_cluster(config))
        return clusters[-1]

    async def saved(buffer, ledger, copies):
        await save(buffer, ledger, copies)
        found = lengths(copies.get("sorting", ()))
        if sum(found.values()) < 20:
            return
        print("@" + json.dumps({"saved": found, "requests": count_lines(folder)}), flush=True)
        if not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(pids_of(clusters[0])["worker 0"], signal.SIGKILL)

    placement.make_cluster, unfinished.save_copies = made, saved
    tasks = [{**run_config(folder).tasks[0].model_dump(), "sample": {"max_tokens": LONGEST}}]
    config = run_config(
        folder,
        steps=1,
        batch_size=BATCH_SIZE,
        engine={"name": f"{__name__}:noting_engines", "arguments": {"folder": str(folder)}},
        tasks=tasks,
        produce={**SEPARATE, "staleness_rule": "correct", "save_partial_every_s": 2.0},
        cluster={"name": "ray", "arguments": {"cpus": 0.25}},
    )
    with warm_workers():
        asyncio.run(launch(config))


def count_lines(folder):
    return len((folder / "requests").read_text().splitlines())


async def copies_in(store):
    storage = SQLStorage(f"sqlite:///{store}")
    storage.use_codec(GroupCodec())
    try:
        return lengths([row.item for row in await storage.get(COPIES)])
    finally:
        storage.close()


def test_a_killed_worker_and_a_killed_run_go_on_from_copies(ray, tmp_path):
    code = f"import {__name__} as tests; from pathlib import Path; tests.main(Path({str(tmp_path)!r}))"
    address = ray.get_runtime_context().gcs_address
    with warm_python(), warm_workers():
        environment = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        told, lines = [], []
        for line in run.stdout:
            lines.append(line)
            if line.startswith("@"):
                told.append(json.loads(line[1:]))
                again = first_requests(tmp_path, told[0]["requests"]) if len(told) > 1 else {}
                # Copied again by the worker's next process, after it went on from the earlier copies.
                if any(told[-1]["saved"].get(name, 0) > length > 0 for name, length in again.items()):
                    run.kill()
        assert run.wait() == -signal.SIGKILL, "".join(lines)
        run.stdout.close()
    before = told[0]["saved"]
    # The requests of the first process may have gone on for a moment, and were further then.
    assert all(length >= before[name] for name, length in again.items() if name in before)
    config = saved_config(tmp_path / "run")
    copies = asyncio.run(copies_in(config.folder / "buffer.db"))
    assert sum(copies.values()) >= sum(told[-1]["saved"].values()) > sum(before.values())
    assert any(event.get("reason") == "worker died" for event in events(config.folder, "retried"))
    since = count_lines(tmp_path)
    (tmp_path / "hurry").touch()
    asyncio.run(launch(config, resume=config.folder))
    books = Ledger.read(config.folder / "ledger.jsonl")
    balance = books.balance(books.count_live())
    assert (balance.ok, balance.trained) == (True, BATCH_SIZE), balance
    asked = first_requests(tmp_path, since)
    assert copies.keys() & asked.keys()
    assert all(asked[name] == length for name, length in copies.items() if name in asked)
