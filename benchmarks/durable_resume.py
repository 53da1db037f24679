"""A run's store with many live groups: the cost of a checkpoint, and of going on after a kill.

    python benchmarks/durable_resume.py 1000 100000
    python benchmarks/durable_resume.py --memory 100000
    python benchmarks/durable_resume.py --process 100000 --events 1000000

The manager, sampler, books and store are those of a run; the groups are small ones. Half of them were there
at the checkpoint, half came after it: an SQLite file has these after a kill, and a buffer in memory has not.
"Stood still" is the longest time that the event loop, and with it the producer, waited while the checkpoint
was written. "A batch" is the time from a trainer's question for the next batch to its groups, one after the
other: before the checkpoint, and from the cut to the end of the commit after it. A trainer whose step takes
longer than that waits for no checkpoint. With ``--process`` it is a whole ``forebay train --resume``, from the start
of its process to its first request to the engine, with so many events of settled groups in the books.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from forebay.io.safe_files import seal
from forebay.ledger import Ledger
from forebay.produce import AgentLoopManager, AsyncProduceStrategyConfig, Prompt, Sampler, TaskRunner
from forebay.produce.prompts.dataset import load_prompts
from forebay.produce.strategies.rules import book_tags
from forebay.replay import AsyncReplayBufferConfig, SQLStorage
from forebay.runs.folder import list_checkpoints, saved_config, step_of
from forebay.types import Status

GROUP_SIZE, NUM_TOKENS = 2, 64
BATCH_SIZE, STEPS = 16, 30


def build(folder: Path, num_groups: int, *, in_memory: bool) -> AgentLoopManager:
    """As a process of the run does it."""
    buffer = AsyncReplayBufferConfig().build(None if in_memory else SQLStorage(folder / "buffer.db"))
    prompts = [Prompt(message=[{"role": "user", "content": str(i)}]) for i in range(2 * num_groups)]
    runner = TaskRunner(
        task_name="task",
        agent_loop=None,  # type: ignore[arg-type]
        produce_strategy=AsyncProduceStrategyConfig(max_staleness=10_000).build(),
        sampler=Sampler(prompts, buffer, task_name="task", prompt_repeat_k=GROUP_SIZE),
    )
    ledger = Ledger(folder / "ledger.jsonl")
    return AgentLoopManager(task_runners=[runner], replay_buffer=buffer, ledger=ledger, keeps_dropped=True)


async def fill(manager: AgentLoopManager, num_groups: int) -> None:
    """Groups of the first task as a context stores them."""
    runner = manager.task_runners[0]

    async def one() -> None:
        group = await runner.sampler.sample("task")
        for state in group:
            state.append([7] * NUM_TOKENS, logprobs=[-1.0] * NUM_TOKENS, model_step=0)
            # As the trainer takes them: a resume looks at its first batch before it makes a request.
            state.prompt_ids, state.reward, state.status = [7], {"score": 0.5}, Status.COMPLETED
        name: Any = group[0].group_id
        entry = {"num_tokens": GROUP_SIZE * NUM_TOKENS, "latency_s": 1.0, "score": 0.5}
        manager.ledger.record(name, "task", "admitted")
        manager.ledger.record(name, "task", "produced", **entry)
        await manager.replay_buffer.put(group, "task", model_step=0, tags=book_tags(group, **entry))

    for _ in range(0, num_groups, 500):
        await asyncio.gather(*(one() for _ in range(500)))


async def train(manager: AgentLoopManager, waits_s: list[float], num_steps: int) -> None:
    """Take a batch again and again, as a trainer with the shortest of steps; its waits."""
    for _ in range(num_steps):
        started_s = time.perf_counter()
        batch = await manager.get_batch(BATCH_SIZE, manager.progress.next_consumer_step)
        waits_s.append(time.perf_counter() - started_s)
        assert len(batch.rollout_states) == BATCH_SIZE
        await asyncio.sleep(0.005)


class Ticks:
    """The longest time between two turns of the event loop, while the block lasts."""

    longest_s = 0.0

    async def __aenter__(self) -> Ticks:
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _tick(self) -> None:
        while True:
            before_s = time.perf_counter()
            await asyncio.sleep(0.001)
            self.longest_s = max(self.longest_s, time.perf_counter() - before_s - 0.001)


async def measure(folder: Path, num_groups: int, *, in_memory: bool) -> None:
    """Print the numbers for a store of so many groups."""
    manager = build(folder, num_groups, in_memory=in_memory)
    await fill(manager, num_groups // 2)
    # As a run does once it has begun.
    gc.collect()
    gc.freeze()
    before_s: list[float] = []
    beside_s: list[float] = []
    await train(manager, before_s, STEPS)
    training = asyncio.create_task(train(manager, beside_s, num_groups // 2 // BATCH_SIZE - STEPS))
    started_s, cpu_s = time.perf_counter(), time.process_time()
    cut = await manager.cut(folder / "manager", train_step=STEPS)
    cut_s = time.perf_counter() - started_s
    async with Ticks() as ticks:
        await cut.write(folder / "manager")
        await cut.aclose()
        write_s, write_cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
        committed_s = time.perf_counter()
        await manager.replay_buffer.commit(STEPS)
        committed_s = time.perf_counter() - committed_s
    # The batch that was asked for during the commit, too.
    num_waits = len(beside_s)
    while len(beside_s) == num_waits and not training.done():
        await asyncio.sleep(0.001)
    training.cancel()
    num_bytes = sum(path.stat().st_size for path in (folder / "manager").rglob("*"))
    await fill(manager, num_groups // 2)
    manager.ledger.close()
    await manager.replay_buffer.close()

    manager = build(folder, num_groups, in_memory=in_memory)
    started_s, cpu_s = time.perf_counter(), time.process_time()
    await manager.resume(folder / "manager", has_groups=not in_memory)
    group = await manager.task_runners[0].sampler.sample("task", [Status.ABORTED])
    resume_s, resume_cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    assert group[0].group_id not in (None, "task/0/0/0")
    assert len(manager.ledger.name_live("task")) == (num_groups // 2 if in_memory else num_groups) - STEPS * BATCH_SIZE
    await manager.replay_buffer.close()
    print(
        f"{num_groups:,} groups: cut {1000 * cut_s:.1f} ms, written after {1000 * write_s:.0f} ms "
        f"({1000 * write_cpu_s:.0f} CPU ms, {num_bytes:,} bytes), stood still for "
        f"{1000 * ticks.longest_s:.1f} ms; a batch in {1000 * statistics.median(before_s):.1f} ms before (at most "
        f"{1000 * max(before_s):.1f}), in {1000 * statistics.median(beside_s):.1f} beside (at most "
        f"{1000 * max(beside_s):.1f}, of {len(beside_s)}), the commit after "
        f"{1000 * committed_s:.1f} ms; resumed, up to the first new prompt, in "
        f"{resume_s:.2f} s ({resume_cpu_s:.2f} CPU s)"
    )


RUN_FILE = """
name = "run"
steps = 2
batch_size = 4
rollouts_per_prompt = 2
produce = { mode = "separate", max_staleness = 10000 }
replay = { store = "sqlite" }
model = { source = "tiny", tiny = { hidden_size = 16, num_layers = 1, num_heads = 1 } }
"""
TASK = """
[[tasks]]
name = "NAME"
data = { source = "sorting", arguments = { length = 6, letters = 12 }, size = 2000 }
judge = { name = "exact_match", arguments = { partial_credit = true } }
sample = { max_tokens = 4 }
"""
TELLING = """
import sys, time
from forebay.engines.controller import RolloutController
from forebay.cli import main
generate = RolloutController.generate_sample
async def told(self, *arguments, **options):
    print("@request", time.process_time(), flush=True)
    return await generate(self, *arguments, **options)
