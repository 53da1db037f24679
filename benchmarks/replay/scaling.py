"""Each operation of the indexed store with a million groups, against the same with a thousand.

Usage: python benchmarks/replay/scaling.py [--quick]

    two ReplayBuffers over IndexedStorage, 1,000 and 1,000,000 groups of 8 x 16 tokens, most stale first
    every operation on both in turns; what it changed is undone, untimed

Eight million rollouts are objects of their own, put one group after the other; they share their token
arrays, which no operation here reads, and so fit in about 6 GiB. Operations that hand out rollouts must fetch
them from main memory, where those of a thousand groups are in the processor's cache.
"""

from __future__ import annotations

import asyncio
import resource
import time
from itertools import count

import numpy as np
from measuring import Record, Table, Times, Way, arguments, compare, show, show_s
from rollouts import Shape, copies, make_group

from forebay.replay import IndexedStorage, PrioritizedReplayPolicy, ReplayBuffer, StalenessReplayPolicy, StorageItem
from forebay.types import RolloutState, Status

SHAPE = Shape(tokens=16, prompt_tokens=16)
SMALL, LARGE, QUICK_LARGE = 1_000, 1_000_000, 20_000
SECONDS, QUICK_SECONDS = 2.0, 0.2
BATCH = 64
TASK = "math"
MODEL_STEPS = 8
TRAIN_STEP = MODEL_STEPS + 1
ABORTED_EVERY = 5
"""So that even the small buffer holds more ABORTED groups than a batch."""
STALE = -1_000
"""The model step of groups that are put to expire."""
THRESHOLD = 500
MAX_RATIO, MAX_TAKE_RATIO = 1.5, 2.0
TAKES = ("take", "get")
"""Operations with these words hand out rollouts; the others touch rows only."""

Group = list[RolloutState]


