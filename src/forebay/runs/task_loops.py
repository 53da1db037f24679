"""The agent loop of a task as its run file says, for whatever process it is to live in.

::

    [[tasks]] agent, judge, sample --> build_task_loop(controller, tokenizer) --> AgentLoop
                                       held_out: rewards not shuffled, evaluation's temperature

It loads no torch: a process that only talks to engines needs none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forebay.agents import AgentLoop, build_agent_loop, with_max_context
from forebay.agents.base import Generator
from forebay.config import Component, ConfigError
from forebay.judges import build_judge
from forebay.runs.config import RunConfig, TaskConfig
from forebay.watching.activity import Activities


def task_agent(config: RunConfig, task: TaskConfig) -> Component:
    """The agent of `task`, limited to what the model reads and the trainer packs, if it can be.

    Raises:
        ConfigError: the agent is unknown, or its own limit is too high.
    """
    packed = config.train.token_budget
    limit = min(config.model.max_context or packed, packed)
    try:
        return with_max_context(task.agent, limit, packed=packed)
    except ConfigError as error:
        raise ConfigError(f"task {task.name!r}: {error}") from None


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
        sample_params = replace(sample_params, temperature=config.evaluate.temperature)
    return build_agent_loop(
        task_agent(config, task),
        rollout_controller=controller,
        judge=build_judge(judge),
        tokenizer=tokenizer,
        sample_params=sample_params,
        activities=activities,
    )