RolloutController.generate_sample = told
sys.argv = ["forebay", "train", "--resume", sys.argv[1], "steps=99"]
main()
"""


async def put_behind(folder: Path, num_groups: int, num_events: int) -> None:
    """Into a finished run: events in the books of its last checkpoint, and live groups of before and after it."""
    config = saved_config(folder)
    buffer = AsyncReplayBufferConfig().build(SQLStorage(folder / "buffer.db"))
    prompts, number = load_prompts(config.tasks[0].data), config.rollouts_per_prompt
    runners = [
        TaskRunner(
            task_name=task.name,
            agent_loop=None,  # type: ignore[arg-type]
            produce_strategy=AsyncProduceStrategyConfig().build(),
            sampler=Sampler(prompts, buffer, task_name=task.name, prompt_repeat_k=number, seed=config.seed),
        )
        for task in config.tasks
    ]
    ledger = Ledger(folder / "ledger.jsonl")
    manager = AgentLoopManager(task_runners=runners, replay_buffer=buffer, ledger=ledger, keeps_dropped=True)
    checkpoint = list_checkpoints(folder)[-1]
    await manager.resume(checkpoint / "manager", has_groups=True)
    for place in range(num_events // 3):
        name = f"settled/{place}"
        ledger.record(name, "task", "admitted")
        ledger.record(name, "task", "produced", num_tokens=96, latency_s=1.5, score=0.25)
        ledger.record(name, "task", "trained", train_step=1)
    await fill(manager, num_groups // 2)
    cut = await manager.cut(checkpoint / "manager", train_step=step_of(checkpoint))
    await cut.write(checkpoint / "manager")
    await cut.aclose()
    seal(checkpoint)
    ledger.keep(cut.state["ledger"])
    await fill(manager, num_groups // 2)
    ledger.close()
    await buffer.close()


def time_process(folder: Path, num_groups: int, num_events: int) -> None:
    """Print how long a resume takes from the start of its process on, and its CPU time."""
    (folder / "run.toml").write_text(RUN_FILE + TASK.replace("NAME", "task") + TASK.replace("NAME", "other"))
    train = [sys.executable, "-m", "forebay", "train", str(folder / "run.toml"), f"output={folder}"]
    subprocess.run(train, check=True, stdout=subprocess.DEVNULL)
    asyncio.run(put_behind(folder / "run", num_groups, num_events))
    started_s = time.perf_counter()
    command = [sys.executable, "-c", TELLING, str(folder / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("@request"):
                break
        took_s = time.perf_counter() - started_s
        process.kill()
    assert lines[-1].startswith("@request"), "".join(lines)
    print(
        f"{num_groups:,} live groups, {num_events:,} events behind them: first request {took_s:.2f} s after the "
        f"start of the process ({float(lines[-1].split()[1]):.2f} CPU s)"
    )


def main() -> None:
    """For each number of groups that is named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("numbers", nargs="*", type=int, default=[1000, 100_000])
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--process", action="store_true")
    parser.add_argument("--events", type=int, default=0)
    options = parser.parse_args()
    for number in options.numbers:
        with tempfile.TemporaryDirectory(prefix="forebay-durable-") as name:
            if options.process:
                time_process(Path(name), number, options.events)
            else:
                asyncio.run(measure(Path(name), number, in_memory=options.memory))


if __name__ == "__main__":
    main()
