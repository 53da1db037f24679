"""Saving and resuming a buffer, against writing and reading the same bytes with plain file I/O.

Usage: python benchmarks/replay/snapshot.py [--quick] [--folder PATH]

    64 groups of 8 x 8,192 tokens --save--> directory --resume--> an empty buffer      both with fsync,
    the bytes of that directory   --write, fsync--> file --read-->                     in turns
    a heartbeat on the event loop measures how long it was blocked meanwhile

Plain I/O writes all bytes with one `write` from memory, syncs file and directory, and reads the file whole.
Reads come from the page cache on both sides. The share is (plain write + plain read) / (save + resume).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from measuring import Record, Table, Times, arguments, show, show_s, spread
from rollouts import GROUP_SIZE, Shape, array_bytes, make_group

from forebay.replay import IndexedStorage, ReplayBuffer, StalenessReplayPolicy

SHAPE = Shape(tokens=8_192, prompt_tokens=128)
GROUPS = 64
ROUNDS, QUICK_ROUNDS = 15, 3
BEAT_S = 0.001
MIN_SHARE, MAX_BLOCK_MS = 50.0, 50.0


class Heartbeat:
    """How much later than asked for the event loop came back, at worst.

    >>> async with Heartbeat() as heart:
    ...     await buffer.save(path)
    >>> heart.longest_s
    """

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def _beat(self) -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(BEAT_S)
            self.longest_s = max(self.longest_s, time.perf_counter() - start - BEAT_S)

    async def __aenter__(self) -> Heartbeat:
        self._task = asyncio.create_task(self._beat())
        await asyncio.sleep(2 * BEAT_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(2 * BEAT_S)
        self._task.cancel()


class Bench:
    """What is timed, and how long the event loop was blocked by it."""

    def __init__(self, folder: Path, tokens: int) -> None:
        self.folder = folder
        self.times: dict[str, Times] = {}
        self.blocks_s: dict[str, list[float]] = {}
        generator = np.random.default_rng(0)
        shape = Shape(tokens=tokens, prompt_tokens=SHAPE.prompt_tokens)
        self.groups = [make_group(shape, generator) for _ in range(GROUPS)]
        self.raw_bytes = 0
        self.snapshot_bytes = 0

    async def run(self, rounds: int) -> None:
        buffer = ReplayBuffer(StalenessReplayPolicy(), IndexedStorage())
        for step, group in enumerate(self.groups):
            await buffer.put(group, "math", model_step=step % 4, current_train_step=5, stale_threshold=9)
        self.raw_bytes = array_bytes(self.groups)
        for i in range(rounds + 1):
            if i == 1:
                # The first round warms up.
                self.times, self.blocks_s = {}, {}
            await self.round(buffer)

    async def round(self, buffer: ReplayBuffer) -> None:
        snapshot, file = self.folder / "snapshot", self.folder / "plain"
        await self.timed("save", lambda: buffer.save(snapshot))
        await self.timed("plain write", partial(asyncio.to_thread, write_plain, file, self.read(snapshot)))
        empty = ReplayBuffer(StalenessReplayPolicy(), IndexedStorage())
        await self.timed("resume", lambda: empty.resume(snapshot))
        assert len(empty) == GROUPS
        await self.timed("plain read", lambda: asyncio.to_thread(file.read_bytes))
        await self.timed("nothing, as long as a save", lambda: asyncio.sleep(self.times["save"].wall))
        shutil.rmtree(snapshot)
        file.unlink()

    def read(self, snapshot: Path) -> bytes:
        data = b"".join(path.read_bytes() for path in sorted(snapshot.iterdir()))
        self.snapshot_bytes = len(data)
        return data

    async def timed(self, name: str, call: Callable[[], Awaitable[Any]]) -> None:
        async with Heartbeat() as heart:
            cpu, wall = time.process_time(), time.perf_counter()
            await call()
            took = time.perf_counter() - wall, time.process_time() - cpu
        self.times.setdefault(name, Times()).add(*took)
        self.blocks_s.setdefault(name, []).append(heart.longest_s)


def write_plain(file: Path, data: bytes) -> None:
    with open(file, "wb", buffering=0) as out:
        left = memoryview(data)
        while left:
            left = left[out.write(left) :]
        os.fsync(out.fileno())
    handle = os.open(file.parent, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def report(record: Record, bench: Bench, tokens: int) -> None:
    times, megabytes = bench.times, bench.snapshot_bytes / 1e6
    rows = [
        [
            name,
            show_s(measured.wall),
            f"{spread(second * 1e3 for second in measured.wall_s)} ms",
            show_s(measured.cpu),
            f"{show(megabytes / measured.wall)} MB/s",
            f"{show(statistics.median(bench.blocks_s[name]) * 1e3)} ms",
            f"{show(max(bench.blocks_s[name]) * 1e3)} ms",
        ]
        for name, measured in times.items()
    ]
    columns = ["", "wall", "lowest to highest", "CPU", "rate", "longest block, median", "longest block, worst"]
    title = f"{GROUPS} groups of {GROUP_SIZE} x {tokens:,} tokens"
    record.tables.append(Table(title, columns, rows))
    record.setting.append(
        f"The snapshot has {megabytes:.1f} MB, the arrays {bench.raw_bytes / 1e6:.1f} MB; the heartbeat is "
        f"{BEAT_S * 1e3:g} ms and the last row has nothing beside it: that much is the machine's."
    )
    plain = times["plain write"].wall + times["plain read"].wall
    own = times["save"].wall + times["resume"].wall
    halves = ", ".join(
        f"{name} {show(times[other].wall / times[name].wall * 100)}%"
        for name, other in (("save", "plain write"), ("resume", "plain read"))
    )
    what = f"save + resume of {title}, share of plain file I/O"
    detail = f"{show_s(own)} against {show_s(plain)}; {halves}"
    record.find(what, plain / own * 100, "%", target=MIN_SHARE, detail=detail)
    blocks = [max(pair) * 1e3 for pair in zip(bench.blocks_s["save"], bench.blocks_s["resume"], strict=True)]
    record.find(
        "longest block of the event loop meanwhile",
        statistics.median(blocks),
        " ms",
        target=MAX_BLOCK_MS,
        at_most=True,
        detail=f"median of {len(blocks)} rounds; {spread(blocks)} ms",
    )


def main() -> None:
    options = arguments(__doc__, ("--folder", {"type": Path, "help": "where to write; default: a temporary"}))
    tokens = SHAPE.tokens // 8 if options.quick else SHAPE.tokens
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    record = Record(
        "snapshot",
        "Snapshots against plain file I/O",
        [
            f"{GROUPS} groups of {GROUP_SIZE} x {tokens:,} tokens in IndexedStorage, one turn by one model; "
            f"both sides with fsync, reads from the page cache; medians of {rounds} rounds in turns."
        ],
        options.quick,
    )
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="forebay-bench-") as folder:
        bench = Bench(Path(folder), tokens)
        asyncio.run(bench.run(rounds))
    report(record, bench, tokens)
    record.save()


if __name__ == "__main__":
    main()
