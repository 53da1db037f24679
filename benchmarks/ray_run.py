"""The same separate run in one process and on a local Ray cluster: how much work a second gets done.

::

    round: [one process] [cluster = "ray"], each in a fresh process
           timed: from the first train step's wait to the last train step's report; starting is stated apart

    OMP_NUM_THREADS=1 python benchmarks/ray_run.py [RECIPE] [--rounds 3] [--steps 60] [key=value ...]

Both sides do the same train steps on batches of the same size. What they produce beyond that differs with
timing, so tokens are stated too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECIPE = Path(__file__).parent.parent / "recipes" / "demo_separate.toml"
SIDES = {"one process": [], "ray": ["cluster=ray"]}


def run_once(recipe: Path, overrides: list[str]) -> dict[str, float]:
    """One run: seconds and tokens of its train steps, and seconds before and after."""
    from forebay.config import load_config
    from forebay.metrics import read_jsonl
    from forebay.runs import steps
    from forebay.runs.config import RunConfig
    from forebay.runs.launch import launch

    times: list[float] = []
    for name in ("next_batch", "produce"):
        wait = getattr(steps, name)

        async def timed(run, train_step, *, wait=wait):
            if not times:
                times.append(time.perf_counter())
            return await wait(run, train_step)

        setattr(steps, name, timed)
    report = steps.report

    def reported(*arguments):
        report(*arguments)
        times.append(time.perf_counter())

    steps.report = reported
    with tempfile.TemporaryDirectory() as output:
        config = load_config(RunConfig, recipe, [*overrides, f"output={output}"])
        started = time.perf_counter()
        asyncio.run(launch(config))
        ended = time.perf_counter()
        rows = [row for row in read_jsonl(config.folder / "metrics.jsonl") if "train/loss" in row]
    return {
        "start_s": times[0] - started,
        "steps_s": times[-1] - times[0],
        "end_s": ended - times[-1],
        "trained_tokens": sum(row["samples"] * row["response_tokens"] for row in rows),
        "reward": statistics.mean(row["reward"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="?", type=Path, default=RECIPE)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--once", action="store_true", help="one run in this process; prints its numbers")
    options = parser.parse_args()
    overrides = [f"steps={options.steps}", "checkpoint_every=0", "evaluate.every=0", *options.overrides]
    if options.once:
        print("@" + json.dumps(run_once(options.recipe, overrides)))
        return
    results: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    for number in range(options.rounds):
        names = list(SIDES) if number % 2 == 0 else list(SIDES)[::-1]
        for name in names:
            results[name].append(measure(options, SIDES[name]))
            row = results[name][-1]
            print(
                f"round {number + 1}  {name:32s}  steps {row['steps_s']:6.2f} s, "
                f"{row['trained_tokens'] / row['steps_s']:8.0f} trained tokens/s; "
                f"start {row['start_s']:5.1f} s, end {row['end_s']:4.1f} s; "
                f"mean reward {row['reward']:.3f}; load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    rate = {
        name: statistics.median(row["trained_tokens"] / row["steps_s"] for row in rows)
        for name, rows in results.items()
    }
    for name in list(SIDES)[1:]:
        ratio = rate[name] / rate["one process"]
        print(f"{name} / one process: {ratio:.2f} x trained tokens per second (medians)")


def measure(options: argparse.Namespace, side: list[str]) -> dict[str, float]:
    command = [sys.executable, __file__, "--once", "--steps", str(options.steps), str(options.recipe)]
    done = subprocess.run([*command, *options.overrides, *side], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("@")]
    if not lines:
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    return json.loads(lines[0][1:])


if __name__ == "__main__":
    main()