class Bench:
    """One buffer and the operations on it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.buffer = ReplayBuffer(StalenessReplayPolicy(), IndexedStorage())
        self.store = self.buffer.storage
        generator = np.random.default_rng(0)
        self.templates = [make_group(SHAPE, generator, model_step=step) for step in range(MODEL_STEPS)]
        self.aborted = make_group(SHAPE, generator, model_step=MODEL_STEPS - 1, status=Status.ABORTED)
        self.stale = make_group(SHAPE, generator, model_step=STALE)
        self.steps = count(TRAIN_STEP)

    async def fill(self) -> float:
        """Put all groups; return how long the last tenth took per group, without the making of them."""
        spent = 0.0
        for i in range(self.size):
            template = self.templates[i * MODEL_STEPS // self.size]
            group = next(copies(self.aborted if i % ABORTED_EVERY == 0 else template, 1))
            start = time.perf_counter()
            await self.put(group)
            if i >= self.size * 9 // 10:
                spent += time.perf_counter() - start
        return spent / (self.size - self.size * 9 // 10)

    async def put(self, group: Group, *, threshold: int = 10**6) -> None:
        await self.buffer.put(
            group,
            TASK,
            model_step=MODEL_STEPS,
            current_train_step=TRAIN_STEP,
            stale_threshold=threshold,
            tags={"level": 3},
        )

    async def new_group(self) -> Group:
        return next(copies(self.templates[-1], 1))

    async def put_all(self, groups: list[Group]) -> None:
        assert len(groups) == BATCH, len(groups)
        for group in groups:
            await self.put(group)

    async def forget_newest(self, number: int = 1) -> None:
        rows = await self.store.get({}, order="-timestamp_id", limit=number, rows_only=True)
        await self.store.delete([row.uid for row in rows])

    async def take(self, train_step: int | None = None) -> list[Group]:
        groups, _ = await self.buffer.take_batch({TASK: BATCH}, train_step=train_step)
        return groups[TASK]

    def operations(self) -> dict[str, Way]:
        return self._of_the_buffer() | self._of_train_steps() | self._of_the_store()

    def _of_the_buffer(self) -> dict[str, Way]:
        async def put_and_evict(group: Group) -> None:
            self.buffer.limit = self.size
            await self.put(group)
            self.buffer.limit = None

        async def stale_groups() -> None:
            for group in copies(self.stale, BATCH):
                await self.put(group)

        async def forget_expired(_: object) -> None:
            assert len(await self.buffer.get(BATCH + 1, TASK, Status.EXPIRED)) == BATCH

        both = (Status.COMPLETED, Status.ABORTED)
        return {
            "put": Way(self.put, prepare=self.new_group, undo=lambda _: self.forget_newest()),
            "put at the limit (evicts one)": Way(put_and_evict, prepare=self.new_group),
            "count": Way(lambda: self.buffer.count(TASK, Status.COMPLETED)),
            "count_statuses": Way(lambda: self.buffer.count_statuses([TASK], both)),
            "is_ready": Way(lambda: self.buffer.is_ready({TASK: BATCH})),
            "take(64)": Way(self.take, undo=self.put_all),
            "get(64) of ABORTED": Way(lambda: self.buffer.get(BATCH, TASK, Status.ABORTED), undo=self.put_all),
            "refresh, nothing expires": Way(lambda: self.refresh()),
            "refresh, 64 expire": Way(self.refresh, prepare=stale_groups, undo=forget_expired),
        }

    async def refresh(self, _: object = None) -> dict[str, int]:
        return await self.buffer.refresh_staleness(
            task_stale_thresholds={TASK: THRESHOLD}, current_train_step=TRAIN_STEP
        )

    def _of_train_steps(self) -> dict[str, Way]:
        taken: list[Group] = []

        async def take_first() -> int:
            taken[:] = await self.take(step := next(self.steps))
            return step

        async def restore(_: object) -> None:
            await self.buffer.restore(0)

        async def take_by_priority() -> list[Group]:
            self.buffer.policy, policy = PrioritizedReplayPolicy(), self.buffer.policy
            groups = await self.take()
            self.buffer.policy = policy
            return groups

        return {
            "take(64) for a train step": Way(lambda: self.take(TRAIN_STEP), undo=restore),
            "commit of 64": Way(self.buffer.commit, prepare=take_first, undo=lambda _: self.put_all(taken)),
            "restore of 64": Way(lambda step: self.buffer.restore(step - 1), prepare=take_first),
            "take(64) by priority": Way(take_by_priority, undo=self.put_all),
        }

    def _of_the_store(self) -> dict[str, Way]:
        stalest = {"task_name": TASK, "status": "completed", "staleness": {"$gte": 2}}

        rows: list[StorageItem] = []

        async def look(*, rows_only: bool = True) -> list[StorageItem]:
            rows[:] = await self.store.get(stalest, order="-staleness", limit=BATCH, rows_only=rows_only)
            assert len(rows) == BATCH, len(rows)
            return rows

        async def uids() -> list[int]:
            return [row.uid for row in await look(rows_only=False)]

        async def put_back(_: object) -> None:
            for row in rows:
                await self.store.put(row)

        return {
            "store: count by staleness": Way(lambda: self.store.count(stalest)),
            "store: get 64 rows by query and order": Way(look),
            "store: get 64 rows by uid": Way(
                lambda ids: self.store.get({"uid": {"$in": ids}}, rows_only=True), prepare=uids
            ),
            "store: update 64 rows": Way(self.store.update, prepare=look),
            "store: delete 64 rows": Way(self.store.delete, prepare=uids, undo=put_back),
        }


async def measure(record: Record, large: int, seconds: float) -> dict[str, dict[int, Times]]:
    """Times by operation and size."""
    benches = {size: Bench(size) for size in (SMALL, large)}
    per_group = {size: await bench.fill() for size, bench in benches.items()}
    record.setting.append(
        f"Filling: {show_s(per_group[SMALL])} a group for the last 100 of {SMALL:,}, "
        f"{show_s(per_group[large])} for the last {large // 10:,} of {large:,}."
    )
    by_size = {size: bench.operations() for size, bench in benches.items()}
    return {
        operation: {
            int(size): times
            for size, times in (
                await compare({str(size): ways[operation] for size, ways in by_size.items()}, seconds=seconds)
            ).items()
        }
        for operation in by_size[SMALL]
    }


def report(record: Record, measured: dict[str, dict[int, Times]], large: int) -> None:
    rows = []
    for operation, times in measured.items():
        small, big = times[SMALL], times[large]
        hands_out = any(word in operation for word in TAKES) and "store" not in operation
        target = MAX_TAKE_RATIO if hands_out else MAX_RATIO
        detail = f"{show_s(small.wall)} and {show_s(big.wall)}; CPU {show(big.cpu / small.cpu)}x"
        what = f"{operation}: {large:,} groups against {SMALL:,}"
        record.find(what, big.wall / small.wall, "x", target=target, at_most=True, detail=detail)
        cells = [show_s(small.wall), show_s(big.wall), f"{show(big.wall / small.wall)}x"]
        rows.append([operation, *cells, f"{show(big.cpu / small.cpu)}x", show_s(max(big.wall_s))])
    columns = ["operation", f"{SMALL:,} groups", f"{large:,} groups", "ratio", "CPU ratio", "slowest call"]
    record.tables.append(Table("Median wall time", columns, rows))


def main() -> None:
    quick = arguments(__doc__).quick
    large = QUICK_LARGE if quick else LARGE
    record = Record(
        "scaling",
        "A million groups against a thousand",
        [
            f"Groups of {SHAPE}: rollouts of their own, token arrays shared; one task, a fifth ABORTED, one "
            f"tag, weights of {MODEL_STEPS} steps; IndexedStorage, most stale first.",
            "Every operation on both buffers in turns; what it changed is undone, untimed.",
        ],
        quick,
    )
    report(record, asyncio.run(measure(record, large, QUICK_SECONDS if quick else SECONDS)), large)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    record.setting.append(f"Largest memory of the process: {show(peak)} GiB.")
    record.save()


if __name__ == "__main__":
    main()
