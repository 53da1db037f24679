"""The display of a run in environments: that of any run (`forebay.runs.show`), with other numbers.

::

    step lines and summary: FragmentDisplay     learning_curve.png: `CURVES`     episode.png: frame_strip
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from forebay.metrics import STEP_S
from forebay.runs.show.display import RunDisplay
from forebay.runs.show.pictures import Curves

RETURN, STEPS_PER_S, LAG = "return", "env_steps_per_s", "lag"
EVAL_RETURN = "eval/return"
CURVES = Curves(
    main=(RETURN, "return of the last 100 training episodes", "mean return"),
    evaluation=(EVAL_RETURN, "evaluation"),
    others=(
        (LAG, "lag of the weights", "train steps"),
        (STEPS_PER_S, "speed", "environment steps/s"),
        (STEP_S, "time of a step", "seconds"),
    ),
)


class FragmentDisplay(RunDisplay):
    """Shows one run on a console."""

    numbers: ClassVar[Mapping[str, tuple[str, int]]] = {
        "return": (RETURN, 10),
        "eval": (EVAL_RETURN, 9),
        "length": ("episode_steps", 9),
        "steps/s": (STEPS_PER_S, 9),
        "lag": (LAG, 7),
        "kl": ("kl", 8),
        "s/step": (STEP_S, 8),
    }
    curve_title: ClassVar[str] = "mean return of training episodes, smoothed; o: of an evaluation"
    saved: ClassVar[Mapping[str, str]] = {
        "learning_curve.png": "returns, lag, speed and time by step",
        "episode.png": "frames of one episode",
        "metrics.jsonl": "every number of every step",
        "checkpoints": "to go on from: forebay train --resume",
    }


def frame_strip(frames: Mapping[int, np.ndarray[Any, Any]], path: Path) -> None:
    """Write a PNG of the frames side by side, each under its step."""
    # A figure without pyplot: no global state, no window system, any thread.
    from matplotlib.figure import Figure

    height, width = next(iter(frames.values())).shape[:2]
    figure = Figure(figsize=(1.6 * len(frames), 1.6 * height / width + 0.3), layout="constrained")
    panels = np.ravel(figure.subplots(1, len(frames)))
    for axes, (step, frame) in zip(panels, frames.items(), strict=True):
        axes.imshow(frame)
        axes.set_title(f"step {step}", fontsize=7)
        axes.set_axis_off()
    figure.savefig(path, dpi=150)
