"""The separate demo on each store in turn: train steps per second and CPU time of a step.

    python benchmarks/store_cost.py --rounds 4 --steps 60 memory sqlite

Every run is a process of its own. The first `SKIPPED` steps, in which everything is used for the first time,
do not count. ``postgresql`` needs FOREBAY_REPLAY_URL.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SKIPPED = 10
RECIPE = Path(__file__).parents[1] / "recipes" / "demo_separate.toml"


def main() -> None:
    """Run the rounds, or with ``--child`` one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stores", nargs="*", default=["memory", "sqlite"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--child", action="store_true")
    given = parser.parse_args()
    if given.child:
        run_once(given.stores[0], given.steps)
        return
    found: dict[str, list[dict[str, float]]] = {store: [] for store in given.stores}
    for number in range(given.rounds):
        # In turn, each first as often as the others: what else the machine does changes slowly.
        for store in given.stores[:: 1 if number % 2 == 0 else -1]:
            command = [sys.executable, __file__, "--child", "--steps", str(given.steps), store]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[store].append(json.loads(said.splitlines()[-1]))
            print(number, store, found[store][-1], flush=True)
    first = found[given.stores[0]]
    for store, rounds in found.items():
        ratios = {
            name: statistics.median(b[name] / a[name] for a, b in zip(first, rounds, strict=True))
            for name in ("steps_per_s", "cpu_ms")
        }
        medians = {name: statistics.median(one[name] for one in rounds) for name in ratios}
        print(
            f"{store}: {medians['steps_per_s']:.2f} steps/s ({ratios['steps_per_s']:.3f} of "
            f"{given.stores[0]}), {medians['cpu_ms']:.1f} CPU ms a step ({ratios['cpu_ms']:.3f})"
        )


def run_once(store: str, num_steps: int) -> None:
    """Train, and print the numbers as a line of JSON."""
    from forebay.config import load_config
    from forebay.runs import steps
    from forebay.runs.config import RunConfig
    from forebay.runs.launch import launch

    marks: dict[int, tuple[float, float]] = {}
    report = steps.report

    def reported(run: object, train_step: int, *arguments: object) -> None:
        report(run, train_step, *arguments)  # type: ignore[arg-type]
        marks[train_step] = time.perf_counter(), time.process_time()

    steps.report = reported  # type: ignore[assignment]
    with tempfile.TemporaryDirectory(prefix="forebay-store-") as folder:
        changes = [
            f"output={folder}",
            f"steps={num_steps}",
            f"replay.store={store}",
            f"checkpoint_every={num_steps // 2}",
            "evaluate.every=0",
        ]
        asyncio.run(launch(load_config(RunConfig, RECIPE, changes)))
    (start_s, start_cpu_s), (end_s, end_cpu_s) = marks[SKIPPED], marks[num_steps]
    count = num_steps - SKIPPED
    numbers = {"steps_per_s": count / (end_s - start_s), "cpu_ms": 1000 * (end_cpu_s - start_cpu_s) / count}
    print("\n" + json.dumps(numbers))


if __name__ == "__main__":
    main()
