"""What the run's own process costs per group, with 10, 100 and 1,000 engines.

    python benchmarks/driver.py [--engines 10,100,1000] [--groups 6000] [--write]
    python benchmarks/driver.py --engines 1000 --day [--write]
    python benchmarks/driver.py --ray [--quick] [--workers 50] [--engines 4] [--minutes 10] [--token-s 0.02]

The real manager, strategy, sampler, buffer, books (on disk), status, controller, engine pool and agent loop
of a separate run, on virtual time; engines are scripted: 16 requests each, log-normal lengths, one request in
a thousand fails, and every hour each engine is lost once, with what it runs. The trainer takes a batch of a
quarter of what is in flight, gives the engines new weights and goes on. Each size has a process of its own.

    groups/s    finished groups of 8 by second of CPU, of everything in the process, engines included
    agents      the same without pool, manager, buffer and books: scripted engines and the agent loop alone

With ``--day`` it goes on for a virtual day and reports the memory of each hour, as it comes.
With ``--ray`` agents and engines are on a local Ray cluster, the same engines with as many requests as six groups for
each worker are, the store is an SQLite file (or memory), and the time is real: the CPU is that of this process alone,
Ray's client included, also by thread. Processes of the cluster are forked from one that has imported everything
(`tests/warm_python.py`). With ``--quick`` workers answer by themselves after half a second or so, with as many tokens:
they cost so little that the process that is measured sets the pace.
With ``--write`` the numbers go into benchmarks/results/production.md. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import logging
import math
import os
import pstats
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
from production_report import write_section

from forebay.agents import SingleTurnAgentLoop
from forebay.agents.base import AgentLoop
from forebay.agents.chat.rendering import PromptRenderer
from forebay.aio.virtual_time import VirtualTimeLoop
from forebay.engines import RolloutController
from forebay.engines.base import Completion, EngineHealth, EngineLost
from forebay.judges.base import Judge
from forebay.ledger import Ledger
from forebay.produce import AgentLoopManager, AsyncProduceStrategyConfig, Prompt, Sampler, TaskRunner
from forebay.replay import AsyncReplayBufferConfig
from forebay.runs.launch import GC_THRESHOLDS
from forebay.runs.show.status import RunStatus
from forebay.simulation.world import PromptTokenizer
from forebay.types import SampleParams, Status
from forebay.watching.activity import Activities

MEMBERS, SLOTS, LONGEST = 8, 16, 4096
GROUPS_A_WORKER = 6
TOKEN_S = 0.02
"""Seconds of a token: fifty a second for each request."""
P50, P99 = 200, 1600
QUICK_S, QUICK_SPREAD = 0.6, 0.7
"""What a group takes without engines: the median, and sigma of its logarithm."""
FAILED_SHARE, LOST_EVERY_S, AWAY_S = 0.001, 3600.0, 60.0
MIN_GROUPS_S, MAX_RATIO = 400.0, 1.2
IDS = np.arange(LONGEST, dtype=np.int32)
LOGPROBS = np.full(LONGEST, -1.0, np.float32)
SIGMA = math.log(P99 / P50) / 2.3263478740408408


class CheapEngine:
    """As little of an engine as can be: one timer for a request, and it may be lost."""

    max_context_tokens = 1 << 20

    def __init__(self, number: int, token_s: float = TOKEN_S) -> None:
        self.model_step, self._token_s = 0, token_s
        self.is_away = True
        self._random = random.Random(number)
        self._running: dict = {}
        self._loop = None

    async def bring_up(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not None:
            await asyncio.sleep(AWAY_S)
        self._loop, self.is_away = loop, False
        loop.call_later(self._random.expovariate(1 / LOST_EVERY_S), self.lose)

    def lose(self) -> None:
        self.is_away = True
        for ended, _ in list(self._running.values()):
            if not ended.done():
                ended.set_result("lost")

    async def generate(self, request) -> Completion:
        if self.is_away:
            return Completion(finish_reason="error", error_msg="gone", lost=True)
        whole = min(LONGEST, max(1, round(random.Random(request.seed).lognormvariate(math.log(P50), SIGMA))))
        left = max(1, min(whole - request.num_earlier, request.max_tokens))
        ended, begun_s = self._loop.create_future(), self._loop.time()
        timer = self._loop.call_later(left * self._token_s, ended.set_result, "stop")
        self._running[request.request_id] = ended, begun_s
        try:
            how = await ended
        finally:
            timer.cancel()
            del self._running[request.request_id]
        if how == "stop" and self._random.random() < FAILED_SHARE:
            return Completion(finish_reason="error", error_msg="a scripted failure")
        count = left if how == "stop" else self.num_made_since(begun_s, left)
        return Completion(
            response_ids=IDS[:count],
            logprobs=LOGPROBS[:count],
            model_steps=np.full(count, self.model_step, np.int32),
            finish_reason="error" if how == "lost" else how,
            error_msg="the engine is gone" if how == "lost" else None,
            lost=how == "lost",
        )

    def num_made_since(self, begun_s, left=LONGEST) -> int:
        return min(left, int((self._loop.time() - begun_s) / self._token_s))

    def num_made(self, request_id) -> int:
        running = self._running.get(request_id)
        return 0 if running is None else self.num_made_since(running[1])

    async def abort(self, request_ids) -> None:
        for name in request_ids:
            if name in self._running and not self._running[name][0].done():
                self._running[name][0].set_result("abort")

    async def pause(self) -> None:
        await self.abort(list(self._running))

    async def resume(self) -> None:
        pass

    async def load_weights(self, weights, model_step) -> None:
        self.model_step = model_step
        if self.is_away:
            raise EngineLost("away")

    async def health(self) -> EngineHealth:
        return EngineHealth(ok=True, num_running=len(self._running), num_waiting=0, model_step=self.model_step)

    async def close(self) -> None:
        await self.pause()


class Quick(AgentLoop):
    """As little of an agent as can be, without an engine: every rollout has its tokens and score at once."""

    def set_up(self) -> None:
        self._renderer = PromptRenderer(self.tokenizer)

    async def generate_group(self, states, *, enable_partial_rollout=False):
        await asyncio.sleep(random.lognormvariate(math.log(QUICK_S), QUICK_SPREAD))
        for number, state in enumerate(states):
            self._renderer.render(state)
            count = min(LONGEST, max(1, round(random.lognormvariate(math.log(P50), SIGMA))))
            state.append(IDS[:count], logprobs=LOGPROBS[:count], model_step=0)
            state.status, state.finish_reason, state.response = Status.COMPLETED, "stop", "x" * 20
            state.reward = {"score": float(number & 1)}
        return states

    async def generate_sample(self, state):
        raise NotImplementedError


class Coin(Judge):
    """A score that differs within a group, at once."""

    async def score(self, state) -> float:
        return float(len(state.response_ids) & 1)


def cpu_by_thread() -> Counter:
    """CPU seconds of this process's threads so far, by their names."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    spent: Counter = Counter()
    for path in Path("/proc/self/task").iterdir():
        name, _, rest = (path / "stat").read_text().partition("(")[2].rpartition(")")
        user, system = rest.split()[11:13]
        spent[names.get(int(path.name), name)] += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return spent


