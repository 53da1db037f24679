"""How soon the trainer has its batch, once the put that completes it is done.

    python benchmarks/production_wakeup.py [--batches 300] [--groups 32] [--members 8] [--write]

The real manager, producer, strategy, sampler and buffer in memory; scripted agents answer when told, so that
nothing else is due on the event loop when the last group of a batch is stored: the weights allow no further
step, and the producer rests until they are synchronized.

    put of the last group is done --> get_batch sees that the batch is whole --> get_batch returns the batch
                                  wake-up                              copies, ledger, statistics

With ``--write`` the numbers go into benchmarks/results/production.md. Exits with 1 if the target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import numpy as np
from production_overhead import GatedLoop, make_sampler
from production_report import write_section

from forebay.produce import AgentLoopManager, AsyncProduceStrategyConfig, TaskRunner
from forebay.replay import AsyncReplayBufferConfig

MAX_WAKE_UP_MS = 5.0
WARM_UP = 5
"""Batches that are not counted: the first of everything is slower."""


class Stopwatch:
    """Notes when the latest group was stored and when the waiting consumer knew of its batch."""

    def __init__(self, manager):
        self.stored_s = self.woken_s = 0.0
        self._wait_for = manager._batches.wait_for
        manager.on_group = self.note_stored
        manager._batches.wait_for = self.wait_for

    def note_stored(self, task_name, group):
        self.stored_s = time.perf_counter()

    async def wait_for(self, sizes, train_step):
        ready = await self._wait_for(sizes, train_step)
        self.woken_s = time.perf_counter()
        return ready


async def next_batch(manager, loop, groups, train_step):
    """Finish group after group, each when all is quiet again, and take the batch."""
    getting = asyncio.create_task(manager.get_batch(groups, train_step))
    for _ in range(groups):
        while not loop.gates:
            await asyncio.sleep(0)
        # Time for whoever the last group woke; what a turn of the loop costs is not measured.
        await asyncio.sleep(0.0005)
        loop.finish_one()
    return await getting


async def measure(batches, groups, members):
    """Milliseconds (batches, 2) from the deciding put to the wake-up and to the batch."""
    buffer, loop = AsyncReplayBufferConfig().build(), GatedLoop()
    runner = TaskRunner(
        task_name="t",
        agent_loop=loop,
        produce_strategy=AsyncProduceStrategyConfig().build(),
        sampler=make_sampler(buffer, members),
    )
    manager = AgentLoopManager(task_runners=[runner], replay_buffer=buffer)
    watch, times = Stopwatch(manager), []
    producing = asyncio.create_task(manager.produce_loop(groups))
    for step in range(1, batches + WARM_UP + 1):
        batch = await next_batch(manager, loop, groups, step)
        returned_s = time.perf_counter()
        assert len(batch.rollout_states) == groups
        times.append((watch.woken_s - watch.stored_s, returned_s - watch.stored_s))
        await buffer.commit(step)
        await manager.pause_produce()
        loop.model_step = step
        await manager.continue_produce(step)
    await manager.shutdown()
    await producing
    return np.array(times[WARM_UP:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--groups", type=int, default=32, help="in a batch")
    parser.add_argument("--members", type=int, default=8, help="rollouts in a group")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/production.md")
    options = parser.parse_args()
    times = asyncio.run(measure(options.batches, options.groups, options.members))
    median, p99 = np.percentile(times, [50, 99], axis=0)
    lines = [
        f"{options.batches} batches of {options.groups} groups x {options.members} rollouts, in memory, from",
        "the end of the put that completes the batch, with nothing else due on the event loop.",
        "",
        "| until | target | median | p99 |",
        "|---|---|---|---|",
        f"| `get_batch` knows of it | <= {MAX_WAKE_UP_MS:g} ms | {median[0]:.2f} ms | {p99[0]:.2f} ms |",
        f"| `get_batch` returns the batch | | {median[1]:.2f} ms | {p99[1]:.2f} ms |",
    ]
    print("\n".join(lines))
    if options.write:
        command = f"python benchmarks/production_wakeup.py --batches {options.batches} --write"
        write_section("Wake-up", command, lines)
    raise SystemExit(0 if p99[0] <= MAX_WAKE_UP_MS else 1)


if __name__ == "__main__":
    main()
