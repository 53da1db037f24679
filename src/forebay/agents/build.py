"""From a run file's ``[tasks.agent]`` table to an agent loop."""

from __future__ import annotations

from typing import Any

from forebay.activity import Activities
from forebay.agents.base import AgentLoop, Generator, GroupJudger
from forebay.agents.multi_turn import MultiTurnAgentLoop
from forebay.agents.program import ProgramAgentLoop
from forebay.agents.single_turn import ChatTokenizer, SingleTurnAgentLoop
from forebay.agents.tools import ToolAgentLoop
from forebay.agents.verifiers import VerifiersAgentLoop
from forebay.config import Component, ConfigError, check_arguments, look_up
from forebay.types import SampleParams

AGENTS: dict[str, Any] = {
    "single_turn": SingleTurnAgentLoop,
    "multi_turn": MultiTurnAgentLoop,
    "program": ProgramAgentLoop,
    "tools": ToolAgentLoop,
    "verifiers": VerifiersAgentLoop,
}
"""What ``agent.name`` may be; besides, ``package.module:Class`` with the same first arguments."""

GIVEN = ("rollout_controller", "judger", "tokenizer", "sample_params", "activities")
"""Arguments of every agent loop that the run fills in."""


def build_agent_loop(
    config: Component,
    *,
    rollout_controller: Generator,
    judger: GroupJudger | None,
    tokenizer: ChatTokenizer,
    sample_params: SampleParams,
    activities: Activities | None = None,
) -> AgentLoop:
    """The agent loop that `config` describes; `config.arguments` are its own keyword arguments.

    Raises:
        ConfigError: the name is unknown, or an argument does not fit.
    """
    factory = look_up("agent", config.name, AGENTS)
    check_arguments("agent", config.name, factory, config.arguments, *GIVEN)
    try:
        loop: AgentLoop = factory(
            rollout_controller,
            judger,
            tokenizer,
            sample_params=sample_params,
            activities=activities,
            **config.arguments,
        )
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"agent {config.name!r}: {error}") from error
    return loop
