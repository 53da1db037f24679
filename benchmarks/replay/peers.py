"""Putting and taking beside TransferQueue and TorchRL: the same groups, one machine, one run.

Usage: python benchmarks/replay/peers.py [--quick] [--environments PATH]

    peers.py --job--> peer_forebay.py        this Python
             --job--> peer_transferqueue.py  its own environment   (made in PATH when it is missing: 1.4 GB)
             --job--> peer_torchrl.py        its own environment   (1.6 GB)
             <-- seconds of every call, the sides in turns, each a process of its own

Every side gets the same random tokens in the layout that suits it best, all responses of one length, so that
nobody pads. What differs: TransferQueue and TorchRL store tensors by key or position and know no status, age
or train step; Forebay labels, ages and checks each group at `put` and takes the most stale first.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import peer_job
from measuring import Record, Table, arguments, show, show_s

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parent / ".envs"
CONSTRAINTS = HERE.parent.parent / "constraints.txt"
PACKAGES = {"transferqueue": ["TransferQueue==0.1.11", "ray==2.60.0"], "torchrl": ["torchrl==0.14.1", "ray==2.60.0"]}
JOB = peer_job.Job(group_size=8, prompt_tokens=128, response_tokens=1_280, held=256, singles=64, rounds=8, result="")
TURNS, QUICK_TURNS = 3, 1
LIMIT_S = 600
OPERATIONS = (peer_job.ONE, peer_job.TAKE_ONE, peer_job.IN_FLIGHT, peer_job.BATCHED, peer_job.TAKE)
GROUPS = {
    peer_job.ONE: 1,
    peer_job.TAKE_ONE: 1,
    peer_job.IN_FLIGHT: peer_job.BATCH,
    peer_job.BATCHED: peer_job.BATCH,
    peer_job.TAKE: peer_job.BATCH,
}
LOCAL = "same process"


def make_environment(folder: Path, packages: list[str]) -> None:
    print(f"making an environment in {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    (folder / ".gitignore").write_text("*\n")
    pins = dict(line.split("==") for line in CONSTRAINTS.read_text().split() if "==" in line)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    # torch first and by its pin: resolved later, pip would choose the CUDA build (several GB).
    for wanted in ([f"torch=={pins['torch']}"], packages):
        subprocess.run([*pip, *wanted], check=True)
    (folder / ".installed").touch()


def pythons(environments: Path) -> dict[str, str]:
    """The interpreter of every side; environments are made when they are missing."""
    for name, packages in PACKAGES.items():
        if not (environments / name / ".installed").exists():
            make_environment(environments / name, packages)
    own = {name: str(environments / name / "bin" / "python") for name in PACKAGES}
    return {"forebay": sys.executable} | own


def run_side(name: str, python: str, job: peer_job.Job) -> dict[str, Any]:
    """One run of one side in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        job = replace(job, result=str(Path(folder) / "result.json"))
        job.save(Path(folder) / "job.json")
        done = subprocess.run(
            [python, str(HERE / f"peer_{name}.py"), str(Path(folder) / "job.json")],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"the side {name!r} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        result: dict[str, Any] = json.loads(Path(job.result).read_text(encoding="utf-8"))
        return result


def collect(job: peer_job.Job, environments: Path, turns: int, record: Record) -> list[peer_job.Way]:
    """All sides in turns; the calls of all turns together."""
    ways: dict[tuple[str, str], peer_job.Way] = {}
    for _ in range(turns):
        for name, python in pythons(environments).items():
            result = run_side(name, python, job)
            record.versions |= {
                package if name == "forebay" else f"{name}: {package}": version
                for package, version in result["versions"].items()
            }
            for found in result["ways"]:
                way = ways.setdefault(
                    (found["name"], found["transport"]), peer_job.Way(found["name"], found["transport"])
                )
                for operation, seconds in found["wall_s"].items():
                    way.wall_s.setdefault(operation, []).extend(seconds)
                    way.cpu_s[operation] = way.cpu_s.get(operation, 0.0) + found["cpu_s"][operation]
    return list(ways.values())


def report(record: Record, ways: list[peer_job.Way], job: peer_job.Job) -> None:
    rows = []
    for way in sorted(ways, key=lambda way: way.transport != LOCAL):
        cells = []
        for operation in OPERATIONS:
            walls = way.wall_s.get(operation)
            calls = 0 if walls is None else len(walls) * (job.singles if GROUPS[operation] == 1 else 1)
            cells.append("" if walls is None else show_s(statistics.median(walls)))
            cells.append("" if walls is None else show_s(way.cpu_s[operation] / calls))
        rows.append([way.name, way.transport, *cells])
    columns = ["", "where, by what"]
    columns += [cell for operation in OPERATIONS for cell in (f"{operation}: wall", "CPU")]
    record.tables.append(Table("Median wall time of a call; CPU time of all processes of a side", columns, rows))
    for is_local, where in ((True, "in the same process"), (False, "through other processes")):
        there = [way for way in ways if (way.transport == LOCAL) is is_local]
        for what, operations in (
            ("put of one group", (peer_job.ONE,)),
            ("take of one group", (peer_job.TAKE_ONE,)),
            ("put of 64 groups, best way of each", (peer_job.IN_FLIGHT, peer_job.BATCHED)),
            ("take of 64 groups", (peer_job.TAKE,)),
        ):
            find(record, there, f"{what} {where}", operations, job)


def find(record: Record, ways: list[peer_job.Way], what: str, operations: tuple[str, ...], job: peer_job.Job) -> None:
    """Rollouts per second of the best way of each project, against ours."""
    best: dict[str, float] = {}
    for way in ways:
        project = way.name.split(",")[0]
        for operation in operations:
            if operation in way.wall_s:
                rollouts = GROUPS[operation] * job.group_size
                rate = rollouts / statistics.median(way.wall_s[operation])
                best[project] = max(best.get(project, 0.0), rate)
    ours = best.pop("Forebay")
    if not best:
        return
    ratios = [f"{show(ours / rate)}x {name} ({show(rate)})" for name, rate in best.items()]
    record.find(what, ours, " rollouts/s", detail=", ".join(ratios))


def main() -> None:
    options = arguments(
        __doc__, ("--environments", {"type": Path, "default": ENVIRONMENTS, "help": "where theirs are, or are made"})
    )
    # One thread for each side's arithmetic, as for ours; what a side starts beyond that is its own choice.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    job = replace(JOB, held=64, singles=64, rounds=2) if options.quick else JOB
    turns = QUICK_TURNS if options.quick else TURNS
    record = Record(
        "peers",
        "Beside TransferQueue and TorchRL",
        [
            f"Groups of {job.group_size} rollouts: prompts of {job.prompt_tokens} and responses of "
            f"{job.response_tokens:,} tokens (ids, logprobs, mask, model steps); {job.held} groups stay in "
            f"the buffer; {turns} processes of each side in turns, {job.rounds} rounds each.",
            "TransferQueue: key-value puts, takes by its sampler for groups and cleared; SimpleStorage, two "
            "storage actors and a controller (Ray on loopback), ZeroMQ over TCP.",
            "TorchRL: `add`, `extend` and `sample` of items that are groups, consumed by sampling.",
        ],
        options.quick,
    )
    report(record, collect(job, options.environments, turns, record), job)
    record.save()


if __name__ == "__main__":
    main()
