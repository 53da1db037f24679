"""A step of the separate demo over the slower of generation and training in the colocated one.

    OMP_NUM_THREADS=1 python benchmarks/separate_step.py --rounds 3 --steps 60 [separate's KEY=VALUE ...]

If generation and training went on beside each other and cost each other nothing, the ratio would be 1. Both
runs take turns, each is a process of its own, and the first `SKIPPED` steps do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

FOREBAY = str(Path(sys.executable).with_name("forebay"))
SKIPPED = 10
AIM = 1.15
RECIPES = Path(__file__).parents[1] / "recipes"
QUIET = ("checkpoint_every=0", "evaluate.every=0")
KINDS = ("demo_tiny", "demo_separate")


def main() -> None:
    """Run the rounds and print their numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("changes", nargs="*", help="of the separate run, such as replay.store=memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    ratios = []
    for number in range(given.rounds):
        found = {}
        # In turn, each first as often as the other: what else the machine does changes slowly.
        for kind in KINDS[:: 1 if number % 2 == 0 else -1]:
            changes = given.changes if kind == "demo_separate" else []
            found[kind] = medians(kind, [f"steps={given.steps}", *QUIET, *changes])
            said = ", ".join(f"{name} {value:.3f}" for name, value in found[kind].items())
            print(f"round {number}, {kind}: {said}", flush=True)
        colocated, separate = (found[kind] for kind in KINDS)
        bound_s = max(colocated["time/generate_s"], colocated["time/train_s"])
        ratios.append(separate["step_s"] / bound_s)
        said = f"{separate['step_s']:.3f} s over {bound_s:.3f} s"
        print(f"round {number}: {said} = {ratios[-1]:.3f}", flush=True)
    print(f"median {statistics.median(ratios):.3f} (aim: at most {AIM}), load now {os.getloadavg()[0]:.1f}")


def medians(kind: str, changes: list[str]) -> dict[str, float]:
    """Median seconds of each part of a step."""
    with tempfile.TemporaryDirectory(prefix="forebay-step-") as folder:
        command = [FOREBAY, "train", str(RECIPES / f"{kind}.toml"), *changes]
        subprocess.run([*command, f"output={folder}"], check=True, capture_output=True)
        lines = (Path(folder) / kind / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    # An evaluation has a row of its own.
    steps = [row for row in map(json.loads, lines) if row.get("step_s")][SKIPPED:]
    names = [name for name in steps[0] if name == "step_s" or name.startswith("time/")]
    return {name: statistics.median(row.get(name) or 0.0 for row in steps) for name in names}


if __name__ == "__main__":
    main()
