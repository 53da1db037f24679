"""A run whose production is real and whose devices are described: built like `forebay.runs.build`'s.

::

    real       controller, agent loops, samplers, strategies, manager, replay buffer, ledger, the run's loop
    stand-ins  engines (`engine`), trainer, judge, tokenizer, display (`standins`)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from forebay.agents import SingleTurnAgentLoop
from forebay.engines import RolloutController
from forebay.engines.base import GenerateRequest
from forebay.engines.controller import request_seed
from forebay.ledger import Ledger
from forebay.metrics import MetricsLogger, PhaseTimer
from forebay.produce import AgentLoopManager, IsValidSampleFn, Prompt, Sampler, TaskRunner
from forebay.replay import ReplayBuffer
from forebay.runs.build import Run
from forebay.runs.config import RunConfig, TaskConfig
from forebay.runs.rollouts import build_buffer, build_strategy
from forebay.simulation.cluster import ClusterConfig
from forebay.simulation.engine import ModeledEngine
from forebay.simulation.simulated_parts import (
    PromptTokenizer,
    SilentDisplay,
    TimedJudge,
    TimedThread,
    TimedTrainer,
)
from forebay.types import RolloutState
from forebay.watching.activity import Activities

_SEED_SPAN = float(1 << 63)
"""Seeds of requests are drawn evenly from 0 to this."""

_PROMPTS = [Prompt(message=[{"role": "user", "content": "simulated"}])]
"""One is enough: every epoch gives its group another id, and so other lengths."""


@dataclass(kw_only=True)
class World:
    """A simulated run, and the parts that know what happened in it."""

    run: Run
    engines: list[ModeledEngine]
    trainer: TimedTrainer
    display: SilentDisplay


def build_world(
    config: RunConfig, cluster: ClusterConfig, folder: Path, on_step: Callable[[], None]
) -> World:
    """The run of `config` on `cluster`; inside the event loop, whose clock everything takes."""
    clock = asyncio.get_running_loop().time
    engines = [_engine(cluster, number) for number in range(cluster.engines)]
    controller = RolloutController(engines, seed=config.seed)
    activities, buffer, tokenizer = Activities(), build_buffer(config), PromptTokenizer(cluster.prompt_tokens)
    manager = AgentLoopManager(
        task_runners=[
            _task_runner(config, cluster, task, controller, buffer, tokenizer, activities)
            for task in config.tasks
        ],
        replay_buffer=buffer,
        rollout_controller=controller,
        ledger=Ledger(clock=clock),
        activities=activities,
    )
    thread = TimedThread()
    trainer, display = TimedTrainer(cluster, thread), SilentDisplay(clock, on_step)
    run = Run(
        config=config,
        folder=folder,
        tokenizer=tokenizer,
        controller=controller,
        manager=manager,
        # They have what the loops call, and no more.
        trainer=cast(Any, trainer),
        compute_thread=cast(Any, thread),
        eval_sets=[],
        display=display,
        metrics=MetricsLogger([]),
        activities=activities,
        timer=PhaseTimer(wall_clock=clock, cpu_clock=clock),
    )
    return World(run=run, engines=engines, trainer=trainer, display=display)


def _engine(cluster: ClusterConfig, number: int) -> ModeledEngine:
    prefill_rate = cluster.prefill_tokens_per_s

    def length(request: GenerateRequest) -> int:
        """The same for all calls of one try, however often it is interrupted."""
        task_name = (request.session_id or "").rsplit("/", 3)[0]
        whole = cluster.lengths_of(task_name).quantile((request.seed + 0.5) / _SEED_SPAN)
        return whole - request.num_earlier

    return ModeledEngine(
        rate=cluster.decode_rate,
        slots=cluster.slots,
        length=length,
        prefill_s=lambda num_tokens: num_tokens / prefill_rate if prefill_rate else 0.0,
        number=number,
    )


def _task_runner(
    config: RunConfig,
    cluster: ClusterConfig,
    task: TaskConfig,
    controller: RolloutController,
    buffer: ReplayBuffer,
    tokenizer: PromptTokenizer,
    activities: Activities,
) -> TaskRunner:
    strategy = build_strategy(config, task, controller)
    if cluster.filtered_share:
        strategy.is_valid_sample_fn = _filter(config.seed, cluster.filtered_share)
    return TaskRunner(
        task_name=task.name,
        agent_loop=SingleTurnAgentLoop(
            controller,
            TimedJudge(cluster.judge_s),
            tokenizer,
            sample_params=task.sample,
            activities=activities,
        ),
        produce_strategy=strategy,
        sampler=Sampler(
            _PROMPTS,
            buffer,
            task_name=task.name,
            prompt_repeat_k=config.rollouts_per_prompt,
            seed=config.seed,
            shuffle=False,
            sample_params=task.sample,
        ),
        weight=task.weight,
    )


def _filter(seed: int, share: float) -> IsValidSampleFn:
    """Rejects this share of the groups; always the same ones."""

    def accept(samples: list[RolloutState]) -> bool:
        return request_seed(seed, "filter", str(samples[0].group_id)) >= share * _SEED_SPAN

    return accept
