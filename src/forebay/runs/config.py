"""The run file: every table of it, composed from the config models that stand beside what they build."""

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import tomli_w
from pydantic import BaseModel, Field, model_validator

from forebay.agents.build import check_agent
from forebay.config import Component, ConfigError, StrictModel, check_arguments, errors_about, import_object, look_up
from forebay.engines.build import EngineConfig, find_engine
from forebay.evaluate import EvalConfig, TaskEvalConfig
from forebay.io.forked import start_loading
from forebay.judges import JudgeConfig, build_judge
from forebay.metrics import MetricsConfig
from forebay.models import DEVICE_PATTERN, ModelConfig
from forebay.models.config import TinyConfig
from forebay.produce import STALENESS_RULES, DataConfig, default_is_valid_sample_fn, has_reward_variance
from forebay.produce.prompts.orders import build_order
from forebay.produce.prompts.sources import check_source
from forebay.produce.strategies.asynchronous import AsyncProduceStrategyConfig
from forebay.replay.config import ReplayConfig
from forebay.train import TrainConfig, WarmupConfig, check_staleness_rule
from forebay.train.presets import DYNAMIC_SAMPLING
from forebay.types import SampleParams

CLUSTERS = {"ray": "forebay.cluster.ray_cluster:RayCluster"}
"""The names that ``cluster`` may have, with import paths: this row knows no cluster."""
CLUSTER_ARGUMENTS = {"ray": "forebay.cluster.arguments:RayArguments"}
"""The models of their ``arguments``, by import path."""

NUM_SAMPLES = 3
"""Tables of sampled rollouts that a run shows."""

FILTERS = {"none": default_is_valid_sample_fn, "reward_variance": has_reward_variance}


class TaskConfig(StrictModel):
    """One ``[[tasks]]`` table: a data source, a judge and how to sample."""

    name: str
    """Names the task in metrics, ledger and messages."""
    data: DataConfig | None = None
    """The prompts to train on; a task with weight 0 needs none."""
    eval_data: DataConfig | None = None
    """Held-out prompts; without them the task is not evaluated."""
    judge: JudgeConfig | None = None
    """The source of the reward; required, and None only so that its absence gets a message that helps."""
    agent: Component = Component(name="single_turn")
    """``single_turn``, ``multi_turn``, ``tools``, ``program``, or ``package.module:Class`` of an
    `AgentLoop`."""
    sampler: Component = Component(name="shuffled")
    """Which prompts an epoch has, and in which order: ``shuffled``, ``curriculum``, ``difficulty``,
    ``prioritized``, or ``package.module:Class`` with a ``plan``."""
    sample: SampleParams = SampleParams()
    weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """The task's share of each batch, relative to the other tasks; 0: only evaluated."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """For prompts that leave no room for a response: ``error`` or ``drop``."""
    max_staleness: int | None = Field(default=None, ge=0)
    """This task's own; None: ``produce.max_staleness``."""
    evaluate: TaskEvalConfig | None = None
    """This task's own keys of ``[evaluate]``."""


SEPARATE_DEFAULTS: Mapping[str, Any] = {
    "max_staleness": 1,
    "staleness_rule": "correct",
    "over_sample_threshold": 0.5,
    "enable_partial_rollout": True,
}
"""Values of ``[produce]`` in separate mode where the run file has none: nothing is dropped for its length
(benchmarks/results/separate_defaults.md)."""
SEPARATE_CORRECTION = {"gspo": "token_tis"}
"""``train.correction`` for the rule ``correct`` where the run file leaves it out, by loss; else ``ratio``,
which keeps the policy near the weights that sampled. GSPO's clip range is far narrower than a step of lag."""


