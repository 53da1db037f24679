"""A run's store with many live groups: the cost of a checkpoint, and of going on after a kill.

    python benchmarks/durable_resume.py 1000 100000

The manager, sampler, books and SQLite file are those of a run; the groups are small ones. Half of them were
there at the checkpoint, half came after it.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from forebay.ledger import Ledger
from forebay.produce import AgentLoopManager, AsyncProduceStrategyConfig, Prompt, Sampler, TaskRunner
from forebay.produce.strategies.rules import book_tags
from forebay.replay import AsyncReplayBufferConfig, SQLStorage
from forebay.types import Status

GROUP_SIZE, NUM_TOKENS = 2, 64


def build(folder: Path, num_groups: int) -> AgentLoopManager:
    """As a process of the run does it."""
    buffer = AsyncReplayBufferConfig().build(SQLStorage(folder / "buffer.db"))
    prompts = [Prompt(message=[{"role": "user", "content": str(i)}]) for i in range(2 * num_groups)]
    runner = TaskRunner(
        task_name="task",
        agent_loop=None,  # type: ignore[arg-type]
        produce_strategy=AsyncProduceStrategyConfig().build(),
        sampler=Sampler(prompts, buffer, task_name="task", prompt_repeat_k=GROUP_SIZE),
    )
    ledger = Ledger(folder / "ledger.jsonl")
    return AgentLoopManager(task_runners=[runner], replay_buffer=buffer, ledger=ledger, keeps_dropped=True)


async def fill(manager: AgentLoopManager, num_groups: int) -> None:
    """Groups as a context stores them."""
    [runner] = manager.task_runners

    async def one() -> None:
        group = await runner.sampler.sample("task")
        for state in group:
            state.append([7] * NUM_TOKENS, logprobs=[-1.0] * NUM_TOKENS, model_step=0)
            state.status = Status.COMPLETED
        name: Any = group[0].group_id
        entry = {"num_tokens": GROUP_SIZE * NUM_TOKENS, "latency_s": 1.0, "score": 0.5}
        manager.ledger.record(name, "task", "admitted")
        manager.ledger.record(name, "task", "produced", **entry)
        await manager.replay_buffer.put(group, "task", model_step=0, tags=book_tags(group, **entry))

    for _ in range(0, num_groups, 500):
        await asyncio.gather(*(one() for _ in range(500)))


async def measure(folder: Path, num_groups: int) -> None:
    """Print the numbers for a store of so many groups."""
    manager = build(folder, num_groups)
    await fill(manager, num_groups // 2)
    started_s, cpu_s = time.perf_counter(), time.process_time()
    cut = await manager.cut(folder / "manager", train_step=1)
    cut_s = time.perf_counter() - started_s
    await cut.write(folder / "manager")
    await cut.release()
    write_s, write_cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    num_bytes = sum(path.stat().st_size for path in (folder / "manager").rglob("*"))
    await fill(manager, num_groups // 2)
    manager.ledger.close()
    await manager.replay_buffer.close()

    manager = build(folder, num_groups)
    started_s, cpu_s = time.perf_counter(), time.process_time()
    await manager.resume(folder / "manager", has_groups=True)
    group = await manager.task_runners[0].sampler.sample("task", [Status.ABORTED])
    resume_s, resume_cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    assert group[0].group_id not in (None, "task/0/0/0")
    assert len(manager.ledger.name_live("task")) == num_groups
    await manager.replay_buffer.close()
    print(
        f"{num_groups:,} groups: cut {1000 * cut_s:.1f} ms, written after {1000 * write_s:.0f} ms "
        f"({1000 * write_cpu_s:.0f} CPU ms, {num_bytes:,} bytes); resumed, up to the first new prompt, in "
        f"{resume_s:.2f} s ({resume_cpu_s:.2f} CPU s)"
    )


def main() -> None:
    """For each number of groups that is named."""
    for number in sys.argv[1:] or ["1000", "100000"]:
        with tempfile.TemporaryDirectory(prefix="forebay-durable-") as folder:
            asyncio.run(measure(Path(folder), int(number)))


if __name__ == "__main__":
    main()
