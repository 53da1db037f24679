"""The half of a run that makes rollouts, from a run file: prompts, engines, tasks, buffer, manager.

::

    load_data --> prompts --with_alphabet--> model folder --check_lengths--> prompts that fit
    prompts --> sampler -----------+
    judge, agent ------------------+--> agent loop <--- controller <--- engines
                                   +--> task runner --> manager (replay buffer)

With a cluster, the agent loops and engines are there, and what stands here talks to them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forebay.agents import AgentLoop
from forebay.agents.base import Generator
from forebay.agents.build import build_agent_loop, prompt_tools, with_max_context
from forebay.config import Component, ConfigError, errors_about, look_up
from forebay.engines import Engine, EngineSurroundings, RolloutController, build_engines
from forebay.engines.pool import EnginePool
from forebay.evaluate import EvalConfig
from forebay.judges import build_judge
from forebay.ledger import Ledger
from forebay.models import Precision, context_of, find_device, load_tokenizer, precision_on
from forebay.models.config import TINY
from forebay.models.tiny import DEFAULT_ALPHABET
from forebay.produce import (
    AgentLoopManager,
    AsyncProduceStrategyConfig,
    ProduceStrategy,
    Prompt,
    Sampler,
    SyncProduceStrategyConfig,
    TaskRunner,
)
from forebay.produce.prompts.dataset import check_prompt_lengths, hold_out, load_prompts, texts_of
from forebay.produce.prompts.orders import build_order
from forebay.produce.strategies.base import find_staleness_rule
from forebay.produce.strategies.context import GroupGenerator
from forebay.produce.strategies.rules import GroupRules
from forebay.replay import AsyncReplayBufferConfig, ReplayBuffer, StorageBackend, SyncReplayBufferConfig
from forebay.runs.config import ASYNC_ONLY, FILTERS, RunConfig, TaskConfig
from forebay.runs.placement import SERVERS, Cluster, engine_seat, shared_gpu, tries_beside
from forebay.runs.store import keeps_consumed
from forebay.train import TrainConfig
from forebay.train.batch import why_untrainable
from forebay.types import RolloutState
from forebay.watching.activity import Activities
from forebay.watching.stalls import StallWatch


class TaskData(NamedTuple):
    """The prompts of one task."""

    training: Sequence[Prompt]
    held_out: Sequence[Prompt]
    """Empty for a task that is not evaluated."""
    context: int | None = None
    """Tokens of prompt and response that all of them fit into; None: not looked at yet."""


EVAL_SEED = -1
"""Runs have seeds from 0, so no training rollout has the same id or noise."""


@dataclass
class EvalSet:
    """The held-out prompts of one task and the agent loop that answers them."""

    task_name: str
    prompts: Sequence[Prompt]
    agent_loop: GroupGenerator
    tries: EvalConfig
    replay_buffer: ReplayBuffer

    async def groups(self) -> list[list[RolloutState]]:
        """A fresh group per prompt; ids, and so the sampling noise, are the same every time."""
        sampler = Sampler(
            self.prompts,
            self.replay_buffer,
            task_name=self.task_name,
            prompt_repeat_k=self.tries.rollouts_per_prompt,
            seed=EVAL_SEED,
            shuffle=False,
        )
        return [await sampler.sample(self.task_name) for _ in self.prompts]


@dataclass
class Rollouts:
    """Everything that makes and judges rollouts, without a trainer."""

    tokenizer: Any
    controller: EnginePool
    eval_sets: list[EvalSet]
    manager: AgentLoopManager
    activities: Activities
    eval_controller: EnginePool | None = None
    """The controller for evaluations beside production; None: production is paused for them."""
    eval_watch: StallWatch | None = None
    """Watches the engine of evaluations."""


def load_data(config: RunConfig) -> list[TaskData]:
    """The prompts of every task; those held out are not among those to train on.

    Raises:
        ConfigError: a data source does not fit.
    """
    data = []
    for task in config.tasks:
        with errors_about(f"task {task.name!r}"):
            held_out = load_prompts(task.eval_data) if task.eval_data is not None else ()
            training = () if task.data is None else load_prompts(task.data)
            if held_out and training:
                training = hold_out(training, held_out)
            data.append(TaskData(training, held_out))
    return data


def with_alphabet(config: RunConfig, data: Sequence[TaskData]) -> RunConfig:
    """`config` with the characters of `data` in a tiny model's alphabet, where none is given.

    The printable ASCII characters are in it always: environments and tools have their say besides the data.
    """
    tiny = config.model.tiny
    if config.model.source != TINY or tiny.alphabet is not None:
        return config
    prompts = (prompt for part in data for some in (part.training, part.held_out) for prompt in some)
    found = {character for prompt in prompts for text in texts_of(prompt) for character in text}
    # Half a surrogate pair, which JSON can hold, is nothing that a tokenizer takes; the prompt with it is named later.
    if not (extra := sorted(found - set(DEFAULT_ALPHABET) - set(map(chr, range(0xD800, 0xE000))))):
        return config
    tiny = tiny.model_copy(update={"alphabet": DEFAULT_ALPHABET + "".join(extra)})
    return config.model_copy(update={"model": config.model.model_copy(update={"tiny": tiny})})


def check_lengths(config: RunConfig, model_folder: Path, data: Sequence[TaskData]) -> list[TaskData]:
    """`data` whose prompts leave room for a response in the model's context, as the run file says it.

    Raises:
        ConfigError: a prompt is too long, or has characters that the model does not know.
    """
    prompts = (prompt for part in data for prompts in part[:2] for prompt in prompts)
    # In this order: each prompt is made to be looked at.
    if config.train.parallel.context > 1 and any(prompt.mm_info for prompt in prompts):
        config.train.parallel.check_images()
    context = config.model.max_context or context_of(model_folder)
    if context is None:
        return list(data)
    tokenizer = load_tokenizer(model_folder)
    return [fitting(config, *pair, tokenizer, context) for pair in zip(config.tasks, data, strict=True)]


def fitting(
    config: RunConfig, task: TaskConfig, data: TaskData, tokenizer: Any, context: int, *, trains: bool = True
) -> TaskData:
    """`data` with prompts that fit into `context` tokens together with a response.

    Those to train on do not matter without `trains`. Prompts that were checked with this context, or a
    smaller one, are not checked again: rendering every prompt takes seconds.
    """
    if data.context is not None and data.context <= context:
        return data
    held_out = _checked(config, task, data.held_out, tokenizer, context) if data.held_out else ()
    trains = trains and bool(data.training)
    training = _checked(config, task, data.training, tokenizer, context) if trains else data.training
    return TaskData(training, held_out, context)


def task_agent(config: RunConfig, task: TaskConfig) -> Component:
    """The agent of `task`, limited to what the model reads and the trainer packs, if it can be.

    Raises:
        ConfigError: the agent is unknown, or its own limit is too high.
    """
    packed = config.train.token_budget
    limit = min(config.model.max_context or packed, packed)
    with errors_about(f"task {task.name!r}"):
        return with_max_context(task.agent, limit, packed=packed)


def _checked(
    config: RunConfig, task: TaskConfig, prompts: Sequence[Prompt], tokenizer: Any, context: int
) -> Sequence[Prompt]:
    budget, room = config.train.token_budget, task.sample.max_tokens
    agent = task_agent(config, task)
    tools = prompt_tools(agent)
    own_limit = agent.arguments.get("max_context") or context
    if context <= room:
        raise ConfigError(
            f"task {task.name!r}: sample.max_tokens = {room} leaves no room for a prompt in the context of "
            f"{context}; lower it, or raise model.max_context"
        )
    with errors_about(f"task {task.name!r}"):
        # An agent's own limit ends an episode early, but a prompt must leave room for something.
        limit = min(context - room, own_limit - 1)
        prompts = check_prompt_lengths(prompts, tokenizer, limit, task.overlong_prompts, tools=tools)
    if budget < context:
        # Rendering all prompts again is the price of finding out before the first rollout.
        least = f"a prompt with sample.max_tokens = {room}"
        with errors_about(f"task {task.name!r}: train.token_budget = {budget} is less than {least} has; raise it"):
            check_prompt_lengths(prompts, tokenizer, budget - room, tools=tools)
    return prompts


def engine_precision(config: RunConfig) -> Precision:
    """In which the engines hold the weights; ``auto`` is decided by the device that they compute on.

    Raises:
        ConfigError: torch does not see the device.
    """
    if config.engine.dtype != "auto":
        return config.engine.dtype
    if config.cluster is not None:
        # The engines' machines may have GPUs that this one has not.
        return "bfloat16" if config.cluster.arguments.get("gpus_per_engine") else "float32"
    return precision_on(find_device(config.engine.arguments.get("device") or config.device), "auto")


def with_precisions(config: RunConfig, *, auto: Precision | None = None) -> RunConfig:
    """`config` with the precisions that ``auto`` stands for: here, to train the same elsewhere, or `auto`."""
    if config.cluster is not None and auto is None:
        return config
    here = auto or precision_on(find_device(config.device), "auto")
    trainer = here if config.train.dtype == "auto" else config.train.dtype
    is_asked = auto is not None and config.cluster is None and config.engine.dtype == "auto"
    engines = here if is_asked else engine_precision(config)
    train = config.train.model_copy(update={"dtype": trainer})
    engine = config.engine.model_copy(update={"dtype": engines})
    return config.model_copy(update={"train": train, "engine": engine})


def build_run_engines(
    config: RunConfig, folder: Path, tokenizer: Any, *, scratch: Path | None = None, lora_rank: int = 0, first: int = 0
) -> list[Engine]:
    """The engines of ``[engine]``, for the model in `folder`; `scratch` is for their own files.

    `lora_rank` is that of the adapters that they will be given; 0: they will be given all weights. `first` is the
    number of the first one, which on a cluster are counted over all processes.

    Raises:
        ConfigError: the model or an argument does not fit.
    """
    surroundings = EngineSurroundings(
        model_folder=folder,
        model=config.model,
        dtype=engine_precision(config),
        attention=config.engine.attention,
        device=config.device,
        seat=lambda number: engine_seat(config, first + number),
        shared_gpu=shared_gpu(config),
        tokenizer=tokenizer,
        scratch=scratch or config.folder / "engines",
        lora_rank=lora_rank,
    )
    with errors_about(f"engine {config.engine.name!r}, with model.max_context = {config.model.max_context}"):
        return build_engines(config.engine, surroundings)


def build_rollouts(
    config: RunConfig,
    model_folder: Path,
    data: Sequence[TaskData],
    *,
    trains: bool = True,
    cluster: Cluster | None = None,
    storage: StorageBackend | None = None,
) -> Rollouts:
    """The half of a run that makes rollouts: engine, tasks, buffer, manager, held-out prompts.

    Without `trains` the lengths of the prompts to train on do not matter; without a `storage` groups are in
    memory. A `cluster` was opened and started before.

    Raises:
        ConfigError: the model cannot be run, or prompts and responses are longer than the settings allow.
    """
    tokenizer, activities, buffer = load_tokenizer(model_folder), Activities(), build_buffer(config, storage)
    beside, eval_controller = trains and tries_beside(config), None
    # Of their own: rollouts of an evaluation beside production are none of the producer's.
    eval_activities = Activities() if beside else activities
    if cluster is not None:
        controller: EnginePool = cluster.controller()
        eval_controller = cluster.eval_controller()
    else:
        lora_rank = config.train.lora_rank if trains else 0
        engines = build_run_engines(config, model_folder, tokenizer, lora_rank=lora_rank)
        if beside:
            engines, apart = _apart(config, engines, model_folder, tokenizer, lora_rank)
            eval_controller = trying = RolloutController(apart, seed=config.seed, activities=eval_activities)
        # The other half passes until the tokens are copied (`copies_saved`).
        limit_s = (every_s := config.produce.save_partial_every_s) and every_s / 2
        controller = own = RolloutController(
            engines, seed=config.seed, time_limit_s=limit_s, goes_on=True, activities=activities
        )

    def agent_loop(task: TaskConfig, *, held_out: bool = False) -> GroupGenerator:
        noting = eval_activities if held_out else activities
        if cluster is not None:
            return cluster.agent_loop(task.name, held_out=held_out, activities=noting)
        return build_task_loop(
            config,
            task,
            held_out=held_out,
            controller=trying if held_out and eval_controller is not None else own,
            tokenizer=tokenizer,
            activities=noting,
        )

    context = min(engine.max_context_tokens for engine in controller.engines)
    eval_sets, runners = list[EvalSet](), list[TaskRunner]()
    for task, part in zip(config.tasks, data, strict=True):
        prompts, held_out, _ = fitting(config, task, part, tokenizer, context, trains=trains)
        if held_out:
            loop = agent_loop(task, held_out=True)
            eval_sets.append(EvalSet(task.name, held_out, loop, config.tries(task), buffer))
        if not prompts:
            continue
        runners.append(
            TaskRunner(
                task_name=task.name,
                agent_loop=agent_loop(task),
                produce_strategy=build_strategy(config, task, controller),
                sampler=_sampler(config, task, prompts, buffer, lambda: manager.ledger),
                weight=task.weight,
            )
        )
    manager = AgentLoopManager(
        task_runners=runners,
        replay_buffer=buffer,
        rollout_controller=controller,
        stall_watch=_watch(config, activities, controller),
        activities=activities,
        rules=group_rules(config, context) if trains else None,
        keeps_dropped=keeps_consumed(config),
        save_partial_every_s=config.produce.save_partial_every_s,
    )
    eval_watch = None if eval_controller is None else _watch(config, eval_activities, eval_controller)
    return Rollouts(tokenizer, controller, eval_sets, manager, activities, eval_controller, eval_watch)


WARN_AFTER_S = 60.0
"""Seconds without progress after which a run says what it waits for: longer than a usual generation."""


def _watch(config: RunConfig, activities: Activities, controller: EnginePool) -> StallWatch:
    stall_after_s = config.produce.stall_after_s
    return StallWatch(
        activities,
        warn_after_s=min(WARN_AFTER_S, stall_after_s / 2),
        fail_after_s=stall_after_s,
        describe=controller.describe,
        progress=controller.count_tokens_made,
        away=controller.away,
    )


def _apart(
    config: RunConfig, engines: list[Engine], model_folder: Path, tokenizer: Any, lora_rank: int
) -> tuple[list[Engine], list[Engine]]:
    """The engines of production, and the one for evaluations: the last of several, or one more.

    Raises:
        ConfigError: there is one server, and the run cannot know where another would go.
    """
    if len(engines) > 1:
        return engines[:-1], engines[-1:]
    if config.engine.name in SERVERS:
        raise ConfigError(
            "evaluate.mode = 'beside' takes one server for evaluations: set engine.arguments.servers to 2 or "
            "more (or name as many urls), or set evaluate.mode = 'pause'"
        )
    scratch = config.folder / "engines" / "evaluation"
    return engines, build_run_engines(config, model_folder, tokenizer, scratch=scratch, lora_rank=lora_rank)


def _sampler(
    config: RunConfig, task: TaskConfig, prompts: Sequence[Prompt], buffer: ReplayBuffer, books: Callable[[], Ledger]
) -> Sampler:
    """The sampler of `task`; `books` gives the present ledger, since a resume replaces it."""

    def score_of(group_id: str) -> float | None:
        life = books().life(group_id, task.name)
        return None if life is None else life.score

    return Sampler(
        prompts,
        buffer,
        task_name=task.name,
        prompt_repeat_k=config.rollouts_per_prompt,
        seed=config.seed,
        order=build_order(task.sampler),
        order_name=str(task.sampler),
        score_of=score_of,
        sample_params=task.sample,
    )


def build_task_loop(
    config: RunConfig,
    task: TaskConfig,
    *,
    held_out: bool,
    controller: Generator,
    tokenizer: Any,
    activities: Activities,
) -> AgentLoop:
    """The loop that generates and judges the groups of `task`: those to train on, or the `held_out` ones.

    Rollouts with replies in them stay within ``train.token_budget``, the held-out ones too: both are of the
    same agent.

    Raises:
        ConfigError: the agent or the judge is unknown, or an argument does not fit.
    """
    judge, sample_params = task.judge, task.sample
    if held_out:
        # A control run shuffles the rewards it trains on; what it has learned is still measured honestly.
        judge = judge.model_copy(update={"shuffle_seed": None}) if judge else None
        sample_params = replace(sample_params, temperature=config.tries(task).temperature)
    return build_agent_loop(
        task_agent(config, task),
        rollout_controller=controller,
        judge=build_judge(judge),
        tokenizer=tokenizer,
        sample_params=sample_params,
        activities=activities,
    )


def group_rules(config: RunConfig, context: int) -> GroupRules:
    """The conditions on groups; `context` is the longest sequence that the model is for, in tokens."""
    produce, train = config.produce, config.train
    # A batch needs a sequence for each mini-batch, and pass@k needs k attempts, however many rollouts failed.
    needed = max(train.pass_k or 1, math.ceil(train.mini_batches / config.batch_size))
    return GroupRules(
        why_untrainable=partial(_why_untrainable, train, context),
        min_members=max(produce.min_members, needed),
        needed_members=needed,
        max_failed_groups=produce.max_failed_groups,
    )


def _why_untrainable(train: TrainConfig, context: int, state: RolloutState) -> str | None:
    temperature = 1.0 if state.sample_params is None else state.sample_params.temperature
    if (reason := why_untrainable(state, temperature)) is not None:
        return reason
    length = len(state.prompt_ids) + len(state.response_ids)
    for key, limit in (("train.token_budget", train.token_budget), ("model.max_context", context)):
        if length > limit:
            return f"its {length} tokens are more than {key} = {limit}; raise that, or limit the agent"
    # A product is NaN if anything is, and is there in an eighth of the time of a look at each token.
    has_nan = train.correction == "ratio" and math.isnan(np.dot(state.logprobs, state.logprobs))
    if has_nan and (unknown := np.isnan(state.logprobs) & (state.response_mask != 0)).any():
        return f"{unknown.sum()} generated tokens have no logprobs, which train.correction = 'ratio' needs"
    return None


def build_strategy(config: RunConfig, task: TaskConfig, controller: EnginePool) -> ProduceStrategy:
    """The strategy that produces `task`, as the run file says."""
    produce, interval = config.produce, config.produce.sync_weights_interval
    accept = look_up("filter", produce.filter, FILTERS)
    if not produce.is_async:
        return SyncProduceStrategyConfig(is_valid_sample_fn=accept).build(sync_weights_interval=interval)
    options = produce.model_dump(include=ASYNC_ONLY)
    # Here and not among the fields, so that what is wrong with it is one sentence.
    options["staleness_rule"] = find_staleness_rule(produce.staleness_rule)
    if task.max_staleness is not None:
        options["max_staleness"] = task.max_staleness
    settings = AsyncProduceStrategyConfig(is_valid_sample_fn=accept, **options)
    return settings.build(sync_weights_interval=interval, rollout_controller=controller)


def build_buffer(config: RunConfig, storage: StorageBackend | None = None) -> ReplayBuffer:
    """The run's buffer, which without a policy of the run file hands out the most stale first.

    In order of arrival where nothing can be stale.
    """
    kind = AsyncReplayBufferConfig if config.produce.is_async else SyncReplayBufferConfig
    settings = kind(**config.replay.model_dump(include=set(kind.model_fields)))
    interval = config.produce.sync_weights_interval
    compares = config.train.compares
    return settings.build(storage, sync_weights_interval=interval, compares=compares, seed=config.seed)
