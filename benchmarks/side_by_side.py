"""What the two sides of ``train_vs_trl.py`` share: the job they are given and the clock that times them.

Imported in both environments, so it uses the standard library only.
"""

from __future__ import annotations

import json
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SIDES = ("forebay", "trl")
OPTIMIZER_STEPS: dict[str | None, int] = {"dapo": 16, "gspo": 4}
"""Optimizer steps per batch, by preset, as in the papers."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run of one side. The sides' jobs differ in `folder`, `prompts` and `micro_batch` only."""

    model: str
    """Folder with the starting weights and the tokenizer."""
    prompts: str
    """JSONL with the columns ``prompt`` and ``answer``. For TRL the prompts are those that forebay's sampler
    draws, in its order and with the chat template applied."""
    folder: str
    """Where the side may write."""
    seed: int
    steps: int
    prompts_per_step: int
    group_size: int
    """Samples per prompt."""
    max_tokens: int
    lr: float
    """Constant, without a warm-up."""
    betas: tuple[float, float]
    eps: float
    max_grad_norm: float
    clip: float
    """The probability ratio counts from ``1 - clip`` to ``1 + clip``."""
    micro_batch: int
    """Of one forward pass in training: tokens (forebay) or sequences (TRL); changes no result."""
    preset: str | None = None
    """A method of `OPTIMIZER_STEPS` with its paper's settings, `clip` among them; None: GRPO, one optimizer
    step per batch."""
    continuous_batching: bool = False
    """TRL only: generate with transformers' continuous batching instead of `generate`."""
    recording: str | None = None
    """A file of rollouts: forebay writes its own there, TRL trains on them instead of sampling."""

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def optimizer_steps(self) -> int:
        """Per batch."""
        return OPTIMIZER_STEPS.get(self.preset, 1)

    @property
    def saves(self) -> bool:
        """Whether the trained weights are kept."""
        return self.preset is not None or self.recording is not None

    @property
    def trained_model(self) -> Path:
        """Where the weights go if they are kept."""
        return Path(self.folder) / "trained"

    @property
    def result(self) -> Path:
        """Where the side writes its measurements."""
        return Path(self.folder) / "result.json"

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Job:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


class StepClock:
    """CPU and wall seconds at the start and after every step.

    CPU is user plus system time of all threads of this process and of the child processes it waited for.
    """

    def __init__(self) -> None:
        self.cpu_s: list[float] = []
        self.wall_s: list[float] = []

    def mark(self) -> None:
        """Call once before the first step and after each."""
        self.cpu_s.append(cpu_seconds())
        self.wall_s.append(time.perf_counter())


def cpu_seconds() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def write_result(job: Job, clock: StepClock, **measured: Any) -> None:
    """`measured`: by step: reward, generate_cpu_s, response_tokens, grad_norm, prompt_ids."""
    assert len(clock.cpu_s) == job.steps + 1, (len(clock.cpu_s), job.steps)
    result = {"cpu_s": clock.cpu_s, "wall_s": clock.wall_s, **measured}
    job.result.write_text(json.dumps(result), encoding="utf-8")
