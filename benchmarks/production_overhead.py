"""What production itself costs per finished group, with few and with many groups in flight.

    python benchmarks/production_overhead.py [--finished 4000] [--repeats 5] [--members 8] [--burst 16]
        [--write]

Scripted agents answer at once, a burst at a time: as soon as one burst of groups is stored, the next may
finish. With ``--burst 1`` every group wakes the strategy by itself, the most expensive case. The same work
without production is measured beside it: making the group, the agent's wait, the put into a like buffer.
The garbage collector is off: its passes go over what the buffer holds, whoever put it there.

    total     CPU time per finished group in a run of `AsyncProduceStrategy.produce_batch`
    beyond    total less prompt, agent and put: sampling, counting, deciding, tasks, wake-ups, ledger

Prints both for 100 and 10,000 groups in flight and their ratio; with ``--write`` they go into
benchmarks/results/production.md. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import time
from collections import deque

from production_report import write_section

from forebay.ledger import Ledger
from forebay.produce import AsyncProduceStrategyConfig, ProduceContext, ProduceProgress, Prompt, Sampler
from forebay.replay import AsyncReplayBufferConfig
from forebay.types import Status

RESPONSE = list(range(32))
MAX_RATIO, MAX_BEYOND_US = 1.2, 50.0


class GatedLoop:
    """Finishes the group that has waited for longest, when told."""

    def __init__(self):
        self.gates = deque()
        self.num_owed = 0
        """Groups that were told to finish before they had begun."""
        self.model_step = 0
        """The label of the tokens."""

    async def generate_group(self, states, *, enable_partial_rollout=False):
        gate = asyncio.get_running_loop().create_future()
        self.gates.append(gate)
        if self.num_owed:
            self.num_owed -= 1
            self.finish_one()
        await gate
        for state in states:
            state.append(RESPONSE, logprobs=[-1.0] * len(RESPONSE), model_step=self.model_step)
            state.finish_reason, state.status, state.reward = "stop", Status.COMPLETED, {"score": 1.0}
        return states

    async def pause(self):
        while self.gates:
            self.finish_one()

    def finish_one(self, *_):
        if self.gates:
            self.gates.popleft().set_result(None)
        else:
            self.num_owed += 1


def make_sampler(buffer, members):
    # More than are used: the start of an epoch is not part of this.
    prompts = [Prompt(message=[{"role": "user", "content": "1+1="}])] * 100_000
    return Sampler(prompts, buffer, task_name="t", prompt_repeat_k=members, shuffle=False)


async def measure_production(in_flight, finished, members, burst):
    """CPU seconds per finished group with so many in flight."""
    buffer = AsyncReplayBufferConfig().build()
    loop, stored, marks = GatedLoop(), 0, {}

    def on_group(task_name, group):
        nonlocal stored
        stored += 1
        if stored == finished // 4:
            marks["begin"] = time.process_time()
        if stored == finished + finished // 4:
            marks["end"] = time.process_time()
        if stored % burst == 0:
            for _ in range(burst):
                loop.finish_one()

    strategy = AsyncProduceStrategyConfig(
        over_sample_threshold=in_flight,
        should_continue_fn=lambda available, target, **_: available < finished + finished // 4,
        staleness_rule="correct",
    ).build()
    ctx = ProduceContext(
        agent_loop=loop,
        sampler=make_sampler(buffer, members),
        replay_buffer=buffer,
        task_batch_size=1,
        task_name="t",
        train_step=1,
        update_event=asyncio.Event(),
        model_step=0,
        progress=ProduceProgress.build_local(["t"], {"t": 1}, 1),
        ledger=Ledger(),
        on_group=on_group,
    )
    producing = asyncio.create_task(strategy.produce_batch(ctx))
    while len(loop.gates) < in_flight:
        await asyncio.sleep(0)
    gc.collect()
    for _ in range(burst):
        loop.finish_one()
    await producing
    ctx.update_event.set()
    await strategy.pause_produce(ctx)
    return (marks["end"] - marks["begin"]) / finished


async def measure_without_production(finished, members):
    """CPU seconds per group for its prompt, the agent's work and the put alone."""
    buffer = AsyncReplayBufferConfig().build()
    sampler, loop = make_sampler(buffer, members), GatedLoop()
    gc.collect()
    begin = time.process_time()
    for _ in range(finished):
        work = loop.generate_group(sampler._next_group())
        waiting = work.send(None)
        loop.finish_one()
        assert waiting.done()
        try:
            work.send(None)
        except StopIteration as end:
            group = end.value
        await buffer.put(group, "t", model_step=0, current_train_step=1)
    return (time.process_time() - begin) / finished


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--finished", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--members", type=int, default=8, help="rollouts in a group")
    parser.add_argument("--burst", type=int, default=16, help="groups that finish together")
    parser.add_argument("--few", type=int, default=100)
    parser.add_argument("--many", type=int, default=10_000)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/production.md")
    options = parser.parse_args()
    gc.disable()
    few, many, without = [], [], []
    # Taken in turns, so that whatever else the machine does falls on all of them.
    for _ in range(options.repeats):
        without.append(asyncio.run(measure_without_production(options.finished, options.members)))
        for in_flight, times in ((options.few, few), (options.many, many)):
            work = measure_production(in_flight, options.finished, options.members, options.burst)
            times.append(asyncio.run(work))
    base, few_s, many_s = (statistics.median(times) for times in (without, few, many))
    report = {
        "members": options.members,
        "burst": options.burst,
        "without_us": base * 1e6,
        f"total_us_{options.few}": few_s * 1e6,
        f"total_us_{options.many}": many_s * 1e6,
        f"beyond_us_{options.few}": (few_s - base) * 1e6,
        f"beyond_us_{options.many}": (many_s - base) * 1e6,
        "ratio_total": many_s / few_s,
        "ratio_beyond": (many_s - base) / (few_s - base),
    }
    print(json.dumps({name: round(value, 3) for name, value in report.items()}, indent=2))
    if options.write:
        write_results(options, report)
    if report["ratio_total"] > MAX_RATIO or report[f"beyond_us_{options.many}"] > MAX_BEYOND_US:
        raise SystemExit(1)


def write_results(options, report) -> None:
    """The section of the results page."""
    few, many = options.few, options.many
    lines = [
        f"CPU time per finished group of {options.members} rollouts, median of {options.repeats} runs of "
        f"{options.finished} groups,",
        f"bursts of {options.burst}. Beyond: total less group, agent and put, measured beside.",
        "",
        f"| | target | {few} in flight | {many} in flight |",
        "|---|---|---|---|",
        f"| total | | {report[f'total_us_{few}']:.0f} us | {report[f'total_us_{many}']:.0f} us |",
        f"| beyond | <= {MAX_BEYOND_US:g} us | {report[f'beyond_us_{few}']:.0f} us "
        f"| {report[f'beyond_us_{many}']:.0f} us |",
        f"| total, over {few} in flight | <= {MAX_RATIO:g} x | 1 | {report['ratio_total']:.2f} x |",
    ]
    command = (
        f"python benchmarks/production_overhead.py --finished {options.finished} --repeats {options.repeats} "
        f"--burst {options.burst} --write"
    )
    heading = f"Overhead per finished group, bursts of {options.burst}"
    write_section(heading, command, lines)


if __name__ == "__main__":
    main()
