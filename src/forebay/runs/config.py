"""The run file: every table of it, composed from the config models that stand beside what they build."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field, model_validator

from forebay.config import ConfigError, StrictModel, look_up
from forebay.engines import EngineConfig
from forebay.judges import JudgeConfig, build_judger
from forebay.metrics import MetricsConfig
from forebay.models import ModelConfig
from forebay.produce import DataConfig, default_is_valid_sample_fn, has_reward_variance
from forebay.replay import SyncReplayBufferConfig
from forebay.train import TrainConfig, WarmupConfig
from forebay.types import SampleParams

FILTERS = {"none": default_is_valid_sample_fn, "reward_variance": has_reward_variance}


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
    seed: int = Field(default=0, ge=0)
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
    checkpoint_every: int = Field(default=50, ge=0)
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
        for number, task in enumerate(self.tasks):
            _check_task(number, task)
        look_up("filter", self.produce.filter, FILTERS)
        for wrong, message in self._rules():
            if wrong:
                raise ConfigError(message)
        return self

    def _rules(self) -> list[tuple[bool, str]]:
        train, group_size = self.train, self.rollouts_per_prompt
        needs_group = train.advantage != "gae" and ":" not in train.advantage
        sequences = self.batch_size * group_size
        return [
            (
                self.steps > 0 and needs_group and group_size < 2,
                f"rollouts_per_prompt = {group_size} gives advantage {train.advantage!r} nothing to compare: "
                f"set it to 2 or more, or use advantage 'gae'",
            ),
            (
                train.pass_k is not None and train.pass_k > group_size,
                f"train.pass_k = {train.pass_k} is more than rollouts_per_prompt = {group_size}; lower it",
            ),
            (
                train.mini_batches > sequences,
                f"train.mini_batches = {train.mini_batches} is more than the {sequences} rollouts of a batch "
                f"(batch_size x rollouts_per_prompt); lower it",
            ),
        ]


def _check_task(number: int, task: TaskConfig) -> None:
    if task.sample.temperature == 0:
        raise ConfigError(
            f"tasks.{number}.sample.temperature is 0, which makes all rollouts of a prompt equal; training "
            f"needs more than 0 (evaluation has its own, evaluate.temperature)"
        )
    try:
        # Thrown away: a judger costs nothing before its first verdict.
        build_judger(task.judge)
    except ConfigError as error:
        raise ConfigError(f"task {task.name!r}: {error}") from None


def to_toml(config: StrictModel) -> str:
    """The resolved config as a run file that `load_config` reads back."""
    return tomli_w.dumps(_without_none(config.model_dump(mode="json")), multiline_strings=True)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