class ProduceConfig(StrictModel):
    """How rollouts are produced.

    A colocated run in which one of the keys `ASYNC_ONLY` is set uses the asynchronous strategy, too.
    Separate mode has defaults of its own, `SEPARATE_DEFAULTS`, unless ``max_staleness = 0`` is set: that run
    trains the same batches as the synchronous one, with the defaults below.
    """

    mode: Literal["colocated", "separate"] = "colocated"
    """``colocated``: generation and training take turns. ``separate``: both work at the same time."""
    filter: str = "none"
    """``none``, ``reward_variance`` (dynamic sampling), or ``package.module:function``."""
    sync_weights_interval: int = Field(default=1, ge=1)
    """Train steps between two hand-overs of the weights to the engines."""
    max_staleness: int = Field(default=0, ge=0)
    """Sync intervals that a group may wait beyond its own; 0: on-policy if weights are synced every step.
    Separate mode: 1."""
    staleness_rule: str = "drop"
    """For groups that got too old: ``drop``, ``requeue``, ``admit``, ``mask``, ``correct``, or
    ``package.module:Class``. Separate mode: ``correct``."""
    over_sample_threshold: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Share of a batch that is kept in flight beyond what the batch needs. Separate mode: 0.5."""
    enable_partial_rollout: bool = False
    """Interrupted rollouts go on from their tokens; otherwise they start over. Separate mode: true."""
    tail_batch_trigger_size: int = Field(default=0, ge=0)
    """So many expired groups are generated again in a round of their own; 0: never."""
    tail_batch_max_tries: int = Field(default=0, ge=0)
    """Interruptions without partial rollout after which a group joins the tail batch; 0: it never does."""
    max_retries: int = Field(default=1, ge=0)
    """How often the failed rollouts of a group that cannot go on without them are generated again before the
    group is dropped."""
    min_members: int = Field(default=2, ge=1)
    """A group goes on without its failed rollouts if at least so many remain; otherwise another takes its
    place. ``rollouts_per_prompt``: only whole groups are trained."""
    max_failed_groups: int | None = Field(default=None, ge=0)
    """Failed groups of a task that are replaced while one batch is made; with one more the run ends. None:
    twice the batch, and at least 8."""
    in_flight_update: bool = False
    """Hand weights over while rollouts run; they go on over the new weights instead of being interrupted."""
    save_partial_every_s: float | None = Field(default=None, gt=0)
    """Most seconds of an unfinished rollout that a kill loses: its tokens and turns are saved in the store,
    SQLite or PostgreSQL, and go on after ``--resume``. Engines compute its context anew twice in that time,
    four times on Ray. None: it begins again."""
    stall_after_s: float = Field(default=900.0, gt=0)
    """Seconds without any progress after which the run ends with a report of what hangs."""

    @model_validator(mode="before")
    @classmethod
    def _fill_separate(cls, given: Any) -> Any:
        if (
            not isinstance(given, Mapping)
            or given.get("mode") != "separate"
            # Such a run trains the same batches as the synchronous one, with the ordinary defaults.
            or given.get("max_staleness") == 0
        ):
            return given
        defaults = dict(SEPARATE_DEFAULTS)
        # Tail batches are made of what expires or starts over, and these defaults do away with both.
        if given.get("tail_batch_trigger_size"):
            del defaults["staleness_rule"]
        if given.get("tail_batch_max_tries"):
            del defaults["enable_partial_rollout"]
        return defaults | dict(given)

    @property
    def is_async(self) -> bool:
        """Whether groups may be in flight between batches."""
        fields = type(self).model_fields
        return self.mode == "separate" or any(getattr(self, name) != fields[name].default for name in ASYNC_ONLY)

    @model_validator(mode="after")
    def _check(self) -> Self:
        look_up("filter", self.filter, FILTERS)
        look_up("staleness_rule", self.staleness_rule, STALENESS_RULES)
        if self.mode == "colocated" and self.in_flight_update:
            raise ConfigError(
                "in_flight_update needs mode 'separate', since colocated engines rest while training: set "
                "produce.mode = 'separate', or leave it out"
            )
        if self.enable_partial_rollout and self.tail_batch_max_tries:
            raise ConfigError(
                f"tail_batch_max_tries = {self.tail_batch_max_tries} counts rollouts that start over, and "
                f"with enable_partial_rollout they go on instead: leave one of the two out"
            )
        return self


ASYNC_ONLY = ProduceConfig.model_fields.keys() & AsyncProduceStrategyConfig.model_fields.keys()
"""Keys of ``[produce]`` that are options of the asynchronous strategy."""


class WarmupTable(WarmupConfig):
    """Supervised training before reinforcement learning, on conversations or on the tasks' own answers."""

    data: DataConfig | None = None
    """Conversations: rows whose column ``messages`` is a chat list; a twentieth of them is held out, and its
    loss told before and after. None: the tasks' prompts and answers."""


class RunFile(BaseModel):
    """The keys that run files of every kind have."""

    model_config = StrictModel.model_config

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    """Names the run and its folder: letters, digits, dots, dashes and underscores."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Of everything that is drawn at random; equal seeds give equal runs on one machine."""
    steps: int = Field(ge=0)
    """Train steps in all."""
    output: Path = Path("runs")
    """The run's folder is ``output/name``."""
    search_path: list[Path] | None = None
    """Folders in which modules, data and models are looked for; None: the run file's, then the
    working folder."""

    @property
    def folder(self) -> Path:
        """Where the run keeps everything."""
        return self.output / self.name


