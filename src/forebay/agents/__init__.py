"""Agent loops: how a prompt becomes judged rollouts."""

from forebay.agents.base import AgentLoop, Generator, GroupJudger
from forebay.agents.build import AGENTS, build_agent_loop
from forebay.agents.single_turn import (
    ChatTokenizer,
    SingleTurnAgentLoop,
    render_prompt,
    require_chat_template,
)

__all__ = [
    "AGENTS",
    "AgentLoop",
    "ChatTokenizer",
    "Generator",
    "GroupJudger",
    "SingleTurnAgentLoop",
    "build_agent_loop",
    "render_prompt",
    "require_chat_template",
]
