"""Engine processes that join a run, leave it or are killed in it: the run goes on, and its books balance."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from forebay.config import ConfigError, parse_config
from forebay.engines.process.engine import ProcessEngine
from forebay.ledger import Ledger
from forebay.metrics import read_jsonl
from forebay.runs import launch as launching
from forebay.runs.config import RunConfig
from forebay.runs.launch import launch
from forebay.runs.show.surroundings import ask_to_scale

STEPS = 400


def config(folder):
    table = {
        "name": "run",
        "output": str(folder),
        "steps": STEPS,
        "batch_size": 2,
        "rollouts_per_prompt": 4,
        "history_gb": 0,
        "checkpoint_every": 0,
        "model": {
            "source": "tiny",
            "max_context": 32,
            "tiny": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "alphabet": "abcdefghijkl="},
        },
        "tasks": [
            {
                "name": "sorting",
                "data": {"source": "sorting", "arguments": {"length": 3, "letters": 5}, "size": 100},
                "judge": {"name": "exact_match", "arguments": {"partial_credit": True}},
                "sample": {"max_tokens": 4},
            }
        ],
        "engine": {"name": "process", "arguments": {"engines": 1}},
        "produce": {"mode": "separate", "max_staleness": 1, "enable_partial_rollout": True},
        "train": {"lr": 1e-3, "token_budget": 512},
    }
    return parse_config(RunConfig, table)


@pytest.mark.usefixtures("warm")
def test_engines_join_leave_and_die_while_the_run_goes_on(tmp_path, monkeypatch, capsys):
    runs = []
    loops = launching.LOOPS["separate"]

    async def watched(run):
        runs.append(run)
        await loops(run)

    monkeypatch.setitem(launching.LOOPS, "separate", watched)
    bring_up = ProcessEngine.bring_up

    async def slowly(engine):
        # A start takes as long as two steps of a run that goes on; one that waits for it would hang here.
        if runs and step() >= 2:
            begun = step()
            while step() < begun + 2:
                await asyncio.sleep(0.01)
        await bring_up(engine)

    monkeypatch.setattr(ProcessEngine, "bring_up", slowly)
    folder = tmp_path / "run"

    async def until(running, condition):
        while not condition():
            assert not running.done(), running.result()
            await asyncio.sleep(0.02)

    def step():
        return runs[0].train_step

    async def main():
        running = asyncio.create_task(launch(config(tmp_path)))
        try:
            await asyncio.wait_for(until(running, lambda: runs and step() >= 2), 500)
            controller = runs[0].controller
            joined_at = step()
            assert await asyncio.to_thread(ask_to_scale, folder, "engines=+1") == "2 now, 1 of them up"
            await asyncio.wait_for(until(running, lambda: len(controller.engines_up) == 2), 500)
            # The newcomer carries the run until the first is back.
            first = controller.engines[0]
            pid, killed_at = first.pid, step()
            os.kill(pid, signal.SIGKILL)
            await asyncio.wait_for(until(running, lambda: controller.counts()["engine_restarts"] == 1), 500)
            back_at = step()
            assert await asyncio.to_thread(ask_to_scale, folder, "engines=1") == "1 now, 1 of them up"
            left_at = step()
            await asyncio.wait_for(until(running, lambda: step() > left_at + 2), 500)
            assert joined_at < killed_at < back_at, "the run stood still meanwhile"
            assert (controller.engines, first.pid == pid) == ((first,), False)
            for change in ("engines=-1", "workers=+1", "engines"):
                with pytest.raises(ConfigError, match=r"has to stay|write (engines=)?\+2"):
                    await asyncio.to_thread(ask_to_scale, folder, change)
            runs[0].stop.set()
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())
    run = runs[0]
    ledger = Ledger.read(folder / "ledger.jsonl")
    balance = ledger.balance(ledger.count_live())
    assert balance.ok
    assert balance.trained == 2 * run.train_step
    assert capsys.readouterr().out.count("scaled, engines=") == 2
    scaled = [line for line in (folder / "ledger.jsonl").read_text().splitlines() if '"scaled"' in line]
    assert [json.loads(line)["reason"][:12] for line in scaled] == ["+1: 2 now, 1", "1: 1 now, 1 "]
    with pytest.raises(ConfigError, match="no run works in"):
        ask_to_scale(folder, "engines=+1")
    assert not any(row.get("failed") for row in read_jsonl(folder / "metrics.jsonl"))