class RunConfig(RunFile):
    """A whole run, as `forebay train` takes it."""

    removed_keys: ClassVar[Mapping[str, str]] = {
        "model.dtype": "set engine.dtype and train.dtype",
        "model.attention": "set engine.attention and train.attention",
        "train.schedule_warmup_steps": "it is the second entry of train.schedule",
        "train.dual_clip": "it is the third number of train.clip",
        "train.lam": "it is the second number of train.discount",
        "trace": "forebay board RUN --export timeline.json writes the timeline of any run",
        "show_every": f"rollouts are shown {NUM_SAMPLES} times in a run; forebay board shows every one",
        "replay.path": "name the file in replay.store = 'sqlite:///PATH', with four slashes before an absolute path",
        "produce.strategy": "it follows from produce.mode and from the keys that are set",
    }
    """By a key of an earlier version, the advice that the error gives."""

    batch_size: int = Field(ge=1)
    """Groups, that is prompts, per train step, over all tasks."""
    rollouts_per_prompt: int = Field(ge=1)
    """Size of a group."""
    device: str = Field(default="auto", pattern=DEVICE_PATTERN)
    """Where models train and generate: ``cpu``, ``cuda``, ``cuda:1``, ``mps``, or ``auto``: CUDA if there
    is one, else the CPU. On a cluster Ray's resources say it."""
    threads: int = Field(default=1, ge=1)
    """CPU threads for torch."""
    checkpoint_every: int = Field(default=50, ge=0)
    """Train steps between checkpoints; 0: only at the end or when stopped."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """How many of the latest checkpoints stay on disk."""
    verify_weights: bool = False
    """After every hand-over, compare log probabilities of engines and trainer; costs a short generation."""
    check_memory: bool = True
    """Refuse a run that does not fit in memory, as ``forebay plan`` finds; false: start it anyway."""
    record: bool = False
    """Write ``record/``, with which ``forebay replay`` runs the training again."""
    history_gb: float = Field(default=2.0, ge=0)
    """Disk for ``history/``: every rollout that was trained, dropped or evaluated, and every activity, for
    ``forebay board`` and SQL. The oldest are removed beyond it; 0: none is written, and the board shows the
    overview and the flow alone."""
    board: bool = False
    """Start ``forebay board`` beside the run, and say its address; it ends with the run."""
    model: ModelConfig
    engine: EngineConfig = EngineConfig()
    """``transformers`` (in this process), ``process``, ``vllm``, ``sglang``, or
    ``package.module:function``."""
    cluster: Component | None = None
    """``ray``: engines, agents, buffer and trainer as Ray actors. None: everything in this process."""
    tasks: list[TaskConfig] = Field(min_length=1)
    replay: ReplayConfig = ReplayConfig()
    produce: ProduceConfig = ProduceConfig()
    warmup: WarmupTable | None = None
    train: TrainConfig = TrainConfig()
    evaluate: EvalConfig = EvalConfig()
    metrics: MetricsConfig = MetricsConfig()

    def tries(self, task: TaskConfig) -> EvalConfig:
        """How the held-out prompts of `task` are tried."""
        own = {} if task.evaluate is None else task.evaluate.model_dump(exclude_none=True)
        return self.evaluate.model_copy(update=own)

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, given: Any) -> Any:
        """The keys of another table that the preset of ``[train]`` brings."""
        if "environment" in given:
            raise ConfigError("[environment] is of a run in environments: forebay train, eval and board work with it")
        train, produce = (given.get(key, {}) for key in ("train", "produce"))
        if not isinstance(train, Mapping) or not isinstance(produce, Mapping):
            return given
        dynamic = {"filter": "reward_variance"} if train.get("preset") in DYNAMIC_SAMPLING else {}
        # The run file's own filter goes before the preset's.
        return {**given, "produce": {**dynamic, **produce}}

    @model_validator(mode="after")
    def _fill_train(self) -> Self:
        """Defaults of ``[train]`` that follow from other tables."""
        train, given = self.train, self.train.model_fields_set
        fill: dict[str, Any] = {}
        # Both train on tokens of older weights, for which the loss has to be corrected.
        is_stale = self.produce.staleness_rule == "correct" or self.replay.reuse.times > 1
        if is_stale and "correction" not in given:
            fill["correction"] = SEPARATE_CORRECTION.get(train.loss, "ratio")
        # Dr. GRPO divides by a constant, the generation budget. GSPO's own normalization goes first.
        if train.advantage == "dr_grpo" and train.loss != "gspo" and "normalization" not in given:
            fill["normalization"] = max(task.sample.max_tokens for task in self.tasks)
        if fill:
            filled = TrainConfig.model_validate({**train.model_dump(exclude_unset=True), **fill})
            # The model is frozen for its users; this is still part of making it.
            object.__setattr__(self, "train", filled)
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [task.name for task in self.tasks]
        if len(set(names)) != len(names):
            raise ValueError(f"task names must differ, got {names}")
        if not any(task.weight > 0 for task in self.tasks):
            raise ValueError("at least one task needs a positive weight")
        for number, task in enumerate(self.tasks):
            _check_task(number, task)
        self._check_together()
        find_engine(self.engine)
        check_cluster(self)
        check_staleness_rule(self.produce.staleness_rule, self.train)
        return self

    def _check_together(self) -> None:
        """Rules over keys of several tables."""
        train, group_size = self.train, self.rollouts_per_prompt
        if self.record and self.replay.kind not in (None, "memory"):
            raise ConfigError(
                f"record = true repeats what happened to groups in memory, and replay.store is "
                f"{self.replay.store!r}: leave one of the two out"
            )
        # One task's groups in flight must not push out the share of another, which would then wait for ever.
        weights = [task.weight for task in self.tasks if task.weight > 0]
        shares = [math.ceil(self.batch_size * weight / sum(weights)) for weight in weights]
        over_sample = self.produce.over_sample_threshold
        num_beyond = sum(math.ceil(over_sample * share) for share in shares) if len(shares) > 1 else 0
        if self.replay.limit is not None and self.replay.limit < self.batch_size + num_beyond:
            beside = f" beside {num_beyond} in flight (produce.over_sample_threshold)" if num_beyond else ""
            raise ConfigError(
                f"replay.limit = {self.replay.limit} groups hold no whole batch of batch_size = {self.batch_size}"
                f"{beside}, and the run would wait for one for ever: raise the limit, or leave it out"
            )
        if self.evaluate.mode == "beside" and self.produce.mode != "separate":
            raise ConfigError(
                "evaluate.mode = 'beside' needs production that goes on beside training: set produce.mode = "
                "'separate' or evaluate.mode = 'pause'"
            )
        # Which store a run has that names none depends on its folder: `check_partial_saves` looks again.
        is_lost = self.replay.store == "memory" or not self.produce.enable_partial_rollout
        if self.produce.save_partial_every_s is not None and is_lost:
            raise ConfigError(
                "produce.save_partial_every_s saves rollouts that can go on: leave it out, or set "
                "replay.store = 'sqlite' and produce.enable_partial_rollout = true"
            )
        self.replay.check(train.correction, self.produce.staleness_rule, compares=train.compares)
        own_limits = [task.name for task in self.tasks if task.max_staleness is not None]
        if own_limits and not self.produce.is_async:
            raise ConfigError(
                f"max_staleness of task {', '.join(own_limits)}: nothing is stale in this run; set "
                f"produce.mode = 'separate' or produce.max_staleness, or leave it out"
            )
        if self.steps > 0 and group_size < 2 and train.compares:
            raise ConfigError(
                f"rollouts_per_prompt = {group_size} gives advantage {train.advantage!r} nothing to compare: set "
                f"it to 2 or more, or use advantage 'gae'"
            )
        if train.pass_k is not None and train.pass_k > group_size:
            raise ConfigError(
                f"rollouts_per_prompt = {group_size} is too few for train.advantage = {train.advantage!r}"
            )
        if train.mini_batches > (sequences := self.batch_size * group_size):
            raise ConfigError(
                f"train.mini_batches = {train.mini_batches} is more than the {sequences} rollouts of a batch "
                f"(batch_size x rollouts_per_prompt); lower it"
            )


def check_cluster(config: RunConfig) -> None:
    """Check the run file's ``cluster``; nothing is imported that belongs to it but a model of its arguments.

    Raises:
        ConfigError: its name is unknown, or an argument does not fit.
    """
    if config.cluster is None:
        return
    name, arguments = config.cluster.name, config.cluster.arguments
    look_up("cluster", name, CLUSTERS)
    if name not in CLUSTERS:
        # A factory of the user's own: its first argument is the config, from the run.
        check_arguments("cluster", name, look_up("cluster", name, {}), arguments, "config")
        return
    model = import_object("cluster", CLUSTER_ARGUMENTS[name])
    check_arguments("cluster", name, model, arguments)
    model(**arguments).check(config)


_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Files of drivers, asked before torch is loaded, which knows better. A wrong guess costs time alone."""


