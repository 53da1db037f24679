"""From a run file to the components of a run, each made by its own constructor and joined here.

::

    model folder --(warm-up)--> trainer --sync_weights--> controller of the engines
                                                              |
    data, judge, agent ------------> build_rollouts: ... --> manager (replay buffer, ledger)

Nothing runs yet: `forebay.runs.steps` has the verbs.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from forebay.config import ConfigError
from forebay.evaluate import Evaluator
from forebay.ledger import Ledger
from forebay.metrics import MetricsLogger, PhaseTimer
from forebay.models import load_model, load_tokenizer, resolve_model
from forebay.runs.config import RunConfig, to_toml
from forebay.runs.data import TaskData, check_lengths, load_data, with_alphabet
from forebay.runs.placement import Cluster, Trainer
from forebay.runs.record.events import observe
from forebay.runs.record.journal import Recorder
from forebay.runs.rollouts import Rollouts, build_rollouts
from forebay.runs.show.alarms import RunAlarms
from forebay.runs.show.display import RunDisplay
from forebay.runs.show.status import RunStatus
from forebay.runs.show.surroundings import ended_by_ctrl_c
from forebay.runs.verify import WeightCheck
from forebay.runs.warmup import warm_up
from forebay.train import OffPolicyGuard, TrainController
from forebay.train.parallel.ranks import Ranks
from forebay.watching.trace import TraceWriter


@dataclass(kw_only=True)
class Run(Rollouts):
    """A run's components and its state. The verbs in `forebay.runs.steps` take one."""

    config: RunConfig
    folder: Path
    trainer: Trainer
    display: RunDisplay
    metrics: MetricsLogger
    evaluator: Evaluator = field(default_factory=Evaluator)
    trace: TraceWriter | None = None
    record: Recorder | None = None
    weight_check: WeightCheck | None = None
    cluster: Cluster | None = None
    """Where the trainer, engines and agents are if not here; it outlives the run."""
    compute_thread: ThreadPoolExecutor = field(
        # One thread: torch keeps a pool of workers for every thread that computes.
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="compute")
    )
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    train_step: int = 0
    """Finished train steps."""
    history: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    lag_limit: int | None = None
    """Train steps that rollouts may be behind since the guard lowered it; None: as configured."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: finish this step, save and leave."""
    sync_interval: int = field(init=False)
    """Train steps between weight syncs; the guard may lower it."""
    guard: OffPolicyGuard = field(init=False)
    alarms: RunAlarms = field(init=False)
    status: RunStatus = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        self.sync_interval = config.produce.sync_weights_interval
        self.guard = OffPolicyGuard(config.train.guard, config.train.guard_bands)
        self.alarms = RunAlarms(config)
        self.status = RunStatus(self.manager, self.activities, self.controller, batch_size=config.batch_size)
        self.manager.on_group = self.display.count_group


async def open_run(
    config: RunConfig,
    display: RunDisplay,
    cluster: Cluster | None = None,
    *,
    resume_step: int | None = None,
    data: Sequence[TaskData] | None = None,
) -> Run:
    """`build_run` in the run's own folder, on a `cluster` that has not been opened or has lost a part."""
    if cluster is not None:
        display.phase("ray")
        await cluster.open()
    with ended_by_ctrl_c():
        start = find_start(config, config.folder, display, data)
        if cluster is None:
            return build_run(config, config.folder, display, resume_step=resume_step, start=start)
    display.phase("ray")
    # It takes minutes where a model is large, and parts that are on the cluster already need the event loop.
    await asyncio.to_thread(cluster.start, start.model_folder)
    return build_run(config, config.folder, display, resume_step=resume_step, cluster=cluster, start=start)


class Start(NamedTuple):
    """The model and the data that a run starts from."""

    model_folder: Path
    data: list[TaskData]


def find_start(
    config: RunConfig, folder: Path, display: RunDisplay, data: Sequence[TaskData] | None = None
) -> Start:
    """The model of the run in `folder`, warmed up if the config says so, and its prompts (`data`, if loaded).

    Raises:
        ConfigError: the model or the data does not fit.
    """
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    if data is None:
        data = load_data(config)
        config = with_alphabet(config, data)
    model_folder = resolve_model(config.model, seed=config.seed)
    data = check_lengths(config, model_folder, data)
    if config.warmup is not None:
        model_folder = warm_up(config, model_folder, folder / "warmup", display, data)
    return Start(model_folder, data)


def build_run(
    config: RunConfig,
    folder: Path,
    display: RunDisplay,
    *,
    resume_step: int | None = None,
    cluster: Cluster | None = None,
    start: Start | None = None,
) -> Run:
    """All components of the run in `folder`; `resume_step` is the step a resumed run goes on from.

    The heavy ones are on `cluster`, if one is given (`forebay.runs.placement.make_cluster`); it was opened
    before. With a `start` it was started with its model, too.

    Raises:
        ConfigError: the model, the data or a setting does not fit; before anything is generated.
    """
    model_folder, data = start or find_start(config, folder, display)
    display.phase("load")
    tokenizer = load_tokenizer(model_folder)
    if cluster is not None and start is None:
        cluster.start(model_folder)
    # Parts that open files come last, so that none is left open where one before it does not fit.
    trainer = build_trainer(config, model_folder, tokenizer) if cluster is None else cluster.trainer()
    rollouts = build_rollouts(config, model_folder, data, cluster=cluster)
    metrics = config.metrics.build(folder, resume_step=resume_step, report=display.warning)
    ledger = rollouts.manager.ledger = Ledger(folder / "ledger.jsonl")
    run = Run(
        **vars(rollouts),
        config=config,
        folder=folder,
        trainer=trainer,
        display=display,
        metrics=metrics,
        cluster=cluster,
    )
    if config.trace:
        # A file that is not there yet: a run may go on from the same step several times.
        name = "trace" if resume_step is None else f"trace_from_step_{resume_step}"
        numbered = (f"{name}_{number}.json" for number in itertools.count(2))
        paths = (folder / file_name for file_name in itertools.chain([f"{name}.json"], numbered))
        run.trace = TraceWriter(next(path for path in paths if not path.exists()), run.activities)
    if config.verify_weights:
        run.weight_check = WeightCheck(vocabulary=len(tokenizer), seed=config.seed)
    if cluster is not None:
        cluster.on_retry = partial(_note_retry, ledger)
        cluster.on_restart = ledger.note_restart
    display.follow(run.status)
    if config.record:
        run.record = Recorder(folder, run_file=to_toml(config), resumed_from=resume_step)
        observe(run.record, run.manager, run.controller)
    return run


def _note_retry(ledger: Ledger, task_name: str | None, group_id: str | int | None, reason: str) -> None:
    # Evaluation's groups are in no books.
    if task_name is not None and group_id is not None and ledger.life(group_id, task_name) is not None:
        ledger.record(group_id, task_name, "retried", reason=reason)


def build_trainer(
    config: RunConfig,
    model_folder: Path,
    tokenizer: Any,
    *,
    device: str | None = None,
    ranks: Ranks | None = None,
) -> TrainController:
    """The trainer of the model in `model_folder`: in this process on `device`, or on `ranks`.

    Raises:
        ConfigError: the model or the training's settings do not fit.
    """
    model = load_model(model_folder, config.model)
    try:
        return TrainController(
            model,
            config.train,
            pad_token_id=tokenizer.pad_token_id,
            total_steps=config.steps,
            seed=config.seed,
            tokenizer=tokenizer,
            device=device,
            ranks=ranks,
            engine_dtype=config.engine.dtype,
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"[train] cannot be built: {error}") from error
