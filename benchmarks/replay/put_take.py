"""How fast groups go in and out: in memory, in a durable file, through a second process.

Usage: python benchmarks/replay/put_take.py [--quick] [--folder PATH] [--stores]

    fresh groups, unlabeled --put(labels, train step, threshold)--> memory | SQLite files | server process
    server process --take_batch of 64 groups--> RolloutStates here

A put counts when it has returned; on an SQLite file (write-ahead log, synchronous NORMAL; with FULL each
commit is synced) that is after its commit, through the server after its answer. With ``--stores`` there is no
server, and no file of results. Several puts are in flight at once where that is said: rollout workers do not
wait for each other. What the machine itself can do with the same bytes is measured beside: copying them in
memory, writing and syncing a file, sending them through a local socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from measuring import Record, Table, Times, arguments, show, show_s, versions
from peer_job import tree_cpu_s
from rollouts import GROUP_SIZE, Shape, array_bytes, copies, make_group
from serving import connected

from forebay.replay import IndexedStorage, ReplayBuffer, SQLStorage, StalenessReplayPolicy
from forebay.types import RolloutState

ONE_TURN = Shape(tokens=1_280, prompt_tokens=128)
MULTI_TURN = Shape(tokens=1_280, prompt_tokens=128, multi_turn=True)
TASK = "math"
GROUPS, QUICK_GROUPS = 512, 128
"""Put in one round."""
TAKEN = 64
ROUNDS, QUICK_ROUNDS = 15, 3
IN_FLIGHT = 64
TARGETS = {"memory": 100_000, "SQLite": 10_000, "server": 7_000, "take": 20_000}
FULL, FULL_SHARE = "SQLite, FULL", 0.25
"""Rollouts/s of the file whose commits are all synced, over those of memory."""

Group = list[RolloutState]


@dataclass(frozen=True)
class Place:
    """Where groups are put: a buffer, and how to empty it again."""

    name: str
    buffer: Any
    """A `ReplayBuffer`, or what has its methods."""
    empty: Callable[[], Awaitable[Any]]


@contextlib.asynccontextmanager
async def places(folder: Path, *, has_server: bool) -> AsyncIterator[list[Place]]:
    stores = {
        "memory": IndexedStorage(),
        "SQLite": SQLStorage(folder / "buffer.db"),
        FULL: SQLStorage(f"sqlite:///{folder}/full.db?synchronous=full"),
    }
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for name, storage in stores.items():
            buffer = ReplayBuffer(StalenessReplayPolicy(), storage)
            stack.push_async_callback(buffer.close)
            found.append(Place(name, buffer, partial(drop_all, buffer)))
        if has_server:
            remote = await stack.enter_async_context(connected(folder))
            found.append(Place("server", remote, partial(take_all, remote)))
        yield found


async def drop_all(buffer: ReplayBuffer) -> None:
    rows = await buffer.storage.get({}, rows_only=True)
    await buffer.storage.delete([row.uid for row in rows])


async def take_all(buffer: Any) -> None:
    while (await buffer.take_batch({TASK: TAKEN}))[1][TASK]:
        pass


async def put(buffer: Any, group: Group) -> None:
    await buffer.put(group, TASK, model_step=3, current_train_step=5, stale_threshold=4)


async def put_all(buffer: Any, groups: Iterator[Group], in_flight: int) -> None:
    async def worker() -> None:
        for group in groups:
            await put(buffer, group)

    if in_flight == 1:
        await worker()
        return
    async with asyncio.TaskGroup() as workers:
        for _ in range(in_flight):
            workers.create_task(worker())


@dataclass
class Clocked(Times):
    """Seconds of every call, and the CPU seconds of all calls of this process and its children."""

    together_s: float = 0.0

    async def time(self, call: Awaitable[Any]) -> Any:
        together, cpu, wall = tree_cpu_s(), time.process_time(), time.perf_counter()
        result = await call
        self.add(time.perf_counter() - wall, time.process_time() - cpu)
        self.together_s += tree_cpu_s() - together
        return result


async def measure(folder: Path, number: int, rounds: int, *, has_server: bool) -> dict[str, Clocked]:
    """Times of putting `number` groups, or of one batch; the ways in turns."""
    generator = np.random.default_rng(0)
    templates = {shape: make_group(shape, generator) for shape in (ONE_TURN, MULTI_TURN)}
    times: defaultdict[str, Clocked] = defaultdict(Clocked)
    async with places(folder, has_server=has_server) as targets:
        for i in range(rounds + 1):
            if i == 1:
                # The first round warms up.
                times.clear()
            for place in targets:
                for shape, template in templates.items():
                    for in_flight in (1, IN_FLIGHT):
                        groups = iter(list(copies(template, number)))
                        name = way_name(place.name, shape, in_flight)
                        call = put_all(place.buffer, groups, in_flight)
                        await times[name].time(call)
                        if in_flight == 1 or place.name != "server":
                            await place.empty()
                    if place.name == "server":
                        await take_batches(place.buffer, times, shape)
    return times


async def take_batches(buffer: Any, times: defaultdict[str, Clocked], shape: Shape) -> None:
    """Empty the buffer in batches, each of them timed."""
    ways: tuple[dict[str, int], ...] = ({}, {"train_step": 5})
    for number in count():
        label = "take" if number % 2 == 0 else "take for a train step"
        if not await buffer.is_ready({TASK: TAKEN}):
            break
        call = buffer.take_batch({TASK: TAKEN}, **ways[number % 2])
        groups, _ = await times[f"{label}{kind_of(shape)}"].time(call)
        assert groups[TASK][-1][-1].response_ids.sum() > 0
    await buffer.commit(5)


def way_name(place: str, shape: Shape, in_flight: int) -> str:
    return f"put, {place}{kind_of(shape)}, {in_flight} in flight"


def kind_of(shape: Shape) -> str:
    return " (several turns)" if shape.multi_turn else ""


def measure_limits(folder: Path, number: int, rounds: int) -> dict[str, Times]:
    """What the machine does with the bytes of so many groups: copy, write and sync, send."""
    group = make_group(ONE_TURN, np.random.default_rng(0), model_step=3)
    data, other = (memoryview(bytearray(array_bytes([group]) * number)) for _ in range(2))
    with reader(len(data), rounds) as there:
        ways: dict[str, Callable[[], Any]] = {
            "copy in memory": lambda: copy(other, data),
            "write and sync a file": lambda: write_synced(folder / "bytes", data),
            "send through a local socket": lambda: send(there, data),
        }
        times = {name: Times() for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                cpu, wall = time.process_time(), time.perf_counter()
                way()
                times[name].add(time.perf_counter() - wall, time.process_time() - cpu)
    return times


def copy(into: memoryview, data: memoryview) -> None:
    into[:] = data


def write_synced(file: Path, data: memoryview) -> None:
    with open(file, "wb", buffering=0) as out:
        out.write(data)
        os.fsync(out.fileno())


def send(there: socket.socket, data: memoryview) -> None:
    there.sendall(data)
    there.recv(1)


@contextlib.contextmanager
def reader(num_bytes: int, rounds: int) -> Iterator[socket.socket]:
    """A socket to a process that reads so many bytes in every round, and answers."""
    here, there = socket.socketpair()
    process = multiprocessing.get_context("fork").Process(target=receive, args=(there, num_bytes, rounds))
    with here, there:
        process.start()
        yield here
        process.join()


def receive(source: socket.socket, num_bytes: int, rounds: int) -> None:
    into = memoryview(bytearray(1 << 20))
    for _ in range(rounds):
        left = num_bytes
        while left:
            left -= source.recv_into(into[: min(left, len(into))])
        source.sendall(b".")


def report(record: Record, times: dict[str, Clocked], limits: dict[str, Times], number: int) -> None:
    rows = []
    for name, measured in {**times, **limits}.items():
        rollouts = GROUP_SIZE * (TAKEN if name.startswith("take") else number)
        calls = len(measured.wall_s)
        cells = [show(rollouts / measured.wall), show_s(measured.cpu / rollouts)]
        if isinstance(measured, Clocked):
            cells.append(show_s(measured.together_s / calls / rollouts))
        rows.append([name, *cells, *[""] * (3 - len(cells)), str(calls)])
    columns = ["", "rollouts/s", "CPU a rollout, this process", "with the server's (mean)", "rounds"]
    record.tables.append(Table(f"Medians; puts of {number} groups, takes of {TAKEN}", columns, rows))
    find(record, times, "memory", "put in memory, one after the other", 1, number)
    find(record, times, "SQLite", f"put on a durable SQLite file, {IN_FLIGHT} in flight", IN_FLIGHT, number)
    find_shares(record, times)
    if "take" not in times:
        return
    find(record, times, "server", f"put through a second process, {IN_FLIGHT} in flight", IN_FLIGHT, number)
    taken = times["take"]
    record.find(
        f"batch take of {TAKEN * GROUP_SIZE} rollouts from a second process",
        TAKEN * GROUP_SIZE / taken.wall,
        " rollouts/s",
        target=TARGETS["take"],
        detail=f"{show_s(taken.wall)} a batch, CPU here {show_s(taken.cpu)}",
    )


def find_shares(record: Record, times: dict[str, Clocked]) -> None:
    """What is left of memory's speed on a disk, round by round."""
    memory, normal, full = (times[way_name(place, ONE_TURN, IN_FLIGHT)].wall_s for place in ("memory", "SQLite", FULL))
    shares = {
        name: sorted(a / b for a, b in zip(memory, wall_s, strict=True))
        for name, wall_s in (("NORMAL", normal), ("FULL", full))
    }
    record.find(
        f"put on an SQLite file with synchronous FULL over memory, {IN_FLIGHT} in flight",
        statistics.median(shares["FULL"]),
        "",
        target=FULL_SHARE,
        detail=", ".join(
            f"{name} {each[0]:.3f} to {each[-1]:.3f}, median {statistics.median(each):.3f}"
            for name, each in shares.items()
        ),
    )