def load_ranks(config: RunConfig) -> None:
    """Have the libraries of ranks that the run starts loaded from now on, beside those of this process."""
    is_beside = config.produce.mode == "separate" and (config.device == "cpu" or not any(map(os.path.exists, _GPUS)))
    if config.cluster is None and (config.train.ranks > 1 or is_beside):
        start_loading()


def _check_task(number: int, task: TaskConfig) -> None:
    if task.data is None and (task.weight > 0 or task.eval_data is None):
        raise ConfigError(f"'tasks.{number}.data' is missing: only a task with weight 0 and eval_data needs none")
    if task.sample.temperature == 0:
        raise ConfigError(
            f"tasks.{number}.sample.temperature is 0, which makes all rollouts of a prompt equal; training "
            f"needs more than 0 (evaluation has its own, evaluate.temperature)"
        )
    with errors_about(f"task {task.name!r}"):
        check_agent(task.agent)
        build_order(task.sampler)
        for data in (task.data, task.eval_data):
            if data is not None:
                check_source(data.source, data.arguments)
        # Thrown away: a judge costs nothing before its first verdict.
        build_judge(task.judge)


def to_toml(config: RunFile) -> str:
    """The resolved config as a run file that `load_config` reads back."""
    return tomli_w.dumps(_without_none(config.model_dump(mode="json")), multiline_strings=True)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        # TOML has no null: a key without a value is left out.
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