def memory_mb() -> float:
    """Resident, now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise OSError("/proc/self/status names no VmRSS")


async def drive(num_engines: int, num_groups: int, folder: Path, *, hours: int = 0) -> dict:
    """Run a separate production and take its batches; CPU seconds by group once it is in its stride."""
    in_flight = num_engines * SLOTS // MEMBERS
    batch = max(1, in_flight // 4)
    clock = asyncio.get_running_loop().time
    engines = [CheapEngine(number) for number in range(num_engines)]
    controller, activities = RolloutController(engines), Activities()
    buffer = AsyncReplayBufferConfig().build()
    ledger = Ledger(folder / "ledger.jsonl", clock=clock)
    params = SampleParams(max_tokens=LONGEST)
    loop = SingleTurnAgentLoop(
        controller, Coin(timeout_s=None), PromptTokenizer(64), sample_params=params, activities=activities
    )
    strategy = AsyncProduceStrategyConfig(
        over_sample_threshold=in_flight / batch, max_staleness=8, enable_partial_rollout=True, max_retries=3
    ).build(rollout_controller=controller)
    prompts = [Prompt(message=[{"role": "user", "content": "1+1="}])] * 100_000
    sampler = Sampler(prompts, buffer, task_name="t", prompt_repeat_k=MEMBERS, shuffle=False, sample_params=params)
    manager = AgentLoopManager(
        task_runners=[TaskRunner(task_name="t", agent_loop=loop, produce_strategy=strategy, sampler=sampler)],
        replay_buffer=buffer,
        rollout_controller=controller,
        ledger=ledger,
        activities=activities,
    )
    status = RunStatus(manager, activities, controller, batch_size=batch)
    await controller.update_weights([], 0)
    producer = asyncio.create_task(manager.produce_loop(batch))
    step = taken = measured = 0
    begin_s, marks, next_mark_s = 0.0, [], 0.0
    profile = cProfile.Profile() if PROFILE else None
    while not (measured >= num_groups if not hours else clock() >= hours * 3600):
        step += 1
        result = await manager.get_batch(batch, step)
        await buffer.commit(step)
        await controller.update_weights([], step)
        await manager.continue_produce(step)
        await status.count_buffer()
        status.step_values(step, result.rollout_states)
        taken += batch
        if not begin_s and taken >= 2 * in_flight:
            gc.collect()
            gc.freeze()
            begin_s, taken_before = time.process_time(), taken
            if profile:
                profile.enable()
        measured = taken - taken_before if begin_s else 0
        if hours and clock() >= next_mark_s:
            gc.collect()
            marks.append(round(memory_mb(), 1))
            print(f"hour {len(marks) - 1}: {measured} groups, {marks[-1]} MB", flush=True)
            next_mark_s += 3600
    cpu_s = time.process_time() - begin_s
    if profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    counts, balance = controller.counts(), ledger.balance(await manager.count_live())
    assert balance.ok, balance
    await manager.shutdown()
    await asyncio.gather(producer, return_exceptions=True)
    await controller.close()
    return {
        "engines": num_engines,
        "groups_per_s": measured / cpu_s,
        "us_per_group": cpu_s / measured * 1e6,
        "groups": measured,
        "restarts": counts["engine_restarts"],
        "retries": counts["retries"],
        "memory_mb": marks or [round(memory_mb(), 1)],
        "virtual_s": round(clock()),
    }


def cheap_engine(surroundings, token_s: float) -> list[CheapEngine]:
    """The engine of one process on Ray."""
    return [CheapEngine(0, token_s)]


async def drive_ray(options, folder: Path) -> dict:
    """`drive` with agents and engines on Ray; CPU seconds and memory of this process, minute by minute."""
    import ray
    import torch

    from forebay.cluster.library import Published
    from forebay.config import parse_config
    from forebay.engines.weights.between_processes import put
    from forebay.models import resolve_model
    from forebay.runs.config import RunConfig
    from forebay.runs.placement import make_cluster
    from forebay.runs.rollouts import build_rollouts, load_data
    from forebay.runs.store import begin_anew, open_storage

    num_engines, num_workers = int(options.engines), options.workers
    in_flight = GROUPS_A_WORKER * num_workers
    batch = max(1, in_flight // 4)
    task = {
        "name": "t",
        "data": {"source": "sorting", "arguments": {"length": 3, "letters": 8}, "size": 300},
        "judge": {"name": "driver:Coin", "arguments": {"timeout_s": None}},
        "agent": {"name": "driver:Quick" if options.quick else "single_turn"},
        "sample": {"max_tokens": LONGEST},
    }
    config = parse_config(
        RunConfig,
        {
            "name": "driver",
            "output": str(folder),
            "steps": 1_000_000,
            "batch_size": batch,
            "rollouts_per_prompt": MEMBERS,
            "model": {"source": "tiny", "tiny": {"hidden_size": 16, "num_layers": 1, "num_heads": 1}},
            "engine": {"name": "driver:cheap_engine", "arguments": {"token_s": options.token_s}},
            "tasks": [task],
            "produce": {
                "mode": "separate",
                "over_sample_threshold": in_flight / batch,
                "max_staleness": 8,
                "enable_partial_rollout": True,
                "max_retries": 3,
            },
            "replay": {"store": options.store},
            "cluster": {"name": "ray", "arguments": {"num_workers": num_workers, "num_engines": num_engines}},
        },
    )
    model = resolve_model(config.model, seed=0)
    cluster = make_cluster(config)
    await cluster.open(trains=False)
    begun_s = time.monotonic()
    await asyncio.to_thread(cluster.start, model)
    started_s = time.monotonic() - begun_s
    storage = open_storage(config, config.folder, is_new=True)
    begin_anew(storage, config.folder)
    # Prompts are for training, weights come from here: an evaluation's cluster has no trainer.
    parts = build_rollouts(config, model, load_data(config), cluster=cluster, storage=storage)
    manager, controller = parts.manager, parts.controller
    ledger = manager.ledger = Ledger(config.folder / "ledger.jsonl")
    status = RunStatus(manager, parts.activities, controller, batch_size=batch)

    async def sync(step: int) -> None:
        layout, memory = put([("w", torch.full((4096,), float(step)))], [])
        await controller.update_weights(Published(ray.put((layout, memory.data.numpy())), step), step)

    await sync(0)
    producer = asyncio.create_task(manager.produce_loop(batch))
    step = taken = 0
    marks: list[tuple[int, float, float, float]] = []
    """Groups taken, seconds, CPU seconds and memory in MB, each minute."""
    profile = cProfile.Profile() if PROFILE else None
    while len(marks) <= options.minutes:
        step += 1
        result = await manager.get_batch(batch, step)
        await manager.replay_buffer.commit(step)
        await sync(step)
        await manager.continue_produce(step)
        await status.count_buffer()
        status.step_values(step, result.rollout_states)
        taken += batch
        now_s = time.monotonic()
        if (not marks and taken >= 2 * in_flight) or (marks and now_s >= marks[-1][1] + 60):
            gc.collect()
            if not marks:
                gc.freeze()
                spent_before = cpu_by_thread()
                if profile:
                    profile.enable()
            marks.append((taken, now_s, time.process_time(), memory_mb()))
            print(step, *(round(value, 1) for value in marks[-1]), *os.getloadavg(), flush=True)
    if profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(60)
    spent = cpu_by_thread() - spent_before
    # A group that is just being stored may be counted before it is in the books.
    await manager.pause_produce()
    counts, balance = cluster.counts(), ledger.balance(await manager.count_live())
    assert balance.ok, balance
    await manager.shutdown()
    await asyncio.gather(producer, return_exceptions=True)
    await cluster.close()
    (groups, begin_s, begin_cpu_s, _), (all_groups, end_s, end_cpu_s, _) = marks[0], marks[-1]
    groups, cpu_s = all_groups - groups, end_cpu_s - begin_cpu_s
    return {
        "workers": num_workers,
        "engines": num_engines,
        "started_s": started_s,
        "groups": groups,
        "steps": step,
        "groups_per_s": groups / (end_s - begin_s),
        "groups_per_cpu_s": groups / cpu_s,
        "us_per_group": cpu_s / groups * 1e6,
        "cpu_share": cpu_s / (end_s - begin_s),
        "ms_by_thread": {name: round(cpu / groups * 1e3, 2) for name, cpu in spent.most_common(6)},
        "memory_mb": [round(mark[3], 1) for mark in marks],
        **counts,
    }


def on_ray(options) -> None:
    """Measure and print `drive_ray`."""
    global PROFILE
    PROFILE = options.profile
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    from warm_python import warm_workers

    gc.set_threshold(*GC_THRESHOLDS)
    with warm_workers(), tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(drive_ray(options, Path(folder)))
    print({name: round(value, 2) if isinstance(value, float) else value for name, value in report.items()})


async def agents_alone(num_groups: int) -> float:
    """CPU microseconds by group of engines and agent loop without what forebay puts around them."""
    engine = CheapEngine(0)
    await engine.bring_up()
    loop = SingleTurnAgentLoop(
        RolloutController(engine),
        Coin(timeout_s=None),
        PromptTokenizer(64),
        sample_params=SampleParams(max_tokens=LONGEST),
    )
    buffer = AsyncReplayBufferConfig().build()
    prompts = [Prompt(message=[{"role": "user", "content": "1+1="}])] * 100_000
    sampler = Sampler(prompts, buffer, task_name="t", prompt_repeat_k=MEMBERS, shuffle=False)
    begin_s = time.process_time()
    for _ in range(num_groups):
        await loop.generate_group(await sampler.sample("t"))
    return (time.process_time() - begin_s) / num_groups * 1e6


PROFILE = False


def one_size(options) -> None:
    """Measure one size in this process, and print it as JSON."""
    global PROFILE
    PROFILE = options.profile
    # As a run does (`forebay.runs.launch`).
    gc.set_threshold(*GC_THRESHOLDS)
    # Engines that are lost and back.
    logging.disable(logging.WARNING)
    hours = 24 if options.day else 0
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        report = runner.run(drive(options.one, options.groups, Path(folder), hours=hours))
        report["agents_us"] = runner.run(agents_alone(400))
    print(json.dumps(report))


def measured(options, size: int) -> dict:
    """The report of one size, from a process of its own."""
    command = [sys.executable, __file__, "--one", str(size), "--groups", str(options.groups)]
    if options.day:
        command.append("--day")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout:
            if line.startswith("{"):
                report = json.loads(line)
            else:
                print(line, end="", flush=True)
    if child.returncode:
        raise SystemExit(child.returncode)
    print({name: round(value, 1) if isinstance(value, float) else value for name, value in report.items()})
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", help="default: 10,100,1000; with --ray 4")
    parser.add_argument("--groups", type=int, default=6000, help="finished groups that are measured")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--day", action="store_true", help="a virtual day of the first size: memory by hour")
    parser.add_argument("--one", type=int, help="this size, in this process")
    parser.add_argument("--profile", action="store_true", help="with --one or --ray: where the time goes")
    parser.add_argument("--ray", action="store_true", help="agents and engines on a Ray cluster, in real time")
    parser.add_argument("--quick", action="store_true", help="with --ray: workers that need no engines")
    parser.add_argument("--token-s", type=float, default=TOKEN_S, help="with --ray: seconds of an engine's token")
    parser.add_argument("--workers", type=int, default=50)
    parser.add_argument("--store", choices=("sqlite", "memory"), default="sqlite", help="with --ray")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/production.md")
    options = parser.parse_args()
    if options.one:
        return one_size(options)
    options.engines = options.engines or ("4" if options.ray else "10,100,1000")
    if options.ray:
        return on_ray(options)
    sizes = [int(size) for size in options.engines.split(",")]
    if options.day:
        return report_day(options, measured(options, sizes[0]))
    # In turns, so that whatever else the machine does falls on all of them.
    rounds = [[measured(options, size) for size in sizes] for _ in range(options.repeats)]
    report_sizes(options, rounds)


def report_sizes(options, rounds) -> None:
    """Print, and write, what each number of engines costs; exit with 1 if a target is missed."""
    columns = list(zip(*rounds, strict=True))
    rates = [statistics.median(report["groups_per_s"] for report in column) for column in columns]
    costs = [statistics.median(report["us_per_group"] for report in column) for column in columns]
    alone = [statistics.median(report["agents_us"] for report in column) for column in columns]
    # Of the same round: the machine's load changes.
    ratios = [
        statistics.median(
            report["us_per_group"] / first[0]["us_per_group"] for report, first in zip(column, rounds, strict=True)
        )
        for column in columns
    ]
    cells = [" | ".join([""] * 2 + [str(report[0]["engines"]) for report in columns])]
    lines = [
        f"CPU of the whole process, engines included, median of {options.repeats} rounds of {options.groups} "
        f"groups of {MEMBERS}; {SLOTS} requests",
        "an engine in flight; one request in a thousand fails, and each engine is lost once an hour. Agents: "
        "engines and agent loop alone.",
        "",
        "Before requests found their engine without asking all, and with Python's own thresholds of the "
        "collector: 481,",
        "504 and 288 groups/s, 1.67 x, with nothing else on the machine.",
        "",
        f"| engines | target{cells[0]} |",
        "|---|---|" + "---|" * len(columns),
        "| groups/s | >= " + f"{MIN_GROUPS_S:g} | " + " | ".join(f"{rate:.0f}" for rate in rates) + " |",
        "| us a group | | " + " | ".join(f"{cost:.0f}" for cost in costs) + " |",
        "| agents, us a group | | " + " | ".join(f"{cost:.0f}" for cost in alone) + " |",
        f"| over {columns[0][0]['engines']} engines | <= {MAX_RATIO:g} x | "
        + " | ".join(f"{ratio:.2f} x" for ratio in ratios)
        + " |",
    ]
    print("\n".join(lines))
    if options.write:
        command = f"python benchmarks/driver.py --groups {options.groups} --repeats {options.repeats} --write"
        write_section("The driver of many engines", command, lines)
    raise SystemExit(0 if min(rates) >= MIN_GROUPS_S and max(ratios) <= MAX_RATIO else 1)


def report_day(options, report) -> None:
    """Print, and write, the memory of a virtual day."""
    marks = report["memory_mb"]
    # Pools and caches fill in the first hours.
    by_groups = (marks[-1] - marks[12]) * 1e6 / max(1, report["groups"] / 2)
    lines = [
        f"{report['engines']} engines, {report['groups']} groups in 24 virtual hours, "
        f"{report['restarts']:.0f} engines lost and back. Resident memory in MB, every third hour:",
        "",
        ", ".join(f"{mark:.0f}" for mark in marks[::3]) + f": {by_groups:.0f} bytes a group in the second half.",
    ]
    print("\n".join(lines))
    if options.write:
        command = f"python benchmarks/driver.py --engines {report['engines']} --day --write"
        write_section("The driver's memory over a day", command, lines)


if __name__ == "__main__":
    main()
