"""From a run file to the components of a run, each made by its own constructor and joined here.

::

    model folder --(warm-up)--> trainer's model --sync_weights--> engine's model --> engine --> controller
    data --> prompts --> sampler --+                                                            |
    judge -------------------------+--> agent loop <--------------------------------------------+
                                   +--> task runner --> manager (replay buffer, ledger)

Nothing here runs: `forebay.runs.steps` has the verbs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from forebay.activity import Activities
from forebay.agents import AgentLoop, build_agent_loop
from forebay.busy import BusyShare
from forebay.config import ConfigError, look_up
from forebay.engines import Engine, EngineSurroundings, RolloutController, build_engines
from forebay.evaluate import Evaluator
from forebay.judges import build_judger
from forebay.ledger import Ledger
from forebay.metrics import MetricsLogger, PhaseTimer
from forebay.models import load_model, load_tokenizer, resolve_model
from forebay.produce import (
    STALENESS_RULES,
    AgentLoopManager,
    AsyncProduceStrategyConfig,
    ProduceStrategy,
    Prompt,
    Sampler,
    SyncProduceStrategyConfig,
    TaskRunner,
)
from forebay.produce.prompts import check_prompt_lengths, hold_out, load_prompts
from forebay.replay import AsyncReplayBufferConfig, ReplayBuffer
from forebay.runs.config import FILTERS, RunConfig, TaskConfig, to_toml
from forebay.runs.display import RunDisplay
from forebay.runs.folder import publish
from forebay.runs.record.observers import RecordedReplayBuffer, observe
from forebay.runs.record.writer import Recorder
from forebay.runs.status import RunStatus
from forebay.stalls import StallWatch
from forebay.tracing import TraceWriter
from forebay.train import OffPolicyGuard, TrainController, WarmupConfig, supervised_warmup
from forebay.types import RolloutState, Status, get_group_status

WARN_AFTER_S = 60.0
"""Seconds without progress after which a run says what it waits for: longer than a usual generation."""
EVAL_SEED = -1
"""Names evaluation rollouts: runs have seeds from 0, so no training rollout has the same id or noise."""


class TaskData(NamedTuple):
    """The prompts of one task."""

    training: Sequence[Prompt]
    held_out: Sequence[Prompt]
    """Empty for a task that is not evaluated."""


@dataclass(kw_only=True)
class EvalSet:
    """The held-out prompts of one task and who answers them."""

    task_name: str
    prompts: Sequence[Prompt]
    agent_loop: AgentLoop
    rollouts_per_prompt: int
    replay_buffer: ReplayBuffer

    async def groups(self) -> list[list[RolloutState]]:
        """A fresh group per prompt; ids, and so the sampling noise, are the same every time."""
        sampler = Sampler(
            self.prompts,
            self.replay_buffer,
            task_name=self.task_name,
            prompt_repeat_k=self.rollouts_per_prompt,
            seed=EVAL_SEED,
            shuffle=False,
        )
        return [await sampler.sample(self.task_name) for _ in self.prompts]


@dataclass(kw_only=True)
class Rollouts:
    """Everything that makes and judges rollouts, without a trainer."""

    tokenizer: Any
    controller: RolloutController
    eval_sets: list[EvalSet]
    manager: AgentLoopManager
    activities: Activities


@dataclass(kw_only=True)
class Run:
    """A run's components and its state. The verbs in `forebay.runs.steps` take one."""

    config: RunConfig
    folder: Path
    tokenizer: Any
    controller: RolloutController
    manager: AgentLoopManager
    trainer: TrainController
    evaluator: Evaluator
    eval_sets: list[EvalSet]
    display: RunDisplay
    metrics: MetricsLogger
    progress: ProductionProgress
    activities: Activities
    busy: BusyShare
    trace: TraceWriter | None
    record: Recorder | None = None
    guard: OffPolicyGuard
    sync_interval: int
    """Train steps between weight syncs; the guard may lower it."""
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
    status: RunStatus = field(init=False)

    def __post_init__(self) -> None:
        controller = self.controller
        self.status = RunStatus(
            self.manager,
            self.activities,
            self.busy,
            batch_size=self.config.batch_size,
            warn_after_s=_warn_after_s(self.config),
            model_step=lambda: controller.model_step,
            describe=controller.describe,
        )

    @property
    def stop_requested(self) -> bool:
        """Whether the run should end early."""
        return self.stop.is_set()


