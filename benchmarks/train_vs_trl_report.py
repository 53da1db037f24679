"""The page and the picture of ``train_vs_trl.py``, from its JSON file.

::

    train_vs_trl.json --> speed (samples per second, share of generation), agreement of the reward curves
                      --> train_vs_trl.md, train_vs_trl.png, and the page's tables on standard output
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from side_by_side import SIDES

from forebay.runs.show.pictures import Floats, smooth

NAMES = {"forebay": "Forebay", "trl": "TRL"}
# Okabe & Ito 2008, "Color universal design".
COLORS = {"forebay": "#0072B2", "trl": "#D55E00"}

Run = dict[str, Any]

NOTES = """\
* Equal on both sides: starting weights, tokenizer, the prompts of every step (compared as token ids in every
  run), samples per prompt, temperature 1 without top-k or top-p, response budget, reward (share of right
  places), advantage (centered, over the group's standard deviation), clip range, the mean over the batch's
  tokens (TRL: `loss_type="dapo"`), no KL term, one AdamW step (fused) per batch with a constant rate, fp32,
  scaled-dot-product attention, no activation checkpointing, one torch thread.
* Not equal: the random numbers, so two curves differ by sampling noise also where the policies are the same.
  TRL adds 1e-4 to the standard deviation, Forebay 1e-6.
* TRL generates with `model.generate` and its KV cache: every sample of a batch goes on until the longest
  ends, and in training prompt and response are padded to the batch's longest. Forebay's engine drops a row
  when it ends and computes a group's prompt once; training uses `layout = "shared_prompt"`: once there too.
* TRL's other generators: vLLM needs its own build and is not part of this comparison; the continuous batching
  of transformers (`use_transformers_continuous_batching`) was several times slower on this CPU (`--sweep
  --continuous`). The micro-batch sizes were chosen for each side with `--sweep`.
* Within the timed steps Forebay does what a run does: replay buffer, ledger, metrics and sampled rollouts on
  disk. TRL keeps its metrics in memory and writes nothing. Neither evaluates nor saves checkpoints.
* CPU seconds are user and system time of the whole process with its children, from the end of the last
  untimed step. Other work on the machine inflates them (caches, clock), so the sides take turns.
"""


class Rate(NamedTuple):
    """Samples per second of one run."""

    cpu: float
    wall: float
    generate_s: float
    """CPU seconds per step in generation, judging included; the median."""
    train_s: float
    """CPU seconds per step in everything else; the median."""


class Agreement(NamedTuple):
    """How the reward curves of the two sides compare."""

    late: dict[str, tuple[float, float]]
    """By side: mean reward over the last quarter, and its standard error over seeds."""
    difference: tuple[float, float]
    """Forebay minus TRL over the last quarter, seed by seed: mean and standard error."""
    largest: float
    """Largest difference of the smoothed mean curves."""
    largest_at: int
    largest_error: float
    """Standard error over seeds of the difference there."""


def write(results: Path, picture: Path) -> None:
    """The page beside the JSON file `results`, and the picture; the page is printed too."""
    found = json.loads(results.read_text(encoding="utf-8"))
    draw(found, picture)
    page = render(found, picture)
    results.with_suffix(".md").write_text(page, encoding="utf-8")
    print(page)


# Numbers


def rate(run: Run, samples_per_step: int, untimed: int) -> Rate:
    cpu, wall, generate = (np.array(run[k][untimed:]) for k in ("cpu_s", "wall_s", "generate_cpu_s"))
    samples = samples_per_step * len(cpu)
    return Rate(
        samples / float(cpu.sum()),
        samples / float(wall.sum()),
        float(np.median(generate)),
        float(np.median(cpu - generate)),
    )


def rates(found: Run, size: str, prompts: str) -> dict[str, list[Rate]]:
    """By side, one per seed."""
    samples = found["prompts_per_step"] * found["group_size"]
    runs = found["sizes"][size][prompts]
    return {side: [rate(run, samples, found["untimed_steps"]) for run in runs[side]] for side in SIDES}


def curves(found: Run, size: str, side: str) -> Floats:
    """Smoothed rewards, seeds x steps."""
    rows = np.array([run["reward"] for run in found["sizes"][size]["mixed"][side]])
    return np.array([smooth(row, window(rows.shape[1])) for row in rows])


def window(num_steps: int) -> int:
    """A tenth of the run, odd, so that the mean is centered on its step."""
    return 2 * int(num_steps / 20) + 1


def agreement(found: Run, size: str) -> Agreement:
    runs = found["sizes"][size]["mixed"]
    late = {side: np.array([last_quarter(run["reward"]) for run in runs[side]]) for side in SIDES}
    smoothed = {side: curves(found, size, side) for side in SIDES}
    gap = smoothed["forebay"].mean(0) - smoothed["trl"].mean(0)
    at = int(np.abs(gap).argmax())
    return Agreement(
        {side: mean_and_error(late[side]) for side in SIDES},
        mean_and_error(late["forebay"] - late["trl"]),
        float(abs(gap[at])),
        at + 1,
        mean_and_error(smoothed["forebay"][:, at] - smoothed["trl"][:, at])[1],
    )


def last_quarter(rewards: list[float]) -> float:
    return statistics.mean(rewards[-max(1, len(rewards) // 4) :])


def mean_and_error(values: Floats) -> tuple[float, float]:
    """Mean and standard error; the error of one value is NaN."""
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return float(values.mean()), float(error)


# The page


def render(found: Run, picture: Path) -> str:
    sizes = list(found["sizes"])
    letters = found["letters"]
    lengths = {
        "mixed": f"strings of {letters['mixed'][0]} to {letters['mixed'][1]} letters",
        "equal": f"strings of {letters['equal'][0]} letters, all alike: no padding, nothing to schedule",
    }
    parts = [
        "# Training side by side with TRL's GRPOTrainer",
        header(found),
        f"## Speed: {lengths['mixed']}",
        table(SPEED_HEAD, [row for size in sizes for row in speed_rows(found, size, "mixed")]),
        f"## Speed: {lengths['equal']}",
        table(SPEED_HEAD, [row for size in sizes for row in speed_rows(found, size, "equal")]),
        "## Where the CPU time of a step goes",
        "Median over steps and seeds, in seconds; generation includes judging.",
        table(PHASE_HEAD, [phase_row(found, size, p, s) for size in sizes for p in lengths for s in SIDES]),
        "## Do the reward curves agree?",
        "Rewards are shares of right places, on strings of mixed length; +- is the standard error over "
        "seeds; curves are averaged over a tenth of the run. "
        f"Picture: `{'/'.join(picture.parts[-3:])}` (mean over seeds; the band is lowest to highest).",
        table(CURVE_HEAD, [curve_row(found, size) for size in sizes]),
        "## Do both compute the same update?",
        "TRL trains on the very rollouts that Forebay made (`rollout_func`); rewards, gradient norms and the "
        "change of the weights are compared.",
        table(REPLAY_HEAD, [replay_row(found, size) for size in sizes]),
        "## Notes",
        NOTES,
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def header(found: Run) -> str:
    machine, batch = found["machine"], found["prompts_per_step"]
    software = {
        NAMES[side]: ", ".join(f"{name} {v}" for name, v in found["versions"][side].items() if v != "-")
        for side in SIDES
    }
    sizes = "; ".join(
        f"{name}: {size['parameters'] / 1e6:.2f} M parameters ({size['num_layers']} layers of "
        f"{size['hidden_size']}), {size['steps']} steps, lr {size['lr']:g}, micro-batches of "
        f"{size['micro_batch']['forebay']} tokens / {size['micro_batch']['trl']} sequences"
        for name, size in found["sizes"].items()
    )
    lines = [
        f"    {found['command']}",
        "",
        f"* Machine: {machine['cpu']}, {machine['cores']} cores; load average {machine['load_average']:.1f} "
        f"before and {machine['load_average_after']:.1f} after the runs; each run uses one thread.",
        *(f"* {name}: {packages}" for name, packages in software.items()),
        f"* Task: sort letters; {batch} prompts x {found['group_size']} samples per step; the first "
        f"{found['untimed_steps']} steps of a run are not timed.",
        f"* Sizes: {sizes}",
    ]
    return "\n".join(lines)


SPEED_HEAD = "size | seed | Forebay, samples / CPU s | TRL | ratio | Forebay, samples / wall s | TRL | ratio"
PHASE_HEAD = "size | prompts | side | generation | training and the rest | together"
CURVE_HEAD = (
    "size | Forebay, last quarter | TRL | difference, seed by seed | largest difference of the curves | at step"
)
REPLAY_HEAD = (
    "size | steps | largest difference of rewards | of gradient norms, relative | "
    "cosine of the weight changes | ratio of their lengths"
)


def table(head: str, rows: list[list[str]]) -> str:
    columns = head.split(" | ")
    lines = [f"| {head} |", "|" + "---|" * len(columns)]
    assert all(len(row) == len(columns) for row in rows), (head, rows)
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def speed_rows(found: Run, size: str, prompts: str) -> list[list[str]]:
    by_side = rates(found, size, prompts)
    pairs = list(zip(by_side["forebay"], by_side["trl"], strict=True))
    seeds = [run["seed"] for run in found["sizes"][size][prompts]["forebay"]]
    rows = [
        [size, str(seed), *speed_cells(ours.cpu, theirs.cpu), *speed_cells(ours.wall, theirs.wall)]
        for seed, (ours, theirs) in zip(seeds, pairs, strict=True)
    ]
    if len(pairs) > 1:
        cpu = statistics.median(ours.cpu / theirs.cpu for ours, theirs in pairs)
        wall = statistics.median(ours.wall / theirs.wall for ours, theirs in pairs)
        rows.append([f"**{size}**", "**median**", "", "", f"**{cpu:.2f}**", "", "", f"**{wall:.2f}**"])
    return rows


def speed_cells(ours: float, theirs: float) -> list[str]:
    return [f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}"]


def phase_row(found: Run, size: str, prompts: str, side: str) -> list[str]:
    by_seed = rates(found, size, prompts)[side]
    generate = statistics.median(one.generate_s for one in by_seed)
    train = statistics.median(one.train_s for one in by_seed)
    return [size, prompts, NAMES[side], f"{generate:.3f}", f"{train:.3f}", f"{generate + train:.3f}"]


def curve_row(found: Run, size: str) -> list[str]:
    result = agreement(found, size)
    return [
        size,
        *(f"{mean:.3f} +- {error:.3f}" for mean, error in result.late.values()),
        f"{result.difference[0]:+.3f} +- {result.difference[1]:.3f}",
        f"{result.largest:.3f} +- {result.largest_error:.3f}",
        str(result.largest_at),
    ]


def replay_row(found: Run, size: str) -> list[str]:
    check = found["sizes"][size]["replay"]
    return [
        size,
        str(check["steps"]),
        f"{check['reward_difference']:.1e}",
        f"{check['grad_norm_difference']:.1e}",
        f"{check['weight_change_cosine']:.5f}",
        f"{check['weight_change_ratio']:.5f}",
    ]


# The picture


def draw(found: Run, path: Path) -> None:
    """One panel per size: the mean curve of each side and the band of its seeds."""
    from matplotlib.figure import Figure

    sizes = list(found["sizes"])
    figure = Figure(figsize=(5 * len(sizes), 3.8), layout="constrained")
    for axes, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        draw_size(axes, found, size)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def draw_size(axes: Any, found: Run, size: str) -> None:
    by_side = rates(found, size, "mixed")
    for side in SIDES:
        rows = curves(found, size, side)
        steps = np.arange(1, rows.shape[1] + 1)
        speed = statistics.median(one.cpu for one in by_side[side])
        label = f"{NAMES[side]}: {speed:.0f} samples per CPU second"
        axes.fill_between(steps, rows.min(0), rows.max(0), color=COLORS[side], alpha=0.15, linewidth=0)
        axes.plot(steps, rows.mean(0), color=COLORS[side], linewidth=2, label=label)
    parameters = found["sizes"][size]["parameters"]
    axes.set_title(f"{parameters / 1e6:.1f} M parameters, {len(rows)} seeds", fontsize=10, loc="left")
    axes.set_xlabel("train step", fontsize=9)
    axes.set_ylabel("mean reward", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)
    axes.legend(loc="best", frameon=False, fontsize=8)
