"""A run and the board beside it: what the run writes for the board, and that it does no work for viewers."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from board_run import CheckedBoard

from forebay.config import parse_config
from forebay.runs.config import RunConfig
from forebay.runs.launch import launch

BESIDE = """
import asyncio, json, os, sys, time
from pathlib import Path
from types import SimpleNamespace
from forebay.runs.record import live
from forebay.runs.show.surroundings import board_beside

folder, said, looks, told = Path(sys.argv[1]), [], 0, []
live.PERIOD_S, live.MAX_CPU_SHARE = 0.02, 1.0
# Else some files were a digit longer than others.
live.time = SimpleNamespace(time=lambda: 1.0)

def values():
    global looks
    looks += 1
    return {"tasks": {}, "stages": {}, "oldest": [], "doing": [], "busy": {}, "books": {}, "stall": ""}

async def refresh():
    pass

def counts():
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    # Without what this script says itself.
    calls, written = int(io["syscw"]) - len(told), int(io["wchar"]) - sum(told)
    others = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()]
    switches = {}
    for task in others:
        lines = (task / "status").read_text().splitlines()
        switches[task.name] = [int(line.split()[1]) for line in lines if "ctxt_switches" in line]
    files = {name: os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
             if os.path.exists(f"/proc/self/fd/{name}")}
    return {"looks": looks, "calls": calls, "bytes": written, "threads": switches, "files": files}

async def main():
    ended = asyncio.Event()
    display = SimpleNamespace(message=lambda text: say({"address": text.split()[-1]}))

    def say(what):
        line = json.dumps(what).encode() + b"\\n"
        told.append(os.write(1, line))

    def asked():
        if os.read(0, 1):
            say(counts())
        else:
            ended.set()

    with board_beside(folder, display):
        written = live.LiveFile(folder, dict, values, refresh)
        asyncio.get_running_loop().add_reader(0, asked)
        await ended.wait()
        written.close("finished")

asyncio.run(main())
"""


@pytest.fixture
def beside(tmp_path):
    """A process that writes the state of a run for the board beside it, fifty times a second."""
    (tmp_path / "run.toml").write_text('name = "x"\nsteps = 3\n')
    command = [sys.executable, "-c", BESIDE, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:

        def said():
            return json.loads(process.stdout.readline())

        def ask():
            process.stdin.write(b"?")
            return said()

        yield process, said()["address"], ask
        process.stdin.close()


def after_looks(ask, num_looks):
    """The counts before and after that many rewrites of the live file."""
    first = last = ask()
    while last["looks"] < first["looks"] + num_looks:
        last = ask()
    return first, last


def test_viewers_are_no_work_of_the_runs_process(beside, tmp_path):
    process, address, ask = beside
    # Once the board has said where it is, no thread listens to it.
    after_looks(ask, 20)
    alone = after_looks(ask, 100)
    seen = Counter()

    def view(number, stream):
        with contextlib.suppress(OSError, ValueError):
            for line in stream:
                seen[number] += line.startswith(b"data")

    streams = [urllib.request.urlopen(f"{address}api/events?run={tmp_path.name}&since=0") for _ in range(10)]
    viewers = [threading.Thread(target=view, args=each, daemon=True) for each in enumerate(streams)]
    for viewer in viewers:
        viewer.start()
    watched = after_looks(ask, 100)
    while len(seen) < 10 or min(seen.values()) < 3:
        watched = watched[0], after_looks(ask, 20)[1]
    for stream in streams:
        stream.fp.raw._sock.shutdown(2)
    for viewer in viewers:
        viewer.join()

    for name in ("calls", "bytes"):
        per_look = [(last[name] - first[name]) / (last["looks"] - first["looks"]) for first, last in (alone, watched)]
        assert per_look[0] == per_look[1] > 0, name
    assert alone[0]["threads"] == watched[1]["threads"]
    assert alone[0]["files"] == watched[1]["files"]
    held = {link for link in watched[1]["files"].values() if link.startswith("socket:")}
    tables = [Path(f"/proc/{process.pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    connections = {f"socket:[{line.split()[9]}]" for table in tables for line in table.splitlines()[1:]}
    assert connections
    assert not held & connections


def test_the_board_gives_way_to_the_run(beside):
    process, _, _ = beside
    (board,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    nice = [os.getpriority(os.PRIO_PROCESS, pid) for pid in (process.pid, int(board))]
    assert nice[1] == min(nice[0] + 5, 19)


def test_a_run_without_a_history_is_told_live_all_the_same(tmp_path):
    table = {
        "name": "seen",
        "steps": 2,
        "batch_size": 2,
        "rollouts_per_prompt": 2,
        "output": str(tmp_path),
        "history_gb": 0,
        "model": {"source": "tiny", "tiny": {"hidden_size": 16, "num_layers": 1, "num_heads": 1}},
        "tasks": [
            {
                "name": "sorting",
                "data": {"source": "sorting", "size": 8},
                "judge": {"name": "exact_match"},
                "sample": {"max_tokens": 2},
            }
        ],
    }
    asyncio.run(launch(parse_config(RunConfig, table)))
    assert not (tmp_path / "seen/history").exists()
    board = CheckedBoard([tmp_path])
    overview = board.answer("overview", {"run": "seen"})
    assert (overview["live"]["state"], overview["live"]["train_step"]) == ("finished", 2)
    assert board.answer("flow", {"run": "seen"})["books"]["sorting"]["trained"] == 4
    assert board.answer("rollouts", {"run": "seen"})["rows"] == []
    board.close()
