"""What a stored token costs in memory, over the bytes of the arrays that hold it.

Usage: python benchmarks/replay/memory.py [--quick]

    for each length, in a process of its own:
    resident memory before --make groups, put them (labels, thresholds)--> resident memory after
    overhead = growth / bytes of all different arrays of the stored rollouts

The growth is the operating system's count of resident memory, so it contains everything: rows, indexes,
objects, the allocator's gaps. The groups are made one after the other and belong to the buffer alone.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from measuring import Record, Table, arguments, show
from rollouts import GROUP_SIZE, Shape, array_bytes, make_group

from forebay.replay import IndexedStorage, ReplayBuffer, StalenessReplayPolicy
from forebay.types import Status

LENGTHS = (512, 1_280, 8_192, 32_768)
TARGET_LENGTH, MAX_OVERHEAD = 8_192, 1.15
RUNS, QUICK_RUNS = 3, 1
TOTAL_TOKENS, QUICK_TOKENS = 24_000_000, 3_000_000
"""Response tokens of all groups together: about 410 MB of arrays."""


async def measure(tokens: int, total: int) -> dict[str, Any]:
    """Bytes before and after filling a buffer with groups of `tokens` tokens a rollout."""
    generator = np.random.default_rng(0)
    shape = Shape(tokens=tokens)
    buffer = ReplayBuffer(StalenessReplayPolicy(), IndexedStorage())
    # One group before counting starts: what is loaded and allocated once is no cost of a token.
    await _put(buffer, make_group(shape, generator))
    gc.collect()
    before = resident_bytes()
    number = max(8, total // (tokens * GROUP_SIZE))
    for _ in range(number):
        await _put(buffer, make_group(shape, generator))
    gc.collect()
    grown = resident_bytes() - before
    groups, _ = await buffer.take_batch({"math": number + 1})
    arrays = array_bytes(groups["math"]) * number // (number + 1)
    return {"groups": number, "arrays": arrays, "grown": grown}


async def _put(buffer: ReplayBuffer, group: list[Any]) -> None:
    await buffer.put(group, "math", model_step=3, current_train_step=4, stale_threshold=4)
    assert group[0].status is Status.COMPLETED


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure_apart(tokens: int, total: int) -> dict[str, Any]:
    """`measure` in a fresh process."""
    result = subprocess.run(
        [sys.executable, __file__, "--length", str(tokens), "--total", str(total)],
        check=True,
        capture_output=True,
        text=True,
    )
    measured: dict[str, Any] = json.loads(result.stdout)
    return measured


def report(record: Record, runs: int, total: int) -> None:
    rows = []
    for tokens in LENGTHS:
        measured = sorted((measure_apart(tokens, total) for _ in range(runs)), key=lambda run: run["grown"])
        run = measured[runs // 2]
        overhead = run["grown"] / run["arrays"]
        stored = run["groups"] * GROUP_SIZE * tokens
        per_token = f"{run['arrays'] / stored:.2f}", f"{run['grown'] / stored:.2f}"
        rows.append([f"{tokens:,}", f"{run['groups']:,}", *per_token, f"{overhead:.3f}x"])
        if tokens == TARGET_LENGTH:
            detail = f"{per_token[1]} against {per_token[0]} bytes a response token"
            what = f"memory per stored token over the bytes of its arrays, {GROUP_SIZE} x {tokens:,} tokens"
            record.find(what, overhead, "x", target=MAX_OVERHEAD, at_most=True, detail=detail)
    columns = ["tokens a rollout", "groups", "bytes a token, arrays", "bytes a token, resident", "overhead"]
    record.tables.append(Table("IndexedStorage, median run", columns, rows))


def main() -> None:
    options = arguments(
        __doc__,
        ("--length", {"type": int, "help": "only measure this length here, and print the numbers"}),
        ("--total", {"type": int, "default": TOTAL_TOKENS}),
    )
    if options.length:
        print(json.dumps(asyncio.run(measure(options.length, options.total))))
        return
    total = QUICK_TOKENS if options.quick else options.total
    runs = QUICK_RUNS if options.quick else RUNS
    record = Record(
        "memory",
        "Memory per stored token",
        [
            f"Groups of {GROUP_SIZE} with arrays of their own; a token's arrays are response_ids, logprobs, "
            f"response_mask, response_model_steps and tokens (17 bytes), the prompt's ids are shared by the "
            f"group; median of {runs} fresh processes, {show(total)} response tokens each."
        ],
        options.quick,
    )
    report(record, runs, total)
    record.save()


if __name__ == "__main__":
    main()
