"""The buffer as a Ray actor beside TransferQueue, which is Ray actors too.

Usage: python benchmarks/replay/ray_hosted.py [--quick] [--environments PATH]

    ray_hosted.py --job--> peer_forebay_ray.py     this Python, with Ray
                  --job--> peer_transferqueue.py   its own environment (made as by ``peers.py``)
                  <-- seconds of every call, the sides in turns, each turn a process and a Ray of its own

Two jobs: groups of 8 trajectories of 1,280 tokens, one by one and 64 at once; and the Small batch of
TransferQueue's own performance test. Only calls are timed: what both start once is not.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import replace
from pathlib import Path

import peer_job
from measuring import Record, Table, arguments, show, show_s, versions
from peers import ENVIRONMENTS, JOB, pythons, run_side

TURNS, QUICK_TURNS = 3, 1
SMALL_ROUNDS = 20
SIDES = {"forebay_ray": "forebay", "transferqueue": "transferqueue"}
"""The script of each side, and whose interpreter it needs."""
OURS, THEIRS = SIDES
GROUP_TARGET, BULK_TARGET = 5.0, 2.0
COMPARED = {
    peer_job.ONE: ("put of one group", GROUP_TARGET),
    peer_job.TAKE_ONE: ("take of one group", GROUP_TARGET),
    peer_job.BATCHED: ("put of 64 groups in one call", BULK_TARGET),
    peer_job.TAKE: ("take of 64 groups", BULK_TARGET),
    peer_job.SMALL_PUT: ("put of the Small batch", BULK_TARGET),
    peer_job.SMALL_GET: ("get of the Small batch", BULK_TARGET),
}

Sides = dict[str, peer_job.Way]


def collect(job: peer_job.Job, environments: Path, turns: int, record: Record) -> Sides:
    """Both sides in turns, who is first changing; the calls of all turns together."""
    sides: Sides = {}
    interpreters = pythons(environments)
    for turn in range(turns):
        for side in sorted(SIDES, reverse=turn % 2 == 1):
            result = run_side(side, interpreters[SIDES[side]], job)
            prefix = "" if side == OURS else "transferqueue: "
            record.versions |= {prefix + name: version for name, version in result["versions"].items()}
            [found] = result["ways"]
            way = sides.setdefault(side, peer_job.Way(found["name"], found["transport"]))
            for operation, seconds in found["wall_s"].items():
                way.wall_s.setdefault(operation, []).extend(seconds)
                way.cpu_s[operation] = way.cpu_s.get(operation, 0.0) + found["cpu_s"][operation]
    return sides


def cpu_of(way: peer_job.Way, operation: str, job: peer_job.Job) -> float:
    """CPU seconds of a call, of all processes of the side."""
    single = operation in (peer_job.ONE, peer_job.TAKE_ONE)
    return way.cpu_s[operation] / (len(way.wall_s[operation]) * (job.singles if single else 1))


def report(record: Record, sides: Sides, job: peer_job.Job, title: str) -> None:
    operations = [name for name in COMPARED if name in sides[OURS].wall_s]
    rows = []
    for way in sides.values():
        row = [way.name, way.transport]
        for operation in operations:
            walls = sorted(way.wall_s[operation])
            row += [show_s(statistics.median(walls)), show_s(walls[0]), show_s(cpu_of(way, operation, job))]
        rows.append(row)
    columns = ["", "where, by what"]
    columns += [cell for name in operations for cell in (f"{name}: median", "fastest", "CPU")]
    record.tables.append(Table(title, columns, rows))
    for operation in operations:
        what, target = COMPARED[operation]
        ours, theirs = (statistics.median(sides[side].wall_s[operation]) for side in (OURS, THEIRS))
        cpu = cpu_of(sides[THEIRS], operation, job) / cpu_of(sides[OURS], operation, job)
        fastest = min(sides[THEIRS].wall_s[operation]) / min(sides[OURS].wall_s[operation])
        record.find(
            f"{what} through a Ray actor, against TransferQueue",
            theirs / ours,
            "x",
            target=target,
            detail=f"{show_s(ours)} against {show_s(theirs)}; fastest {show(fastest)}x, CPU {show(cpu)}x",
        )


def main() -> None:
    options = arguments(
        __doc__, ("--environments", {"type": Path, "default": ENVIRONMENTS, "help": "where theirs are, or are made"})
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    turns = QUICK_TURNS if options.quick else TURNS
    job = replace(JOB, held=64, rounds=2) if options.quick else JOB
    small = replace(job, small=True, rounds=3 if options.quick else SMALL_ROUNDS)
    record = Record(
        "ray_hosted",
        "The buffer as a Ray actor, beside TransferQueue",
        [
            f"Groups of {job.group_size} trajectories: prompts of {job.prompt_tokens} and responses of "
            f"{job.response_tokens:,} tokens (ids, logprobs, mask, model steps); {job.held} groups stay in "
            f"the buffer; {turns} turns of each side, who is first changing, {job.rounds} rounds each.",
            "Both: actors of a Ray of their own on this machine, TCP on loopback, one client process. CPU is "
            "that of all processes of a side, Ray's own included.",
            "TransferQueue: key-value puts; takes by its group sampler, then cleared; two storage units.",
            f"Small: {peer_job.SMALL_ROWS} samples of {peer_job.SMALL_FIELDS} fields of "
            f"{peer_job.SMALL_TOKENS:,} floats by `kv_batch_put` and `kv_batch_get`, not cleared within the "
            "time, one storage actor; here the same bytes as 16 groups by `put_groups` and `take_batch`, "
            f"which also removes them; {small.rounds} rounds.",
            "TransferQueue knows no status, age or train step; Forebay labels, ages and checks each group of "
            "the first job when it is put, takes the most stale first, and keeps what did not arrive.",
        ],
        options.quick,
        versions=versions("forebay", "numpy"),
    )
    for each, title in ((job, "Groups of 1,280-token trajectories, time of a call"), (small, "Small, of a call")):
        report(record, collect(each, options.environments, turns, record), each, title)
    record.save()


if __name__ == "__main__":
    main()