def build_run(config: RunConfig, folder: Path, display: RunDisplay, *, resume_step: int | None = None) -> Run:
    """All components of the run in `folder`; `resume_step` is the step a resumed run goes on from.

    Raises:
        ConfigError: the model, the data or a setting does not fit; before anything is generated.
    """
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    model_folder = resolve_model(config.model, seed=config.seed)
    data = load_data(config)
    if config.warmup is not None:
        model_folder = warm_up(config, model_folder, folder / "warmup", display, data)
    display.phase("load")
    tokenizer = load_tokenizer(model_folder)
    trainer = build_trainer(config, model_folder, tokenizer)
    # What opens files comes last, so that nothing is left open where something before it does not fit.
    rollouts = build_rollouts(config, model_folder, data)
    metrics = config.metrics.build(folder, resume_step=resume_step, report=display.warning)
    rollouts.manager.ledger = Ledger(folder / "ledger.jsonl")
    activities = rollouts.activities
    trace_name = "trace.json" if resume_step is None else f"trace_from_step_{resume_step}.json"
    run = Run(
        config=config,
        folder=folder,
        tokenizer=tokenizer,
        controller=rollouts.controller,
        manager=rollouts.manager,
        trainer=trainer,
        evaluator=Evaluator(),
        eval_sets=rollouts.eval_sets,
        display=display,
        metrics=metrics,
        progress=ProductionProgress(display, config.batch_size),
        activities=activities,
        busy=BusyShare(activities),
        guard=OffPolicyGuard(config.train.guard, config.train.guard_bands),
        sync_interval=config.produce.sync_weights_interval,
        trace=TraceWriter(folder / trace_name, activities) if config.trace else None,
    )
    if config.produce.mode == "colocated":
        # In a separate run the groups of several steps are made at once.
        run.manager.on_group = run.progress
    display.follow(run.status)
    if config.record:
        run.record = Recorder(folder, run_file=to_toml(config), resumed_from=resume_step)
        observe(run.record, run.manager, run.controller)
    return run


def build_trainer(config: RunConfig, model_folder: Path, tokenizer: Any) -> TrainController:
    """The trainer of the model in `model_folder`.

    Raises:
        ConfigError: the model or the training's settings do not fit.
    """
    model = _load(model_folder, config)
    try:
        return TrainController(
            model,
            config.train,
            pad_token_id=tokenizer.pad_token_id,
            total_steps=config.steps,
            seed=config.seed,
            tokenizer=tokenizer,
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"[train] cannot be built: {error}") from error


def _engines(config: RunConfig, model_folder: Path, tokenizer: Any) -> list[Engine]:
    model = config.model
    surroundings = EngineSurroundings(
        model_folder=model_folder,
        load_model=lambda: _load(model_folder, config),
        tokenizer=tokenizer,
        max_context_tokens=model.max_context,
        scratch=config.folder / "engines",
    )
    try:
        return build_engines(config.engine, surroundings)
    except ConfigError as error:
        raise ConfigError(
            f"{model.source!r} cannot be run with model.max_context = {model.max_context}: {error}"
        ) from error


