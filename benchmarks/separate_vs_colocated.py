"""The demo trained colocated and separate, at equal samples: both curves in one picture.

    forebay train recipes/demo_tiny.toml seed=0
    forebay train recipes/demo_separate.toml seed=0
    python benchmarks/separate_vs_colocated.py runs/demo_tiny runs/demo_separate docs/pictures/separate.png

It trains nothing: it reads the two runs' metrics.jsonl.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from forebay.metrics import read_jsonl

WINDOW = 20
"""Train steps of one point of the reward curve."""


def main(colocated: Path, separate: Path, picture: Path) -> None:
    """Draw the picture and print the numbers under it."""
    figure, (rewards, lag) = plt.subplots(1, 2, figsize=(10, 3.6))
    for name, folder in (("colocated", colocated), ("separate", separate)):
        rows = read_jsonl(folder / "metrics.jsonl")
        steps = [row for row in rows if "train/loss" in row]
        samples, reward = _cumulative(steps), [row["reward"] for row in steps]
        smooth = [sum(reward[max(0, i - WINDOW + 1) : i + 1]) / min(i + 1, WINDOW) for i in range(len(reward))]
        line = rewards.plot(samples, smooth, label=f"{name}, reward")[0]
        evals = [row for row in rows if row.get("eval/accuracy") is not None]
        per_step = samples[-1] / len(samples)
        rewards.plot(
            [row["train_step"] * per_step for row in evals],
            [row["eval/accuracy"] for row in evals],
            "o--",
            color=line.get_color(),
            label=f"{name}, held-out accuracy",
        )
        lag.plot(samples, [row["train/staleness_mean"] for row in steps], label=name)
        first, last = evals[0]["eval/accuracy"], evals[-1]["eval/accuracy"]
        tail = reward[-WINDOW:]
        staleness = [row["train/staleness_mean"] for row in steps]
        print(
            f"{name}: held-out accuracy {first:.1%} -> {last:.1%}, reward of the last {WINDOW} steps "
            f"{sum(tail) / len(tail):.3f}, mean token staleness {sum(staleness) / len(staleness):.2f}, "
            f"largest {max(row['staleness'] for row in steps):.0f}"
        )
    rewards.set(xlabel="rollouts trained", ylim=(0, 1))
    rewards.legend(fontsize=8)
    lag.set(xlabel="rollouts trained", ylabel="mean staleness of the trained tokens")
    lag.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def _cumulative(steps: list[dict[str, float | None]]) -> list[float]:
    total, sums = 0.0, []
    for row in steps:
        total += row["samples"] or 0.0
        sums.append(total)
    return sums


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
