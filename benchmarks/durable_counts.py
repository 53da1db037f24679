"""Questions to a large SQLite store and to large books: do they cost more than in small ones?

    python benchmarks/durable_counts.py store 1000 1000000
    python benchmarks/durable_counts.py books 10000000

CPU time of one call, the best of seven rounds.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from forebay.ledger import Ledger
from forebay.replay import AsyncReplayBufferConfig, SQLStorage, StorageItem
from forebay.types import RolloutState, Status

CALLS, ROUNDS, AT_ONCE = 100, 7, 2000
STATUSES = [Status.COMPLETED, Status.ABORTED, Status.EXPIRED]


async def cost_us(call: Callable[[], Awaitable[object]]) -> float:
    """CPU microseconds of a call, in all threads."""
    best = float("inf")
    for _ in range(ROUNDS):
        started_s = time.process_time()
        for _ in range(CALLS):
            await call()
        best = min(best, (time.process_time() - started_s) / CALLS)
    return 1e6 * best


async def ask_store(num_groups: int) -> None:
    """`count`, `count_statuses` and `is_ready` of a buffer with so many groups of two tasks and statuses."""
    with tempfile.TemporaryDirectory(prefix="forebay-counts-") as folder:
        storage = SQLStorage(Path(folder) / "buffer.db")
        buffer = AsyncReplayBufferConfig().build(storage)
        group = [RolloutState([], response_ids=[7], status=Status.COMPLETED)]
        for first in range(0, num_groups, AT_ONCE):
            rows = [
                StorageItem(group, -1, -1, f"task {i % 2}", list(Status)[1 + i % 3], 0, oldest_model_step=i % 5)
                for i in range(first, min(first + AT_ONCE, num_groups))
            ]
            await storage.put_many(rows)
        live = [status for status in Status if status is not Status.ARCHIVED]
        costs = [
            await cost_us(lambda: buffer.count("task 0", Status.COMPLETED)),
            await cost_us(lambda: buffer.count_statuses(["task 0", "task 1"], live)),
            await cost_us(lambda: buffer.is_ready({"task 0": 64, "task 1": 64})),
        ]
        assert len(buffer) == num_groups
        said = ", ".join(f"{cost:.0f}" for cost in costs)
        print(f"{num_groups:,} groups: count, count_statuses, is_ready {said} us of CPU", flush=True)
        await buffer.close()


def ask_books(num_events: int) -> None:
    """Balance of the books and the life of one group; three events for each group."""
    with tempfile.TemporaryDirectory(prefix="forebay-books-") as folder:
        ledger = Ledger(Path(folder) / "ledger.jsonl")
        num_groups, started_s = num_events // 3, time.process_time()
        for number in range(num_groups):
            name = f"task/0/0/{number}"
            ledger.record(name, "task", "admitted")
            ledger.record(name, "task", "produced", num_tokens=64, latency_s=1.0, score=0.5)
            ledger.record(name, "task", "trained", train_step=number // 64)
        written_s, started_s = time.process_time() - started_s, time.process_time()
        balance = ledger.balance({"task": 0})
        balance_s, started_s = time.process_time() - started_s, time.process_time()
        life = ledger.life("task/0/0/5", "task")
        life_s = time.process_time() - started_s
        assert balance.ok
        assert life is not None
        print(
            f"{3 * num_groups:,} events: written in {written_s:.0f} CPU s, balance {1e3 * balance_s:.2f} ms, "
            f"life of a group {1e3 * life_s:.3f} ms",
            flush=True,
        )
        ledger.close()


if __name__ == "__main__":
    for given in sys.argv[2:]:
        if sys.argv[1] == "store":
            asyncio.run(ask_store(int(given)))
        else:
            ask_books(int(given))
