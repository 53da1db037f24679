"""Counting, taking and ageing: the indexed store against stores that scan.

Usage: python benchmarks/replay/scan_design.py [--quick]

    the same groups in three stores, each under a ReplayBuffer (most stale first):
        IndexedStorage      indexed by task, status and age
        NaiveStorage        a dict of rows, a loop for every question: the scan design
        FrameStore          a DataFrame, filtered, sorted and concatenated on every call (dataframe_store.py)
    count; take(64) and put them back; refresh_staleness when nothing expires; put

The rollouts of all groups share their token arrays, which no operation here reads: 100,000 groups of
8 x 512 tokens would not fit in memory four times. Everything else is real. The garbage collector is told to
leave the set-up alone (`gc.freeze`), which helps the stores that make many objects per call.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np
from dataframe_store import FrameStore
from measuring import Record, Table, Times, Way, arguments, compare, show, show_s, versions
from rollouts import GROUP_SIZE, Shape, copies, make_group

from forebay.replay import IndexedStorage, NaiveStorage, ReplayBuffer, StalenessReplayPolicy, StorageBackend
from forebay.types import RolloutState, Status

SHAPE = Shape(tokens=512)
SIZES, QUICK_SIZES = (1_000, 10_000, 100_000), (300, 1_000)
SECONDS, QUICK_SECONDS = 3.0, 0.3
STORES: dict[str, Callable[[], StorageBackend]] = {
    "indexed": IndexedStorage,
    "naive": NaiveStorage,
    "frame": FrameStore,
}
TAKEN = 64
MODEL_STEPS = 8
"""Groups in the buffer were made by so many different weights."""
ABORTED_EVERY = 10
TASKS = ("math", "code")
NEVER = 10**9
"""A stale threshold that nothing reaches."""
TARGETS = {"count": 5_000, f"take({TAKEN})": 500, "refresh, nothing expires": 5_000}

Group = list[RolloutState]


def make_groups(number: int) -> list[tuple[str, Group]]:
    """Groups in order of arrival, with their tasks: the oldest weights first."""
    generator = np.random.default_rng(0)
    made = []
    for step in range(MODEL_STEPS):
        share = len(range(step, number, MODEL_STEPS))
        done = make_group(SHAPE, generator, model_step=step)
        aborted = make_group(SHAPE, generator, model_step=step, status=Status.ABORTED)
        for i in range(share):
            template = aborted if i % ABORTED_EVERY == 0 else done
            made.append((TASKS[i // 2 % 2], next(copies(template, 1))))
    return made


async def fill(groups: Iterable[tuple[str, Group]]) -> dict[str, ReplayBuffer]:
    """A buffer over each store, holding the same rollouts."""
    buffers = {name: ReplayBuffer(StalenessReplayPolicy(), make_store()) for name, make_store in STORES.items()}
    first, *others = buffers.values()
    for task in TASKS:
        await first.storage.set_train_step(task, MODEL_STEPS)
    for task, group in groups:
        await first.put(group, task)
    for buffer in others:
        buffer.storage.load_state_dict(first.storage.state_dict())
    return buffers


def operations(buffer: ReplayBuffer, *, archives: bool) -> dict[str, Way]:
    """What is timed, on one buffer."""
    steps = count(MODEL_STEPS)
    task = TASKS[0]
    group = next(copies(make_group(SHAPE, np.random.default_rng(1), model_step=MODEL_STEPS), 1))

    async def put_back(taken: tuple[dict[str, list[Group]], Any]) -> None:
        assert len(taken[0][task]) == TAKEN, len(taken[0][task])
        for taken_group in taken[0][task]:
            await buffer.put(taken_group, task)

    async def forget_newest(_: None) -> None:
        (row,) = await buffer.storage.get({}, order="-timestamp_id", limit=1, rows_only=True)
        await buffer.storage.delete([row.uid])

    async def restore(_: object) -> None:
        await buffer.restore(0)

    ways = {
        "count": Way(lambda: buffer.count(task, Status.COMPLETED)),
        f"take({TAKEN})": Way(lambda: buffer.take_batch({task: TAKEN}), undo=put_back),
        "refresh, nothing expires": Way(
            lambda: buffer.refresh_staleness(
                task_stale_thresholds=dict.fromkeys(TASKS, NEVER), current_train_step=next(steps)
            )
        ),
        "put": Way(lambda: buffer.put(group, task), undo=forget_newest),
    }
    if archives:
        ways[f"take({TAKEN}) for a train step"] = Way(
            lambda: buffer.take_batch({task: TAKEN}, train_step=1), undo=restore
        )
    return ways


async def measure(number: int, seconds: float) -> dict[str, dict[str, Times]]:
    """Times by operation and store."""
    buffers = await fill(make_groups(number))
    gc.collect()
    gc.freeze()
    by_store = {name: operations(buffer, archives=name != "frame") for name, buffer in buffers.items()}
    times = {}
    for operation in by_store["indexed"]:
        ways = {name: ways[operation] for name, ways in by_store.items() if operation in ways}
        times[operation] = await compare(ways, seconds=seconds)
    gc.unfreeze()
    return times


def report(record: Record, sizes: Sequence[int], measured: dict[int, dict[str, dict[str, Times]]]) -> None:
    for number, by_operation in measured.items():
        rows = []
        for operation, times in by_operation.items():
            base = times["indexed"]
            rows.append([operation, f"{show_s(base.wall)} ({show_s(base.cpu)})"])
            for name in list(STORES)[1:]:
                other = times.get(name)
                text = "" if other is None else f"{show_s(other.wall)} ({show(other.wall / base.wall)}x)"
                rows[-1].append(text)
        columns = ["operation", "IndexedStorage (CPU)", "NaiveStorage", "DataFrame"]
        record.tables.append(Table(f"{number:,} groups: median wall time (ratio to the first)", columns, rows))
    for operation, times in measured[sizes[-1]].items():
        base, naive, frame = times["indexed"], times["naive"], times.get("frame")
        detail = f"{show_s(base.wall)} against {show_s(naive.wall)}; CPU {show(naive.cpu / base.cpu)}x"
        if frame is not None:
            detail += f"; DataFrame {show(frame.wall / base.wall)}x"
        record.find(
            f"{operation} at {sizes[-1]:,} groups of {SHAPE}, against the scan design",
            naive.wall / base.wall,
            "x",
            target=TARGETS.get(operation),
            detail=detail,
        )


def main() -> None:
    quick = arguments(__doc__).quick
    sizes = QUICK_SIZES if quick else SIZES
    record = Record(
        "scan_design",
        "Counting, taking and ageing against stores that scan",
        [
            f"Groups of {SHAPE} ({GROUP_SIZE} rollouts of their own each, token arrays shared), two tasks, a "
            f"tenth ABORTED, weights of {MODEL_STEPS} steps; most stale first.",
            "A refresh is at the next train step each time; what is taken is put back, untimed.",
            "DataFrame: filters, sorts and concatenates on every call, vectorized (dataframe_store.py).",
        ],
        quick,
    )
    record.versions |= versions("pandas")
    measured = {number: asyncio.run(measure(number, QUICK_SECONDS if quick else SECONDS)) for number in sizes}
    report(record, sizes, measured)
    record.save()


if __name__ == "__main__":
    main()
