"""What a run tries before anything costs time: judges on one row each and, with ``--check``, everything once.

::

    try_judges:  the first row's own answer --> judge                                 before every new run
    try_all:     data, model, trainer, engine, agent, judge: one sample, nothing kept  forebay train --check
"""

from __future__ import annotations

from collections.abc import Sequence

from forebay.config import ConfigError
from forebay.judges import build_judger
from forebay.produce import Prompt
from forebay.produce.prompts import last_user_text
from forebay.runs.config import RunConfig
from forebay.runs.data import TaskData
from forebay.types import RolloutState, Status


async def try_judges(config: RunConfig, data: Sequence[TaskData]) -> None:
    """Have each task's judge score the first row's own answer.

    Agents with several turns are left out: they give their judges what only they can make.

    Raises:
        ConfigError: a judge has no verdict on it.
    """
    for task, part in zip(config.tasks, data, strict=True):
        if task.agent.name != "single_turn":
            continue
        judger = build_judger(task.judge)
        state = _answered(task.name, part.training[0])
        try:
            await judger.judge([state])
        finally:
            await judger.aclose()
        if state.status is Status.FAILED:
            reason = (state.error_msg or "").removeprefix(f"rollout {state.rollout_id}: ")
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
