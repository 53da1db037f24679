"""Agent loops: how a prompt becomes judged rollouts."""

from forebay.agents.base import AgentLoop, Generator, GroupJudger
from forebay.agents.single_turn import (
    ChatTokenizer,
    SingleTurnAgentLoop,
    render_prompt,
    require_chat_template,
)

__all__ = [
    "AgentLoop",
    "ChatTokenizer",
    "Generator",
    "GroupJudger",
    "SingleTurnAgentLoop",
    "render_prompt",
    "require_chat_template",
]
