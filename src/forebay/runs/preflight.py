"""Trials before a run costs time: judges on one row each and, with ``--check``, everything once.

::

    try_judges:  the first row's own answer --> judge                                 before every new run
    try_all:     data, model, trainer, engine, agent, judge: one sample, nothing kept  forebay train --check
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from forebay.config import ConfigError
from forebay.judges import build_judge
from forebay.metrics import MetricsConfig
from forebay.produce import Prompt, TaskRunner
from forebay.produce.prompts.dataset import last_user_text
from forebay.runs.build import open_run
from forebay.runs.config import RunConfig
from forebay.runs.data import TaskData, load_data, with_alphabet
from forebay.runs.folder import RUN_FILE, occupied
from forebay.runs.placement import opened_cluster
from forebay.runs.show.display import RunDisplay
from forebay.runs.show.wording import clean
from forebay.runs.steps import close, sync_weights
from forebay.types import FAILED_AT_KEY, RolloutState, Status


async def try_judges(config: RunConfig, data: Sequence[TaskData]) -> None:
    """Have each task's judge score the first row's own answer.

    Agents with several turns are left out: they give their judges what only they can make.

    Raises:
        ConfigError: a judge has no verdict on it.
    """
    for task, part in zip(config.tasks, data, strict=True):
        if task.agent.name != "single_turn":
            continue
        judge = build_judge(task.judge)
        state = _answered(task.name, part.training[0])
        try:
            await judge.judge([state])
        finally:
            await judge.aclose()
        if state.status is Status.FAILED:
            reason = (state.error_msg or "").removeprefix(f"rollout {state.rollout_id}: ")
            if raised := state.extra_fields.get(FAILED_AT_KEY):
                reason += f" ({raised})"
            place = part.training[0].place or "the first row"
            raise ConfigError(
                f"task {task.name!r}: {reason} (tried before the start on {place}, with the response "
                f"{state.response!r}); mend the judge, or name another with judge.name"
            )


def _answered(task_name: str, prompt: Prompt) -> RolloutState:
    """A rollout of `prompt` whose response is the row's answer; without one, any text."""
    answer = (prompt.reward_model or {}).get("ground_truth")
    response = str(answer) if isinstance(answer, str | int | float) else last_user_text(prompt.message)
    state = RolloutState(
        [dict(message) for message in prompt.message],
        rollout_id=f"{task_name}/before the start",
        group_id=f"{task_name}/before the start",
        task_name=task_name,
        data_source=prompt.data_source,
        reward_model=prompt.reward_model,
        extra_fields=dict(prompt.extra),
        response=response,
        finish_reason="stop",
        status=Status.COMPLETED,
    )
    # Judges of length count tokens; no tokenizer is needed for so many.
    state.append([0] * len(response), logprobs=[0.0] * len(response), model_step=0)
    return state


async def try_all(config: RunConfig, say: Callable[[str], None]) -> None:
    """Open everything that the run needs, make one group of each task, and say what worked; keep nothing.

    Raises:
        ConfigError: something does not fit, or all rollouts of a group failed.
    """
    with occupied(config.folder):
        state = "holds a run: --overwrite replaces it" if (config.folder / RUN_FILE).exists() else "is free"
        say(f"folder  {config.folder} {state}")
    data = load_data(config)
    config = with_alphabet(config, data)
    for task, part in zip(config.tasks, data, strict=True):
        held_out = f", {len(part.held_out)} held out" if part.held_out else ""
        say(f"data    {task.name}: {len(part.training)} prompts to train on{held_out}")
    with tempfile.TemporaryDirectory(prefix="forebay-check-") as scratch:
        trial = config.model_copy(
            update={
                "output": Path(scratch),
                # Nothing of a trial is kept, and a warm-up would train.
                **{"warmup": None, "metrics": MetricsConfig(), "record": False, "trace": False},
            }
        )
        async with opened_cluster(trial) as cluster:
            run = await open_run(trial, RunDisplay(Console(quiet=True)), cluster, data=data)
            try:
                say(f"model   {config.model.source}, and its trainer")
                # Engines on a cluster answer nothing before they have the trainer's weights.
                await sync_weights(run)
                for runner in run.manager.task_runners:
                    await _try_task(runner, config.engine.name, say)
            finally:
                await close(run)


async def _try_task(runner: TaskRunner, engine: str, say: Callable[[str], None]) -> None:
    made = await runner.agent_loop.generate_group(await runner.sampler.sample(runner.task_name))
    failed = [state for state in made if state.status is Status.FAILED]
    if len(failed) == len(made):
        raise ConfigError(f"task {runner.task_name!r}: {failed[0].error_msg}")
    if failed:
        say(f"warning {len(failed)} of {len(made)} rollouts failed: {failed[0].error_msg}")
    state = next(state for state in made if state.status is not Status.FAILED)
    prompt, response = last_user_text(state.message), state.response
    say(f"engine  {engine}: {clean(prompt, 60)!r} -> {clean(response, 60)!r}")
    say(f"judge   {runner.task_name}: {state.reward}")
