"""From a run file's ``[tasks.agent]`` table to an agent loop."""

import inspect
from typing import Any

from forebay.agents.base import AgentLoop, Generator
from forebay.agents.chat.rendering import ChatTokenizer
from forebay.agents.multi_turn import MultiTurnAgentLoop
from forebay.agents.program import ProgramAgentLoop
from forebay.agents.single_turn import SingleTurnAgentLoop
from forebay.agents.tools import ToolAgentLoop
from forebay.config import Component, ConfigError, errors_about, find_component, look_up
from forebay.judges.base import Judge
from forebay.types import SampleParams
from forebay.watching.activity import Activities

AGENTS: dict[str, Any] = {
    "single_turn": SingleTurnAgentLoop,
    "multi_turn": MultiTurnAgentLoop,
    "program": ProgramAgentLoop,
    "tools": ToolAgentLoop,
}
"""The names that ``agent.name`` may have; besides, ``package.module:Class`` with the same first arguments.

The model of each one's ``arguments`` is its `Arguments`."""

GIVEN = ("rollout_controller", "judge", "tokenizer", "sample_params", "activities")
"""Arguments of every agent loop that the run fills in."""


def check_agent(config: Component) -> Any:
    """The class that `config` names, whose arguments fit; no loop is made.

    Raises:
        ConfigError: the name is unknown, or an argument does not fit.
    """
    return find_component("agent", config, AGENTS, *GIVEN)


def prompt_tools(config: Component) -> list[dict[str, Any]] | None:
    """The tools that the agent of `config` tells prompts of, where the data names none; no loop is made.

    Raises:
        ConfigError: the name is unknown, or an argument does not fit.
    """
    # A loop may be made by a function, which has none.
    tell = getattr(check_agent(config), "prompt_tools", None)
    tools: list[dict[str, Any]] | None = None if tell is None else tell(config.arguments)
    return tools


def with_max_context(config: Component, limit: int, *, packed: int) -> Component:
    """`config` with ``max_context = limit``, if its agent has that argument and it is not given.

    Raises:
        ConfigError: the name is unknown, or what is given is no number, or more than the `packed` tokens that
            a trainer takes.
    """
    factory = look_up("agent", config.name, AGENTS)
    # `Arguments` is None where the agent's class has a constructor of its own.
    told = getattr(factory, "Arguments", None) or factory
    if "max_context" not in inspect.signature(told).parameters:
        return config
    given = config.arguments.get("max_context")
    if given is None:
        return config.model_copy(update={"arguments": {**config.arguments, "max_context": limit}})
    if not isinstance(given, int):
        raise ConfigError(f"agent {config.name!r}: max_context must be a number of tokens, got {given!r}")
    if given > packed:
        raise ConfigError(
            f"agent {config.name!r}: max_context = {given} is more than train.token_budget = {packed}, so a "
            f"rollout could be too long to be trained on; lower it or raise the budget"
        )
    return config


def build_agent_loop(
    config: Component,
    *,
    rollout_controller: Generator,
    judge: Judge | None,
    tokenizer: ChatTokenizer,
    sample_params: SampleParams,
    activities: Activities | None = None,
) -> AgentLoop:
    """The agent loop that `config` describes; `config.arguments` are its own keyword arguments.

    Raises:
        ConfigError: the name is unknown, or an argument does not fit.
    """
    factory = check_agent(config)
    with errors_about(f"agent {config.name!r}", TypeError, ValueError):
        loop: AgentLoop = factory(
            rollout_controller,
            judge,
            tokenizer,
            sample_params=sample_params,
            activities=activities,
            **config.arguments,
        )
    return loop
