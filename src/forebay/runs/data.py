"""The prompts of a run: loaded, in characters that the model knows, and short enough to be answered.

::

    run file --load_data--> prompts --with_alphabet--> model folder --check_lengths--> prompts that fit
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from forebay.agents import prompt_tools, with_max_context
from forebay.config import Component, ConfigError
from forebay.models import context_of, load_tokenizer
from forebay.models.config import TINY
from forebay.models.tiny import DEFAULT_ALPHABET
from forebay.produce import Prompt
from forebay.produce.prompts.dataset import check_prompt_lengths, hold_out, load_prompts, texts_of
from forebay.runs.config import RunConfig, TaskConfig


class TaskData(NamedTuple):
    """The prompts of one task."""

    training: Sequence[Prompt]
    held_out: Sequence[Prompt]
    """Empty for a task that is not evaluated."""
    context: int | None = None
    """Tokens of prompt and response that all of them fit into; None: not looked at yet."""


def load_data(config: RunConfig) -> list[TaskData]:
    """The prompts of every task; those held out are not among those to train on.

    Raises:
        ConfigError: a data source does not fit.
    """
    data = []
    for task in config.tasks:
        try:
            held_out = load_prompts(task.eval_data) if task.eval_data is not None else ()
            training = load_prompts(task.data)
            data.append(TaskData(hold_out(training, held_out) if held_out else training, held_out))
        except ConfigError as error:
            raise ConfigError(f"task {task.name!r}: {error}") from None
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
    if not (extra := sorted(found - set(DEFAULT_ALPHABET))):
        return config
    tiny = tiny.model_copy(update={"alphabet": DEFAULT_ALPHABET + "".join(extra)})
    return config.model_copy(update={"model": config.model.model_copy(update={"tiny": tiny})})


def check_lengths(config: RunConfig, model_folder: Path, data: Sequence[TaskData]) -> list[TaskData]:
    """`data` whose prompts leave room for a response in the model's context, as the run file says it.

    Raises:
        ConfigError: a prompt is too long, or has characters that the model does not know.
    """
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
    training = _checked(config, task, data.training, tokenizer, context) if trains else data.training
    return TaskData(training, held_out, context)


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
    try:
        # An agent's own limit ends an episode early, but a prompt must leave room for something.
        limit = min(context - room, own_limit - 1)
        prompts = check_prompt_lengths(prompts, tokenizer, limit, task.overlong_prompts, tools=tools)
    except ConfigError as error:
        raise ConfigError(f"task {task.name!r}: {error}") from None
    if budget < context:
        # Rendering all prompts again is the price of finding out before the first rollout.
        try:
            check_prompt_lengths(prompts, tokenizer, budget - room, tools=tools)
        except ConfigError as error:
            raise ConfigError(
                f"task {task.name!r}: train.token_budget = {budget} is less than a prompt with "
                f"sample.max_tokens = {room} may have; raise it ({error})"
            ) from None
    return prompts