_WEIGHTS = "the weights are those of the checkpoint"
_WARMED_UP = "the warm-up was before the first train step"
_ADAPTERS = "the adapters are those of the checkpoint"
_PROMPTS = "the checkpoint counts prompts by their place in the data"
_PLACE = "the run stays in its folder"

FIXED = {
    "name": _PLACE,
    "output": _PLACE,
    "seed": "the order of the prompts depends on it",
    "rollouts_per_prompt": "groups that are on their way have that size",
    "record": "a record is replayed from the first train step on",
    "model.source": _WEIGHTS,
    **{f"model.tiny.{name}": _WEIGHTS for name in TinyConfig.model_fields},
    "tasks.*.name": "the checkpoint keeps its prompts by task",
    "tasks.*.sampler.name": _PROMPTS,
    "tasks.*.sampler.arguments": _PROMPTS,
    **{f"tasks.*.data.{name}": _PROMPTS for name in ("where", "shuffle_seed", "start", "size")},
    "train.teacher": "the checkpoint was trained toward it",
    **{f"train.lora_{name}": _ADAPTERS for name in ("rank", "alpha", "targets")},
    **{f"warmup.{name}": _WARMED_UP for name in WarmupConfig.model_fields},
    **{f"warmup.data.{name}": _WARMED_UP for name in DataConfig.model_fields},
}
"""Why each of these cannot change; ``*`` is any task's place. Every start reads the others anew, and the part
that reads one refuses a value that does not fit the checkpoint."""

_TABLES_OF_ONE_KEY = ("arguments", "guard_bands")
"""Keys whose value is a table that is told as a whole."""


def changed(before: RunConfig, after: RunConfig) -> list[str]:
    """A line for each key that the resumed run has another value for.

    Raises:
        ConfigError: a key cannot change.
    """
    # The folder of the run may have been moved, which is no wish to change it.
    old, new = (
        dict(_walk(config.model_dump(mode="json", exclude={"name", "output"}), "")) for config in (before, after)
    )
    lines = []
    for key in sorted(old.keys() | new.keys()):
        was, will_be = old.get(key), new.get(key)
        if was == will_be:
            continue
        # tasks.0.name falls under tasks.*.name.
        if (reason := FIXED.get(re.sub(r"\b\d+\b", "*", key))) is not None:
            raise ConfigError(
                f"cannot go on with {key} = {will_be!r}, it is {was!r}: {reason}; leave it out, or start a "
                f"new run under another name=..."
            )
        lines.append(f"changed: {key} = {will_be!r}, was {was!r}")
    return lines


def _walk(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and key.rpartition(".")[2] not in _TABLES_OF_ONE_KEY:
        for name, item in value.items():
            yield from _walk(item, f"{key}.{name}" if key else name)
    # The one list whose entries are told key by key.
    elif key == "tasks":
        for number, task in enumerate(value):
            yield from _walk(task, f"tasks.{number}")
    elif value is not None:
        yield key, value