def find(record: Record, times: dict[str, Clocked], place: str, what: str, in_flight: int, number: int) -> None:
    measured = times[way_name(place, ONE_TURN, in_flight)]
    record.find(
        f"{what}, groups of {ONE_TURN}",
        number * GROUP_SIZE / measured.wall,
        " rollouts/s",
        target=TARGETS[place],
        detail=f"{show_s(measured.wall / number)} a group, CPU here {show_s(measured.cpu / number)}",
    )


def main() -> None:
    options = arguments(
        __doc__,
        ("--folder", {"type": Path, "help": "where to write; default: a temporary"}),
        ("--stores", {"action": "store_true", "help": "no server, and no results file"}),
    )
    number = QUICK_GROUPS if options.quick else GROUPS
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    record = Record(
        "put_take",
        "Putting and taking",
        [
            f"Groups of {ONE_TURN} after prompts of {ONE_TURN.prompt_tokens}; a put labels, ages "
            f"and checks against a threshold; medians of {rounds} rounds of {number} puts, in turns.",
            "One turn: a mask of ones and one label throughout. Several turns: a tenth of the tokens from "
            "tools, labels of two model steps.",
            "The server holds an IndexedStorage; client and server share the machine's cores.",
        ],
        options.quick or options.stores,
    )
    record.versions |= versions("sqlalchemy")
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="forebay-bench-") as name:
        folder = Path(name)
        limits = measure_limits(folder, number, rounds)
        times = asyncio.run(measure(folder, number, rounds, has_server=not options.stores))
    report(record, times, limits, number)
    record.save()


if __name__ == "__main__":
    main()
