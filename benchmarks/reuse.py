"""Accuracy at equal generated tokens, with groups that are trained on once, twice and four times.

    python benchmarks/reuse.py run TIMES SEED [STEPS [RECIPE [KEY=VALUE ...]]] >> reuse.jsonl    # one run
    python benchmarks/reuse.py report reuse.jsonl                           # the table for results/

RECIPE is a run file, the demo's unless told otherwise, and STEPS are those without reuse.

A group that is used K times saves the generation of the others: past groups fill (K - 1) / K of a batch. A
run with K makes K times as many train steps, so that all runs generate about as many tokens, and so far as
they do not, accuracies are read off at equal numbers of tokens, on the line between two evaluations.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import numpy as np

from forebay.metrics import read_jsonl

RECIPE = Path(__file__).parents[1] / "recipes" / "demo_tiny.toml"
POINTS = 4
"""Numbers of generated tokens at which runs are compared."""


def run(times: int, seed: int, steps: int = 60, recipe: Path = RECIPE, keys: Sequence[str] = ()) -> None:
    """One run; its evaluations, with what was generated until then. `keys` are the run file's."""
    share = (times - 1) / times
    changes = {
        "seed": seed,
        "steps": steps * times,
        "evaluate.every": max(1, round(steps * times / 6)),
        "checkpoint_every": 0,
        "history_gb": 0,
        "replay.reuse.times": times,
        "replay.reuse.share": share,
        "replay.reuse.max_staleness": 3 * times,
    }
    with tempfile.TemporaryDirectory() as folder:
        program = "import forebay.cli; forebay.cli.main()"
        command = [sys.executable, "-c", program, "train", str(recipe), f"output={folder}"]
        command += [*(f"{name}={value}" for name, value in changes.items()), *keys]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (metrics,) = Path(folder).glob("*/metrics.jsonl")
        tokens, curve, uses = 0.0, [], defaultdict(float)
        for row in read_jsonl(metrics):
            tokens += row.get("produce/tokens", 0.0)
            for name in ("past_groups", "replaced_groups"):
                uses[name] += row.get(f"produce/{name}", 0.0)
            if "eval/accuracy" in row:
                curve.append((row["train_step"], tokens, row["eval/accuracy"]))
    used = getrusage(RUSAGE_CHILDREN)
    line = {"recipe": recipe.stem, "times": times, "seed": seed, "steps": steps * times, "curve": curve}
    print(json.dumps(line | uses | {"cpu_s": round(used.ru_utime + used.ru_stime, 1)}))


def report(path: Path) -> None:
    """Accuracies at the same numbers of generated tokens, by uses."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    most = min(row["curve"][-1][1] for row in rows)
    points = [most * (i + 1) / POINTS for i in range(POINTS)]
    print("| uses | seed | " + " | ".join(f"{x / 1e3:.0f} k tokens" for x in points) + " | steps | CPU s |")
    print("|---" * (POINTS + 4) + "|")
    by_times = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row["times"], row["seed"])):
        _, tokens, accuracies = zip(*row["curve"], strict=True)
        at = np.interp(points, tokens, accuracies)
        by_times[row["times"]].append(at)
        cells = " | ".join(f"{x:.3f}" for x in at)
        print(f"| {row['times']} | {row['seed']} | {cells} | {row['steps']} | {row['cpu_s']:.0f} |")
    for times, several in by_times.items():
        means = [f"{statistics.mean(column):.3f}" for column in zip(*several, strict=True)]
        print(f"| {times} | mean | " + " | ".join(means) + " | | |")


if __name__ == "__main__":
    if sys.argv[1] == "run":
        recipe = Path(sys.argv[5]) if sys.argv[5:] else RECIPE
        run(*map(int, sys.argv[2:5]), recipe=recipe, keys=sys.argv[6:])
    else:
        report(Path(sys.argv[2]))
