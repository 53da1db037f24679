"""Pictures of a run in environments: its learning curve, and frames of one episode.

::

    metrics.jsonl rows --learning_curve--> PNG          frames of an episode --frame_strip--> PNG
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forebay.environments.display import EVAL_RETURN, LAG, RETURN, STEPS_PER_S
from forebay.metrics import STEP_S
from forebay.runs.show.pictures import BLUE, ORANGE, Rows, label_axes, read_curve


def learning_curve(rows: Rows, path: Path, title: str) -> None:
    """Write a PNG: returns of training and evaluation above; lag, speed and seconds of a step below."""
    # A figure without pyplot: no global state, no window system, any thread.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    grid = figure.add_gridspec(2, 3, height_ratios=[1.8, 1])
    axes = figure.add_subplot(grid[0, :])
    axes.plot(*read_curve(rows, RETURN), color=BLUE, linewidth=2, label="last 100 training episodes")
    tried = read_curve(rows, EVAL_RETURN)
    axes.plot(*tried, "D--", color=ORANGE, markersize=6, linewidth=1, label="evaluation")
    if len(tried.values):
        at = (tried.steps[-1], tried.values[-1])
        style: dict[str, Any] = {"ha": "right", "fontsize": 9, "color": ORANGE}
        axes.annotate(f"{at[1]:.4g}", at, (0, 9), textcoords="offset points", **style)
    axes.legend(loc="best", frameon=False, fontsize=9)
    label_axes(axes, title, "mean return", from_zero=False)
    panels = [(LAG, "lag of the weights", "train steps"), (STEPS_PER_S, "speed", "environment steps/s")]
    for column, (name, heading, unit) in enumerate([*panels, (STEP_S, "time of a step", "seconds")]):
        axes = figure.add_subplot(grid[1, column])
        axes.plot(*read_curve(rows, name), color=BLUE, linewidth=1)
        label_axes(axes, heading, unit, from_zero=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def frame_strip(frames: Mapping[int, np.ndarray[Any, Any]], path: Path) -> None:
    """Write a PNG of the frames side by side, each under its step."""
    from matplotlib.figure import Figure

    height, width = next(iter(frames.values())).shape[:2]
    gap = width // 20
    padding = [(0, 0), (0, gap), (0, 0)]
    strip = np.concatenate([np.pad(frame, padding, constant_values=255) for frame in frames.values()], axis=1)
    figure = Figure(figsize=(1.6 * len(frames), 1.6 * height / width + 0.3), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(strip)
    axes.set_axis_off()
    for column, step in enumerate(frames):
        at = (column * (width + gap) + width / 2, 0)
        style: dict[str, Any] = {"ha": "center", "fontsize": 7}
        axes.annotate(f"step {step}", at, (0, 3), textcoords="offset points", **style)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
