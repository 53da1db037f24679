"""Everything a person sees of a run in environments: `forebay.runs.show.display` with other numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from forebay.metrics import STEP_S
from forebay.runs.show.display import RunDisplay

RETURN, STEPS_PER_S, LAG = "return", "env_steps_per_s", "lag"
EVAL_RETURN = "eval/return"


class FragmentDisplay(RunDisplay):
    """Shows one run on a console.

    >>> with FragmentDisplay() as display:
    ...     display.start("cartpole", {"environment": "CartPole-v1"}, step=0, total=60)
    ...     display.step(1, 60, {"return": 21.5})
    """

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