def build_rollouts(
    config: RunConfig, model_folder: Path, data: Sequence[TaskData], *, trains: bool = True
) -> Rollouts:
    """The half of a run that makes rollouts: engine, tasks, buffer, manager, held-out prompts.

    Without `trains` the lengths of the prompts to train on do not matter.

    Raises:
        ConfigError: the model cannot be run, or prompts and responses are longer than the settings allow.
    """
    tokenizer, activities = load_tokenizer(model_folder), Activities()
    controller = RolloutController(_engines(config, model_folder, tokenizer), seed=config.seed)
    context = min(engine.max_context_tokens for engine in controller.engines)
    buffer = build_buffer(config)
    eval_sets: list[EvalSet] = []
    runners = []
    for task, part in zip(config.tasks, data, strict=True):
        prompts = _checked(config, task, part.training, tokenizer, context) if trains else part.training
        if part.held_out:
            held_out = _checked(config, task, part.held_out, tokenizer, context)
            eval_sets.append(_eval_set(config, task, held_out, controller, tokenizer, buffer, activities))
        runners.append(
            TaskRunner(
                task_name=task.name,
                agent_loop=build_agent_loop(
                    task.agent,
                    rollout_controller=controller,
                    judger=build_judger(task.judge),
                    tokenizer=tokenizer,
                    sample_params=task.sample,
                    activities=activities,
                ),
                produce_strategy=build_strategy(config, task, controller),
                sampler=Sampler(
                    prompts,
                    buffer,
                    task_name=task.name,
                    prompt_repeat_k=config.rollouts_per_prompt,
                    seed=config.seed,
                    sample_params=task.sample,
                ),
                weight=task.weight,
            )
        )
    manager = AgentLoopManager(
        task_runners=runners,
        replay_buffer=buffer,
        rollout_controller=controller,
        stall_watch=_watch(config, activities, controller),
        activities=activities,
    )
    return Rollouts(
        tokenizer=tokenizer,
        controller=controller,
        eval_sets=eval_sets,
        manager=manager,
        activities=activities,
    )


def _watch(config: RunConfig, activities: Activities, controller: RolloutController) -> StallWatch:
    return StallWatch(
        activities,
        warn_after_s=_warn_after_s(config),
        fail_after_s=config.produce.stall_after_s,
        describe=controller.describe,
        progress=controller.count_tokens_made,
    )


def _warn_after_s(config: RunConfig) -> float:
    return min(WARN_AFTER_S, config.produce.stall_after_s / 2)


def _load(folder: Path, config: RunConfig) -> Any:
    return load_model(folder, config.model)


def _checked(
    config: RunConfig, task: TaskConfig, prompts: Sequence[Prompt], tokenizer: Any, context: int
) -> Sequence[Prompt]:
    budget, room = config.train.token_budget, task.sample.max_tokens
    if context <= room:
        raise ConfigError(
            f"task {task.name!r}: sample.max_tokens = {room} leaves no room for a prompt in the context of "
            f"{context}; lower it, or raise model.max_context"
        )
    try:
        prompts = check_prompt_lengths(prompts, tokenizer, context - room, task.overlong_prompts)
    except ConfigError as error:
        raise ConfigError(f"task {task.name!r}: {error}") from None
    if budget < context:
        # Rendering all prompts again is the price of finding out before the first rollout.
        try:
            check_prompt_lengths(prompts, tokenizer, budget - room)
        except ConfigError as error:
            raise ConfigError(
                f"task {task.name!r}: train.token_budget = {budget} is less than a prompt with "
                f"sample.max_tokens = {room} may have; raise it ({error})"
            ) from None
    return prompts


def build_strategy(config: RunConfig, task: TaskConfig, controller: RolloutController) -> ProduceStrategy:
    """What produces `task`, as the run file says."""
    produce = config.produce
    accept = look_up("filter", produce.filter, FILTERS)
    if not produce.is_async:
        return SyncProduceStrategyConfig(is_valid_sample_fn=accept).build()
    own, rule = task.max_staleness, look_up("staleness_rule", produce.staleness_rule, STALENESS_RULES)
    return AsyncProduceStrategyConfig(
        is_valid_sample_fn=accept,
        over_sample_threshold=produce.over_sample_threshold,
        enable_partial_rollout=produce.enable_partial_rollout,
        max_staleness=produce.max_staleness if own is None else own,
        tail_batch_trigger_size=produce.tail_batch_trigger_size,
        tail_batch_max_tries=produce.tail_batch_max_tries,
        max_retries=produce.max_retries,
        staleness_rule=rule() if isinstance(rule, type) else rule,
    ).build(sync_weights_interval=produce.sync_weights_interval, rollout_controller=controller)


def build_buffer(config: RunConfig) -> ReplayBuffer:
    """In order of arrival where nothing can be stale, else the most stale first."""
    settings = (
        AsyncReplayBufferConfig(**config.replay.model_dump()) if config.produce.is_async else config.replay
    )
    buffer = settings.build()
    return RecordedReplayBuffer.like(buffer) if config.record else buffer


