"""The run file: every table of it, composed from the config models that stand beside what they build."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field, model_validator

from forebay.config import StrictModel
from forebay.engines import EngineConfig
from forebay.judges import JudgeConfig
from forebay.metrics import MetricsConfig
from forebay.models import ModelConfig
from forebay.produce import DataConfig
from forebay.replay import SyncReplayBufferConfig
from forebay.train import TrainConfig, WarmupConfig
from forebay.types import SampleParams


class TaskConfig(StrictModel):
    """One ``[[tasks]]`` table: a data source, a judge and how to sample."""

    name: str
    data: DataConfig
    eval_data: DataConfig | None = None
    """Held-out prompts; without them the task is not evaluated."""
    judge: JudgeConfig | None = None
    """Required; None only so that its absence gets a message that helps."""
    sample: SampleParams = SampleParams()
    weight: float = Field(default=1.0, ge=0)
    overlong_prompts: Literal["error", "drop"] = "error"


class ProduceConfig(StrictModel):
    """How rollouts are produced."""

    strategy: Literal["sync"] = "sync"
    filter: str = "none"
    """``none``, ``reward_variance`` (dynamic sampling), or ``package.module:function``."""


class EvalConfig(StrictModel):
    """When and how the held-out prompts are tried; before and after training they always are."""

    every: int = Field(default=0, ge=0)
    """Train steps between evaluations; 0: only before and after."""
    rollouts_per_prompt: int = Field(default=1, ge=1)
    temperature: float = Field(default=0.0, ge=0)


class RunConfig(StrictModel):
    """A whole run, as `forebay train` takes it."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    seed: int = 0
    steps: int = Field(ge=0)
    """Train steps in all."""
    batch_size: int = Field(ge=1)
    """Groups, that is prompts, per train step, over all tasks."""
    rollouts_per_prompt: int = Field(ge=1)
    """Size of a group."""
    output: Path = Path("runs")
    """The run's folder is ``output/name``."""
    threads: int = Field(default=1, ge=1)
    """CPU threads for torch."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Train steps between checkpoints; 0: only at the end or when stopped."""
    keep_checkpoints: int = Field(default=2, ge=1)
    show_every: int = Field(default=10, ge=0)
    """Train steps between tables of sampled rollouts; 0: never."""
    model: ModelConfig
    engine: EngineConfig = EngineConfig()
    tasks: list[TaskConfig] = Field(min_length=1)
    replay: SyncReplayBufferConfig = SyncReplayBufferConfig()
    produce: ProduceConfig = ProduceConfig()
    warmup: WarmupConfig | None = None
    train: TrainConfig = TrainConfig()
    evaluate: EvalConfig = EvalConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def folder(self) -> Path:
        """Where the run keeps everything."""
        return self.output / self.name

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        names = [task.name for task in self.tasks]
        if len(set(names)) != len(names):
            raise ValueError(f"task names must differ, got {names}")
        if not any(task.weight > 0 for task in self.tasks):
            raise ValueError("at least one task needs a positive weight")
        return self


def to_toml(config: StrictModel) -> str:
    """The resolved config as a run file that `load_config` reads back."""
    return tomli_w.dumps(_without_none(config.model_dump(mode="json")), multiline_strings=True)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
