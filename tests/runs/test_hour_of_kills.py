"""One long run that is killed every 20 to 60 seconds for an hour: nothing is lost or trained twice.

``FOREBAY_SOAK_MINUTES`` is another length than sixty minutes.
"""

import asyncio
import contextlib
import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import test_killed_separate_run as killed

from forebay.ledger.journal import read_events
from forebay.runs.folder import list_checkpoints, step_of
from postgres_server import empty_place, running_server

MINUTES = float(os.environ.get("FOREBAY_SOAK_MINUTES", "60"))
BATCH_SIZE, PLENTY = 8, 1_000_000

RUN_FILE = killed.RUN_FILE
for text, other in {
    f"steps = {killed.STEPS}": f"steps = {PLENTY}\ncheckpoint_every = 10",
    f"batch_size = {killed.BATCH_SIZE}": f"batch_size = {BATCH_SIZE}",
    "rollouts_per_prompt = 2": "rollouts_per_prompt = 4",
    'filter = "reward_variance"': 'filter = "none"',
}.items():
    assert text in RUN_FILE
    RUN_FILE = RUN_FILE.replace(text, other)


class Nursery(killed.Nursery):
    def run_for(self, seconds, *arguments):
        """Kill the run after so many seconds; its output, which a pipe would not hold, is read meanwhile."""
        with ThreadPoolExecutor(1) as thread:
            self.tell(json.dumps([part if isinstance(part, dict) else str(part) for part in arguments]))
            pid = int(self.read_to("@pid")[-1].split()[1])
            lines = thread.submit(self.read_to, "@exit")
            time.sleep(seconds)
            self.end(pid)
            self.tell("reap")
            assert not any(line.startswith("@end") for line in lines.result()), "".join(lines.result()[-30:])


@pytest.fixture(scope="module")
def nursery(warm):
    with Nursery() as nursery:
        yield nursery


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_run_survives_an_hour_of_kills(nursery, tmp_path, kind):
    folder, rng = tmp_path / "run", random.Random(kind)
    (tmp_path / "run.toml").write_text(RUN_FILE)
    with contextlib.ExitStack() as stack:
        store = str(folder / "buffer.db")
        if kind == "postgresql":
            store = stack.enter_context(empty_place(stack.enter_context(running_server())))
        environment = {"FOREBAY_REPLAY_URL": store}
        changes = [f"output={tmp_path}", f"replay.store={kind}"]
        arguments = ["train", tmp_path / "run.toml", *changes, "--overwrite", environment]
        deadline, num_kills, finished, num_bytes = time.monotonic() + 60 * MINUTES, 0, set(), 0
        while time.monotonic() < deadline:
            nursery.run_for(rng.uniform(20, 60), *arguments)
            num_kills += 1
            checkpoints = list_checkpoints(folder)
            killed.check_checkpoints(checkpoints)
            books = folder / "ledger.jsonl"
            if checkpoints:
                assert not finished & killed.taken_up_since(books, num_bytes), "generated a finished group again"
                finished, num_bytes = asyncio.run(killed.finished_groups(store)), books.stat().st_size
                arguments = ["train", "--resume", folder, environment]
            print(f"{num_kills} kills, step {step_of(checkpoints[-1]) if checkpoints else 0}", flush=True)
        steps = step_of(list_checkpoints(folder)[-1]) + 20
        assert nursery.run("train", "--resume", folder, f"steps={steps}", environment)
        assert not finished & killed.taken_up_since(books, num_bytes)
        killed.check_real_run(folder, store, steps, BATCH_SIZE)
        num_groups = sum(event["event"] == "trained" for event in read_events(books))
        print(f"{kind}: {num_kills} kills, {steps} steps, {num_groups} groups trained once, none lost")