def _eval_set(
    config: RunConfig,
    task: TaskConfig,
    prompts: Sequence[Prompt],
    controller: RolloutController,
    tokenizer: Any,
    buffer: ReplayBuffer,
    activities: Activities,
) -> EvalSet:
    # A control run shuffles the rewards it trains on; what it has learned is still measured honestly.
    honest = task.judge.model_copy(update={"shuffle_seed": None}) if task.judge else None
    sample_params = replace(task.sample, temperature=config.evaluate.temperature)
    return EvalSet(
        task_name=task.name,
        prompts=prompts,
        agent_loop=build_agent_loop(
            task.agent,
            rollout_controller=controller,
            judger=build_judger(honest),
            tokenizer=tokenizer,
            sample_params=sample_params,
            activities=activities,
        ),
        rollouts_per_prompt=config.evaluate.rollouts_per_prompt,
        replay_buffer=buffer,
    )


def load_data(config: RunConfig) -> list[TaskData]:
    """The prompts of every task; those held out are not among those to train on.

    Raises:
        ConfigError: a data source does not fit.
    """
    data = []
    for task in config.tasks:
        held_out = load_prompts(task.eval_data) if task.eval_data is not None else ()
        training = load_prompts(task.data)
        data.append(TaskData(hold_out(training, held_out) if held_out else training, held_out))
    return data


def warm_up(
    config: RunConfig, source: Path, target: Path, display: RunDisplay, data: Sequence[TaskData] | None = None
) -> Path:
    """Train the model in `source` on the training prompts' own answers; the folder it is saved in, `target`.

    Done once: where `target` exists (a resumed run), it is what the run started from.
    """
    settings = config.warmup
    assert settings is not None
    if target.exists():
        return target
    display.phase("warm-up")
    model, tokenizer = _load(source, config), load_tokenizer(source)
    prompts = [part.training for part in data or load_data(config)]
    examples = [_example(prompt, tokenizer) for prompt in _drawn(prompts, settings, config.seed)]
    try:
        losses = supervised_warmup(
            model, examples, settings, pad_token_id=tokenizer.pad_token_id, seed=config.seed
        )
    except ValueError as error:
        raise ConfigError(f"[warmup] cannot be done: {error}") from error
    temporary = target.with_name(target.name + ".tmp")
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    publish(temporary, target)
    display.message(f"warm-up: {len(losses)} supervised steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return target


def _drawn(data: Sequence[Sequence[Prompt]], settings: WarmupConfig, seed: int) -> list[Prompt]:
    """As many prompts as the warm-up can use, drawn from those of all tasks; making each costs time."""
    places = [(prompts, index) for prompts in data for index in range(len(prompts))]
    order = np.random.default_rng(seed).permutation(len(places))
    return [places[i][0][places[i][1]] for i in order[: settings.steps * settings.batch_size]]


def _example(prompt: Prompt, tokenizer: Any) -> tuple[list[int], list[int]]:
    """(prompt ids, answer ids with the end-of-sequence token)."""
    answer = (prompt.reward_model or {}).get("ground_truth")
    if answer is None:
        raise ConfigError("[warmup] needs an answer for every prompt: set data.answer_column")
    prompt_ids = tokenizer.apply_chat_template(prompt.message, add_generation_prompt=True, return_dict=False)
    answer_ids = tokenizer.encode(str(answer), add_special_tokens=False)
    return prompt_ids, [*answer_ids, tokenizer.eos_token_id]


class ProductionProgress:
    """Feeds the live line: completed groups of the step."""

    def __init__(self, display: RunDisplay, batch_size: int) -> None:
        self._display, self._batch_size, self._done = display, batch_size, 0

    def start_step(self) -> None:
        """Count from 0 again."""
        self._done = 0

    def __call__(self, task_name: str, group: Sequence[RolloutState]) -> None:
        """Count a stored group."""
        self._done += get_group_status(group) is Status.COMPLETED
        self._display.production(self._done, self._batch_size)
